"""Run tasks, in this process or on Spark.

`engine` has the interfaces and runs tasks in this process. `spark_engine` starts Spark, or joins a cluster, and runs
them there; `java` finds and starts a Java for it.
"""
