"""The live screen of `stat`: what keys change, and what the screen shows. Does no IO."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trio_nsq.wording import printable

from ...framework.output import rate, styled
from ...terminal.figures import shortened, sparkline
from .columns import COLUMNS, RATES, Column
from .history import History, Series
from .layout import TREND_WIDTH, lay_out, unavailable_lines, with_topics
from .rows import Report, Row, total
from .selection import Pattern, Selection, typed_tests, with_parts

_KEYS = (
    ("arrows", "move to a row; also page-up, page-down, home, end. Its full name is below the table"),
    ("enter", "show one topic, its channels and their brokers; again: back"),
    (
        "/",
        "show rows with a part of a name, a pattern such as click*/a*, or a condition: depth>0, age>5m, paused",
    ),
    ("esc", "show all rows again; leave the row"),
    ("s, S", "sort by the next or the previous column"),
    ("r", "reverse the order"),
    ("b", "show the numbers of each broker"),
    ("space", "stop the numbers, or continue"),
    ("q, Ctrl-C", "quit"),
)
_HINTS = "q quit  ? help  / filter  s sort  b brokers  enter topic  space stop  r reverse"
_SORTS: tuple[Column | None, ...] = (None, *(column for column in COLUMNS if not column.rare))

_LEAST_CHART_WIDTH = 5

RowKey = tuple[str, str | None, str | None]


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


class View:
    """The settings that keys change, and the screen for them.

    Args:
        selection: The rows to show, as the command line says, and their order.
        unicode: Whether the terminal shows more than ASCII.

    Attributes:
        stopped: Whether the numbers stay as they are.
        quits: Whether the user wants to end.
    """

    def __init__(self, selection: Selection, *, by_broker: bool = False, unicode: bool = True) -> None:
        self.stopped = False
        self.quits = False
        self._selection = selection
        self._by_broker = by_broker
        self._unicode = unicode
        self._filter = ""
        self._typing = False
        self._helps = False
        self._topic: str | None = None  # the only one to show
        self._cursor: RowKey | None = None
        self._index = 0
        self._top = 0
        self._page = 1
        self._foot_at = 0
        self._items: list[Row] = []

    # ------------------------------------------------------------------ keys

    def press(self, key: str) -> None:
        """Change the settings."""
        if self._typing:
            self._type(key)
        elif self._helps:
            self._helps = False
            self.quits = key == "q"
        elif move := {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "page-up": -self._page,
            "page-down": self._page,
            "home": -len(self._items),
            "end": len(self._items),
        }.get(key):
            self._move(move)
        elif key in "sS":
            self._sort(1 if key == "s" else -1)
        else:
            self._command(key)

    def _command(self, key: str) -> None:
        match key:
            case "q":
                self.quits = True
            case "/":
                self._typing = True
            case "?" | "h":
                self._helps = True
            case "r":
                self._reorder(reverse=not self._selection.order.reverse)
            case "b":
                self._by_broker = not self._by_broker
            case " ":
                self.stopped = not self.stopped
            case "enter":
                at = self._cursor
                self._topic = at[0] if self._topic is None and at is not None else None
            case "escape":
                if self._topic is not None:
                    self._topic = None
                elif self._filter:
                    self._filter = ""
                else:
                    self._go_to_top()

    def _type(self, key: str) -> None:
        if key == "enter":
            self._typing = False
        elif key == "escape":
            self._typing, self._filter = False, ""
        elif key == "backspace":
            self._filter = self._filter[:-1]
        elif key == "ctrl-u":
            self._filter = ""
        elif len(key) == 1:
            self._filter += key
        self._go_to_top()

    def _sort(self, step: int) -> None:
        column = self._selection.order.column
        at = _SORTS.index(column) if column in _SORTS else 0
        self._reorder(column=_SORTS[(at + step) % len(_SORTS)])

    def _reorder(self, **change: Any) -> None:
        order = replace(self._selection.order, **change)
        self._selection = replace(self._selection, order=order)
        self._go_to_top()

    def _go_to_top(self) -> None:
        self._cursor = None
        self._index = self._top = 0

    def _move(self, by: int) -> None:
        """Move the cursor, which appears at the first row of the screen."""
        if not self._items:
            return
        index = self._index + by if self._cursor is not None else self._top if abs(by) == 1 else by
        self._index = min(max(index, 0), len(self._items) - 1)
        self._cursor = _key(self._items[self._index])

    # ------------------------------------------------------------------ lines

    def lines(self, picture: Picture, width: int, height: int) -> list[str]:
        """Return the lines of the screen for this size, with styles."""
        if self._helps:
            return self._help_lines(width, height)
        rows = self._rows(picture.report)
        sums = [row for row in rows if row.broker is None]
        self._items = with_topics(rows)
        self._find_cursor()
        head = self._head(picture, sums, width, height)
        with_detail = height - len(head) >= 8
        self._page = max(1, height - len(head) - 3 - with_detail)
        self._scroll()
        shown = self._items[self._top : self._top + self._page]
        everything, series = total(sums), picture.history.total(sums)
        heading, *body, totals = self._table(picture, shown, everything, series, width)
        body += [""] * (self._page - len(body))
        at = self._items[self._index] if self._cursor is not None and self._items else None
        detail = self._detail(at or everything, picture.history.of(at) if at else series, width)
        foot = [*([detail] if with_detail else []), self._footer(width)]
        lines = [*head, heading, *body, totals][:height]
        self._foot_at = len(lines)
        return [*lines, *foot][:height]

    def farewell(self, picture: Picture, width: int, height: int) -> list[str]:
        """Return the lines that stay on the terminal."""
        self._helps, self._cursor = False, None
        lines = self.lines(picture, width, height)
        return [line for line in lines[: self._foot_at] if line]

    def _head(self, picture: Picture, sums: Sequence[Row], width: int, height: int) -> list[str]:
        problems = [*picture.problems, *unavailable_lines(sums)][: max(1, height // 4)]
        return [
            styled("bold", self._title(picture, sums)[:width]),
            *(styled("red", printable(line)[:width]) for line in problems),
        ]

    def _table(
        self, picture: Picture, shown: Sequence[Row], everything: Row, series: Series, width: int
    ) -> list[str]:
        """Return the lines of the table, for these of its rows: headings, rows, total."""
        layout = lay_out(self._items, everything, width, unicode=self._unicode, trends=True)
        lines = [styled("bold", layout.heading()[:width])]
        for row in shown:
            text = layout.line(row, self._trends(picture.history.of(row)))[:width]
            style = "yellow" if row.paused else "dim" if row.broker else ""
            lines.append(
                styled("reverse" if self._cursor == _key(row) else "red" if row.unavailable else style, text)
            )
        if not shown:
            nothing = "no topic or channel matches" if picture.report.sums else "no topics yet"
            lines.append(styled("dim", nothing[:width]))
        return [*lines, styled("bold", layout.line(everything, self._trends(series))[:width])]

    def _rows(self, report: Report) -> list[Row]:
        selection = replace(self._selection, tests=(*self._selection.tests, *typed_tests(self._filter)))
        if self._topic is not None:
            selection = replace(selection, patterns=(Pattern(self._topic, None),), tests=())
        rows = selection.rows(report)
        several = len(report.brokers) > 1
        return with_parts(rows, report) if self._by_broker or (several and self._topic is not None) else rows

    def _title(self, picture: Picture, sums: Sequence[Row]) -> str:
        topics = len({row.topic for row in sums})
        channels = sum(row.channel is not None for row in sums)
        counts = f"{topics} topic{'s' * (topics != 1)}, {channels} channel{'s' * (channels != 1)}"
        order = self._selection.order
        parts = [
            picture.title,
            counts if self._topic is None else f"topic {printable(self._topic)}",
            f"by {order.column.heading if order.column else 'name'}{', reversed' * order.reverse}",
            *(["stopped"] if self.stopped else []),
        ]
        return "  ".join(parts)

    def _find_cursor(self) -> None:
        """Find the row of the cursor again; if it is gone, the one that is now at its place."""
        if self._cursor is None or not self._items:
            return
        keys = [_key(row) for row in self._items]
        if self._cursor in keys:
            self._index = keys.index(self._cursor)
        else:
            self._index = min(self._index, len(keys) - 1)
            self._cursor = keys[self._index]

    def _scroll(self) -> None:
        """Scroll so that the cursor is on the screen."""
        if self._cursor is not None:
            self._top = min(self._top, self._index)
            self._top = max(self._top, self._index - self._page + 1)
        self._top = max(0, min(self._top, len(self._items) - self._page))

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

    def _footer(self, width: int) -> str:
        if self._typing:
            return f"/{self._filter}_"[-width:]
        count = len(self._items)
        end = min(self._top + self._page, count)
        place = f"{self._top + 1}-{end} of {count}" if count > self._page else ""
        left = f"/{self._filter}  esc clears it" if self._filter else _HINTS
        left = left[: max(0, width - len(place) - 2)] if place else left[:width]
        return styled("dim", left.ljust(width - len(place)) + place)

    def _help_lines(self, width: int, height: int) -> list[str]:
        headings = ", ".join(
            f"{each.short_heading}: {each.heading}" for each in COLUMNS if each.has_short_heading
        )
        lines = []
        for key, text in (*_KEYS, ("headings", headings), ("P, U", "paused, unavailable")):
            first, *more = textwrap.wrap(text, max(10, width - 12))
            lines += [f"{key:<12}{first}", *(" " * 12 + each for each in more)]
        end = styled("dim", "any key: back"[:width])
        return [
            styled("bold", "Keys of qcli stat"[:width]),
            *(line[:width] for line in lines[: height - 2]),
            end,
        ]


def _key(row: Row) -> RowKey:
    return row.topic, row.channel, row.broker
