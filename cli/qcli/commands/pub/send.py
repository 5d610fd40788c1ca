"""How `pub` sends a batch: over TCP, or numbered over HTTP, so that it is stored once."""

import http.client
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

MAX_PRODUCERS = 10_000
"""The number of producers that a broker remembers; it is in the error for one more."""
_BODY_TOO_BIG = ("BODY_TOO_BIG", "BAD_BODY")
_TOO_BIG = ("BAD_MESSAGE", "MSG_TOO_BIG", *_BODY_TOO_BIG)


class Sender(Protocol):
    """Publishes batches to one topic, in the order of the calls.

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

    async def send(self, batch: list[bytes]) -> None:
        """Publish messages, at least one. Raises PublishFailed, as `Producer`."""
        ...

    async def end(self) -> None:
        """Tell the broker that all messages are published."""
        ...


class TCPSender:
    """Sends one MPUB for each batch, or, with `defer_ms` above 0, one DPUB for each message.

    The producer is connected, with `ordered`: if a batch fails, the batches after it fail too.
    """

    at_once = 16
    """The producer bounds the bytes."""
    batch_size = 1000
    may_repeat = True

    def __init__(self, producer: Producer, topic: str, defer_ms: int) -> None:
        self._producer = producer
        self._topic = topic
        self._defer_ms = defer_ms

    async def send(self, batch: list[bytes]) -> None:
        if self._defer_ms:
            await self._producer.publish_many(self._topic, batch, defer_ms=self._defer_ms)
        else:
            await self._producer.publish_set(self._topic, pack_messages(batch))

    async def end(self) -> None:
        """Do nothing: the owner closes the producer."""


class NumberedSender:
    """Sends numbered batches over HTTP, one after the other: each is stored once, even if it is sent again.

    Args:
        publisher: A producer with a unique name that does not retry.
        address: The broker's address, for errors.
        defer_ms: The delay of messages.
        fallback: Sends everything if the broker cannot remember one more producer.
    """

    at_once = 1
    batch_size = 10_000
    """Large, because each batch waits for its answer, which with `--sync=always` waits for a sync."""

    def __init__(
        self, publisher: IdempotentProducer, address: str, defer_ms: int, fallback: TCPSender
    ) -> None:
        self._publisher = publisher
        self._fallback = fallback
        self._falls_back = False
        self._address = address
        self._defer_ms = defer_ms
        self._number = 0  # of the next batch that is not acknowledged

    @property
    def may_repeat(self) -> bool:
        """Whether the fallback is used, or another broker without numbered batches has replaced the first one."""
        return self._falls_back or not self._publisher.remembers

    async def end(self) -> None:
        try:
            if self._number:
                await trio.to_thread.run_sync(self._publisher.forget, abandon_on_cancel=True)
        except (BrokerUnreachable, RequestRefused):
            pass  # the broker forgets the producer later by itself
        self._publisher.close()

    async def send(self, batch: list[bytes]) -> None:
        """Publish a batch. After a failure, the next call must have the same batch without acknowledged messages."""
        if self._falls_back:
            await self._fallback.send(batch)
            return
        try:
            await trio.to_thread.run_sync(
                self._publisher.publish, batch, self._number, self._defer_ms, abandon_on_cancel=True
            )
        except BrokerUnreachable as error:
            maybe_stored = not isinstance(error.__cause__, ConnectionRefusedError)
            lost = ConnectionLost(self._address, error.reason)
            raise PublishFailed(error.reason, maybe_stored=maybe_stored) from lost
        except RequestRefused as error:
            if not self._number and f" {MAX_PRODUCERS} producers " in error.text:
                self._falls_back = True
                await self._fallback.send(batch)
                return
            if error.text in _BODY_TOO_BIG and len(batch) > 1:
                await self._send_halves(batch)
                return
            refusal = _as_over_tcp(self._address, error)
            raise PublishFailed(str(refusal), maybe_stored=False) from refusal
        self._number += 1

    async def _send_halves(self, batch: list[bytes]) -> None:
        """Send a batch that exceeds the broker's --max-body-size in two parts. Raises PublishFailed."""
        acknowledged, middle = 0, len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            try:
                await self.send(half)
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
    tcp_address: str,
    http_address: str,
    topic: str,
    defer_ms: int,
    connecting: ConnectOptions,
    fallback: TCPSender,
) -> NumberedSender | None:
    """Return a sender of numbered batches that satisfies the connection options.

    Returns:
        None if numbered batches are not possible: the HTTP address belongs to another broker, is unreachable, is less
        secure than the options ask for, or the broker ignores numbers, as nsqd.
    """
    if connecting.snappy or connecting.deflate:
        return None  # HTTP has no such options
    if connecting.encrypts_tcp and not is_https(http_address) and not is_unix_path(http_address):
        return None
    publisher = await trio.to_thread.run_sync(_publisher, tcp_address, http_address, topic, connecting)
    return None if publisher is None else NumberedSender(publisher, tcp_address, defer_ms, fallback)


def _publisher(
    tcp_address: str, http_address: str, topic: str, connecting: ConnectOptions
) -> IdempotentProducer | None:
    try:
        broker = AdminClient(http_address, connecting)
        if not broker.listens_at(tcp_address):
            return None
        if not is_https(http_address) and not is_unix_path(http_address) and broker.requires_tls_for_tcp():
            return None  # TCP reports the error: plain HTTP, which `tcp-https` allows, would hide it
        publisher = IdempotentProducer(
            http_address,
            topic,
            f"qcli-pub:{uuid4().hex}",
            connecting.tls_files(),
            patience_s=0,
            auth_secret=connecting.auth_secret,
        )
        publisher.last_number()
    except (Failure, BrokerUnreachable, RequestRefused):
        return None
    return publisher if publisher.remembers else None
