"""Share `max_in_flight` between the connections of a consumer, as the ready count (RDY) of each.

If there is at least one message for each connection, shares are even. The oldest connections get the remainder. If a
broker's maximum RDY count is below its share, the other connections get the rest.

If there are more connections than messages, some connections have a ready count of 1 and the others 0. A connection
passes its ready count to the one that has waited longest: after `low_rdy_idle_timeout_s` if it is idle, and after
`low_rdy_timeout_s` otherwise. So every broker delivers messages in turn, however many there are.

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
    max_rdy_count: int  # the broker's limit
    draw: float  # random; orders connections that have waited equally long
    since: float  # when the ready count last changed from or to 0
    last_message_at: float
    ready_count: int = 0

    def give(self, count: int, now: float) -> None:
        if bool(count) != bool(self.ready_count):
            self.since = now
        self.ready_count = count


class ReadyDistribution(Generic[Key]):
    """Computes the ready count of every connection. Each call may change `ready_counts`.

    Args:
        settings: How long a connection keeps its ready count while others wait.
        random: Returns numbers in [0, 1). They order the connections, so that the consumers of a channel do not all
            start with the same broker.
    """

    def __init__(self, settings: ConsumerSettings, random: Callable[[], float]) -> None:
        self._settings = settings
        self._random = random
        self._shares: dict[Key, _Share] = {}
        self._limit = 0
        self._scarce_since: float | None = None  # since when there are more connections than messages
        self._not_before = -math.inf

    @property
    def ready_counts(self) -> dict[Key, int]:
        """How many messages each connection may have in flight; oldest connection first."""
        return {key: share.ready_count for key, share in self._shares.items()}

    def add(self, key: Key, max_rdy_count: int, now: float) -> None:
        """Add a connection to a broker with this maximum RDY count."""
        self._shares[key] = _Share(max(0, max_rdy_count), self._random(), now, now)
        self._distribute(now)

    def remove(self, key: Key, now: float) -> None:
        """Remove a lost connection; the others get its share."""
        del self._shares[key]
        self._distribute(now)

    def set_limit(self, limit: int, now: float) -> None:
        """Set the limit of messages in flight over all connections."""
        if limit != self._limit:
            self._limit = limit
            if limit == 0:
                # Forget the order, so that the next attempt goes to a random connection.
                for share in self._shares.values():
                    share.draw = self._random()
            self._distribute(now)

    def record_messages(self, key: Key, now: float) -> None:
        """Record that messages arrived on a connection."""
        self._shares[key].last_message_at = now

    def next_deadline(self) -> float:
        """Return when to call `redistribute` next; infinity: never."""
        if not 0 < self._limit < len(self._shares):
            return math.inf
        due = (min(self._idle_at(share), self._over_at(share)) for share in self._holders())
        return max(self._not_before, min(due, default=math.inf))

    def redistribute(self, now: float, busy: Collection[Key] = ()) -> None:
        """Move ready counts from connections whose time is over to those that have waited longest.

        Connections in `busy` have unanswered messages, so they are not idle.
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
    """Divide `total` as evenly as the maximum of each share allows; the first shares get the remainder."""
    shares = [0] * len(maxima)
    # The smallest maximum first, so that the rest can go to the others. Of equal ones the last first, so that the
    # remainder goes to those with a smaller index.
    order = sorted(range(len(maxima)), key=lambda place: (maxima[place], -place))
    for left, place in zip(range(len(order), 0, -1), order, strict=True):
        shares[place] = min(maxima[place], total // left)
        total -= shares[place]
    return shares
