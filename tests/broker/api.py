"""A broker whose HTTP API is called through httpx."""

import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from broker.support import RawClient, connected, running_broker
from trio_nsq.broker.monitoring.stats_text import render_text

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Saves a client its own, whose authorities take a millisecond to load."""


class Api:
    """Sends requests to one broker; `client` makes them, `tcp` is a V2 connection to `tcp_address`."""

    def __init__(self, client: httpx.AsyncClient, tcp: RawClient, tcp_address: str = "") -> None:
        self.client = client
        self.tcp = tcp
        self.tcp_address = tcp_address

    async def post(self, path: str, body: bytes = b"", **query: Any) -> tuple[int, str]:
        """Return the status and the error code (or text) of a POST."""
        response = await self.client.post(path, params=query, content=body)
        if response.headers.get("content-type", "").startswith("application/json"):
            return response.status_code, response.json()["message"]
        return response.status_code, response.text

    async def get(self, path: str, **query: Any) -> httpx.Response:
        """Send a GET."""
        return await self.client.get(path, params=query)

    async def send(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> httpx.Response:
        """Send any request."""
        return await self.client.request(method, path, headers=headers, content=body)

    async def stats(self, **query: Any) -> dict[str, Any]:
        """Return the JSON of /stats."""
        stats: dict[str, Any] = (await self.get("/stats", format="json", **query)).json()
        return stats

    async def check_text(self, **query: Any) -> str:
        """Check that `/stats` as text has the same as its JSON, but for times; return the text."""
        query |= {"include_mem": "false"}
        text = (await self.get("/stats", **query)).text
        expected = render_text(await self.stats(**query), 0, 0)
        assert _without_times(text) == _without_times(expected)
        return text

    async def channel(self, topic: str, channel: str) -> dict[str, Any]:
        """Return the stats of a channel."""
        (found,) = (await self.stats(topic=topic, channel=channel))["topics"]
        described: dict[str, Any] = found["channels"][0]
        return described

    async def depth(self, topic: str) -> int:
        """Return the depth of the topic itself."""
        (found,) = (await self.stats(topic=topic))["topics"]
        depth: int = found["depth"]
        return depth


def _without_times(text: str) -> str:
    return re.sub(r"(?m)^uptime .*$|connected: .*$", "", text)


@asynccontextmanager
async def running_api(data_path: Path, **options: Any) -> AsyncIterator[Api]:
    """Run a broker, with an HTTP client and a raw TCP client."""
    async with running_broker(data_path, **options) as bound, connected(bound.tcp_address) as tcp:
        url = f"http://{bound.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=_NO_TLS) as client:
            yield Api(client, tcp, bound.tcp_address)


OK = (200, "OK")

DONE = (200, "")


def address(api: Api) -> str:
    """Return the HTTP address of the broker."""
    return "%s:%d" % api.tcp.stream.socket.getpeername()[:2]


async def raw_answer(client: RawClient) -> tuple[int, bytes]:
    """Return the status and the body of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = await client.exactly(1)
        assert byte is not None, "the connection ended"
        head += byte
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    body = await client.exactly(length) if length else b""
    assert body is not None
    return int(head.split()[1]), body


def raw_post(path: bytes, *headers: bytes, body: bytes = b"", method: bytes = b"POST") -> bytes:
    """Return the bytes of a request."""
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def raw_post_with_length(path: bytes, body: bytes, method: bytes = b"POST") -> bytes:
    """Return the bytes of a request with the length of its body."""
    return raw_post(path, b"Content-Length: %d" % len(body), body=body, method=method)
