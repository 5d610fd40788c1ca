"""Fixtures for the tests of commands: one broker for all tests, and a topic for each test."""

import itertools
import os
from collections.abc import Iterator

import pytest

from cli.support import Cli, CliHere, Result, Run, run_in_process
from interop.peers import Broker, nsqd, qcli_serve

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A `qcli serve`, or an nsqd if the environment has QCLI_TEST_BROKER=nsqd."""
    run = nsqd if os.environ.get("QCLI_TEST_BROKER") == "nsqd" else qcli_serve
    with run(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


@pytest.fixture
def qcli(broker: Broker, run_here: Run) -> Cli:
    """Runs commands against the broker: to their end in this process, and in the background as processes."""
    return CliHere(broker.tcp_address, broker.http_address, run=run_here)


@pytest.fixture
def topic() -> str:
    """A new name for a topic."""
    return f"topic{next(_numbers)}"


@pytest.fixture
def nowhere(run_here: Run) -> Cli:
    """Runs commands in this process, with an address where no broker listens."""
    return CliHere("127.0.0.1:1", "127.0.0.1:1", run=run_here)


@pytest.fixture
def run_here(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command in this process, in a tenth of the time of a new process: `run_here(qcli, "stat")`."""

    def run_here(cli: Cli, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        return run_in_process(capfdbinary, cli, *args, stdin=stdin, env=env)

    return run_here


@pytest.fixture
def log_here(nowhere: Cli, run_here: Run) -> Run:
    """Runs `qcli log` in this process: `log_here("dump", folder)`."""
    return lambda *args: run_here(nowhere, "log", *args)
