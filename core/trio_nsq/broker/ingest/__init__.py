"""Ingest: the path of published messages into the log."""
