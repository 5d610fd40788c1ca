"""`replay` of a topic: reads, filters, keeps the pace, publishes, and counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from trio_nsq.client import Producer, PublishFailed
from trio_nsq.client.reading.log_stream import Found, is_for_all_channels
from trio_nsq.client.reading.topic_reader import TopicReader
from trio_nsq.log import RecordBatch
from trio_nsq.log.gaps import Gap
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.headers import Headers, headers_bytes

from ...broker.topic_log import report_gap
from ...framework.errors import ExitCode
from ..shared.rate_limiter import RateLimiter
from .options import ReplayOptions

BATCH_MESSAGES = 1000
_NS_PER_S = 1_000_000_000
MAX_BATCH_BYTES = 1000 * 1024
"""Of bodies and headers: a batch is one command, whose size fields take the rest of 1 MiB."""


@dataclass(slots=True)
class TopicReplayResult:
    """The results so far.

    Attributes:
        begun: The first sequence.
        position: All messages before this sequence are published, left out or missing.
        end: The sequence after the last one.
        left_out: Messages that do not match.
        missing: Messages that are no longer retained, or damaged.
        damaged: Whether messages are damaged.
        maybe_stored: Messages that were sent and not acknowledged.
        failure: The failure to publish.
        stopped: The exit code of the signal that arrived.
    """

    begun: int = 0
    position: int = 0
    end: int = 0
    acknowledged: int = 0
    acknowledged_bytes: int = 0
    left_out: int = 0
    missing: int = 0
    damaged: bool = False
    maybe_stored: int = 0
    failure: PublishFailed | None = None
    stopped: ExitCode | None = None

    @property
    def over(self) -> bool:
        return self.failure is not None or self.stopped is not None

    @property
    def share(self) -> float:
        """The completed share, 0 to 1."""
        return (self.position - self.begun) / max(1, self.end - self.begun)


class OriginalPace:
    """Keeps the original spacing of messages in time, divided by `speed`."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._first_ns: int | None = None
        self._begun_s = 0.0

    def is_due(self, timestamp_ns: int) -> bool:
        """Return whether a message with this publish time is due; the first message is due at once."""
        return trio.current_time() >= self._due_s(timestamp_ns)

    async def wait(self, timestamp_ns: int) -> None:
        await trio.sleep_until(self._due_s(timestamp_ns))

    def _due_s(self, timestamp_ns: int) -> float:
        if self._first_ns is None:
            self._first_ns, self._begun_s = timestamp_ns, trio.current_time()
        return self._begun_s + (timestamp_ns - self._first_ns) / _NS_PER_S / self._speed


class TopicReplay:
    """Publishes the messages of a reader.

    Args:
        options: The command line.
        reader: An open reader.
        producer: A connected producer; None: only count messages.
        count: The maximum of messages to publish; None: no limit.

    Attributes:
        result: The current results.
    """

    def __init__(
        self, options: ReplayOptions, reader: TopicReader, producer: Producer | None, count: int | None
    ) -> None:
        assert options.source is not None
        assert options.topic is not None
        end = reader.position if reader.end_sequence is None else reader.end_sequence
        self.result = TopicReplayResult(reader.position, reader.position, end)
        self._source = options.source
        self._topic = options.topic
        self._count = count
        self._pattern = options.pattern
        self._reader = reader
        self._producer = producer
        self._limiter: RateLimiter | None = None
        self._original_pace: OriginalPace | None = None
        self._batch_messages = BATCH_MESSAGES
        if options.rate and not options.dry_run:
            self._limiter = RateLimiter(options.rate, trio.current_time())
            self._batch_messages = min(BATCH_MESSAGES, self._limiter.max_messages)
        elif options.speed and not options.dry_run:
            self._original_pace = OriginalPace(options.speed)
        self._pause = trio.CancelScope()
        # The next batch.
        self._bodies: list[bytes] = []
        self._headers: list[Headers] = []
        self._size = 0
        self._left_out = 0

    def stop(self, code: ExitCode) -> None:
        """Stop after the current batch."""
        self.result.stopped = code
        self._pause.cancel()

    async def run(self) -> None:
        """Publish all messages of the reader; `result` has the outcome. Raises as the reader."""
        result = self.result
        while not self._over:
            found: list[Found] = []
            with self._pausable():
                found = await self._reader.receive()
                if not found:
                    result.position = result.end
                    return
            for each in found:
                if isinstance(each, RecordBatch):
                    if is_for_all_channels(each):
                        await self._add_batch(each)
                else:
                    await self._flush(each.first_sequence)
                    self._skip_gap(each)
            await self._flush(self._reader.position)

    @property
    def _over(self) -> bool:
        return self.result.over or self.result.acknowledged == self._count

    @contextmanager
    def _pausable(self) -> Iterator[None]:
        """Let `stop` cancel the block."""
        with trio.CancelScope() as self._pause:
            if self.result.over:
                self._pause.cancel()
            yield

    def _skip_gap(self, gap: Gap) -> None:
        if not self._over:
            self.result.damaged |= report_gap(self._source, gap.first_sequence, gap.next_sequence, gap.reason)
            self.result.missing += gap.next_sequence - gap.first_sequence
            self.result.position = gap.next_sequence

    async def _add_batch(self, batch: RecordBatch) -> None:
        """Add the matching messages of a batch, and publish full batches."""
        if self._original_pace is not None and not self._original_pace.is_due(batch.timestamp_ns):
            await self._flush(batch.base_sequence)
            with self._pausable():
                await self._original_pace.wait(batch.timestamp_ns)
        headers = batch.headers()
        for sequence, body in enumerate(batch.messages.bodies(), batch.base_sequence):
            if self._over:
                return
            if self._pattern is not None and self._pattern.search(body) is None:
                self._left_out += 1
                continue
            own = headers[sequence - batch.base_sequence]
            size = len(body) + (headers_bytes(own) if own else 0)
            if self._bodies and self._size + size > MAX_BATCH_BYTES:
                await self._flush(sequence)
            self._bodies.append(body)
            self._headers.append(own)
            self._size += size
            if len(self._bodies) == self._batch_messages or self._is_last():
                await self._flush(sequence + 1)

    def _is_last(self) -> bool:
        return self.result.acknowledged + len(self._bodies) == self._count

    async def _flush(self, up_to: int) -> None:
        """Publish the collected messages; `position` becomes `up_to`."""
        result = self.result
        if self._bodies and self._limiter is not None and not self._over:
            with self._pausable():
                await self._limiter.wait()
            self._limiter.take(len(self._bodies))
        if self._over:
            return
        bodies = self._bodies
        try:
            if self._producer is None or not bodies:
                pass
            elif any(self._headers):
                await self._producer.publish_many(self._topic, bodies, headers=self._headers)
            else:
                await self._producer.publish_set(self._topic, pack_messages(bodies))
        except PublishFailed as error:
            result.failure = error
            result.maybe_stored = len(bodies) if error.maybe_stored else 0
            return
        result.acknowledged += len(bodies)
        result.acknowledged_bytes += sum(map(len, bodies))
        result.left_out += self._left_out
        result.position = up_to
        self._bodies, self._headers, self._size, self._left_out = [], [], 0, 0
