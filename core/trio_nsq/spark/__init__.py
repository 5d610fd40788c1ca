"""Spark and Parquet: bulk export and replay of topics, and the data source `nsq`.

`export` writes topics to Parquet files and `replay` publishes Parquet files; `runtime` runs their tasks, in
this process or on Spark. `data_source` is the entry point of Spark's data source `nsq`: `source` reads a
topic and `sink` writes one. `spool` keeps messages of a stock nsqd until they are exported. `broker_log`
reads a broker's log, `client.http` publishes to one, `storage` is where files go, and `ranges` calculates
with spans of sequences.

Tasks run in Spark's workers: what they import is the standard library, pyarrow, and this package, which
travels as a zip file. The modules of `export`, `replay` and `runtime.engine` must therefore not import
anything else.
"""
