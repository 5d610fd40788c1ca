"""Tests for the links between the processes of a cluster."""

import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from broker.support import PATIENCE_S
from cluster.links import Gateway, Link, Way, ask_kernel, owner_of


class Echo:
    """A server that sends everything back, and what a client of it needs.

    Attributes:
        link: Of all connections.
        forwarded: The addresses of forwarded clients, with the numbers of their connections.
        accepted, ended: The numbers of connections that the server has got, and that have ended there.
    """

    def __init__(self) -> None:
        self.link = Link("from the test to the server")
        self.forwarded: list[tuple[str, int]] = []
        self.accepted = self.ended = 0
        self.gateway: Gateway

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Echo"]:
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_tcp, self._answer, 0, host="127.0.0.1")
            (listener,) = await nursery.start(serve)
            target = "127.0.0.1:%d" % listener.socket.getsockname()[1]
            self.gateway = Gateway(target, lambda port, to: self.link, self._note)
            await nursery.start(self.gateway.serve)
            with trio.fail_after(PATIENCE_S):
                yield self
            nursery.cancel_scope.cancel()

    def _note(self, address: str, number: int) -> None:
        self.forwarded.append((address, number))

    async def _answer(self, stream: trio.SocketStream) -> None:
        self.accepted += 1
        try:
            async for data in stream:
                await stream.send_all(data)
        except trio.BrokenResourceError:
            pass  # a test resets it
        finally:
            self.ended += 1

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.gateway.port)


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    async with Echo().running() as running:
        yield running


async def answer(stream: trio.SocketStream, data: bytes) -> bytes:
    await stream.send_all(data)
    return bytes(await stream.receive_some())


async def test_data_passes_in_both_directions_until_the_end(echo: Echo) -> None:
    async with await echo.connect() as stream:
        assert await answer(stream, b"hello") == b"hello"
        await stream.send_eof()
        assert await stream.receive_some() == b""
    while echo.link.connections:
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("way", [*Way, None])
async def test_a_stalled_link_loses_nothing(echo: Echo, way: Way | None) -> None:
    got: list[bytes] = []

    async def receive() -> None:
        got.append(bytes(await stream.receive_some()))

    async with await echo.connect() as stream, trio.open_nursery() as nursery:
        assert await answer(stream, b"first") == b"first"
        echo.link.stall(*[way] if way else [])
        nursery.start_soon(receive)
        await stream.send_all(b"second")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not got
        echo.link.mend()
    assert got == [b"second"]


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_stalled_link_hides_the_end_of_a_connection(echo: Echo, is_reset: bool) -> None:
    async with await echo.connect() as stream:
        assert await answer(stream, b"x") == b"x"
        echo.link.stall()
        if is_reset:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert (echo.link.connections, echo.ended) == (1, 0)
    echo.link.mend()
    while echo.link.connections or not echo.ended:
        await trio.testing.wait_all_tasks_blocked()


async def test_a_new_connection_waits_while_its_link_is_stalled(echo: Echo) -> None:
    echo.link.stall(Way.THERE)
    async with await echo.connect() as stream:
        await stream.send_all(b"x")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert echo.accepted == 0
        echo.link.mend()
        assert await stream.receive_some() == b"x"


async def test_a_cut_link_resets_its_connections_and_refuses_new_ones(echo: Echo) -> None:
    async with await echo.connect() as stream:
        assert await answer(stream, b"x") == b"x"
        echo.link.cut()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
    async with await echo.connect() as stream:
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
    echo.link.mend()
    async with await echo.connect() as stream:
        assert await answer(stream, b"x") == b"x"


async def test_a_stalled_link_can_be_reset(echo: Echo) -> None:
    async with await echo.connect() as stream:
        assert await answer(stream, b"x") == b"x"
        echo.link.stall()
        echo.link.reset()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()


async def test_data_of_a_slow_link_is_late(echo: Echo) -> None:
    echo.link.delay_s = 0.05
    async with await echo.connect() as stream:
        began_s = trio.current_time()
        assert await answer(stream, b"x") == b"x"
        assert trio.current_time() - began_s >= 2 * echo.link.delay_s


async def test_a_forwarded_client_is_recognized(echo: Echo) -> None:
    for client in ("client=127.3.4.5:61234", "listener=tcp&client=127.3.4.6%3A61234&x=y"):
        async with await echo.connect() as stream:
            await answer(stream, b"GET /cluster/forward?%s HTTP/1.1\r\n" % client.encode())
    async with await echo.connect() as stream:
        await answer(stream, b"GET /cluster/replicate?client=127.3.4.7:1 HTTP/1.1\r\n")
    assert [address for address, _ in echo.forwarded] == ["127.3.4.5", "127.3.4.6"]


async def test_forwarded_clients_are_numbered_in_the_order_of_their_connections(echo: Echo) -> None:
    async with await echo.connect() as first, await echo.connect() as second:
        for stream, client in (second, b"127.0.0.2"), (first, b"127.0.0.1"):
            await answer(stream, b"GET /cluster/forward?client=%s:1 HTTP/1.1\r\n" % client)
    (_, late), (_, early) = echo.forwarded
    assert early < late


def test_the_owner_of_a_connection_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        to_port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", to_port)) as client:
            port = client.getsockname()[1]
            assert owner_of(port, to_port, [os.getppid(), os.getpid()]) == os.getpid()
            assert owner_of(port, to_port, [os.getppid()]) is None
            assert owner_of(to_port, to_port, [os.getpid()]) is None
            assert ask_kernel(port, to_port) in (os.fstat(client.fileno()).st_ino, None)
            assert ask_kernel(to_port, to_port) is None
