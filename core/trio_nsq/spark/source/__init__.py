"""The reading side of the data source `nsq`: a topic's log becomes rows of a DataFrame.

`options` checks what the user asked for, `partitions` cuts spans into partitions and reads one, `stream` is
the reader of streaming queries, and `offsets` is the format of its checkpoints.
"""
