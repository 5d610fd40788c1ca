"""A consumer of one channel on one or more brokers."""

import math
import random as random_module
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from trio_nsq.protocol import is_ephemeral
from trio_nsq.text.arguments import check_int, check_seconds, check_type

from ...event_loop import runtime
from ..arguments import check_name
from ..background import BackgroundTask
from ..connection.addresses import addresses_of
from ..connection.options import accepted_options
from ..errors import ConnectionFailed, ConsumerClosed
from ..hooks import observed, processing
from ..topics import Topic, name_of
from .answers import GivenUp, Handler, OnFailure
from .dead_letters import dead_letter_publisher
from .handlers import (
    ActiveHandlers,
    FailureCounts,
    Handling,
    check_async,
    check_awaitable,
    check_plain,
    decoding,
    handle_all,
)
from .message import Message, MessageBatch
from .options import ConsumerOptions, ConsumerSettings, RunOptions
from .receive_queue import ReceiveQueue
from .stop_signals import stopping_on
from .subscription import FlowControl
from .subscriptions import Subscriptions

_Value = TypeVar("_Value")

TIME_SLICE_S = 0.01
"""How long a loop over received messages may run before other tasks do: the writer that sends its answers, and the
reader that answers heartbeats."""


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Counts since the consumer was opened.

    Attributes:
        received: Received messages, including redeliveries.
        finished: Finished messages whose connection was still open.
        requeued: Requeued messages whose connection was still open, including those returned by `aclose`.
        connections: Brokers that are connected and subscribed now.
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

    For throughput, use `async for batch in consumer.batches(): ...; batch.finish()`, or `await consumer.run(handler)`.

    Entering the block connects. It returns when the first broker is subscribed, or when the discovery services answer
    that no broker has the topic yet. From then on the consumer reconnects without limit, with growing delays; a loop
    over messages waits meanwhile. If a connection is lost, the broker redelivers its unfinished messages after the
    message timeout. The consumer connects to each broker that a discovery service returns. It does not reconnect to a
    broker that no service returns any more.

    If a broker refuses the secret, for example because it was revoked, retrying does not help: the consumer stops, and
    the loop over messages, or `run`, raises `AuthRefused`. The block then returns all unanswered messages.

    Leaving the block returns all unanswered messages to the brokers, so nothing stays in flight; see `aclose`. Several
    tasks may iterate over one consumer: each message goes to one of them. They run in the event loop that entered it;
    in others, its methods raise RuntimeError. Cancelling a task that waits for a message
    loses no message.

    When several messages in a row fail (are requeued without `backoff=False`), the consumer backs off: it pauses, then
    receives one message and decides by its result; see `backoff_after` and `max_backoff_duration_s`.

    Args:
        topic: The topic, or its name; created if missing.
        channel: The channel; created if missing.
        nsqd_tcp_addresses: Brokers, `host:port` each; or a single one. None: `127.0.0.1:4150`, unless discovery
            services are given.
        lookupd_http_addresses: Discovery services (nsqlookupd), `host:port` or a URL each; or a single one.
        max_in_flight: The limit of unanswered messages, at least 1; None: 1, or the `concurrency` of `run`. It is
            shared evenly between the connections, within each broker's maximum RDY count. If there are more connections
            than this, they take turns. While shares move between connections, the sum may exceed the limit for a
            moment.
        random: Returns numbers in [0, 1), for the jitter of delays and the order of the connections.
        options: See `ConsumerSettings`, `DiscoverySettings` and `ConnectionSettings`.

    Attributes:
        without_private_channels: With the option `private_channel`, awaited with the address of each broker that has no
            private channels, before each SUB there. If it returns, the consumer subscribes to an ordinary channel. If
            it raises `ConnectionFailed`, as it does by default, the consumer does not subscribe to this broker. Any
            other error ends the consumer.

    Raises:
        TypeError: An option is unknown, or a name, an address or an option is of the wrong type.
        ValueError: A name, an address or an option is invalid.
    """

    _queue_type: type[ReceiveQueue] = ReceiveQueue  # `trio_nsq.sync` has its own

    def __init__(
        self,
        topic: str | Topic[Any],
        channel: str,
        *,
        nsqd_tcp_addresses: str | Sequence[str] | None = None,
        lookupd_http_addresses: str | Sequence[str] = (),
        max_in_flight: int | None = None,
        random: Callable[[], float] = random_module.random,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        topic = name_of(topic)
        for what, name in (("topic", topic), ("channel", channel)):
            check_name(what, name)
        if max_in_flight is not None:
            check_int("max_in_flight", max_in_flight, 1)
        check_type("random", random, Callable)
        self._settings = ConsumerSettings(**accepted_options(Consumer, ConsumerSettings, options))
        if self._settings.private_channel and not is_ephemeral(channel):
            raise ValueError(
                f"private_channel is True; the channel's name {channel!r} must end in #ephemeral"
            )
        self.without_private_channels: Callable[[str], Awaitable[None]] = _refuse
        addresses, lookupds = addresses_of(nsqd_tcp_addresses, lookupd_http_addresses)
        self._queue = self._queue_type()
        self._chosen_in_flight = max_in_flight is not None  # `run` may not raise the limit
        self._flow = FlowControl(max_in_flight or 1, self._settings, random)
        self._active = ActiveHandlers()
        self._failures = FailureCounts()
        self._topic = topic
        self._channel = channel
        self._source = f"{topic}/{channel}"
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
        self._loop = runtime.OwnLoop("trio_nsq.Consumer", "trio_nsq.sync.Consumer")
        self._background = BackgroundTask(self._subscriptions.crashed)
        self._yield_at = 0.0
        self._now: Callable[[], float] = lambda: math.inf  # until it is entered, `_wait` raises
        self._entered = self._closing = False
        self._closed = runtime.Event()
        self._schedule: Callable[[Callable[[], object]], object] | None = None  # from other threads, too

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            AuthRefused: The only broker, or all that could be reached, refused the secret.
            ConnectionFailed: No broker could be reached, and no discovery service answered.
            RuntimeError: The caller is not a task of trio or asyncio, or the consumer was entered before.
        """
        if self._entered:
            raise RuntimeError("a Consumer can be entered only once; create another one")
        self._loop.enter()
        self._entered = True
        self._now = runtime.clock()  # called per message
        self._schedule = runtime.scheduler()
        await self._background.open(self._subscriptions.run)
        try:
            await self._subscriptions.wait_opened()
        except BaseException:
            self._begin_closing()
            self._closed.set()
            await self._background.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.check_task()  # in another loop, the tasks in the background would never end
        try:
            await self.aclose()
        finally:
            await self._background.close()

    async def aclose(self) -> None:
        """Stop receiving, return unanswered messages, and disconnect. Loops over the consumer, and `run`, end.

        The consumer sends CLS to every broker. Active handlers of `run` get half of `close_timeout_s` to finish. Then
        the consumer requeues all unanswered messages without delay and closes the connections. Later answers have no
        effect.

        This takes at most `close_timeout_s`. It also runs if the task is cancelled, so an interrupted program leaves no
        messages in flight. May be called again. A handler of `run` may call it: there it only starts to close and
        returns at once, and the handler's message is answered as usual.
        """
        self._loop.check_task()
        if self._active.include_caller():  # it would wait for itself
            self._close_in_background()
            return
        if self._begin_closing():
            await self._close()
        await runtime.shielded(self._closed.wait)

    def close_soon(self) -> None:
        """Close as `aclose` does, without waiting. Handlers, other threads and signal handlers may call it, too.

        If the consumer is connecting, entering the block returns, and loops end at once. May be called again.
        """
        if self._schedule is None:  # not entered: nothing is open
            self._begin_closing()
            self._closed.set()
            return
        with suppress(RuntimeError):  # the event loop has ended, and the consumer with it
            self._schedule(self._close_in_background)

    async def drain(self, timeout_s: float | None = 30.0) -> None:
        """Receive no further messages, wait until all received ones are answered, and close.

        Loops over the consumer, and `run`, get the messages that have been received, and end after the last one. The
        messages that are not answered after the timeout return to the brokers, as with `aclose`.

        A loop that calls this waits for its own messages: call it beside the loop. A handler of `run` may call it:
        there it only starts, and returns at once.

        Args:
            timeout_s: The longest time to wait for answers; None: no limit.

        Raises:
            ValueError: timeout_s is less than 0.
        """
        self._loop.check_task()
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        self._check_entered()
        if self._active.include_caller():
            self._drain_in_background(timeout_s)
        else:
            self._stop_delivery()
            await self._drain(timeout_s)

    def _drain_in_background(self, timeout_s: float | None) -> None:
        if not self._closing:
            self._stop_delivery()
            self._background.start_soon(partial(self._drain, timeout_s))

    def _stop_delivery(self) -> None:
        # At once, and not in a task: after the next answer the brokers would send another message.
        self._subscriptions.stop()
        self._flow.stopped = True
        for subscription in self._flow.connections:
            subscription.stop_delivery()

    async def _drain(self, timeout_s: float | None) -> None:
        with runtime.move_on_after(math.inf if timeout_s is None else timeout_s):
            async with runtime.open_nursery() as nursery:
                for subscription in self._flow.connections:
                    nursery.start_soon(subscription.drain)
        if self._begin_closing():
            await self._close()
        await runtime.shielded(self._closed.wait)

    def _begin_closing(self) -> bool:
        """Stop receiving; return whether this is the first call."""
        first, self._closing = not self._closing, True
        if first:
            self._subscriptions.stop()
            self._flow.stopped = True
            self._queue.close()
        return first

    def _close_in_background(self) -> None:
        if self._begin_closing():
            self._background.start_soon(self._close)

    async def _close(self) -> None:
        await runtime.shielded(self._unsubscribe_all)

    async def _unsubscribe_all(self) -> None:
        timeout_s = self._settings.close_timeout_s
        async with runtime.open_nursery() as nursery:
            for subscription in self._flow.connections if timeout_s > 0 else ():
                nursery.start_soon(subscription.unsubscribe, timeout_s, self._active)
        if self._entered:
            await self._background.stop()
        self._closed.set()

    def stats(self) -> ConsumerStats:
        """Return the counts of this consumer."""
        flow = self._flow
        return ConsumerStats(flow.received, flow.finished, flow.requeued, len(flow.connections))

    @property
    def max_in_flight(self) -> int:
        """The limit of unanswered messages."""
        return self._flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        """Set the limit, from the brokers' next delivery on; 0: they send nothing until it is changed again."""
        check_int("max_in_flight", count, 0)
        self._chosen_in_flight = True
        self._set_max_in_flight(count)

    def _set_max_in_flight(self, count: int) -> None:
        self._flow.max_in_flight = count
        self._flow.update()

    @property
    def is_starved(self) -> bool:
        """Whether some broker waits for answers before it sends more, or will do so soon.

        True if 85 % or more of the messages that the broker may have in flight are unanswered. A program that collects
        messages uses this to decide when to process them.
        """
        return self._flow.in_flight_reaches(0.85)

    @property
    def paused(self) -> bool:
        """Whether the consumer is paused."""
        return self._flow.paused

    def pause(self) -> None:
        """Have the brokers send nothing until `unpause`. Connections stay open, and messages can be answered."""
        self._flow.paused = True
        self._flow.update()

    def unpause(self) -> None:
        """Resume after `pause`."""
        self._flow.paused = False
        self._flow.update()

    def __aiter__(self) -> AsyncIterator[Message]:
        """Iterate over messages as they arrive; ends when the consumer is closed."""
        return self

    async def __anext__(self) -> Message:
        if self._now() >= self._yield_at:
            await self._wait()
        while (message := self._queue.take_message()) is None:
            await self._wait()
        return message

    @overload
    async def get(self, timeout_s: None = None) -> Message: ...

    @overload
    async def get(self, timeout_s: float | None) -> Message | None: ...

    async def get(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message.

        If cancelled, it takes no message.

        Args:
            timeout_s: How long to wait; 0: return only what has been received. None: without limit.

        Returns:
            None: no message came in this time.

        Raises:
            AuthRefused: A broker refused the secret; see `Consumer`.
            ConsumerClosed: The consumer is closed.
            ValueError: timeout_s is less than 0.
        """
        try:
            if timeout_s is None:
                return await self.__anext__()
            check_seconds("timeout_s", timeout_s)
            with runtime.move_on_after(timeout_s):
                return await self.__anext__()
        except StopAsyncIteration:
            raise ConsumerClosed("the consumer is closed") from None
        return self._queue.take_message()  # it came together with the timeout

    def batches(self, max_messages: int | None = None, max_wait_s: float = 0) -> AsyncIterator[MessageBatch]:
        """Iterate over batches of messages that arrived together. Costs much less per message than single messages.

        Args:
            max_messages: The largest batch; None: no limit.
            max_wait_s: How long to wait for more messages after the first, from all brokers, to combine them into one
                batch. The wait ends early when the batch has `max_messages`, or when some broker has its share of
                `max_in_flight` in flight and waits for answers.

        Raises:
            ValueError: max_messages is less than 1, or max_wait_s less than 0.
        """
        if max_messages is not None:
            check_int("max_messages", max_messages, 1)
        check_seconds("max_wait_s", max_wait_s)
        return _Batches(self, max_messages, max_wait_s)

    @overload
    async def run(self, handler: Handler, *, decode: None = None, **options: Unpack[RunOptions]) -> None: ...

    @overload
    async def run(
        self,
        handler: Callable[[Message, _Value], Awaitable[object]],
        *,
        decode: Callable[[bytes], _Value],
        **options: Unpack[RunOptions],
    ) -> None: ...

    async def run(
        self,
        handler: Callable[..., Awaitable[object]],
        *,
        concurrency: int = 1,
        decode: Callable[[bytes], Any] | None = None,
        on_failure: OnFailure | None = None,
        max_attempts: int = 0,
        given_up: GivenUp | None = None,
        dead_letter_topic: str | None = None,
        auto_touch: bool = False,
        stop_on: Iterable[int] = (),
    ) -> None:
        """Call `handler` with every message until the consumer is closed or the task is cancelled.

        If the handler returns `Retry` or `DeadLetter`, that is done; otherwise, the message is finished. If it raises
        an `Exception`, the message has failed: the error is logged and the message is requeued with backoff, for
        `default_requeue_delay_s` times its attempts, unless `on_failure` decides otherwise. A handler may also answer
        the message itself.

        If the task is cancelled while the handler runs, or the handler raises what is not an `Exception`, such as
        `SystemExit`, then the message is not answered: the next `run`, or the next loop, receives it first.

        Args:
            handler: An async function that takes one message, and with `decode` the decoded body after it.
            concurrency: How many messages to handle at the same time, at least 1 and at most `max_in_flight`.
            decode: A function that decodes a body, such as `json.loads`. If it raises, the message has failed with
                `DecodeFailed`.
            on_failure: A function, async or not, that is called with a message that failed, and the error. It returns
                `Finish`, `Retry` or `DeadLetter`; None stands for `Retry()`. If it raises, the message is requeued.
            max_attempts: A message that `handler` failed this often is given up, at its last failure, unless
                `on_failure` answers `Finish` or `DeadLetter`; 0: no limit. Only errors of `handler` count that this
                consumer has seen, not deliveries: a message that was returned or timed out before it was handled has
                not failed, and one for which the handler returned `Retry` has not either. Of 100,000 messages that
                failed, the count of the one that failed longest ago is forgotten. If `handler` has answered the message
                itself before its last failure, for example requeued it, the message is given up at its next delivery,
                and not handled. Without `given_up` and `dead_letter_topic`, the message is logged and discarded.
            given_up: An async function that is called with a message that is given up, and the error, before the
                message is finished, for example to store it elsewhere. If it raises, the message is requeued like any
                failed message.
            dead_letter_topic: Instead of `given_up`: publish a message that is given up to this topic, on the broker
                that delivered it; if that drains, on another broker to which the consumer is connected. If that fails,
                the message is requeued.
            auto_touch: Extend the message timeout (TOUCH) while the handler runs, up to the broker's maximum (15
                minutes by default).
            stop_on: Signals that close the consumer as `close_soon` does, such as `signal.SIGTERM`; in the main thread
                only. Until then, they have no other effect; a second signal does what it does without this option.

        Raises:
            AuthRefused: A broker refused the secret; see `Consumer`.
            TypeError: `handler` or `given_up` is not an async function, `decode` is one, or a function returned what is
                no answer. The message is not answered.
            ValueError: concurrency is less than 1 or more than `max_in_flight`, max_attempts is less than 0, what
                should happen to a message that is given up is not clear, or a signal of stop_on cannot be handled.
        """
        check_async("handler", handler)
        if decode is not None:
            check_plain("decode", decode)
        if on_failure is not None:
            check_type("on_failure", on_failure, Callable)
        if given_up is not None:
            check_async("given_up", given_up)
        if given_up is None and dead_letter_topic is not None:
            given_up = self._to_dead_letters(dead_letter_topic)
        elif dead_letter_topic is not None:
            raise ValueError("given_up and dead_letter_topic are both given; one of them stores the message")
        check_int("max_attempts", max_attempts, 0)
        check_type("auto_touch", auto_touch, bool)
        if given_up is not None and not max_attempts:
            raise ValueError(
                "max_attempts is 0, no limit; with given_up or dead_letter_topic it must be at least 1"
            )
        self._make_room_for(concurrency)
        self._check_entered()
        handling = Handling(
            self._source,
            self._observed(handler if decode is None else decoding(handler, decode, self._topic)),
            on_failure,
            max_attempts,
            given_up,
            self._to_dead_letters,
            auto_touch,
            self._failures,
        )
        with stopping_on(stop_on, self.close_soon):
            await handle_all(self, handling, concurrency, self._active, self._queue.put_back)

    def _observed(self, handler: Handler) -> Handler:
        """Return a handler that tells the hooks, if there are some."""
        hooks = self._settings.hooks
        if hooks is None:
            return handler
        return observed(
            handler, hooks, self._topic, self._channel, partial(check_awaitable, "handler", handler)
        )

    def processing(self, messages: Message | MessageBatch) -> AbstractContextManager[object]:
        """Return a context manager for the block that processes a message or a batch: the hooks are told of it.

        `run` does this with each message. Without hooks, it does nothing. It does not answer messages.

            with consumer.processing(batch):
                store(batch.bodies)
            batch.finish()
        """
        return processing(self._settings.hooks, self._topic, self._channel, messages)

    def _make_room_for(self, concurrency: int) -> None:
        """Have the brokers send enough for this many handlers at a time; raises ValueError."""
        check_int("concurrency", concurrency, 1)
        if not 0 < self.max_in_flight < concurrency:  # 0: the program has stopped the brokers for now
            return
        if self._chosen_in_flight:
            raise ValueError(
                f"concurrency is {concurrency}, but only {self.max_in_flight} may be in flight; "
                f"set max_in_flight to at least {concurrency}"
            )
        self._set_max_in_flight(concurrency)

    def _to_dead_letters(self, topic: str) -> GivenUp:
        """Return a function that publishes messages to this topic; raises ValueError."""
        check_name("topic", topic)
        if topic == self._topic:
            raise ValueError(
                "dead_letter_topic is the topic itself; its dead letters would be delivered again"
            )
        return dead_letter_publisher(
            topic, self._settings, lambda: [each.address for each in self._flow.connections]
        )

    async def _next_batch(self, max_messages: int | None, max_wait_s: float) -> MessageBatch:
        while True:
            await self._wait()
            if not max_wait_s:
                batch = self._queue.take_batch(max_messages)
            else:
                # Messages stay in the queue until the wait ends, so that a cancellation loses none.
                with runtime.move_on_after(max_wait_s):
                    while not self._is_enough(max_messages):
                        await self._queue.wait_for_more()
                batch = self._queue.take_combined(max_messages)
            if batch is not None:
                return batch

    def _is_enough(self, max_messages: int | None) -> bool:
        """Whether the batch is complete, or no more messages can arrive before some are answered."""
        if self._queue.closed or self._flow.in_flight_reaches(1.0):
            return True
        return max_messages is not None and self._queue.available >= max_messages

    def _check_entered(self) -> None:
        self._loop.check()
        if not self._entered:
            raise RuntimeError("a Consumer receives only inside its `async with` block")

    async def _wait(self) -> None:
        """Let other tasks run until a message may be available, or raise StopAsyncIteration."""
        self._check_entered()
        await self._queue.wait()
        if self._queue.closed:
            if self._queue.error is not None and not self._closing:
                raise self._queue.error
            raise StopAsyncIteration
        self._yield_at = runtime.current_time() + TIME_SLICE_S


async def _refuse(address: str) -> None:
    raise ConnectionFailed(address, "it has no private channels, and private_channel is True")


class _Batches:
    """An iterator of batches. An async generator would need the garbage collector if a loop ends early."""

    def __init__(self, consumer: Consumer, max_messages: int | None, max_wait_s: float) -> None:
        self._consumer = consumer
        self._max_messages = max_messages
        self._max_wait_s = max_wait_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageBatch:
        return await self._consumer._next_batch(self._max_messages, self._max_wait_s)
