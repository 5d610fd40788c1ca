"""The dead letters of a topic on one broker: count, requeue and drop them, in pages. Procedures, without IO."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..api import broker as api
from ..api.answers import LetterCount
from ..api.request import Procedure, ask, following

CHANNEL = "dead-letters"
"""The channel of a dead-letter topic that holds the letters."""
REASONS = ("requeued", "timed_out", "connection_lost")
_IDS_AT_ONCE = 500
"""What a broker accepts in a request."""


class LetterFilter(NamedTuple):
    """The letters of a topic, of an origin (`TOPIC` or `TOPIC/CHANNEL`), and with a reason; None: all."""

    topic: str
    origin: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Where letters come from; empty texts: a producer published them to the dead-letter topic."""

    topic: str
    channel: str
    reason: str

    @property
    def name(self) -> str:
        """`TOPIC/CHANNEL`."""
        return f"{self.topic}/{self.channel}" if self.channel else self.topic


@dataclass(slots=True)
class LetterCounts:
    """How many letters there are on one broker.

    Attributes:
        rows: Their numbers and times, by origin.
        in_flight: Letters that consumers of the dead-letter topic have: they are in no other number.
        is_complete: Whether all were counted.
    """

    rows: dict[LetterGroup, LetterCount] = field(default_factory=dict)
    in_flight: int = 0
    is_complete: bool = True

    @property
    def total(self) -> int:
        return sum(row["count"] for row in self.rows.values())


@dataclass(slots=True)
class Moved:
    """What one broker requeued or dropped.

    Attributes:
        done: The number of these letters.
        kept: The numbers of letters that cannot be requeued, by reason.
        next_sequence: Where to continue; None: it is finished.
    """

    done: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    next_sequence: int | None = None

    @property
    def seen(self) -> int:
        return self.done + self.kept.total()


def count(
    chosen: LetterFilter, goes_on: Callable[[LetterCounts], bool] = lambda counted: True
) -> Procedure[LetterCounts]:
    """Count letters by origin and reason.

    Args:
        goes_on: Asked after each page but the last one.
    """
    counted = LetterCounts()
    start: int | None = 0
    while start is not None:
        if start and not goes_on(counted):
            counted.is_complete = False
            break
        answer = yield from ask(api.count_dead_letters(*chosen, start))
        counted.in_flight = answer["in_flight"]
        for row in answer["origins"]:
            origin = LetterGroup(row["topic"] or "", row["channel"] or "", row["reason"] or "")
            known = counted.rows.setdefault(origin, {**row, "count": 0})
            known["count"] += row["count"]
            known["first_ns"] = min(known["first_ns"], row["first_ns"])
            known["last_ns"] = max(known["last_ns"], row["last_ns"])
        start = following(start, answer["next_sequence"])
    return counted


def move(
    chosen: LetterFilter,
    verb: str,
    moved: Moved,
    *,
    to: str | None = None,
    ids: Sequence[str] = (),
    first: int = 0,
    at_most: int | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> Procedure[None]:
    """Requeue or drop letters.

    Args:
        verb: `requeue` or `drop`.
        moved: Gets what was done, also if a request fails.
        to: As for `api.move_dead_letters`.
        ids: Only these; none: all that are chosen.
        first: Begin at this sequence.
        at_most: The maximum; None: all.
        goes_on: Asked before each request.
    """
    for at in range(0, max(1, len(ids)), _IDS_AT_ONCE):
        page = ids[at : at + _IDS_AT_ONCE]
        start: int | None = first
        while start is not None:
            left = None if at_most is None else at_most - moved.seen
            if left is not None and left <= 0:
                return
            if not goes_on():
                moved.next_sequence = start
                return
            request = api.move_dead_letters[verb](*chosen, start, left, page, to)
            answer = yield from ask(request)
            moved.done += answer["done"]
            for row in answer["kept"]:
                moved.kept[row["why"]] += row["count"]
            start = following(start, answer["next_sequence"])
