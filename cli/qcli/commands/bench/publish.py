"""`qcli bench pub`: publishes as fast as the broker acknowledges."""

import math
import os
from collections import deque
from collections.abc import Sequence

from trio_nsq.protocol.encode import encode_mpub, encode_pub
from trio_nsq.protocol.frames import Event
from trio_nsq.protocol.messages import pack_messages

from .histogram import Histogram
from .link import Link
from .load import Load, now
from .measurement import Measurement, Tally


class Publishing(Load):
    """Publishes batches of one message over and over; a number of them is on the way on each connection.

    Args:
        count: Publish so many messages at most; None: until the time is over.
        size: The bytes of a message.
        batch_size: The messages of a batch. A batch of one is a PUB, others are MPUBs.
        pipeline: The unacknowledged batches of a connection.
    """

    def __init__(
        self,
        links: Sequence[Link],
        topic: str,
        *,
        duration_s: float = math.inf,
        count: int | None = None,
        size: int,
        batch_size: int,
        pipeline: int,
    ) -> None:
        super().__init__(links, duration_s, size)
        self.acknowledged = Histogram()
        self.left = math.inf if count is None else count
        self.batches_on_the_way = 0
        self._topic = topic
        self._body = os.urandom(size)
        self._batch_size = batch_size
        self._batch = self._command(batch_size)
        self._pipeline = pipeline
        self._publishers = [_Publisher(self, *each) for each in zip(links, self.tallies, strict=True)]

    def run(self) -> None:
        self.counter.begin(now())
        for publisher in self._publishers:
            publisher.answered_s = now()
            for _ in range(self._pipeline):
                publisher.publish()
        while self.batches_on_the_way:
            self.serve(self._slowest)

    def result(self) -> Measurement:
        result = super().result()
        result.times["acknowledged"] = self.acknowledged
        return result

    def _slowest(self) -> tuple[float, Link]:
        waiting = [each for each in self._publishers if each.sent_s]
        slowest = min(waiting or self._publishers, key=lambda each: each.answered_s)
        return slowest.answered_s if waiting else now(), slowest.link

    def take(self) -> tuple[int, bytes]:
        """Return the number of messages of the next batch and the command that publishes it; 0: there is none."""
        if self.is_over() or not self.left:
            return 0, b""
        size = self._batch_size
        if size <= self.left:
            self.left -= size
            return size, self._batch
        size, self.left = int(self.left), 0
        return size, self._command(size)

    def _command(self, count: int) -> bytes:
        if self._batch_size == 1:
            return encode_pub(self._topic, self._body)
        return encode_mpub(self._topic, pack_messages([self._body] * count))


class _Publisher:
    """Publishes on one connection.

    Attributes:
        sent_s: When the batches on the way were sent; empty at the end.
        answered_s: When the broker answered last.
    """

    def __init__(self, load: Publishing, link: Link, tally: Tally) -> None:
        self.link = link
        self.answered_s = 0.0
        self.sent_s: deque[float] = deque()
        self._counts: deque[int] = deque()
        self._load = load
        self._tally = tally
        link.handle = self.handle

    def publish(self) -> None:
        """Send the next batch, if there is one."""
        count, command = self._load.take()
        if count:
            self._load.batches_on_the_way += 1
            self.sent_s.append(now())
            self._counts.append(count)
            self.link.send(command)

    def handle(self, _event: Event) -> None:
        """Count an OK, the only answer that is not an error."""
        self.answered_s = now_s = now()
        count = self._counts.popleft()
        load = self._load
        load.acknowledged.add(now_s - self.sent_s.popleft())
        load.counter.add(count, now_s)
        self._tally.messages += count
        load.batches_on_the_way -= 1
        self.publish()
