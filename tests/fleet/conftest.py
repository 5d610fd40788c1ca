"""Fixtures for the tests of several brokers: one fleet for all tests, and a topic for each test."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.support import Cli, Result, Run, run_in_process
from fleet.support import Fleet, running_fleet

_numbers = itertools.count()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three brokers of ours, one nsqd and two discovery services. No test ends one of them."""
    with running_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet for this test alone, which may end its processes."""
    with running_fleet(tmp_path) as running:
        yield running


@pytest.fixture
def topic() -> str:
    """A new name for a topic."""
    return f"topic{next(_numbers)}"


@pytest.fixture
def run_here(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command in this process, in a tenth of the time of a new process: `run_here(cli, "stat")`."""

    def run_here(cli: Cli, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        return run_in_process(capfdbinary, cli, *args, stdin=stdin, env=env)

    return run_here
