"""Tables with a key as Spark itself reads them: with delta-spark, and with Iceberg's runtime and catalog for Java.

Neither library supports the newest Spark, so the tests need Spark 4.0: `make oldest-spark`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from cli.support import Cli
from interop import build
from spark.support import export
from spark.table_support import DELTA, ICEBERG, use_catalog
from trio_nsq.spark.runtime.java import java_home
from trio_nsq.spark.tables.target import TableTarget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not pyspark.__version__.startswith("4.0."),
        reason="delta-spark and Iceberg support older versions of Spark",
    ),
]
_TIMEOUT_S = 240.0


def rows_in_spark(target: TableTarget, folder: Path, *columns: str) -> list[dict[str, Any]]:
    try:
        jars = build.spark_readers()
    except build.PeerUnavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"a peer is missing: {reason}", pytrace=False)
        pytest.skip(str(reason))
    place = str(folder) if target == DELTA else f"{target.catalog}.{target.name}"
    program = [sys.executable, str(Path(__file__).with_name("tables_program.py"))]
    arguments = [",".join(map(str, jars)), target.kind.value, place, ",".join(columns)]
    with java_home() as home:
        catalog = {"CATALOG_URI": f"jdbc:sqlite:{folder.parent}/catalog.db", "CATALOG_WAREHOUSE": str(folder)}
        environment = os.environ | {"JAVA_HOME": str(home), "PYSPARK_PYTHON": sys.executable} | catalog
        done = subprocess.run(
            [*program, *arguments], env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
def test_table_with_a_key(
    target: TableTarget, qcli: Cli, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced and deleted rows are gone, also after small files were merged."""
    use_catalog(monkeypatch, tmp_path)
    folder = tmp_path / "t"
    options = [
        *str(target).split(),
        "--json",
        "--key",
        "user",
        "--op",
        "op",
        "--partition-by",
        "bucket(2,user)",
    ]
    for number in range(9):
        changes = [{"user": n, "n": number, "op": "u"} for n in range(number % 3, 6)]
        changes.append({"user": number % 2, "op": "d"})
        qcli.publish(topic, [json.dumps(each).encode() for each in changes])
        export(qcli, topic, folder, *options, "--compact")
    found = rows_in_spark(target, folder, "user", "n")
    assert sorted((row["user"], row["n"]) for row in found) == [(2, 8), (3, 8), (4, 8), (5, 8)]
