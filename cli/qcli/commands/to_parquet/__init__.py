"""`qcli to-parquet`: export messages to Parquet files."""
