"""The lines of the live screen of `stat`. Does no IO."""

import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trio_nsq.text.wording import printable

from ...framework.output import rate, styled
from ...terminal.figures import shortened, sparkline
from .columns import COLUMNS, RATES
from .layout import TREND_WIDTH, Layout, lay_out, unavailable_lines, with_topics
from .rows import Report, Row, RowKey, published, total
from .selection import ignored_words
from .settings import KEYS, Settings

LENGTH = 60
"""Reports that are kept, for a quarter of a wide screen."""

Series = Mapping[str, Sequence[float | None]]
"""Numbers by the key of a rate, the newest last."""


class History:
    """Remembers the rates of the rows of successive reports. Does no IO."""

    def __init__(self) -> None:
        self._series: dict[RowKey, dict[str, deque[float | None]]] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Remember a report. Forgets the rows that it does not have."""
        before, self._series = self._series, {}
        for row in rows:
            kept = before.get(row.key) or {column.key: deque(maxlen=LENGTH) for column in RATES}
            for column in RATES:
                kept[column.key].append(row.values.get(column.key))
            self._series[row.key] = kept

    def of(self, row: Row) -> Series:
        """Return the rates of a row; nothing if it is new."""
        found = self._series.get(row.key, {})
        return {key: tuple(series) for key, series in found.items()}

    def total(self, rows: Sequence[Row]) -> Series:
        series = {}
        for column, counted in zip(RATES, (published(rows), rows), strict=True):
            each = [self._series[row.key][column.key] for row in counted if row.key in self._series]
            # Aligned at the end: new rows have fewer numbers.
            columns = zip_longest(*map(reversed, each))
            sums = [[value for value in values if value is not None] for values in columns]
            series[column.key] = [sum(known) if known else None for known in reversed(sums)]
        return series


_HINTS = (
    "q quit",
    "? help",
    "/ filter",
    "s sort",
    "b brokers",
    "enter topic",
    "space stop",
    "r reverse",
)
"""Of the keys, the most useful first: a narrow terminal shows the first ones."""
_LEAST_CHART_WIDTH = 5
_HEIGHT_FOR_DETAIL = 10
_LINES_AROUND_ROWS = 3  # headings, total and the last line


@dataclass(frozen=True, slots=True)
class Picture:
    """What the screen shows besides the settings of the user.

    Attributes:
        title: The brokers, and the time of the report.
        report: The numbers.
        history: The rates of this report and those before.
        problems: Lines about brokers that do not answer.
    """

    title: str
    report: Report
    history: History
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows for some settings; kept while the user only moves."""

    sums: list[Row]
    items: list[Row]
    total: Row
    totals: Series
    layout: Layout


