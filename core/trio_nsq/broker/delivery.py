"""Delivery: schedules channels, and moves their ready messages to the send buffers of clients.

A channel is served after a publish, when a client can take more messages, and when a message or timeout is due. The
work per turn is bounded: further channels are queued until the poller has served the clients.
"""

import logging
import math
from collections.abc import Iterable
from typing import Any, Final

import trio

from ..event_loop.reactor import Poller
from ..log import LogError, ReadWouldWaitError
from .clock import BrokerClock, Lateness
from .options import BrokerOptions
from .reader_pool import ReaderPool
from .state.broker import Broker
from .state.channel import Channel
from .state.consumer import Subscriber
from .state.dispatcher import MAX_GRANT_BYTES
from .state.topic import Topic
from .state.withdrawn import WithdrawnMessage

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_READ_AGAIN_NS: Final = 1_000_000_000
"""After a failed read, the channel is served again after this long, or at the next event."""
_NS_PER_S: Final = 1_000_000_000
_SERVED_S: Final = 1.0
_PAUSE_S: Final = 1.0
"""Pause after a failed read. Without it, a channel with other messages to deliver would retry all the time."""


class Deliverer:
    """Sends ready messages to consumers that can take them. One for a broker.

    Args:
        poller: Its rounds serve the channels; its clock limits a turn.
        readers: Read messages that are not in memory, and wake HTTP clients that wait for a topic to grow.
        nursery: Runs the reads.

    Attributes:
        with_dead_letters: Channels with messages for their dead-letter topics. The mover takes them out.
        dead_letters_added: Set when a channel is added to `with_dead_letters`.
        lateness: Measures how long the event loop was held up; the scheduler makes it an instrument of trio.
    """

    def __init__(
        self,
        broker: Broker,
        options: BrokerOptions,
        clock: BrokerClock,
        poller: Poller,
        readers: ReaderPool,
        nursery: trio.Nursery,
    ) -> None:
        self.with_dead_letters: dict[Channel, None] = {}
        self.dead_letters_added: trio.Event = trio.Event()
        self._broker = broker
        self._pacing = options.pacing
        self._clock = clock
        self._poller = poller
        self._clock_s = poller.clock_s
        self._readers = readers
        self._nursery = nursery
        self._queue: dict[Channel, None] = {}  # channels with more to deliver than one turn allows
        # Channels that wait until no client sends anything; with a deadline by the poller's clock.
        self._waiting: dict[Channel, float] = {}
        # Channels whose consumers are busy; see `Dispatcher.has_little_room`. With a deadline, too.
        self._refilling: dict[Channel, float] = {}
        self._reading: set[Channel] = set()  # the messages they deliver next are read from disk
        self._unreadable: set[Channel] = set()  # the last read of their messages failed; it is logged
        self.lateness: Lateness = Lateness()
        self._timers_from_s = 0.0  # while clients send, no timer runs before
        broker.on_earlier_deadline = self._wake_for_timer

    # ------------------------------------------------------------------ scheduling

    def deliver_published(self, topic: Topic) -> None:
        """Deliver messages just published to a topic. They are stored, so an error here must not fail the publish."""
        try:
            self.deliver_topic(topic)
        except Exception:
            # A bug in the broker: it must not fail the publish.
            logger.exception("%s: published messages could not be delivered", topic.name)

    def deliver_topic(self, topic: Topic) -> None:
        """Send the ready messages of a topic's channels."""
        if self._readers.waiting:
            self._readers.wake(topic)
        left = self._pacing.channels_per_turn
        for channel in topic.channels.values():
            if channel in self._waiting or not channel.dispatcher.has_ready_consumer:
                continue
            if self._poller.in_round and channel.dispatcher.can_wait:
                self._waiting[channel] = self._clock_s() + self._pacing.waiting_s
            elif not left:
                self._enqueue(channel)
            else:
                self.deliver(channel)
                left -= 1
        topic.limits.make_room()

    def end_round(self) -> None:
        """End a round of the poller: serve some queued channels, and waiting channels past their deadline."""
        for _ in range(min(len(self._queue), self._pacing.channels_per_turn)):
            self._deliver_next(self._queue)
        if self._waiting or self._refilling:
            now_s = self._clock_s()
            over_s = now_s + self._pacing.turn_s
            while self._waiting and next(iter(self._waiting.values())) <= now_s < over_s:
                self._deliver_next(self._waiting)
                now_s = self._clock_s()
            while self._refilling and next(iter(self._refilling.values())) <= now_s < over_s:
                self._refill_next()
                now_s = self._clock_s()

    @property
    def has_work(self) -> bool:
        """Whether `idle` has a channel to serve."""
        return bool(self._queue or self._waiting)

    def idle(self) -> bool:
        """Serve one queued or waiting channel while no client sends. Returns False if there was none."""
        queue = self._queue or self._waiting
        if not queue:
            return False
        self._deliver_next(queue)
        return True

    def before_sleep(self) -> bool:
        """Serve a channel whose consumers have little room. Returns False if there was none."""
        if not self._refilling:
            return False
        self._refill_next()
        return True

    # ------------------------------------------------------------------ timers

    @property
    def next_timer_s(self) -> float:
        """Seconds until the next timer (a deferred message, a timeout); infinite: there is none."""
        due_ns = self._broker.deadlines.next_ns
        return math.inf if due_ns is None else (due_ns - self._clock.now_ns()) / _NS_PER_S

    def extend_if_late(self) -> None:
        """If the event loop was held up, give messages in flight more time.

        Then no timer runs before all clients are served, or for 1 s: what they sent in time is still in their sockets.
        """
        if late_ns := self.lateness.take_ns():
            self._broker.extend_timeouts(late_ns)
            self._timers_from_s = self._clock_s() + _SERVED_S

    def run_timers(self, *, all_served: bool) -> None:
        """In a round: run due timers, and queue their channels. While clients send, once in `Pacing.turn_s`.

        So channels whose messages wait for more are served together.

        Args:
            all_served: No client has sent anything that is not served.
        """
        if self._postpones_timers(all_served=all_served) or self.next_timer_s > 0:
            return
        self.extend_if_late()
        if self._postpones_timers(all_served=all_served):
            return
        self._timers_from_s = self._clock_s() + self._pacing.turn_s
        for channel in self._broker.tick(self._clock.now_ns()):
            self.collect_dead_letters(channel)
            self._enqueue(channel)

    def _postpones_timers(self, *, all_served: bool) -> bool:
        return not all_served and self._clock_s() < self._timers_from_s

    def _wake_for_timer(self) -> None:
        """Have a sleeping scheduler look at the timers again: one is due earlier than it knows."""
        if self._poller.is_asleep:
            self._poller.wake()

    def _enqueue(self, channel: Channel) -> None:
        """Serve a channel at the end of this round or the next one."""
        self._queue[channel] = None
        if not self._poller.in_round:
            self._poller.wake()

    def _deliver_next(self, queue: dict[Channel, Any]) -> None:
        channel = next(iter(queue))
        del queue[channel]
        self._try_to_deliver(channel)

    def _refill_next(self) -> None:
        channel = next(iter(self._refilling))
        del self._refilling[channel]
        self._try_to_deliver(channel, waiting=True)

    def _try_to_deliver(self, channel: Channel, *, waiting: bool = False) -> bool:
        try:
            if waiting:
                self.deliver_waiting(channel)
            else:
                self.deliver(channel)
        except Exception:
            # A bug in the broker: it must not affect other channels.
            logger.exception("%s/%s: messages could not be delivered", channel.topic.name, channel.name)
            return False
        return True

    # ------------------------------------------------------------------ one channel

    def deliver(self, channel: Channel) -> None:
        """Send ready messages to consumers that can take them, unless output buffering makes them wait for more."""
        if self._broker.stopping:
            return  # do not redeliver a closed client's messages to clients about to be closed
        self.collect_dead_letters(channel)
        if channel.dispatcher.can_deliver and not self._waits(channel):
            self._deliver_now(channel)

    def deliver_waiting(self, channel: Channel) -> None:
        """Send all ready messages, including those that output buffering holds back."""
        if channel.dispatcher.can_deliver and not self._broker.stopping:
            self._deliver_now(channel)

    def put_back(self, channel: Channel, messages: Iterable[WithdrawnMessage]) -> None:
        """Return withdrawn messages to their channel, which requeues or dead-letters them by its current settings."""
        channel.put_back(messages)
        self.deliver(channel)

    def collect_dead_letters(self, channel: Channel) -> None:
        """If a channel has dead letters, have them moved to its dead-letter topic."""
        if channel.messages.withdrawn.waiting:
            self.with_dead_letters[channel] = None
            self.dead_letters_added.set()

    def _waits(self, channel: Channel) -> bool:
        """Whether output buffering holds the ready messages back."""
        if not channel.dispatcher.can_wait:
            return self._refills_later(channel)
        if channel in self._waiting:
            return True
        if (until_ns := channel.dispatcher.buffering.wait_until_ns) <= self._clock.now_ns():
            return False
        self._broker.watch(channel, until_ns)
        return True

    def _refills_later(self, channel: Channel) -> bool:
        """Whether a channel waits for further answers, because its consumers have most of their RDY in flight.

        Otherwise, each answer of a client that has hundreds of messages would cause a delivery of one message.
        """
        if not self._poller.in_round or not channel.dispatcher.has_little_room:
            self._refilling.pop(channel, None)
            return False
        now_s = self._clock_s()
        if now_s < self._refilling.setdefault(channel, now_s + self._pacing.refilling_s):
            return True
        del self._refilling[channel]
        return False

    def _deliver_now(self, channel: Channel) -> None:
        now_ns = self._clock.now_ns()
        sent = unsent_bytes = 0
        over_s = self._clock_s() + self._pacing.turn_s
        # Fresh and requeued messages are different grants: one send for both costs less than two.
        granted: dict[Subscriber, None] = {}
        try:
            while channel.dispatcher.can_deliver:
                if sent >= self._pacing.grants_per_turn or (sent and self._clock_s() > over_s):
                    self._enqueue(channel)
                    break
                try:
                    grants = channel.dispatcher.dispatch(now_ns, self._clock.ahead_ns())
                except ReadWouldWaitError:
                    self._read(channel)
                    break
                except LogError as exc:
                    self._mark_unreadable(channel, exc)
                    break
                if channel.dispatcher.others_wait_for_read:
                    self._read(channel)
                if not grants:
                    if channel.dispatcher.budget_exhausted:
                        self._enqueue(channel)
                    break
                sent += len(grants)
                for consumer, frames in grants:
                    consumer.subscriber.deliver(frames)
                    granted[consumer.subscriber] = None
                    unsent_bytes += len(frames)
                if unsent_bytes >= MAX_GRANT_BYTES:
                    _send(granted)
                    unsent_bytes = 0
        finally:
            _send(granted)

    # ------------------------------------------------------------------ messages that are on disk only

    def _read(self, channel: Channel) -> None:
        """Start to read the messages a channel needs next, unless a read is running."""
        if channel not in self._reading:
            self._reading.add(channel)
            self._nursery.start_soon(self._read_and_deliver, channel)

    async def _read_and_deliver(self, channel: Channel) -> None:
        if not await self._read_for(channel):
            await trio.sleep(_PAUSE_S)
        self._reading.discard(channel)
        if self._broker.serves_channel(channel) and not self._try_to_deliver(channel):
            await trio.sleep(_PAUSE_S)
            if self._broker.serves_channel(channel):
                self._try_to_deliver(channel)

    async def _read_for(self, channel: Channel) -> bool:
        """Read the messages a channel needs next. Returns False if it must pause before its next read."""
        try:
            found = await self._readers.fetch(channel.store, channel.read_ahead.wanted())
            if not self._broker.serves_channel(channel):
                return True
            channel.read_ahead.take(found)
        except Exception:
            # A bug in the broker: it must not affect other channels.
            logger.exception("%s/%s: messages could not be read", channel.topic.name, channel.name)
            return False
        if found.error is None:
            self._unreadable.discard(channel)
            return True
        self._mark_unreadable(channel, found.error)
        return bool(found.ahead or found.again)

    def _mark_unreadable(self, channel: Channel, error: LogError) -> None:
        """Schedule the next attempt to read a channel's messages, and log the first of several failures in a row."""
        self._broker.watch(channel, self._clock.now_ns() + _READ_AGAIN_NS)
        deleted = channel.topic.name in self._broker.deleting  # its files are renamed already
        if channel not in self._unreadable and not deleted:
            self._unreadable.add(channel)
            logger.error("%s/%s: %s", channel.topic.name, channel.name, error)


def _send(granted: dict[Subscriber, None]) -> None:
    """Send what these subscribers have been granted."""
    for subscriber in granted:
        subscriber.send_delivered()
    granted.clear()
