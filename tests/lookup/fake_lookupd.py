"""A scripted discovery service: it records, stalls, sends invalid data and disconnects."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from struct import pack, unpack
from typing import Any

import trio

from trio_nsq.http.messages import HTTPError, Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection

PATIENCE_S = 60
"""On the test's clock, which may jump over idle times."""

Reply = Callable[[str], bytes | None]


class Conversation:
    """The commands of one broker over one connection.

    Attributes:
        lines: The commands, oldest first.
        identity: The body of IDENTIFY; empty before.
        ended: Whether the connection is closed.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.lines: list[str] = []
        self.identity: dict[str, Any] = {}
        self.ended = False
        self._stream = stream
        self._sending = trio.Lock()

    async def say(self, data: bytes) -> None:
        """Send bytes unchanged."""
        async with self._sending:
            await self._stream.send_all(data)

    async def hang_up(self) -> None:
        """Close the connection from this side."""
        await self._stream.aclose()

    @property
    def registered(self) -> set[tuple[str, ...]]:
        """What nsqlookupd would have registered: (topic,) and (topic, channel)."""
        known: set[tuple[str, ...]] = set()
        for line in self.lines:
            verb, *names = line.split(" ")
            if verb == "REGISTER":
                known |= {tuple(names), (names[0],)}
            elif verb == "UNREGISTER" and len(names) == 2:
                known.discard(tuple(names))
            elif verb == "UNREGISTER":
                known = {name for name in known if name[0] != names[0]}
        return known


class FakeLookupd:
    """The service.

    Attributes:
        tcp_address, http_address: `127.0.0.1:PORT`.
        conversations: Oldest first.
        replies: Replies by verb that replace those of nsqlookupd; None: no answer.
        fields: Fields that replace, or are added to, the reply to IDENTIFY.
        channels: The answer of `/channels` for each topic, or a complete response.
        asked: The topics of its requests.
        nodes: The producers in the answer of `/nodes`.
        tombstones: Those that were requested, each with the time on the test's clock: topic and node.
        refusals: The answers to requests of tombstones, by topic, or of `/nodes` for the topic "".
        gate: Answers wait for this event.
    """

    def __init__(self) -> None:
        self.tcp_address = ""
        self.http_address = ""
        self.conversations: list[Conversation] = []
        self.replies: dict[str, bytes | None] = {}
        self.fields: dict[str, Any] = {}
        self.channels: dict[str, list[Any] | Response] = {}
        self.asked: list[str] = []
        self.nodes: list[dict[str, Any]] = []
        self.tombstones: list[tuple[float, str, str]] = []
        self.refusals: dict[str, Response] = {}
        self.gate = trio.Event()
        self.gate.set()
        self._happened = trio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds that depends on brokers in this process."""
        with trio.fail_after(PATIENCE_S):
            while not condition():
                await self._happened.wait()

    def _note(self) -> None:
        self._happened.set()
        self._happened = trio.Event()

    async def conversation(self, index: int) -> Conversation:
        """Return the connection with this number, once the broker has sent IDENTIFY."""
        await self.until(lambda: len(self.conversations) > index and self.conversations[index].identity)
        return self.conversations[index]

    async def heard(self, index: int, *lines: str) -> Conversation:
        """Wait until the last lines of a connection are these."""
        conversation = await self.conversation(index)
        await self.until(lambda: tuple(conversation.lines[-len(lines) :]) == lines)
        return conversation

    # ------------------------------------------------------------------ TCP

    async def serve_tcp(self, stream: trio.SocketStream) -> None:
        """Serve one connection."""
        conversation = Conversation(stream)
        self.conversations.append(conversation)
        try:
            await self._talk(conversation, stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            pass  # one side has disconnected
        finally:
            conversation.ended = True
            self._note()

    async def _talk(self, conversation: Conversation, stream: trio.SocketStream) -> None:
        buffer = b""

        async def read(count: int) -> bytes:
            nonlocal buffer
            while len(buffer) < count:
                data = await stream.receive_some(4096)
                if not data:
                    raise EOFError
                buffer += data
            taken, buffer = buffer[:count], buffer[count:]
            return taken

        assert await read(4) == b"  V1"
        while True:
            line = b""
            while not line.endswith(b"\n"):
                line += await read(1)
            command = line.decode().rstrip("\n")
            verb = command.split(" ")[0]
            reply: bytes | None = b"OK"
            if verb == "IDENTIFY":
                (size,) = unpack(">i", await read(4))
                conversation.identity = json.loads(await read(size))
                reply = self._identity()
            else:
                conversation.lines.append(command)
            self._note()
            reply = self.replies.get(verb, reply)
            if reply is not None:
                await conversation.say(pack(">i", len(reply)) + reply)

    def _identity(self) -> bytes:
        host, _, port = self.http_address.rpartition(":")
        fields = {
            "broadcast_address": host,
            "hostname": "h",
            "http_port": int(port),
            "tcp_port": 1,
            "version": "1.3.0",
        }
        return json.dumps(fields | self.fields).encode()

    # ------------------------------------------------------------------ HTTP

    def router(self) -> Router:
        """Return the routes."""
        return Router(
            [
                Route("GET", "/channels", self._channels),
                Route("GET", "/nodes", self._nodes),
                Route("POST", "/topic/tombstone", self._tombstone),
            ]
        )

    async def _nodes(self, request: Request) -> Response:
        self._note()
        return self.refusals.get("") or Response.json({"producers": self.nodes})

    async def _tombstone(self, request: Request) -> Response:
        topic, node = request.query["topic"], request.query["node"]
        self.tombstones.append((trio.current_time(), topic, node))
        self._note()
        return self.refusals.get(topic) or Response.empty()

    async def _channels(self, request: Request) -> Response:
        topic = request.query.get("topic")
        if topic is None:
            raise HTTPError(400, "MISSING_ARG_TOPIC")
        self.asked.append(topic)
        self._note()
        await self.gate.wait()
        known = self.channels.get(topic, [])
        return known if isinstance(known, Response) else Response.json({"channels": known})


@asynccontextmanager
async def fake_lookupd(port: int = 0) -> AsyncIterator[FakeLookupd]:
    """Run a service on a port of 127.0.0.1; 0 is a free one. At the end of the block all connections are
    closed.
    """
    service = FakeLookupd()
    async with trio.open_nursery() as nursery:

        async def listen(port: int, handler: Callable[[trio.SocketStream], Awaitable[object]]) -> str:
            serve = trio.serve_tcp
            (listener,) = await nursery.start(
                lambda task_status: serve(handler, port, host="127.0.0.1", task_status=task_status)
            )
            return "%s:%d" % listener.socket.getsockname()

        router = service.router()
        service.tcp_address = await listen(port, service.serve_tcp)
        service.http_address = await listen(0, lambda stream: serve_connection(stream, router))
        yield service
        nursery.cancel_scope.cancel()
