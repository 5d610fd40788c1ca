"""`qcli bench latency`: publishes at a fixed rate, and measures until the messages arrive.

A message is sent when it is due, even if earlier ones are not acknowledged yet, and its times count from then. So a
broker that stalls for a second delays all messages of that second, not one (no coordinated omission).
"""

import os
import secrets
from collections import deque
from collections.abc import Sequence
from functools import partial
from struct import Struct

from trio_nsq.protocol.encode import encode_finish, encode_pub, encode_rdy
from trio_nsq.protocol.frames import Event, MessageRun

from .histogram import Histogram
from .link import Link
from .load import TICK_S, Load, now
from .measurement import Measurement, Tally

STAMP = Struct(">8sd")
"""The beginning of a message: the id of the run, and when the message was due."""
_AT_ONCE = 64
"""If messages are late, answers are read after so many."""


class Latency(Load):
    """Publishes on one connection to each broker in turn, and consumes on another one.

    Args:
        links: For each broker a connection to publish, and a subscribed one.
        rate: Messages per second, over all brokers.
        size: The bytes of a message, at least `STAMP.size`.
    """

    def __init__(
        self, links: Sequence[Link], topic: str, *, duration_s: float, rate: float, size: int
    ) -> None:
        super().__init__(links, duration_s, size)
        publishers, consumers = links[::2], links[1::2]
        self.tallies = [Tally(link.address) for link in consumers]
        self.sent_late = Histogram()
        self.acknowledged = Histogram()
        self.received = Histogram()
        self.id = secrets.token_bytes(8)
        self._topic = topic
        self._filler = os.urandom(size - STAMP.size)
        self._rate = rate
        self._count = max(1, round(rate * duration_s))
        self._published = 0
        self._publishers = [_TimedPublisher(self, link) for link in publishers]
        for link, tally in zip(consumers, self.tallies, strict=True):
            link.handle = partial(self._receive, link, tally)

    def run(self) -> None:
        for link in self.links[1::2]:
            link.send(encode_rdy(link.max_rdy_count))
        self.counter.begin(now())
        self._publish()
        published_s = now()
        while min(self.counter.total, self.acknowledged.count) < self._published:
            self.serve(lambda: (max(self.counter.last_s, published_s), self.links[-1]))

    def _publish(self) -> None:
        begun_s = self.counter.begun_s
        while self._published < self._count and not self.stopped:
            due_s = begun_s + self._published / self._rate
            wait_s = due_s - now()
            if wait_s > 0:
                self._loop.turn_until(min(wait_s, TICK_S))
                continue
            self.sent_late.add(-wait_s)
            publisher = self._publishers[self._published % len(self._publishers)]
            publisher.publish(due_s, encode_pub(self._topic, STAMP.pack(self.id, due_s) + self._filler))
            self._published += 1
            if not self._published % _AT_ONCE:
                self._loop.turn(0)

    def _receive(self, link: Link, tally: Tally, event: Event) -> None:
        if not isinstance(event, MessageRun):
            return
        now_s = now()
        for body in event.bodies:
            if len(body) >= STAMP.size and body.startswith(self.id):
                self.received.add(now_s - STAMP.unpack_from(body)[1])
                self.counter.add(1, now_s)
                tally.messages += 1
        link.send(encode_finish(event.ids))

    def result(self) -> Measurement:
        result = super().result()
        result.missing = self._published - self.counter.total
        result.times = {
            "received": self.received,
            "acknowledged": self.acknowledged,
            "sent late": self.sent_late,
        }
        return result


class _TimedPublisher:
    """Publishes on one connection."""

    def __init__(self, load: Latency, link: Link) -> None:
        self._load = load
        self._link = link
        self._due_s: deque[float] = deque()
        link.handle = self.handle

    def publish(self, due_s: float, command: bytes) -> None:
        """Publish a message that is due at that time."""
        self._due_s.append(due_s)
        self._link.send(command)

    def handle(self, _event: Event) -> None:
        self._load.acknowledged.add(now() - self._due_s.popleft())
