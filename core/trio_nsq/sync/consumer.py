"""A consumer for programs without async code, and its messages."""

import random as random_module
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypedDict, TypeVar, Unpack, overload

from trio_nsq.text.arguments import check_int, check_seconds

from ..client.connection.options import accepted_options
from ..client.consuming import consumer as client
from ..client.consuming import message as client_message
from ..client.consuming.answers import Answer
from ..client.consuming.answers import Handler as AsyncHandler
from ..client.consuming.consumer import ConsumerStats
from ..client.consuming.handlers import check_plain, decoding
from ..client.consuming.options import ConsumerOptions, ConsumerSettings
from ..client.consuming.stop_signals import stopping_on
from ..client.errors import ConsumerClosed
from ..client.hooks import observed_plain, processing
from ..client.topics import Topic, name_of
from ..event_loop import runtime
from .handlers import ThreadedFunction, ThreadedHandler, Threads, Workers, is_handling
from .message import Message, MessageBatch
from .portal import Portal, PortalClosed, mirrors
from .shared_queue import SharedQueue
from .waiting import is_gevent

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")
_RUNNING_HANDLERS_S = 1.0
"""After `close_timeout_s`, `close` waits this long for handlers, whose threads cannot be cancelled."""


Handler: TypeAlias = Callable[[Message], object]
"""A function for a message. If it returns an `Answer`, that is done; all other results finish the message."""
GivenUp: TypeAlias = Callable[[Message, Exception], object]
OnFailure: TypeAlias = Callable[[Message, Exception], Answer | None]
"""A function that decides what happens to a message that failed; None: what happens without it."""


class RunOptions(TypedDict, total=False):
    """The keyword arguments of `Consumer.run` besides `decode`; see there."""

    concurrency: int
    on_failure: OnFailure | None
    max_attempts: int
    given_up: GivenUp | None
    dead_letter_topic: str | None
    auto_touch: bool
    stop_on: Iterable[int]


class _AsyncConsumer(client.Consumer):
    """The async consumer, whose queue other threads share."""

    _queue_type = SharedQueue
    _queue: SharedQueue

    def _observed(self, handler: AsyncHandler) -> AsyncHandler:
        return handler  # hooks are told in the threads


