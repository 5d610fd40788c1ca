"""Download what a list of messages has on all its pages: the same filter and order, with the bodies as they are shown.

Messages are collected in bounded parts with their bodies as they were published, and read when they are written, so
that small bodies which become large ones take memory one after the other.
"""

from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ...api.request import Request
from ...bodies.reading import ReadBody
from ...http.messages import CutOff
from ...protocol.limits import MIB
from ...protocol.message_json import body_field, rfc3339
from ..record_files import RecordWriter, gaps
from ..upstream.client import Upstream, UpstreamError
from ..upstream.json_lines import MAX_BYTES as LINE_BYTES
from ..upstream.json_lines import read_lines
from .bodies import TopicBodies
from .cursor import Cursor
from .download import MAX_BYTES, MAX_MESSAGES, SILENCE_S, next_lines, record_of
from .message import Message, Row
from .paging import Start, read_page
from .search import Matches, search

_T = TypeVar("_T")
AT_ONCE = 500
"""Messages of one part, which is read from all brokers."""
MAX_LINES = 10_000
"""Of one list of a broker, which shows no more."""
LIMITS = f"up to {MAX_MESSAGES:,} messages or {MAX_BYTES // MIB} MiB"
LINE_LIMITS = f"up to {MAX_LINES:,} messages or {LINE_BYTES // MIB} MiB of each broker"
COLUMNS = (
    "topic",
    "broker",
    "sequence",
    "id",
    "timestamp_ns",
    "timestamp",
    "due",
    "headers",
    "body",
    "body_base64",
    "formats",
    "problem",
    "origin",
    "gap",
    "first_sequence",
    "next_sequence",
)
"""Of messages of a topic."""
LINE_COLUMNS = (
    "topic",
    "channel",
    "broker",
    "state",
    "sequence",
    "id",
    "timestamp_ns",
    "timestamp",
    "attempts",
    "due",
    "headers",
    "body",
    "body_base64",
    "formats",
    "problem",
    "origin",
    "gap",
)
"""Of messages of a channel."""
_LIMIT = "limit"
"""The gap at the end of a file that has no more, because it is long."""
Record = dict[str, object]
Reads = Callable[[Message], ReadBody]
ReadsLine = Callable[[bytes, Mapping[str, Any]], ReadBody]


async def download_list(
    upstream: Upstream,
    shown: TopicBodies,
    brokers: Sequence[str],
    start: Start,
    matches: Matches | None,
    read: Reads,
    writer: RecordWriter,
    *,
    missing: Mapping[str, str],
    max_messages: int = MAX_MESSAGES,
) -> AsyncGenerator[bytes, None]:
    """Yield nothing once all brokers answer, then the messages of a topic as the text of a file.

    Args:
        shown: The topic, with bodies as they were published; a search looks at them as they are shown.
        brokers: Their HTTP addresses.
        matches: Which messages; None: all.
        read: Reads the body of a message.
        missing: Why other brokers do not answer.
        max_messages: The file ends after the part with this message.

    Raises:
        UpstreamError: A broker does not answer.
        CutOff: It breaks off. Clients report it, as the answer is not complete.
    """
    count = size = 0
    begun = False
    while True:
        rows, following, errors = await _part(upstream, shown, brokers, start, matches)
        if errors and not begun:
            raise next(UpstreamError(address, reason) for address, reason in errors.items())
        if not begun:
            begun = True
            for opening in _opening(writer, missing):
                yield opening
        line, left = _lines_of(writer, partial(_record_of_row, shown.topic, read)), iter(rows)
        while piece := await next_lines(line, left):
            size += len(piece)
            yield piece
        if errors:
            raise CutOff("; ".join(f"{address}: {reason}" for address, reason in errors.items()))
        count += len(rows)
        if following is None:
            return
        if count >= max_messages or size >= MAX_BYTES:
            yield writer.lines([{"topic": shown.topic, "gap": _LIMIT}])
            return
        start = replace(start, cursor=following)


async def _part(
    upstream: Upstream, shown: TopicBodies, brokers: Sequence[str], start: Start, matches: Matches | None
) -> tuple[Sequence[Row], Cursor | None, Mapping[str, str]]:
    """Return the next rows, where the list goes on, and why brokers do not answer."""
    if matches is not None:
        found = await search(upstream, shown, brokers, start, AT_ONCE, matches, deadline_s=SILENCE_S)
        return found.messages, found.rest, found.errors
    listing = await read_page(upstream, shown, brokers, start, AT_ONCE, deadline_s=SILENCE_S)
    page = listing.page
    following = page.older if start.backwards else page.newer
    return page.rows, following if page.rows else None, listing.errors


