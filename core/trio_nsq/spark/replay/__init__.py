"""Publish Parquet files to a topic, each row once, even if the job is interrupted.

`job.ReplayJob` keeps the state of a job in a folder. `files` reads the footers of the files, `filter` selects rows with
Spark, `pieces` splits the rows into pieces, `rows` reads the rows of a piece in order, and `task` publishes one piece.
`request` has the request and the results.
"""
