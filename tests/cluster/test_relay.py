"""Tests for passing on the bytes of a connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from trio.testing import MockClock, memory_stream_pair

from trio_nsq.server.relay import LINGER_S, PIECE_BYTES, STALL_S, relay


@asynccontextmanager
async def relayed() -> AsyncIterator[
    tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream, trio.Event]
]:
    """The client's end, the server's end, and what is set when `relay` has returned."""
    client, near = memory_stream_pair()
    far, server = memory_stream_pair()
    done = trio.Event()

    async def run() -> None:
        await relay(near, far)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        with trio.fail_after(100 * STALL_S):
            yield client, server, done
        nursery.cancel_scope.cancel()


async def rest(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


async def test_bytes_go_both_ways(autojump_clock: MockClock) -> None:
    async with relayed() as (client, server, _):
        for _ in range(3):
            await client.send_all(b"ask")
            assert await server.receive_some() == b"ask"
            await server.send_all(b"answer")
            assert await client.receive_some() == b"answer"


async def test_the_end_of_the_client_is_passed_on_and_the_answers_still_come(
    autojump_clock: MockClock,
) -> None:
    async with relayed() as (client, server, done):
        await client.send_all(b"x" * 3 * PIECE_BYTES)
        await client.send_eof()
        assert await rest(server) == b"x" * 3 * PIECE_BYTES
        await trio.sleep(10 * LINGER_S)  # the server takes its time
        await server.send_all(b"late")
        assert await client.receive_some() == b"late"
        await server.send_eof()
        assert await rest(client) == b""
        await done.wait()


async def test_the_end_of_the_server_gives_the_client_a_moment(autojump_clock: MockClock) -> None:
    async with relayed() as (client, server, done):
        await server.send_all(b"last")
        await server.send_eof()
        assert await rest(client) == b"last"
        began_s = trio.current_time()
        await done.wait()  # the client does not end its side
        assert trio.current_time() - began_s == LINGER_S
        with pytest.raises(trio.BrokenResourceError):
            await client.send_all(b"x")


async def test_a_client_that_ends_its_side_in_time_is_closed_at_once(autojump_clock: MockClock) -> None:
    async with relayed() as (client, server, done):
        began_s = trio.current_time()
        await server.send_eof()
        assert await rest(client) == b""
        await client.send_eof()
        await done.wait()
        assert trio.current_time() == began_s


@pytest.mark.parametrize("lost", ["client", "server"])
async def test_a_lost_connection_ends_the_other(autojump_clock: MockClock, lost: str) -> None:
    async with relayed() as (client, server, done):
        one, other = (client, server) if lost == "client" else (server, client)
        await trio.aclose_forcefully(one)
        await other.send_all(b"x")  # nobody takes it
        await done.wait()
        with pytest.raises(trio.BrokenResourceError):
            await other.send_all(b"x")


class Stuck(trio.abc.HalfCloseableStream):
    """A stream that takes nothing, and on which nothing arrives."""

    def __init__(self) -> None:
        self.closed = trio.Event()

    async def send_all(self, data: object) -> None:
        await trio.sleep_forever()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.sleep_forever()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        self.closed.set()


class Lost(Stuck):
    """A stream that shows only to those that send that it is broken."""

    async def send_all(self, data: object) -> None:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError


@pytest.mark.parametrize("is_client", [True, False])
async def test_one_lost_direction_ends_both(autojump_clock: MockClock, is_client: bool) -> None:
    lost = Lost()
    near, other = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay, *((lost, near) if is_client else (near, lost)))
        await other.send_all(b"x")
        with trio.fail_after(STALL_S / 2):
            assert await rest(other) == b""
        await lost.closed.wait()


async def test_a_client_that_takes_nothing_is_closed(autojump_clock: MockClock) -> None:
    far, server = memory_stream_pair()
    client = Stuck()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay, client, far)
        await server.send_all(b"x")
        await client.closed.wait()
        assert trio.current_time() >= STALL_S
        assert await rest(server) == b""


async def test_a_server_that_takes_nothing_may_take_its_time(autojump_clock: MockClock) -> None:
    client, near = memory_stream_pair()
    server = Stuck()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay, near, server)
        await client.send_all(b"x")
        await trio.sleep(10 * STALL_S)
        assert not server.closed.is_set()
        nursery.cancel_scope.cancel()
    assert server.closed.is_set()


async def test_at_most_a_piece_is_held(autojump_clock: MockClock) -> None:
    near, far = Stuck(), Endless()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay, near, far)
        await trio.testing.wait_all_tasks_blocked()
        assert far.sent == PIECE_BYTES
        nursery.cancel_scope.cancel()


class Endless(Stuck):
    """A stream on which as much arrives as is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        assert max_bytes is not None
        self.sent += max_bytes
        return bytes(max_bytes)
