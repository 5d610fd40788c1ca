"""Batches of messages, and their making from lines."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trio_nsq.protocol.batcher import Batcher
from trio_nsq.protocol.headers import (
    MAX_HPUB_HEADERS_BYTES,
    MAX_HPUB_MESSAGES,
    Headers,
    encode_headers,
    prefix_bytes,
)

from .input import MessageSplitter

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages for one topic, with one delay.

    Attributes:
        bodies: The messages, at least one.
        defer_ms: The delay; 0: no delay.
        due_ns: Until when the messages are deferred, Unix nanoseconds, instead of `defer_ms`; 0: `defer_ms` counts.
        keys: The key of each message, if the input had keys.
        headers: The headers of each message; empty: none has headers.
    """

    topic: str
    bodies: list[bytes]
    defer_ms: int = 0
    due_ns: int = 0
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers] = ()

    def delay_ms(self, now_ns: int) -> int:
        """Return the delay of messages that are sent now; never too short."""
        return max(0, -(-(self.due_ns - now_ns) // _NS_PER_MS)) if self.due_ns else self.defer_ms

    def part(self, wanted: slice) -> "Batch":
        """Return a batch of these messages, with the same topic and delay, without keys."""
        return replace(self, bodies=self.bodies[wanted], keys=None, headers=self.headers[wanted])

    def chosen(self, indexes: Sequence[int]) -> "Batch":
        """Return a batch as `part` does, of messages at any indexes."""
        bodies, headers = self.bodies, self.headers
        return replace(
            self,
            bodies=[bodies[index] for index in indexes],
            keys=None,
            headers=[headers[index] for index in indexes] if headers else (),
        )


class BatchSource(ABC):
    """Makes batches of what a splitter finds in inputs, one after the other.

    Attributes:
        error: Why nothing after the returned batches may be published; None: there is no error.
        empty: The number of empty messages so far, which are skipped, because NSQ has none.
        skipped: The number of other parts of the input that were skipped.
    """

    def __init__(self, splitter: MessageSplitter) -> None:
        self.error: str | None = None
        self.empty = 0
        self.skipped = 0
        self._splitter = splitter
        self._name = ""

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of an incomplete message."""
        return self._splitter.unfinished_bytes

    @abstractmethod
    def __len__(self) -> int:
        """How many messages wait for others to join their batch."""

    def begin(self, name: str) -> None:
        self._name = name

    def feed(self, chunk: bytes) -> Iterator[Batch]:
        """Add bytes of the input and yield full batches."""
        yield from self._batches(self._splitter.feed(chunk))

    def end(self) -> Iterator[Batch]:
        """Yield the full batches that the end of the input completes."""
        yield from self._batches(self._splitter.end())

    @abstractmethod
    def rest(self) -> Iterator[Batch]:
        """Yield batches of the messages that wait."""

    @abstractmethod
    def _batches(self, messages: list[bytes]) -> Iterator[Batch]:
        """Yield the full batches after these messages, and set `error` if the splitter stopped."""


class Lines(BatchSource):
    """Makes batches of messages that a splitter finds, unchanged.

    Args:
        batch_size: The most messages in a batch; with headers there may be less.
        headers: Those of each message.
    """

    def __init__(
        self,
        splitter: MessageSplitter,
        batch_size: int,
        topic: str,
        defer_ms: int = 0,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(splitter)
        if headers:
            most = MAX_HPUB_HEADERS_BYTES // prefix_bytes(encode_headers(headers))
            batch_size = min(batch_size, MAX_HPUB_MESSAGES, most)
        self._headers = headers
        self._batcher = Batcher(batch_size)
        self._topic = topic
        self._defer_ms = defer_ms
        self._seen_before = 0  # messages of earlier inputs

    def __len__(self) -> int:
        return len(self._batcher)

    def begin(self, name: str) -> None:
        super().begin(name)
        self._seen_before = self._splitter.seen

    def rest(self) -> Iterator[Batch]:
        if bodies := self._batcher.rest():
            yield self._batch(bodies)

    def _batches(self, messages: list[bytes]) -> Iterator[Batch]:
        if empty := messages.count(b""):
            self.empty += empty
            messages = [message for message in messages if message]
        for bodies in self._batcher.add(messages):
            yield self._batch(bodies)
        if self._splitter.too_long is not None:
            self.error = (
                f"Message {self._splitter.too_long - self._seen_before} of {self._name} is longer than "
                f"{self._splitter.max_bytes} bytes: see --max-msg-size, --delimiter and --framing."
            )
        elif self._splitter.is_cut:
            self.error = f"{self._name} ends within message {self._splitter.seen - self._seen_before + 1}."

    def _batch(self, bodies: list[bytes]) -> Batch:
        headers = [self._headers] * len(bodies) if self._headers else ()
        return Batch(self._topic, bodies, self._defer_ms, headers=headers)
