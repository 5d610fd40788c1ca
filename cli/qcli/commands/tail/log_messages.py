"""The part of `tail` that reads a topic's log: what was published, and what is going to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from trio_nsq.client.reading.topic_reader import TopicReader
from trio_nsq.log import RecordBatch

from ...broker.topic_log import is_for_all, note_beginning, note_gap
from ...framework.output import RawOutput, body_field, json_lines
from .printer import Printer

RenderLog = Callable[[str, Sequence[RecordBatch], int], bytes]
"""Makes the output for the first messages of batches: topic, batches, how many."""


def raw_log_renderer(delimiter: bytes, print_topic: bool) -> RenderLog:
    """Bodies as they are, each followed by the delimiter."""

    def render(topic: str, batches: Sequence[RecordBatch], count: int) -> bytes:
        bodies = [body for batch in batches for body in batch.messages.bodies()][:count]
        prefix = f"{topic} | ".encode() if print_topic else b""
        # The empty string at the end puts a delimiter behind the last one too.
        return prefix + (delimiter + prefix).join(bodies) + delimiter

    return render


def json_log_renderer(topic: str, batches: Sequence[RecordBatch], count: int) -> bytes:
    """A JSON object per line."""
    records = (
        {
            "topic": topic,
            "id": f"{batch.first_id + index:016x}",
            "timestamp_ns": batch.timestamp_ns,
            "attempts": 0,
            "sequence": batch.base_sequence + index,
            "due_ns": batch.due_ns or None,
            **body_field(body),
        }
        for batch in batches
        for index, body in enumerate(batch.messages.bodies())
    )
    return json_lines(record for _, record in zip(range(count), records, strict=False)).encode()


class LogTail(Printer[TopicReader]):
    """Writes what readers read.

    Args:
        output, count, idle_timeout_s: As of Printer.
        render: Makes bytes of messages.
        first: Where the readers were told to begin; None: nowhere in particular.

    Attributes:
        damaged: Whether messages were passed over that are damaged.
    """

    def __init__(
        self,
        output: RawOutput,
        render: RenderLog,
        *,
        count: int | None,
        idle_timeout_s: float,
        first: str | None,
    ) -> None:
        super().__init__(output, count=count, idle_timeout_s=idle_timeout_s)
        self._first = first
        self.damaged = False
        self._render = render

    async def pass_on(self, topic: str, source: TopicReader) -> None:
        """Print what a reader reads."""
        note_beginning(topic, source, self._first)
        while found := await source.receive():
            batches: list[RecordBatch] = []
            for each in found:
                if isinstance(each, RecordBatch):
                    if is_for_all(each):
                        batches.append(each)
                    continue
                await self._print(topic, batches)
                batches = []
                self.damaged |= note_gap(topic, each.first_sequence, each.next_sequence, each.reason)
            await self._print(topic, batches)

    async def _print(self, topic: str, batches: list[RecordBatch]) -> None:
        if count := sum(batch.count for batch in batches):
            await self.print(count, partial(self._render, topic, batches))
