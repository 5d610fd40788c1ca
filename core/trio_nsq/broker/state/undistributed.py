"""The messages of a topic that no channel has yet: those from the high watermark on."""

from .deferred import Waiting, WaitingMessages
from .topic_view import TopicView
from .version import Version


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
        """How many there are, without those that wait for their time."""
        topic = self._topic
        # A bounded memory may have lost the place of a deferred message, though not the message.
        return topic.end - topic.high_watermark - self.waiting.messages_from(topic.high_watermark)

    def defer(self, waiting: Waiting) -> None:
        """Let messages wait for their time, or for one channel."""
        self.waiting.add(waiting)
        self._version.increment()

    def take(self) -> tuple[int, list[Waiting]]:
        """Move the high watermark to the end of the topic.

        Returns:
            How many messages can be read in their turn, and those that cannot.
        """
        topic = self._topic
        end, point = topic.end, topic.high_watermark
        if not self.waiting:
            if end > point:
                topic.high_watermark = end
                self._version.increment()
            return end - point, []
        count, deferred = self.depth, list(self.waiting)
        self.clear()
        return count, deferred

    def clear(self) -> None:
        """Move the high watermark to the end of the topic: channels do not get these messages."""
        self._topic.high_watermark = self._topic.end
        self._topic.waiting = WaitingMessages()
        self._version.increment()

    def after(self, count: int) -> int:
        """The sequence after the first `count` of the messages that `depth` counts."""
        to = self._topic.high_watermark
        for waiting in self.waiting:
            start = waiting.sequences.start
            if to + count < start:
                break
            if start >= to:
                count, to = count - (start - to), waiting.sequences.stop
        return to + count

    def count_before(self, sequence: int) -> int:
        """How many of the messages that `depth` counts are below `sequence`."""
        point = self._topic.high_watermark
        if (sequence := min(sequence, self._topic.end)) <= point:
            return 0
        return sequence - point - self.waiting.messages_from(point) + self.waiting.messages_from(sequence)

    def pass_over(self, sequence: int) -> int:
        """Move the high watermark; returns how many messages that drops. What waits for its time goes on to wait."""
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
