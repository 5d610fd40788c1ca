"""What handlers take and give: requests and their parameters, responses and errors; the bytes of a response's head."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeAlias

from ..protocol import is_valid_name

Body: TypeAlias = bytes | AsyncGenerator[bytes, None]
"""The body of a response: all of it, or a generator of its pieces."""

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_REASONS = {413: "Request Entity Too Large"}
"""Reason phrases of nsqd's that Python 3.13 has renamed."""


@dataclass(slots=True)  # frozen, it would take four times as long to make
class Request:
    """One HTTP request, read to its end; not to be changed.

    Attributes:
        method: In upper case.
        path: Percent-decoded, without the query.
        query: The parameters of the query string, decoded; the first value wins, and a parameter given without
            `=` has the value `""`.
        headers: Header values by lower-case name; repeated headers are joined with `", "`.
        peer: The client's address, as `format_peer` puts it; `""` if the stream is not a socket.
        target: Path and query as they were sent, for logs: ASCII, and no control characters.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: str
    target: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response. It may be made once and returned many times, unless its body is a generator.

    Attributes:
        body: A generator's pieces are sent as they come, each in a chunk of its own; empty pieces are
            skipped. The connection closes the generator in every case, also when the client is gone, which it
            notices when it sends the next piece. An exception in it is logged and cuts the response off, so that
            the client can tell; `CutOff` is one for that.
        content_type: The Content-Type header; None for none.
        headers: More headers. Content-Length, Transfer-Encoding, Date and Connection are the server's.
    """

    status: int = 200
    body: Body = b""
    content_type: str | None = _TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, text: str, status: int = 200) -> Response:
        """A plain text response, in UTF-8."""
        return cls(status, text.encode())

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Response:
        """A JSON response, written without blanks as NSQ does. Raises TypeError as `json.dumps` does."""
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return cls(status, text.encode(), _JSON)

    @classmethod
    def empty(cls, status: int = 200) -> Response:
        """A response without a body and without a content type."""
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

    def response(self) -> Response:
        """What the client is sent."""
        return Response.json({"message": self.code}, self.status)


class CutOff(Exception):
    """Raised by the generator of a body that cannot go on, and not because of a defect; its text is logged."""


# ---------------------------------------------------------------------- parameters, with NSQ's error strings


def given(request: Request, parameter: str) -> str:
    """A parameter that has to be there, whatever it says."""
    if parameter not in request.query:
        raise HTTPError(400, f"MISSING_ARG_{parameter.upper()}")
    return request.query[parameter]


def valid_name(request: Request, parameter: str, invalid: str) -> str:
    """A parameter that has to be a valid name; `invalid` is the error if it is none."""
    name = given(request, parameter)
    if not is_valid_name(name):
        raise HTTPError(400, invalid)
    return name


def channel_names(request: Request) -> tuple[str, str]:
    """The valid names of a topic and a channel, which need not be there."""
    topic = valid_name(request, "topic", "INVALID_ARG_TOPIC")
    return topic, valid_name(request, "channel", "INVALID_ARG_CHANNEL")


# ---------------------------------------------------------------------- the head of a response

INTERNAL_ERROR = HTTPError(500, "INTERNAL_ERROR").response()
"""The answer to a request in which an unexpected error occurred."""


@lru_cache(maxsize=256)
def _constant_head(status: int, content_type: str | None, plain: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status) or HTTPStatus(status).phrase}"]
    if not plain:
        lines.append("X-NSQ-Content-Type: nsq; version=1.0")
    if content_type is not None:
        lines.append(_single_line(f"Content-Type: {content_type}"))
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


@lru_cache(maxsize=64)  # most answers of a second are alike
def _simple_head(status: int, content_type: str | None, plain: bool, body_bytes: int, about: bytes) -> bytes:
    head = _constant_head(status, content_type, plain)
    return b"%bContent-Length: %d\r\n%b\r\n" % (head, body_bytes, about)


def _single_line(header: str) -> str:
    if "\r" in header or "\n" in header:
        raise ValueError(f"line break in the header {header!r}")
    return header


def encode_head(response: Response, *, plain: bool, about: bytes, chunked: bool) -> bytes:
    """The status line and headers of a response, with the blank line that ends them.

    Args:
        plain: Leave out NSQ's own header.
        about: Whole lines about the message rather than its content: Date, Connection.
        chunked: If the body is a generator, announce it as chunked; without it, such a body ends when the
            connection does, which is all that HTTP/1.0 has.

    Raises:
        ValueError: The status is not one of HTTP's, or a header cannot be sent.
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
