"""How `pub` sends a batch: over TCP, or numbered over HTTP, so that it is stored once."""

import http.client
import time
from collections.abc import Callable, Mapping
from typing import Protocol
from uuid import uuid4

import trio

from trio_nsq.client import BrokerError, Producer, PublishFailed
from trio_nsq.client.errors import BrokerUnreachable, ConnectionLost, RequestRefused, meaning_of
from trio_nsq.client.http.idempotent_producer import IdempotentProducer
from trio_nsq.protocol import pack_messages

from ...broker.admin_client import AdminClient
from ...broker.connection_options import ConnectOptions
from ...framework.errors import Failure
from ...framework.params import is_https, is_unix_path
from .batches import Batch

MAX_PRODUCERS = 10_000
"""The number of producers that a broker remembers; it is in the error for one more."""
_BODY_TOO_BIG = ("BODY_TOO_BIG", "BAD_BODY")
_TOO_BIG = ("BAD_MESSAGE", "MSG_TOO_BIG", *_BODY_TOO_BIG)


class Sender(Protocol):
    """Publishes batches, in the order of the calls.

    Attributes:
        at_once: The number of unacknowledged batches.
        batch_size: The default number of messages in a batch.
    """

    at_once: int
    batch_size: int

    @property
    def may_repeat(self) -> bool:
        """Whether a batch that is sent again after a failure may be stored twice."""
        ...

    async def send(self, batch: Batch) -> None:
        """Publish messages. Raises PublishFailed, as `Producer`."""
        ...

    async def end(self) -> None:
        """Tell the broker that all messages are published."""
        ...


class TCPSender:
    """Sends one MPUB for each batch, or one DPUB for each message of a deferred batch.

    The producer is connected, with `ordered`: if a batch fails, the batches after it fail too.
    """

    at_once = 16
    """The producer bounds the bytes."""
    batch_size = 1000
    may_repeat = True

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def send(self, batch: Batch) -> None:
        if defer_ms := batch.delay_ms(time.time_ns()):
            await self._producer.publish_many(batch.topic, batch.bodies, defer_ms=defer_ms)
        else:
            await self._producer.publish_set(batch.topic, pack_messages(batch.bodies))

    async def end(self) -> None:
        """Do nothing: the owner closes the producer."""


class NumberedSender:
    """Sends numbered batches over HTTP, one after the other: each is stored once, even if it is sent again.

    Args:
        new_producer: Returns a producer for a topic that does not retry; its name is unique.
        address: The broker's address, for errors.
        fallback: Sends everything if the broker cannot remember one more producer.
        producers: Producers that have published nothing yet, by topic.
    """

    at_once = 1
    batch_size = 10_000
    """Large, because each batch waits for its answer, which with `--sync=always` waits for a sync."""

    def __init__(
        self,
        new_producer: Callable[[str], IdempotentProducer],
        address: str,
        fallback: TCPSender,
        producers: Mapping[str, IdempotentProducer],
    ) -> None:
        self._new_producer = new_producer
        self._producers = dict(producers)  # by topic
        self._numbers = dict.fromkeys(producers, 0)  # by topic, of the next batch that is not acknowledged
        self._fallback = fallback
        self._falls_back = False
        self._repeats = False  # another broker without numbered batches has replaced the first one
        self._was_unreachable = False
        self._address = address

    @property
    def may_repeat(self) -> bool:
        """Whether the fallback is used, or another broker without numbered batches has replaced the first one."""
        return self._falls_back or self._repeats

    async def end(self) -> None:
        for topic, producer in self._producers.items():
            try:
                if self._numbers[topic]:
                    await trio.to_thread.run_sync(producer.forget, abandon_on_cancel=True)
            except (BrokerUnreachable, RequestRefused):
                pass  # the broker forgets the producer later by itself

    def close(self) -> None:
        """Close the connections."""
        for producer in self._producers.values():
            producer.close()

    async def send(self, batch: Batch) -> None:
        """Publish a batch.

        After a failure in which the batch may have been stored, the next call must have the same batch, without
        acknowledged messages.
        """
        if self._falls_back:
            await self._fallback.send(batch)
            return
        topic = batch.topic
        producer = self._producers.get(topic)
        if producer is None:
            producer = self._producers[topic] = self._new_producer(topic)
            self._numbers[topic] = 0
        sent = False
        try:
            if self._was_unreachable or not producer.remembers:
                # A request that stores nothing: a broker that does not answer it has not got the batch.
                await trio.to_thread.run_sync(producer.last_number, abandon_on_cancel=True)
            sent = True
            await trio.to_thread.run_sync(
                producer.publish,
                batch.bodies,
                self._numbers[topic],
                batch.delay_ms(time.time_ns()),
                abandon_on_cancel=True,
            )
        except BrokerUnreachable as error:
            self._was_unreachable = True
            maybe_stored = sent and (error.unanswered or not isinstance(error.__cause__, OSError))
            lost = ConnectionLost(self._address, error.reason)
            raise PublishFailed(error.reason, maybe_stored=maybe_stored) from lost
        except RequestRefused as error:
            if not self._numbers[topic] and f" {MAX_PRODUCERS} producers " in error.text:
                self._falls_back = True
                await self._fallback.send(batch)
                return
            if error.text in _BODY_TOO_BIG and len(batch.bodies) > 1:
                await self._send_halves(batch)
                return
            refusal = _as_over_tcp(self._address, error)
            raise PublishFailed(str(refusal), maybe_stored=False) from refusal
        self._numbers[topic] += 1
        self._repeats = not producer.remembers
        self._was_unreachable = False

    async def _send_halves(self, batch: Batch) -> None:
        """Send a batch that exceeds the broker's --max-body-size in two parts. Raises PublishFailed."""
        acknowledged, middle = 0, len(batch.bodies) // 2
        for half in (batch.bodies[:middle], batch.bodies[middle:]):
            try:
                await self.send(batch.with_bodies(half))
            except PublishFailed as error:
                acknowledged += error.acknowledged
                raise PublishFailed(
                    error.reason, maybe_stored=error.maybe_stored, acknowledged=acknowledged
                ) from error.__cause__
            acknowledged += len(half)


