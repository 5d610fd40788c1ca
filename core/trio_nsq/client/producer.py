"""A producer for one broker."""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Self, Unpack

import trio

from trio_nsq.protocol import (
    ErrorFrame,
    FrameError,
    Limits,
    MessageSet,
    NSQError,
    ResponseFrame,
    is_valid_name,
    pack_messages,
)
from trio_nsq.protocol.limits import MIB

from ..protocol.address import format_address, parse_address
from .background import Background
from .connection import Connection, Event, connect
from .errors import BrokerError, ConnectionFailed, ProducerClosed, PublishFailed
from .options import ConnectionOptions, ConnectionSettings
from .publishing import COUNT_BYTES, MPUB_TARGET_BYTES, SIZE_BYTES, Command, Outbox, Receipt

MAX_IN_FLIGHT_BYTES = 4 * MIB
CLOSE_TIMEOUT_S = 5.0

_NSQD = Limits()
_OK = ResponseFrame(b"OK")
_logger = logging.getLogger("trio_nsq.client")


class Producer:
    """Publishes to one broker; an async context manager.

        async with Producer("127.0.0.1:4150") as producer:
            await producer.publish("clicks", b"...")

    A publish returns once the broker has acknowledged it, and raises `PublishFailed` otherwise, which says whether
    the message may have been stored. Nothing is ever sent again by itself.

    Any number of tasks may publish at the same time. Single messages to one topic that wait for the writer leave as
    one MPUB, which the broker stores as a whole or not at all.

    A lost connection fails every publish that is not acknowledged. The next publish connects again; if
    that fails it fails with it, and the one after it tries once more.

    Everything a broker would refuse, and close the connection over, is checked against the limits below
    before it is sent, so that one caller's mistake does not fail the publishes of others. Set them to the broker's
    values if those are not nsqd's defaults.

    Args:
        nsqd_tcp_address: The broker, `host:port`.
        max_in_flight_bytes: How many bytes may wait for acknowledgement; more wait to be sent until there is room.
            A larger command is sent by itself.
        max_msg_size: The broker's limit for a message, in bytes.
        max_body_size: The broker's limit for the body of an MPUB, in bytes.
        max_req_timeout_ms: The broker's limit for deferring a message.
        close_timeout_s: How long leaving may wait for acknowledgements.
        options: See `ConnectionSettings`.

    Raises:
        ValueError: An address or an option that cannot work.
    """

    def __init__(
        self,
        nsqd_tcp_address: str = "127.0.0.1:4150",
        *,
        max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
        max_msg_size: int = _NSQD.max_msg_size,
        max_body_size: int = _NSQD.max_body_size,
        max_req_timeout_ms: int = _NSQD.max_req_timeout_ms,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        if min(max_in_flight_bytes, max_msg_size) < 1 or max_body_size <= COUNT_BYTES + SIZE_BYTES:
            raise ValueError(
                "max_in_flight_bytes, max_msg_size and max_body_size must leave room for a message"
            )
        self._address = format_address(*parse_address(nsqd_tcp_address))
        self._settings = ConnectionSettings(**options)
        self._max_in_flight_bytes = max_in_flight_bytes
        self._max_msg_size = max_msg_size
        self._max_set_bytes = max_body_size - COUNT_BYTES
        self._max_req_timeout_ms = max_req_timeout_ms
        self._close_timeout_s = close_timeout_s
        self._part_bytes = min(MPUB_TARGET_BYTES, self._max_set_bytes, max_in_flight_bytes)
        self._background = Background()
        self._outbox = Outbox(max_in_flight_bytes, self._part_bytes)
        self._connection: Connection | None = None
        self._wanted = trio.Event()  # there is something to send, so connect
        self._entered = self._closing = False
        self._closed = trio.Event()

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ConnectionFailed: The broker cannot be reached.
        """
        if self._entered:
            raise RuntimeError("a Producer can be entered only once")
        self._connection = await connect(self._address, self._settings)
        self._entered = True
        await self._background.open(self._run)
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
                for receipt in self._outbox.receipts():
                    await receipt.settled.wait()
        finally:
            if self._entered:
                with trio.CancelScope(shield=True):
                    await self._background.stop()
            self._outbox.fail(ProducerClosed("the producer was closed before the broker acknowledged it"))
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
            ValueError: A topic, message or time that brokers do not accept.
        """
        self._check_call(topic)
        if not isinstance(body, bytes):  # or it would fail in the writer, and others with it
            raise TypeError(f"a message must be bytes, not {type(body).__name__}")
        self._check_sizes([len(body)], self._max_msg_size)
        if not 0 <= defer_ms <= self._max_req_timeout_ms:
            raise ValueError(f"defer_ms is {defer_ms}; it must be within 0..{self._max_req_timeout_ms}")
        if defer_ms:
            receipt = self._outbox.add(Command(topic, body=body, defer_ms=defer_ms))
        else:
            receipt = self._outbox.add_message(topic, body)
        await self._settle(receipt)

    async def publish_many(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish messages, in order, and wait until all are acknowledged.

        They are sent as MPUBs of moderate size, several at a time within `max_in_flight_bytes`. Each MPUB is stored
        as a whole or not at all, the list as a whole is not: use `publish_set` for that. If cancelled, what has
        been handed to the socket may be stored, the rest is not.

        Args:
            topic: The topic; created if need be.
            bodies: The messages, 1 to `max_msg_size` bytes each; if there are none nothing is sent.

        Raises:
            PublishFailed: Not all were acknowledged; its `acknowledged` says how many were, from the first on.
            ProducerClosed: The producer is not open.
            ValueError: A topic or a message that brokers do not accept; nothing has been sent.
        """
        self._check_call(topic)
        sizes = list(map(len, bodies))
        self._check_sizes(sizes, min(self._max_msg_size, self._max_set_bytes - SIZE_BYTES))
        pending: deque[Receipt] = deque()
        acknowledged = in_flight_bytes = 0
        await trio.lowlevel.checkpoint()
        try:
            for part in _split(bodies, sizes, self._part_bytes):
                command = Command(topic, messages=pack_messages(part))
                while pending and in_flight_bytes + command.size > self._max_in_flight_bytes:
                    done = await self._settle_first(pending)
                    acknowledged += len(done)
                    in_flight_bytes -= len(done.data)
                pending.append(self._submit(command))
                in_flight_bytes += command.size
            while pending:
                acknowledged += len(await self._settle_first(pending))
        except PublishFailed as error:
            maybe_stored = any(r.failure is not None and r.failure.maybe_stored for r in pending)
            raise PublishFailed(
                error.reason, maybe_stored=maybe_stored, acknowledged=acknowledged
            ) from error.__cause__
        finally:
            for receipt in pending:
                self._outbox.withdraw(receipt)

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
        if len(messages.data) > self._max_set_bytes:
            raise ValueError(f"a set of {len(messages.data)} bytes; the limit is {self._max_set_bytes}")
        if sum(messages.sizes) != messages.body_bytes:
            raise ValueError("the sizes of a set do not add up to its data")
        self._check_sizes(messages.sizes, self._max_msg_size)
        if messages.sizes:
            await self._settle(self._outbox.add(Command(topic, messages=messages)))
        else:
            await trio.lowlevel.checkpoint()

    def _check_call(self, topic: str) -> None:
        if not self._entered:
            raise ProducerClosed("the producer is not open yet: publish inside its `async with` block")
        if self._closing:
            raise ProducerClosed("the producer is closed")
        if not is_valid_name(topic):
            raise ValueError(f"{topic!r} is not a valid topic name")

    def _check_sizes(self, sizes: list[int], biggest: int) -> None:
        if sizes and min(sizes) < 1:
            raise ValueError("an empty message; brokers do not accept any")
        if sizes and max(sizes) > biggest:
            raise ValueError(f"a message of {max(sizes)} bytes; the limit is {biggest}")

    def _submit(self, command: Command) -> Receipt:
        if self._closing:
            command.settle(ProducerClosed("the producer was closed"))
            return command.receipts[0]
        receipt = self._outbox.add(command)
        self._notify()
        return receipt

    def _notify(self) -> None:
        self._wanted.set()
        if self._connection is not None:
            self._connection.wake()

    async def _settle(self, receipt: Receipt) -> None:
        """See to it that it is sent, and wait for its outcome; if cancelled, take it back if possible."""
        self._notify()
        try:
            await receipt.settled.wait()
        except BaseException:
            self._outbox.withdraw(receipt)
            raise
        if receipt.failure is not None:
            raise receipt.failure

    async def _settle_first(self, pending: deque[Receipt]) -> MessageSet:
        """Wait for the oldest of these and remove it, unless it fails; return its messages."""
        await pending[0].settled.wait()
        if (failure := pending[0].failure) is not None:
            raise failure
        messages = pending.popleft().command.messages
        assert messages is not None
        return messages

    async def _run(self) -> None:
        while True:
            if self._connection is None:
                await self._wanted.wait()
                try:
                    self._connection = await connect(self._address, self._settings)
                except ConnectionFailed as error:
                    self._outbox.fail(error)
                    self._wanted = trio.Event()
                    continue
                self._connection.wake()
            try:
                await self._connection.run(self._handle, more=self._take, lost=self._lost)
            finally:
                self._connection = None
            if not self._outbox:
                self._wanted = trio.Event()

    def _lost(self, reason: NSQError) -> None:
        """Fail what was published so far. What is published from here on takes the next connection."""
        _logger.warning("%s; connecting again at the next publish", reason)
        self._connection = None
        if isinstance(reason, BrokerError):
            self._outbox.refuse(reason)
        else:
            self._outbox.fail(reason)

    def _take(self) -> list[bytes]:
        return [] if self._connection is None else self._outbox.take()

    def _handle(self, event: Event) -> None:
        if isinstance(event, ErrorFrame):
            raise BrokerError(self._address, event.code, event.text)
        if not (event == _OK and self._outbox.acknowledge()):
            raise FrameError(f"it sent what was not asked for: {event!r:.100}")
        if self._outbox:
            self._notify()


def _split(bodies: Sequence[bytes], sizes: list[int], max_bytes: int) -> Iterator[Sequence[bytes]]:
    """Cut into parts that fill no more than `max_bytes` of an MPUB each, or are a single message."""
    ends = list(accumulate(map(SIZE_BYTES.__add__, sizes)))
    start = before = 0
    while start < len(ends):
        stop = max(start + 1, bisect_right(ends, before + max_bytes, lo=start))
        yield bodies[start:stop]
        start, before = stop, ends[stop - 1]
