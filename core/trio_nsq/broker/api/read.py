"""`/topic/read` and `/topic/bounds`: read a topic's log by sequence or time. nsqd does not have these endpoints.

See docs/how-to/read-and-replay.md. A read does not affect channels, and returns all messages in the log, finished or
not.
"""

import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

from ...http.messages import HTTPError, Request, Response
from ...log import Log, RecordBatch
from ...log.gaps import Gap
from ...log.positions import EARLIEST, LATEST, Position, parse_position
from ...log.raw import encode_raw
from ...log.record_metadata import headers_bytes
from ...log.records import RawRecord
from ...log.selection import Selection
from ...text.durations import parse_duration_ns
from ..reader_pool import Reading
from ..server import Server
from ..state.topic import Topic
from .json_lines import gap_line, message_lines
from .targets import find_topic, whole_number

MAX_WAIT_S = 60
"""Limit of `wait`. The broker notices a disconnected client only at the next message, or after this time."""
_NS_PER_S = 1_000_000_000
PIECE_BYTES = 64 * 1024
PIECE_MESSAGES = 200
"""A piece with this many messages takes half a millisecond; then other tasks run."""
NDJSON = "application/x-ndjson; charset=utf-8"
_OCTETS = "application/octet-stream"


async def read(server: Server, request: Request) -> Response:
    """Stream the messages between two positions in the log, as JSON lines or raw record batches."""
    topic = find_topic(server, request)
    form = request.query.get("format", "jsonl")
    if form not in ("jsonl", "raw"):
        raise HTTPError(400, f"INVALID_FORMAT: {form!r} is neither jsonl nor raw")
    room = _Room(whole_number(request, "max_messages", least=1), whole_number(request, "max_bytes", least=1))
    wait_s = _wait_s(request)
    first = position_given(request, "from", EARLIEST)
    until = position_given(request, "until", LATEST)
    start = await _sequence(server, topic, first)
    end: int | None = None
    if "until" in request.query or not wait_s:
        end = max(start, await _sequence(server, topic, until))
    if until.kind == "sequence" and wait_s:
        end = max(start, until.value)  # the sequence may not exist yet
    # Only for a position by sequence, the answer can begin with a gap of deleted messages.
    begin = min(first.value, start) if first.kind == "sequence" else start
    log = topic.log
    if begin < log.disk_first_sequence and (end is None or begin < end):
        # An archive that is away is an error, not an answer that is cut off.
        await server.readers.call(topic, partial(log.read_raw, begin, 1))
    headers = {
        "X-NSQ-First-Sequence": str(log.first_sequence),
        "X-NSQ-Next-Sequence": str(log.next_sequence),
        "X-NSQ-Start-Sequence": str(start),
    }
    if end is not None:
        headers["X-NSQ-End-Sequence"] = str(end)
    if log.incarnation is not None:
        headers["X-NSQ-Incarnation"] = log.incarnation.hex()
    if form == "raw":
        raw = Reading(server.readers, topic, log.read_raw, begin, end, wait_s, _held_raw, request.room)
        return Response(body=_raw_pieces(raw, room), content_type=_OCTETS, headers=headers)
    reading = Reading(server.readers, topic, log.read, begin, end, wait_s, held_as_json, request.room)
    selection = Selection(start) if end is None else Selection(start, end)
    lines = _json_pieces(topic.name, reading, selection, room)
    return Response(body=lines, content_type=NDJSON, headers=headers)


async def bounds(server: Server, request: Request) -> Response:
    """Return the bounds of the log as a JSON object; with `at`, also the sequence of that position."""
    topic = find_topic(server, request)
    at = position_given(request, "at", LATEST) if "at" in request.query else None
    found = await server.readers.call(topic, partial(_bounds, topic.log, at))
    return Response.json({"topic": topic.name, **found})


async def _sequence(server: Server, topic: Topic, position: Position) -> int:
    return await server.readers.call(topic, partial(position.sequence_in, topic.log))


def position_given(request: Request, parameter: str, default: Position) -> Position:
    """Return a parameter that is a position. Raises HTTPError."""
    if parameter not in request.query:
        return default
    try:
        return parse_position(request.query[parameter], time.time_ns())
    except ValueError as exc:
        raise HTTPError(400, f"INVALID_{parameter.upper()}: {exc}") from exc


