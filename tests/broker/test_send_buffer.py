"""Tests for the write side of a connection, with small socket buffers."""

import socket
from collections.abc import Iterator
from random import Random

import pytest
import trio
import trio.testing

from broker.support import settle
from trio_nsq.event_loop.reactor import SendBuffer

RANDOM = Random(1)


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The broker's end and the client's end; both non-blocking."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ours, theirs:
        yield ours, theirs


async def read_all(sock: socket.socket, size: int) -> bytes:
    """Read exactly this many bytes."""
    data = b""
    with trio.fail_after(20):
        while len(data) < size:
            await trio.lowlevel.wait_readable(sock)
            data += sock.recv(65536)
    return data


def read_what_is_there(sock: socket.socket) -> None:
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        pass


def fill(buffer: SendBuffer) -> bytes:
    """Put data and flush until the socket is full; return the data."""
    put = b""
    while not buffer.full:
        put += (part := RANDOM.randbytes(3001))
        buffer.put(part)
        buffer.flush()
    return put


async def test_everything_arrives_in_order_if_the_socket_accepts_it_in_pieces(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    buffer = SendBuffer(ours)
    expected = b""
    async with trio.open_nursery() as nursery:
        for _ in range(3):  # full, empty, and full again
            results: list[bool] = []

            async def drain(results: list[bool]) -> None:
                results.append(await buffer.drain())

            nursery.start_soon(drain, results)
            await settle()
            expected = fill(buffer)
            for size in range(600):  # more parts than one system call accepts, some of them empty
                expected += (part := RANDOM.randbytes(size % 50))
                buffer.put(memoryview(part) if size % 3 else part)
            buffer.flush()
            assert not results
            assert await read_all(theirs, len(expected)) == expected
            await buffer.emptied()
            await settle()
            assert results == [True]
            assert not buffer.full


async def test_blocked_socket_times_out(
    pair: tuple[socket.socket, socket.socket], clock: trio.testing.MockClock
) -> None:
    """The timeout when the socket becomes full applies, and restarts when the socket accepts data."""
    ours, theirs = pair
    buffer = SendBuffer(ours)
    results: list[bool] = []

    async def drain() -> None:
        results.append(await buffer.drain())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        await settle()
        buffer.patience_s = 2
        fill(buffer)
        buffer.put(bytes(1_000_000))
        for _ in range(3):
            await settle()
            clock.jump(1.5)
            await settle()
            read_what_is_there(theirs)
        assert not results
        await settle()
        clock.jump(2)
    assert results == [False]


async def test_lost_connection_ends_every_wait(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    buffer = SendBuffer(ours)
    fill(buffer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(buffer.emptied)
        await settle()
        theirs.close()
        assert not await buffer.drain()
    assert buffer.broken
    buffer.put(b"x")
    buffer.flush()  # dropped
    assert not await buffer.drain()


async def test_congestion_counts_data_put_while_the_socket_is_full(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    buffer = SendBuffer(ours)
    size = len(fill(buffer))
    for _ in range(4):
        assert not buffer.congested
        buffer.put(bytes(1024 * 1024))
    buffer.put_encoded(b"x")
    assert buffer.congested
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_all, theirs, size + 4 * 1024 * 1024 + 1)
        assert await buffer.drain()
    assert not buffer.congested
