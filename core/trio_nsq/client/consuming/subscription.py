"""The subscriptions of a consumer, one for each connection, and the flow control over all of them."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat

from trio_nsq.protocol import FrameError, NSQError
from trio_nsq.protocol.encode import encode_cls, encode_finish, encode_rdy, encode_requeue, encode_touch
from trio_nsq.protocol.errors import NON_FATAL_CODES
from trio_nsq.protocol.frames import ErrorFrame, MessageRun, ResponseFrame
from trio_nsq.protocol.limits import SECOND_MS

from ...event_loop import runtime
from ..connection.connection import Connection, Event
from ..errors import BrokerError
from .backoff import Backoff
from .handlers import ActiveHandlers
from .message import MessageBatch
from .options import ConsumerSettings
from .rdy_distribution import ReadyDistribution

CLOSE_LINGER_S = 0.05
"""How long to keep reading after CLOSE_WAIT. nsqd's message pump runs concurrently with its command loop and may still
write one message, within microseconds; it would stay in flight if the client closed first."""

_logger = logging.getLogger("trio_nsq.client")


class FlowControl:
    """Sets the ready count of every connection, from max_in_flight, the backoff and the distribution.

    It also counts messages and their results.

    Args:
        max_in_flight: The limit over all connections.
        random: Returns numbers in [0, 1).

    Attributes:
        max_in_flight, paused, stopped: May be changed; then call `update`. Paused: all ready counts are 0. Stopped:
            ready counts do not change any more.
        received, finished, requeued: Counts of messages over all connections, past ones included.
    """

    def __init__(self, max_in_flight: int, settings: ConsumerSettings, random: Callable[[], float]) -> None:
        self.received: int = 0
        self.finished: int = 0
        self.requeued: int = 0
        self.max_in_flight = max_in_flight
        self.paused = self.stopped = False
        self._distribution: ReadyDistribution[Subscription] = ReadyDistribution(settings, random)
        self._backoff = Backoff(settings, random)
        self._changed = runtime.Event()

    @property
    def connections(self) -> "list[Subscription]":
        """The connections, oldest first."""
        return list(self._distribution.ready_counts)

    def add(self, connection: "Subscription") -> None:
        self._distribution.add(connection, connection.max_rdy_count, runtime.current_time())
        self.update()

    def remove(self, connection: "Subscription") -> None:
        """Remove a connection that has ended."""
        self._distribution.remove(connection, runtime.current_time())
        self.update()

    def record_messages(self, connection: "Subscription", count: int) -> None:
        self.received += count
        self._distribution.record_messages(connection, connection.last_message_at)

    def record_success(self, count: int) -> None:
        """Record finished messages."""
        self.finished += count
        backoff = self._backoff
        if backoff.level:
            backoff.record_success(runtime.current_time())
            self.update()
        elif backoff.failures:
            backoff.failures = 0

    def record_failure(self) -> None:
        """Record that messages failed and were requeued."""
        now = runtime.current_time()
        before = self._backoff.next_deadline()
        self._backoff.record_failure(now)
        if (until := self._backoff.next_deadline()) != before:
            _logger.warning(
                "messages fail: pausing for %.1f s (backoff level %d)", until - now, self._backoff.level
            )
        self.update()

    def record_requeue(self) -> None:
        """Record that messages were requeued without having failed."""
        if self._backoff.level:
            self._backoff.record_requeue(runtime.current_time())
            self.update()

    def in_flight_reaches(self, part: float) -> bool:
        """Whether at least this fraction of the ready count is in flight on some connection."""
        return any(
            (in_flight := each.in_flight) and in_flight >= int(part * each.ready_count)
            for each in self.connections
        )

    @property
    def awaits_answers(self) -> bool:
        """Whether all messages that may be in flight are unanswered, so that no broker sends more."""
        if self.paused or not self.max_in_flight or self._backoff.allowed is not None:
            return False
        in_flight = [(each.in_flight, each.ready_count) for each in self.connections]
        return any(count for count, _ in in_flight) and all(count >= ready for count, ready in in_flight)

    async def run(self) -> None:
        """Handle deadlines of the backoff and the distribution; runs until cancelled."""
        while True:
            self._changed = runtime.Event()
            deadline = min(self._backoff.next_deadline(), self._distribution.next_deadline())
            with runtime.move_on_at(deadline):
                await self._changed.wait()
            now = runtime.current_time()
            self._backoff.handle_timer(now)
            if now >= self._distribution.next_deadline():
                self._distribution.redistribute(now, {each for each in self.connections if each.in_flight})
            self._apply(now)

    def update(self) -> None:
        """Recompute the ready counts."""
        if self.connections:  # without connections, the caller may run outside of trio, without a clock
            self._apply(runtime.current_time())
        self._changed.set()

    def _apply(self, now: float) -> None:
        allowed = self._backoff.allowed
        limit = self.max_in_flight if allowed is None else min(allowed, self.max_in_flight)
        self._distribution.set_limit(0 if self.paused else limit, now)
        if not self.stopped:
            for connection, count in self._distribution.ready_counts.items():
                connection.set_ready_count(count)


class Subscription:
    """A connection that is subscribed to a channel.

    It tracks batches, not messages: receiving and finishing a whole batch has no cost per message.

    Args:
        connection: Connected and subscribed; `run` has not been called.
        flow: Sets the ready count.
        deliver: Called with each batch.

    Attributes:
        address: The broker, `host:port`.
        max_rdy_count: The broker's highest ready count.
        msg_timeout_s: The broker's message timeout.
        max_msg_timeout_s: The longest time for which `touch` extends it.
        ready_count: The ready count of the last RDY.
        last_message_at: When the last messages arrived, on the event loop's clock.
        live: Whether answers have an effect.
    """

    def __init__(
        self,
        connection: Connection,
        settings: ConsumerSettings,
        flow: FlowControl,
        deliver: Callable[[MessageBatch], None],
    ) -> None:
        self.address: str = connection.address
        self.max_rdy_count: int = connection.max_rdy_count
        self.msg_timeout_s: float = connection.msg_timeout_ms / SECOND_MS
        self.max_msg_timeout_s: float = connection.max_msg_timeout_ms / SECOND_MS
        self.ready_count: int = 0
        self.last_message_at: float = runtime.current_time()
        self._connection = connection
        self._settings = settings
        self._flow = flow
        self._deliver = deliver
        self._held: dict[MessageBatch, None] = {}  # a set that keeps the order of arrival
        self._finished: list[bytes] = []  # ids of single messages, for the next write
        self.live: bool = True
        self._is_closing = False  # CLS is sent
        self._has_warned_of_attempts = False
        self._close_wait = runtime.Event()
        self._settled = runtime.Event()  # set when all messages are answered, if a task waits for that

    async def run(self) -> NSQError:
        """Receive until the connection ends; return the reason."""
        try:
            return await self._connection.run(self._handle, more=self._take_finished)
        finally:
            self.live = False
            self._held.clear()
            self._close_wait.set()
            self._settled.set()

    @property
    def in_flight(self) -> int:
        """How many messages are unanswered."""
        return sum(batch.unanswered_count for batch in self._held)

    def set_ready_count(self, count: int) -> None:
        """Send RDY if the ready count changes; `count` is within the broker's limit."""
        if count != self.ready_count:
            self.ready_count = count
            self._write(encode_rdy(count))

    def finish(self, ids: Sequence[bytes]) -> None:
        """Send FIN for each message, unless the connection has ended."""
        if self.live:
            self._write(encode_finish(ids))
            self._flow.record_success(len(ids))

    def finish_one(self, message_id: bytes) -> None:
        """Send FIN for one message with the next write, which encodes all such messages at once."""
        if self.live:
            if not self._finished:
                self._connection.wake()
            self._finished.append(message_id)
            self._flow.record_success(1)

    def _write(self, data: bytes) -> None:
        """Queue a command behind all earlier answers."""
        for before in self._take_finished():
            self._connection.write(before)
        self._connection.write(data)

    def _take_finished(self) -> list[bytes]:
        ids, self._finished = self._finished, []
        return [encode_finish(ids)] if ids else []

    def requeue(
        self,
        ids: Sequence[bytes],
        attempts: Sequence[int],
        delay_ms: int | None,
        backoff: bool,
        count_attempt: bool,
    ) -> None:
        """Send REQ for each message, unless the connection has ended; a delay of None depends on the attempts."""
        if self.live:
            delay_of = self._settings.requeue_delay_ms
            delays_ms = [delay_of(count) if delay_ms is None else delay_ms for count in attempts]
            if not count_attempt and not self._connection.requeues_uncounted:
                self._warn_of_attempts()
                count_attempt = True
            self._requeue(ids, delays_ms, count_attempt=count_attempt)
            if backoff:
                self._flow.record_failure()
            else:
                self._flow.record_requeue()

    def _requeue(self, ids: Sequence[bytes], delays_ms: Iterable[int], *, count_attempt: bool = True) -> None:
        self._flow.requeued += len(ids)
        encode = encode_requeue if count_attempt else partial(encode_requeue, counts_attempt=False)
        self._write(b"".join(map(encode, ids, delays_ms)))

    def _warn_of_attempts(self) -> None:
        """Warn once that the broker counts all attempts."""
        if not self._has_warned_of_attempts:
            self._has_warned_of_attempts = True
            _logger.warning(
                "%s counts the attempts of messages requeued with count_attempt=False, as nsqd does: "
                "it does not have uncounted requeues, which need qcli serve",
                self.address,
            )

    def touch(self, ids: Sequence[bytes]) -> None:
        """Send TOUCH for each message, unless the connection has ended."""
        if self.live:
            self._write(b"".join(map(encode_touch, ids)))

    def hold(self, batch: MessageBatch) -> None:
        """Count the messages of a batch as in flight, until `release`."""
        self._held[batch] = None

    def release(self, batch: MessageBatch) -> None:
        """Stop tracking a batch: all its messages are answered."""
        self._held.pop(batch, None)
        if not self._held and self._settled.is_awaited:
            self._settled.set()
            self._settled = runtime.Event()

    async def drain(self) -> None:
        """Wait until all received messages are answered; `stop_delivery` comes before."""
        await self._close_wait.wait()
        while self._held:
            await self._settled.wait()

    def stop_delivery(self) -> None:
        """Have the broker send no more messages. Send CLS once: brokers close the connection at the second one."""
        if not self._is_closing:
            self._is_closing = True
            self._write(encode_cls())

    async def unsubscribe(self, timeout_s: float, active: ActiveHandlers) -> None:
        """Requeue all unanswered messages and close the connection.

        Afterwards no message is in flight on this connection. If the broker does not answer in time or the connection
        is lost, the broker redelivers the messages after their timeout.

        Args:
            timeout_s: The longest total time. Half of it is for CLOSE_WAIT and for answers of active handlers.
        """
        with runtime.move_on_after(timeout_s):
            self.stop_delivery()
            with runtime.move_on_after(timeout_s / 2):
                await self._close_wait.wait()
                await active.wait_idle()
            self._return_held()
            self.live = False  # the broker would reject an answer to a requeued message
            with runtime.move_on_after(CLOSE_LINGER_S):
                await self._connection.ended.wait()
            self._return_held()
            self._connection.write_eof()
            await self._connection.ended.wait()

    def _return_held(self) -> None:
        for batch in self._held:
            self._requeue(batch.unanswered_ids(), repeat(0))
        self._held.clear()

    def _handle(self, event: Event) -> None:
        match event:
            case MessageRun():
                self.last_message_at = runtime.current_time()
                self._flow.record_messages(self, len(event))
                self._deliver(MessageBatch(event, self))
            case ErrorFrame(code, text):
                if code not in NON_FATAL_CODES:
                    raise BrokerError(self.address, code, text)
                # Usually the answer came after the message timeout, and the broker delivers the message again.
                # Expected after `unsubscribe` requeued the message.
                level = logging.WARNING if self.live else logging.DEBUG
                _logger.log(level, "%s rejected an answer to a message: %s %s", self.address, code, text)
            case ResponseFrame(b"CLOSE_WAIT"):
                self._close_wait.set()
            case ResponseFrame():
                raise FrameError(f"it sent an unexpected response: {event!r:.100}")
