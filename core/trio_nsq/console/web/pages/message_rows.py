"""Rows of a list of messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import Request

from ...messages.body_view import BodyView, body_view, preview
from ...messages.message import Message, MissingMessages, Row
from ...messages.peeking import Waiting
from ..rendering import path_of

_PREVIEW = 160
_ROW_HTML = 6 * 1024
_LIST_HTML = 64 * 1024
"""The most HTML of one body in the list, and of all with their headers, so that the page stays under 150 KiB."""

_Row = TypeVar("_Row", bound=Row | Waiting)


@dataclass(frozen=True, slots=True)
class ListedRow(Generic[_Row]):
    """A row of the list.

    Attributes:
        row: The message, or what is missing.
        preview: The beginning of its body on one line.
        body: The body as HTML; None: it is on the message's own page only.
        link: The message's own page.
    """

    row: _Row
    preview: str = ""
    body: BodyView | None = None
    link: str = ""

    @property
    def is_message(self) -> bool:
        return isinstance(self.row, Message)


def listed_rows(request: Request, topic: str, rows: Sequence[_Row]) -> list[ListedRow[_Row]]:
    """Return rows with their bodies as HTML, as long as the page has room."""
    room = _LIST_HTML
    listed = []
    for row in rows:
        message: Row | Waiting = row
        if isinstance(message, MissingMessages):
            listed.append(ListedRow(row))
            continue
        query, sequence = {"broker": message.broker}, str(message.sequence)
        link = path_of(request, "message", query, topic=topic, sequence=sequence)
        found = body_view(message.body, message.shown_size, limit=min(_ROW_HTML, room)) if room > 0 else None
        if found is not None:
            room -= len(found.html) + sum(len(name) + len(value) for name, value in message.headers.items())
        listed.append(ListedRow(row, preview(message.body, _PREVIEW), found, link))
    return listed
