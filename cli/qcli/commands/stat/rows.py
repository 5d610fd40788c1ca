"""The rows of `stat`, from the statistics of brokers: counts, and rates between two reports."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...broker.brokers import Answers, Brokers
from ...broker.refusals import missing
from ...framework.params import Source

Key = tuple[str, str | None]

COUNTS = {
    "depth": "depth",
    "backend_depth": "backend",
    "in_flight_count": "in flight",
    "deferred_count": "deferred",
    "requeue_count": "requeued",
    "timeout_count": "timed out",
    "message_count": "messages",
    "client_count": "clients",
}
"""Heading by nsqd's name. A topic has only depth, backend_depth and message_count."""
RARE_COUNTS = {
    "expired_count": "expired",
    "dropped_count": "dropped",
    "dead_letter_count": "dead",
    "given_up_count": "given up",
}
"""Heading by name, for messages that were removed unfinished; only if the settings allow it."""

PAUSED = ""
"""The heading of the column that marks paused or unavailable rows."""
HEADINGS = ("topic", "channel", *COUNTS.values(), "in/s", "out/s", PAUSED)
NARROW_HEADINGS = {
    "backend": "be",
    "in flight": "inflt",
    "deferred": "def",
    "requeued": "req",
    "timed out": "t-o",
    "messages": "msgs",
    "clients": "cl",
    "expired": "exp",
    "dropped": "drop",
    "given up": "g-up",
}
"""Shorter headings for a narrow screen, in the words of nsqd's own statistics."""
LEFT_OUT_FIRST = (
    "backend",
    "timed out",
    "requeued",
    "messages",
    "deferred",
    "clients",
    *RARE_COUNTS.values(),
    "in/s",
    "in flight",
    "out/s",
    PAUSED,
)
"""Columns that an even narrower screen leaves out, in this order."""
NAME_COLUMNS = 2
GAP = 2
"""Blanks between columns."""
MIN_NAME_WIDTH = 4
RECORD_KEYS = (
    *("time", "topic", "channel", *COUNTS, "paused", "ingress_rate", "egress_rate", *RARE_COUNTS),
    "unavailable",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A topic, or, if `channel` is not None, a channel at one moment.

    Attributes:
        counts: By nsqd's names; None where a topic has no such count.
        ingress_rate: Messages that arrived, per second, since the last report; None in the first report.
        egress_rate: Messages that were finished or emptied, per second, since the last report; also None for a topic,
            which passes each message to every channel.
        rare: `RARE_COUNTS` by name; None if there is no such count.
        unavailable: Why the topic is unavailable; None: it is available.
    """

    topic: str
    channel: str | None
    counts: dict[str, int | None]
    paused: bool
    ingress_rate: float | None
    egress_rate: float | None
    rare: dict[str, int | None]
    unavailable: str | None = None

    def record(self, time_s: float) -> dict[str, object]:
        """Return the row as a flat object with the Unix time of the report."""
        names = (round(time_s, 3), self.topic, self.channel)
        rates = (self.ingress_rate, self.egress_rate)
        values = (*names, *self.counts.values(), self.paused, *rates, *self.rare.values(), self.unavailable)
        return dict(zip(RECORD_KEYS, values, strict=True))

    def cells(self, rare: Sequence[str], *, narrow: bool) -> list[str]:
        """Return the row as text for `HEADINGS`, with some rare counts before the last column."""
        rates = (self.ingress_rate, self.egress_rate)
        numbers = [*self.counts.values(), *rates, *(self.rare[name] for name in rare)]
        mark = "unavailable" if self.unavailable else "paused" if self.paused else ""
        return [
            self.topic,
            self.channel or "",
            *("" if each is None else _short(int(each)) if narrow else f"{each:,.0f}" for each in numbers),
            mark[:1].upper() if narrow else mark,
        ]


def unavailable_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each unavailable topic."""
    return [f"Topic {row.topic} is unavailable: {row.unavailable}" for row in rows if row.unavailable]


def _short(number: int) -> str:
    """Format a count in at most five characters."""
    for unit in ("", "k", "M", "G"):
        if number < 10_000:
            return f"{number}{unit}"
        number //= 1000
    return f"{number}T"


def table(rows: Sequence[Row], width: int | None) -> list[list[str]]:
    """Return headings and rows as text.

    If they do not fit into `width`, headings and numbers become shorter, then columns are left out, then
    names are shortened. None: no limit.
    """
    rare = [name for name in RARE_COUNTS if any(row.rare[name] is not None for row in rows)]
    headings = [*HEADINGS[:-1], *(RARE_COUNTS[name] for name in rare), PAUSED]
    full = [headings, *(row.cells(rare, narrow=False) for row in rows)]
    if width is None or sum(_widths(full)) - GAP <= width:
        return full
    narrow = [
        [NARROW_HEADINGS.get(heading, heading) for heading in headings],
        *(row.cells(rare, narrow=True) for row in rows),
    ]
    widths = _widths(narrow)
    left_out: set[int] = set()
    for index in (headings.index(heading) for heading in LEFT_OUT_FIRST if heading in headings):
        if sum(widths) - GAP <= width:
            break
        widths[index] = 0
        left_out.add(index)
    names = [width - GAP for width in widths[:NAME_COLUMNS]]
    room = width - (sum(widths) - GAP - sum(names))
    while sum(names) > room and max(names) > MIN_NAME_WIDTH:
        names[names.index(max(names))] -= 1
    return [
        [
            _shortened(cell, names[index]) if index < NAME_COLUMNS else cell
            for index, cell in enumerate(line)
            if index not in left_out
        ]
        for line in narrow
    ]


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column with its gap; 0 for an empty column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [width + GAP if width else 0 for width in widths]


def _shortened(text: str, width: int) -> str:
    """Cut the middle of a name, because names often differ at the end only."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def summed(looks: Sequence[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Add up the `topics` of `/stats` of several brokers; paused or unavailable on one broker counts for all."""
    topics: dict[str, dict[str, Any]] = {}
    channels: dict[Key, dict[str, Any]] = {}
    for topic in itertools.chain.from_iterable(looks):
        name = topic["topic_name"]
        _add(topics.setdefault(name, {"topic_name": name}), topic)
        for channel in topic["channels"] or []:
            key = (name, channel["channel_name"])
            _add(channels.setdefault(key, {"channel_name": key[1]}), channel)
    for name, topic in topics.items():
        topic["channels"] = [channel for key, channel in channels.items() if key[0] == name]
    return list(topics.values())


def _add(total: dict[str, Any], stats: Mapping[str, Any]) -> None:
    total["paused"] = total.get("paused", False) or stats["paused"]
    for count in (*COUNTS, *RARE_COUNTS):
        if stats.get(count) is not None:
            total[count] = total.get(count, 0) + stats[count]
    if reason := stats.get("unavailable"):
        total["unavailable"] = f"{total['unavailable']}; {reason}" if "unavailable" in total else reason


class Sampler:
    """Converts successive statistics to rows of a topic or channel, or, without a source, of all topics."""

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._before: dict[Key, Mapping[str, Any]] = {}
        self._before_s = 0.0

    def rows(self, topics: Iterable[Mapping[str, Any]], now_s: float) -> list[Row]:
        """Return the rows for the `topics` of `/stats`: topics by name, each followed by its channels by name.

        `now_s` is the time of the statistics, on a monotonic clock.
        """
        elapsed_s = now_s - self._before_s
        seen: dict[Key, Mapping[str, Any]] = {}
        for topic in sorted(topics, key=lambda topic: str(topic["topic_name"])):
            if self._source is None or self._source.channel is None or "unavailable" in topic:
                seen[topic["topic_name"], None] = topic
            for channel in sorted(topic["channels"] or [], key=lambda channel: str(channel["channel_name"])):
                if self._source is None or self._source.channel in (None, channel["channel_name"]):
                    seen[topic["topic_name"], channel["channel_name"]] = channel
        rows = [_row(key, stats, self._before.get(key), elapsed_s) for key, stats in seen.items()]
        self._before, self._before_s = seen, now_s
        return rows


def _row(key: Key, stats: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> Row:
    ingress_rate = egress_rate = None
    # A lower count means that the broker was restarted.
    if before is not None and elapsed_s > 0 and stats["message_count"] >= before["message_count"]:
        ingress_rate = round((stats["message_count"] - before["message_count"]) / elapsed_s, 1)
        if key[1] is not None:
            egress_rate = round(max(0, _dealt_with(stats) - _dealt_with(before)) / elapsed_s, 1)
    counts = {name: stats.get(name) for name in COUNTS}
    rare = {name: stats.get(name) for name in RARE_COUNTS}
    paused, unavailable = bool(stats["paused"]), stats.get("unavailable")
    return Row(*key, counts, paused, ingress_rate, egress_rate, rare, unavailable)


def _dealt_with(stats: Mapping[str, Any]) -> int:
    """Return the number of messages that left a channel for good.

    nsq_stat counts messages that leave the queue instead: a requeued message counts once per delivery.
    """
    still_there = int(stats["depth"]) + int(stats["in_flight_count"]) + int(stats["deferred_count"])
    return int(stats["message_count"]) - still_there


class Reports:
    """Successive reports of one broker or several, on a topic or channel, or, without a source, on all topics.

    Attributes:
        answers: What the brokers answered last; `check` raises the failures of those that did not.
    """

    answers: Answers[list[dict[str, Any]]]

    def __init__(self, brokers: Brokers, source: Source | None) -> None:
        self._brokers = brokers
        self._source = source
        self._sampler = Sampler(source)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The brokers' addresses."""
        return self._brokers.addresses

    def take(self) -> list[Row]:
        """Return the rows of one report. Raises Failure: no broker answers, or no broker has the source."""
        from ...broker.admin_client import AdminClient

        wanted = self._source or (None, None)
        self.answers = self._brokers.read(lambda address: AdminClient(address).stats(*wanted)["topics"])
        topics = summed(list(self.answers.results.values()))
        rows = self._sampler.rows(topics, time.monotonic())
        if self._source is not None and not rows:
            self.answers.check()
            raise missing(self._source, *self.addresses)
        return rows
