"""Which channel gets its turn when: from what is ready in channels to the buffers of their clients.

A channel is served when something was published to it, when a client can take more, and when something is due. There is
a bound on what is done at a time: the rest stands in line until the clients had their turn.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import trio

from ..log import LogError, ReadWouldWaitError
from ..reactor import Poller
from .options import BrokerOptions
from .readers import Readers
from .state.broker import Broker
from .state.channel import Channel
from .state.consumer import Subscriber
from .state.topic import Topic
from .state.withdrawn import Withdrawn
from .timers import Timers

logger = logging.getLogger("trio_nsq.broker")

_READ_AGAIN_NS = 1_000_000_000
"""A channel whose messages could not be read is looked at again after this long, if nothing happens before."""
_PAUSE_S = 1.0
"""After a failed read. Without it, a channel with other messages to deliver would retry all the time."""


class Delivery:
    """Sends what is ready to whoever can take it. One for a broker.

    Args:
        poller: Its rounds are where channels have their turns; its clock limits them.
        readers: Read what is not in memory, and are told when a topic has grown.
        nursery: Runs those reads.

    Attributes:
        given_up: Channels that have given up messages, which are to be moved to dead-letter topics; whoever moves them
            takes the channels out.
        given_up_grew: Set when there are any.
    """

    def __init__(
        self,
        broker: Broker,
        options: BrokerOptions,
        timers: Timers,
        poller: Poller,
        readers: Readers,
        nursery: trio.Nursery,
    ) -> None:
        self.given_up: dict[Channel, None] = {}
        self.given_up_grew = trio.Event()
        self._broker = broker
        self._pacing = options.pacing
        self._longest_timeout_ns = options.limits.max_msg_timeout_ms * 1_000_000
        self._timers = timers
        self._poller = poller
        self._clock_s = poller.clock_s
        self._readers = readers
        self._nursery = nursery
        self._in_line: dict[Channel, None] = {}  # more could be delivered there than one turn allows
        # Where deliveries wait until nobody has anything to send, and until when, by the poller's clock, at most.
        self._waiting: dict[Channel, float] = {}
        self._reading: set[Channel] = set()  # what they deliver next is read from disk
        self._unreadable: set[Channel] = set()  # their messages could not be read lately

    # ------------------------------------------------------------------ when

    def deliver_published(self, topic: Topic) -> None:
        """Messages were added to a topic: send them on. They are stored, whatever comes of this."""
        try:
            self.deliver_topic(topic)
        except Exception:
            # A mistake of ours: it must not reach whoever published.
            logger.exception("%s: what was published could not be sent on", topic.name)

    def deliver_topic(self, topic: Topic) -> None:
        """Send what is ready in any of a topic's channels, and look out for what is deferred there."""
        if self._readers.waiting:
            self._readers.wake(topic)
        if topic.has_distributed_deferred:
            topic.has_distributed_deferred = False
            for channel in topic.channels.values():
                self._timers.watch(channel, channel.next_due_ns)
        left = self._pacing.channels_per_turn
        for channel in topic.channels.values():
            if channel in self._waiting or not channel.dispatcher.has_ready_consumer:
                continue
            if self._poller.in_round and channel.dispatcher.can_wait:
                self._waiting[channel] = self._clock_s() + self._pacing.waiting_s
            elif not left:
                self._line_up(channel)
            else:
                self.deliver(channel)
                left -= 1
        topic.limits.make_room()

    def end_round(self) -> None:
        """Clients had their turn: now some of the channels that stand in line, or have waited for long."""
        for _ in range(min(len(self._in_line), self._pacing.channels_per_turn)):
            self._deliver_next(self._in_line)
        if self._waiting:
            now_s = self._clock_s()
            over_s = now_s + self._pacing.turn_s
            while self._waiting and next(iter(self._waiting.values())) <= now_s < over_s:
                self._deliver_next(self._waiting)
                now_s = self._clock_s()

    def idle(self) -> bool:
        """Nobody has sent anything: serve a channel that could wait. True: there may be more of them."""
        line = self._in_line or self._waiting
        if not line:
            return False
        self._deliver_next(line)
        return True

    async def run_timers(self) -> None:
        """Move what is due when it is due, and have it sent; runs until cancelled."""
        while True:
            for channel in self._broker.tick(self._timers.now_ns()):
                self.look_for_given_up(channel)
                self._line_up(channel)
            await self._timers.wait()

    def _line_up(self, channel: Channel) -> None:
        """Deliver to a channel when others have had their turn."""
        self._in_line[channel] = None
        if not self._poller.in_round:
            self._poller.wake()

    def _deliver_next(self, line: dict[Channel, Any]) -> None:
        channel = next(iter(line))
        del line[channel]
        self._try_to_deliver(channel)

    def _try_to_deliver(self, channel: Channel) -> bool:
        try:
            self.deliver(channel)
        except Exception:
            # A mistake of ours: it must not reach other channels.
            logger.exception("%s/%s: nothing could be delivered", channel.topic.name, channel.name)
            return False
        return True

    # ------------------------------------------------------------------ one channel

    def deliver(self, channel: Channel) -> None:
        """Send what is ready to whoever can take it, unless it waits for more to be sent with it."""
        if self._broker.stopping:
            return  # what one client had would only go to the next, to be taken from it in its turn
        self.look_for_given_up(channel)
        if channel.dispatcher.can_deliver and not self._waits(channel):
            self._deliver_now(channel)
        if (due_ns := channel.next_due_ns) is not None:
            self._timers.watch(channel, due_ns)  # it may just have been put off

    def deliver_waiting(self, channel: Channel) -> None:
        """Send what is ready, also what waits for more to be sent with it."""
        if channel.dispatcher.can_deliver and not self._broker.stopping:
            self._deliver_now(channel)

    def put_back(self, channel: Channel, messages: Iterable[Withdrawn]) -> None:
        """Let a channel deliver messages again that were withdrawn, or give them up, as its settings are now."""
        channel.put_back(messages)
        self.deliver(channel)

    def look_for_given_up(self, channel: Channel) -> None:
        """Have what a channel has given up moved to its dead-letter topic."""
        if channel.messages.withdrawn.waiting:
            self.given_up[channel] = None
            self.given_up_grew.set()

    def _waits(self, channel: Channel) -> bool:
        """Whether what can be delivered waits for more to be sent with it."""
        if not channel.dispatcher.can_wait:
            return False
        if channel in self._waiting:
            return True
        if (until_ns := channel.dispatcher.buffering.wait_until_ns) <= self._timers.now_ns():
            return False
        self._timers.watch(channel, until_ns)
        return True

    def _deliver_now(self, channel: Channel) -> None:
        now_ns = self._timers.now_ns()
        timeout_ns = self._longest_timeout_ns
        sent = 0
        over_s = self._clock_s() + self._pacing.turn_s
        while channel.dispatcher.can_deliver:
            if sent >= self._pacing.grants_per_turn or (sent and self._clock_s() > over_s):
                self._line_up(channel)
                break
            try:
                grants = channel.dispatcher.dispatch(now_ns, time.time_ns() - now_ns)
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
                    self._line_up(channel)
                break
            sent += len(grants)
            subscribers: dict[Subscriber, None] = {}
            for consumer, frames in grants:
                consumer.subscriber.deliver(frames)
                subscribers[consumer.subscriber] = None
                timeout_ns = min(timeout_ns, consumer.msg_timeout_ns)
            for subscriber in subscribers:
                subscriber.send_delivered()
        if sent:
            self._timers.watch(channel, now_ns + timeout_ns)

    # ------------------------------------------------------------------ what lies on disk only

    def _read(self, channel: Channel) -> None:
        """Have read what a channel needs to go on, unless that is under way."""
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
        """Read what a channel needs to go on; False if it must pause before its next read."""
        try:
            found = await self._readers.fetch(channel.store, channel.read_ahead.wanted())
            if not self._broker.serves_channel(channel):
                return True
            channel.read_ahead.take(found)
        except Exception:
            # A mistake of ours: it must not reach other channels.
            logger.exception("%s/%s: messages could not be read", channel.topic.name, channel.name)
            return False
        if found.error is None:
            self._unreadable.discard(channel)
            return True
        self._mark_unreadable(channel, found.error)
        return bool(found.ahead or found.again)

    def _mark_unreadable(self, channel: Channel, error: LogError) -> None:
        """Have a channel try again to read its messages, and say once that it cannot, not each time."""
        self._timers.watch(channel, self._timers.now_ns() + _READ_AGAIN_NS)
        deleted = channel.topic.name in self._broker.deleting  # its files have another name by now
        if channel not in self._unreadable and not deleted:
            self._unreadable.add(channel)
            logger.error("%s/%s: %s", channel.topic.name, channel.name, error)
