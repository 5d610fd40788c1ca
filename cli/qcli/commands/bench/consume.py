"""`qcli bench sub`: consumes and finishes messages as fast as the broker delivers them."""

from collections.abc import Sequence
from functools import partial

from trio_nsq.protocol.encode import encode_cls, encode_finish, encode_rdy
from trio_nsq.protocol.frames import ErrorFrame, Event, MessageRun

from .link import Link
from .load import TICK_S, Load, now
from .measurement import Measurement, Tally

IDLE_S = 1.0
"""The measurement ends if nothing arrives for this long after a message."""


class Consuming(Load):
    """Consumes on subscribed connections.

    Args:
        max_in_flight: The RDY count of each connection, if the broker allows it.
        count: End when so many messages are finished; None: at the end of the time, or of the messages.
    """

    def __init__(
        self, links: Sequence[Link], *, duration_s: float, max_in_flight: int, count: int | None = None
    ) -> None:
        super().__init__(links, duration_s, 0)
        self.timed_out = 0
        self._afterwards = 0
        self._ended_s: float | None = None
        self._body_bytes = 0
        self._count = count
        self._max_in_flight = max_in_flight
        for link, tally in zip(links, self.tallies, strict=True):
            link.handle = partial(self._handle, link, tally)

    def run(self) -> None:
        counter = self.counter
        counter.begin(now())
        for link in self.links:
            link.send(encode_rdy(min(self._max_in_flight, link.max_rdy_count)))
        while not (self.is_over() or counter.total == self._count or self._is_idle()):
            self._loop.turn(TICK_S)
        self._ended_s = counter.last_s if counter.total == self._count or self._is_idle() else now()
        self._end()

    def result(self) -> Measurement:
        result = super().result()
        result.missing = self.timed_out
        result.afterwards = self._afterwards
        if self._ended_s is not None:
            result.seconds = self._ended_s - self.counter.begun_s
        return result

    @property
    def body_bytes(self) -> int:
        return self._body_bytes

    def _handle(self, link: Link, tally: Tally, event: Event) -> None:
        """Finish messages; after the answer to CLS, end the connection."""
        if isinstance(event, MessageRun):
            link.send(encode_finish(event.ids))
            self._count_run(event, tally)
        elif isinstance(event, ErrorFrame):
            self.timed_out += 1
        else:
            link.finish()

    def _count_run(self, run: MessageRun, tally: Tally) -> None:
        """Count finished messages. If the first ones are late, the measurement begins with them.

        Messages that arrive after its end, until the broker has stopped delivering, have no effect on the rates.
        """
        now_s, counter = now(), self.counter
        if self._ended_s is not None:
            self._afterwards += len(run)
            return
        if not counter.total and now_s > counter.begun_s + IDLE_S:
            counter.begin(now_s)
        counter.add(len(run), now_s)
        tally.messages += len(run)
        self._body_bytes += sum(map(len, run.bodies))

    def _is_idle(self) -> bool:
        return self.counter.total > 0 and now() > self.counter.last_s + IDLE_S

    def _end(self) -> None:
        """Finish what has arrived, and let the broker read all FINs before the connections are closed."""
        begun_s = now()
        for link in self.links:
            link.send(encode_cls())
        while open_links := [link for link in self.links if not link.ended]:
            self.serve(lambda: (begun_s, open_links[0]))
