"""The writing side of the data source `nsq`: rows of a DataFrame become messages.

`writers` has the classes that Spark calls, `options` checks what the user asked for, `batches` cuts rows into
numbered batches, and `task` publishes the rows of one partition as an idempotent producer.
"""
