"""A consumer for programs without async code, and its messages."""

import random as random_module
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import NoReturn, Self, TypeVar, Unpack, overload

import trio

from trio_nsq.text.arguments import check_int, check_seconds

from ..client.connection.options import refuse_unknown
from ..client.consuming import consumer as client
from ..client.consuming import message as client_message
from ..client.consuming.consumer import ConsumerStats
from ..client.consuming.handlers import check_plain, check_result
from ..client.consuming.options import ConsumerOptions, ConsumerSettings
from ..client.errors import ConsumerClosed
from .portal import Portal, PortalClosed, mirrors

_Item = TypeVar("_Item")
_handling = threading.local()
_RUNNING_HANDLERS_S = 1.0
"""After `close_timeout_s`, `close` waits this long for handlers, whose threads cannot be cancelled."""


class Message(client_message.Message):
    """One message. Answer it once, with `finish` or `requeue`; before that, `touch` extends its timeout.

    It is a `trio_nsq.Message` that may be answered in any thread. Answers are queued for the connection's next write;
    the methods do not wait for it. Once the connection is lost or the consumer is closed, answers have no effect: the
    broker delivers the message again.
    """

    __slots__ = ("_portal",)

    def __init__(self, message: client_message.Message, portal: Portal) -> None:
        super().__init__(message._batch, message._index)
        self._portal = portal

    @property
    def received_at(self) -> float:
        """When the message arrived, in seconds; compare it with other messages of the same consumer only."""
        return super().received_at

    @mirrors(client_message.Message.finish)
    def finish(self) -> None:
        self._portal.run_sync(super().finish)

    @mirrors(client_message.Message.requeue)
    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        self._portal.run_sync(partial(super().requeue, delay_ms, backoff=backoff))

    @mirrors(client_message.Message.abandon)
    def abandon(self) -> None:
        self._portal.run_sync(super().abandon)

    @mirrors(client_message.Message.touch)
    def touch(self) -> None:
        self._portal.run_sync(super().touch)


class MessageBatch:
    """Messages that arrived together: four lists of equal length, oldest first.

    It is a `trio_nsq.MessageBatch` that may be answered in any thread. Answering a whole batch costs as much as
    answering one message.

    Attributes:
        bodies: The message bodies.
        ids: 16 bytes each, ASCII hex digits.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, including this time; the first delivery is 1.
        nsqd_address: The broker, `host:port`; for a batch combined from several brokers: separated by commas.
    """

    __slots__ = ("_batch", "_portal", "attempts", "bodies", "ids", "nsqd_address", "timestamps_ns")

    def __init__(self, batch: client_message.MessageBatch, portal: Portal) -> None:
        self.bodies = batch.bodies
        self.ids = batch.ids
        self.timestamps_ns = batch.timestamps_ns
        self.attempts = batch.attempts
        self.nsqd_address = batch.nsqd_address
        self._batch = batch
        self._portal = portal

    def __reduce__(self) -> NoReturn:
        self._batch.__reduce__()

    def __repr__(self) -> str:
        return repr(self._batch)

    def __len__(self) -> int:
        return len(self.ids)

    @mirrors(client_message.MessageBatch.__iter__)
    def __iter__(self) -> Iterator[Message]:
        return (Message(message, self._portal) for message in self._batch)

    @mirrors(client_message.MessageBatch.finish)
    def finish(self) -> None:
        self._portal.run_sync(self._batch.finish)

    @mirrors(client_message.MessageBatch.requeue)
    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        self._portal.run_sync(partial(self._batch.requeue, delay_ms, backoff=backoff))

    @mirrors(client_message.MessageBatch.touch)
    def touch(self) -> None:
        self._portal.run_sync(self._batch.touch)

    @mirrors(client_message.MessageBatch.unanswered_ids)
    def unanswered_ids(self) -> list[bytes]:
        return self._portal.run_sync(self._batch.unanswered_ids)

    @property
    @mirrors(client_message.MessageBatch.connected)
    def connected(self) -> bool:
        return self._batch.connected

    @property
    @mirrors(client_message.MessageBatch.unanswered_count)
    def unanswered_count(self) -> int:
        return self._batch.unanswered_count


Handler = Callable[[Message], object]
GivenUp = Callable[[Message, Exception], object]


