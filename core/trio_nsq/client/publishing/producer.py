"""A producer for one broker or several."""

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

    A publish returns once a broker has acknowledged it, and raises `PublishFailed` otherwise, which says whether
    the message may have been stored. The producer sends nothing twice by itself, unless `retry` is set.

    Any number of tasks may publish at the same time. Single messages to one topic that wait for the same writer leave
    as one MPUB, which the broker stores as a whole or not at all: if it is refused, all of them are.

    Publishes go to the brokers in turn. A broker that cannot be reached, or whose connection is lost, is set aside and
    tried again after a growing delay; meanwhile publishes go to the others, also those that waited for it and were not
    sent. If all brokers are away, each publish tries all of them before it fails.
    A lost connection is made again when there is something to publish, not before.

    A refused publish does not fail others. Brokers close the connection after most refusals and do not execute what was
    sent behind the refused publish: the producer sends it again over the next connection. `qcli serve` keeps the
    connection if the topic or the disk is full.

    The producer checks names, and the limits below, before it sends: set them to the brokers' values if those are not
    nsqd's defaults.

    Args:
        nsqd_tcp_addresses: The broker, `host:port`, or several of them.
        retry: Publish again, through each other broker once, what one did not acknowledge because its connection was
            lost, or because it could not store it. If it had stored it all the same, it is then stored twice.
        ordered: Fail with each publish that fails all others that were handed over after it and are not acknowledged;
            they are not stored. So there is never a gap in what is stored. With one broker only.
        max_in_flight_bytes: How many bytes may wait for acknowledgement by one broker; more wait to be sent until there
            is room. A larger command is sent by itself.
        max_msg_size: The brokers' limit for a message, in bytes.
        max_body_size: The brokers' limit for the body of an MPUB, in bytes.
        max_req_timeout_ms: The brokers' limit for deferring a message; None: leave it to the broker, which
            closes the connection when it refuses. nsqd's is `--max-req-timeout`, an hour by default; `qcli serve`'s is
            `--max-defer`, a year.
        reconnect_min_s: How long a broker is set aside after its first failure.
        reconnect_max_s: The longest.
        close_timeout_s: How long leaving may wait for acknowledgements; 0: not at all.
        random: Gives numbers in [0, 1), for the jitter of the delays.
        options: See `ConnectionSettings`.

    Raises:
        ValueError: An address or an option that cannot work.
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
            raise ValueError(
                f"ordered with {len(addresses)} brokers; there can be one order on one broker only"
            )
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
        self._first_settled = trio.Event()  # one broker is connected, or none can be
        self._entered = self._opened = self._closing = False
        self._closed = trio.Event()

    async def __aenter__(self) -> Self:
        """Connect to all brokers; returns as soon as one connection is made.

        Raises:
            ConnectionFailed: None of the brokers could be reached.
            RuntimeError: This is no trio task, or it was entered before.
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
        """Wait until what is being published is acknowledged, and disconnect.

        Waits for `close_timeout_s` at most; what is not acknowledged by then fails, as does everything at once if
        this is cancelled. Publishes that begin after it raise `ProducerClosed`. May be called again.
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

        If cancelled, the message is taken back if it has not been handed to the socket; otherwise it may be stored.

        Args:
            topic: The topic; created if need be.
            body: The message, 1 to `max_msg_size` bytes.
            defer_ms: Deliver it no sooner than in this many milliseconds; 0: at once.

        Raises:
            PublishFailed: It was not acknowledged.
            ProducerClosed: The producer is not open.
            TypeError: The message is not `bytes`.
            ValueError: A topic, message or time that brokers do not accept.
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
        """Publish messages, in order, and wait until all are acknowledged.

        They are sent as MPUBs of moderate size, several at a time within `max_in_flight_bytes`, all to one broker
        unless it goes away. Each MPUB is stored as a whole or not at all, the list as a whole is not: use `publish_set`
        for that. If cancelled, what has been handed to the socket may be stored, the rest is not.

        Args:
            topic: The topic; created if need be.
            bodies: The messages, 1 to `max_msg_size` bytes each; if there are none nothing is sent.
            defer_ms: Deliver them no sooner than in this many milliseconds; 0: at once. Deferred messages are sent, and
                stored, one by one, as NSQ has no command for several.

        Raises:
            PublishFailed: Not all were acknowledged; its `acknowledged` says how many were, from the first on, and its
                `maybe_stored` whether some of the others may be stored, or are.
            ProducerClosed: The producer is not open.
            TypeError: A message is not bytes.
            ValueError: A topic or a message that brokers do not accept; nothing has been sent.
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
        """Publish messages that are packed already, as one MPUB, and wait for its acknowledgement.

        They are stored all or none (nsqd: except for a disk error half-way). If cancelled, they are taken back if
        they have not been handed to the socket; otherwise they may be stored.

        Args:
            topic: The topic; created if need be.
            messages: 1 to `max_msg_size` bytes each, and `max_body_size` less 4 in all, size fields included;
                if there are none nothing is sent.

        Raises:
            PublishFailed: They were not acknowledged.
            ProducerClosed: The producer is not open.
            ValueError: A topic, message or total size that brokers do not accept.
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
        if not self._opened:  # and it may never be: a publish would wait for ever
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
        """Give it to the broker whose turn it is, but none where it failed before; false if there is no such one."""
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
        """Wait for the outcome; if cancelled, take it back if possible."""
        try:
            await future.settled.wait()
        except BaseException:
            _withdraw(future)
            raise
        if future.failure is not None:
            raise future.failure

    async def _settle_first(self, pending: deque[PublishFuture]) -> Command:
        """Wait for the oldest of these and remove it, unless it fails; return its command."""
        await pending[0].settled.wait()
        if (failure := pending[0].failure) is not None:
            raise failure
        return pending.popleft().command

    async def _settle_rest(self, pending: deque[PublishFuture]) -> bool:
        """Take back what can be, and wait for the others; whether any of these, the first failed, may be stored."""
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
            assert isinstance(reason, ConnectionFailed)  # there was no connection that could have been lost
            self._first_failures[link.address] = reason
            if len(self._first_failures) == len(self._links):
                self._first_settled.set()
        elif len(self._links) > 1:
            _logger.warning("%s; set aside for %.1f s", reason, excluded_s)
        else:
            _logger.warning("%s; connecting again at the next publish", reason)

    def _on_failed(self, link: BrokerLink, command: Command, reason: NSQError) -> None:
        """A broker has not acknowledged it: let another one have it, if it may, or give up."""
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
    """Withdraw a message that was not handed to a socket; return whether that was in time."""
    queue = future.command.queue
    return queue is not None and queue.withdraw(future)
