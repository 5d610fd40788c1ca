"""Rows of a list of messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from ...messages.body_view import BodyView, body_view, preview
from ...messages.message import Message, Row
from ..rendering import path_of

_PREVIEW = 160
_ROW_HTML = 6 * 1024
_LIST_HTML = 64 * 1024
"""The most HTML of one body in the list, and of all, so that the page stays under 150 KiB."""


@dataclass(frozen=True, slots=True)
class ListedRow:
    """A row of the list.

    Attributes:
        row: The message, or what is missing.
        preview: The beginning of its body on one line.
        body: The body as HTML; None: it is on the message's own page only.
        link: The message's own page.
    """

    row: Row
    preview: str = ""
    body: BodyView | None = None
    link: str = ""

    @property
    def is_message(self) -> bool:
        return isinstance(self.row, Message)


def listed_rows(request: Request, topic: str, rows: Sequence[Row]) -> list[ListedRow]:
    """Return rows with their bodies as HTML, as long as the page has room."""
    room = _LIST_HTML
    listed = []
    for row in rows:
        if not isinstance(row, Message):
            listed.append(ListedRow(row))
            continue
        link = path_of(request, "message", {"broker": row.broker}, topic=topic, sequence=str(row.sequence))
        found = body_view(row.body, row.size, limit=min(_ROW_HTML, room)) if room > 0 else None
        room -= len(found.html) if found is not None else 0
        listed.append(ListedRow(row, preview(row.body, _PREVIEW), found, link))
    return listed
