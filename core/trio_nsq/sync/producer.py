"""A producer for programs without async code."""

import random as random_module
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from trio_nsq.protocol import MessageSet
from trio_nsq.protocol.bodies import list_of
from trio_nsq.protocol.headers import Headers
from trio_nsq.protocol.limits import SECOND_MS
from trio_nsq.text.arguments import check_seconds

from .. import client
from ..client.arguments import in_ms
from ..client.errors import ProducerClosed
from ..client.hooks import PublishCall
from ..client.publishing.options import ProducerOptions
from ..client.publishing.queue import PublishAck, PublishFuture
from ..client.publishing.receipt import ProducerStats, PublishState, timed_out
from ..client.topics import Topic, encoded
from ..event_loop import runtime
from .portal import Portal, PortalClosed, Result, mirrors

T = TypeVar("T")
_Result = TypeVar("_Result")


class Producer:
    """Publishes to one broker, or to several in turn; a context manager.

        with Producer("127.0.0.1:4150") as producer:
            producer.publish("clicks", b"...")

    It runs `trio_nsq.Producer` in its own thread, with the same arguments, methods and errors. Any number of threads
    may publish at the same time; their messages are sent together.

    After a KeyboardInterrupt in a thread that waits for an acknowledgement, the message may be stored.

    It does not survive a fork: open a producer in each process.

    Args:
        nsqd_tcp_addresses, lookupd_http_addresses, ...: See `trio_nsq.Producer`.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | Sequence[str] | None = None,
        *,
        lookupd_http_addresses: str | Sequence[str] = (),
        random: Callable[[], float] = random_module.random,
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._producer = client.Producer(
            nsqd_tcp_addresses, lookupd_http_addresses=lookupd_http_addresses, random=random, **options
        )
        self._portal = Portal(self._producer, "trio_nsq producer", self._wake_all)

    @mirrors(client.Producer.__aenter__)
    def __enter__(self) -> Self:
        self._portal.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @mirrors(client.Producer.aclose)
    def close(self) -> None:
        self._portal.close()

    @overload
    def publish(
        self,
        topic: str,
        body: bytes,
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | None = None,
    ) -> PublishAck: ...

    @overload
    def publish(
        self,
        topic: Topic[T],
        body: T,
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | None = None,
    ) -> PublishAck: ...

    @mirrors(client.Producer.publish)
    def publish(
        self,
        topic: str | Topic[Any],
        body: Any,
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | None = None,
        defer_ms: int | None = None,
    ) -> PublishAck:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, positive=True)
        receipt = self._submit(topic, body, in_ms("defer", defer_s, defer_ms) or 0, headers)
        try:
            receipt._settled.wait_in_thread(timeout_s)
        except BaseException as error:  # interrupted
            receipt._end_call(error)
            receipt.withdraw()
            raise
        return receipt._result(timeout_s)

    @overload
    def publish_many(
        self,
        topic: str,
        bodies: Iterable[bytes],
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | Sequence[Headers] | None = None,
    ) -> None: ...

    @overload
    def publish_many(
        self,
        topic: Topic[T],
        bodies: Iterable[T],
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | Sequence[Headers] | None = None,
    ) -> None: ...

    @mirrors(client.Producer.publish_many)
    def publish_many(
        self,
        topic: str | Topic[Any],
        bodies: Iterable[Any],
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        defer_ms: int | None = None,
    ) -> None:
        deferral_ms = in_ms("defer", defer_s, defer_ms) or 0
        bodies = list_of(bodies)  # in this thread: an iterator may block
        self._call(
            lambda: self._producer.publish_many(
                topic, bodies, defer_s=deferral_ms / SECOND_MS, timeout_s=timeout_s, headers=headers
            )
        )

    @mirrors(client.Producer.publish_set)
    def publish_set(
        self, topic: str, messages: MessageSet, *, timeout_s: float | None = None
    ) -> PublishAck | None:
        return self._call(lambda: self._producer.publish_set(topic, messages, timeout_s=timeout_s))

    @mirrors(client.Producer.flush)
    def flush(self, timeout_s: float | None = None) -> None:
        self._call(lambda: self._producer.flush(timeout_s))

    @mirrors(client.Producer.stats)
    def stats(self) -> ProducerStats:
        return self._portal.run_sync(self._producer.stats)

    @mirrors(client.Producer.last_number)
    def last_number(self, topic: str) -> int | None:
        return self._call(lambda: self._producer.last_number(topic))

    @overload
    def submit(
        self, topic: str, body: bytes, *, defer_s: float = 0, headers: Headers | None = None
    ) -> "Receipt": ...

    @overload
    def submit(
        self, topic: Topic[T], body: T, *, defer_s: float = 0, headers: Headers | None = None
    ) -> "Receipt": ...

    @mirrors(client.Producer.submit)
    def submit(
        self,
        topic: str | Topic[Any],
        body: Any,
        *,
        defer_s: float = 0,
        headers: Headers | None = None,
        defer_ms: int | None = None,
    ) -> "Receipt":
        return self._submit(topic, body, in_ms("defer", defer_s, defer_ms) or 0, headers)

    def _submit(
        self, topic: str | Topic[Any], body: Any, defer_ms: int, headers: Headers | None
    ) -> "Receipt":
        topic, body = encoded(topic, body)
        self._portal.check_process()
        if not self._portal.was_opened:
            raise self._closed()
        receipt = Receipt(self._portal)
        message: tuple[str, bytes, int, bool] | tuple[str, bytes, int, bool, bool]
        if self._producer._hooks is None:
            data, has_headers = self._producer._check_message(topic, body, defer_ms, headers)
            message = topic, data, defer_ms, has_headers
        else:
            call, message = self._producer._begin(topic, body, defer_ms, headers)
            receipt._tell_end(call)
        if not self._portal.post(self._enqueue, receipt, message):
            receipt._end_call(error := self._closed())
            raise error
        return receipt

    def _enqueue(self, receipt: "Receipt", message: Any) -> None:
        """In the event loop's thread: queue a message; these are the arguments of the async producer's method."""
        try:
            self._producer._check_call(message[0])  # it may have been closed since
            receipt._set_future(self._producer._enqueue(*message))
        except Exception as error:
            receipt._fail(error)

    def _wake_all(self) -> None:
        """Wake the threads that wait, once the event loop has ended. After a crash, some futures are not settled."""
        for future in self._producer._brokers.futures():
            if isinstance(future.settled, Settled):
                future.settled.wake_threads()

    def _call(self, publish: Callable[[], Awaitable[_Result]]) -> _Result:
        try:
            return self._portal.call(publish)
        except PortalClosed:
            raise self._closed() from None

    def _closed(self) -> ProducerClosed:
        if self._portal.was_opened:
            return ProducerClosed("the producer is closed")
        return ProducerClosed("the producer is not open yet: publish inside its `with` block")


class Settled(runtime.Event):
    """An event that the event loop sets, for which threads may wait, too."""

    __slots__ = ("_result", "on_set")

    def __init__(self) -> None:
        super().__init__()
        self._result: Result[None] = Result()
        self.on_set: Callable[[], None] | None = None

    def set(self) -> None:
        super().set()
        if self.on_set is not None:
            self.on_set()
        self.wake_threads()

    def wake_threads(self) -> None:
        if not self._result.is_set:
            self._result.set(None)

    def wait_in_thread(self, timeout_s: float | None = None) -> None:
        """Wait until it is set, the event loop has ended, or the timeout. None: no timeout."""
        if not self._result.is_set:
            self._result.wait(timeout_s)


class Receipt:
    """A message that was given to `Producer.submit`: tells what became of it, and waits for that."""

    __slots__ = ("_call", "_error", "_future", "_portal", "_settled")

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._settled = Settled()
        self._future: PublishFuture | None = None  # None: the message has not reached the event loop
        self._error: Exception | None = None  # why the event loop did not queue it
        self._call: PublishCall | None = None  # for hooks

    @property
    @mirrors(client.Receipt.state)
    def state(self) -> PublishState:
        self._portal.check_process()
        if self._future is None:
            return "waiting" if self._error is None else "failed"
        return client.Receipt(self._future).state

    @mirrors(client.Receipt.wait)
    def wait(self) -> PublishAck:
        self._portal.check_process()
        self._settled.wait_in_thread()
        return self._check()

    @mirrors(client.Receipt.withdraw)
    def withdraw(self) -> bool:
        return self._portal.run_sync(self._withdraw)

    def _withdraw(self) -> bool:
        return self._future is not None and client.Receipt(self._future).withdraw()

    def _tell_end(self, call: PublishCall) -> None:
        """Tell hooks when the message is settled."""
        self._call = call
        self._settled.on_set = self._settle_call

    def _settle_call(self) -> None:
        self._settled.on_set = None
        if self._call is not None and self._future is not None:
            self._call.settled(self._future)
        else:
            self._end_call(self._error)

    def _end_call(self, error: BaseException | None) -> None:
        """Tell hooks that the publish has ended, unless they know."""
        if self._call is not None:
            self._call.end(error)

    def _set_future(self, future: PublishFuture) -> None:
        future.settled = self._settled
        self._future = future

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._settled.set()

    def _result(self, timeout_s: float | None) -> PublishAck:
        """Return where the message is stored, after a wait of this time."""
        if timeout_s is None or self._settled.is_set():
            return self._check()
        return self._portal.run_sync(self._end, timeout_s)

    def _end(self, timeout_s: float) -> PublishAck:
        """In the event loop's thread: withdraw the message if possible, unless it is settled by now."""
        if self._future is not None and not self._settled.is_set():
            self._settled.on_set = None  # the error says more than that it was withdrawn
            failure = timed_out([self._future], timeout_s)
            self._end_call(failure)
            raise failure
        return self._check()

    def _check(self) -> PublishAck:
        if self._error is not None:
            raise self._error
        if self._future is None:  # the thread crashed before it took the message
            raise ProducerClosed("the producer is closed")
        return client.Receipt(self._future)._check()
