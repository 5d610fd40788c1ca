"""Export a topic to Parquet files: one file per range of sequences, and a manifest of the ranges that are done.

`job.ExportJob` plans the ranges and has an engine run a `task.ExportTask` for each. `manifest` and `layout`
are plain data: which ranges are planned and written, and what the files look like. `columns` and
`json_columns` make Arrow tables out of messages.
"""
