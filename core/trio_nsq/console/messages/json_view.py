"""JSON as folded, coloured HTML. The text of names and values does not change.

Nothing is decoded: numbers keep all digits, names may repeat, strings stay as they were written. The work, the depth
and the size of the HTML are bounded, whatever the body is.
"""

import re
from dataclasses import dataclass, field

from markupsafe import Markup

from ...filters.json_text import NotJSON
from .visible import visible

MAX_DEPTH = 20
"""Deeper values are shown on one line. Browsers lay out deeply nested elements slowly."""
OPEN_DEPTH = 4
MAX_NODES = 3000
_SHORTEST_HTML = 40

_TOKEN = re.compile(
    r"[ \t\n\r]*+(?:"
    r"(?P<mark>[{}\[\],:])"
    r'|(?P<string>"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+")'
    r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+)"
    r"|(?P<word>true|false|null|NaN|-?Infinity))",
    re.ASCII,
)
_TO_THE_END = re.compile(r"[-+.0-9eE]*+\Z")
_SPACE = re.compile(r"[ \t\n\r]*+")
_CLASSES = {"string": "s", "number": "n", "word": "l"}


@dataclass(slots=True)
class _Container:
    """An open object or array.

    Attributes:
        close: Its last character.
        place: The index of the part of the HTML that is to tell the count; -1: it is shown on one line.
        count: Its members so far.
        in_member: Whether the element of a member is open.
    """

    close: str
    place: int
    count: int = 0
    in_member: bool = False


@dataclass(slots=True)
class JSONView:
    """The HTML of a text.

    Attributes:
        html: Elements that belong into a `<div class="json">`.
        shown: How many characters of the text it shows.
    """

    html: Markup
    shown: int


def json_view(text: str, *, complete: bool, limit: int) -> JSONView:
    """Format a JSON object or array.

    Args:
        text: The text, or its beginning.
        complete: Whether this is the whole text.
        limit: Stop when the HTML has about this many characters.

    Raises:
        NotJSON: The text is not JSON, as far as it was read.
    """
    return _Formatter(text, complete, limit).run()


@dataclass(slots=True)
class _Formatter:
    text: str
    complete: bool
    limit: int
    parts: list[str] = field(default_factory=list)
    stack: list[_Container] = field(default_factory=list)
    size: int = 0
    nodes: int = 0
    name: str = ""
    """The HTML of the name before the next value."""

    def run(self) -> JSONView:
        text, at = self.text, 0
        expect = "value"  # value, first (value or end), name, first name, colon, next
        if text[_SPACE.match(text).end() :][:1] not in ("{", "["):  # type: ignore[union-attr]  # matches always
            raise NotJSON("neither an object nor an array")
        while True:
            match = _TOKEN.match(text, at)
            if match is None:
                return self._end_of_text(at, expect)
            kind, token = match.lastgroup or "", match[match.lastgroup or 0]
            if not self.complete and kind in ("number", "word") and _TO_THE_END.match(text, match.end()):
                return self._stop(at)  # it may go on behind the cut
            expect = self._take(kind, token, expect)
            at = match.end()
            if not self.stack:
                if text[at:].strip(" \t\n\r"):
                    raise NotJSON("text after the value")
                return JSONView(Markup("".join(self.parts)), len(text))
            if self.size > self.limit or self.nodes > MAX_NODES:
                return self._stop(at)

    def _take(self, kind: str, token: str, expect: str) -> str:
        """Add a token, and return what may follow."""
        if expect in ("name", "first name") and kind == "string":
            self._count()
            self.name = f'<span class="k">{self._shown(token)}</span>: '
            return "colon"
        if expect == "colon" and token == ":":
            return "value"
        if expect == "next" and token == ",":
            self._add("," if self._is_flat else ",</div>")
            self.stack[-1].in_member = False
            return "name" if self.stack[-1].close == "}" else "value"
        if kind == "mark" and self.stack and token == self.stack[-1].close:
            if expect in ("next", "first", "first name"):
                self._close()
                return "next"
        elif expect in ("value", "first") and kind != "mark":
            self._value(f'<span class="{_CLASSES[kind]}">{self._shown(token)}</span>')
            return "next"
        elif expect in ("value", "first") and token in "{[":
            self._open(token)
            return "first name" if token == "{" else "first"
        raise NotJSON(f"{token!r} is not expected here")

    # ------------------------------------------------------------------ HTML

    @property
    def _is_flat(self) -> bool:
        return self.stack[-1].place < 0

    def _add(self, html: str) -> None:
        self.parts.append(html)
        self.size += len(html)

    def _shown(self, token: str) -> str:
        html, shown = visible(token, max(_SHORTEST_HTML, self.limit - self.size))
        return str(html) if shown == len(token) else f"{html}…"

    def _count(self) -> None:
        self.nodes += 1
        self.stack[-1].count += 1

    def _begin(self) -> tuple[str, str]:
        """Return the HTML before a value: the element of the member, and its name."""
        name, self.name = self.name, ""
        if not self.stack:
            return "", ""
        parent = self.stack[-1]
        if parent.close == "]":
            self._count()
        parent.in_member = not self._is_flat
        return '<div class="m">' if parent.in_member else "", name

    def _value(self, html: str) -> None:
        self._add("".join(self._begin()) + html)

    def _open(self, token: str) -> None:
        close = "}" if token == "{" else "]"
        member, name = self._begin()
        if len(self.stack) >= MAX_DEPTH:
            self._add(member + name + token)
            self.stack.append(_Container(close, -1))
            return
        folded = "" if len(self.stack) >= OPEN_DEPTH else " open"
        self._add(f"{member}<details{folded}><summary>{name}{token}")
        self.stack.append(_Container(close, len(self.parts)))
        self._add("")
        self._add("</summary>")

    def _close(self) -> None:
        container = self.stack.pop()
        if container.place < 0:
            self._add(container.close)
            return
        self._tell_count(container, "")
        self._add(f"{'</div>' if container.in_member else ''}</details>{container.close}")

    def _tell_count(self, container: _Container, more: str) -> None:
        html = f' <span class="c">{container.count}{more}</span>'
        self.parts[container.place] = html
        self.size += len(html)

    # ------------------------------------------------------------------ the end

    def _end_of_text(self, at: int, expect: str) -> JSONView:
        """End where no token begins: at a cut, or because this is no JSON."""
        start = _SPACE.match(self.text, at).end()  # type: ignore[union-attr]  # matches always
        rest = self.text[start:]
        # A string, a number or a word that is cut.
        if self.complete or (rest and rest[0] not in '"-0123456789tfnIN'):
            raise NotJSON("not JSON")
        if rest[:1] == '"' and expect in ("value", "first"):
            html, shown = visible(rest, self.limit - self.size)
            self._value(f'<span class="s">{html}</span>')
            return self._stop(start + shown)
        return self._stop(at)

    def _stop(self, at: int) -> JSONView:
        """End early: close what is open."""
        closing = ['<span class="cut">…</span>']
        for container in reversed(self.stack):
            if container.place >= 0:
                self._tell_count(container, "+")
                closing.append(f"{'</div>' if container.in_member else ''}</details>")
        self.stack.clear()
        self._add("".join(closing))
        return JSONView(Markup("".join(self.parts)), at)
