"""Bulk export of topics to Parquet, and the data source `nsq`.

`ranges`, `manifest` and `layout` are plain data and decisions; `broker_log` reads a broker, `storage` is where files
go, `columns` and `json_columns` make Arrow tables, `export` writes one range: it knows nothing of Spark. `run` plans,
has an engine (`engines`) work through the plan, and keeps the books.

`data_source` is what Spark looks up: `source_options` and `source_reading` are for all who read, `stream_offsets` says
what a checkpoint holds, `stream_reader` asks for it. `data_sink` is for those who write: `sink_batches` cuts their rows
and numbers the batches, `sink_task` publishes them, with `publish_once`.

Back again: `replay_source` looks at Parquet files, `replay_filter` has Spark choose rows, `replay_pieces` cuts, and
`replay_job` keeps the books of a replay; `replay_rows` reads, and `replay` publishes one piece, numbered for
`publish_once`.

A task imports the standard library, pyarrow, and of this package only what needs nothing else.
"""
