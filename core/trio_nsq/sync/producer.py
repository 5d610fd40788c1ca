"""A producer for programs without async code."""

import random as random_module
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, Unpack

from trio_nsq.protocol import Limits, MessageSet

from ..client.connection.options import ConnectionOptions
from ..client.connection.reconnect import MAX_DELAY_S, MIN_DELAY_S
from ..client.errors import ProducerClosed
from ..client.publishing import producer as client
from .portal import Portal, PortalClosed, mirrors

_NSQD = Limits()


class Producer:
    """Publishes to one broker, or to several in turn; a context manager.

        with Producer("127.0.0.1:4150") as producer:
            producer.publish("clicks", b"...")

    It runs `trio_nsq.Producer` in its own thread, with the same arguments, methods and errors. Any number of threads
    may publish at the same time; their messages are sent together.

    A KeyboardInterrupt in a thread that waits for an acknowledgement has the effect of a cancellation there.

    It does not survive a fork: open a producer in each process.

    Args:
        nsqd_tcp_addresses, retry, ordered, ...: See `trio_nsq.Producer`.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | Sequence[str] = "127.0.0.1:4150",
        *,
        retry: bool = False,
        ordered: bool = False,
        max_in_flight_bytes: int = client.MAX_IN_FLIGHT_BYTES,
        max_msg_size: int = _NSQD.max_msg_size,
        max_body_size: int = _NSQD.max_body_size,
        max_req_timeout_ms: int | None = None,
        reconnect_min_s: float = MIN_DELAY_S,
        reconnect_max_s: float = MAX_DELAY_S,
        close_timeout_s: float = client.CLOSE_TIMEOUT_S,
        random: Callable[[], float] = random_module.random,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        self._producer = client.Producer(
            nsqd_tcp_addresses,
            retry=retry,
            ordered=ordered,
            max_in_flight_bytes=max_in_flight_bytes,
            max_msg_size=max_msg_size,
            max_body_size=max_body_size,
            max_req_timeout_ms=max_req_timeout_ms,
            reconnect_min_s=reconnect_min_s,
            reconnect_max_s=reconnect_max_s,
            close_timeout_s=close_timeout_s,
            random=random,
            **options,
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

    @mirrors(client.Producer.publish)
    def publish(self, topic: str, body: bytes, *, defer_ms: int = 0) -> None:
        self._call(lambda: self._producer.publish(topic, body, defer_ms=defer_ms))

    @mirrors(client.Producer.publish_many)
    def publish_many(self, topic: str, bodies: Sequence[bytes], *, defer_ms: int = 0) -> None:
        self._call(lambda: self._producer.publish_many(topic, bodies, defer_ms=defer_ms))

    @mirrors(client.Producer.publish_set)
    def publish_set(self, topic: str, messages: MessageSet) -> None:
        self._call(lambda: self._producer.publish_set(topic, messages))

    def _call(self, publish: Callable[[], Awaitable[None]]) -> None:
        try:
            self._portal.call(publish)
        except PortalClosed:
            if self._portal.was_opened:
                raise ProducerClosed("the producer is closed") from None
            raise ProducerClosed("the producer is not open yet: publish inside its `with` block") from None
