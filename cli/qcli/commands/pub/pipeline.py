"""The asynchronous part of `pub`: reads, batches and publishes concurrently, and counts the results.

One task reads and forms batches. Other tasks publish a batch each and wait for its acknowledgement, so several
batches are outstanding. A batch waits until a broker takes it, so input is read at the brokers' speed, and batches
reach a broker in order. With several brokers, a `Strategy` gives the messages to them; the next batch is read when all
brokers that get this one have taken it.

While a broker is unreachable or cannot store messages, its outstanding batches wait, and nothing is read, unless
another broker may get them. The oldest batch is retried until it is acknowledged; then the others follow.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import trio

from ...framework.errors import ExitCode, Failure
from ..shared.rate_limiter import RateLimiter
from .batches import Batch, BatchSource
from .input import Input, open_input, size_of
from .publisher import Publisher
from .results import PublishResult
from .send import Sender
from .strategy import AllBrokers, Strategy

LINGER_S = 0.05
"""How long a message waits for others to join its batch."""

SHORTEST_BYTES = 2
"""The shortest message in an input: a byte and its delimiter."""


class ReadAhead:
    """Adapts how much of an input is read at a time to the messages that a limiter lets through together.

    A signal publishes at once what was read, faster than the rate, so this must be little.

    Args:
        given: Its `read_bytes` is the most, and is changed.
        max_messages: How many messages to read at a time; an attribute, too.
    """

    def __init__(self, given: Input, max_messages: int) -> None:
        self.max_messages = max_messages
        self._given = given
        self._most = given.read_bytes
        self._bytes = 0  # since the last complete message
        self._set(0)

    def adapt(self, read_bytes: int, messages: int, unfinished_bytes: int) -> None:
        """Record how many messages these bytes completed, and how much of the next one they have."""
        self._bytes += read_bytes
        if messages:
            self._set((self._bytes - unfinished_bytes) * self.max_messages // messages)
            self._bytes = unfinished_bytes
        else:
            self._set(max(self._given.read_bytes, self._bytes))

    def _set(self, wanted: int) -> None:
        least = SHORTEST_BYTES * self.max_messages
        self._given.read_bytes = min(self._most, max(least, wanted))


class PublishPipeline:
    """Publishes inputs.

    Args:
        senders: A sender for each broker's address; at least one.
        source: Makes batches from the inputs; with a limiter, of at most its `max_messages`.
        strategy: Gives the batches to the brokers.
        retry: Whether to retry after a lost connection, or if the broker cannot store messages now.
        limiter: Limits the rate; None: no limit.

    Attributes:
        result: Up to date at any time.
    """

    def __init__(
        self,
        senders: Mapping[str, Sender],
        source: BatchSource,
        *,
        strategy: Callable[[Sequence[Publisher]], Strategy] = AllBrokers,
        retry: bool = True,
        limiter: RateLimiter | None = None,
    ) -> None:
        self._publishers = [
            Publisher(sender, address, retry, self._record_failure) for address, sender in senders.items()
        ]
        self._strategy = strategy(self._publishers)
        self.result = PublishResult(
            [publisher.result for publisher in self._publishers], self._strategy.is_spread
        )
        self._source = source
        self._limiter = limiter
        self._pause = trio.CancelScope()

    def stop(self, code: ExitCode) -> None:
        """Stop reading. Messages that were read are published if brokers take them, without the limiter."""
        self.result.stopped = code
        self._pause.cancel()
        for publisher in self._publishers:
            publisher.stop_waiting()

    async def run(self, paths: Sequence[str], read_bytes: int) -> None:
        """Publish inputs one after the other (`-` is standard input). `result` has the outcome."""
        self.result.total_bytes = size_of(paths)
        async with trio.open_nursery() as nursery:
            for publisher in self._publishers:
                publisher.begin(nursery, self._strategy)
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
                self.result.input_failure = error.message
            self.result.unfinished_bytes = self._source.unfinished_bytes
            await self._distribute(self._source.rest())

    async def _read(self, given: Input) -> None:
        """Read an input to its end, or until `result.over`."""
        source, result = self._source, self.result
        source.begin(given.name)
        ahead = None if self._limiter is None else ReadAhead(given, self._limiter.max_messages)
        flush_at = math.inf
        at_end = False
        while not (at_end or result.over):
            chunk: bytes | None = None
            with self._pausable(flush_at):
                chunk = await given.read()
            if chunk is None:
                if not result.over:
                    await self._distribute(source.rest())
            else:
                at_end = not chunk
                result.read_bytes += len(chunk)
                before = len(source)
                count = await self._distribute(source.end() if at_end else source.feed(chunk))
                if ahead is not None:
                    ahead.adapt(len(chunk), count + len(source) - before, source.unfinished_bytes)
                    if len(source) >= ahead.max_messages:  # of several topics
                        await self._distribute(source.rest())
                result.empty, result.skipped = source.empty, source.skipped
                result.input_failure = source.error
            if not source:
                flush_at = math.inf
            elif flush_at == math.inf:
                flush_at = trio.current_time() + LINGER_S

    @contextmanager
    def _pausable(self, deadline: float = math.inf) -> Iterator[None]:
        """Let `stop`, a failure or the deadline cancel the block."""
        with trio.CancelScope(deadline=deadline) as self._pause:
            if self.result.over:
                self._pause.cancel()
            yield

    async def _distribute(self, batches: Iterable[Batch]) -> int:
        """Publish batches, at the limiter's rate, and return the number of messages."""
        count = 0
        for batch in batches:
            self.result.topics.add(batch.topic)
            if self._limiter is not None:
                with self._pausable():
                    await self._limiter.wait()
                self._limiter.take(len(batch.bodies))
            await self._strategy.distribute(batch)
            count += len(batch.bodies)
        return count

    def _record_failure(self) -> None:
        """End after a permanent failure of a broker, without waiting for other unreachable brokers."""
        self._pause.cancel()
        for publisher in self._publishers:
            if publisher.result.failure is None:
                publisher.stop_waiting()
