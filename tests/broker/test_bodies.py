"""Large bodies that have begun to arrive: how many of them at a time, and what becomes of the others."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.support import RawClient, connected, mpub, running_broker, settle
from trio_nsq.broker.tcp.bodies import PATIENCE_S, Bodies

LARGE = mpub("t", *5 * [bytes(1_000_000)])
AT_ONCE = 13
"""So many bodies of 5 MB are coming at a time: 64 MiB."""


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that stands still until a test moves it."""
    return trio.testing.MockClock()


async def test_those_that_are_too_many_wait_and_get_room_from_those_that_are_done(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(20)]
        arrived: list[RawClient] = []

        async def begin(client: RawClient) -> None:
            await client.send(LARGE[:-1])
            arrived.append(client)

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(begin, client)
            await settle()
            assert len(arrived) == AT_ONCE
            for done in range(20):  # whoever has room ends its body, and another has the room
                await settle()
                assert len(arrived) == min(AT_ONCE + done, 20)
                await arrived[done].send(LARGE[-1:])
                await arrived[done].ok()


async def test_whoever_stalls_is_closed_when_others_wait(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    closed: list[RawClient] = []

    async def note_close(client: RawClient) -> None:
        while (frame := await client.frame()) is not None:
            assert frame == (0, b"_heartbeat_")
        closed.append(client)

    async with running_broker(tmp_path / "d", sync="interval") as bound, AsyncExitStack() as stack:
        stalled = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(AT_ONCE)]
        async with trio.open_nursery() as nursery:
            for client in stalled:
                nursery.start_soon(client.send, LARGE[:-1])
            await settle()
            for client in stalled:
                nursery.start_soon(note_close, client)
            clock.jump(PATIENCE_S - 1)
            await settle()
            other = await stack.enter_async_context(connected(bound.tcp_address))
            await other.publish("t", b"a small one needs no room")
            nursery.start_soon(other.send, LARGE)
            await settle()
            assert not closed
            clock.jump(1)
            await other.ok()
            await settle()
            assert len(closed) == 1
            nursery.cancel_scope.cancel()


class _Client:
    peer = "a client"

    def close(self) -> None:
        raise AssertionError("nobody is slow here")


async def test_a_body_that_is_larger_than_all_room_comes_alone() -> None:
    bodies = Bodies(10)
    large, small, other = _Client(), _Client(), _Client()
    assert bodies.admit(large, 11)
    assert not bodies.admit(small, 1)
    bodies.leave(large)
    assert bodies.admit(small, 1)
    assert not bodies.admit(large, 11)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bodies.wait, large, 11)
        await settle()
        assert not bodies.admit(other, 1)  # it does not pass those that wait
        bodies.leave(small)
    assert bodies.admit(large, 5)


async def test_a_client_that_is_gone_waits_no_more() -> None:
    bodies = Bodies(10)
    first, gone, last = _Client(), _Client(), _Client()
    assert bodies.admit(first, 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bodies.wait, gone, 10)
        await settle()
        nursery.cancel_scope.cancel()
    bodies.leave(gone)
    bodies.leave(first)
    assert bodies.admit(last, 10)
