"""Tables that fit the width of a terminal."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trio_nsq.text.wording import printable

from ..framework.output import is_terminal, plain_table
from .figures import shortened, speaks_unicode

_Row = TypeVar("_Row")
_GAP = 2
_MIN_NAME_WIDTH = 8


@dataclass(frozen=True)
class Column(Generic[_Row]):
    """A column of a table.

    Attributes:
        heading: Its heading.
        cell: Returns the text of a row.
        is_name: Whether it is aligned to the left, and may be shortened as a last resort. Names come first.
        rank: 0: it always stays. Others are left out if the table is too wide, the highest first.
        short: The heading in a table that would be too wide; empty: the same.
    """

    heading: str
    cell: Callable[[_Row], str]
    is_name: bool = False
    rank: int = 0
    short: str = ""


def output_width() -> int | None:
    """Return the width of standard output; None: it is no terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def fitted_table(columns: Sequence[Column[_Row]], rows: Sequence[_Row], width: int | None) -> str:
    """Return rows as aligned text with headings, at most `width` wide if that is possible; None: no limit.

    Columns without any text are left out.
    """
    cells = {column: [column.heading, *(printable(column.cell(row)) for row in rows)] for column in columns}
    shown = [column for column in columns if any(cells[column][1:])]

    def is_too_wide() -> bool:
        widths = [max(map(len, cells[column])) for column in shown]
        return width is not None and sum(widths) + _GAP * (len(widths) - 1) > width

    if is_too_wide():
        for column in shown:
            cells[column][0] = column.short or column.heading
    for column in sorted((each for each in shown if each.rank), key=lambda each: -each.rank):
        if is_too_wide():
            shown.remove(column)
    unicode = speaks_unicode()
    while is_too_wide():
        widest = max((max(map(len, cells[column])), column.heading) for column in shown if column.is_name)
        if widest[0] <= _MIN_NAME_WIDTH:
            break
        (column,) = (column for column in shown if column.heading == widest[1])
        cells[column] = [shortened(text, widest[0] - 1, unicode=unicode) for text in cells[column]]
    lines = list(zip(*(cells[column] for column in shown), strict=True))
    return plain_table(lines, sum(column.is_name for column in shown))
