"""Connects `pub` to its brokers, and sends batches: numbered over HTTP, so that each is stored once, or over TCP."""

import http.client
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Protocol
from uuid import uuid4

import trio

from trio_nsq.client import (
    AuthRefused,
    BrokerError,
    ConnectionFailed,
    HeadersRefused,
    Producer,
    PublishFailed,
)
from trio_nsq.client.errors import BrokerUnreachable, ConnectionLost, RequestRefused, meaning_of
from trio_nsq.client.http.idempotent_producer import IdempotentProducer
from trio_nsq.protocol import Limits, pack_messages
from trio_nsq.protocol.address import is_unix_path

from ...broker.admin_client import AdminClient
from ...broker.brokers import combined
from ...broker.connection_options import ConnectOptions
from ...broker.failures import connection_failure
from ...framework.errors import Failure
from ...framework.params import is_https
from .batches import Batch
from .options import PubOptions

OTHERS_S = 1.0
"""How long to wait for more brokers, once one is connected, if each message goes to one broker."""
MAX_PRODUCERS = 10_000
"""The number of producers that a broker remembers; it is in the error for one more."""
_ANY_TOPIC = "qcli-pub"
"""A topic name to ask a broker for the numbers of, which creates nothing."""
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
        """Publish messages. Raises PublishFailed, as `Producer`.

        After a failure in which the batch may have been stored, the next call must have the same batch, without
        acknowledged messages.
        """
        ...

    async def end(self) -> None:
        """Tell the broker that all messages are published."""
        ...


async def connect(
    options: PubOptions,
    brokers: Mapping[str, str],
    is_spread: bool,
    nursery: trio.Nursery,
    unanswered: list[str],
) -> dict[str, Sender]:
    """Connect to all brokers at once, until the nursery is cancelled.

    Args:
        brokers: Their HTTP addresses by TCP address.
        is_spread: Whether each message goes to one broker. Then one broker that is connected is enough; the others are
            connected once there is something to send to them.
        unanswered: Their TCP addresses; those that answer, or cannot be reached, are removed.

    Returns the senders by TCP address, in the same order.

    Raises Failure: a broker that is needed is unreachable, or one refuses the secret.
    """
    senders = {address: BrokerSender(options, address, http, nursery) for address, http in brokers.items()}
    failures: dict[str, ConnectionFailed] = {}
    scope = trio.CancelScope()

    async def try_one(address: str) -> None:
        try:
            await senders[address].connect()
        except ConnectionFailed as error:
            failures[address] = error
        else:
            if is_spread and not options.no_retry and scope.deadline == math.inf:
                scope.deadline = trio.current_time() + OTHERS_S
        unanswered.remove(address)

    with scope:
        async with trio.open_nursery() as attempts:
            for address in senders:
                attempts.start_soon(try_one, address)
    is_needed = not is_spread or options.no_retry or not any(each.is_connected for each in senders.values())
    if failures and (is_needed or any(isinstance(error, AuthRefused) for error in failures.values())):
        in_order = {address: failures[address] for address in brokers if address in failures}
        raise _unreachable(in_order, several=len(brokers) > 1)
    for address, sender in senders.items():
        if not sender.is_connected:
            slow = ConnectionFailed(address, f"no answer within {OTHERS_S:g} s")
            sender.fail_once(failures.get(address, slow))
    return dict(senders)


def _unreachable(failures: Mapping[str, ConnectionFailed], *, several: bool) -> Failure:
    found = [connection_failure(error, address) for address, error in failures.items()]
    failure = combined(found, partial=False)
    text = failure.message
    if several:
        text += f"{chr(10) if len(found) > 1 else ' '}Nothing was published to any broker."
    return Failure(text, failure.exit_code)


