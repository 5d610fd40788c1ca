"""The asynchronous part of `tail`: receives, writes, and only then finishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import islice

from trio_nsq.client import Consumer, MessageBatch

from ...framework.output import RawOutput, body_field
from .printer import Printer

Render = Callable[[str, MessageBatch, int], bytes]
"""Makes the output for the first messages of a batch: topic, batch, how many."""


def raw_renderer(delimiter: bytes, print_topic: bool) -> Render:
    """Bodies as they are, each followed by the delimiter."""

    def render(topic: str, batch: MessageBatch, count: int) -> bytes:
        bodies = batch.bodies if count == len(batch) else batch.bodies[:count]
        prefix = f"{topic} | ".encode() if print_topic else b""
        # The empty string at the end puts a delimiter behind the last one too.
        return prefix + (delimiter + prefix).join(bodies) + delimiter

    return render


def json_renderer(topic: str, batch: MessageBatch, count: int) -> bytes:
    """A JSON object per line."""
    lines = []
    for body, id_, timestamp_ns, attempts in islice(
        zip(batch.bodies, batch.ids, batch.timestamps_ns, batch.attempts, strict=True), count
    ):
        record: dict[str, object] = {
            "topic": topic,
            "id": id_.decode("ascii", "replace"),
            "timestamp_ns": timestamp_ns,
            "attempts": attempts,
        } | body_field(body)
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


class Tail(Printer[Consumer]):
    """Writes what consumers receive, and finishes it then.

    Args:
        output, count, idle_timeout_s: As of Printer.
        render: Makes bytes of messages.
    """

    def __init__(
        self, output: RawOutput, render: Render, *, count: int | None, idle_timeout_s: float
    ) -> None:
        super().__init__(output, count=count, idle_timeout_s=idle_timeout_s)
        self._render = render

    async def pass_on(self, topic: str, source: Consumer) -> None:
        """Print the messages of a consumer."""
        async for batch in source.batches():
            count = await self.print(len(batch), partial(self._render, topic, batch))
            # Before there is room for others: the broker counts each delivery as an attempt.
            source.max_in_flight = int(min(source.max_in_flight, self._left))
            if count == len(batch):
                batch.finish()
            else:
                for message in islice(batch, count):
                    message.finish()
