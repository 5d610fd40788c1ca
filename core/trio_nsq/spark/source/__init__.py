"""The reading side of the data source `nsq`: a topic's log becomes rows of a DataFrame.

`batch` and `stream` have the readers that Spark calls, `options` checks what the user asked for, `partitions` splits
spans into partitions and reads one, and `offsets` is the format of a stream's checkpoints.
"""
