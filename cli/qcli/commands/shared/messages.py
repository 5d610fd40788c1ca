"""Messages as JSON objects, with `body` or `body_base64`, and their bodies as a column of a table."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_nsq.protocol.message_json import message_record
from trio_nsq.text.wording import printable

from ...framework.output import is_terminal

if TYPE_CHECKING:
    from trio_nsq.log import RecordBatch

_LEAST_SHOWN = 20


def body_of(message: Mapping[str, Any]) -> bytes:
    if "body" in message:
        return str(message["body"]).encode()
    return base64.b64decode(message["body_base64"])


def available_width(rows: Sequence[Sequence[str]]) -> int | None:
    """Return the number of characters of a body that fit beside these columns, including headings; None: no limit."""
    if not is_terminal(sys.stdout):
        return None
    taken = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    return max(_LEAST_SHOWN, shutil.get_terminal_size().columns - taken)


def body_preview(message: Mapping[str, Any], room: int | None) -> str:
    """Return a body on one line: its beginning, or, without a limit, all of it."""
    end = None if room is None else room + 1
    text = printable(message["body"][:end]) if "body" in message else str(body_of(message)[:end])[2:-1]
    return text if room is None or len(text) <= room else text[: room - 3] + "..."


def with_body_column(
    headings: Sequence[str], rows: Sequence[Sequence[str]], messages: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Return headings and rows with an additional column for bodies."""
    room = available_width([headings, *rows])
    table = [[*row, body_preview(message, room)] for row, message in zip(rows, messages, strict=True)]
    return [[*headings, "BODY"], *table]


def log_record(topic: str | None, batch: RecordBatch, index: int, body: bytes) -> dict[str, object]:
    """Return the JSON object of one message of a batch; the topic is None if it is unknown."""
    return message_record(
        topic,
        f"{batch.first_id + index:016x}",
        batch.timestamp_ns,
        0,
        body,
        sequence=batch.base_sequence + index,
        due_ns=batch.due_ns,
    )
