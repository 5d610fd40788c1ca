"""Requests, parameters, responses and errors of HTTP handlers; encodes the head of a response."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeAlias

import trio

from ..access.policy import Identity
from ..protocol import is_valid_name
from ..server.body_memory import PieceRoom

Body: TypeAlias = bytes | AsyncGenerator[bytes, None]
"""The body of a response: complete, or a generator of its pieces."""

TakesOver: TypeAlias = Callable[[trio.abc.Stream], Awaitable[None]]
"""Speaks another protocol on the stream of an HTTP connection, which is closed when this returns."""

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_REASONS = {413: "Request Entity Too Large"}
"""nsqd's reason phrases that Python 3.13 has renamed."""


@dataclass(slots=True)  # not frozen: that would make the construction four times slower
class Request:
    """One complete HTTP request. Must not be changed, except by the guard.

    Attributes:
        method: The method in upper case.
        path: The path, percent-decoded, without the query.
        query: The decoded parameters of the query string. The first value wins; a parameter without `=` has the value
            `""`.
        headers: Header values by lower-case name; repeated headers are joined with `", "`.
        peer: The client's address as formatted by `format_peer`; `""` if the stream is not a socket.
        target: Path and query as received, for logs: ASCII without control characters.
        identity: The authenticated client; None without authentication.
        context: What a guard has found out besides, for the handler.
        version: Of HTTP: `1.1` or `1.0`.
        room: For a generated answer, if the route has `Route.pieces`.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: str
    target: str = ""
    identity: Identity | None = None
    context: object = None
    version: str = field(default="1.1", compare=False)
    room: PieceRoom | None = field(default=None, compare=False)


@dataclass(slots=True)
class ForeignRequest(Request):
    """What a client sent that speaks another protocol.

    Attributes:
        spoken: `NSQ` or `TLS`.
    """

    spoken: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response. It can be returned many times, unless its body is a generator.

    Attributes:
        body: The body. Each piece of a generator is sent as a chunk; empty pieces are skipped. The connection always
            closes the generator, also if the client disconnects, which it notices when it sends the next piece. An
            exception in the generator is logged and truncates the response, so that the client notices; raise
            `CutOff` for an expected one.
        content_type: The Content-Type header; None for none.
        headers: Further headers; `items` may repeat a name. The server adds Content-Length, Transfer-Encoding, Date
            and Connection.
        delay_s: Send the response after this time, to slow down failed logins.
        held_bytes: About the memory that a generator of the body holds until its end, for an `AnswerLimiter`.
        takes_over: Called with the client's stream after the head was sent. Only with status 101, for a route that has
            `Route.upgrade`. The stream is a `trio.SocketStream` if the client's is one and has sent nothing more yet.
    """

    status: int = 200
    body: Body = b""
    content_type: str | None = _TEXT
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    held_bytes: int = 0
    takes_over: TakesOver | None = None

    @classmethod
    def text(cls, text: str, status: int = 200) -> Response:
        """Build a plain text response, in UTF-8."""
        return cls(status, text.encode())

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Response:
        """Build a JSON response without blanks, as NSQ does. Raises TypeError as `json.dumps` does."""
        return cls.encoded(compact_json(value).encode(), status)

    @classmethod
    def encoded(cls, body: Body, status: int = 200, *, held_bytes: int = 0) -> Response:
        """Build a JSON response of JSON that is already encoded."""
        return cls(status, body, _JSON, held_bytes=held_bytes)

    @classmethod
    def empty(cls, status: int = 200) -> Response:
        """Build a response without a body and content type."""
        return cls(status, content_type=None)


class HTTPError(Exception):
    """Raised by a handler to answer with NSQ's error body, `{"message":"CODE"}`.

    Attributes:
        status: The status code.
        code: NSQ's name of the error, as in `MISSING_ARG_TOPIC`.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code

    def response(self, headers: Mapping[str, str] | None = None, delay_s: float = 0.0) -> Response:
        """Build the response for the client."""
        response = Response.json({"message": self.code}, self.status)
        return replace(response, headers=headers, delay_s=delay_s) if headers else response


class CutOff(Exception):
    """Raised by a body's generator to truncate the response for an expected reason. Its text is logged."""


