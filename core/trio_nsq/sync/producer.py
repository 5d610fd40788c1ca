"""A producer for programs without async code."""

import random as random_module
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from trio_nsq.protocol import MessageSet
from trio_nsq.protocol.bodies import list_of

from .. import client
from ..client.errors import ProducerClosed
from ..client.publishing.options import ProducerOptions
from ..client.publishing.receipt import PublishState
from ..client.topics import Topic, encoded
from .portal import Portal, PortalClosed, mirrors

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
        self._portal = Portal(self._producer, "trio_nsq producer")

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
    def publish(self, topic: str, body: bytes, *, defer_ms: int = 0) -> None: ...

    @overload
    def publish(self, topic: Topic[T], body: T, *, defer_ms: int = 0) -> None: ...

    @mirrors(client.Producer.publish)
    def publish(self, topic: str | Topic[Any], body: Any, *, defer_ms: int = 0) -> None:
        topic, body = encoded(topic, body)
        self._call(lambda: self._producer.publish(topic, body, defer_ms=defer_ms))

    @overload
    def publish_many(self, topic: str, bodies: Iterable[bytes], *, defer_ms: int = 0) -> None: ...

    @overload
    def publish_many(self, topic: Topic[T], bodies: Iterable[T], *, defer_ms: int = 0) -> None: ...

    @mirrors(client.Producer.publish_many)
    def publish_many(self, topic: str | Topic[Any], bodies: Iterable[Any], *, defer_ms: int = 0) -> None:
        bodies = list_of(bodies)  # in this thread: an iterator may block
        self._call(lambda: self._producer.publish_many(topic, bodies, defer_ms=defer_ms))

    @mirrors(client.Producer.publish_set)
    def publish_set(self, topic: str, messages: MessageSet) -> None:
        self._call(lambda: self._producer.publish_set(topic, messages))

    @mirrors(client.Producer.last_number)
    def last_number(self, topic: str) -> int | None:
        return self._call(lambda: self._producer.last_number(topic))

    @overload
    def submit(self, topic: str, body: bytes, *, defer_ms: int = 0) -> "Receipt": ...

    @overload
    def submit(self, topic: Topic[T], body: T, *, defer_ms: int = 0) -> "Receipt": ...

    @mirrors(client.Producer.submit)
    def submit(self, topic: str | Topic[Any], body: Any, *, defer_ms: int = 0) -> "Receipt":
        topic, body = encoded(topic, body)

        async def submit() -> client.Receipt:
            return self._producer.submit(topic, body, defer_ms=defer_ms)

        return Receipt(self._call(submit), self._portal)

    def _call(self, publish: Callable[[], Awaitable[_Result]]) -> _Result:
        try:
            return self._portal.call(publish)
        except PortalClosed:
            if self._portal.was_opened:
                raise ProducerClosed("the producer is closed") from None
            raise ProducerClosed("the producer is not open yet: publish inside its `with` block") from None


class Receipt:
    """A message that was given to `Producer.submit`: tells what became of it, and waits for that."""

    def __init__(self, receipt: client.Receipt, portal: Portal) -> None:
        self._receipt = receipt
        self._portal = portal

    @property
    @mirrors(client.Receipt.state)
    def state(self) -> PublishState:
        return self._portal.run_sync(lambda: self._receipt.state)

    @mirrors(client.Receipt.wait)
    def wait(self) -> None:
        try:
            self._portal.call(self._receipt.wait)
        except PortalClosed:
            self._portal.run_sync(self._receipt._check)

    @mirrors(client.Receipt.withdraw)
    def withdraw(self) -> bool:
        return self._portal.run_sync(self._receipt.withdraw)
