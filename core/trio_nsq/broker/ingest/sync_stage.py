"""The sync stage: writes wait here until every barrier is reached. Then they are committed.

A barrier is something that must have a write before it is acknowledged. It is started for all barriers at once, and
the slowest decides. Each reports how far it has come, in order. The local sync is one; in a cluster, the other members
are a second one.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from ..state.topic import Topic
from .publication import Write

LOCAL: Final = 0
"""The barrier of `LocalSync`."""
MEMBERS: Final = 1
"""The barrier of `ReplicationBarrier`, in a cluster."""


class _Waiting:
    """A topic's writes that wait.

    Attributes:
        writes: In order, at least one.
        reached: For each barrier, the number of the last write that it has, as `Log.writes` counts.
    """

    __slots__ = ("reached", "writes")

    def __init__(self, barriers: int) -> None:
        self.writes: deque[Write] = deque()
        self.reached = [0] * barriers


class SyncStage:
    """The writes of all topics that wait for barriers. One per broker.

    Attributes:
        topics: Those that have such writes.
    """

    def __init__(self, barriers: int = 1) -> None:
        self.topics: dict[Topic, _Waiting] = {}
        self._barriers = barriers

    def add(self, topic: Topic, write: Write) -> None:
        """Have a write wait. Then request it of every barrier."""
        waiting = self.topics.get(topic)
        if waiting is None:
            waiting = self.topics[topic] = _Waiting(self._barriers)
        waiting.writes.append(write)

    def reach(self, barrier: int, topic: Topic, number: int) -> Sequence[Write]:
        """Record that a barrier has a topic's writes up to this number.

        Returns:
            The writes, in order, that every barrier has now: commit them.
        """
        waiting = self.topics.get(topic)
        if waiting is None:
            return ()
        waiting.reached[barrier] = max(number, waiting.reached[barrier])
        upto, writes, reached = min(waiting.reached), waiting.writes, []
        while writes and writes[0].number <= upto:
            reached.append(writes.popleft())
        if not writes:
            del self.topics[topic]
        return reached

    def waiting(self, topic: Topic) -> Sequence[Write]:
        """Return the topic's writes that wait, in order."""
        waiting = self.topics.get(topic)
        return waiting.writes if waiting is not None else ()

    def rollback(self, topic: Topic) -> Sequence[Write]:
        """Return and remove all writes of a topic that wait: a barrier has failed, so they are refused."""
        waiting = self.topics.pop(topic, None)
        return waiting.writes if waiting is not None else ()
