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

    def take(self, topic: Topic) -> None:
        """Hold a log that nobody holds."""
        self.lines[topic] = deque()

    async def wait(self, topic: Topic) -> None:
        """Hold a log as soon as those who hold it, or wait for it already, have let go."""
        turn = trio.Event()
        line = self.lines[topic]
        line.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self.release(topic)
            else:
                line.remove(turn)
            raise

    def release(self, topic: Topic) -> bool:
        """Let go of a log; whether nobody holds it now."""
        if line := self.lines[topic]:
            line.popleft().set()
            return False
        del self.lines[topic]
        return True
