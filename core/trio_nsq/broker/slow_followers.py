"""Which followers are too slow to be waited for, and how long after that they are not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ..event_loop.retries import Delays
from ..replication.lag import OperationAges
from ..replication.leader import Follower

_JOIN_LAG_S: Final = 1.0
"""A follower is waited for when it lacks nothing older: OKs would wait while it gets the rest."""
_MOST_PAUSE_S: Final = 1800.0
SLOW_S: Final = 0.5
"""OKs that wait so long for a follower are worth a word, although it is not too slow to be waited for."""
_SHARE: Final = 0.1
"""Of the last look in the mean."""
_MOST_LOOK_S: Final = 1.0
"""A longer time counts as this long, so that one stall does not make a follower slow."""


@dataclass(slots=True)
class _Watched:
    """A follower that is waited for.

    Attributes:
        since_s: When that began.
        stored: What it had stored at the last look.
        stored_s: When it last had stored more, or all.
        answer_s: In what time it stores operations: the mean of the longest ones between two looks.
        capped_s: The same of times up to `_MOST_LOOK_S`.
        is_slow: It is, and was reported.
    """

    since_s: float
    stored: int
    stored_s: float
    answer_s: float = 0.0
    capped_s: float = 0.0
    is_slow: bool = False


class SlowFollowers:
    """The followers of one leader. Times are by any clock that never steps.

    Args:
        stall_s: A follower that stores nothing for this time, although it lacks something, is too slow.
        most_lag_s: So is one that lacks an operation for longer than this.
        pause_s: How long it is not waited for after that. Each time twice as long, up to half an hour, because it costs
            OKs `most_lag_s` each time.
    """

    def __init__(self, stall_s: float, most_lag_s: float, pause_s: float) -> None:
        self.ages: OperationAges = OperationAges()
        self._stall_s = stall_s
        self._most_lag_s = most_lag_s
        self._pause_s = pause_s
        self._watched: dict[Follower, _Watched] = {}
        self._delays: dict[str, Delays] = {}  # of the members that were too slow
        self._paused_until_s: dict[str, float] = {}

    def find(
        self, now_s: float, last_number: int, followers: Iterable[Follower], *, spares_lag: bool
    ) -> Iterator[tuple[Follower, str]]:
        """Yield the followers that are too slow, and why; call it regularly.

        Args:
            last_number: The newest operation.
            followers: Those that are waited for.
            spares_lag: None may be missing: only those that store nothing are too slow.
        """
        self.ages.sample(now_s, last_number)
        before, self._watched = self._watched, {}
        for follower in followers:
            stored = follower.stored
            watched = self._watched[follower] = before.get(follower) or _Watched(now_s, stored, now_s)
            if stored != watched.stored or stored >= last_number:
                watched.stored, watched.stored_s = stored, now_s
            if now_s - watched.stored_s >= self._stall_s:
                reason = f"it has stored nothing for {self._stall_s:g} s"
            elif not spares_lag and (age_s := self.ages.age_s(now_s, stored)) > self._most_lag_s:
                reason = f"it has not stored what is {age_s:.1f} s old"
            else:
                continue
            self._pause(follower.member, now_s, now_s - watched.since_s)
            yield follower, f"{reason}, and lacks {last_number - stored} operations"

    def report(self, now_s: float) -> Iterator[tuple[Follower, str]]:
        """Yield the followers that have become slow, or are no longer, and what to log; call it after each `find`.

        Args:
            now_s: The time of `AnswerTimes`.
        """
        for follower, watched in self._watched.items():
            longest_s = follower.answers.take_longest_s(now_s)
            watched.answer_s += _SHARE * (longest_s - watched.answer_s)
            watched.capped_s += _SHARE * (min(longest_s, _MOST_LOOK_S) - watched.capped_s)
            if watched.is_slow != (watched.capped_s >= SLOW_S / (2 if watched.is_slow else 1)):
                watched.is_slow = not watched.is_slow
                text = f"slow: each OK waits for it, about {watched.answer_s:.1f} s"
                yield follower, text if watched.is_slow else "no longer slow"

    def answer_s(self, follower: Follower) -> float:
        """Return in what time a follower that is waited for stores operations; 0: it has nothing to store."""
        watched = self._watched.get(follower)
        return watched.answer_s if watched is not None else 0.0

    def is_slow(self, follower: Follower) -> bool:
        """Whether a follower that is waited for makes OKs slow."""
        watched = self._watched.get(follower)
        return watched is not None and watched.is_slow

    def _pause(self, member: str, now_s: float, lasted_s: float) -> None:
        delays = self._delays.setdefault(member, Delays(self._pause_s, _MOST_PAUSE_S))
        delays.connection_lasted(lasted_s)
        self._paused_until_s[member] = now_s + delays.next_s()

    def may_join(self, now_s: float, follower: Follower, *, is_needed: bool) -> bool:
        """Whether a follower that has the whole folder may be waited for.

        Args:
            is_needed: Publishes are refused without it, so it need not wait.
        """
        is_paused = now_s < self._paused_until_s.get(follower.member, now_s)
        return (is_needed or not is_paused) and self.ages.age_s(now_s, follower.stored) <= _JOIN_LAG_S
