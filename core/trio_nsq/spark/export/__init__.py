"""Export a topic to Parquet files: one file per range of sequences, and a manifest of the ranges that are done.

`job.ExportJob` plans the ranges of an `ExportRequest` and has an engine run a `task.ExportTask` for each. `manifest`
has the planned and the exported ranges, which `state` keeps with the results of tasks and the commits to a table.
`log_queries` leaves out brokers that do not answer. `layout` has the columns and names of the files. `columns` converts
messages to Arrow tables, which `files` writes: `json_columns` has the fields of their bodies, `column_arrays` makes the
array of each, and `json_values` its values. `sampling` infers the layout of a new folder,
and `widening` converts its files to a later one.
"""
