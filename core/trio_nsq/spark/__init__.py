"""Bulk export of topics to Parquet.

`ranges`, `manifest` and `layout` are plain data and decisions; `broker_log` reads a broker, `storage` is where files
go, `columns` and `json_columns` make Arrow tables, `export` writes one range: it knows nothing of Spark. `run` plans,
has an engine (`engines`) work through the plan, and keeps the books.

A task imports the standard library, pyarrow, and of this package only what needs nothing else.
"""
