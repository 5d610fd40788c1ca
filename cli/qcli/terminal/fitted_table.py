"""Tables that fit the width of a terminal, and short forms of numbers for their cells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trio_nsq.wording import printable

from .output import plain_table

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
    while is_too_wide():
        widest = max((max(map(len, cells[column])), column.heading) for column in shown if column.is_name)
        if widest[0] <= _MIN_NAME_WIDTH:
            break
        (column,) = (column for column in shown if column.heading == widest[1])
        cells[column] = [shortened(text, widest[0] - 1) for text in cells[column]]
    lines = list(zip(*(cells[column] for column in shown), strict=True))
    return plain_table(lines, sum(column.is_name for column in shown))


def shortened(text: str, width: int) -> str:
    """Cut the middle of a name, because names often differ at the end only."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def short_count(number: int) -> str:
    """Format a count in at most five characters, such as `9999` or `12k`."""
    for unit in ("", "k", "M", "G"):
        if number < 10_000:
            return f"{number}{unit}"
        number //= 1000
    return f"{number}T"


def short_size(count: float) -> str:
    """Format bytes in at most five characters, such as `1.5G` (binary units)."""
    for unit in ("B", "K", "M", "G", "T"):
        if count < 1000 or unit == "T":
            break
        count /= 1024
    return f"{count:.1f}{unit}" if count < 10 and unit != "B" else f"{count:.0f}{unit}"


def short_time(seconds: float) -> str:
    """Format a duration in its two largest units, such as `45s`, `3m12s` or `12d4h`."""
    rest = max(0, int(seconds))
    parts: list[str] = []
    for unit, size_s in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size_s)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return "".join(parts[:2]) or "0s"
