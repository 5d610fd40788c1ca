"""Tables of pages as files: all rows of the filter, in the order of the page, as CSV or JSON."""

import csv
import io
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...protocol.message_json import json_lines
from .listing import Listing
from .page import View

FORMATS = {"csv": "text/csv; charset=utf-8", "json": "application/x-ndjson"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Spreadsheets take cells that begin so for formulas."""


def table_file(request: Request, view: View) -> Response | None:
    """Return the table of a page as a file, if the request has `format=csv` or `json`; None: it has not."""
    form, table = request.query_params.get("format"), view.context.get("listing")
    if form not in FORMATS or not isinstance(table, Listing) or view.status != 200:
        return None
    text = _csv(table) if form == "csv" else json_lines(_records(table))
    name = "-".join([table.page, *(part for part in table.parts.values() if part.replace("-", "").isalnum())])
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}
    return Response(text.encode("utf-8", "replace"), 200, headers, FORMATS[form])


def _records(table: Listing[Any]) -> Iterator[dict[str, object]]:
    """Yield a record for each row: its name, and what the table can be sorted by."""
    for row in table.every:
        yield {"name": table.name(row)} | {key: column.key(row) for key, column in table.columns.items()}


def _csv(table: Listing[Any]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(dict.fromkeys(["name", *table.columns]))
    writer.writerows(map(_cell, record.values()) for record in _records(table))
    return buffer.getvalue()


def _cell(value: object) -> object:
    """Return a value as a cell; text that a spreadsheet would execute begins with an apostrophe."""
    if value is None:
        return ""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return str(value).lower() if isinstance(value, bool) else value
