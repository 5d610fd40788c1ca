"""Registers the data source `nsq`: Spark imports every module whose name begins with `pyspark_`.

If one of these modules cannot be imported, Spark finds none of their data sources, so it imports no heavy packages.
"""

from trio_nsq.spark.data_source import NsqDataSource as DefaultSource

__all__ = ["DefaultSource"]
