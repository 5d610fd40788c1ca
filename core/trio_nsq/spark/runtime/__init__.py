"""Run tasks in this process, in several, or on Spark.

`engine` has the interfaces and runs tasks in this process, and `processes` in several. `spark_engine` starts Spark, or
connects to a cluster, and runs tasks there; `java` finds a Java installation and starts a JVM.
"""
