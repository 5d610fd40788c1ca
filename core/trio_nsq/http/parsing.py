"""Parses the bytes of an HTTP connection into requests, with `httptools`. No IO.

An invalid request is refused as early as possible: a body with a too large Content-Length before it arrives, a chunked
body when it exceeds the limit. Refusals have the same form and order as requests, so one code path answers both.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

import httptools

from ..protocol.spoken import protocol_of
from .decisions import ALLOW, Allow, Decision, Deny, NeedsLookup, RequestGuard
from .head_cache import HeadCache, repeatable_head
from .messages import INTERNAL_ERROR, ForeignRequest, HTTPError, Request, Response, upgrade_required
from .routing import DEFAULT_MAX_BODY_BYTES, INVALID_REQUEST, Route, Router

logger: logging.Logger = logging.getLogger("trio_nsq.http")

MAX_HEAD_BYTES = 64 * 1024
"""Limit of a request without its body; a larger one is refused with 431. Other servers' limits are 8 to 64 KiB. Bytes
in the same read as the end of the head are not counted."""

MAX_HEADERS = 256
"""Limit of the headers of a request. Each takes ten times the memory of a short line. Apache's and Tomcat's is 100."""

_LARGE_BYTES = 64 * 1024
"""A body is large once more bytes than this have arrived."""
_PIECE_BYTES = 4096
"""Smaller pieces of a body are joined: an object for each would take more memory than its data."""

_HTTP2 = b"PRI * HTTP/2.0\r\n"
"""The first line of a client that begins with HTTP/2."""

_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_UNKNOWN_CODING = HTTPError(501, "UNSUPPORTED_TRANSFER_ENCODING").response()
_HEAD_TOO_BIG = HTTPError(431, "HEADERS_TOO_BIG").response()


# ---------------------------------------------------------------------- targets, by the rules of Go's net/url


def split_target(target: bytes) -> tuple[str, str]:
    """Return the decoded path of a request target, and the query string as received.

    The target is `/path?query`, `http://host/path?query`, or `*`. Raises ValueError: its percent-encoding is invalid.
    """
    path, _, query = target.decode("latin-1").partition("?")
    if not path.startswith("/"):
        # RFC 9112 3.2.2: a server must accept the absolute form, though clients send it only to proxies.
        _, scheme_end, rest = path.partition("://")
        if scheme_end:
            path = "/" + rest.partition("/")[2]
    return (_decode(path) if "%" in path else path), query


def parse_query(query: str) -> Mapping[str, str]:
    """Return the decoded parameters of a query string, the first value of each; `""` for a parameter without `=`.

    Raises:
        ValueError: The percent-encoding is invalid, or there is a semicolon, which some clients use as a separator.
    """
    if ";" in query:
        raise ValueError("semicolon in a query string")
    encoded = "%" in query or "+" in query
    parameters: dict[str, str] = {}
    for pair in query.split("&"):
        if pair:
            name, _, value = pair.partition("=")
            if encoded:
                name, value = _decode(name.replace("+", " ")), _decode(value.replace("+", " "))
            parameters.setdefault(name, value)
    return parameters


def _decode(text: str) -> str:
    for rest in text.split("%")[1:]:
        if len(rest) < 2 or not _HEX_DIGITS.issuperset(rest[:2]):
            raise ValueError(f"bad percent-encoding in {text!r}")
    # Invalid UTF-8 becomes U+FFFD, which no name may contain and which is safe to print.
    return unquote(text)


# Clients repeat the same targets. The cache is bounded in entries and in the size of each.
_KNOWN_TARGETS, _KNOWN_TARGET_BYTES = 256, 256
_split_known = lru_cache(_KNOWN_TARGETS)(split_target)
_parse_known = lru_cache(_KNOWN_TARGETS)(parse_query)
_head_cache = HeadCache()

# ---------------------------------------------------------------------- requests


@dataclass(slots=True)  # not frozen: as Request
class Exchange:
    """A request and its route or response. Must not be changed.

    Attributes:
        request: The request. A refused one has only the fields parsed so far.
        answer: The route whose handler answers, or the response itself.
        undecided: The guard needs a lookup: `RequestGuard.look_up`.
        keep_alive: Whether HTTP continues on the connection after the answer. If not, nothing further is read.
        chunked: Whether the client understands chunked responses (HTTP/1.1).
    """

    request: Request
    answer: Route | Response
    keep_alive: bool
    chunked: bool
    undecided: bool = False


class _Refused(Exception):
    """Raised in the parser's callbacks to stop the parser."""

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self.response = response


