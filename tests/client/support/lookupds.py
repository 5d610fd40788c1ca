"""A discovery service that says what the test wants it to."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from trio_nsq.http import HTTPError, Request, Response, Route, Router, serve_connection


class FakeLookupd:
    """The service.

    Attributes:
        address: Its HTTP address.
        brokers: The addresses that it gives, or an error.
        asked_at: When it was asked, on trio's clock.
        gate: Questions wait for it before they are answered.
    """

    def __init__(self) -> None:
        self.address = ""
        self.brokers: list[str] | HTTPError = []
        self.asked_at: list[float] = []
        self.gate = trio.Event()
        self.gate.set()
        self._asked = trio.Event()

    async def asked(self, times: int) -> None:
        """Wait until it has been asked so often in all."""
        while len(self.asked_at) < times:
            await self._asked.wait()

    async def _lookup(self, request: Request) -> Response:
        assert request.query == {"topic": "topic"}
        self.asked_at.append(trio.current_time())
        self._asked.set()
        self._asked = trio.Event()
        await self.gate.wait()
        if isinstance(self.brokers, HTTPError):
            raise self.brokers
        hosts = [address.rpartition(":") for address in self.brokers]
        producers = [{"broadcast_address": host, "tcp_port": int(port)} for host, _, port in hosts]
        return Response.json({"channels": [], "producers": producers})

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection."""
        await serve_connection(stream, Router([Route("GET", "/lookup", self._lookup)]))


@asynccontextmanager
async def fake_lookupd(*brokers: str) -> AsyncIterator[FakeLookupd]:
    """A service on a free port of 127.0.0.1 that names these; with the block it is gone."""
    service = FakeLookupd()
    service.brokers = list(brokers)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(lambda task_status: _listen(service, task_status))
        service.address = "%s:%d" % listeners[0].socket.getsockname()
        yield service
        nursery.cancel_scope.cancel()


async def _listen(service: FakeLookupd, task_status: trio.TaskStatus[list[trio.SocketListener]]) -> None:
    await trio.serve_tcp(service.serve, 0, host="127.0.0.1", task_status=task_status)


async def until(condition: Callable[[], object]) -> None:
    """Wait until this holds."""
    while not condition():
        await trio.sleep(0.001)
