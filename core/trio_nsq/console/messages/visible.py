"""Text of strangers as HTML: escaped, within a limit, and with every invisible character made visible.

Control characters, bidirectional overrides, zero-width and unassigned characters appear as escapes such as `\\u202e`:
a body can neither hide a part of itself nor change the order of what follows it.
"""

import re
import unicodedata
from collections.abc import Iterator

from markupsafe import Markup, escape

_UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]")
_PIECE = 4096


def visible(text: str, limit: int = 1 << 30) -> tuple[Markup, int]:
    """Return text as HTML, and how many of its characters that shows.

    Args:
        text: Any text; line feeds and tabs stay.
        limit: Stop when the HTML has about this many characters.
    """
    parts: list[str] = []
    size = shown = 0
    for start in range(0, len(text), _PIECE):
        if size >= limit:
            break
        for source, html in _pieces(text[start : start + _PIECE]):
            if size + len(html) > limit:
                room = max(0, limit - size) if source == html else 0
                parts.append(html[:room])
                return Markup("".join(parts)), shown + room
            parts.append(html)
            size += len(html)
            shown += len(source)
    return Markup("".join(parts)), shown


def one_line(text: str, limit: int) -> str:
    """Return the beginning of a text on one line, with escapes instead of invisible characters. Not HTML."""
    cut = text[:limit]
    shown = cut if cut.isprintable() else "".join(c if c.isprintable() else escaped(c) for c in cut)
    return shown[:limit] + ("…" if len(text) > limit or len(shown) > limit else "")


def escaped(char: str) -> str:
    """Return the escape of a character, such as `\\x1b` or `\\u202e`."""
    return char.encode("unicode_escape", "surrogatepass").decode()


def is_mostly_text(text: str) -> bool:
    """Whether at most a tenth of the characters are control characters other than line breaks and tabs."""
    controls = sum(map(text.count, _CONTROLS))
    return controls * 10 <= len(text)


_CONTROLS = [chr(code) for code in range(32) if chr(code) not in "\t\n\r\f\x1b"] + ["\x7f"]


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield runs of text with their HTML."""
    at = 0
    for match in _UNUSUAL.finditer(text):
        char = match[0]
        if char.isprintable():
            continue
        if match.start() > at:
            run = text[at : match.start()]
            yield from _lines(run)
        yield char, _marked(char)
        at = match.end()
    if at < len(text):
        yield from _lines(text[at:])


def _lines(run: str) -> Iterator[tuple[str, str]]:
    html = str(escape(run))
    if html == run:
        yield run, html
        return
    for start in range(0, len(run), 64):  # short runs, so that a cut is exact enough
        piece = run[start : start + 64]
        yield piece, str(escape(piece))


def _marked(char: str) -> str:
    name = unicodedata.name(char, "control character" if ord(char) < 0xA0 else "not a visible character")
    return f'<span class="ctl" title="U+{ord(char):04X} {escape(name)}">{escaped(char)}</span>'
