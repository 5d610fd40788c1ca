"""A message body as HTML: JSON, text or a hex dump. Never as HTML of its own."""

from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

from ...filters.json_text import NotJSON
from .json_view import json_view
from .visible import is_mostly_text, one_line, visible

SHOWN_BYTES = 64 * 1024
"""The most bytes of a body on a page."""
PAGE_HTML = 100 * 1024
"""The most characters of HTML for one body, so that its page stays under 150 KiB."""
_HEX_LINE = 16
View = Literal["auto", "json", "text", "hex"]


@dataclass(frozen=True, slots=True)
class BodyView:
    """A body, or its beginning, as HTML.

    Attributes:
        kind: `json`, `text`, `hex` or `empty`.
        html: For an element with the class of `kind`.
        shown: How many bytes of the body it shows.
        size: The size of the whole body.
    """

    kind: Literal["json", "text", "hex", "empty"]
    html: Markup
    shown: int
    size: int

    @property
    def is_cut(self) -> bool:
        """Whether it shows a part only."""
        return self.shown < self.size


def body_view(body: bytes, size: int, view: View = "auto", limit: int = PAGE_HTML) -> BodyView:
    """Format a body.

    Args:
        body: The body, or its beginning.
        size: The size of the whole body.
        view: `auto` selects JSON, text or hex by the content. Another one is used if the body allows it.
        limit: The most characters of HTML, about.
    """
    if not size:
        return BodyView("empty", Markup(""), 0, 0)
    text = None if view == "hex" else _text_of(body[:SHOWN_BYTES], size)
    if text is None or (view == "auto" and not is_mostly_text(text)):
        return _hex(body, size, limit)
    complete = len(body) == size <= SHOWN_BYTES
    if view != "text":
        try:
            found = json_view(text, complete=complete, limit=limit)
            return BodyView("json", found.html, _bytes_of(text, found.shown), size)
        except NotJSON:
            pass
    html, shown = visible(text, limit)
    return BodyView("text", html, _bytes_of(text, shown), size)


def preview(body: bytes, limit: int) -> str:
    """Return the beginning of a body as plain text on one line."""
    text = _text_of(body[: 4 * limit], len(body))
    if text is None or not is_mostly_text(text):
        cut = body[: limit // 3]
        return cut.hex(" ") + ("…" if len(cut) < len(body) else "")
    return one_line(text, limit)


def _text_of(part: bytes, size: int) -> str | None:
    """Return the text of a body's beginning; None if it is not UTF-8. A character that is cut is left out."""
    try:
        return part.decode()
    except UnicodeDecodeError as exc:
        if len(part) < size and exc.start >= len(part) - 3 and exc.reason == "unexpected end of data":
            return part[: exc.start].decode()
        return None


def _bytes_of(text: str, characters: int) -> int:
    return len(text[:characters].encode())


def _hex(body: bytes, size: int, limit: int) -> BodyView:
    """Format lines of an offset, 16 bytes in hex, and their ASCII characters."""
    lines: list[str] = []
    length = shown = 0
    for start in range(0, min(len(body), SHOWN_BYTES), _HEX_LINE):
        part = body[start : start + _HEX_LINE]
        digits = f"{part[:8].hex(' ')}  {part[8:].hex(' ')}"
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        line = f"{start:08x}  {digits:<48}  {escape(text)}\n"
        length += len(line)
        if length > limit and lines:
            break
        lines.append(line)
        shown += len(part)
    return BodyView("hex", Markup("".join(lines)), shown, size)
