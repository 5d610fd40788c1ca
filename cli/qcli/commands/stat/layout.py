"""The table of `stat`: as plain text, and for the width of a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from trio_nsq.text.wording import printable

from ...framework.output import plain_table
from ...terminal.figures import shortened
from .columns import COLUMNS, LEFT_OUT_FIRST, Column
from .rows import Report, Row

INDENT = "  "
LEAST_WIDTH = 3
"""A column has at least this width: otherwise the table would move each time when a small number changes."""
GOOD_NAME_WIDTH = 24
"""Names are cut to this width before numbers are shortened or columns are narrowed."""
LEAST_NAME_WIDTH = 14
"""Names are cut to this width before columns are left out."""
TREND_WIDTH = 10


def shown_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns without those of rare numbers that no row has."""
    return [
        column
        for column in COLUMNS
        if not column.rare or any(row.values.get(column.key) is not None for row in rows)
    ]


def plain(rows: Sequence[Row], total: Row | None) -> str:
    """Return the whole table for a pipe: each line has the topic and the channel."""
    columns = shown_columns(rows)
    brokers = any(row.broker is not None for row in rows)
    names = ["topic", "channel", *(["broker"] if brokers else [])]
    lines = [[*names, *(column.heading for column in columns), ""]]
    for row in (*rows, *([total] if total else [])):
        about = [row.topic or row.name, row.channel or "", *([row.broker or ""] if brokers else [])]
        lines.append([*about, *(_text(row, column) for column in columns), _mark(row)])
    return plain_table(lines, len(names))


def unavailable_lines(rows: Sequence[Row], report: Report) -> list[str]:
    """Return a line for each unavailable topic of these rows, on each broker."""
    return [
        f"Topic {row.topic} is unavailable{f' on {part.broker}' * (len(report.brokers) > 1)}: {part.unavailable}"
        for row in rows
        if row.unavailable and row.broker is None
        for part in report.parts[row.name]
        if part.unavailable
    ]


def with_topics(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a row of its topic, without numbers, before channels that are shown without it."""
    found: list[Row] = []
    topic = None
    for row in rows:
        if row.topic != topic and row.channel is not None:
            found.append(Row(row.topic, None, {}))
        topic = row.topic
        found.append(row)
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """A table as a tree, with the channels below their topic, that fits into a width.

    Attributes:
        width: The width of all lines; what does not fit is cut.
        columns: The columns, and the width of each.
        short: Whether headings and numbers are short.
        gap: Blanks between columns.
        trends: Whether there is room for a series of each rate.
    """

    width: int
    name_width: int
    columns: list[tuple[Column, int]]
    short: bool
    gap: int
    unicode: bool
    trends: bool = False

    def heading(self) -> str:
        headings = [
            (column.short_heading if self.short else column.heading).rjust(width)
            for column, width in self.columns
        ]
        trends = [text.rjust(TREND_WIDTH) for text in ("in trend", "out trend")] if self.trends else []
        return self._line("topic/channel", headings, trends, "")

    def line(self, row: Row, trends: Sequence[str] = ()) -> str:
        """Return the line of a row; `trends` are the series of its rates, `TREND_WIDTH` wide."""
        texts = [_text(row, column, short=self.short).rjust(width) for column, width in self.columns]
        mark = _mark(row)
        return self._line(
            _label(row), texts, trends if self.trends else (), mark[:1].upper() if self.short else mark
        )

    def _line(self, name: str, texts: Sequence[str], trends: Sequence[str], mark: str) -> str:
        name = shortened(name, self.name_width, unicode=self.unicode).ljust(self.name_width)
        return (" " * self.gap).join([name, *texts, *trends, mark]).rstrip()[: self.width]


def lay_out(rows: Sequence[Row], total: Row, width: int, *, unicode: bool, trends: bool = False) -> Layout:
    """Choose the layout for all rows of a report, so that nothing moves when the user scrolls.

    If the table does not fit, names are cut, then headings and numbers become shorter, then columns are left out.
    """
    columns = shown_columns(rows)
    longest = max(len(_label(row)) for row in (*rows, Row("topic/channel", None, {})))
    mark = max((len(_mark(row)) for row in rows), default=0)
    full, short = (_widths(columns, (*rows, total), short=each) for each in (False, True))

    def room(columns: list[tuple[Column, int]], mark: int, gap: int) -> int:
        """Return the width that is left for names."""
        return width - sum(gap + width for _, width in columns) - (gap + mark if mark else 0)

    for chosen, each_mark, is_short, gap, least in (
        (full, mark, False, 2, GOOD_NAME_WIDTH),
        (short, min(mark, 1), True, 2, GOOD_NAME_WIDTH),
        (short, min(mark, 1), True, 1, LEAST_NAME_WIDTH),
    ):
        left = room(chosen, each_mark, gap)
        if left >= min(longest, least):
            trend_width = 2 * (TREND_WIDTH + gap)
            fits = trends and left - trend_width >= min(longest, 2 * GOOD_NAME_WIDTH)
            name_width = min(longest, left - trend_width if fits else left)
            return Layout(width, name_width, chosen, is_short, gap, unicode, fits)
    mark = min(mark, 1)
    for heading in LEFT_OUT_FIRST:
        if room(short, mark, 1) >= min(longest, LEAST_NAME_WIDTH):
            break
        short = [each for each in short if each[0].heading != heading]
    return Layout(width, max(1, min(longest, room(short, mark, 1))), short, True, 1, unicode)


def _widths(columns: Sequence[Column], rows: Sequence[Row], *, short: bool) -> list[tuple[Column, int]]:
    widths = []
    for column in columns:
        values = {row.values.get(column.key) for row in rows} - {None}
        texts = [column.short_heading if short else column.heading]
        texts += [
            (column.short_text if short else column.text)(value) for value in values if value is not None
        ]
        widths.append((column, max(LEAST_WIDTH, *map(len, texts))))
    return widths


def _text(row: Row, column: Column, *, short: bool = False) -> str:
    value = row.values.get(column.key)
    if value is None:
        return ""
    return column.short_text(value) if short else column.text(value)


def _mark(row: Row) -> str:
    return "unavailable" if row.unavailable else "paused" if row.paused else ""


def _label(row: Row) -> str:
    """Return the name of a row below the row before it. It may be data of clients: control characters are escaped."""
    depth = (row.channel is not None) + (row.broker is not None)
    return INDENT * depth + printable(row.broker or row.channel or row.name)