class Consumer:
    """Receives the messages of a channel; a context manager, and an iterator of messages.

        with Consumer("clicks", "archive", max_in_flight=200) as consumer:
            for message in consumer:
                store(message.body)
                message.finish()

    For throughput, use `for batch in consumer.batches(): ...; batch.finish()`.

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
        topic: str | Topic[Any],
        channel: str,
        *,
        nsqd_tcp_addresses: str | Sequence[str] | None = None,
        lookupd_http_addresses: str | Sequence[str] = (),
        max_in_flight: int | None = None,
        random: Callable[[], float] = random_module.random,
        idle_timeout_s: float | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        if idle_timeout_s is not None:
            check_seconds("idle_timeout_s", idle_timeout_s, positive=True)
        self._consumer = _AsyncConsumer(
            topic := name_of(topic),
            channel,
            nsqd_tcp_addresses=nsqd_tcp_addresses,
            lookupd_http_addresses=lookupd_http_addresses,
            max_in_flight=max_in_flight,
            random=random,
            **accepted_options(Consumer, ConsumerSettings, options),
        )
        self._idle_timeout_s = float("inf") if idle_timeout_s is None else idle_timeout_s
        self._queue = self._consumer._queue
        self._portal = Portal(self._consumer, f"trio_nsq consumer of {topic}/{channel}", self._queue.shut)
        self._queue.portal = self._portal

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
        if is_handling(self._portal):
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
        if is_handling(self._portal):
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
        message = self._next_message(self._idle_timeout_s)
        if message is None:
            raise StopIteration
        return message

    def _next_message(self, timeout_s: float) -> Message | None:
        """Wait for a message; None: none came, or the consumer is closed. Raises AuthRefused."""
        self._check_opened()
        message = self._queue.wait_for_message(timeout_s)
        if message is None and self._queue.error is not None and not self._consumer._closing:
            raise self._queue.error
        return message

    @overload
    def get(self, timeout_s: None = None) -> Message: ...

    @overload
    def get(self, timeout_s: float | None) -> Message | None: ...

    @mirrors(client.Consumer.get)
    def get(self, timeout_s: float | None = None) -> Message | None:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        message = self._next_message(float("inf") if timeout_s is None else timeout_s)
        if message is None and self._queue.closed:
            raise ConsumerClosed("the consumer is closed")
        return message

    @mirrors(client.Consumer.batches)
    def batches(self, max_messages: int | None = None, max_wait_s: float = 0) -> Iterator[MessageBatch]:
        batches = self._consumer.batches(max_messages, max_wait_s)
        # After the first message, which may arrive at the end of the idle timeout, a batch waits for max_wait_s.
        timeout_s = self._idle_timeout_s + max_wait_s
        return _Batches(
            partial(self._receive, batches.__anext__, timeout_s),
            self._portal,
            None if max_wait_s else partial(self._queue.take_batch, max_messages),
        )

    @overload
    def run(self, handler: Handler, *, decode: None = None, **options: Unpack[RunOptions]) -> None: ...

    @overload
    def run(
        self,
        handler: Callable[[Message, _Value], object],
        *,
        decode: Callable[[bytes], _Value],
        **options: Unpack[RunOptions],
    ) -> None: ...

    def run(
        self,
        handler: Callable[..., object],
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
        """Call `handler` with every message, in other threads, until the consumer is closed or a KeyboardInterrupt.

        If the handler returns `Retry` or `DeadLetter`, that is done; otherwise, the message is finished. If it raises
        an `Exception`, the message has failed: the error is logged and the message is requeued with backoff, for
        `default_requeue_delay_s` times its attempts, unless `on_failure` decides otherwise. A handler may also answer
        the message itself, and may close the consumer. Before it returns, `run` waits for active handlers without
        limit.

        Args:
            handler: A function that takes one message, and with `decode` the decoded body after it.
            concurrency: The number of threads, at least 1 and at most `max_in_flight`.
            decode: A function that decodes a body, such as `json.loads`. If it raises, the message has failed with
                `DecodeFailed`.
            on_failure: A function that is called with a message that failed, and the error. It returns `Finish`,
                `Retry` or `DeadLetter`; None stands for `Retry()`. If it raises, the message is requeued.
            max_attempts: A message that `handler` failed this often is given up, at its last failure, unless
                `on_failure` answers `Finish` or `DeadLetter`; 0: no limit. Only errors of `handler` count that this
                consumer has seen, not deliveries: a message that was returned or timed out before it was handled has
                not failed, and one for which the handler returned `Retry` has not either. Of 100,000 messages that
                failed, the count of the one that failed longest ago is forgotten. If `handler` has answered the message
                itself before its last failure, for example requeued it, the message is given up at its next delivery,
                and not handled. Without `given_up` and `dead_letter_topic`, the message is logged and discarded.
            given_up: Called with a message that is given up, and the error, before the message is finished, for example
                to store it elsewhere. If it raises, the message is requeued like any failed message.
            dead_letter_topic: Instead of `given_up`: publish a message that is given up to this topic, on the broker
                that delivered it; if that drains, on another broker to which the consumer is connected. If that fails,
                the message is requeued.
            auto_touch: Extend the message timeout (TOUCH) while the handler runs, up to the broker's maximum (15
                minutes by default).
            stop_on: Signals that close the consumer as `close_soon` does, such as `signal.SIGTERM`; in the main thread
                only. Until then, they have no other effect; a second signal does what it does without this option.

        Raises:
            AuthRefused: A broker refused the secret; see `Consumer`.
            TypeError: A function returns a coroutine or a generator, of which nothing would run, or what is no answer.
                The message is not answered.
            ValueError: concurrency is less than 1 or more than `max_in_flight`, max_attempts is less than 0, what
                should happen to a message that is given up is not clear, or a signal of stop_on cannot be handled.
        """
        self._check_opened()
        for name, function in (("handler", handler), ("given_up", given_up), ("on_failure", on_failure)):
            if function is not None or name == "handler":
                check_plain(name, function)
        if decode is not None:
            check_plain("decode", decode)
            handler = decoding(handler, decode, self._consumer._topic)
        if (hooks := self._consumer._settings.hooks) is not None:
            handler = observed_plain(handler, hooks, self._consumer._topic, self._consumer._channel)
        check_int("concurrency", concurrency, 1)
        workers: Workers
        if is_gevent():
            from .greenlets import Greenlets

            workers = Greenlets(self._portal)
        else:
            workers = Threads(concurrency)
        threaded = ThreadedHandler(
            handler,
            workers,
            self._portal,
            self._queue,
            self._consumer._failures,
            # Only the message that the async consumer knows of is touched. A greenlet lets others have their turn.
            goes_on=not auto_touch and isinstance(workers, Threads),
        )
        give_up = given_up and ThreadedFunction("given_up", given_up, workers, self._portal)
        decide = on_failure and ThreadedFunction("on_failure", on_failure, workers, self._portal)

        async def run() -> None:
            try:
                await self._consumer.run(
                    threaded,
                    concurrency=concurrency,
                    on_failure=decide,
                    max_attempts=max_attempts,
                    given_up=give_up,
                    dead_letter_topic=dead_letter_topic,
                    auto_touch=auto_touch,
                )
            finally:
                self._queue.put_returned_back()

        with stopping_on(stop_on, self.close_soon):
            try:
                self._portal.call(run)
            except PortalClosed:
                pass  # the consumer is closed; `run` returns

    @mirrors(client.Consumer.processing)
    def processing(self, messages: Message | MessageBatch) -> AbstractContextManager[object]:
        consumer = self._consumer
        return processing(consumer._settings.hooks, consumer._topic, consumer._channel, messages)

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
    """An iterator of batches.

    Args:
        receive: Waits for the next batch, or raises StopIteration.
        take: Called in the thread of the event loop: returns a batch that is there, or None. That costs less, because
            no task is started. None: only `receive` makes batches.
    """

    def __init__(
        self,
        receive: Callable[[], client_message.MessageBatch],
        portal: Portal,
        take: Callable[[], client_message.MessageBatch | None] | None,
    ) -> None:
        self._receive = receive
        self._portal = portal
        self._take = take

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageBatch:
        batch = None if self._take is None else self._portal.run_sync(self._take)
        return MessageBatch(batch or self._receive(), self._portal)


async def _received(receive: Callable[[], Awaitable[_Item]], timeout_s: float) -> _Item | None:
    """Return the result of `receive`; None after the timeout, or if the consumer was closed."""
    with runtime.move_on_after(timeout_s):
        try:
            return await receive()
        except StopAsyncIteration:
            pass
    return None
