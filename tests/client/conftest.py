"""Fixtures for the tests of the client."""

from collections.abc import AsyncIterator

import pytest
import trio.testing

from client.support.fake_broker import FakeBroker, fake_broker


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
