"""Shared by the trials of exports: a fleet of brokers that are killed, exports, and the files of their tables."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interop.peers import Broker, free_address, qcli_serve

CATALOG = "local"
PATIENCE_S = 1800.0


def use_catalog(folder: Path) -> None:
    """Configure the Iceberg catalog, in a database in a folder, for this process and those that it starts."""
    os.environ[f"PYICEBERG_CATALOG__{CATALOG.upper()}__TYPE"] = "sql"
    os.environ[f"PYICEBERG_CATALOG__{CATALOG.upper()}__URI"] = f"sqlite:///{folder}/catalog.db"


@dataclass
class Fleet:
    """The brokers, which are killed and started again at the same addresses.

    Attributes:
        count: The number of brokers.
        addresses: Their HTTP addresses.
        tcp_addresses: Their TCP addresses, in the same order.
        running: Those that run, by HTTP address.
    """

    folder: Path
    count: int
    addresses: list[str] = field(init=False)
    tcp_addresses: list[str] = field(init=False)
    running: dict[str, tuple[Broker, ExitStack]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses, self.tcp_addresses = (
            [free_address() for _ in range(self.count)] for _ in ("http", "tcp")
        )

    def start(self, address: str) -> Broker:
        """Start the broker with this HTTP address."""
        stack = ExitStack()
        number = self.addresses.index(address)
        flags = (
            f"--http-address={address}",
            f"--tcp-address={self.tcp_addresses[number]}",
            "--sync=interval",
        )
        broker = stack.enter_context(qcli_serve(self.folder / f"broker{number}", *flags))
        self.running[address] = broker, stack
        return broker

    def kill(self, address: str) -> None:
        """Kill the broker with this HTTP address."""
        broker, stack = self.running.pop(address)
        broker.process.kill()
        broker.process.wait()
        stack.close()

    def close(self) -> None:
        """Stop those that run."""
        for _, stack in self.running.values():
            stack.close()


@contextmanager
def running(words: Sequence[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `qcli` with these words until the block ends. It is killed then; its output is appended to a file."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "qcli", *words], stdout=output, stderr=output, env=os.environ | env
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stats(status: str) -> dict[str, Any] | None:
    """Return `/stats` of the export at an address; None: it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{status}/stats", timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return None


def wait_until_exported(status: str, topics: Collection[str], begun_s: float) -> str:
    """Wait until an export that was started after the last message has exported these topics.

    Raises RuntimeError: it has not after `PATIENCE_S`.
    """
    found = None
    while time.monotonic() < begun_s + PATIENCE_S:
        time.sleep(1)
        if (found := stats(status)) is None:
            continue
        done = {each["topic"] for each in found["topics"] if each["last_round_at"] and not each["error"]}
        if done.issuperset(topics) and found["healthy"] and found["rounds"] > 1:
            return f"{len(done)} topics, {found['rounds']} rounds"
    raise RuntimeError(f"not exported in {PATIENCE_S:g} s: {found}")


def delta_files(folder: Path) -> list[str]:
    """Return the files of a Delta table."""
    from deltalake import DeltaTable

    return [str(each) for each in DeltaTable(folder).file_uris()]


def iceberg_files(name: str) -> list[str]:
    """Return the files of a table of the catalog."""
    from pyiceberg.catalog import load_catalog

    tasks = load_catalog(CATALOG).load_table(name).scan().plan_files()
    return [task.file.file_path.removeprefix("file://") for task in tasks]


@contextmanager
def spark() -> Iterator[Any]:
    """Start Spark, and yield the session."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
