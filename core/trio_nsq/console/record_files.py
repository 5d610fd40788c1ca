"""Records as CSV or JSON lines, for downloads of what pages list."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..protocol.message_json import json_lines

FORMATS = {"csv": "text/csv; charset=utf-8", "json": "application/x-ndjson"}
_TERMINATOR = "\r\n"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", *"\uff1d\uff0b\uff0d\uff20")
"""Spreadsheets take cells that begin so for formulas; some also with the wide forms of these characters."""


class RecordWriter:
    """Writes records as text.

    Args:
        form: `csv` or `json`.
        columns: The keys of the records, in the order of the columns. JSON has the keys of each record.
    """

    def __init__(self, form: str, columns: Sequence[str]) -> None:
        self.form: str = form
        self._columns = columns

    def head(self) -> bytes:
        """Return what comes before the first record."""
        return _encoded(_csv_line(self._columns)) if self.form == "csv" else b""

    def lines(self, records: Iterable[Mapping[str, Any]]) -> bytes:
        """Return some records. In CSV, a key that a record lacks is an empty cell."""
        if self.form == "json":
            return _encoded(json_lines(records))
        rows = ([_cell(record.get(name)) for name in self._columns] for record in records)
        return _encoded("".join(map(_csv_line, rows)))


def gaps(missing: Mapping[str, str]) -> Iterator[dict[str, object]]:
    """Yield the record of each broker whose records a file lacks, by the reason: a script would miss them silently."""
    for address, why in missing.items():
        yield {"broker": address, "gap": f"no answer: {why}"}


def file_headers(name: str, form: str, end: str = "") -> dict[str, str]:
    """Return the headers of an answer that browsers save under a name, which may be of a topic.

    Args:
        end: The end of the name; empty: the form.
    """
    return {
        "Content-Type": FORMATS[form],
        "Content-Disposition": f'attachment; filename="{file_name(name)}.{end or form}"',
        "X-Content-Type-Options": "nosniff",
    }


def file_name(name: str) -> str:
    """Return a name without characters that file systems, shells or headers take for more than a letter."""
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in name)
    return f"_{safe[1:]}" if safe[:1] in (".", "-") else safe


def _csv_line(row: Sequence[object]) -> str:
    buffer = io.StringIO()
    # Python puts a cell with a carriage return in quotes only if that is a part of the terminator.
    csv.writer(buffer, lineterminator=_TERMINATOR).writerow(row)
    return buffer.getvalue().removesuffix(_TERMINATOR) + "\n"


def _cell(value: object) -> object:
    """Return a value as a cell; text that a spreadsheet would execute begins with an apostrophe."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False) if value else ""
    return str(value).lower() if isinstance(value, bool) else value


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")
