"""Discovery services for tests, and a raw client for them."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from struct import pack, unpack
from typing import Any, TypeAlias

import trio

from broker.support import PATIENCE_S, time_limit
from interop.peers import nsqlookupd
from trio_nsq.log import Files
from trio_nsq.lookup.service.options import LookupdOptions
from trio_nsq.lookup.service.server import serve

FREE = "127.0.0.1:0"


@dataclass(frozen=True)
class Lookupd:
    """A running discovery service.

    Attributes:
        tcp_address, http_address: `127.0.0.1:PORT`.
        end: Ends it at once, like a kill.
        log: Its log output, if it is a process.
    """

    tcp_address: str
    http_address: str
    end: Callable[[], None]
    log: Callable[[], list[str]] = list


Runs: TypeAlias = Callable[..., AbstractAsyncContextManager[Lookupd]]
"""Runs a service on these addresses, or on free ports."""


@asynccontextmanager
async def ours(
    tcp_address: str = FREE, http_address: str = FREE, *, files: Files | None = None, **options: Any
) -> AsyncIterator[Lookupd]:
    """Run `qcli lookupd` in the test's trio run."""
    settings = LookupdOptions(tcp_address, http_address, **({"broadcast_address": "127.0.0.1"} | options))
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def run(task_status: Any) -> None:
            with scope:
                await serve(settings, files=files, task_status=task_status)

        bound = await nursery.start(run)
        with time_limit(nursery.cancel_scope):
            yield Lookupd(bound.tcp_address, bound.http_address, scope.cancel)
        scope.cancel()


@asynccontextmanager
async def real(tcp_address: str = FREE, http_address: str = FREE) -> AsyncIterator[Lookupd]:
    """Run nsqlookupd."""
    with nsqlookupd(f"--tcp-address={tcp_address}", f"--http-address={http_address}") as lookupd:

        def end() -> None:
            lookupd.process.kill()
            lookupd.process.wait()

        yield Lookupd(lookupd.tcp_address, lookupd.http_address, end, lookupd.log)


def identify(**changes: Any) -> bytes:
    """Return an IDENTIFY as a broker sends it, with these fields changed."""
    fields = {
        "broadcast_address": "b",
        "hostname": "h",
        "http_port": 4151,
        "tcp_port": 4150,
        "version": "1.3.0",
    }
    body = json.dumps(fields | changes).encode()
    return b"IDENTIFY\n" + pack(">i", len(body)) + body


class RawProducer:
    """A raw connection to a discovery service."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def response(self) -> bytes | None:
        """Return the next response; None if the service has closed the connection."""
        head = await self._exactly(4)
        if head is None:
            return None
        (size,) = unpack(">i", head)
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes | None:
        with trio.fail_after(PATIENCE_S):
            while len(self._buffer) < size:
                more = await self.stream.receive_some(65536)
                if not more:
                    assert not self._buffer, "the connection ended inside a response"
                    return None
                self._buffer += more
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    async def ask(self, commands: bytes) -> list[bytes | None]:
        """Send commands, one per line; return their responses."""
        await self.stream.send_all(commands)
        return [await self.response() for _ in range(commands.count(b"\n"))]

    async def register(self, *lines: str) -> None:
        """Send REGISTER or UNREGISTER, and expect OK."""
        responses = await self.ask("".join(f"{line}\n" for line in lines).encode())
        assert responses == [b"OK"] * len(lines)


@asynccontextmanager
async def producer(lookupd: Lookupd, **identity: Any) -> AsyncIterator[RawProducer]:
    """Connect a producer and send IDENTIFY."""
    host, _, port = lookupd.tcp_address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        client = RawProducer(stream)
        await stream.send_all(b"  V1" + identify(**identity))
        assert b"tcp_port" in (await client.response() or b"")
        yield client
