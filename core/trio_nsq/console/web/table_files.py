"""Tables of pages as files: all rows of the filter, in the order of the page, as CSV or JSON."""

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..record_files import FORMATS, RecordWriter, file_headers
from .listing import Listing
from .page import Table, View


def wanted_form(request: Request) -> str:
    """Return the form of the file that a request wants, `csv` or `json`; empty: it wants a page."""
    form = request.query_params.get("format", "")
    return form if form in FORMATS else ""


def table_file(request: Request, view: View) -> Response | None:
    """Return the table of a page as a file, if the request has `format=csv` or `json`; None: it has not."""
    form, table = wanted_form(request), view.table or _table_of(view.context.get("listing"))
    if not form or table is None or view.status != 200:
        return None
    writer = RecordWriter(form, table.columns)
    return Response(writer.head() + writer.lines(table.records), 200, file_headers(table.name, form))


def _table_of(listing: object) -> Table | None:
    if not isinstance(listing, Listing):
        return None
    parts = [part for part in listing.parts.values() if part.replace("-", "").isalnum()]
    columns = tuple(dict.fromkeys(["name", *listing.columns]))
    return Table("-".join([listing.page, *parts]), columns, _records(listing))


def _records(table: Listing[Any]) -> Iterator[dict[str, object]]:
    """Yield a record for each row: its name, and what the table can be sorted by."""
    for row in table.every:
        yield {"name": table.name(row)} | {key: column.key(row) for key, column in table.columns.items()}
