"""Whether messages wait for more, to be sent together (NSQ protocol: output buffering)."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from ...protocol.frames import MESSAGE_FRAME_BYTES
from .consumer import Consumer
from .topic_view import TopicView

_WAIT_STEPS = 50
"""Messages may wait longer than a consumer has said by a fiftieth of that."""
_CONSUMERS_COMPARED = 16


class OutputBuffering:
    """The buffers that the consumers of one channel have asked for.

    Unlike nsqd, messages do not wait in the client's buffer, where nobody else could have them, and where each would
    cost a delivery of its own. Where there are several consumers, all have the patience of the least patient.

    Args:
        topic: What is known of the topic.

    Attributes:
        sent_ns: When something was sent last.
        sent_bytes: The topic's `message_bytes` when there was nothing left to be sent; None while there is.
    """

    __slots__ = ("_buffers", "_least_bytes", "_least_ns", "_topic", "sent_bytes", "sent_ns")

    def __init__(self, topic: TopicView) -> None:
        self._topic = topic
        self._buffers: Counter[tuple[int, int]] = Counter()  # how many consumers have which
        self._least_bytes = self._least_ns = 0
        self.sent_ns = 0
        self.sent_bytes: int | None = None

    def count(self, consumer: Consumer, more: int) -> None:
        """Count a consumer's buffer once more, or once less."""
        self._buffers[consumer.buffer_bytes, consumer.buffer_ns] += more
        self._buffers = +self._buffers
        self._least_bytes = min([size_bytes for size_bytes, _ in self._buffers], default=0)
        self._least_ns = min([time_ns for _, time_ns in self._buffers], default=0)

    def can_wait(self, fresh: int, ready: dict[Consumer, None]) -> bool:
        """Whether so many fresh messages may wait for more.

        As in nsqd they may not when they fill the client's buffer, or are as many as one of the next clients can take;
        nor where there may be no room for what comes next.

        Args:
            fresh: How many can be delivered.
            ready: The consumers that can take them.
        """
        if not self._least_ns or self.sent_bytes is None or self._topic.is_limited:
            return False
        consumers = len(ready)
        frame_bytes = self._topic.message_bytes - self.sent_bytes + fresh * MESSAGE_FRAME_BYTES
        if frame_bytes >= consumers * self._least_bytes:
            return False
        share = -(-fresh // consumers)
        next_ones: Iterable[Consumer] = islice(ready, _CONSUMERS_COMPARED)
        return share < min([consumer.window for consumer in next_ones])

    @property
    def wait_until_ns(self) -> int:
        """Until when they may: so long after something was sent, so that a message after a pause goes at once."""
        # Many channels are to be served when a timer wakes for one.
        step_ns = self._least_ns // _WAIT_STEPS
        return -(-(self.sent_ns + self._least_ns) // step_ns) * step_ns
