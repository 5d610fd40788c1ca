"""Remembers the heads of requests, because clients repeat them byte for byte.

Parsing a head takes longer than the rest of the HTTP server's work for a small publish. A head is found again by all
its bytes, at the start of a request, so it means what it meant to the parser.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .credentials import CONSOLE_HEADER
from .messages import Request

_MOST_HEADS = 256
_MOST_BYTES = 1024
_END = b"\r\n\r\n"
_NOT_KEPT = frozenset(
    (
        "transfer-encoding",  # only the parser finds the end of such a body
        "upgrade",
        "expect",
        CONSOLE_HEADER,
        "authorization",  # secrets are not kept for longer than their request
        "proxy-authorization",
        "cookie",
        "traceparent",  # differs in each request, and would displace heads that repeat
        "tracestate",
    )
)


@dataclass(slots=True)
class CachedHead:
    """A valid head of a request that keeps its connection open. Must not be changed. Fields as in `Request`.

    Attributes:
        head_bytes: The size of the head, with the empty line at its end.
        body_bytes: The size of the body that follows.
        chunked: As in `Exchange`.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    target: str
    head_bytes: int
    body_bytes: int
    chunked: bool


class HeadCache:
    """Heads by their bytes. Bounded in number, and in the size of each."""

    def __init__(self) -> None:
        self._heads: dict[bytes, CachedHead] = {}

    def find(self, data: bytes, start: int) -> CachedHead | None:
        """Return the head of the request that begins at `start`; None if it is unknown or incomplete."""
        end = data.find(_END, start, start + _MOST_BYTES)
        return self._heads.get(data[start : end + len(_END)]) if end >= 0 else None

    def add(self, head: bytes, request: Request, *, chunked: bool) -> None:
        """Remember a head that `repeatable_head` returned, of a request that keeps its connection open."""
        if len(self._heads) >= _MOST_HEADS:
            oldest = next(iter(self._heads))  # if it is in use, it is soon added again
            del self._heads[oldest]
        self._heads[head] = CachedHead(
            request.method,
            request.path,
            request.query,
            request.headers,
            request.target,
            len(head),
            len(request.body),
            chunked,
        )


def repeatable_head(data: bytes, request: Request) -> bytes:
    """Return the head in the data of a single request that the parser has accepted.

    Empty if there are bytes besides the head and the body, or if the head must not be kept.
    """
    end = data.find(_END) + len(_END)
    if end > _MOST_BYTES or end + len(request.body) != len(data) or not _NOT_KEPT.isdisjoint(request.headers):
        return b""
    head = data[:end]
    # The parser and `find` agree about the end of a head if a line feed always follows a carriage return.
    return head if head.count(b"\n") == head.count(b"\r\n") else b""
