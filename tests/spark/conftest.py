"""Fixtures for the tests of Spark and Parquet: one broker and one Spark for all tests, and a topic for each
test.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.class_archive import fast_starts
from spark.support import ToParquet, run_in_process
from trio_nsq.spark.runtime.spark_engine import SparkEngine, open_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark.registries import Registry, ScriptedRegistry

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A `qcli serve`."""
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as running:
        yield running


@pytest.fixture
def qcli(broker: Broker) -> Cli:
    """Runs `qcli` commands against the broker."""
    return Cli(broker.tcp_address, broker.http_address)


@pytest.fixture
def topic() -> str:
    """A new name for a topic."""
    return f"topic{next(_numbers)}"


@pytest.fixture(scope="session")
def engine() -> Iterator[SparkEngine]:
    """Spark as an engine, with two attempts per task. A process can have only one."""
    with fast_starts(), open_spark("local[2,2]") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _spark_starts_fast() -> Iterator[None]:
    """Let Spark start with the class archive, here and in the processes of the tests."""
    with fast_starts():
        yield


@pytest.fixture(scope="session")
def spark(engine: SparkEngine) -> "SparkSession":
    """The session of the same Spark."""
    session = engine.session()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


@pytest.fixture
def to_parquet(qcli: Cli) -> ToParquet:
    """Run `to-parquet` in this process."""
    return lambda *args, cli=qcli: run_in_process(cli, "to-parquet", *map(str, args))


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Registry]":
    """An Apicurio, a schema registry with Confluent's API."""
    from spark.registries import apicurio

    with apicurio(tmp_path_factory.mktemp("apicurio")) as running:
        yield running


@pytest.fixture
def scripted() -> "Iterator[ScriptedRegistry]":
    """A schema registry that answers as the test says."""
    from spark.registries import scripted_registry

    with scripted_registry() as running:
        yield running
