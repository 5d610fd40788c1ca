"""A discovery service with given answers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from trio_nsq.http.messages import HTTPError, Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection


class FakeLookupd:
    """The service.

    Attributes:
        address: Its HTTP address.
        brokers: The addresses in its answers, or an error.
        fields: More fields of brokers, by address.
        asked_at: The times of the requests on trio's clock.
        gate: Answers wait for this event.
    """

    def __init__(self) -> None:
        self.address = ""
        self.brokers: list[str] | HTTPError = []
        self.fields: dict[str, dict[str, object]] = {}
        self.asked_at: list[float] = []
        self.gate = trio.Event()
        self.gate.set()
        self._asked = trio.Event()

    async def asked(self, times: int) -> None:
        """Wait until it has received this many requests in total."""
        while len(self.asked_at) < times:
            await self._asked.wait()

    async def _lookup(self, request: Request) -> Response:
        assert request.query == {"topic": "topic"}
        return await self._answer({"channels": []})

    async def _nodes(self, request: Request) -> Response:
        assert request.query == {}
        return await self._answer({})

    async def _answer(self, about: dict[str, object]) -> Response:
        self.asked_at.append(trio.current_time())
        self._asked.set()
        self._asked = trio.Event()
        await self.gate.wait()
        if isinstance(self.brokers, HTTPError):
            raise self.brokers
        producers = []
        for address in self.brokers:
            host, _, port = address.rpartition(":")
            place: dict[str, object] = {"broadcast_address": host, "tcp_port": int(port)}
            producers.append(place | self.fields.get(address, {}))
        return Response.json(about | {"producers": producers})

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection."""
        await serve_connection(
            stream, Router([Route("GET", "/lookup", self._lookup), Route("GET", "/nodes", self._nodes)])
        )


@asynccontextmanager
async def fake_lookupd(*brokers: str) -> AsyncIterator[FakeLookupd]:
    """Run a service on a free port of 127.0.0.1 with these brokers."""
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
    """Wait until a condition holds."""
    while not condition():
        await trio.sleep(0.001)