def _record_of_row(topic: str, read: Reads, row: Row) -> Record:
    if not isinstance(row, Message):
        return {"broker": row.broker} | record_of(topic, row)
    body = read(row)
    shown = replace(row, body=body.content, formats=body.formats)
    record = {"broker": row.broker} | record_of(topic, shown)
    del record["attempts"]  # a log does not know it
    return record | _about(body, formats=False) | ({"origin": row.origin} if row.origin else {})


async def download_lines(
    upstream: Upstream,
    brokers: Sequence[str],
    request: Callable[[int], Request[list[dict[str, Any]]]],
    about: Mapping[str, str],
    read: ReadsLine,
    writer: RecordWriter,
    *,
    has_more: bool,
    missing: Mapping[str, str],
) -> AsyncGenerator[bytes, None]:
    """Yield nothing once the first broker answers, then the text of a file: one broker after the other.

    Args:
        brokers: Their HTTP addresses.
        request: Asks for up to `MAX_LINES` messages from a sequence on.
        about: Keys of each record: the topic and the channel.
        read: Reads a body; gets the line that it is in, too.
        has_more: Whether to ask again after the last sequence; otherwise the broker lists no more.
        missing: Why other brokers do not answer.

    Raises as `download_list`.
    """
    count = size = 0
    begun = False
    try:
        for address in brokers:
            start = 0
            while True:
                lines = await read_lines(upstream, address, request(start), at_most=MAX_LINES)
                if not begun:
                    begun = True
                    for opening in _opening(writer, missing):
                        yield opening
                record = partial(_record_of_line, {**about, "broker": address}, read)
                line, left = _lines_of(writer, record), iter(lines.objects)
                while piece := await next_lines(line, left):
                    size += len(piece)
                    yield piece
                count += len(lines.objects)
                is_full = lines.is_cut or len(lines.objects) == MAX_LINES
                if count >= MAX_MESSAGES or size >= MAX_BYTES:
                    yield writer.lines([{**about, "broker": address, "gap": _LIMIT}])
                    return
                following = lines.objects[-1].get("sequence", 0) + 1 if lines.objects else 0
                goes_on = is_full and has_more and following > start
                if is_full and not goes_on:  # or the next message alone is longer than what is read
                    yield writer.lines([{**about, "broker": address, "gap": _LIMIT}])
                if not goes_on:
                    break
                start = following
    except UpstreamError as exc:
        if begun:
            raise CutOff(str(exc)) from exc
        raise
    if not begun:
        for opening in _opening(writer, missing):
            yield opening


def _record_of_line(about: Mapping[str, str], read: ReadsLine, line: Mapping[str, Any]) -> Record:
    if "gap" in line:
        return {**about, "state": line.get("state"), "sequence": line["first_sequence"], "gap": line["gap"]}
    encoded = line.get("body_base64")
    body = read(b64decode(encoded) if encoded is not None else line["body"].encode("utf-8", "replace"), line)
    found: Record = {**about}
    if "state" in line:
        found["state"] = line["state"]
    found |= {"sequence": line["sequence"], "id": line["id"]}
    found |= {"timestamp_ns": line["timestamp_ns"], "timestamp": rfc3339(line["timestamp_ns"])}
    found["attempts"] = line["attempts"]
    if due_ns := line.get("due_ns"):
        found |= {"due_ns": due_ns, "due": rfc3339(due_ns)}
    if headers := line.get("headers"):
        found["headers"] = headers
    found |= body_field(body.content) | _about(body)
    return found | ({"origin": line["origin"]} if line.get("origin") else {})


# ---------------------------------------------------------------------- text


def _lines_of(writer: RecordWriter, record: Callable[[_T], Record]) -> Callable[[_T], bytes]:
    return lambda row: writer.lines([record(row)])


def _opening(writer: RecordWriter, missing: Mapping[str, str]) -> Iterator[bytes]:
    """Yield nothing, then the head and a record for each broker whose messages are not in the file, if any."""
    yield b""
    if head := writer.head() + writer.lines(gaps(missing)):
        yield head


def _about(body: ReadBody, *, formats: bool = True) -> Record:
    found: Record = {"formats": body.formats} if formats and body.formats else {}
    return found | ({"problem": body.problem} if body.problem else {})
