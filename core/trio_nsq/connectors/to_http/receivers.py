"""The choice of a receiver for each request. No IO; time is a parameter, in seconds of any monotonic clock.

`host_pool` chooses, as in nsq_to_http. It always has a choice, also if all receivers fail. So in addition, a receiver
that takes no requests, or fails several times in a row, pauses: at first for `FIRST_PAUSE_S`, then for twice as long
each time. After a pause it gets one request. If that succeeds, it gets all its requests again. A receiver that said how
long to wait (Retry-After) pauses for that time. While all pause, messages wait.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...event_loop.retries import Delays
from ..host_pool import HostPool, Mode, make_pool
from .outcomes import Outcome, Verdict

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
FAILURES_IN_A_ROW = 5
"""A single failure may be the message's fault. A receiver is left out after this many without a success."""


class Change(Enum):
    """What a result changed about a receiver."""

    NONE = 0
    LEFT_OUT = 1
    BACK = 2


@dataclass(eq=False, slots=True)
class Receiver:
    """The state of one receiver.

    Attributes:
        index: Its place among the receivers.
        paused_until: Requests are possible from this time on.
        is_out: It pauses, or has not succeeded since.
        has_trial: The one request after a pause is running.
        failures: Failures since the last success.
    """

    index: int
    paused_until: float = -math.inf
    is_out: bool = False
    paused_at: float = -math.inf
    has_trial: bool = False
    failures: int = 0
    delays: Delays = field(default_factory=lambda: Delays(FIRST_PAUSE_S, MAX_PAUSE_S))

    def is_open(self, now: float) -> bool:
        return now >= self.paused_until and not (self.is_out and self.has_trial)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to send one request to a receiver. Give it back with `ReceiverPool.settle` or `cancel`.

    Attributes:
        is_trial: It is the one request after a pause.
    """

    receiver: Receiver
    since: float
    is_trial: bool


@dataclass(eq=False, slots=True)
class ReceiverPool:
    """Chooses receivers, and leaves out those that fail.

    Args:
        count: The number of receivers, at least 1.
        mode: How to choose one of several; None: the caller sends to all of them, with `among`.
        random: Returns numbers in [0, 1).
        max_retry_after_s: A receiver that asks for a longer wait is tried after this time.
    """

    count: int
    mode: Mode | None
    random: Callable[[], float]
    max_retry_after_s: float = 600.0
    receivers: Sequence[Receiver] = field(init=False)
    _choice: HostPool = field(init=False)

    def __post_init__(self) -> None:
        self.receivers = [Receiver(index) for index in range(self.count)]
        self._choice = make_pool(self.mode or Mode.ROUND_ROBIN, self.count, self.random)

    def lease(self, now: float, among: Collection[int] | None = None) -> Lease | None:
        """Choose a receiver for a request; None: all are left out now, see `next_deadline`.

        Args:
            among: Choose one of these indexes; None: any.
        """
        open_ = {
            each.index: each
            for each in self.receivers
            if (among is None or each.index in among) and each.is_open(now)
        }
        if not open_:
            return None
        picks = (self._choice.pick(now) for _ in self.receivers)
        index = next((each for each in picks if each in open_), None)
        chosen = open_[index] if index is not None else next(iter(open_.values()))
        chosen.has_trial |= chosen.is_out
        return Lease(chosen, now, chosen.is_out)

    def cancel(self, lease: Lease) -> None:
        if lease.is_trial:
            lease.receiver.has_trial = False

    def settle(self, lease: Lease, outcome: Outcome, now: float) -> Change:
        """Give a lease back with the result of its request."""
        receiver = lease.receiver
        if lease.is_trial:
            receiver.has_trial = False
        if outcome.verdict in (Verdict.DONE, Verdict.FINAL):  # a refusal is an answer, too
            self._choice.succeeded(receiver.index, now - lease.since, now)
            receiver.failures = 0
            if receiver.is_out and lease.since >= receiver.paused_at:
                receiver.is_out, receiver.paused_until = False, -math.inf
                receiver.delays.reset()
                return Change.BACK
            return Change.NONE
        self._choice.failed(receiver.index, now)
        if lease.since < receiver.paused_at:
            return Change.NONE  # it began before the pause
        receiver.failures += 1
        wait_s = outcome.retry_after_s
        if wait_s is not None and outcome.verdict is Verdict.UNAVAILABLE:
            asked_s = max(FIRST_PAUSE_S, min(wait_s, self.max_retry_after_s))
            if not receiver.is_out:
                receiver.delays.next_s()  # the next pause is one after a pause
            return self._pause(receiver, now, asked_s)
        if outcome.verdict is Verdict.UNAVAILABLE or lease.is_trial or receiver.failures >= FAILURES_IN_A_ROW:
            return self._pause(receiver, now, receiver.delays.next_s() * (1 - self.random() / 4))
        return Change.NONE

    def _pause(self, receiver: Receiver, now: float, pause_s: float) -> Change:
        was_out, receiver.is_out = receiver.is_out, True
        receiver.paused_at, receiver.paused_until = now, now + pause_s
        return Change.NONE if was_out else Change.LEFT_OUT

    def next_deadline(self, now: float, among: Collection[int] | None = None) -> float:
        """Return when a receiver is tried next; infinity: when a running request ends."""
        return min(
            (
                max(now, each.paused_until)
                for each in self.receivers
                if (among is None or each.index in among) and not (each.is_out and each.has_trial)
            ),
            default=math.inf,
        )

    def next_room(self, now: float) -> float:
        """Return when `room` may change without a request; infinity: it does not."""
        return min(
            (each.paused_until for each in self.receivers if each.paused_until > now), default=math.inf
        )

    def room(self, now: float) -> int | None:
        """Return how many requests may run at a time; None: as many as there are, as a receiver works.

        If the caller sends to all receivers, the one with the least room counts.
        """
        rooms = [None if not each.is_out else int(now >= each.paused_until) for each in self.receivers]
        if self.mode is None:
            limited = [each for each in rooms if each is not None]
            return min(limited) if limited else None
        return None if None in rooms else sum(filter(None, rooms))
