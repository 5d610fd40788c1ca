"""What keys change on the live screen of `stat`: the rows to show, their order, and the place in them. Does no IO."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .columns import COLUMNS, Column
from .rows import Report, Row, RowKey
from .selection import Pattern, Selection, typed_tests, with_parts

KEYS = (
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
_SORTS: tuple[Column | None, ...] = (None, *(column for column in COLUMNS if not column.rare))


@dataclass(slots=True)
class Place:
    """The rows on the screen: a part of all rows, with or without a cursor.

    Attributes:
        rows: All rows.
        page: Number of rows on the screen.
        top: Index of the first one of them.
        key: The row of the cursor; None: there is no cursor.
    """

    rows: Sequence[Row] = ()
    page: int = 1
    top: int = 0
    key: RowKey | None = None
    _index: int = 0

    @property
    def row(self) -> Row | None:
        return self.rows[self._index] if self.key is not None and self.rows else None

    @property
    def shown(self) -> Sequence[Row]:
        return self.rows[self.top : self.top + self.page]

    def move(self, by: int) -> None:
        """Move the cursor, which appears at the first row of the screen."""
        if self.rows:
            index = self._index + by if self.key is not None else self.top if abs(by) == 1 else by
            self._index = min(max(index, 0), len(self.rows) - 1)
            self.key = self.rows[self._index].key

    def reset(self) -> None:
        """Remove the cursor and go to the top."""
        self.key = None
        self._index = self.top = 0

    def update(self, rows: Sequence[Row], page: int) -> None:
        """Take new rows. The cursor stays on its row, or, if that is gone, at its place; it stays on the screen."""
        self.rows, self.page = rows, page
        if self.key is not None and rows:
            self._index = min(self._index, len(rows) - 1)
            if rows[self._index].key != self.key:
                found = (index for index, row in enumerate(rows) if row.key == self.key)
                self._index = next(found, self._index)
                self.key = rows[self._index].key
            self.top = max(min(self.top, self._index), self._index - page + 1)
        self.top = max(0, min(self.top, len(rows) - page))


@dataclass(slots=True)
class Settings:
    """The settings of the screen.

    Attributes:
        selection: The rows of the command line, and their order.
        by_broker: Whether each broker has rows.
        filter: What was typed after `/`.
        typing: Whether the user is typing it.
        topic: The only topic to show; None: all.
        helps: Whether the explanation of the keys is shown.
        stopped: Whether the numbers stay as they are.
        quits: Whether the user wants to end.
        place: The rows on the screen.
    """

    selection: Selection
    by_broker: bool = False
    filter: str = ""
    typing: bool = False
    topic: str | None = None
    helps: bool = False
    stopped: bool = False
    quits: bool = False
    place: Place = field(default_factory=Place)

    def press(self, key: str) -> None:
        place = self.place
        if self.typing:
            self._type(key)
        elif self.helps:
            self.helps = False
            self.quits = key == "q"
        elif by := {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "page-up": -place.page,
            "page-down": place.page,
            "home": -len(place.rows),
            "end": len(place.rows),
        }.get(key):
            place.move(by)
        else:
            self._command(key)

    def _command(self, key: str) -> None:
        match key:
            case "q":
                self.quits = True
            case "/":
                self.typing = True
            case "?" | "h":
                self.helps = True
            case "s":
                self._sort_by(1)
            case "S":
                self._sort_by(-1)
            case "r":
                self._reorder(reverse=not self.selection.order.reverse)
            case "b":
                self.by_broker = not self.by_broker
            case " ":
                self.stopped = not self.stopped
            case "enter":
                row = self.place.row
                self.topic = row.topic if self.topic is None and row is not None else None
            case "escape" if self.topic is not None:
                self.topic = None
            case "escape":
                self.filter = ""
                self.place.reset()

    def _type(self, key: str) -> None:
        match key:
            case "enter":
                self.typing = False
            case "escape":
                self.typing, self.filter = False, ""
            case "backspace":
                self.filter = self.filter[:-1]
            case "ctrl-u":
                self.filter = ""
            case _ if len(key) == 1:
                self.filter += key
        self.place.reset()

    def _sort_by(self, step: int) -> None:
        column = self.selection.order.column
        at = _SORTS.index(column) if column in _SORTS else 0
        self._reorder(column=_SORTS[(at + step) % len(_SORTS)])

    def _reorder(self, **change: Any) -> None:
        self.selection = replace(self.selection, order=replace(self.selection.order, **change))
        self.place.reset()

    def rows(self, report: Report) -> list[Row]:
        selection, several = self.selection, len(report.brokers) > 1
        if self.topic is not None:
            selection = replace(selection, patterns=(Pattern(self.topic, None),), tests=())
        else:
            selection = replace(selection, tests=(*selection.tests, *typed_tests(self.filter)))
        rows = selection.rows(report)
        return with_parts(rows, report) if self.by_broker or (several and self.topic is not None) else rows
