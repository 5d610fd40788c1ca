"""A local log for the messages of a stock nsqd, which has none of its own to export from.

`spool.Spool` stores messages before they are finished, `records` is the format of its records, and `collect`
consumes a channel into it until an export has enough.
"""
