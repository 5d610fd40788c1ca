"""`qcli replay`: publish messages of a topic's log, or of Parquet files, again."""
