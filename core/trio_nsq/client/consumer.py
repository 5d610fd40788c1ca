"""A consumer of one channel, on one broker or several."""

import logging
import random as random_module
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, Unpack

import trio

from trio_nsq.protocol import NSQError, is_valid_name

from ..protocol.address import format_address, parse_address
from .background import Background
from .connection import connect
from .errors import ConnectionFailed
from .feed import Feed, Tally
from .inbox import Inbox
from .message import Message, MessageBatch
from .options import OFF, ConnectionOptions, ConnectionSettings
from .reconnect import MAX_DELAY_S, MIN_DELAY_S, ReconnectDelays

CLOSE_TIMEOUT_S = 5.0
TIME_SLICE_S = 0.01
"""How long a loop over messages that are already here may go on without letting other tasks run: the writer
that sends its answers, and whoever answers heartbeats."""

_logger = logging.getLogger("trio_nsq.client")


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Counts since the consumer was opened.

    Attributes:
        received: Messages that arrived, repeated deliveries included.
        finished: Messages finished, as far as their connection was still there to say so.
        requeued: Messages requeued likewise, those returned when the consumer was closed included.
        connections: Brokers connected and subscribed at this moment.
    """

    received: int
    finished: int
    requeued: int
    connections: int


class Consumer:
    """Receives the messages of a channel; an async context manager, and an async iterator of messages.

        async with Consumer("clicks", "archive", max_in_flight=200) as consumer:
            async for message in consumer:
                await store(message.body)
                message.finish()

    or, for bulk, `async for batch in consumer.batches(): ...; batch.finish()`.

    Entering connects: it returns when the first broker is subscribed. From then on every connection that is lost
    is made again, for ever, with growing delays; a loop over messages just waits meanwhile. What was received
    over a lost connection and not finished, the broker delivers again, once the message timeout is over.

    Leaving returns to the brokers what was received and not answered, so nothing stays in flight; see `aclose`.
    Several tasks may iterate over one consumer: each message goes to one of them. Cancelling a task that waits for a
    message takes none away.

    Args:
        topic: The topic; created if need be.
        channel: The channel; created if need be.
        nsqd_tcp_addresses: The brokers, `host:port` each.
        max_in_flight: How many unanswered messages to hold at most, at least 1, shared evenly between the
            connections. A connection is never given less than one, and never more than the broker allows. While
            shares move from one connection to another the sum may be above it for a moment.
        reconnect_min_s: The first delay before a connection is made again.
        reconnect_max_s: The longest one.
        close_timeout_s: How long leaving may take at most; 0: just hang up, leaving messages in flight until
            their time is up.
        random: Gives numbers in [0, 1), for the jitter of the delays.
        options: See `ConnectionSettings`.

    Raises:
        ValueError: A name, an address or an option that cannot work.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: Sequence[str] = ("127.0.0.1:4150",),
        max_in_flight: int = 1,
        reconnect_min_s: float = MIN_DELAY_S,
        reconnect_max_s: float = MAX_DELAY_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        random: Callable[[], float] = random_module.random,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        for what, name in (("topic", topic), ("channel", channel)):
            if not is_valid_name(name):
                raise ValueError(f"{name!r} is not a valid {what} name")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        self._settings = ConnectionSettings(**options)
        if self._settings.heartbeat_interval_ms == OFF:
            raise ValueError("heartbeat_interval_ms is -1; brokers let nobody subscribe without heartbeats")
        self._addresses = _addresses(nsqd_tcp_addresses)
        self._topic = topic
        self._channel = channel
        self._max_in_flight = max_in_flight
        self._close_timeout_s = close_timeout_s
        self._delays = {
            address: ReconnectDelays(reconnect_min_s, reconnect_max_s, random) for address in self._addresses
        }
        self._background = Background()
        self._inbox = Inbox()
        self._tally = Tally()
        self._feeds: list[Feed] = []
        self._first_failures: dict[str, ConnectionFailed] = {}
        self._first_connected = trio.Event()
        self._first_settled = trio.Event()  # one address is connected, or none can be
        self._yield_at = 0.0
        self._entered = self._closing = False
        self._closed = trio.Event()

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ConnectionFailed: None of the brokers could be reached.
        """
        if self._entered:
            raise RuntimeError("a Consumer can be entered only once")
        self._entered = True
        await self._background.open(self._run)
        try:
            await self._first_settled.wait()
            if not self._feeds and len(self._first_failures) == len(self._addresses):
                raise _none_reached([self._first_failures[address] for address in self._addresses])
        except BaseException:
            self._inbox.close()
            await self._background.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        finally:
            await self._background.close()

    async def aclose(self) -> None:
        """Stop receiving, return what is not answered, and disconnect; loops over the consumer end.

        Every broker is told to send no more (CLS); what has been received from it and not finished or requeued,
        is requeued without delay; then the connection is closed. Answers given afterwards have no effect.

        This takes at most `close_timeout_s`, and is done also when the task is cancelled: a program that is
        interrupted does not leave its messages in flight. May be called again.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._inbox.close()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for feed in self._feeds if self._close_timeout_s > 0 else ():
                    nursery.start_soon(feed.say_goodbye, self._close_timeout_s)
            if self._entered:
                await self._background.stop()
        self._closed.set()

    def stats(self) -> ConsumerStats:
        """What this consumer has done so far."""
        tally = self._tally
        return ConsumerStats(tally.received, tally.finished, tally.requeued, len(self._feeds))

    @property
    def max_in_flight(self) -> int:
        """How many unanswered messages to hold at most."""
        return self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        """Change it, from the brokers' next delivery on; 0: they send nothing more until it is changed again."""
        if count < 0:
            raise ValueError(f"max_in_flight is {count}; it must be at least 0")
        self._max_in_flight = count
        self._share_ready_count()

    def __aiter__(self) -> AsyncIterator[Message]:
        """Message by message, as they arrive; ends when the consumer is closed."""
        return self

    async def __anext__(self) -> Message:
        if trio.current_time() >= self._yield_at:
            await self._wait()
        while (message := self._inbox.take_message()) is None:
            await self._wait()
        return message

    def batches(self, max_messages: int | None = None) -> AsyncIterator[MessageBatch]:
        """Batch by batch: whatever has arrived together. Much cheaper for each message than one by one.

        Args:
            max_messages: Of a larger batch hand out no more than this at a time; None: all of it.

        Raises:
            ValueError: max_messages is less than 1.
        """
        if max_messages is not None and max_messages < 1:
            raise ValueError(f"max_messages is {max_messages}; it must be at least 1")
        return _Batches(self, max_messages)

    async def _next_batch(self, max_messages: int | None) -> MessageBatch:
        await self._wait()
        while (batch := self._inbox.take_batch(max_messages)) is None:
            await self._wait()
        return batch

    async def _wait(self) -> None:
        """Let other tasks run until there may be something to take, or raise StopAsyncIteration."""
        if not self._entered:
            raise RuntimeError("a Consumer receives only inside its `async with` block")
        await self._inbox.wait()
        if self._inbox.closed:
            raise StopAsyncIteration
        self._yield_at = trio.current_time() + TIME_SLICE_S

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            for address in self._addresses:
                nursery.start_soon(self._keep_connected, address)

    async def _keep_connected(self, address: str) -> None:
        delays = self._delays[address]
        first = True
        while not self._closing:
            try:
                connection = await connect(address, self._settings)
                await connection.subscribe(self._topic, self._channel)
            except ConnectionFailed as error:
                if first:
                    self._first_failed(error)
                    await self._first_connected.wait()  # if that never is, entering raises and cancels this
                delay_s = delays.next_s()
                _logger.warning("%s; next attempt in %.1f s", error, delay_s)
            else:
                connected_at = trio.current_time()
                reason = await self._receive(Feed(connection, self._tally, self._inbox.put))
                if self._closing:
                    return
                delays.connection_lasted(trio.current_time() - connected_at)
                delay_s = delays.next_s()
                _logger.warning("%s; connecting again in %.1f s", reason, delay_s)
            first = False
            await trio.sleep(delay_s)

    async def _receive(self, feed: Feed) -> NSQError:
        """Take part in the sharing of max_in_flight and receive, until the connection ends; say why it did."""
        self._feeds.append(feed)
        self._share_ready_count()
        self._first_connected.set()
        self._first_settled.set()
        try:
            return await feed.run()
        finally:
            self._feeds.remove(feed)
            self._inbox.discard(feed)
            self._share_ready_count()

    def _share_ready_count(self) -> None:
        if self._feeds and not self._closing:
            share, rest = divmod(self._max_in_flight, len(self._feeds))
            least = min(1, self._max_in_flight)
            for place, feed in enumerate(self._feeds):
                feed.set_ready_count(max(least, share + (place < rest)))

    def _first_failed(self, error: ConnectionFailed) -> None:
        self._first_failures[error.address] = error
        if len(self._first_failures) == len(self._addresses):
            self._first_settled.set()


class _Batches:
    """Not an async generator: leaving a loop over one early would leave it to the garbage collector."""

    def __init__(self, consumer: Consumer, max_messages: int | None) -> None:
        self._consumer = consumer
        self._max_messages = max_messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageBatch:
        return await self._consumer._next_batch(self._max_messages)


def _addresses(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise ValueError(f"nsqd_tcp_addresses is the string {texts!r}; it must be a list of addresses")
    addresses = list(dict.fromkeys(format_address(*parse_address(text)) for text in texts))
    if not addresses:
        raise ValueError("nsqd_tcp_addresses is empty; at least one is needed")
    return addresses


def _none_reached(failures: list[ConnectionFailed]) -> ConnectionFailed:
    if len(failures) == 1:
        return failures[0]
    addresses = ", ".join(failure.address for failure in failures)
    reasons = "; ".join(f"{failure.address}: {failure.reason}" for failure in failures)
    return ConnectionFailed(addresses, reasons)
