"""The asynchronous part of `pub`: reads, batches and publishes concurrently, and counts the results.

One task reads and forms batches. Other tasks publish a batch each and wait for its acknowledgement, so several
batches are outstanding. The channel between them has no buffer, so input is read at the broker's speed, and batches
reach the broker in order. With several brokers, every batch goes to each broker; the next is read when all brokers
have taken it.

While a broker is unreachable or cannot store messages, outstanding batches wait, and nothing is read. The oldest
batch is retried until it is acknowledged; then the others follow.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import trio

from trio_nsq.client import AuthRefused, BrokerError, ConnectionFailed, ConnectionLost, PublishFailed
from trio_nsq.client.connection.reconnect import ReconnectDelays
from trio_nsq.client.publishing.queue import RETRIABLE_CODES
from trio_nsq.protocol.batcher import Batcher
from trio_nsq.wording import count_of

from ...framework.errors import ExitCode, Failure
from ...framework.output import print_diagnostic
from ..shared.rate_limiter import RateLimiter
from .input import Input, Splitter, open_input
from .send import Sender

LINGER_S = 0.05
"""How long a message waits for others to join its batch."""

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
"""The delays between two attempts to publish the same batch."""


@dataclass(slots=True)
class BrokerResult:
    """The results at one broker so far.

    Attributes:
        acknowledged_bytes: Bytes of the bodies that the broker has acknowledged.
        maybe_stored: Messages that were sent and not acknowledged.
        not_stored: Messages that were read and are not stored.
        failure: The first failure.
    """

    address: str
    acknowledged: int = 0
    acknowledged_bytes: int = 0
    maybe_stored: int = 0
    not_stored: int = 0
    failure: PublishFailed | None = None


@dataclass(slots=True)
class PublishResult:
    """The results so far.

    Attributes:
        brokers: The results at each broker; at least one.
        held_back: Messages that were read but not due yet at a signal; they are not published.
        empty: Empty messages, which are skipped.
        unfinished_bytes: The bytes of a message that was incomplete at a signal; it is not published.
        input_failure: Why reading the input failed.
        stopped: The exit code of the signal that arrived.
    """

    brokers: list[BrokerResult]
    held_back: int = 0
    empty: int = 0
    unfinished_bytes: int = 0
    input_failure: str | None = None
    stopped: ExitCode | None = None

    @property
    def acknowledged(self) -> int:
        """Messages that every broker has acknowledged."""
        return min(broker.acknowledged for broker in self.brokers)

    @property
    def acknowledged_bytes(self) -> int:
        """The bytes of their bodies."""
        return min(broker.acknowledged_bytes for broker in self.brokers)

    @property
    def over(self) -> bool:
        """Whether to stop reading."""
        failed = any(broker.failure for broker in self.brokers)
        return bool(failed or self.input_failure or self.stopped)


class PublishPipeline:
    """Publishes inputs to a topic, every message to each broker.

    Args:
        senders: A sender for each broker's address; at least one.
        retry: Whether to retry after a lost connection, or if the broker cannot store messages now.
        limiter: Limits the rate; None: no limit.

    Attributes:
        result: Up to date at any time.
    """

    def __init__(
        self,
        senders: Mapping[str, Sender],
        *,
        delimiter: bytes,
        max_msg_size: int,
        batch_size: int,
        retry: bool,
        limiter: RateLimiter | None,
    ) -> None:
        self._publishers = [
            _Publisher(sender, address, retry, self._record_failure, alone=len(senders) == 1)
            for address, sender in senders.items()
        ]
        self.result = PublishResult([publisher.result for publisher in self._publishers])
        self._max_msg_size = max_msg_size
        self._splitter = Splitter(delimiter, max_msg_size)
        self._batcher = Batcher(min(batch_size, limiter.max_messages) if limiter else batch_size)
        self._limiter = limiter
        self._pause = trio.CancelScope()

    def stop(self, code: ExitCode) -> None:
        """Stop reading. Messages that were read are published if the limiter and the brokers allow it now."""
        self.result.stopped = code
        self._pause.cancel()
        for publisher in self._publishers:
            publisher.stop_waiting()

    async def run(self, paths: Sequence[str], read_bytes: int) -> None:
        """Publish inputs one after the other (`-` is standard input). `result` has the outcome."""
        async with trio.open_nursery() as nursery:
            with ExitStack() as stack:
                for publisher in self._publishers:
                    stack.enter_context(publisher.batches)
                    nursery.start_soon(publisher.run)
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
                self.result.unfinished_bytes = self._splitter.unfinished_bytes
                await self._distribute(self._batcher.rest())

    async def _read(self, source: Input) -> None:
        """Read an input to its end, or until `result.over`."""
        splitter, batcher, result = self._splitter, self._batcher, self.result
        first = splitter.seen
        flush_at = math.inf
        at_end = False
        while not (at_end or result.over):
            chunk: bytes | None = None
            with self._pausable(flush_at):
                chunk = await source.read()
            if chunk is None:
                if not result.over:
                    await self._distribute(batcher.rest())
            else:
                at_end = not chunk
                for batch in batcher.add(splitter.end() if at_end else splitter.feed(chunk)):
                    await self._distribute(batch)
                result.empty = splitter.empty
                if splitter.too_long is not None:
                    result.input_failure = (
                        f"Message {splitter.too_long - first} of {source.name} is longer than "
                        f"{self._max_msg_size} bytes: see --max-msg-size and --delimiter."
                    )
            if not batcher:
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

    async def _distribute(self, batch: list[bytes]) -> None:
        if not batch:
            return
        if self._limiter is not None:
            with self._pausable():
                await self._limiter.wait()
            if self.result.stopped and not self._limiter.is_due():
                self.result.held_back += len(batch)
                return
            self._limiter.take(len(batch))
        first, *others = self._publishers
        if not others:
            await first.batches.send(batch)
            return
        # Concurrently: the other brokers get this batch even while one is unreachable.
        async with trio.open_nursery() as nursery:
            for publisher in self._publishers:
                nursery.start_soon(publisher.batches.send, batch)

    def _record_failure(self) -> None:
        """End after a permanent failure of a broker, without waiting for other unreachable brokers."""
        self._pause.cancel()
        for publisher in self._publishers:
            if publisher.result.failure is None:
                publisher.stop_waiting()


class _Publisher:
    """Publishes batches to one broker, in order, and calls `on_failure` after a permanent failure.

    Attributes:
        batches: Takes a batch as soon as one more may be outstanding. The caller closes it.
        result: Up to date at any time.
    """

    def __init__(
        self, sender: Sender, address: str, retry: bool, on_failure: Callable[[], None], *, alone: bool
    ) -> None:
        self.result = BrokerResult(address)
        self._sender = sender
        self._retry = retry
        self._on_failure = on_failure
        self._alone = alone
        self._begun = 0  # batches taken so far
        # The unacknowledged batches, by number; True: it was given to the sender.
        self._unsettled: dict[int, bool] = {}
        self._turns = trio.lowlevel.ParkingLot()  # tasks that wait for their turn
        self._outage: PublishFailed | None = None  # the failure of the last attempt
        self._retrying = trio.CancelScope()
        self._delays = ReconnectDelays(FIRST_DELAY_S, LONGEST_DELAY_S, random.random)
        self._in_doubt = 0  # messages sent more than once in this outage; some may have been stored before
        self.batches, self._receive = trio.open_memory_channel[list[bytes]](0)

    async def run(self) -> None:
        """Publish until `batches` is closed, and all that it took is settled."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._sender.at_once):
                nursery.start_soon(self._publish_batches)

    def stop_waiting(self) -> None:
        """Give up what fails from now on, and what is tried again now."""
        self._retry = False
        self._retrying.cancel()

    async def _publish_batches(self) -> None:
        async for batch in self._receive:
            number = self._begun
            self._begun += 1
            self._unsettled[number] = False
            try:
                await self._publish(number, batch)
            finally:
                del self._unsettled[number]
                self._turns.unpark_all()

    async def _publish(self, number: int, batch: list[bytes]) -> None:
        """Publish a batch, with retries, until it is acknowledged or fails permanently."""
        maybe_stored = False
        while True:
            await self._wait_for_turn(number)
            if self.result.failure is not None:
                self._count_lost(len(batch), maybe_stored)
                return
            try:
                await self._attempt(number, batch)
            except PublishFailed as error:
                self._unsettled[number] = False
                self._acknowledged(batch[: error.acknowledged])
                batch = batch[error.acknowledged :]
                if error.maybe_stored and not maybe_stored:
                    maybe_stored = True
                    self._in_doubt += len(batch)
                if not self._is_temporary(error):
                    self._count_lost(len(batch), maybe_stored)
                    self._give_up(error)
                    return
                self._begin_outage(error)
            else:
                self._acknowledged(batch)
                if self._outage is not None:
                    self._end_outage()
                return

    async def _wait_for_turn(self, number: int) -> None:
        """Wait until a batch may be sent: after all batches before it were sent, in an outage acknowledged."""
        while self.result.failure is None:
            before = (sent for other, sent in self._unsettled.items() if other < number)
            if not any(not sent or self._outage is not None for sent in before):
                break
            await self._turns.park()

    async def _attempt(self, number: int, batch: list[bytes]) -> None:
        """Send a batch; in an outage, after a delay, and `stop_waiting` cancels both.

        Raises PublishFailed: this attempt failed. A batch whose sending was cancelled may be stored.
        """
        self._unsettled[number] = True
        outage = self._outage
        if outage is None:
            self._turns.unpark_all()
            await self._sender.send(batch)
            return
        sent = False
        with trio.CancelScope() as self._retrying:
            if not self._retry:
                self._retrying.cancel()
            await trio.sleep(self._delays.next_s())
            sent = True
            await self._sender.send(batch)
            return
        # A new failure: the outage's failure was counted before, perhaps for another batch.
        raise PublishFailed(outage.reason, maybe_stored=sent) from outage.__cause__

    def _is_temporary(self, error: PublishFailed) -> bool:
        """Return whether to retry after this error."""
        cause = error.__cause__
        if not self._retry or isinstance(cause, AuthRefused):
            return False
        if not isinstance(cause, BrokerError):
            return isinstance(cause, ConnectionFailed | ConnectionLost)
        # Before the first acknowledgement, a refusal may be an error of the command line: report it at once.
        later = cause.code in RETRIABLE_CODES and self.result.acknowledged > 0
        return later or cause.text.endswith("exiting")

    def _begin_outage(self, error: PublishFailed) -> None:
        if self._outage is None:
            cause = error.__cause__
            if isinstance(cause, BrokerError):
                what = f"refused: {cause.text.partition(' failed ')[2] or cause.text}"
            else:
                what = f"is unreachable ({error.reason})"
            others = "" if self._alone else " Until then, the other brokers get no new messages."
            print_diagnostic(
                f"Warning: the broker at {self.result.address} {what}. Retrying until it accepts messages.{others}"
            )
        self._outage = error

    def _end_outage(self) -> None:
        text = f"Note: the broker at {self.result.address} accepts messages again."
        if self._in_doubt and self._sender.may_repeat:
            text += f" Up to {count_of(self._in_doubt, 'message')} may be stored twice."
        print_diagnostic(text)
        self._outage, self._in_doubt = None, 0
        self._delays.reset()

    def _count_lost(self, count: int, maybe_stored: bool) -> None:
        if maybe_stored:
            self.result.maybe_stored += count
        else:
            self.result.not_stored += count

    def _give_up(self, error: PublishFailed) -> None:
        if self.result.failure is None:
            self.result.failure = error
            self._on_failure()

    def _acknowledged(self, batch: list[bytes]) -> None:
        self.result.acknowledged += len(batch)
        self.result.acknowledged_bytes += sum(map(len, batch))
