"""One broker for the tests of exports; each test has a topic of its own."""

import itertools
from collections.abc import Iterator

import pytest

from cli.support import Cli
from interop.peers import Broker, qcli_serve

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
