"""Download a range of a broker's log as JSON lines: as the broker sends them, or with bodies as they are shown."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import trio

from ...api.broker import log
from ...http.messages import CutOff
from ...protocol.message_json import json_lines, message_record
from ..upstream.client import Upstream, UpstreamError
from .bodies import DECODING, TopicBodies
from .message import Message, Row, rows_of
from .reading import TopicLog

_T = TypeVar("_T")
MAX_MESSAGES = 100_000
MAX_BYTES = 256 * 1024 * 1024
SILENCE_S = 30.0
_LINES_BYTES = 1024 * 1024
_LINES_S = 0.5
"""At about so many bytes, or after this time, lines are sent, and other pages can have their bodies decoded."""
_SILENT = f"no answer within {SILENCE_S:g} s"


async def download(
    upstream: Upstream, address: str, topic: str, first: int, end: int
) -> AsyncGenerator[bytes, None]:
    """Yield nothing once the broker answers, then the messages of a range of sequences; the end is excluded.

    Raises:
        UpstreamError: The broker does not answer.
        CutOff: It breaks off. Clients report it, as the answer is not complete.
    """
    request = log(topic, first, end, max_messages=MAX_MESSAGES, max_bytes=MAX_BYTES)
    begun = False
    try:
        async with AsyncExitStack() as stack:
            with trio.move_on_after(SILENCE_S) as silence:
                answer = await stack.enter_async_context(upstream.open(address, request))
            if silence.cancelled_caught:
                raise UpstreamError(address, _SILENT)
            begun = True
            yield b""
            while True:
                with trio.move_on_after(SILENCE_S) as silence:
                    piece = await answer.receive()
                if silence.cancelled_caught:
                    raise CutOff(_SILENT)
                if not piece:
                    return
                yield piece
    except UpstreamError as exc:
        if begun:
            raise CutOff(str(exc)) from exc
        raise


async def download_shown(
    log: TopicLog, shown: TopicBodies, first: int, end: int
) -> AsyncGenerator[bytes, None]:
    """As `download`, with bodies decoded and masked, and the key `formats` of those that were decoded.

    Raises as `download`.
    """
    begun, count, size = False, 0, 0
    shown = shown.without_limit()
    try:
        end = min(end, (await _in_time(log.bounds())).end)
        while first < end and count < MAX_MESSAGES and size < MAX_BYTES:
            if not begun:
                begun = True
                yield b""
            piece = await _in_time(log.read(first, end))
            rows = rows_of(log.address, piece.records, first, piece.end, piece.kept_from, shown)
            while lines := await next_lines(partial(_line, log.topic), rows):
                yield lines
            count, size, first = count + piece.end - first, size + piece.size, piece.end
        if not begun:
            yield b""
    except UpstreamError as exc:
        if begun:
            raise CutOff(str(exc)) from exc
        raise


async def _in_time(waiting: Awaitable[_T]) -> _T:
    with trio.move_on_after(SILENCE_S):
        return await waiting
    raise CutOff(_SILENT)


async def next_lines(line: Callable[[_T], bytes], rows: Iterator[_T]) -> bytes:
    """Return the lines of the next rows, at least one; empty: there are no more.

    Small bodies can become large ones, and take long: lines are made in a thread.
    """

    def make() -> bytes:
        found, until_s = bytearray(), time.monotonic() + _LINES_S
        for row in rows:
            found += line(row)
            if len(found) >= _LINES_BYTES or time.monotonic() >= until_s:
                break
        return bytes(found)

    return await trio.to_thread.run_sync(make, limiter=DECODING)


def _line(topic: str, row: Row) -> bytes:
    return json_lines([record_of(topic, row)]).encode("utf-8", "surrogatepass")


def record_of(topic: str, row: Row) -> dict[str, object]:
    """Return the record of a message, or of what is missing."""
    if not isinstance(row, Message):
        return {
            "topic": topic,
            "gap": row.reason,
            "first_sequence": row.first_sequence,
            "next_sequence": row.next_sequence,
        }
    record = message_record(
        topic,
        row.id,
        row.timestamp_ns,
        0,
        row.body,
        sequence=row.sequence,
        due_ns=row.due_ns or 0,
        headers=row.headers,
    )
    return record | ({"formats": row.formats} if row.formats else {})