def _as_over_tcp(address: str, error: Exception) -> BrokerError:
    """Return the error of the TCP protocol for a refusal over HTTP."""
    assert isinstance(error, RequestRefused)
    if error.status == http.client.SERVICE_UNAVAILABLE:
        code = "E_TOPIC_FULL" if error.text.startswith("topic ") else "E_MPUB_FAILED"
        return BrokerError(address, code, f"MPUB failed {error.text.replace('EXITING', 'exiting')}")
    if error.is_about_secret:
        if error.status == http.client.FORBIDDEN:
            return BrokerError(address, "E_UNAUTHORIZED", f'AUTH failed for PUB on "{error.topic}" ""')
        return BrokerError(address, "E_AUTH_FAILED", f"AUTH failed: {meaning_of(error.text)}")
    if error.text in _TOO_BIG:
        return BrokerError(address, "E_BAD_MESSAGE", f"a message or a batch is too big ({error.text})")
    return BrokerError(address, error.text, "")


async def numbered_sender(
    tcp_address: str, http_address: str, topic: str, connecting: ConnectOptions, fallback: TCPSender
) -> NumberedSender | None:
    """Return a sender of numbered batches that satisfies the connection options.

    Args:
        topic: The topic of the first batch; another name if it is unknown.

    Returns:
        None if numbered batches are not possible: the HTTP address belongs to another broker, is unreachable, is less
        secure than the options ask for, or the broker ignores numbers, as nsqd.
    """
    if connecting.snappy or connecting.deflate or not http_address:
        return None  # HTTP has no such options
    if connecting.encrypts_tcp and not is_https(http_address) and not is_unix_path(http_address):
        return None
    name = f"qcli-pub:{uuid4().hex}"

    def producer(topic: str) -> IdempotentProducer:
        return IdempotentProducer(
            http_address,
            topic,
            name,
            connecting.tls_files(),
            patience_s=0,
            auth_secret=connecting.auth_secret,
        )

    first = producer(topic)
    possible = await trio.to_thread.run_sync(
        _is_possible, tcp_address, http_address, connecting, first, abandon_on_cancel=True
    )
    if not possible:
        first.close()
        return None
    return NumberedSender(producer, tcp_address, fallback, {topic: first})


def _is_possible(
    tcp_address: str, http_address: str, connecting: ConnectOptions, producer: IdempotentProducer
) -> bool:
    """Return whether the broker at both addresses is the same one, and remembers batch numbers."""
    try:
        broker = AdminClient(http_address, connecting)
        if not broker.listens_at(tcp_address):
            return False
        if not is_https(http_address) and not is_unix_path(http_address) and broker.requires_tls_for_tcp():
            return False  # TCP reports the error: plain HTTP, which `tcp-https` allows, would hide it
        producer.last_number()
    except (Failure, BrokerUnreachable, RequestRefused):
        return False
    return producer.remembers
