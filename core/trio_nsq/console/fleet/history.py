"""The last hour of a fleet, for charts: bounded, and without clock or IO.

The watcher calls `observe` with each snapshot; the first of each 30 seconds appends a value to each line.

NSQ counts what came into a topic or channel, but not what left. So what left a channel is: came in, minus what is
queued, in flight or deferred. It has left because it was finished, emptied, or dropped.
"""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...fleet.snapshot import Snapshot
from ...fleet.stats import Queue

STEP_S = 30.0
STEPS = 120
"""An hour."""
MAX_SERIES = 20_000
"""Topics and channels that have lines, about 2 KB each. One that was always empty and idle needs no memory."""
_GAP = (math.nan,) * 4
_UNKNOWN = (math.nan, math.nan)

Key = tuple[str, str]
"""A topic and a channel. The channel is empty for the topic itself; both are empty for the fleet."""
_FLEET: Key = ("", "")


@dataclass(frozen=True, slots=True)
class Series:
    """The last hour of a topic, a channel or the fleet: `STEPS` values each, oldest first; NaN: no answer."""

    rate_in: list[float]
    rate_out: list[float]
    depth: list[float]
    oldest_s: list[float]

    def until_now(
        self, in_rate: float | None, out_rate: float | None, depth: int, oldest_age_ms: int | None
    ) -> "Series":
        """Return the series with newer last values, so that a chart agrees with the numbers beside it.

        None: unknown; the last value stays.
        """
        oldest_s = None if oldest_age_ms is None else oldest_age_ms / 1000
        newest = (in_rate, out_rate, depth, oldest_s)
        lines = (self.rate_in, self.rate_out, self.depth, self.oldest_s)
        return Series(
            *(
                line if value is None else [*line[:-1], value]
                for line, value in zip(lines, newest, strict=True)
            )
        )


class _Count(NamedTuple):
    """The numbers of a topic or channel at one time. A tuple, because a big fleet needs many of them at once."""

    came: int
    left: int
    depth: int
    oldest_s: float
    brokers: tuple[str, ...]


class _Rings:
    """Four rings in one array: rate in, rate out, depth and age of the oldest message."""

    __slots__ = ("last_step", "values")

    def __init__(self, values: "array[float]", last_step: int) -> None:
        self.values = array("f", values)
        self.last_step = last_step  # when it had values

    def put(self, at: int, values: tuple[float, float, float, float]) -> None:
        rings = self.values
        rings[at], rings[STEPS + at], rings[2 * STEPS + at], rings[3 * STEPS + at] = values

    def line(self, ring: int, newest: int) -> list[float]:
        values = self.values[ring * STEPS : (ring + 1) * STEPS]
        return [*values[newest + 1 :], *values[: newest + 1]]


