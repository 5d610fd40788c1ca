"""The asynchronous part of `pub`: reads, batches and publishes side by side, and knows at the end what became of what.

One task reads and cuts batches. Several publish, each waiting for the acknowledgement of its batch, so that many
are on their way at once; the channel between them holds nothing, so input is read no faster than the broker takes
it, and batches reach the producer in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from trio_nsq.client import Producer, PublishFailed
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.batcher import Batcher

from .errors import Failure
from .exit_codes import ExitCode
from .reading import Input, Pace, open_input
from .records import Splitter

LINGER_S = 0.05
"""How long a message waits for others to join its batch."""

PUBLISHERS = 16
"""Batches on their way at once. The producer bounds the bytes."""


@dataclass(slots=True)
class Outcome:
    """What became of the input so far.

    Attributes:
        acknowledged: Messages the broker has acknowledged.
        acknowledged_bytes: Bytes of their bodies.
        maybe_stored: Messages that were sent and not acknowledged.
        not_stored: Messages that were read and are certainly not stored.
        held_back: Messages that were read but not due yet when a signal came; they are not published.
        empty: Empty messages; they are skipped.
        unfinished_bytes: Bytes of a message that an interruption cut off; it is not published.
        publish_failure: Why the broker did not acknowledge; the first one.
        input_failure: Why the input was not read to its end.
        stopped: The exit code of the signal that came.
    """

    acknowledged: int = 0
    acknowledged_bytes: int = 0
    maybe_stored: int = 0
    not_stored: int = 0
    held_back: int = 0
    empty: int = 0
    unfinished_bytes: int = 0
    publish_failure: PublishFailed | None = None
    input_failure: str | None = None
    stopped: ExitCode | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more is to be read."""
        return bool(self.publish_failure or self.input_failure or self.stopped)


class Publication:
    """Publishes inputs to a topic.

    Args:
        producer: Connected.
        topic: Where to.
        delimiter: Between messages.
        max_msg_size: Bytes of one message.
        batch_size: Messages in one MPUB.
        defer_ms: Above 0: each message is published by itself and deferred so long.
        pace: Holds messages back; None: as fast as the broker takes them.

    Attributes:
        outcome: Up to date at any time.
    """

    def __init__(
        self,
        producer: Producer,
        topic: str,
        *,
        delimiter: bytes,
        max_msg_size: int,
        batch_size: int,
        defer_ms: int,
        pace: Pace | None,
    ) -> None:
        self.outcome = Outcome()
        self._producer = producer
        self._topic = topic
        self._max_msg_size = max_msg_size
        self._splitter = Splitter(delimiter, max_msg_size)
        self._batcher = Batcher(min(batch_size, pace.max_messages) if pace else batch_size)
        self._defer_ms = defer_ms
        self._pace = pace
        self._pause = trio.CancelScope()
        self._send, self._receive = trio.open_memory_channel[list[bytes]](0)

    def stop(self, code: ExitCode) -> None:
        """Read no more. What has been read is published still, as far as the pace allows it now."""
        self.outcome.stopped = code
        self._pause.cancel()

    async def run(self, paths: Sequence[str], read_bytes: int) -> None:
        """Publish inputs one after the other, or as much as can be; `outcome` says how it went.

        Args:
            paths: Files; `-` is standard input.
            read_bytes: How much to read at a time, at most.
        """
        async with trio.open_nursery() as nursery:
            for _ in range(PUBLISHERS):
                nursery.start_soon(self._publish_batches)
            async with self._send:
                try:
                    for path in paths:
                        source = None
                        with self._pausable():
                            source = await open_input(path, read_bytes)
                        if source is None:
                            break
                        try:
                            await self._read(source)
                        finally:
                            source.close()
                except Failure as error:
                    self.outcome.input_failure = error.message
                self.outcome.unfinished_bytes = self._splitter.unfinished_bytes
                await self._hand_over(self._batcher.rest())

    async def _read(self, source: Input) -> None:
        """Read an input to its end, or to whatever ends reading."""
        splitter, batcher, outcome = self._splitter, self._batcher, self.outcome
        first = splitter.seen
        flush_at = math.inf
        at_end = False
        while not (at_end or outcome.over):
            chunk: bytes | None = None
            with self._pausable(flush_at):
                chunk = await source.read()
            if chunk is None:
                if not outcome.over:
                    await self._hand_over(batcher.rest())
            else:
                at_end = not chunk
                for batch in batcher.add(splitter.end() if at_end else splitter.feed(chunk)):
                    await self._hand_over(batch)
                outcome.empty = splitter.empty
                if splitter.too_long is not None:
                    outcome.input_failure = (
                        f"Message {splitter.too_long - first} of {source.name} is longer than "
                        f"{self._max_msg_size} bytes: see --max-msg-size and --delimiter."
                    )
            if not batcher:
                flush_at = math.inf
            elif flush_at == math.inf:
                flush_at = trio.current_time() + LINGER_S

    @contextmanager
    def _pausable(self, deadline: float = math.inf) -> Iterator[None]:
        """Let `stop`, a failure and the deadline cut short what is waited for inside."""
        with trio.CancelScope(deadline=deadline) as self._pause:
            if self.outcome.over:
                self._pause.cancel()
            yield

    async def _hand_over(self, batch: list[bytes]) -> None:
        if not batch:
            return
        if self._pace is not None:
            with self._pausable():
                await self._pace.wait()
            if self.outcome.stopped and not self._pace.is_due():
                self.outcome.held_back += len(batch)
                return
            self._pace.take(len(batch))
        await self._send.send(batch)

    async def _publish_batches(self) -> None:
        async for batch in self._receive:
            if self.outcome.publish_failure is not None:
                self.outcome.not_stored += len(batch)
            elif self._defer_ms:
                await self._publish_deferred(batch)
            else:
                await self._publish_set(batch)

    async def _publish_set(self, batch: list[bytes]) -> None:
        messages = pack_messages(batch)
        try:
            await self._producer.publish_set(self._topic, messages)
        except PublishFailed as error:
            self._failed(error, len(batch))
        else:
            self.outcome.acknowledged += len(batch)
            self.outcome.acknowledged_bytes += messages.body_bytes

    async def _publish_deferred(self, batch: list[bytes]) -> None:
        try:
            await self._producer.publish_many(self._topic, batch, defer_ms=self._defer_ms)
        except PublishFailed as error:
            self._acknowledged(batch[: error.acknowledged])
            self._failed(error, len(batch) - error.acknowledged)
        else:
            self._acknowledged(batch)

    def _acknowledged(self, batch: list[bytes]) -> None:
        self.outcome.acknowledged += len(batch)
        self.outcome.acknowledged_bytes += sum(map(len, batch))

    def _failed(self, error: PublishFailed, count: int) -> None:
        if error.maybe_stored:
            self.outcome.maybe_stored += count
        else:
            self.outcome.not_stored += count
        if self.outcome.publish_failure is None:
            self.outcome.publish_failure = error
            self._pause.cancel()