class EndOfAnswer(Exception):
    """Raised by a guard to end a response that may be complete after any piece."""


def compact_json(value: Any) -> str:
    """Encode JSON without blanks, as NSQ does. Raises TypeError as `json.dumps` does."""
    return _ENCODER.encode(value)


# One for all: `json.dumps` with arguments makes an encoder for each call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


# ---------------------------------------------------------------------- parameters, with NSQ's error strings


def given(request: Request, parameter: str) -> str:
    """Return a required parameter. Raises HTTPError."""
    if parameter not in request.query:
        raise HTTPError(400, f"MISSING_ARG_{parameter.upper()}")
    return request.query[parameter]


def valid_name(request: Request, parameter: str, invalid: str) -> str:
    """Return a required parameter that must be a valid name; `invalid` is the error code otherwise."""
    name = given(request, parameter)
    if not is_valid_name(name):
        raise HTTPError(400, invalid)
    return name


def channel_names(request: Request) -> tuple[str, str]:
    """Return valid names of a topic and a channel, which need not exist. Raises HTTPError."""
    topic = valid_name(request, "topic", "INVALID_ARG_TOPIC")
    return topic, valid_name(request, "channel", "INVALID_ARG_CHANNEL")


# ---------------------------------------------------------------------- other protocols


def switching(takes_over: TakesOver) -> Response:
    """Build the response after which another protocol is spoken on the connection."""
    return Response(101, content_type=None, takes_over=takes_over)


def upgrade_required(protocol: str) -> Response:
    """Build the response for a request that has not asked for the only protocol of its route."""
    error = HTTPError(426, f"UPGRADE_REQUIRED: this needs HTTP/1.1 with Upgrade: {protocol}")
    return error.response({"Upgrade": protocol})


def encode_switching(protocol: str) -> bytes:
    """Encode the head of the response that `switching` has built."""
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % protocol.encode()
    )


# ---------------------------------------------------------------------- the head of a response

INTERNAL_ERROR = HTTPError(500, "INTERNAL_ERROR").response()
"""The answer to a request that caused an unexpected error."""


@lru_cache(maxsize=256)
def _constant_head(status: int, content_type: str | None, plain: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status) or HTTPStatus(status).phrase}"]
    if not plain:
        lines.append("X-NSQ-Content-Type: nsq; version=1.0")
    if content_type is not None:
        lines.append(_single_line(f"Content-Type: {content_type}"))
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


@lru_cache(maxsize=64)  # most answers of the same second are equal
def _simple_head(status: int, content_type: str | None, plain: bool, body_bytes: int, about: bytes) -> bytes:
    head = _constant_head(status, content_type, plain)
    return b"%bContent-Length: %d\r\n%b\r\n" % (head, body_bytes, about)


def _single_line(header: str) -> str:
    if "\r" in header or "\n" in header:
        raise ValueError(f"line break in the header {header!r}")
    return header


def encode_head(response: Response, *, plain: bool, about: bytes, chunked: bool) -> bytes:
    """Encode the status line and headers of a response, with the blank line at their end.

    Args:
        plain: Leave out the X-NSQ-Content-Type header.
        about: Complete header lines about the connection: Date, Connection.
        chunked: Announce a generated body as chunked. Without it the body ends with the connection, as HTTP/1.0
            requires.

    Raises:
        ValueError: The status is not an HTTP status, or a header cannot be encoded.
    """
    if not isinstance(response.body, bytes):
        framing = b"Transfer-Encoding: chunked\r\n" if chunked else b""
    elif not response.headers:
        return _simple_head(response.status, response.content_type, plain, len(response.body), about)
    else:
        framing = b"Content-Length: %d\r\n" % len(response.body)
    lines = (_single_line(f"{name}: {value}") + "\r\n" for name, value in response.headers.items())
    extra = "".join(lines).encode("latin-1")
    head = _constant_head(response.status, response.content_type, plain)
    return b"%b%b%b%b\r\n" % (head, framing, about, extra)
