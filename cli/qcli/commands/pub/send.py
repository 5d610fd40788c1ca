"""How `pub` hands a batch to the broker: over TCP, or numbered over HTTP, so that none is published twice."""

import http.client
from typing import Protocol
from uuid import uuid4

import trio

from trio_nsq.client import BrokerError, Producer, PublishFailed
from trio_nsq.client.errors import BrokerUnreachable, ConnectionLost, RequestRefused
from trio_nsq.client.http.idempotent_producer import IdempotentProducer
from trio_nsq.protocol import pack_messages

from ...broker.admin_client import AdminClient
from ...broker.connection_options import ConnectOptions
from ...framework.errors import Failure
from ...framework.params import is_https, is_unix_path

MAX_PRODUCERS = 10_000
"""As many does a broker remember at a time; it says so when it refuses one more."""
_BODY_TOO_BIG = ("BODY_TOO_BIG", "BAD_BODY")
_TOO_BIG = ("BAD_MESSAGE", "MSG_TOO_BIG", *_BODY_TOO_BIG)


class Sender(Protocol):
    """Publishes batches to one topic, in the order of the calls.

    Attributes:
        at_once: How many batches may be on their way.
        batch_size: Messages in one of them, unless the user says otherwise.
    """

    at_once: int
    batch_size: int

    @property
    def may_repeat(self) -> bool:
        """Whether a batch that is sent again after a failure may then be there twice."""
        ...

    async def send(self, batch: list[bytes]) -> None:
        """Publish messages, at least one. Raises PublishFailed, as `Producer`."""
        ...

    async def end(self) -> None:
        """Say that all was published."""
        ...


class TCPSender:
    """Sends one MPUB for each batch, or, with `defer_ms` above 0, one DPUB for each message.

    The producer is connected, with `ordered`: a batch that fails takes along those behind it.
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
        """The producer is closed by its owner."""


class NumberedSender:
    """Sends numbered batches over HTTP, one after the other: each is published once, however often it is sent.

    Args:
        publisher: With a unique name and no patience.
        address: The broker's, for errors.
        defer_ms: As above.
        fallback: Sends everything if the broker cannot remember one more producer now.
    """

    at_once = 1
    batch_size = 10_000
    """Larger, as only one is on its way: each takes an answer, and with `--sync=always` a sync of the broker's disk."""

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
        """Another broker may have taken the place of the one that knows numbers."""
        return self._falls_back or not self._publisher.remembers

    async def end(self) -> None:
        try:
            if self._number:
                await trio.to_thread.run_sync(self._publisher.forget, abandon_on_cancel=True)
        except (BrokerUnreachable, RequestRefused):
            pass  # it does so by itself in the end
        self._publisher.close()

    async def send(self, batch: list[bytes]) -> None:
        """If it fails, the next call must be with the same batch, but for what was acknowledged."""
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
        """The broker's --max-body-size is less than its default. Raises PublishFailed."""
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
    """The error frame that says the same as a refusal over HTTP."""
    assert isinstance(error, RequestRefused)
    if error.status == http.client.SERVICE_UNAVAILABLE:
        code = "E_TOPIC_FULL" if error.text.startswith("topic ") else "E_MPUB_FAILED"
        return BrokerError(address, code, f"MPUB failed {error.text.replace('EXITING', 'exiting')}")
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
    """Find out whether batches can be numbered, and how, without giving up anything of what `connecting` asks for.

    Returns:
        None if there is no such way: the HTTP address is another broker's, is not open to us, is less safe than what
        was asked for, or the broker takes no notice of numbers, as nsqd.
    """
    if connecting.auth_secret or connecting.snappy or connecting.deflate:
        return None  # HTTP has none of them
    if connecting.encrypts_tcp and not is_https(http_address) and not is_unix_path(http_address):
        return None
    publisher = await trio.to_thread.run_sync(_publisher, tcp_address, http_address, topic, connecting)
    return None if publisher is None else NumberedSender(publisher, tcp_address, defer_ms, fallback)


def _publisher(
    tcp_address: str, http_address: str, topic: str, connecting: ConnectOptions
) -> IdempotentProducer | None:
    try:
        if not AdminClient(http_address, connecting).listens_at(tcp_address):
            return None
        publisher = IdempotentProducer(
            http_address, topic, f"qcli-pub:{uuid4().hex}", connecting.tls_files(), patience_s=0
        )
        publisher.last_number()
    except (Failure, BrokerUnreachable, RequestRefused):
        return None
    return publisher if publisher.remembers else None
