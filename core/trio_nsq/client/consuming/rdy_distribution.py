"""How `max_in_flight` is shared between the connections of a consumer: the ready count (RDY) of each.

Enough for one each: even shares, the remainder to those connected longest. What a broker does not allow goes to others.

Not enough for one each: as many connections as there may be messages have a ready count of 1, and pass it on to those
that have waited longest. One without messages does after `low_rdy_idle_timeout_s`, one with messages after
`low_rdy_timeout_s`. So every broker has its turn, however many there are.

No IO; time is a parameter, in seconds of any monotonic clock.
"""

import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .options import ConsumerSettings

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Share:
    """The share of one connection."""

    max_rdy_count: int  # the most its broker allows
    draw: float  # decides between connections that have waited equally long
    since: float  # when the ready count last changed from or to 0
    last_message_at: float
    ready_count: int = 0

    def give(self, count: int, now: float) -> None:
        if bool(count) != bool(self.ready_count):
            self.since = now
        self.ready_count = count


class ReadyDistribution(Generic[Key]):
    """The ready count of every connection. After each call `ready_counts` may have changed.

    Args:
        settings: How long a connection keeps what others wait for.
        random: Returns numbers in [0, 1). They decide which connection comes first, so that the consumers of a channel
            do not all ask the same broker.
    """

    def __init__(self, settings: ConsumerSettings, random: Callable[[], float]) -> None:
        self._settings = settings
        self._random = random
        self._shares: dict[Key, _Share] = {}
        self._limit = 0
        self._scarce_since: float | None = None  # when there began to be less than one for each
        self._not_before = -math.inf

    @property
    def ready_counts(self) -> dict[Key, int]:
        """How many messages each connection may have in flight; connections in the order in which they were added."""
        return {key: share.ready_count for key, share in self._shares.items()}

    def add(self, key: Key, max_rdy_count: int, now: float) -> None:
        """A connection was made, to a broker that allows at most so much."""
        self._shares[key] = _Share(max(0, max_rdy_count), self._random(), now, now)
        self._distribute(now)

    def remove(self, key: Key, now: float) -> None:
        """A connection was lost; its share goes to the others."""
        del self._shares[key]
        self._distribute(now)

    def set_limit(self, limit: int, now: float) -> None:
        """At most so many messages in flight from now on, over all connections."""
        if limit != self._limit:
            self._limit = limit
            if limit == 0:
                # Whose turn it was is forgotten, so that the next one to try is any of them.
                for share in self._shares.values():
                    share.draw = self._random()
            self._distribute(now)

    def record_messages(self, key: Key, now: float) -> None:
        """Messages came."""
        self._shares[key].last_message_at = now

    def next_deadline(self) -> float:
        """When `redistribute` has something to do, as far as is known now; infinity: never."""
        if not 0 < self._limit < len(self._shares):
            return math.inf
        due = (min(self._idle_at(share), self._over_at(share)) for share in self._holders())
        return max(self._not_before, min(due, default=math.inf))

    def redistribute(self, now: float, busy: Collection[Key] = ()) -> None:
        """Take from those whose time is up, and give to those that have waited longest.

        The `busy` ones have messages that are not answered: they are not idle.
        """
        if now < self.next_deadline():
            return
        self._not_before = now + self._settings.rdy_redistribute_interval_s
        due = [
            share
            for key, share in self._shares.items()
            if share.ready_count
            and (now >= self._over_at(share) or (now >= self._idle_at(share) and key not in busy))
        ]
        due.sort(key=lambda share: share.since)
        for share in due[: len(self._shares) - self._limit]:
            share.give(0, now)
        self._distribute(now)

    def _idle_at(self, share: _Share) -> float:
        return max(share.since, share.last_message_at) + self._settings.low_rdy_idle_timeout_s

    def _over_at(self, share: _Share) -> float:
        return max(share.since, self._scarce_since or share.since) + self._settings.low_rdy_timeout_s

    def _holders(self) -> list[_Share]:
        return [share for share in self._shares.values() if share.ready_count]

    def _distribute(self, now: float) -> None:
        shares = list(self._shares.values())
        if len(shares) <= self._limit:
            even = even_shares(self._limit, [share.max_rdy_count for share in shares])
            for share, count in zip(shares, even, strict=True):
                share.give(count, now)
            self._scarce_since = None
            return
        if self._scarce_since is None:
            self._scarce_since = now
        holders = sorted(self._holders(), key=lambda share: share.since, reverse=True)
        waiting = [share for share in shares if not share.ready_count and share.max_rdy_count]
        waiting.sort(key=lambda share: (share.since, share.draw))
        chosen = {id(share) for share in [*holders, *waiting][: self._limit]}
        for share in shares:
            share.give(int(id(share) in chosen), now)


def even_shares(total: int, maxima: list[int]) -> list[int]:
    """Divide `total` into shares as even as the maximum of each allows; of those alike, the earlier get more."""
    shares = [0] * len(maxima)
    # The smallest first: the others get what these cannot take. Of equal ones the last first: the remainder goes to
    # those that come later in this order.
    order = sorted(range(len(maxima)), key=lambda place: (maxima[place], -place))
    for left, place in zip(range(len(order), 0, -1), order, strict=True):
        shares[place] = min(maxima[place], total // left)
        total -= shares[place]
    return shares
