"""Fixtures for the tests of the client."""

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
import trio.testing

from client.support.fake_broker import FakeBroker, fake_broker
from interop.peers import Broker, qcli_serve

_topics = map("topic{}".format, count())


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    """A broker that follows the test's script."""
    async with fake_broker() as listening:
        yield listening


@pytest.fixture
async def other_broker() -> AsyncIterator[FakeBroker]:
    """Another scripted broker."""
    async with fake_broker() as listening:
        yield listening


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that runs at the real rate, because real sockets are awaited; `jump` moves it forward."""
    return trio.testing.MockClock(rate=1.0)


@pytest.fixture(scope="module")
def real_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker for all tests of a module; each uses a topic of its own."""
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as broker:
        yield broker


@pytest.fixture
def topic(real_broker: Broker) -> str:
    """A new topic of the real broker with the channel `c`."""
    real_broker.create(name := next(_topics), "c")
    return name