class RequestReader:
    """Reads the requests of one connection.

    Args:
        guard: Checks each request before its body is read; None accepts all.
        once: The connection is to end after the first answer.

    Attributes:
        peer: The client's address, for each `Request`.
        at_rest: No part of a further request has arrived.
        continue_expected: The client waits for `100 Continue` before it sends an acceptable body. The caller sends it
            and clears this flag.
        undecided: The head of a request has arrived, its body has not, and the guard needs a lookup. The caller calls
            `decide` before it reads more.
        awaits_head: The head of the next request is not complete.
        unfinished_bytes: The missing bytes of the large body that is arriving, at most if its size is not known; 0
            without one.
        beyond: What has arrived after a request for another protocol (`Route.upgrade`): it is not HTTP.
    """

    def __init__(
        self, router: Router, peer: str, guard: RequestGuard | None = None, *, once: bool = False
    ) -> None:
        self.continue_expected: bool = False
        self.beyond: bytes = b""
        self.guard = guard
        self._router = router
        self._once = once
        self.peer = peer
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: list[Exchange] = []
        self._loose_bytes = 0
        self._pending: Request | None
        self._last_head = b""  # of the last request that arrived in one piece
        self.on_message_begin()
        self.at_rest: bool = True

    @property
    def awaits_head(self) -> bool:
        return self.at_rest or self._in_head

    def receive_data(self, data: bytes | bytearray) -> list[Exchange]:
        """Parse received data, and return the requests that are now complete, in order.

        Must not be called again after an exchange without `keep_alive`.
        """
        data = bytes(data)
        starts_request = self.at_rest
        start = self._read_known(data) if starts_request and not self._once else 0
        if start < len(data):
            self._parse(data[start:] if start else data)
        exchanges, self._exchanges = self._exchanges, []
        if starts_request and not start and self.at_rest and len(exchanges) == 1:
            self._remember(data, exchanges[0])
        return exchanges

    def _read_known(self, data: bytes) -> int:
        """Read the complete requests at the start of the data whose heads are known. Returns where the others begin."""
        start = 0
        while (head := _head_cache.find(data, start)) is not None:
            body = start + head.head_bytes
            end = body + head.body_bytes
            route = self._router.resolve(head.method, head.path)
            if end > len(data) or not isinstance(route, Route) or head.body_bytes > route.max_body_bytes:
                break
            request = Request(head.method, head.path, head.query, head.headers, b"", self.peer, head.target)
            if not head.chunked:
                request.version = "1.0"
            decision = ALLOW if self.guard is None else self.guard.check(request, route)
            if decision is not ALLOW:
                if not isinstance(decision, Deny):
                    break
                self._exchanges.append(Exchange(request, decision.response, keep_alive=False, chunked=False))
                return len(data)
            request.body = data[body:end]
            self._exchanges.append(Exchange(request, route, keep_alive=True, chunked=head.chunked))
            start = end
        return start

    def _remember(self, data: bytes, exchange: Exchange) -> None:
        """Remember the head of a request that arrived in one piece, if the client repeats it."""
        head = repeatable_head(data, exchange.request)
        if head != self._last_head:
            self._last_head = head  # not more yet: some clients send a different head each time
        elif (
            head
            and exchange.keep_alive
            and isinstance(exchange.answer, Route)
            and exchange.answer.parses_query
        ):
            _head_cache.add(head, exchange.request, chunked=exchange.chunked)

    def _parse(self, data: bytes) -> None:
        if self.at_rest and data.startswith(_HTTP2):
            self._refuse(self._router.other_version)
            return
        # Counts head, chunk framing and trailers; the callbacks reset it when there is progress.
        self._loose_bytes += len(data)
        try:
            self._feed(data)
            if self._loose_bytes > MAX_HEAD_BYTES:
                raise _Refused(_HEAD_TOO_BIG)
        except _Refused as refusal:
            self._refuse(refusal.response)
        except httptools.HttpParserCallbackError as error:
            self._refuse(_refusal_in(error))
        except httptools.HttpParserError:
            if not self._url and (spoken := protocol_of(data)) in ("NSQ", "TLS"):
                self._pending = ForeignRequest("", "", {}, {}, b"", self.peer, spoken=spoken)
            self._refuse(INVALID_REQUEST)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                (offset,) = upgrade.args
                if self._switches:
                    self.beyond = data[offset:]
                    return
                # RFC 9110 7.8: a server may ignore Upgrade, and some clients (Java's) offer h2c with every request.
                # The parser has skipped the body, so it parses the request again without the Upgrade header.
                data = self._head_without_upgrade() + data[offset:]
                self._parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        headers = (f"{name}: {value}\r\n" for name, value in self._headers.items() if name != "upgrade")
        version = b"1.1" if self._chunked else b"1.0"
        line = b"%b %b HTTP/%b\r\n" % (self._method.encode(), self._url, version)
        return line + "".join(headers).encode("latin-1") + b"\r\n"

    def _refuse(self, response: Response) -> None:
        self._body.clear()
        self.unfinished_bytes = 0
        self._exchanges.append(Exchange(self._request(), response, keep_alive=False, chunked=False))

    def _request(self) -> Request:
        """Return the request whose head has arrived; of a refused one, the fields parsed so far."""
        if self._pending is None:
            self._pending = Request(
                self._method, self._path, self._query, self._headers, b"", self.peer, self._target
            )
            self._pending.version = self._version
        return self._pending

    async def decide(self) -> Exchange | None:
        """Have the guard look up the client of the undecided request. Returns its refusal as an exchange."""
        assert self.guard is not None  # it has left the request undecided
        route = self._answer
        decision = await self.guard.look_up(self._request(), route if isinstance(route, Route) else None)
        self.undecided = False
        try:
            self._obey(decision)
        except _Refused as refused:
            self._refuse(refused.response)
            return self._exchanges.pop()
        return None

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        self.at_rest = False
        self._in_head = True
        self._method = self._path = self._target = ""
        self._query: Mapping[str, str] = {}
        self._headers: dict[str, str] = {}
        self._header_count = 0
        self._url = b""
        self._version = "1.1"
        self._body: list[bytes | bytearray] = []
        self._body_bytes = 0
        self._pending = None
        self.undecided = False
        self._switches = False
        self.unfinished_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # RFC 9110 6.5.1: trailers must not be merged into the headers
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            raise _Refused(_HEAD_TOO_BIG)
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").rstrip()
        known = self._headers.get(key)
        if known is not None:
            text = f"{known}; {text}" if key == "cookie" else f"{known}, {text}"  # RFC 9113 8.2.3
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        self._in_head = False
        self._method = parser.get_method().decode("ascii")
        self._target = self._url.decode("ascii", "backslashreplace")
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Refused(self._router.other_version)
        # RFC 9112 3.2: a server must refuse HTTP/1.1 without Host.
        if version == "1.1" and "host" not in headers:
            raise _Refused(INVALID_REQUEST)
        if version == "1.0" and "transfer-encoding" in headers:  # RFC 9112 6.1: a proxy may see another end
            raise _Refused(INVALID_REQUEST)
        # RFC 9112 6.1: the chunks may hold compressed data, which must not be taken for the body.
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _Refused(_UNKNOWN_CODING)
        self._version = version
        self._chunked = version == "1.1"
        self._upgrade = parser.should_upgrade()
        self._keep_alive = parser.should_keep_alive() and not self._once
        self._answer = answer = self._resolve()
        route = answer if isinstance(answer, Route) else None
        self._max_body_bytes = route.max_body_bytes if route is not None else DEFAULT_MAX_BODY_BYTES
        decision = ALLOW if self.guard is None else self.guard.check(self._request(), route)
        self.undecided = isinstance(decision, NeedsLookup)
        self._obey(decision)
        if route is not None and route.upgrade:
            self._switch(route.upgrade)
        if self._method == "CONNECT":  # the data after it is not HTTP, and no route has this method
            raise _Refused(answer if isinstance(answer, Response) else INVALID_REQUEST)
        if self._chunked and "expect" in headers:
            self.continue_expected = headers["expect"].lower() == "100-continue"

    def _switch(self, protocol: str) -> None:
        """Expect the other protocol after the request that has asked for it; refuse a request that has not."""
        headers = self._headers
        offered = {each.strip().lower() for each in headers.get("upgrade", "").split(",")}
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self._switches = self._upgrade and self._chunked and not has_body and protocol in offered
        if not self._switches:
            self._answer = upgrade_required(protocol)

    def _obey(self, decision: Decision) -> None:
        """Raises _Refused: the guard denies the request, or its body is too long."""
        if isinstance(decision, Deny):
            raise _Refused(decision.response)
        if isinstance(decision, Allow) and decision.max_body_bytes is not None:
            self._max_body_bytes = min(self._max_body_bytes, decision.max_body_bytes)
        self._most_bytes = int(self._headers.get("content-length", self._max_body_bytes))
        if max(self._most_bytes, self._body_bytes) > self._max_body_bytes:
            self._refuse_body()

    def _resolve(self) -> Route | Response:
        url = self._url
        split, parse = split_target, parse_query
        if len(url) <= _KNOWN_TARGET_BYTES:
            split, parse = _split_known, _parse_known
        try:
            self._path, query = split(url)
        except ValueError:
            return INVALID_REQUEST
        answer = self._router.resolve(self._method, self._path, query)
        if query and isinstance(answer, Route) and answer.parses_query:
            try:
                self._query = parse(query)
            except ValueError:
                return INVALID_REQUEST
        return answer

    def _refuse_body(self) -> None:
        answer = self._answer
        if isinstance(answer, Route):
            answer = HTTPError(413, answer.too_big).response()
        raise _Refused(answer)

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        self.continue_expected = False
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            self._refuse_body()
        if self._body_bytes > _LARGE_BYTES:
            self.unfinished_bytes = max(1, self._most_bytes - self._body_bytes)
        if len(body) >= _PIECE_BYTES or not self._body:
            self._body.append(body)
        elif isinstance(last := self._body[-1], bytearray):
            last += body
        else:
            self._body.append(bytearray(body))

    def on_message_complete(self) -> None:
        if self._upgrade and not self._switches:
            return  # `_feed` parses it again, with its body
        self._loose_bytes = 0
        self.continue_expected = False
        self.at_rest = True
        self.unfinished_bytes = 0
        request = self._pending or self._request()
        request.body = b"".join(self._body)
        self._body.clear()  # an idle connection must not keep it in memory
        self._pending = None
        self._exchanges.append(
            Exchange(
                request,
                self._answer,
                self._keep_alive and not self._switches,
                self._chunked,
                self.undecided,
            )
        )
        self.undecided = False


def _refusal_in(error: httptools.HttpParserCallbackError) -> Response:
    # httptools attaches any exception of a callback as context of its own error, even KeyboardInterrupt.
    cause = error.__context__
    if isinstance(cause, _Refused):
        return cause.response
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    logger.error("a request could not be parsed", exc_info=cause or error)
    return INTERNAL_ERROR