class Drawing:
    """Draws the screen for a size.

    Args:
        unicode: Whether the terminal shows more than ASCII.
    """

    def __init__(self, settings: Settings, *, unicode: bool) -> None:
        self._settings = settings
        self._unicode = unicode
        self._table: _Table | None = None
        self._made_of: list[object] = []

    def lines(self, picture: Picture, width: int, height: int) -> list[str]:
        if self._settings.helps:
            return self._help(width, height)
        return [*self._upper(picture, width, height), *self._lower(picture, width, height)][:height]

    def farewell(self, picture: Picture, width: int, height: int) -> list[str]:
        """Return the lines that stay on the terminal at the end."""
        self._settings.place.key = None
        return [line for line in self._upper(picture, width, height)[:height] if line]

    def _upper(self, picture: Picture, width: int, height: int) -> list[str]:
        """Return the title, the problems and the table."""
        table, place = self._table_of(picture, width), self._settings.place
        problems = [*picture.problems, *unavailable_lines(table.sums, picture.report)][: max(1, height // 4)]
        head = [
            styled("bold", self._title(picture, table.sums)[:width]),
            *(styled("red", printable(line)[:width]) for line in problems),
        ]
        place.update(
            table.items,
            max(1, height - len(head) - _LINES_AROUND_ROWS - (height >= _HEIGHT_FOR_DETAIL)),
        )
        rows = [self._row(table.layout, row, picture.history) for row in place.shown]
        if not rows:
            nothing = "no topic or channel matches" if picture.report.sums else "no topics yet"
            rows = [styled("dim", nothing[:width])]
        rows += [""] * (place.page - len(rows))
        last = table.layout.line(table.total, self._trends(table.totals)) if table.items else ""
        return [*head, styled("bold", table.layout.heading()), *rows, styled("bold", last)]

    def _lower(self, picture: Picture, width: int, height: int) -> list[str]:
        """Return the line about one row, if there is room, and the last line."""
        table, row = self._table_of(picture, width), self._settings.place.row
        if height < _HEIGHT_FOR_DETAIL:
            return [self._foot(width)]
        if not table.items:
            return ["", self._foot(width)]
        series = picture.history.of(row) if row is not None else table.totals
        return [self._detail(row or table.total, series, width), self._foot(width)]

    def _table_of(self, picture: Picture, width: int) -> _Table:
        settings = self._settings
        made_of: list[object] = [
            *(picture.report, width, settings.selection, settings.by_broker),
            *(settings.filter, settings.topic),
        ]
        if self._table is None or any(
            old is not new for old, new in zip(self._made_of, made_of, strict=True)
        ):
            rows = settings.rows(picture.report)
            sums = [row for row in rows if row.broker is None]
            items, everything = with_topics(rows), total(sums)
            layout = lay_out(items, everything, width, unicode=self._unicode, trends=True)
            self._table = _Table(sums, items, everything, picture.history.total(sums), layout)
            self._made_of = made_of
        return self._table

    def _title(self, picture: Picture, sums: Sequence[Row]) -> str:
        settings, order = self._settings, self._settings.selection.order
        topics = len({row.topic for row in sums})
        channels = sum(row.channel is not None for row in sums)
        counts = f"{topics} topic{'s' * (topics != 1)}, {channels} channel{'s' * (channels != 1)}"
        parts = [
            picture.title,
            counts if settings.topic is None else f"topic {printable(settings.topic)}",
            f"by {order.column.heading if order.column else 'name'}{', reversed' * order.reverse}",
            *(["stopped"] if settings.stopped else []),
        ]
        return "  ".join(parts)

    def _row(self, layout: Layout, row: Row, history: History) -> str:
        text = layout.line(row, self._trends(history.of(row)))
        if row.key == self._settings.place.key:
            return styled("reverse", text)
        if row.unavailable:
            return styled("red", text)
        return styled("yellow" if row.paused else "dim" if row.broker else "", text)

    def _trends(self, series: Series) -> list[str]:
        return [sparkline(series.get(each.key, ()), TREND_WIDTH, unicode=self._unicode) for each in RATES]

    def _detail(self, row: Row, series: Series, width: int) -> str:
        """Return the line about one row: its full name, and its rates as charts."""
        name = printable(row.name if row.broker is None else f"{row.name} on {row.broker}")
        rates = []
        for text, column in zip(("in", "out"), RATES, strict=True):
            if (value := row.values.get(column.key)) is not None:
                rates.append((f"  {text} ", series.get(column.key, ()), f" {rate(value)}/s"))
        texts = sum(len(before) + len(after) for before, _, after in rates)
        room = max(_LEAST_CHART_WIDTH, (width - len(name) - texts) // max(1, len(rates)))
        charts = "".join(
            f"{before}{sparkline(values, min(room, len(values)), unicode=self._unicode)}{after}"
            for before, values, after in rates
        )
        return f"{shortened(name, width - len(charts), unicode=self._unicode)}{charts}"[:width]

    def _foot(self, width: int) -> str:
        settings, place = self._settings, self._settings.place
        if settings.typing:
            return f"/{settings.filter}_"[-width:]
        count, end = len(place.rows), place.top + len(place.shown)
        where = f"{place.top + 1}-{end} of {count}" if count > place.page else ""
        ignored = "".join(f"  no such condition: {word}" for word in ignored_words(settings.filter))
        room = width - len(where) - 2 if where else width
        left = f"/{settings.filter}{ignored}  esc clears it" if settings.filter else _hints(room)
        left = left[: max(0, room)]
        return styled("dim", f"{left.ljust(width - len(where))}{where}"[:width])

    def _help(self, width: int, height: int) -> list[str]:
        headings = ", ".join(
            f"{each.short_heading}: {each.heading}" for each in COLUMNS if each.has_short_heading
        )
        lines = []
        for key, text in (*KEYS, ("headings", headings), ("P, U", "paused, unavailable")):
            first, *more = textwrap.wrap(text, max(10, width - 12))
            lines += [f"{key:<12}{first}", *(" " * 12 + each for each in more)]
        shown = [line[:width] for line in lines[: max(0, height - 2)]]
        end = styled("dim", "any key: back"[:width])
        return [styled("bold", "Keys of qcli stat"[:width]), *shown, end][:height]


def _hints(room: int) -> str:
    """Return as many hints as fit."""
    texts = ["  ".join(_HINTS[:count]) for count in range(len(_HINTS) + 1)]
    return max((text for text in texts if len(text) <= room), key=len, default="")
