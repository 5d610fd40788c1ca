"""Moves topics between two brokers with plain HTTP requests, in single steps."""

from typing import Any

import httpx

from broker.api import Api, address

TO = "127.0.0.1:1"
"""The address of the target, as `begin` gets it: only a name for the source."""


class Mover:
    """Moves one topic from a source to a target, one request at a time."""

    def __init__(self, source: Api, target: Api, topic: str = "t") -> None:
        self.source = source
        self.target = target
        self.topic = topic
        self.move = ""
        self.producers: dict[str | None, str] = {}

    async def drain(self) -> None:
        """Switch the source to the drain mode."""
        assert (await self.source.send("PUT", "/config/draining", body=b"true")).status_code == 200

    async def begin(self, to: str = TO) -> dict[str, Any]:
        """Begin or continue the move; return its status."""
        answer = await self.source.client.post("/topic/move/begin", params={"topic": self.topic, "to": to})
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        self.move = status["move"]
        self.producers = {each["channel"]: each["producer"] for each in status["streams"]}
        await self.target.post("/topic/create", topic=self.topic)
        for channel in self.producers:
            if channel is not None:
                await self.target.post("/channel/create", topic=self.topic, channel=channel)
        return status

    async def next(
        self, channel: str | None, moved: int | None = None, max_bytes: int | None = None
    ) -> httpx.Response:
        """Return the next batch of a stream."""
        wanted = {"topic": self.topic, "move": self.move}
        wanted |= {"channel": channel} if channel is not None else {}
        wanted |= {"moved": str(moved)} if moved is not None else {}
        wanted |= {"max_bytes": str(max_bytes)} if max_bytes is not None else {}
        return await self.source.client.post("/topic/move/next", params=wanted)

    async def store(self, channel: str | None, body: bytes, *, close: bool = False) -> httpx.Response:
        """Give a batch to the target."""
        wanted = {"topic": self.topic, "producer": self.producers[channel]}
        wanted |= {"close": "true"} if close else {}
        return await self.target.client.post("/topic/move/store", params=wanted, content=body)

    async def number(self, channel: str | None) -> int | None:
        """Return how far the target has a stream."""
        answer = await self.store(channel, b"")
        assert answer.status_code == 200, answer.text
        number: int | None = answer.json()["number"]
        return number

    async def stream(self, channel: str | None, max_bytes: int | None = None) -> int:
        """Move a stream from where the target has it; return the number of messages."""
        moved, count = await self.number(channel), 0
        while True:
            batch = await self.next(channel, moved, max_bytes)
            assert batch.status_code == 200, batch.text
            if "NSQ-Move-Through" not in batch.headers:
                return count
            answer = await self.store(channel, batch.content)
            assert answer.status_code == 200, answer.text
            count += answer.json()["stored"]
            moved = int(batch.headers["NSQ-Move-Through"])

    async def end(self, *, cancel: bool = False) -> tuple[int, str]:
        """End the move; return the status and the error."""
        wanted = {"topic": self.topic, "move": self.move} | ({"cancel": "true"} if cancel else {})
        answer = await self.source.client.post("/topic/move/end", params=wanted)
        return answer.status_code, answer.json().get("message", "")

    async def all(self, max_bytes: int | None = None) -> dict[str | None, int]:
        """Move everything; return the number of messages by stream."""
        await self.begin()
        counts = {channel: await self.stream(channel, max_bytes) for channel in reversed(self.producers)}
        assert await self.end() == (200, "")
        return counts


async def waiting(api: Api, topic: str, channel: str) -> list[dict[str, Any]]:
    """Return the messages of a channel, in delivery order, as `/channel/peek` shows them."""
    answer = await api.get("/channel/peek", topic=topic, channel=channel, max_messages=10000)
    assert answer.status_code == 200, answer.text
    return [__import__("json").loads(line) for line in answer.text.splitlines()]


__all__ = ["TO", "Mover", "address", "waiting"]
