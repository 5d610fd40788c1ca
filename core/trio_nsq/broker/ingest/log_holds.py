"""Tasks that have a topic's log for themselves, one after the other: nothing is written to it meanwhile."""

from collections import deque
from collections.abc import Iterator

import trio

from ..state.topic import Topic


class LogHolds:
    """Who holds which log, and who is next. One for a broker."""

    def __init__(self) -> None:
        self._lines: dict[Topic, deque[trio.Event]] = {}

    def __contains__(self, topic: Topic) -> bool:
        return topic in self._lines

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._lines)

    def take(self, topic: Topic) -> None:
        """Hold a log that nobody holds."""
        self._lines[topic] = deque()

    async def wait(self, topic: Topic) -> None:
        """Hold a log as soon as those who hold it, or wait for it already, have let go."""
        turn = trio.Event()
        line = self._lines[topic]
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
        if line := self._lines[topic]:
            line.popleft().set()
            return False
        del self._lines[topic]
        return True
