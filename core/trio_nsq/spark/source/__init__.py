"""Reading with the data source `nsq`: a topic's log as rows of a DataFrame.

`readers` has the classes that Spark calls, and the offsets of a stream. `options` parses the options. `partitions`
splits spans into partitions and reads one.
"""
