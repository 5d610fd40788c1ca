"""The undistributed messages of a topic: those beyond the high watermark, which no channel has."""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from ...log.record_metadata import IN_SEQUENCE_NS
from .channel import Channel
from .topic_view import TopicView
from .version import Version
from .waiting_messages import PendingRange, WaitingMessages


class UndistributedMessages:
    """Moves the high watermark of one topic, and changes its `waiting` messages."""

    def __init__(self, topic: TopicView, version: Version) -> None:
        self._topic = topic
        self._version = version

    @property
    def waiting(self) -> WaitingMessages:
        return self._topic.waiting

    @property
    def depth(self) -> int:
        """Number of messages, without the deferred ones."""
        topic = self._topic
        # A bounded log in memory may have dropped the range of a deferred message, but `waiting` keeps the message.
        return topic.end - topic.high_watermark - self.waiting.messages_from(topic.high_watermark)

    @property
    def deferred_count(self) -> int:
        """Number of messages that `depth` excludes: deferred, or for one channel only."""
        return self.waiting.messages_from(0)

    def defer(self, waiting: PendingRange) -> None:
        """Add messages that are deferred or for one channel only."""
        self.waiting.add(waiting)
        self._version.increment()

    def take(self, until: int | None = None) -> tuple[int, list[PendingRange]]:
        """Move the high watermark to the end of the topic, or only to this sequence, after a message.

        Returns:
            The number of messages to read in sequence order, and the others.
        """
        topic = self._topic
        if until is not None and until < topic.end:
            return self._take_before(until)
        end, point = topic.end, topic.high_watermark
        if not self.waiting:
            if end > point:
                topic.high_watermark = end
                self._version.increment()
            return end - point, []
        count, deferred = self.depth, list(self.waiting)
        self.clear()
        return count, deferred

    def _take_before(self, until: int) -> tuple[int, list[PendingRange]]:
        # No further: a restart calls this for each line behind a state, and thousands of messages may follow.
        deferred = list(takewhile(lambda each: each.sequences.start < until, self.waiting))
        if deferred:
            until = max(until, deferred[-1].sequences.stop)
        count = self.count_before(until)
        self.drop_before(until)
        return count, deferred

    def clear(self) -> None:
        """Move the high watermark to the end of the topic, and drop the messages."""
        self._topic.high_watermark = self._topic.end
        self._topic.waiting = WaitingMessages()
        self._version.increment()

    def after(self, count: int) -> int:
        """Return the sequence after the first `count` of the messages that `depth` counts."""
        to = self._topic.high_watermark
        for waiting in self.waiting:
            start = waiting.sequences.start
            if to + count < start:
                break
            if start >= to:
                count, to = count - (start - to), waiting.sequences.stop
        return to + count

    def count_before(self, sequence: int) -> int:
        """Count the messages below `sequence`, without the deferred ones."""
        point = self._topic.high_watermark
        if (sequence := min(sequence, self._topic.end)) <= point:
            return 0
        return sequence - point - self.waiting.messages_from(point) + self.waiting.messages_from(sequence)

    def drop_before(self, sequence: int) -> None:
        """Drop all messages below `sequence`, also the deferred ones: another broker has them."""
        self._topic.waiting.drop_before(sequence)
        self._topic.high_watermark = max(self._topic.high_watermark, sequence)
        self._version.increment()

    def pass_over(self, sequence: int) -> int:
        """Move the high watermark, and return how many messages that drops. Deferred messages are kept."""
        for waiting in self.waiting:
            if waiting.sequences.start < sequence < waiting.sequences.stop:
                sequence = waiting.sequences.stop
        sequence = min(sequence, self._topic.end)
        if sequence <= self._topic.high_watermark:
            return 0
        before = self.depth
        self._topic.high_watermark = sequence
        self._version.increment()
        return before - self.depth


def distribute_to(channels: Iterable[Channel], count: int, deferred: Sequence[PendingRange]) -> None:
    """Give channels `count` messages to read in sequence order, and the deferred ones."""
    for channel in channels:
        channel.arrived(count)
        for waiting in deferred:
            sequences = waiting.sequences
            if waiting.channel not in (None, channel.name):
                channel.skip(sequences.start, sequences.stop)
            elif waiting.due_ns == IN_SEQUENCE_NS:
                channel.arrived(len(sequences))
            else:
                channel.arrived_deferred(sequences, waiting.due_ns, waiting.held)
