"""The reading side of the data source `nsq`: a topic's log becomes rows of a DataFrame.

`readers` has the classes that Spark calls, and the offsets of a stream. `options` checks what the user asked for.
`partitions` splits spans into partitions and reads one.
"""
