"""Answers in the form of nsqadmin's API."""

from collections.abc import Sequence
from typing import Any

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
