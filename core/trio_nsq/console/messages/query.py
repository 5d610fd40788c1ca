"""What a viewer asks of the list of messages: the parameters in the address of the page. No IO."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Literal

from ...log.positions import parse_typed_position
from .cursor import parse_cursor
from .paging import Start
from .search import KINDS, Matches, compile_search

COUNTS = (10, 25, 50, 100)
DEFAULT_COUNT = 25


@dataclass(frozen=True, slots=True)
class MessageQuery:
    """What a viewer asks for.

    Attributes:
        broker: Only this broker, by its HTTP address; empty: all.
        order: Which messages are at the top of the page.
        count: The most messages of a page.
        at: Where the messages begin, as it was typed; with `newest`, where they end.
        until: Where they end, as it was typed; with `newest`, where they begin. Empty: at the end of the log.
        q: What to search for; empty: nothing.
        kind: How: `text`, `regex`, `json` or `id`.
        ignore_case: Whether a search ignores case.
        before, after: A cursor, of which at most one is not empty.
    """

    broker: str = ""
    order: Literal["newest", "oldest"] = "newest"
    count: int = DEFAULT_COUNT
    at: str = ""
    until: str = ""
    q: str = ""
    kind: str = "text"
    ignore_case: bool = False
    before: str = ""
    after: str = ""

    @property
    def is_backwards(self) -> bool:
        """Whether the page continues to older messages."""
        return bool(self.before) or (not self.after and self.order == "newest")

    def query(self, **changes: str | int | bool) -> dict[str, str]:
        """Return the parameters of this page with changes; those that are the default are left out."""
        default = MessageQuery()
        found: dict[str, str] = {}
        for name in self.__slots__:
            value = changes.get(name, getattr(self, name))
            if value != getattr(default, name):
                found[name] = "1" if value is True else str(value)
        return found

    def start(self, now_ns: int) -> Start:
        """Return where the page begins. Raises ValueError."""
        backwards = self.is_backwards
        cursor = parse_cursor(self.before or self.after) if self.before or self.after else None
        default = "latest" if backwards else "earliest"
        until = position_of(self.until, now_ns) if self.until else ""
        earliest, latest = (until, "") if self.order == "newest" else ("", until)
        return Start(
            backwards, cursor, position_of(self.at, now_ns) if self.at else default, earliest, latest
        )

    def matches(self) -> Matches | None:
        """Return which messages are searched for; None: all, or the one with an id. Raises ValueError."""
        if not self.q or self.kind == "id":
            return None
        return compile_search(self.q, self.kind, ignore_case=self.ignore_case)


def parse_query(query: Mapping[str, str]) -> MessageQuery:
    """Read the parameters of a page. Raises ValueError."""
    count = query.get("count", str(DEFAULT_COUNT))
    if not (count.isascii() and count.isdigit() and 0 < int(count[:9]) <= COUNTS[-1]):
        raise ValueError(f"a page has 1 to {COUNTS[-1]} messages, not {count!r}")
    kind = query.get("kind", "text")
    if kind not in (*KINDS, "id"):
        raise ValueError(f"{kind!r} is not a kind of search: use text, regex, json or id")
    before = query.get("before", "")
    return MessageQuery(
        query.get("broker", ""),
        "oldest" if query.get("order") == "oldest" else "newest",
        int(count),
        query.get("at", "").strip()[:100],
        query.get("until", "").strip()[:100],
        query.get("q", ""),
        kind,
        query.get("ignore_case") == "1",
        before,
        "" if before else query.get("after", ""),
    )


def position_of(text: str, now_ns: int) -> str:
    """Return a position that a viewer typed as one of the broker's HTTP API.

    A sequence, `earliest`, `latest`, how long ago such as `15m`, or a time such as `2026-11-21T04:14`, in UTC unless it
    has an offset.

    Raises:
        ValueError: The text is none of these.
    """
    try:
        found = parse_typed_position(text, UTC)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a position: use a sequence such as 1000, a time such as 2026-11-21T04:14, how long ago "
            "such as 15m, earliest or latest"
        ) from None
    return text if text.startswith("@") else str(found.at(now_ns))
