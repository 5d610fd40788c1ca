"""Tasks that have a topic's log for themselves, one after the other: nothing is written to it meanwhile."""

from collections import deque

import trio

from ..state.topic import Topic


class LogHolds:
    """Who holds which log, and who is next. One for a broker.

    Attributes:
        lines: Those who wait for a log, for each log that is held.
    """

    def __init__(self) -> None:
        self.lines: dict[Topic, deque[trio.Event]] = {}

    def enter(self, topic: Topic) -> trio.Event | None:
        """Stand in line for a log; returns what is set when it is the caller's, or None if it is already."""
        line = self.lines.get(topic)
        if line is None:
            self.lines[topic] = deque()
            return None
        turn = trio.Event()
        line.append(turn)
        return turn

    def leave(self, topic: Topic, turn: trio.Event) -> None:
        """Wait no longer for a turn that has not come."""
        self.lines[topic].remove(turn)

    def release(self, topic: Topic) -> bool:
        """Let go of a log; whether nobody holds it now."""
        if line := self.lines[topic]:
            line.popleft().set()
            return False
        del self.lines[topic]
        return True
