"""Formats messages of a log as JSON lines for `/topic/read` and `/channel/peek`.

The keys are those of `qcli tail --format json` and more: topic, id, timestamp_ns, attempts, sequence, due_ns, channel
(only for a message to a single channel), headers (only if there are some), and body, or body_base64 if the body is not
UTF-8.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

from ...log import RecordBatch
from ...log.gaps import Gap
from ...log.record_metadata import headers_in, only_channel
from ...protocol.headers import decode_headers

_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def message_lines(topic: str, batch: RecordBatch, indexes: range) -> Iterator[bytes]:
    """Yield a line for each message in a range of a batch."""
    # Topic names need no escapes.
    head = f'{{"topic":"{topic}","id":"'
    middle = f'","timestamp_ns":{batch.timestamp_ns},"attempts":0,"sequence":'
    due = f',"due_ns":{batch.due_ns or "null"},'
    if batch.metadata and batch.due_ns and (channel := only_channel(batch.metadata)) is not None:
        due += f'"channel":"{channel}",'
    texts = headers_in(batch.metadata, batch.count) if batch.metadata else ()
    data, sizes = batch.messages.data, batch.messages.sizes
    end = sum(sizes[: indexes.start]) + 4 * indexes.start
    for index in indexes:
        start = end + 4
        end = start + sizes[index]
        place = f"{batch.first_id + index:016x}{middle}{batch.base_sequence + index}"
        headers = _headers(texts[index]) if texts else ""
        yield f"{head}{place}{due}{headers}{_body(data[start:end])}}}\n".encode()


def message_line(
    topic: str,
    message_id: str,
    timestamp_ns: int,
    attempts: int,
    sequence: int,
    due_ns: int | None,
    body: bytes,
    headers: str = "",
    **more: Any,
) -> bytes:
    """Format the line of one message; `headers` is their text."""
    known = {
        "topic": topic,
        "id": message_id,
        "timestamp_ns": timestamp_ns,
        "attempts": attempts,
        "sequence": sequence,
        "due_ns": due_ns,
        **more,
    }
    return f"{_dump(known)[:-1]},{_headers(headers)}{_body(body)}}}\n".encode()


def gap_line(topic: str, gap: Gap, **more: Any) -> bytes:
    """Format the line for a gap, where messages are missing."""
    line = {
        "topic": topic,
        "gap": gap.reason,
        "first_sequence": gap.first_sequence,
        "next_sequence": gap.next_sequence,
        **more,
    }
    return f"{_dump(line)}\n".encode()


def _headers(text: str) -> str:
    return f'"headers":{_dump(decode_headers(text))},' if text else ""


def _body(body: bytes) -> str:
    try:
        return f'"body":{_dump(body.decode())}'
    except UnicodeDecodeError:
        return f'"body_base64":"{base64.b64encode(body).decode()}"'