class Consumer:
    """Receives the messages of a channel; a context manager, and an iterator of messages.

        with Consumer("clicks", "archive", max_in_flight=200) as consumer:
            for message in consumer:
                store(message.body)
                message.finish()

    For throughput, use `for batch in consumer.batches(): ...; batch.finish()`. A single message costs two calls into
    another thread; a batch of hundreds costs the same.

    It runs `trio_nsq.Consumer` in its own thread, with the same arguments, methods and errors. That thread answers
    heartbeats and reconnects, whatever the program does meanwhile. Several threads may iterate over one consumer, and
    messages may be answered in any thread.

    A KeyboardInterrupt in a thread that waits for a message loses no message, unless one is handed over at the same
    instant. Leaving the block returns all unanswered messages to the brokers, including that one.

    It does not survive a fork: open a consumer in each process.

    Args:
        topic, channel, ...: See `trio_nsq.Consumer`.
        idle_timeout_s: Loops end when nothing arrived for this time, plus a batch's `max_wait_s`; more than 0. None:
            they wait without limit.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Sequence[str] | None = None,
        lookupd_http_addresses: str | Sequence[str] = (),
        max_in_flight: int | None = None,
        random: Callable[[], float] = random_module.random,
        idle_timeout_s: float | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        refuse_unknown(Consumer, ConsumerSettings, options)
        if idle_timeout_s is not None:
            check_seconds("idle_timeout_s", idle_timeout_s, positive=True)
        self._consumer = client.Consumer(
            topic,
            channel,
            nsqd_tcp_addresses=nsqd_tcp_addresses,
            lookupd_http_addresses=lookupd_http_addresses,
            max_in_flight=max_in_flight,
            random=random,
            **options,
        )
        self._idle_timeout_s = float("inf") if idle_timeout_s is None else idle_timeout_s
        self._portal = Portal(self._consumer, f"trio_nsq consumer of {topic}/{channel}")

    @mirrors(client.Consumer.__aenter__)
    def __enter__(self) -> Self:
        self._portal.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @mirrors(client.Consumer.aclose)
    def close(self) -> None:
        if getattr(_handling, "portal", None) is self._portal:
            self._portal.stop()  # `run` ends when the calling handler returns
        else:
            # A handler may wait for this thread.
            self._portal.close(self._consumer._settings.close_timeout_s + _RUNNING_HANDLERS_S)

    @mirrors(client.Consumer.close_soon)
    def close_soon(self) -> None:
        if not self._portal.is_forked:
            self._consumer.close_soon()

    @mirrors(client.Consumer.drain)
    def drain(self, timeout_s: float | None = 30.0) -> None:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        if getattr(_handling, "portal", None) is self._portal:
            self._portal.run_sync(self._consumer._drain_in_background, timeout_s)
            return
        try:
            self._portal.call(self._consumer.drain, timeout_s)
        except PortalClosed:
            pass  # the consumer is closed

    @mirrors(client.Consumer.stats)
    def stats(self) -> ConsumerStats:
        return self._portal.run_sync(self._consumer.stats)

    @property
    @mirrors(client.Consumer.max_in_flight)
    def max_in_flight(self) -> int:
        return self._consumer.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._control(lambda: setattr(self._consumer, "max_in_flight", count))

    @property
    @mirrors(client.Consumer.is_starved)
    def is_starved(self) -> bool:
        return self._portal.run_sync(lambda: self._consumer.is_starved)

    @property
    @mirrors(client.Consumer.paused)
    def paused(self) -> bool:
        return self._consumer.paused

    @mirrors(client.Consumer.pause)
    def pause(self) -> None:
        self._control(self._consumer.pause)

    @mirrors(client.Consumer.unpause)
    def unpause(self) -> None:
        self._control(self._consumer.unpause)

    @mirrors(client.Consumer.__aiter__)
    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        return Message(self._receive(self._consumer.__anext__, self._idle_timeout_s), self._portal)

    @overload
    def get(self, timeout_s: None = None) -> Message: ...

    @overload
    def get(self, timeout_s: float | None) -> Message | None: ...

    @mirrors(client.Consumer.get)
    def get(self, timeout_s: float | None = None) -> Message | None:
        self._check_opened()
        try:
            message = self._portal.call(self._consumer.get, timeout_s)
        except PortalClosed:
            raise ConsumerClosed("the consumer is closed") from None
        return None if message is None else Message(message, self._portal)

    @mirrors(client.Consumer.batches)
    def batches(self, max_messages: int | None = None, max_wait_s: float = 0) -> Iterator[MessageBatch]:
        batches = self._consumer.batches(max_messages, max_wait_s)
        # After the first message, which may arrive at the end of the idle timeout, a batch waits for max_wait_s.
        timeout_s = self._idle_timeout_s + max_wait_s
        return _Batches(partial(self._receive, batches.__anext__, timeout_s), self._portal)

    def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 1,
        max_attempts: int = 0,
        given_up: GivenUp | None = None,
        dead_letter_topic: str | None = None,
        auto_touch: bool = False,
    ) -> None:
        """Call `handler` with every message, in other threads, until the consumer is closed or a KeyboardInterrupt.

        If the handler returns, the message is finished. If it raises an `Exception`, the error is logged and the
        message is requeued with backoff, for `default_requeue_delay_ms` times its attempts. A handler may also answer
        the message itself, and may close the consumer. Before it returns, `run` waits for active handlers without
        limit.

        Args:
            handler: A function that takes one message.
            concurrency: The number of threads, at least 1 and at most `max_in_flight`.
            max_attempts: A message that `handler` failed this often is given up, at its last failure; 0: no limit. Only
                errors of `handler` count that this consumer has seen, not deliveries: a message that was returned or
                timed out before it was handled has not failed. Of 100,000 messages that failed, the count of the one
                that failed longest ago is forgotten. If `handler` has answered the message itself before its last
                failure, for example requeued it, the message is given up at its next delivery, and not handled. Without
                `given_up` and `dead_letter_topic`, the message is logged and discarded.
            given_up: Called with a message that is given up, and the error, before the message is finished, for example
                to store it elsewhere. If it raises, the message is requeued like any failed message.
            dead_letter_topic: Instead of `given_up`: publish a message that is given up to this topic, on the broker
                that delivered it; if that drains, on another broker to which the consumer is connected. If that fails,
                the message is requeued.
            auto_touch: Extend the message timeout (TOUCH) while the handler runs, up to the broker's maximum (15
                minutes by default).

        Raises:
            AuthRefused: A broker refused the secret; see `Consumer`.
            TypeError: `handler` or `given_up` returns a coroutine or a generator, of which nothing would run. The
                message is not answered.
            ValueError: concurrency is less than 1 or more than `max_in_flight`, max_attempts is less than 0, or what
                should happen to a message that is given up is not clear.
        """
        self._check_opened()
        check_plain("handler", handler)
        if given_up is not None:
            check_plain("given_up", given_up)
        check_int("concurrency", concurrency, 1)
        limiter = trio.CapacityLimiter(concurrency)

        async def run() -> None:
            await self._consumer.run(
                self._in_thread("handler", handler, limiter),
                concurrency=concurrency,
                max_attempts=max_attempts,
                given_up=None if given_up is None else self._in_thread("given_up", given_up, limiter),
                dead_letter_topic=dead_letter_topic,
                auto_touch=auto_touch,
            )

        try:
            self._portal.call(run)
        except PortalClosed:
            pass  # the consumer is closed; `run` returns

    def _in_thread(
        self, name: str, handler: Callable[..., object], limiter: trio.CapacityLimiter
    ) -> Callable[..., Awaitable[object]]:
        def handle(message: Message, *error: Exception) -> None:
            _handling.portal = self._portal
            try:
                result = handler(message, *error)
            finally:
                _handling.portal = None
            if result is not None:
                check_result(name, handler, result)

        async def hand_over(message: client_message.Message, *error: Exception) -> None:
            await trio.to_thread.run_sync(handle, Message(message, self._portal), *error, limiter=limiter)

        return hand_over

    def _control(self, change: Callable[[], None]) -> None:
        """Change the flow control; does nothing if the consumer is closed."""
        self._check_opened()

        async def do() -> None:
            change()

        try:
            self._portal.call(do)
        except PortalClosed:
            pass

    def _check_opened(self) -> None:
        if not self._portal.was_opened:
            raise RuntimeError("a Consumer receives only inside its `with` block")

    def _receive(self, receive: Callable[[], Awaitable[_Item]], timeout_s: float) -> _Item:
        """Wait for the next item, or raise StopIteration."""
        self._check_opened()
        found: _Item | None = None
        try:
            found = self._portal.call(_received, receive, timeout_s)
        except PortalClosed:
            pass
        if found is None:
            raise StopIteration
        return found


class _Batches:
    def __init__(self, receive: Callable[[], client_message.MessageBatch], portal: Portal) -> None:
        self._receive = receive
        self._portal = portal

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageBatch:
        return MessageBatch(self._receive(), self._portal)


async def _received(receive: Callable[[], Awaitable[_Item]], timeout_s: float) -> _Item | None:
    """Return the result of `receive`; None after the timeout, or if the consumer was closed."""
    with trio.move_on_after(timeout_s):
        try:
            return await receive()
        except StopAsyncIteration:
            pass
    return None
