"""The base of the loads: they run in a thread, until their time is over or `stop` is called."""

import time
from collections.abc import Callable, Sequence

from trio_nsq.client.errors import ConnectionLost

from .link import Link, Loop
from .measurement import Counter, Measurement, Tally

now = time.perf_counter
TICK_S = 0.05
"""How soon the end is noticed while no data arrives."""
PATIENCE_S = 10.0
"""A broker that does not answer for this long counts as lost; after an interruption, for a shorter time."""
SHORT_PATIENCE_S = 2.0
NEARLY_S = 0.01
"""A second that lacks so little counts as whole: at a fixed rate, the last message is due before the end."""
CHECK_S = 0.5
"""How often this is checked."""


class Load:
    """A load on some connections. `run` may be called in a thread, `stop` in another one.

    Attributes:
        counter: The messages so far.
    """

    def __init__(self, links: Sequence[Link], duration_s: float, message_bytes: int) -> None:
        self.links = links
        self.counter = Counter()
        self.tallies = [Tally(link.address) for link in links]
        self.stopped = False
        self._duration_s = duration_s
        self._message_bytes = message_bytes
        self._loop = Loop(links)
        self._patience_s = PATIENCE_S
        self._check_s = 0.0

    def stop(self) -> None:
        """End the load early, in good order."""
        self.stopped = True
        self._patience_s = SHORT_PATIENCE_S

    def run(self) -> None:
        """Produce the load to its end.

        Raises:
            NSQError: A connection is lost, or a broker refuses or does not answer.
        """
        raise NotImplementedError

    def close(self) -> None:
        self._loop.close()

    def result(self) -> Measurement:
        """Return what was measured, also after a failure."""
        counter = self.counter
        seconds = counter.last_s - counter.begun_s
        return Measurement(
            self.tallies,
            body_bytes=self.body_bytes,
            seconds=seconds,
            by_second=counter.by_second[: int(seconds + NEARLY_S)],
            interrupted=self.stopped,
        )

    @property
    def body_bytes(self) -> int:
        """The bodies of the messages so far."""
        return self.counter.total * self._message_bytes

    def is_over(self) -> bool:
        """Whether no new work may begin."""
        return self.stopped or now() >= self.counter.begun_s + self._duration_s

    def serve(self, slowest: Callable[[], tuple[float, Link]]) -> None:
        """Handle data once.

        Args:
            slowest: Returns the link that is due an answer for the longest time, and since when.

        Raises:
            NSQError: As `run`.
        """
        self._loop.turn(TICK_S)
        if (now_s := now()) < self._check_s:
            return
        self._check_s = now_s + CHECK_S
        since_s, link = slowest()
        if now_s > since_s + self._patience_s:
            raise ConnectionLost(link.address, f"no answer within {self._patience_s:g} s")
