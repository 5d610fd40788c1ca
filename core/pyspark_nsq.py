"""Lets Spark find the data source `nsq` by its name: it imports every module that is called `pyspark_*`.

If one of these cannot be imported, Spark finds no source of any of them: nothing heavy belongs here.
"""

from trio_nsq.spark.data_source import NsqDataSource as DefaultSource

__all__ = ["DefaultSource"]
