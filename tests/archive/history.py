"""Helpers for reads of what only the archive has: brokers with small files, and numbered messages."""

import json
from pathlib import Path
from typing import Any

import trio

from broker.api import Api
from broker.support import PATIENCE_S

SMALL: dict[str, Any] = {
    "archive_interval_ms": 10,
    "max_bytes_per_file": 1500,
    "checkpoint_interval_ms": 20,
}
"""Options of a broker: a file has 12 messages of `publish`, and is archived soon."""


def disk_files(data: Path, topic: str = "t") -> list[int]:
    """Return the first sequences of the files on the disk."""
    return sorted(int(path.stem) for path in (data / "topics" / f"{topic}.topic").glob("*.log"))


async def publish(api: Api, first: int, end: int, topic: str = "t") -> None:
    """Publish the messages with these numbers; their sequences are the same if the topic has no others."""
    for number in range(first, end):
        await api.tcp.publish(topic, b"%06d" % number + b"." * 50)


async def consume(api: Api, count: int, topic: str = "t", channel: str = "c") -> list[int]:
    """Consume and finish messages with a client that has subscribed; returns their numbers."""
    numbers = []
    for _ in range(count):
        message = await api.tcp.message()
        numbers.append(int(message.body[:6]))
        await api.tcp.send(b"FIN " + message.id + b"\n")
    return numbers


async def until_only_archived(data: Path, before: int, topic: str = "t") -> None:
    """Wait until the disk has no message before this sequence."""
    with trio.fail_after(PATIENCE_S):
        while disk_files(data, topic)[0] < before:
            await trio.sleep(0.02)


async def numbers_read(api: Api, topic: str = "t", **query: Any) -> list[int | str]:
    """Read a topic; returns the numbers of its messages, and the reasons of gaps, in order."""
    answer = await api.get("/topic/read", topic=topic, **query)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    return [line["gap"] if "gap" in line else int(line["body"][:6]) for line in lines]
