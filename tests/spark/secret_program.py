"""A program that uses a secret with Spark in all ways, and tells where Spark shows it. For `test_secrets`.

It is a process of its own, because it needs Spark's user interface and event log. Its argument is a JSON object: the
secret, and options for the data source that do without it.
"""

import io
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark.sql import DataFrame, SparkSession

from trio_nsq.access.secret import Secret
from trio_nsq.client.connection.tls import TLSFiles
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.options import BrokerAccess
from trio_nsq.spark.replay.job import open_job
from trio_nsq.spark.replay.request import ReplayRequest
from trio_nsq.spark.runtime.java import find_java_home, start_jvm
from trio_nsq.spark.runtime.spark_engine import SparkEngine

PAGES = ("SQL/", "environment/", "jobs/", "stages/", "StreamingQuery/", "executors/")


def explained(frame: Any) -> str:
    """Return all forms of the plans of a frame or a query."""
    with redirect_stdout(io.StringIO()) as shown:
        frame.explain(True)
        if isinstance(frame, DataFrame):
            frame.explain("formatted")
            frame.explain("cost")
    return shown.getvalue()


def pages(spark: SparkSession) -> Iterator[tuple[str, str]]:
    """Yield the pages of the user interface, and the answers of its API."""
    url, app = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId
    names = [f"api/v1/applications/{app}/{name}" for name in ("environment", "jobs", "stages", "executors")]
    names += [f"api/v1/applications/{app}/sql?details=true&planDescription=true", *PAGES]
    names += [f"SQL/execution/?id={number}" for number in range(8)]
    for name in names:
        with suppress(urllib.error.HTTPError):
            yield name, urllib.request.urlopen(f"{url}/{name}").read().decode()


def use(spark: SparkSession, folder: Path, secret: str, plain: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Write, read and stream with the secret; yield the plans, and errors."""
    rows = spark.createDataFrame([(b"one",)], ["body"])
    with_text = {"authSecret": secret, "tlsRootCaFile": plain["tlsRootCaFile"]}
    both = {name: plain[name] for name in ("topic", "nsqdHttpAddress")} | with_text
    for options in (plain, both):
        rows.write.format("nsq").options(**options).mode("append").save()
        frame = spark.read.format("nsq").options(**options).load()
        assert frame.count()
        yield "batch", explained(frame)
    words = ", ".join(f"{name} '{value}'" for name, value in both.items())
    spark.sql(f"CREATE TEMPORARY VIEW secret_view USING nsq OPTIONS ({words})")
    yield "view", explained(spark.sql("SELECT * FROM secret_view"))
    spark.sql("CREATE TABLE messages USING nsq")
    words = words.replace(" '", " = '")
    yield "table", explained(spark.sql(f"SELECT * FROM messages WITH ({words})"))
    assert spark.sql(f"SELECT * FROM messages WITH ({words})").count()
    spark.sql("DROP TABLE messages")
    stream = spark.readStream.format("nsq").options(**both).load()
    yield "stream", explained(stream)
    sink = stream.select("body").writeStream.format("nsq").options(**both | {"topic": "copy"})
    query = sink.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    yield "query", explained(query)
    wrong = both | {"authSecret": f"{secret}-revoked"}
    for attempt in (
        lambda: spark.read.format("nsq").options(**wrong).load().count(),
        lambda: rows.write.format("nsq").options(**wrong).mode("append").save(),
    ):
        text = ""
        try:
            attempt()
        except Exception as error:
            text = str(error)
        assert "INVALID_TOKEN" in text
        yield "error", text


def use_tasks(spark: SparkSession, folder: Path, secret: str, plain: dict[str, str]) -> None:
    """Export and replay as `qcli to-parquet` and `qcli replay` do."""
    engine = SparkEngine(spark.sparkContext, "qcli to-parquet")
    tls, address = TLSFiles(plain["tlsRootCaFile"]), plain["nsqdHttpAddress"]
    request = ExportRequest(plain["topic"], str(folder / "export"))
    place = BrokerPlace(address, plain["topic"], tls, secret=Secret(secret))
    with open_export(request, [place]) as export:
        export.run(engine, export.plan([place]), lambda *_: None)
        assert export.result.messages == 2
    (folder / "files").mkdir()
    pq.write_table(pa.table({"body": [b"one"]}), folder / "files" / "a.parquet")
    replay = ReplayRequest(str(folder / "files"), "replayed", address)
    with open_job(folder / "jobs", "j", replay) as job:
        job.plan(None)
        job.run(engine, job.tasks(access=BrokerAccess(tls, Secret(secret))), lambda *_: None)
        assert job.result.published == 1


def main(folder: Path, secret: str, plain: dict[str, str]) -> list[str]:
    """Return where the secret is shown."""
    (folder / "events").mkdir()
    settings: dict[str, Any] = {
        "spark.master": "local[2]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{folder}/events",
    }
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # As in qcli: Python workers start faster than with Spark's scripts.
    jvm = start_jvm(find_java_home()[0], Path(pyspark.__file__).parent, settings, sys.stderr.buffer)
    os.environ |= {"PYSPARK_GATEWAY_PORT": str(jvm.port), "PYSPARK_GATEWAY_SECRET": jvm.secret}
    spark = SparkSession.builder.config(map=settings).getOrCreate()
    shown = list(use(spark, folder, secret, plain))
    use_tasks(spark, folder, secret, plain)
    shown += pages(spark)
    spark.stop()
    logs = [path for path in (folder / "events").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in logs) > 10_000
    stored = [path for name in ("checkpoint", "jobs", "export") for path in (folder / name).rglob("*")]
    shown += [(str(path), path.read_text(errors="replace")) for path in (*logs, *stored) if path.is_file()]
    return [name for name, text in shown if secret in text]


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(main(Path(task["folder"]), task["secret"], task["options"])))
