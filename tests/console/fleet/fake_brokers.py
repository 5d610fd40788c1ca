"""HTTP servers that answer as a broker or a discovery service does, as far as the watcher asks, or misbehave."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio


def channel(name: str, **numbers: Any) -> dict[str, Any]:
    """Return a channel of `/stats`."""
    return {"channel_name": name, "depth": 0, "message_count": 0, "paused": False, **numbers}


def topic(name: str, *channels: dict[str, Any], **numbers: Any) -> dict[str, Any]:
    """Return a topic of `/stats`."""
    return {
        "topic_name": name,
        "channels": [*channels],
        "depth": 0,
        "message_count": 0,
        "paused": False,
        **numbers,
    }


@dataclass
class FakeBroker:
    """A server; a test changes its fields.

    Attributes:
        topics: Of `/stats`.
        nodes: The producers of `/nodes`, for a discovery service.
        hangs: Accept requests, and do not answer.
        raw: The whole answer, instead of a valid one.
        text: Version, host name and health; empty: usual ones.
        more: Fields of `/info` and `/stats`, and answers to other paths; None: this request fails.
        on_path: Called before a request for the path is answered.
        asked: The paths of all requests; `targets` with their queries.
        authorizations: The Authorization headers of all requests; empty without one.
    """

    address: str = ""
    topics: list[Any] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    start_time: int = 1
    is_nsqd: bool = False
    hangs: bool = False
    raw: bytes = b""
    text: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    on_path: dict[str, Callable[[], None]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        """The port."""
        return int(self.address.rpartition(":")[2])

    def node(self, **changes: Any) -> dict[str, Any]:
        """Return this broker as a producer of `/nodes`."""
        return {
            "broadcast_address": "127.0.0.1",
            "tcp_port": 1,
            "http_port": self.port,
            "topics": [],
            **changes,
        }

    def answer(self, path: str) -> bytes:
        """Return the answer to a request."""
        if self.raw:
            return self.raw
        bodies: dict[str, Any] = {
            "/info": {
                "version": self.text or "1",
                "hostname": self.text or "127.0.0.1",
                "broadcast_address": "127.0.0.1",
                "tcp_port": self.port,
                "http_port": self.port,
                "start_time": self.start_time,
            },
            "/stats": {"version": self.text or "1", "health": self.text or "OK", "topics": self.topics},
            "/nodes": {"producers": self.nodes},
        }
        for about in (bodies["/info"], bodies["/stats"]):
            about |= {key: value for key, value in self.more.items() if not key.startswith("/")}
        bodies |= self.more
        status = "200 OK" if bodies.get(path, "") is not None else "503 Service Unavailable"
        if path == "/topic/bounds":
            status = "404 Not Found" if self.is_nsqd else "400 Bad Request"
        body = json.dumps(bodies.get(path, {"message": "NOT_FOUND"})).encode()
        return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one client."""
        received = bytearray()
        async with stream:
            try:
                async for piece in stream:
                    received += piece
                    while (end := received.find(b"\r\n\r\n")) >= 0:
                        head = received[:end].decode().split("\r\n")
                        del received[: end + 4]
                        target = head[0].split()[1]
                        path = target.partition("?")[0]
                        self.asked.append(path)
                        self.targets.append(target)
                        self.on_path.get(path, lambda: None)()
                        headers = dict(line.lower().split(": ", 1) for line in head[1:])
                        self.authorizations.append(headers.get("authorization", ""))
                        if self.hangs:
                            await trio.sleep_forever()
                        await stream.send_all(self.answer(path))
            except trio.BrokenResourceError:
                pass


@asynccontextmanager
async def fake_brokers(*brokers: FakeBroker) -> AsyncIterator[None]:
    """Run servers until the block exits, and set their addresses."""
    async with trio.open_nursery() as nursery:
        for broker in brokers:
            (listener, *_) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            host, port = listener.socket.getsockname()
            broker.address = f"{host}:{port}"
            nursery.start_soon(trio.serve_listeners, broker.serve, [listener])
        yield
        nursery.cancel_scope.cancel()
