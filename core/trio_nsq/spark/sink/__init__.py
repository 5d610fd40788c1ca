"""Writing with the data source `nsq`: rows of a DataFrame as messages.

`writers` has the classes that Spark calls, `options` parses the options, `batches` splits rows into numbered batches,
and `task` publishes the rows of one partition with idempotent producers.
"""
