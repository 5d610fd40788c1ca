"""Fixtures of the client's tests."""

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
    """One more."""
    async with fake_broker() as listening:
        yield listening


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """Runs at the real rate, since real sockets are waited on, and can be moved on by `jump`."""
    return trio.testing.MockClock(rate=1.0)
