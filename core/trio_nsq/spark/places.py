"""The places that exports write to and replays read from: those of `trio_nsq.storage`, and Hadoop's file system.

Spark's configuration has settings for both of them.
"""

import os
import sys
from pathlib import Path

from ..storage import Access, Storage, local_path
from ..storage import access as storage_access
from ..storage import opening as storage_opening
from ..storage.storage_uri import HADOOP, StorageURI, parse_place
from .hadoop import HadoopStorage


def storage_at(place: str) -> Storage:
    """Return the storage of a place, see `trio_nsq.storage.storage_at`; it may also begin with `hdfs://`."""
    if local_path(place) is None and parse_place(place).kind == HADOOP:
        return HadoopStorage(place)
    return storage_opening.storage_at(place, spark_settings)


def keep_secrets(place: str) -> str:
    """Keep the settings of a place, see `trio_nsq.storage.keep_secrets`."""
    return storage_access.keep_secrets(place, spark_settings)


def access_to(uri: StorageURI) -> Access:
    """Return the settings to reach a bucket, see `trio_nsq.storage.access.access_to`."""
    return storage_access.access_to(uri, spark_settings)


def spark_settings() -> dict[str, str]:
    """Return the settings of Hadoop's file systems in Spark's configuration, without `spark.hadoop.`."""
    found: dict[str, str] = {}
    folder = os.environ.get("SPARK_CONF_DIR")
    if folder is None and (home := os.environ.get("SPARK_HOME")) is not None:
        folder = f"{home}/conf"
    if folder is not None:
        try:
            lines = (Path(folder) / "spark-defaults.conf").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            name, *value = line.replace("=", " ", 1).split(None, 1)[:2] if line.strip() else ("",)
            found[name] = value[0].strip() if value else ""
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # in spark-submit; its JVM has what the command line said
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()
        found |= dict(SparkConf().getAll())
    elif (spark := sys.modules.get("pyspark")) is not None:
        context = getattr(getattr(spark, "SparkContext", None), "_active_spark_context", None)
        if context is not None:
            found |= dict(context.getConf().getAll())
    prefix = "spark.hadoop."
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
