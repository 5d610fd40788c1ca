"""Messages as JSON, in the same form in all tools, with RFC 3339 times beside Unix nanoseconds."""

import base64
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache

_NS_PER_S = 1_000_000_000
_encode = json.JSONEncoder(ensure_ascii=False).encode  # faster than `json.dumps`, which makes an encoder
_ACTS_ON_TERMINALS = re.compile(
    "[\\x7f-\\x9f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]"
)
"""What JSON need not escape, but terminals and editors act on: C1 controls, line breaks, and changes of direction."""


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=64)  # the messages of a batch have the same time
def rfc3339(time_ns: int) -> str | None:
    """Return Unix nanoseconds as `2026-11-23T00:34:50.123456789Z`; None: past the year 9999."""
    seconds, ns = divmod(time_ns, _NS_PER_S)
    try:
        return f"{_second(seconds)}.{ns:09d}Z"
    except (OverflowError, ValueError, OSError):
        return None


def body_field(body: bytes) -> dict[str, str]:
    """Return a message's body as part of a JSON object: `body`, or `body_base64` if it is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def message_record(
    topic: str | None,
    message_id: str,
    timestamp_ns: int,
    attempts: int,
    body: bytes,
    *,
    sequence: int | None = None,
    due_ns: int = 0,
    headers: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return the JSON object of a message; with the sequence and the due time if it is from a log.

    The topic is None if it is unknown. `headers` are in it only if there are some.
    """
    record: dict[str, object] = {
        "topic": topic,
        "id": message_id,
        "timestamp_ns": timestamp_ns,
        "timestamp": rfc3339(timestamp_ns),
        "attempts": attempts,
    }
    if sequence is not None:
        record |= {"sequence": sequence, "due_ns": due_ns or None, "due": rfc3339(due_ns) if due_ns else None}
    if headers:
        record["headers"] = dict(headers)
    return record | body_field(body)


def json_line(record: Mapping[str, object]) -> str:
    """Return a JSON object on one line, with its end, and without characters that terminals act on."""
    text = _encode(record)
    if not text.isprintable():
        text = _ACTS_ON_TERMINALS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text + "\n"


def json_lines(records: Iterable[Mapping[str, object]]) -> str:
    """Return one JSON object per line."""
    return "".join(map(json_line, records))
