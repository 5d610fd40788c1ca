"""The payload of a request with several messages: a JSON array, or NDJSON.

A body that is JSON goes in unchanged, so numbers keep all digits; in NDJSON its line breaks become blanks. Any other
body becomes a JSON string, or, if it is not UTF-8, the object `{"body_base64": "..."}`. With metadata, each message is
an object with topic, id, timestamp_ns, timestamp, attempts, headers if it has some, and body or body_base64, as `qcli
tail` writes it.
"""

import json
from collections.abc import Iterable
from enum import StrEnum

from ...protocol.go_json import refuse_constant
from ...protocol.message_json import body_field, message_record
from .templates import Values

_encode = json.JSONEncoder(ensure_ascii=False).encode
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")


class PayloadFormat(StrEnum):
    """How several messages stand in one request."""

    JSON = "json"
    NDJSON = "ndjson"

    @property
    def content_type(self) -> str:
        return "application/json" if self is PayloadFormat.JSON else "application/x-ndjson"


_decode = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=refuse_constant).decode
"""Checks JSON. Numbers are not converted: a conversion would be slow, or fail, for numbers with many digits."""


def is_json(body: bytes) -> bool:
    """Return whether a body is one JSON value in UTF-8 (RFC 8259)."""
    try:
        _decode(body.decode())
    except (ValueError, RecursionError):
        return False
    return True


def item(values: Values, *, metadata: bool) -> bytes:
    """Return one message as JSON; without line breaks, unless its body is JSON with line breaks."""
    if metadata:
        identity = values.id.decode("ascii", "replace")
        record = message_record(
            *(values.topic, identity, values.timestamp_ns, values.attempts, values.body),
            headers=values.headers,
        )
        return _encode(record).encode()
    if is_json(values.body):
        return values.body
    field = body_field(values.body)
    return _encode(field.get("body", field)).encode()


def payload(messages: Iterable[Values], form: PayloadFormat, *, metadata: bool) -> bytes:
    items = [item(each, metadata=metadata) for each in messages]
    if form is PayloadFormat.JSON:
        return b"[" + b",".join(items) + b"]"
    return b"".join(each.translate(_LINE_BREAKS) + b"\n" for each in items)