def _wait_s(request: Request) -> float:
    try:
        wait_s = parse_duration_ns(request.query.get("wait", "0")) / _NS_PER_S
    except ValueError as exc:
        raise HTTPError(400, f"INVALID_WAIT: {exc}") from exc
    if wait_s > MAX_WAIT_S:
        raise HTTPError(400, f"INVALID_WAIT: at most {MAX_WAIT_S}s")
    return wait_s


def _bounds(log: Log, at: Position | None) -> dict[str, Any]:
    first, end = log.first_sequence, log.next_sequence
    first_ns = _first_ns(log)
    newest = next(log.headers(end - 1), None) if end > first else None
    bounds = {
        "first_sequence": first,
        "disk_first_sequence": log.disk_first_sequence,
        "next_sequence": end,
        "first_timestamp_ns": first_ns,
        "last_timestamp_ns": newest.timestamp_ns if newest is not None else None,
        "bytes": log.size_bytes + log.archived_bytes,
        "segments": len(log.files),
        "incarnation": log.incarnation.hex() if log.incarnation is not None else None,
    }
    if at is None:
        return bounds
    sequence = at.sequence_in(log)
    return bounds | {"at_sequence": sequence, "bytes_from_at": log.bytes_from(sequence)}


def _first_ns(log: Log) -> int | None:
    for file in log.archived_files:
        return file.first_ns
    oldest = next(log.headers(log.first_sequence), None)
    return oldest.timestamp_ns if oldest is not None else None


def _held_raw(record: RawRecord) -> int:
    return 3 * len(record.data)  # with a piece, and the system's buffers


def held_as_json(record: RecordBatch) -> int:
    """Return about how much memory a record takes until a client has its lines: they are longer by a third."""
    headers = headers_bytes(record.metadata, record.count)
    return 4 * (len(record.messages.data) + len(record.metadata) + min(headers, PIECE_BYTES))


class _Room:
    """The room left in an answer. The first message or record always fits.

    Attributes:
        full: No room is left.
    """

    def __init__(self, messages: int | None, size: int | None) -> None:
        self.full = False
        self._messages: float = math.inf if messages is None else messages
        self._bytes: float = math.inf if size is None else size
        self._begun = False

    def take(self, messages: int, size: int) -> bool:
        """Use room for messages. Returns False if they do not fit."""
        self._messages -= messages
        self._bytes -= size
        least = min(self._messages, self._bytes)
        begun, self._begun = self._begun, True
        self.full = least <= 0
        return least >= 0 or not begun


async def _json_pieces(
    topic: str, reading: Reading[RecordBatch], selection: Selection, room: _Room
) -> AsyncGenerator[bytes, None]:
    while found := await reading.next():
        pieces = _lines_in_pieces(topic, found, selection, room)
        found = []  # the memory of a piece is free before the next one is read
        for piece in pieces:
            yield piece
            piece = b""
        if room.full:
            return


def _lines_in_pieces(
    topic: str, found: Sequence[RecordBatch | Gap], selection: Selection, room: _Room
) -> Iterator[bytes]:
    lines: list[bytes] = []
    size = 0
    for each in found:
        if isinstance(each, Gap):
            lines.append(gap_line(topic, each))
            continue
        for line in message_lines(topic, each, selection.indexes(each)):
            if room.take(1, len(line)):
                lines.append(line)
                size += len(line)
            if room.full:
                yield b"".join(lines)
                return
            if size >= PIECE_BYTES or len(lines) >= PIECE_MESSAGES:
                yield b"".join(lines)
                lines, size = [], 0
    yield b"".join(lines)


async def _raw_pieces(reading: Reading[RawRecord], room: _Room) -> AsyncGenerator[bytes, None]:
    head = b""
    while found := await reading.next():
        piece, head = _raw_piece(found, head, room)
        found = []
        yield piece
        piece = b""
        if room.full:
            return


def _raw_piece(found: Sequence[RawRecord | Gap], head: bytes, room: _Room) -> tuple[bytes, bytes]:
    """Return the records that fit, encoded, and the head of the last one."""
    records: list[RawRecord] = []
    for each in found:
        if isinstance(each, RawRecord):
            if not room.take(each.header.count, len(each.data)):
                break
            records.append(each)
    return b"".join(encode_raw(records, head)), records[-1].head if records else head
