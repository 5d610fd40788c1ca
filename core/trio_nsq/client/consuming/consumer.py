"""A consumer of one channel, on one broker or several."""

import random as random_module
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, Unpack

import trio

from trio_nsq.protocol import is_ephemeral, is_valid_name
from trio_nsq.under_trio import require_trio

from ..background import BackgroundTask
from ..connection.addresses import each_once, lookupd_address, nsqd_address
from ..connection.options import refuse_unknown
from ..errors import ConnectionFailed
from .handlers import ActiveHandlers, Handler, handle
from .message import Message, MessageBatch
from .options import ConsumerOptions, ConsumerSettings
from .receive_queue import ReceiveQueue
from .subscription import FlowControl
from .subscriptions import Subscriptions

DEFAULT_NSQD_TCP_ADDRESSES = ("127.0.0.1:4150",)
DEFAULT_MAX_ATTEMPTS = 5
TIME_SLICE_S = 0.01
"""How long a loop over received messages may go on without letting other tasks run: the writer that sends its
answers, and the reader that answers heartbeats."""


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

    or, for bulk, `async for batch in consumer.batches(): ...; batch.finish()`, or `await consumer.run(handler)`.

    Entering connects: it returns when the first broker is subscribed, or when discovery services have said that there
    is none yet. From then on the consumer reconnects for ever, with growing delays; a loop over messages just
    waits meanwhile. The broker redelivers what was received over a lost connection and not finished, when the message
    timeout is over. Brokers that discovery services name are connected as they appear; a broker that no service names
    any more is not connected again.

    Leaving returns to the brokers what was received and not answered, so nothing stays in flight; see `aclose`.
    Several tasks may iterate over one consumer: each message goes to one of them. Cancelling a task that waits for a
    message takes none away.

    When messages fail (are requeued, unless with `backoff=False`), the consumer backs off: it takes none for a while,
    then one, and goes by its result; see `max_backoff_duration_s`.

    Args:
        topic: The topic; created if need be.
        channel: The channel; created if need be.
        nsqd_tcp_addresses: Brokers, `host:port` each. None: `127.0.0.1:4150`, if no discovery services are given.
        lookupd_http_addresses: Discovery services (nsqlookupd) that know more of them: `host:port`, or a URL.
        max_in_flight: How many unanswered messages to hold at most, at least 1, shared evenly between the
            connections, and never more than the broker of one allows. If there are more connections than this, they
            take turns. While shares move from one connection to another the sum may be above it for a moment.
        random: Gives numbers in [0, 1), for the jitter of delays, and for whose turn it is.
        options: See `ConsumerSettings`, and `ConnectionSettings`.

    Attributes:
        without_private_channels: With the option `private_channel`, awaited with the address of each broker that has no
            private channels, before each SUB there. If it returns, the channel is subscribed to as any other. If it
            raises `ConnectionFailed`, as it does by default, the broker is not; any other error ends the consumer.

    Raises:
        ValueError: A name, an address or an option that cannot work.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: Sequence[str] | None = None,
        lookupd_http_addresses: Sequence[str] = (),
        max_in_flight: int = 1,
        random: Callable[[], float] = random_module.random,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        for what, name in (("topic", topic), ("channel", channel)):
            if not is_valid_name(name):
                raise ValueError(f"{name!r} is not a valid {what} name")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        refuse_unknown(Consumer, ConsumerSettings, options)
        self._settings = ConsumerSettings(**options)
        if self._settings.private_channel and not is_ephemeral(channel):
            raise ValueError(
                f"private_channel is True; the channel's name {channel!r} must end in #ephemeral"
            )
        self.without_private_channels: Callable[[str], Awaitable[None]] = _refuse
        lookupds = each_once("lookupd_http_addresses", lookupd_http_addresses, lookupd_address)
        if nsqd_tcp_addresses is None:
            nsqd_tcp_addresses = () if lookupds else DEFAULT_NSQD_TCP_ADDRESSES
        addresses = each_once("nsqd_tcp_addresses", nsqd_tcp_addresses, nsqd_address)
        if not addresses and not lookupds:
            raise ValueError("nsqd_tcp_addresses is empty; at least one is needed")
        self._background = BackgroundTask()
        self._queue = ReceiveQueue()
        self._flow = FlowControl(max_in_flight, self._settings, random)
        self._active = ActiveHandlers()
        self._subscriptions = Subscriptions(
            addresses,
            lookupds,
            topic,
            channel,
            self._settings,
            random,
            flow=self._flow,
            queue=self._queue,
            without_private_channels=lambda address: self.without_private_channels(address),
        )
        self._yield_at = 0.0
        self._now = trio.current_time
        self._entered = self._closing = False
        self._closed = trio.Event()

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ConnectionFailed: None of the brokers could be reached, and no discovery service was there to name others.
            RuntimeError: This is no trio task, or it was entered before.
        """
        require_trio("trio_nsq.Consumer", "trio_nsq.sync.Consumer")
        if self._entered:
            raise RuntimeError("a Consumer can be entered only once")
        self._entered = True
        self._now = trio.lowlevel.current_clock().current_time  # in half the time: every message asks
        await self._background.open(self._subscriptions.run)
        try:
            await self._subscriptions.wait_opened()
        except BaseException:
            self._queue.close()
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
        """Stop receiving, return what is not answered, and disconnect; loops over the consumer, and `run`, end.

        Every broker is told to send no more (CLS). Handlers of `run` that are at work may end it, for half of
        `close_timeout_s`. What has been received and not finished or requeued by then is requeued without delay;
        then the connection is closed. Answers given afterwards have no effect.

        This takes at most `close_timeout_s`, and is done also when the task is cancelled: a program that is
        interrupted does not leave its messages in flight. May be called again.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._subscriptions.stop()
        self._flow.stopped = True
        self._queue.close()
        timeout_s = self._settings.close_timeout_s
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for subscription in self._flow.connections if timeout_s > 0 else ():
                    nursery.start_soon(subscription.unsubscribe, timeout_s, self._active)
            if self._entered:
                await self._background.stop()
        self._closed.set()

    def stats(self) -> ConsumerStats:
        """What this consumer has done so far."""
        flow = self._flow
        return ConsumerStats(flow.received, flow.finished, flow.requeued, len(flow.connections))

    @property
    def max_in_flight(self) -> int:
        """How many unanswered messages to hold at most."""
        return self._flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        """Change it, from the brokers' next delivery on; 0: they send nothing more until it is changed again."""
        if count < 0:
            raise ValueError(f"max_in_flight is {count}; it must be at least 0")
        self._flow.max_in_flight = count
        self._flow.update()

    @property
    def is_starved(self) -> bool:
        """Whether some broker waits for answers before it sends more, or soon will.

        That is, whether 85 % of the messages that it may have in flight, or more, are here and not answered. A program
        that collects messages knows by this that it is time to work on them.
        """
        return self._flow.in_flight_reaches(0.85)

    @property
    def paused(self) -> bool:
        """Whether the consumer was told to pause."""
        return self._flow.paused

    def pause(self) -> None:
        """Have the brokers send nothing more until `unpause`; connections stay, and what has come can be answered."""
        self._flow.paused = True
        self._flow.update()

    def unpause(self) -> None:
        """Go on after `pause`."""
        self._flow.paused = False
        self._flow.update()

    def __aiter__(self) -> AsyncIterator[Message]:
        """Message by message, as they arrive; ends when the consumer is closed."""
        return self

    async def __anext__(self) -> Message:
        if self._now() >= self._yield_at:
            await self._wait()
        while (message := self._queue.take_message()) is None:
            await self._wait()
        return message

    def batches(self, max_messages: int | None = None, max_wait_s: float = 0) -> AsyncIterator[MessageBatch]:
        """Batch by batch: whatever has arrived together. Much cheaper for each message than one by one.

        Args:
            max_messages: Hand out no more than this at a time; None: all there are.
            max_wait_s: How long to wait for more once the first messages are there, so that one batch is made of what
                arrives in this time, from all brokers. It is handed out earlier when it has `max_messages`, or when
                some broker sends no more before it has answers, as `max_in_flight` allows no more.

        Raises:
            ValueError: max_messages is less than 1, or max_wait_s less than 0.
        """
        if max_messages is not None and max_messages < 1:
            raise ValueError(f"max_messages is {max_messages}; it must be at least 1")
        if not max_wait_s >= 0:
            raise ValueError(f"max_wait_s is {max_wait_s}; it must be at least 0")
        return _Batches(self, max_messages, max_wait_s)

    async def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 1,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        given_up: Handler | None = None,
        auto_touch: bool = False,
    ) -> None:
        """Hand every message to `handler`, until the consumer is closed or the task cancelled.

        A message is finished when the handler returns, and requeued when it raises an `Exception`, which is logged:
        after `default_requeue_delay_ms` times its attempts, and with backoff. A handler may also answer it itself.

        Args:
            handler: An async function of one message.
            concurrency: How many are handled at the same time, at least 1; `max_in_flight` should be no less.
            max_attempts: A message that is delivered more often is given up: finished without being handled, with a
                line in the log. 0: none is.
            given_up: Called instead, with a message that is given up, before it is finished: to put it aside, say. If
                it raises, the message is requeued like any other that failed.
            auto_touch: Have the broker wait (TOUCH) for as long as handling a message takes, up to its maximum
                (15 minutes in all, unless configured).

        Raises:
            TypeError: A handler is no async function. The message stays unanswered.
            ValueError: concurrency is less than 1, or max_attempts less than 0.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        if max_attempts < 0:
            raise ValueError(f"max_attempts is {max_attempts}; it must be at least 0")

        async def handle_each() -> None:
            async for message in self:
                with self._active:
                    await handle(
                        message,
                        handler,
                        max_attempts=max_attempts,
                        given_up=given_up,
                        auto_touch=auto_touch,
                    )

        async with trio.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(handle_each)

    async def _next_batch(self, max_messages: int | None, max_wait_s: float) -> MessageBatch:
        while True:
            await self._wait()
            if not max_wait_s:
                batch = self._queue.take_batch(max_messages)
            else:
                # Nothing is taken before the time is over, so that nothing is lost if this is cancelled.
                with trio.move_on_after(max_wait_s):
                    while not self._is_enough(max_messages):
                        await self._queue.wait_for_more()
                batch = self._queue.take_combined(max_messages)
            if batch is not None:
                return batch

    def _is_enough(self, max_messages: int | None) -> bool:
        """Whether no more messages are wanted, or none can come before some are answered."""
        if self._queue.closed or self._flow.in_flight_reaches(1.0):
            return True
        return max_messages is not None and self._queue.available >= max_messages

    async def _wait(self) -> None:
        """Let other tasks run until there may be something to take, or raise StopAsyncIteration."""
        if not self._entered:
            raise RuntimeError("a Consumer receives only inside its `async with` block")
        await self._queue.wait()
        if self._queue.closed:
            raise StopAsyncIteration
        self._yield_at = trio.current_time() + TIME_SLICE_S


async def _refuse(address: str) -> None:
    raise ConnectionFailed(address, "it has no private channels, and private_channel is True")


class _Batches:
    """Not an async generator: leaving a loop over one early would leave it to the garbage collector."""

    def __init__(self, consumer: Consumer, max_messages: int | None, max_wait_s: float) -> None:
        self._consumer = consumer
        self._max_messages = max_messages
        self._max_wait_s = max_wait_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageBatch:
        return await self._consumer._next_batch(self._max_messages, self._max_wait_s)
