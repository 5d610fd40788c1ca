"""The rows of `stat`, from the statistics of brokers: counts, and rates between two reports."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from trio_nsq.api.answers import ClusterCounts, Stats
from trio_nsq.fleet.archive import Archive
from trio_nsq.fleet.stats import Queue, TopicStats, add_rates, parse_topics

from ..shared.archives import note_of_archive
from .columns import AGE, DEPTH, NUMBERS, PUBLISHED, RATES, RECORD_KEYS

RowKey = tuple[str, str | None, str | None]
"""The topic, channel and broker of a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """A topic, or, if `channel` is not None, a channel at one moment.

    Attributes:
        values: Numbers by the keys of columns; None where there is no such number. `ingress_rate` counts the messages
            that arrived, `egress_rate` those that were finished or emptied, per second since the last report. Both are
            None in the first report; a topic, which passes each message to every channel, has no egress rate.
        unavailable: Why the topic is unavailable; None: it is available.
        broker: The address, if the row is about one of several brokers.
    """

    topic: str
    channel: str | None
    values: Mapping[str, float | None]
    paused: bool = False
    unavailable: str | None = None
    broker: str | None = None

    @property
    def key(self) -> RowKey:
        return self.topic, self.channel, self.broker

    @property
    def name(self) -> str:
        """`TOPIC` or `TOPIC/CHANNEL`; `total` without a topic."""
        return (self.topic or "total") if self.channel is None else f"{self.topic}/{self.channel}"

    def record(self, time_s: float) -> dict[str, object]:
        """Return the row as a flat object with the Unix time of the report."""
        about = {
            "time": round(time_s, 3),
            "topic": self.topic,
            "channel": self.channel,
            "paused": self.paused,
            "unavailable": self.unavailable,
            "broker": self.broker,
        }
        return {key: about[key] if key in about else self.values.get(key) for key in RECORD_KEYS}


class Sampler:
    """Converts successive statistics of one broker to rows.

    nsq_stat counts messages that leave the queue instead of those that leave the channel for good: a requeued message
    counts once per delivery.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, TopicStats] = {}
        self._before_s = 0.0

    def rows(self, topics: Iterable[Mapping[str, Any]], now_s: float) -> list[Row]:
        """Return the rows for the `topics` of `/stats`: topics by name, each followed by its channels by name.

        `now_s` is the time of the statistics, on a monotonic clock.
        """
        found = parse_topics({"topics": [*topics]})
        add_rates(found, self._before, now_s - self._before_s)
        self._before, self._before_s = found, now_s
        rows = []
        for name, topic in sorted(found.items()):
            rows.append(_row(name, None, topic.queue, topic.depth))
            rows += [_row(name, each, queue, queue.depth) for each, queue in sorted(topic.channels.items())]
        return rows


def _row(topic: str, channel: str | None, queue: Queue, total_depth: int) -> Row:
    raw = queue.raw
    values: dict[str, float | None] = {name: raw.get(name) for name in NUMBERS}
    if not all(value is None or isinstance(value, int | float) for value in values.values()):
        raise TypeError("a count is not a number")
    values[DEPTH.key] = total_depth
    for column, rate in zip(RATES, (queue.in_rate, queue.out_rate), strict=True):
        values[column.key] = None if rate is None else round(rate, 1)
    return Row(topic, channel, values, bool(raw["paused"]), raw.get("unavailable"))


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows of one broker.

    Attributes:
        note: What it says of the cluster that it leads, and of its archive; empty: it has neither.
    """

    rows: list[Row]
    note: str = ""

    @classmethod
    def of(cls, rows: list[Row], stats: Stats) -> Self:
        """Return the rows, and what the answer of `/stats` says besides."""
        notes = []
        if (cluster := stats.get("cluster")) is not None:
            notes.append(_note_of_cluster(cluster))
        if (archive := Archive.of(stats)) is not None:
            notes.append(note_of_archive(archive))
        return cls(rows, "; ".join(notes))


def _note_of_cluster(cluster: ClusterCounts) -> str:
    text = f"cluster {cluster['name']}, {cluster['role']}, epoch {cluster['epoch']}"
    found, members = cluster.get("in_sync", 0), cluster.get("members", 0)
    return text if found >= members else f"{text}, {found} of {members} in sync"


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of all brokers that answered, added up.

    Attributes:
        brokers: The addresses of these brokers.
        sums: A row for each topic and channel.
        parts: By name, the rows of the brokers, in the order of `brokers`.
    """

    brokers: Sequence[str] = ()
    sums: Sequence[Row] = ()
    parts: Mapping[str, Sequence[Row]] = field(default_factory=dict)


def combine(rows_by_broker: Mapping[str, Iterable[Row]]) -> Report:
    """Add up the rows of brokers; paused or unavailable on one broker counts for all."""
    parts: dict[str, list[Row]] = {}
    for broker, rows in rows_by_broker.items():
        for row in rows:
            part = Row(row.topic, row.channel, row.values, row.paused, row.unavailable, broker)
            parts.setdefault(row.name, []).append(part)
    return Report(list(rows_by_broker), [_sum(rows) for rows in parts.values()], parts)


def _sum(rows: Sequence[Row]) -> Row:
    first, *others = rows
    if not others:
        return replace(first, broker=None)
    reasons = dict.fromkeys(row.unavailable for row in rows if row.unavailable is not None)
    paused = any(row.paused for row in rows)
    return Row(first.topic, first.channel, _add_up(rows), paused, "; ".join(reasons) or None)


def _add_up(rows: Iterable[Row]) -> dict[str, float | None]:
    """Return the sum of each number, but the highest age; None if no row has the number."""
    sums: dict[str, float | None] = dict.fromkeys(NUMBERS)
    for row in rows:
        for key, value in row.values.items():
            if value is not None:
                known = sums[key]
                sums[key] = value if known is None else max(known, value) if key == AGE.key else known + value
    for column in RATES:
        if (known := sums[column.key]) is not None:
            sums[column.key] = round(known, 1)
    return sums


def published(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each topic: its own, or, if that is not shown, its channel with the most messages."""
    found: dict[str, Row] = {}
    for row in rows:
        best = found.get(row.topic)
        if (
            row.channel is None
            or best is None
            or (best.channel is not None and _messages(row) > _messages(best))
        ):
            found[row.topic] = row
    return list(found.values())


def _waiting(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows that count each waiting message once: a topic's, or, if that is not shown, its channels'."""
    topics = {row.topic for row in rows if row.channel is None}
    return [row for row in rows if row.channel is None or row.topic not in topics]


def _messages(row: Row) -> float:
    return row.values.get("message_count") or 0


def total(rows: Sequence[Row]) -> Row:
    """Return the total of topics and channels, without a name.

    Messages and their rate are counted once, as they were published. The other numbers count the copies in all
    channels.
    """
    once = _add_up(published(rows))
    values = _add_up(rows) | {column.key: once[column.key] for column in PUBLISHED}
    return Row("", None, values | {DEPTH.key: _add_up(_waiting(rows))[DEPTH.key]})
