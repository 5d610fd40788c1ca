"""Prints the rows of a table as Spark reads it, as JSON: `tables_program.py JARS FORMAT TABLE COLUMN,...`.

FORMAT is `delta`, whose TABLE is a folder, or `iceberg`, whose TABLE is `CATALOG.NAMESPACE.TABLE`. The URI of the
catalog's database is in the environment, as for pyiceberg.
"""

import json
import os
import sys

from pyspark.sql import SparkSession


def main(jars: str, kind: str, table: str, columns: str) -> None:
    settings = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    if kind == "delta":
        settings["spark.sql.extensions"] = "io.delta.sql.DeltaSparkSessionExtension"
        settings["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    else:
        catalog = table.partition(".")[0]
        settings |= {
            f"spark.sql.catalog.{catalog}": "org.apache.iceberg.spark.SparkCatalog",
            f"spark.sql.catalog.{catalog}.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            f"spark.sql.catalog.{catalog}.uri": os.environ["CATALOG_URI"],
            f"spark.sql.catalog.{catalog}.warehouse": os.environ["CATALOG_WAREHOUSE"],
            f"spark.sql.catalog.{catalog}.jdbc.schema-version": "V1",
        }
    builder = SparkSession.builder.master("local[1]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    frame = spark.read.format("delta").load(table) if kind == "delta" else spark.table(table)
    rows = [row.asDict() for row in frame.select(columns.split(",")).collect()]
    print(json.dumps(rows))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
