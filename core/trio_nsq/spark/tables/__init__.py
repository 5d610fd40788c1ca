"""Delta and Iceberg tables of exported files, without a JVM.

An export writes the same Parquet files as without a table. When a round is complete, its files are committed to the
table, once: each commit of an export has a number, which the table stores in the same transaction.
"""