class History:
    """The lines of an hour. One for a console."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._rings: dict[Key, _Rings] = {}
        # The rings of all that have none of their own, because no value was above 0: 0 where the fleet answered.
        self._idle = _Rings(array("f", [math.nan]) * (4 * STEPS), 0)
        self._counts: dict[Key, _Count] = {}
        self._taken_at_s = math.nan
        self._step = -STEPS

    def observe(self, snapshot: Snapshot) -> None:
        """Append the numbers of a snapshot, if it is the first of its step. Steps without a snapshot become gaps."""
        step = int(snapshot.taken_at_s // STEP_S)
        if step <= self._step:
            return
        for key in [key for key, rings in self._rings.items() if step - rings.last_step >= STEPS]:
            del self._rings[key]  # deleted, or without answer for an hour
        missed = range(max(self._step + 1, step - STEPS + 1), step + 1)
        for rings in (self._idle, *self._rings.values()):
            for each in missed:
                rings.put(each % STEPS, _GAP)
        counts, kept = dict(_counts(snapshot)), _kept_depths(snapshot) if snapshot.reachable else {}
        elapsed_s = snapshot.taken_at_s - self._taken_at_s
        rates = {key: _rates(self._counts.get(key), count, elapsed_s) for key, count in counts.items()}
        for key, count in counts.items():
            self._append(key, step, (*rates[key], float(count.depth + kept.pop(key, 0)), count.oldest_s))
        fleet_depth = sum(count.depth for key, count in counts.items() if not key[1]) + kept.pop(_FLEET, 0)
        for key, depth in kept.items():
            self._append(key, step, (*_UNKNOWN, float(depth), math.nan))
        if snapshot.reachable:
            unknown = math.nan if math.isnan(elapsed_s) else 0.0
            self._idle.put(step % STEPS, (unknown, unknown, 0.0, 0.0))
            topics = [count for key, count in counts.items() if not key[1]]
            known = [rates[key] for key in counts if not key[1] and not math.isnan(rates[key][0])]
            into, out = (
                (unknown, unknown) if not known else (sum(r[0] for r in known), sum(r[1] for r in known))
            )
            ages = [count.oldest_s for count in topics if not math.isnan(count.oldest_s)]
            oldest_s = max(ages, default=math.nan if topics else 0.0)
            self._append(_FLEET, step, (into, out, float(fleet_depth), oldest_s))
        self._counts, self._taken_at_s, self._step = counts, snapshot.taken_at_s, step

    def series(self, topic: str = "", channel: str = "") -> Series:
        rings, newest = self._rings.get((topic, channel), self._idle), self._step % STEPS
        return Series(*(rings.line(ring, newest) for ring in range(4)))

    def rate_in(self, topic: str, channel: str = "") -> list[float]:
        """Return that line of `series`: quicker, for the sparklines of tables."""
        return self._rings.get((topic, channel), self._idle).line(0, self._step % STEPS)

    def depth(self, topic: str, channel: str = "") -> list[float]:
        """Return that line of `series`: quicker, for the sparklines of tables."""
        return self._rings.get((topic, channel), self._idle).line(2, self._step % STEPS)

    def _append(self, key: Key, step: int, values: tuple[float, float, float, float]) -> None:
        rings = self._rings.get(key)
        if rings is None:
            into, out, depth, oldest_s = values
            is_idle = not (into > 0 or out > 0 or depth > 0 or oldest_s > 0)
            if is_idle or len(self._rings) >= self._max_series:
                return
            rings = self._rings[key] = _Rings(self._idle.values, step)
        rings.put(step % STEPS, values)
        rings.last_step = step


def _counts(snapshot: Snapshot) -> Iterator[tuple[Key, _Count]]:
    for name, topic in snapshot.topics.items():
        left, ages = 0, []
        for channel in topic.channels.values():
            count = _count(channel.sum, (*channel.parts,))
            yield (name, channel.name), count
            left += count.left
            ages.append(count.oldest_s)
        oldest_s = max((age for age in ages if not math.isnan(age)), default=math.nan if ages else 0.0)
        yield (name, ""), _Count(topic.sum.messages, left, topic.depth, oldest_s, (*topic.parts,))


def _kept_depths(snapshot: Snapshot) -> dict[Key, int]:
    """Return the last known depths on brokers that do not answer: their messages still wait there."""
    found: dict[Key, int] = {}
    for broker in snapshot.brokers.values():
        if broker.error:
            for name, topic in broker.topics.items():
                for channel, queue in topic.channels.items():
                    found[name, channel] = found.get((name, channel), 0) + queue.depth
                for key in ((name, ""), _FLEET):
                    found[key] = found.get(key, 0) + topic.depth
    return found


def _count(queue: Queue, brokers: tuple[str, ...]) -> _Count:
    age_ms = queue.oldest_age_ms
    oldest_s = math.nan if age_ms is None else age_ms / 1000
    return _Count(queue.messages, queue.messages - queue.waiting, queue.depth, oldest_s, brokers)


def _rates(before: _Count | None, now: _Count, elapsed_s: float) -> tuple[float, float]:
    """Return messages per second in and out; unknown if other brokers answered than before, or one was restarted."""
    if before is None or before.brokers != now.brokers or now.came < before.came:
        return _UNKNOWN
    # Fewer have left than before after a seek backwards.
    return (now.came - before.came) / elapsed_s, max(0, now.left - before.left) / elapsed_s
