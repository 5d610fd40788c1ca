"""A local log for the messages of a stock nsqd, which keeps no log that could be exported.

`spool.Spool` stores messages before they are acknowledged, in a `NsqdLog` for each nsqd; `records` is the
format of its records, and `collect` consumes a channel into it until an export has enough.
"""
