"""Messages as JSON objects, with `body` or `body_base64`, and their bodies as a column of a table."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_nsq.protocol.message_json import message_record
from trio_nsq.text.wording import printable

from ...framework.output import is_terminal, plain_table

if TYPE_CHECKING:
    from trio_nsq.log import RecordBatch

_LEAST_SHOWN = 20


def body_of(message: Mapping[str, Any]) -> bytes:
    if "body" in message:
        return str(message["body"]).encode()
    return base64.b64decode(message["body_base64"])


def columns_to_leave_out(
    headings: Sequence[str], rows: Sequence[Sequence[str]], dispensable: Sequence[str]
) -> tuple[str, ...]:
    """Return the columns to leave out on a narrow terminal, so that bodies have room: the first ones of `dispensable`.

    Args:
        dispensable: Headings of columns.
    """
    for count in range(len(dispensable)):
        if (
            room := available_width(_without(dispensable[:count], headings, rows))
        ) is None or room > _LEAST_SHOWN:
            return tuple(dispensable[:count])
    return tuple(dispensable)


def _without(
    left_out: Sequence[str], headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return headings and rows without some columns."""
    kept = [index for index, heading in enumerate(headings) if heading not in left_out]
    return [[row[index] for index in kept] for row in (headings, *rows)]


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
    return shortened(text, room)


def shortened(text: str, room: int | None) -> str:
    """Return the beginning of a text that is longer than the room for it; None: no limit."""
    return text if room is None or len(text) <= room else text[: room - 3] + "..."


def headers_text(headers: Mapping[str, str]) -> str:
    """Return headers as `a=1,b=2`."""
    return ",".join([f"{name}={value}" for name, value in headers.items()])


def message_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    messages: Sequence[Mapping[str, Any]],
    left_out: Sequence[str] = (),
) -> str:
    """Return headings and rows as text, with more columns for bodies, and for headers if any message has some.

    Args:
        left_out: Headings of columns that are not shown.
    """
    headings, *rows = _without(left_out, headings, rows)
    if any(message.get("headers") for message in messages):
        headings = [*headings, "HEADERS"]
        room = 2 * _LEAST_SHOWN if is_terminal(sys.stdout) else None
        texts = [shortened(printable(headers_text(each.get("headers") or {})), room) for each in messages]
        rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
    room = available_width([headings, *rows])
    table = [[*row, body_preview(message, room)] for row, message in zip(rows, messages, strict=True)]
    return plain_table([[*headings, "BODY"], *table], len(headings) + 1)


def log_records(
    topic: str | None, batch: RecordBatch, indexes: range, bodies: Sequence[bytes] | None = None
) -> Iterator[dict[str, object]]:
    """Yield the JSON objects of messages of a batch.

    Args:
        topic: None if it is unknown.
        bodies: Those of all messages of the batch; None: as the batch has them.
    """
    bodies, headers = batch.messages.bodies() if bodies is None else bodies, batch.headers()
    for index in indexes:
        yield message_record(
            topic,
            f"{batch.first_id + index:016x}",
            batch.timestamp_ns,
            0,
            bodies[index],
            sequence=batch.base_sequence + index,
            due_ns=batch.due_ns,
            headers=headers[index],
        )
