"""A producer for one or more brokers."""

import logging
import random as random_module
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self, Unpack

import trio

from trio_nsq.protocol import Limits, MessageSet, NSQError, is_valid_name, pack_messages
from trio_nsq.protocol.batcher import split_for_mpub
from trio_nsq.protocol.limits import MIB
from trio_nsq.under_trio import require_trio

from ..background import BackgroundTask
from ..connection.addresses import each_once, nsqd_address
from ..connection.options import ConnectionOptions, ConnectionSettings, refuse_unknown
from ..connection.reconnect import MAX_DELAY_S, MIN_DELAY_S
from ..errors import BrokerError, ConnectionFailed, ProducerClosed, PublishFailed, none_reached
from .broker_link import BrokerLink
from .broker_rotation import BrokerRotation
from .limits import PublishLimits, check_bytes
from .queue import (
    MPUB_TARGET_BYTES,
    RETRIABLE_CODES,
    Command,
    CommandGroup,
    PublishFuture,
    PublishQueue,
)

MAX_IN_FLIGHT_BYTES = 4 * MIB
CLOSE_TIMEOUT_S = 5.0

_NSQD = Limits()
_logger = logging.getLogger("trio_nsq.client")


class Producer:
    """Publishes to one broker, or to several in turn; an async context manager.

        async with Producer("127.0.0.1:4150") as producer:
            await producer.publish("clicks", b"...")

    A publish returns once a broker has acknowledged it. Otherwise it raises `PublishFailed`, which says whether the
    message may be stored. The producer never sends a message twice, unless `retry` is set.

    Any number of tasks may publish at the same time. Single messages to one topic that wait for the same write are sent
    as one MPUB. The broker stores all messages of an MPUB or none: if it refuses one, all of them fail.

    Publishes go to the brokers in turn. If a broker cannot be reached or its connection is lost, it is excluded and
    tried again after a growing delay. Meanwhile the other brokers get all publishes, including those that waited for
    this broker and were not sent. If no broker is available, each publish tries all of them before it fails. The
    producer reconnects when there is something to publish.

    A refused publish does not fail others. Brokers close the connection after most refusals and do not execute later
    commands; the producer sends those again over the next connection. `qcli serve` keeps the connection open if the
    topic or the disk is full.

    The producer checks names and the limits below before it sends. If the brokers' limits are not nsqd's defaults, set
    them here.

    Args:
        nsqd_tcp_addresses: The broker, `host:port`, or several of them.
        retry: If a broker does not acknowledge a publish because the connection is lost or it cannot store it, publish
            again through each other broker once. If the first broker did store it, the message is stored twice.
        ordered: If a publish fails, fail all later ones that are not acknowledged; they are not stored. So the stored
            messages never have a gap. With one broker only.
        max_in_flight_bytes: The limit of unacknowledged bytes per broker; more wait in the queue. A larger command is
            sent alone.
        max_msg_size: The brokers' limit for a message, in bytes.
        max_body_size: The brokers' limit for the body of an MPUB, in bytes.
        max_req_timeout_ms: The brokers' limit for deferring a message. None: not checked; a broker that refuses closes
            the connection. nsqd's option is `--max-req-timeout`, one hour by default; that of `qcli serve` is
            `--max-defer`, one year by default.
        reconnect_min_s: How long a broker is excluded after its first failure.
        reconnect_max_s: The longest time a broker is excluded.
        close_timeout_s: How long closing waits for acknowledgements; 0: does not wait.
        random: Returns numbers in [0, 1), for the jitter of the delays.
        options: See `ConnectionSettings`.

    Raises:
        ValueError: An address or an option is invalid.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | Sequence[str] = "127.0.0.1:4150",
        *,
        retry: bool = False,
        ordered: bool = False,
        max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
        max_msg_size: int = _NSQD.max_msg_size,
        max_body_size: int = _NSQD.max_body_size,
        max_req_timeout_ms: int | None = None,
        reconnect_min_s: float = MIN_DELAY_S,
        reconnect_max_s: float = MAX_DELAY_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        random: Callable[[], float] = random_module.random,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        self._limits = PublishLimits(max_msg_size, max_body_size, max_req_timeout_ms)
        if max_in_flight_bytes < 1:
            raise ValueError(f"max_in_flight_bytes is {max_in_flight_bytes}; it must be at least 1")
        if not close_timeout_s >= 0:
            raise ValueError(f"close_timeout_s is {close_timeout_s}; it must be at least 0")
        if isinstance(nsqd_tcp_addresses, str):
            nsqd_tcp_addresses = [nsqd_tcp_addresses]
        addresses = each_once("nsqd_tcp_addresses", nsqd_tcp_addresses, nsqd_address)
        if not addresses:
            raise ValueError("nsqd_tcp_addresses is empty; at least one is needed")
        if ordered and len(addresses) > 1:
            raise ValueError(f"ordered is True with {len(addresses)} brokers; it works with one broker only")
        refuse_unknown(Producer, ConnectionSettings, options)
        settings = ConnectionSettings(**options)
        self._retry = retry
        self._ordered = ordered
        self._max_in_flight_bytes = max_in_flight_bytes
        self._close_timeout_s = close_timeout_s
        self._part_bytes = min(MPUB_TARGET_BYTES, self._limits.max_set_bytes, max_in_flight_bytes)
        self._background = BackgroundTask()
        self._rotation = BrokerRotation(addresses, reconnect_min_s, reconnect_max_s, random)
        self._links = {
            address: BrokerLink(
                address,
                settings,
                PublishQueue(max_in_flight_bytes, self._part_bytes, ordered=ordered),
                ordered=ordered,
                on_connected=self._on_connected,
                on_lost=self._on_lost,
                on_failed=self._on_failed,
            )
            for address in addresses
        }
        self._first_failures: dict[str, ConnectionFailed] = {}
        self._first_settled = trio.Event()  # one broker is connected, or all have failed
        self._entered = self._opened = self._closing = False
        self._closed = trio.Event()

    async def __aenter__(self) -> Self:
        """Connect to all brokers; returns as soon as one connection is open.

        Raises:
            ConnectionFailed: No broker could be reached.
            RuntimeError: The caller is not a trio task, or the producer was entered before.
        """
        require_trio("trio_nsq.Producer", "trio_nsq.sync.Producer")
        if self._entered:
            raise RuntimeError("a Producer can be entered only once")
        self._entered = True
        await self._background.open(self._run)
        try:
            for link in self._links.values():
                link.wake()
            await self._first_settled.wait()
            if len(self._first_failures) == len(self._links):
                raise none_reached([*self._first_failures.values()])
        except BaseException:
            self._closing = True
            self._closed.set()
            await self._background.close()
            raise
        self._opened = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        finally:
            await self._background.close()

    async def aclose(self) -> None:
        """Wait for pending acknowledgements and disconnect.

        Waits for `close_timeout_s` at most; then unacknowledged publishes fail. If this is cancelled, they fail at
        once. Later publishes raise `ProducerClosed`. May be called again.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            with trio.move_on_after(self._close_timeout_s):
                for future in [r for link in self._links.values() for r in link.queue.futures()]:
                    await future.settled.wait()
        finally:
            if self._entered:
                with trio.CancelScope(shield=True):
                    await self._background.stop()
            reason = ProducerClosed("the producer was closed before the broker acknowledged it")
            for link in self._links.values():
                for command in link.queue.clear():
                    command.fail(reason, maybe_stored=command.taken)
            self._closed.set()

    async def publish(self, topic: str, body: bytes, *, defer_ms: int = 0) -> None:
        """Publish a message and wait for its acknowledgement.

        If cancelled, the message is withdrawn unless it was written to the socket; then it may be stored.

        Args:
            topic: The topic; created if missing.
            body: The message, 1 to `max_msg_size` bytes.
            defer_ms: The delay before the delivery, in milliseconds; 0: no delay.

        Raises:
            PublishFailed: The message was not acknowledged.
            ProducerClosed: The producer is not open.
            TypeError: The message is not `bytes`.
            ValueError: The topic, the message or the delay is invalid.
        """
        self._check_call(topic)
        self._limits.check_message(body)
        self._limits.check_defer(defer_ms)
        link = self._next_link()
        if defer_ms:
            future = link.queue.add(Command(topic, body=body, defer_ms=defer_ms))
        else:
            future = link.queue.add_message(topic, body)
        link.wake()
        await self._settle(future)

    async def publish_many(self, topic: str, bodies: Sequence[bytes], *, defer_ms: int = 0) -> None:
        """Publish messages in order and wait until all are acknowledged.

        They are sent as MPUBs of moderate size, several in flight within `max_in_flight_bytes`, all to one broker
        while it is available. A broker stores all messages of an MPUB or none. To store all messages or none, use
        `publish_set`. If cancelled, messages that were written to the socket may be stored, the others are not.

        Args:
            topic: The topic; created if missing.
            bodies: The messages, 1 to `max_msg_size` bytes each; if empty, nothing is sent.
            defer_ms: The delay before the delivery, in milliseconds; 0: no delay. Deferred messages are sent and stored
                one by one: NSQ has no command to defer several.

        Raises:
            PublishFailed: Not all were acknowledged; `acknowledged` says how many were, from the first on, and
                `maybe_stored` whether some of the others may be stored.
            ProducerClosed: The producer is not open.
            TypeError: A message is not bytes.
            ValueError: The topic or a message is invalid; nothing was sent.
        """
        self._check_call(topic)
        sizes = list(map(len, bodies))
        self._limits.check_list(sizes)
        self._limits.check_defer(defer_ms)
        if defer_ms:
            check_bytes(bodies)
        group = CommandGroup()
        pending: deque[PublishFuture] = deque()
        acknowledged = in_flight_bytes = 0
        await trio.lowlevel.checkpoint()
        try:
            commands = (
                (Command(topic, body=body, defer_ms=defer_ms, group=group) for body in bodies)
                if defer_ms
                else (
                    Command(topic, messages=pack_messages(part), group=group)
                    for part in split_for_mpub(bodies, sizes, self._part_bytes)
                )
            )
            for command in commands:
                while pending and in_flight_bytes + command.size > self._max_in_flight_bytes:
                    done = await self._settle_first(pending)
                    acknowledged += len(done)
                    in_flight_bytes -= done.size
                pending.append(self._submit(command))
                in_flight_bytes += command.size
            while pending:
                acknowledged += len(await self._settle_first(pending))
        except PublishFailed as error:
            maybe_stored = await self._settle_rest(pending)
            raise PublishFailed(
                error.reason, maybe_stored=maybe_stored, acknowledged=acknowledged
            ) from error.__cause__
        finally:
            for future in pending:
                _withdraw(future)

    async def publish_set(self, topic: str, messages: MessageSet) -> None:
        """Publish packed messages as one MPUB and wait for its acknowledgement.

        The broker stores all or none of them (nsqd: unless a disk error occurs half-way). If cancelled, they are
        withdrawn unless they were written to the socket; then they may be stored.

        Args:
            topic: The topic; created if missing.
            messages: 1 to `max_msg_size` bytes each, and at most `max_body_size` - 4 bytes in total, size fields
                included; if empty, nothing is sent.

        Raises:
            PublishFailed: The messages were not acknowledged.
            ProducerClosed: The producer is not open.
            ValueError: The topic, a message or the total size is invalid.
        """
        self._check_call(topic)
        self._limits.check_set(messages)
        if messages.sizes:
            await self._settle(self._submit(Command(topic, messages=messages)))
        else:
            await trio.lowlevel.checkpoint()

    def _check_call(self, topic: str) -> None:
        if self._closing:
            raise ProducerClosed("the producer is closed")
        if not self._opened:  # it may never open, and the publish would never return
            raise ProducerClosed("the producer is not open yet: publish inside its `async with` block")
        if not is_valid_name(topic):
            raise ValueError(f"{topic!r} is not a valid topic name")

    def _submit(self, command: Command) -> PublishFuture:
        if self._closing:
            command.fail(ProducerClosed("the producer was closed"))
        else:
            self._send(command)
        return command.first_future()

    def _send(self, command: Command) -> bool:
        """Queue a command at the next broker where it has not failed yet; return False if there is none."""
        group = command.group
        if group is not None and group.address is not None and group.address not in command.failures:
            link = self._links[group.address]
        elif len(command.failures) == len(self._links):
            return False
        else:
            link = self._next_link(command.failures)
            if group is not None:
                group.address = link.address
        link.queue.add(command)
        link.wake()
        return True

    def _next_link(self, without: Collection[str] = ()) -> BrokerLink:
        for due in self._rotation.due(trio.current_time()):
            self._links[due].wake()
        address = self._rotation.choose(without)
        assert address is not None
        return self._links[address]

    async def _settle(self, future: PublishFuture) -> None:
        """Wait for the outcome; if cancelled, withdraw the message if possible."""
        try:
            await future.settled.wait()
        except BaseException:
            _withdraw(future)
            raise
        if future.failure is not None:
            raise future.failure

    async def _settle_first(self, pending: deque[PublishFuture]) -> Command:
        """Wait for the first of these and remove it; return its command. Raises its failure."""
        await pending[0].settled.wait()
        if (failure := pending[0].failure) is not None:
            raise failure
        return pending.popleft().command

    async def _settle_rest(self, pending: deque[PublishFuture]) -> bool:
        """After the first of these failed, withdraw the unsent ones and wait for the others.

        Returns:
            Whether any of these messages may be stored.
        """
        maybe_stored = False
        for future in pending:
            if _withdraw(future):
                maybe_stored |= future.command.maybe_stored
            else:
                await future.settled.wait()
                maybe_stored |= future.failure is None or future.failure.maybe_stored
        return maybe_stored

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            for link in self._links.values():
                nursery.start_soon(link.run)

    def _on_connected(self, link: BrokerLink) -> None:
        self._rotation.record_connected(link.address, trio.current_time())
        self._first_settled.set()

    def _on_lost(self, link: BrokerLink, reason: NSQError) -> None:
        now = trio.current_time()
        excluded_s = self._rotation.record_failure(link.address, now) - now
        if not self._first_settled.is_set():
            assert isinstance(reason, ConnectionFailed)  # no connection was open, so none was lost
            self._first_failures[link.address] = reason
            if len(self._first_failures) == len(self._links):
                self._first_settled.set()
        elif len(self._links) > 1:
            _logger.warning("%s; not used for %.1f s", reason, excluded_s)
        else:
            _logger.warning("%s; reconnecting at the next publish", reason)

    def _on_failed(self, link: BrokerLink, command: Command, reason: NSQError) -> None:
        """Send an unacknowledged command to another broker if that is allowed; otherwise fail it."""
        command.failures[link.address] = reason
        if command.taken:
            may_go_on = self._retry and not (
                isinstance(reason, BrokerError) and reason.code not in RETRIABLE_CODES
            )
        else:
            may_go_on = not self._ordered
        if not (may_go_on and self._send(command)):
            command.fail(reason)


def _withdraw(future: PublishFuture) -> bool:
    """Withdraw a message that was not written to a socket; return False if it is too late."""
    queue = future.command.queue
    return queue is not None and queue.withdraw(future)
