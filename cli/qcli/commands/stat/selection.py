"""Which rows `stat` shows, and in which order: patterns of names, conditions on numbers, and sorting."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import eq, ge, gt, le, lt, ne

import click

from ...framework.params import Source, long_duration, source
from .columns import AGE, COLUMNS, Column, column_named
from .rows import Report, Row

_GLOB = re.compile(r"[*?\[\]!]")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": ge,
    "<=": le,
    "!=": ne,
    ">": gt,
    "<": lt,
    "=": eq,
}
_CONDITION = re.compile(rf"([\w/ -]+?)\s*({'|'.join(_COMPARISONS)})\s*(\S*)")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)")
_UNITS = {"": 1, "k": 1000, "M": 10**6, "G": 10**9}


Test = Callable[[Row], bool]
"""Decides whether a row is shown."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Topics and all of their channels, or, if `channel` is not None, channels; the shell's patterns are allowed."""

    topic: str
    channel: str | None

    @property
    def exact(self) -> Source | None:
        """The one topic or channel that this names; None: it is a pattern."""
        return None if _GLOB.search(str(self)) else Source(self.topic, self.channel)

    def matches(self, row: Row) -> bool:
        if not fnmatchcase(row.topic, self.topic):
            return False
        if self.channel is None:
            return True
        # An unavailable topic has no channels: its row says why.
        return bool(row.unavailable) if row.channel is None else fnmatchcase(row.channel, self.channel)

    def __str__(self) -> str:
        return str(Source(self.topic, self.channel))


def pattern(text: str) -> Pattern:
    """Parse `TOPIC` or `TOPIC/CHANNEL`, both with the shell's patterns `*`, `?` and `[...]`."""
    if not _GLOB.search(text):
        return Pattern(*source(text))
    topic, slash, channel = text.partition("/")
    if not topic or (slash and not channel) or "/" in channel:
        raise click.BadParameter(f"{text!r} is not TOPIC or TOPIC/CHANNEL, such as 'click*' or '*/archive'.")
    return Pattern(topic, channel if slash else None)


def _named(text: str) -> Test:
    """Return a test for a part of the name, in upper or lower case, or for a pattern of the whole name."""
    wanted = text.lower() if _GLOB.search(text) else f"*{text.lower()}*"
    return lambda row: fnmatchcase(row.name.lower(), wanted)


def condition(text: str) -> Test:
    """Parse a condition such as `depth>0`, `clients=0`, `age>5m` or `paused`. A row without the number is not shown."""
    if text in ("paused", "unavailable"):
        return lambda row: bool(row.paused if text == "paused" else row.unavailable)
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise click.BadParameter(
            f"{text!r} is not a condition. Write 'depth>0', 'clients=0', 'age>5m', paused or unavailable."
        )
    name, comparison, value = found.groups()
    column = column_named(name)
    if column is None:
        names = ", ".join(each.name for each in COLUMNS)
        raise click.BadParameter(f"{name!r} is not a column. Columns: {names}.")
    if column is AGE:
        number: float = long_duration(value)
    else:
        matched = _NUMBER.fullmatch(value)
        if matched is None:
            raise click.BadParameter(f"{value!r} is not a number such as 0, 1.5 or 10k.")
        number = float(matched[1]) * _UNITS[matched[2]]
    key, compare = column.key, _COMPARISONS[comparison]
    return lambda row: (value := row.values.get(key)) is not None and compare(value, number)


def typed_tests(text: str) -> list[Test]:
    """Parse what the user types after `/`: conditions and parts of names. Leaves out unfinished conditions."""
    tests: list[Test] = []
    for word in text.split():
        try:
            tests.append(condition(word))
        except click.BadParameter:
            if not re.search("[<>=]", word):
                tests.append(_named(word))
    return tests


def ignored_words(text: str) -> list[str]:
    """Return the words that `typed_tests` leaves out."""
    return [word for word in text.split() if not typed_tests(word)]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows: topics, each followed by its channels.

    Attributes:
        column: Sort by this column, the highest number first, topics by the first row of each; None: sort by name.
        reverse: The opposite order.
    """

    column: Column | None = None
    reverse: bool = False

    def sorted(self, rows: Sequence[Row]) -> list[Row]:
        topics: dict[str, list[Row]] = {}
        for row in sorted(rows, key=lambda row: (row.topic, row.channel or ""), reverse=self._from_z):
            topics.setdefault(row.topic, []).append(row)
        if self.column is not None:
            for group in topics.values():
                group.sort(key=self._rank)
        groups = list(topics.values())
        if self.column is not None:
            groups.sort(key=lambda group: self._rank(group[0]))
        return [row for group in groups for row in sorted(group, key=lambda row: row.channel is not None)]

    @property
    def _from_z(self) -> bool:
        return self.column is None and self.reverse

    def _rank(self, row: Row) -> tuple[bool, float]:
        value = row.values.get(self.column.key) if self.column is not None else None
        if value is None:
            return True, 0  # last, in either direction
        return False, value if self.reverse else -value


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows that match one of the patterns, if there are any, and pass all tests; in this order."""

    patterns: tuple[Pattern, ...] = ()
    tests: tuple[Test, ...] = ()
    order: Order = Order()

    def named(self, rows: Sequence[Row]) -> list[Row]:
        if not self.patterns:
            return list(rows)
        return [row for row in rows if any(each.matches(row) for each in self.patterns)]

    def rows(self, report: Report) -> list[Row]:
        return self.order.sorted(
            [row for row in self.named(report.sums) if all(meets(row) for meets in self.tests)]
        )

    def missing(self, report: Report) -> list[Pattern]:
        return [each for each in self.patterns if not any(each.matches(row) for row in report.sums)]


def with_parts(rows: Sequence[Row], report: Report) -> list[Row]:
    """Return the rows, each followed by its brokers' rows."""
    return [each for row in rows for each in (row, *report.parts[row.name])]
