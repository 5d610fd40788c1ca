"""One NSQ channel that a queue receives from, and the messages in flight on its connection."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...client.connection.options import ConnectionSettings
from ...client.consuming.touching import TouchSchedule
from ...client.errors import BrokerError, ConnectionFailed, ConnectionLost
from ...protocol.encode import (
    encode_cls,
    encode_finish,
    encode_nop,
    encode_rdy,
    encode_requeue,
    encode_sub,
    encode_touch,
)
from ...protocol.errors import NON_FATAL_CODES
from ...protocol.frames import ErrorFrame, MessageRun
from ...protocol.limits import SECOND_MS
from .broker_socket import HANDSHAKE_TIMEOUT_S, BrokerSocket

CLOSE_TIMEOUT_S = 5.0
SECOND_NS = 1_000_000_000
_LINGER_S = 0.05
"""How long to read after CLOSE_WAIT. nsqd may still send a message, which would stay in flight."""
_CLOCKS_DIFFER_S = 10
"""More than the clocks of two machines differ."""
_logger = logging.getLogger("trio_nsq.kombu")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a queue receives from.

    Attributes:
        exchange: The messages are those of an exchange, so that the queue's bindings select; empty: all are its own.
        is_new: Messages that were published earlier are not for this queue.
    """

    topic: str
    channel: str
    exchange: str = ""
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A message; `id` answers it."""

    id: bytes
    body: bytes
    attempts: int


class Subscription:
    """A connection that is subscribed to a source. Answers may come from any thread.

    Args:
        address: The broker, `host:port`.
        clock: Returns seconds, for timeouts of messages.

    Raises:
        ConnectionFailed: No broker answers, or it refuses the settings or the names.
    """

    def __init__(
        self,
        address: str,
        settings: ConnectionSettings,
        source: Source,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self._clock = clock
        self._settings = settings
        self._rdy = 0
        self._close_wait = False
        self._arrived: dict[bytes, Received] = {}  # by id, oldest first
        self._nop_sent_at = clock()
        self._in_flight: dict[bytes, TouchSchedule] = {}
        self.socket: BrokerSocket = BrokerSocket(
            address, settings, ("private_channel",) if source.is_new else ()
        )
        # nsqd has no private channels: the first channel of a topic gets what was published before.
        self._not_before_ns = 0
        if source.is_new and not self.socket.extensions:
            self._not_before_ns = time.time_ns() - _CLOCKS_DIFFER_S * SECOND_NS
        try:
            self.socket.ask(encode_sub(source.topic, source.channel), HANDSHAKE_TIMEOUT_S)
        except (BrokerError, ConnectionLost) as error:
            self.socket.close()
            raise ConnectionFailed(address, str(error)) from error

    @property
    def in_flight(self) -> int:
        """How many messages are not answered."""
        return len(self._in_flight)

    def set_rdy(self, count: int) -> None:
        """Allow so many messages in flight."""
        count = min(count, self.socket.max_rdy_count)
        if count != self._rdy:
            self._rdy = count
            self.socket.send(encode_rdy(count))

    @property
    def has_arrived(self) -> bool:
        """Whether messages are left that `receive` has not yielded."""
        return bool(self._arrived)

    def receive(self) -> Iterator[Received]:
        """Yield the messages that have arrived; if the caller stops half-way, the others are left.

        Raises ConnectionLost.
        """
        self._read()
        while self._arrived:
            yield self._arrived.pop(next(iter(self._arrived)))

    def _read(self) -> None:
        for event in self.socket.receive():
            if isinstance(event, MessageRun):
                now, limits = self._clock(), (self.socket.msg_timeout_s, self.socket.max_msg_timeout_s)
                self._in_flight |= {id_: TouchSchedule(now, *limits) for id_ in event.ids}
                for id_, body, attempts, published_ns in zip(
                    event.ids, event.bodies, event.attempts, event.timestamps_ns, strict=True
                ):
                    if published_ns < self._not_before_ns:
                        self.finish(id_)
                    else:
                        # If the program was busy for longer than the message timeout, it has arrived twice.
                        self._arrived.pop(id_, None)
                        self._arrived[id_] = Received(id_, body, attempts)
            elif isinstance(event, ErrorFrame):
                if event.code not in NON_FATAL_CODES:
                    raise ConnectionLost(self.socket.address, str(event))
                _logger.info("broker %s: %s", self.socket.address, event)
            elif event.data == b"CLOSE_WAIT":
                self._close_wait = True

    def finish(self, message_id: bytes) -> None:
        """The broker does not deliver it again, unless the connection is lost."""
        if self._in_flight.pop(message_id, None) is not None:
            self.socket.send(encode_finish([message_id]))

    def requeue(self, message_id: bytes, delay_s: float = 0) -> None:
        """The broker delivers it again after this time."""
        if self._in_flight.pop(message_id, None) is not None:
            self.socket.send(encode_requeue(message_id, round(delay_s * SECOND_MS)))

    def keep_alive(self) -> None:
        """Send what is due, so that neither the connection nor a message times out."""
        now = self._clock()
        due = []
        for message_id, schedule in [*self._in_flight.items()]:
            if schedule.is_due(now):
                due.append(encode_touch(message_id))
                if schedule.is_over:
                    named = f"message {message_id.decode()} of topic {self.source.topic}"
                    _logger.warning("%s", schedule.warning(named))
        # The broker closes connections that send nothing for two intervals of its heartbeat; a busy program does not
        # read them.
        if due or self._nop_sent_at + self._settings.read_timeout_s / 4 <= now:
            self._nop_sent_at = now
            self.socket.send(b"".join(due) or encode_nop())

    def close(self) -> None:
        """Return what is not answered, and disconnect."""
        try:
            self.socket.send(encode_cls())
            deadline = self._clock() + CLOSE_TIMEOUT_S
            while not self._close_wait and self._clock() < deadline:
                self._drain(CLOSE_TIMEOUT_S)
            self._drain(_LINGER_S)
        except ConnectionLost:
            pass  # the broker delivers them again
        self._arrived.clear()
        for message_id in [*self._in_flight]:
            self.requeue(message_id)
        self.socket.finish(CLOSE_TIMEOUT_S if self._close_wait else 0)

    def _drain(self, timeout_s: float) -> None:
        if self.socket.wait(timeout_s):
            self._read()
