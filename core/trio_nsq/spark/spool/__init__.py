"""A local log for the messages of an nsqd, which has no log to export.

`spool.Spool` stores messages before they are acknowledged, in an `NsqdLog` for each nsqd. `records` has the format of
its records, and `collect` consumes a channel into it until an export has enough.
"""
