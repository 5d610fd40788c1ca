"""Bytes of an HTTP connection in, requests out; the parser itself is `httptools`. No IO.

What is wrong with a request is found as early as it can be: a body that is announced as too long is refused before
it arrives, one that turns out to be too long when it passes the limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import httptools

from .messages import HTTPError, Request, Response
from .routing import DEFAULT_MAX_BODY_BYTES, Route, Router

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; the limit servers commonly have lies between 8 and 64 KiB."""

_INVALID_REQUEST = HTTPError(400, "INVALID_REQUEST").response()
_HEAD_TOO_BIG = HTTPError(431, "HEADERS_TOO_BIG").response()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A whole request, and what answers it.

    Attributes:
        answer: The route whose handler answers, or the response itself.
        keep_alive: The client wants to go on with this connection.
        chunked: The client understands chunked responses (HTTP/1.1).
    """

    request: Request
    answer: Route | Response
    keep_alive: bool
    chunked: bool


class RequestReader:
    """Reads the requests of one connection.

    Args:
        router: Says who answers, and how long a body may be.
        peer: Goes into each `Request`.

    Attributes:
        exchanges: Whole requests, in order; the caller takes them away.
        refusal: What to answer after those, if the connection cannot go on; None while it can.
        continue_expected: The client waits for `100 Continue` before it sends its body; the caller clears it.
    """

    def __init__(self, router: Router, peer: str) -> None:
        self.exchanges: deque[Exchange] = deque()
        self.refusal: Response | None = None
        self.continue_expected = False
        self._router = router
        self._peer = peer
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = self._in_body = False
        self._head_bytes = 0
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = self._max_body_bytes = 0
        self._answer: Route | Response = _INVALID_REQUEST
        self._path = ""
        self._query: dict[str, str] = {}

    @property
    def at_rest(self) -> bool:
        """Whether no part of a further request has arrived."""
        return not (self._in_head or self._in_body)

    def receive_data(self, data: bytes) -> None:
        """Take what the socket gave."""
        if self.refusal is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(_INVALID_REQUEST)  # CONNECT, or a protocol we do not speak
        except httptools.HttpParserError:
            self._refuse(_INVALID_REQUEST)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_BIG)

    def _refuse(self, response: Response) -> None:
        self.refusal = self.refusal or response
        self._in_head = self._in_body = False

    # What follows is called by httptools.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._url = b""
        self._headers = {}
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        if self.refusal is not None:
            return
        self._in_head, self._in_body = False, True
        method = self._parser.get_method().decode("latin-1").upper()
        target, _, query = self._url.partition(b"?")
        if not target.startswith((b"/", b"*")):  # absolute form, as sent to proxies
            target = httptools.parse_url(self._url).path or b"/"
        self._path = _decode(target)
        self._answer = self._router.resolve(method, self._path, query.decode("latin-1"))
        parsed = _parse_query(query)
        if parsed is None:
            self._answer, parsed = _INVALID_REQUEST, {}
        self._query = parsed
        route = self._answer if isinstance(self._answer, Route) else None
        self._max_body_bytes = route.max_body_bytes if route else DEFAULT_MAX_BODY_BYTES
        announced = self._headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            self._refuse_body()
        elif self._headers.get("expect", "").lower() == "100-continue":
            self.continue_expected = True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            self._refuse_body()
        if self.refusal is None:
            self._body.append(body)

    def _refuse_body(self) -> None:
        code = self._answer.too_big if isinstance(self._answer, Route) else "BODY_TOO_BIG"
        self._refuse(HTTPError(413, code).response())

    def on_message_complete(self) -> None:
        if self.refusal is not None:
            return
        self._in_body = False
        self.continue_expected = False
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        method = self._parser.get_method().decode("latin-1").upper()
        request = Request(method, self._path, self._query, self._headers, body, self._peer)
        keep_alive = self._parser.should_keep_alive()
        chunked = self._parser.get_http_version() != "1.0"
        self.exchanges.append(Exchange(request, self._answer, keep_alive, chunked))


def _decode(text: bytes) -> str:
    return (unquote_to_bytes(text) if b"%" in text else text).decode("utf-8", "surrogateescape")


def _parse_query(query: bytes) -> dict[str, str] | None:
    """The parameters, the first value of each; None if the encoding is bad, by Go's rules."""
    parameters: dict[str, str] = {}
    if b";" in query:
        return None
    if b"%" in query and not _escapes_are_whole(query):
        return None
    for pair in query.replace(b"+", b" ").split(b"&"):
        if pair:
            name, _, value = pair.partition(b"=")
            parameters.setdefault(_decode(name), _decode(value))
    return parameters


def _escapes_are_whole(text: bytes) -> bool:
    digits = b"0123456789abcdefABCDEF"
    return all(len(rest) >= 2 and rest[0] in digits and rest[1] in digits for rest in text.split(b"%")[1:])
