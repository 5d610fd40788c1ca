"""Messages as JSON objects, with `body` or `body_base64`, and their bodies as a column of a table."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_nsq.wording import printable

from ...framework.output import body_field, is_terminal
from ...framework.times import rfc3339

if TYPE_CHECKING:
    from trio_nsq.log import RecordBatch

_SHOWN = 60
_LEAST_SHOWN = 20


def body_of(message: Mapping[str, Any]) -> bytes:
    """Return the body as bytes."""
    if "body" in message:
        return str(message["body"]).encode()
    return base64.b64decode(message["body_base64"])


def available_width(rows: Sequence[Sequence[str]]) -> int:
    """Return the number of characters of a body that fit beside these columns, including headings."""
    taken = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 0
    return max(_LEAST_SHOWN, width - taken if width else _SHOWN)


def body_preview(message: Mapping[str, Any], room: int) -> str:
    """Return the beginning of a body, on one line."""
    in_text = "body" in message
    text = printable(message["body"][: room + 1]) if in_text else str(body_of(message)[: room + 1])[2:-1]
    return text if len(text) <= room else text[: room - 3] + "..."


def with_body_column(
    headings: Sequence[str], rows: Sequence[Sequence[str]], messages: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Return headings and rows with an additional column for bodies."""
    room = available_width([headings, *rows])
    table = [[*row, body_preview(message, room)] for row, message in zip(rows, messages, strict=True)]
    return [[*headings, "BODY"], *table]


def log_record(topic: str | None, batch: RecordBatch, index: int, body: bytes) -> dict[str, object]:
    """Return the JSON object of one message of a batch, with RFC 3339 times; the topic is None if it is unknown."""
    return {
        "topic": topic,
        "id": f"{batch.first_id + index:016x}",
        "timestamp_ns": batch.timestamp_ns,
        "timestamp": rfc3339(batch.timestamp_ns),
        "attempts": 0,
        "sequence": batch.base_sequence + index,
        "due_ns": batch.due_ns or None,
        "due": rfc3339(batch.due_ns) if batch.due_ns else None,
        **body_field(body),
    }
