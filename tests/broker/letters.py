"""Helpers for dead letters: clients that fail their messages, and the content of the dead-letter topic."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from broker.api import Api, running_api
from broker.support import RawClient, Received, connected
from trio_nsq.api.answers import Origin

ORIGIN: Origin = {
    "topic": "t",
    "channel": "c",
    "id": "0" * 16,
    "sequence": 1,
    "attempts": 5,
    "timestamp_ns": 1,
    "reason": "requeued",
}


async def configure(api: Api, topic: str, channel: str, **settings: Any) -> tuple[int, Any]:
    """Create a channel if it is missing, and change its settings."""
    await api.post("/topic/create", topic=topic)
    await api.post("/channel/create", topic=topic, channel=channel)
    path = f"/channel/settings?topic={topic}&channel={channel}".replace("#", "%23")
    answer = await api.send("PUT", path, body=json.dumps(settings).encode())
    return answer.status_code, answer.json()


async def letters(api: Api, topic: str = "dead", **query: Any) -> list[dict[str, Any]]:
    """Return the messages in a dead-letter topic."""
    answer = await api.get("/dead_letters/messages", topic=topic, **query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@asynccontextmanager
async def another(api: Api, data_path: Path, **options: Any) -> AsyncIterator[Api]:
    """Start a broker on a copy of the current files, as after a kill."""
    copy = data_path.with_name(f"{data_path.name}-copy")
    shutil.copytree(data_path, copy)
    async with running_api(copy, **options) as other:
        yield other


def client_of(api: Api) -> AbstractAsyncContextManager[RawClient]:
    """Connect another client to the same broker."""
    host, port = api.tcp.stream.socket.getpeername()
    return connected(f"{host}:{port}")


async def fail(client: RawClient, count: int) -> list[Received]:
    """Requeue the messages that arrive."""
    received = []
    for _ in range(count):
        message = await client.message()
        await client.send(b"REQ %s 0\n" % message.id)
        received.append(message)
    return received


async def take(client: RawClient, count: int) -> list[Received]:
    """Finish the messages that arrive."""
    received = []
    for _ in range(count):
        message = await client.message()
        await client.send(b"FIN %s\n" % message.id)
        received.append(message)
    return received
