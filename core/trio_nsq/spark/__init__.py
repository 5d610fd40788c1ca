"""Spark and Parquet: bulk export and replay of topics, and the data source `nsq`.

`export` writes topics to Parquet files and `replay` publishes Parquet files; `runtime` runs their tasks, in this
process, in several, or on Spark. `logs` has the places that topics are read from; `segments` reads them without a
broker. `data_source` is the entry point of Spark's data source `nsq`: `source` reads a topic and `sink` writes one;
`options` parses their common options. `spool` stores messages of an nsqd until they are exported. `storage` reads and
writes files, and `ranges` has the exported ranges.

Tasks run in Spark's workers, which may have only the standard library, pyarrow, zlib-ng and this package as a zip
file. So a module that a task imports must not import anything else.
"""
