"""Answers in the form of nsqadmin's API, and the bodies of its requests, which are limited."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...protocol.go_json import encode_object

_NSQ = {"X-NSQ-Content-Type": "nsq; version=1.0"}
JSON = "application/json; charset=utf-8"


class APIError(Exception):
    """A request is refused.

    Attributes:
        status: Of the answer.
        message: NSQ's code, and the reason.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def bare(fields: dict[str, Any]) -> Response:
    """Return fields as JSON."""
    return Response(encode_object(fields), 200, _NSQ, JSON)


def answer(fields: dict[str, Any], warnings: Sequence[str] = ()) -> Response:
    """Return fields as JSON, with the key `message`: the warnings, or ""."""
    message = f"WARNING: {'; '.join(warnings)}" if warnings else ""
    return bare({**fields, "message": message})


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_object({"message": message}), status, {**_NSQ, **(headers or {})}, JSON)


def value(body: bytes, content_type: str) -> Response:
    """Return a value that has no key; an empty one has no type."""
    return Response(body, 200, _NSQ, content_type if body else None)


async def body_of(request: Request, limit: int) -> bytes:
    """Return the body of a request. Raises APIError: it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise APIError(413, f"BODY_TOO_BIG: the limit is {limit} bytes")
    return bytes(body)