class BrokerSender:
    """A `Sender` for one broker.

    Numbered batches go over HTTP, one after the other: each is stored once, even if it is sent again. If that is
    impossible, a batch is an MPUB, or one DPUB for each of its messages if they are deferred. If one of these fails,
    the batches after it fail too.
    """

    # For numbered batches, which are large because each waits for its answer, and that with `--sync=always` for a sync.
    at_once = 1
    batch_size = 10_000

    def __init__(self, options: PubOptions, address: str, http_address: str, nursery: trio.Nursery) -> None:
        self._options = options
        self._address = address
        self._http_address = http_address
        self._nursery = nursery
        self._connecting = ConnectOptions.of_command()
        self._first_topic = options.common_topic or _ANY_TOPIC
        self._name = f"qcli-pub:{uuid4().hex}"
        self._tcp: Producer | None = None
        self._failure: ConnectionFailed | None = None
        self._is_numbered = False
        self._numbered: dict[str, IdempotentProducer] = {}  # by topic
        self._numbers: dict[str, int] = {}  # by topic, of the next batch that is not acknowledged
        self._repeats = False  # another broker without numbered batches has replaced the first one
        self._was_unreachable = False

    @property
    def is_connected(self) -> bool:
        return self._tcp is not None

    @property
    def may_repeat(self) -> bool:
        return self.is_connected and (not self._is_numbered or self._repeats)

    async def connect(self) -> None:
        """Connect, until the nursery is cancelled. Raises ConnectionFailed: the broker is unreachable, or refuses."""
        most = self._options.max_msg_size
        producer = Producer(
            self._address,
            max_msg_size=most,
            max_body_size=max(Limits().max_body_size, most + 8),  # an MPUB with one message has 8 more bytes
            ordered=True,  # acknowledged messages are the first ones, without a gap
            **self._connecting.options(),
        )
        await self._nursery.start(self._hold, producer)
        first = await trio.to_thread.run_sync(self._first_numbered, abandon_on_cancel=True)
        if first is not None:
            self._is_numbered = True
            self._numbered[self._first_topic], self._numbers[self._first_topic] = first, 0
        else:
            self.at_once, self.batch_size = 16, 1000  # the producer bounds the bytes
        self._tcp = producer

    async def _hold(self, producer: Producer, task_status: trio.TaskStatus[None]) -> None:
        try:
            async with producer:
                task_status.started()
                await trio.sleep_forever()
        finally:
            for each in self._numbered.values():
                each.close()

    def _first_numbered(self) -> IdempotentProducer | None:
        """Return the producer of the first topic's numbered batches; None: they are impossible.

        The HTTP address belongs to another broker, is unreachable, is less secure than the options ask for, or the
        broker ignores numbers, as nsqd.
        """
        http, connecting = self._http_address, self._connecting
        is_plain = not is_https(http) and not is_unix_path(http)
        if self._options.no_retry or not http or (is_plain and connecting.encrypts_tcp):
            return None
        if connecting.snappy or connecting.deflate:
            return None  # HTTP has no such options
        first = self._new_numbered(self._first_topic)
        try:
            broker = AdminClient(http, connecting)
            # If it requires TLS, TCP reports the error: plain HTTP, which `tcp-https` allows, would hide it.
            if broker.listens_at(self._address) and not (is_plain and broker.requires_tls_for_tcp()):
                first.last_number()
        except (Failure, BrokerUnreachable, RequestRefused):
            pass
        if first.remembers:
            return first
        first.close()
        return None

    def _new_numbered(self, topic: str) -> IdempotentProducer:
        return IdempotentProducer(
            self._http_address,
            topic,
            self._name,
            self._connecting.tls_files(),
            patience_s=0,
            auth_secret=self._connecting.auth_secret,
        )

    def fail_once(self, failure: ConnectionFailed) -> None:
        """Have the next batch fail: the broker was unreachable at the start."""
        self._failure = failure

    async def end(self) -> None:
        for topic, producer in self._numbered.items():
            try:
                if self._numbers[topic]:
                    await trio.to_thread.run_sync(producer.forget, abandon_on_cancel=True)
            except (BrokerUnreachable, RequestRefused):
                pass  # the broker forgets the producer later by itself

    async def send(self, batch: Batch) -> None:
        if self._tcp is None:
            await trio.lowlevel.checkpoint()
            try:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                await self.connect()
            except ConnectionFailed as error:
                raise PublishFailed(error.reason, maybe_stored=False) from error
        if self._is_numbered:
            await self._send_numbered(batch)
        else:
            await self._send_over_tcp(batch)

    async def _send_over_tcp(self, batch: Batch) -> None:
        assert self._tcp is not None
        defer_ms = batch.delay_ms(time.time_ns())
        if defer_ms or batch.headers:
            await self._tcp.publish_many(
                batch.topic, batch.bodies, defer_s=defer_ms / 1000, headers=batch.headers or None
            )
        else:
            await self._tcp.publish_set(batch.topic, pack_messages(batch.bodies))

    async def _send_numbered(self, batch: Batch) -> None:
        topic = batch.topic
        if topic not in self._numbered:
            self._numbered[topic], self._numbers[topic] = self._new_numbered(topic), 0
        producer = self._numbered[topic]
        sent = False
        try:
            if self._was_unreachable or not producer.remembers:
                # A request that stores nothing: a broker that does not answer it has not got the batch.
                await trio.to_thread.run_sync(producer.last_number, abandon_on_cancel=True)
            sent = True
            defer_s = batch.delay_ms(time.time_ns()) / 1000
            publish = partial(producer.publish, defer_s=defer_s, headers=batch.headers or None)
            await trio.to_thread.run_sync(publish, batch.bodies, self._numbers[topic], abandon_on_cancel=True)
        except BrokerUnreachable as error:
            self._was_unreachable = True
            maybe_stored = sent and (error.unanswered or not isinstance(error.__cause__, OSError))
            lost = ConnectionLost(self._address, error.reason)
            raise PublishFailed(error.reason, maybe_stored=maybe_stored) from lost
        except RequestRefused as error:
            if not self._numbers[topic] and f" {MAX_PRODUCERS} producers " in error.text:
                self._is_numbered = False
                await self._send_over_tcp(batch)
                return
            if error.text in _BODY_TOO_BIG and len(batch.bodies) > 1:
                await self._send_halves(batch)
                return
            refusal: BrokerError | HeadersRefused = _as_over_tcp(self._address, error)
            if batch.headers and error.status == http.client.NOT_FOUND and not error.is_without_topic:
                refusal = HeadersRefused(self._address)
            raise PublishFailed(str(refusal), maybe_stored=False) from refusal
        self._numbers[topic] += 1
        self._repeats = not producer.remembers
        self._was_unreachable = False

    async def _send_halves(self, batch: Batch) -> None:
        """Send a batch that exceeds the broker's --max-body-size in two parts. Raises PublishFailed."""
        acknowledged, middle = 0, len(batch.bodies) // 2
        for half in (batch.part(slice(middle)), batch.part(slice(middle, None))):
            try:
                await self.send(half)
            except PublishFailed as error:
                acknowledged += error.acknowledged
                raise PublishFailed(
                    error.reason, maybe_stored=error.maybe_stored, acknowledged=acknowledged
                ) from error.__cause__
            acknowledged += len(half.bodies)


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
