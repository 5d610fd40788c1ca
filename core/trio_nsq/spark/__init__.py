"""Spark and Parquet: bulk export and replay of topics, and the data source `nsq`.

`export` writes topics to Parquet files, and `tables` adds these to Delta and Iceberg tables; `replay` publishes Parquet
files. `schemas` has the types of columns, and the documents that describe them; `bodies` decodes Avro and Protobuf.
`runtime` runs their tasks, in this process, in several, or on Spark. `logs` has the places that topics are read from:
brokers; copies and archives of data folders (`segments`); and messages of an nsqd, which `spool` stores until they are
exported. `ranges` has the exported ranges. `places` opens the storage of disks and buckets for them.

`data_source` is the entry point of Spark's data source `nsq`: `source` reads topics and `sink` writes them, `options`
parses their common options, and `versions` has what differs between versions of Spark.

Tasks run in Spark's workers, which may have only the standard library, pyarrow, obstore if files are in a bucket, and
this package as a zip file. So a module that a task imports must not import anything else.
"""
