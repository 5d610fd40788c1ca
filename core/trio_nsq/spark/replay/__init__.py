"""Publish Parquet files to a topic, each row once, however often the job is interrupted.

`job.ReplayJob` keeps the state of a job in a folder. `files` reads the footers of the files, `filter` lets Spark
select rows, `pieces` splits the rows into pieces, `rows` reads the rows of a piece in order, `task` publishes one
piece, and `results` counts what was published.
"""
