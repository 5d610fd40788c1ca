"""One broker and one Spark for all tests of this folder; each test has a topic of its own."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.support import ToParquet, run_in_process
from trio_nsq.spark.runtime.spark_engine import SparkEngine, open_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Our broker."""
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as running:
        yield running


@pytest.fixture
def qcli(broker: Broker) -> Cli:
    """Commands that find that broker."""
    return Cli(broker.tcp_address, broker.http_address)


@pytest.fixture
def topic() -> str:
    """The name of a topic nobody has used."""
    return f"topic{next(_numbers)}"


@pytest.fixture(scope="session")
def engine() -> Iterator[SparkEngine]:
    """Spark as the engine of exports, which tries tasks twice; there can be one in a process."""
    with open_spark("local[2,2]") as running:
        yield running


@pytest.fixture(scope="session")
def spark(engine: SparkEngine) -> "SparkSession":
    """The same Spark, for what a user does with it. There are few rows in these tests: no plan is worth much."""
    session = engine.session()
    for name, value in (
        ("session.timeZone", "UTC"),
        ("shuffle.partitions", "1"),
        ("adaptive.enabled", "false"),
        ("codegen.wholeStage", "false"),
    ):
        session.conf.set(f"spark.sql.{name}", value)
    return session


@pytest.fixture
def to_parquet(qcli: Cli) -> ToParquet:
    """Runs `to-parquet` in this process."""
    return lambda *args, cli=qcli: run_in_process(cli, "to-parquet", *map(str, args))
