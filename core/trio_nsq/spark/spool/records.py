"""The format of the records of a spool, and reading them in a task.

A channel delivers messages in arbitrary order, each with its own id, timestamp and attempts. Messages that were
received together, all published in the same hour (UTC), are one record of the log. The id and the timestamp of the
record are those of its first message. Its metadata has the values of all, big-endian:

    0    1             8n+1            16n+1         18n+1
    +----+-------------+---------------+-------------+
    | \\0 | id uint64   | time int64, ns| attempts 16 |
    +----+-------------+---------------+-------------+

If any of them has headers, the first byte is 1. The size, uint32, of a JSON array and the array are before the ids: the
text of the headers of each message.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...client.reading.broker_log import Bounds
from ...client.reading.log_stream import Found
from ...log.gaps import Gap, Span
from ...log.record_metadata import headers_in
from ...log.records import RecordBatch
from ...log.segment.index import big_endian, native
from ...protocol.errors import NSQError
from ...protocol.messages import pack_messages
from ..segments.log import SegmentLog

HOUR_NS = 3600 * 10**9
_MARK, _MARK_WITH_HEADERS = b"\0", b"\1"
"""The metadata that a broker stores is JSON."""
_MESSAGE_BYTES = 18


class InvalidMessageId(NSQError):
    """A broker sent a message id that is not 16 hex digits."""


class SpooledMessage(NamedTuple):
    """A message for a spool.

    Attributes:
        time_ns: The publish time, Unix nanoseconds.
        attempts: The number of deliveries, including this one.
        headers: Their text, see `protocol/headers.py`; empty: none.
    """

    id: int
    time_ns: int
    attempts: int
    body: bytes
    headers: str = ""


class MessageColumns(NamedTuple):
    """The values of the messages of a record, as columns of equal length; see `SpooledMessage`."""

    ids: "array[int]"
    times_ns: "array[int]"
    attempts: "array[int]"


def parse_ids(ids: Sequence[bytes]) -> "array[int]":
    """Parse ids of 16 hex digits. Raises InvalidMessageId."""
    try:
        data = bytes.fromhex(b"".join(ids).decode("ascii"))
    except ValueError:
        data = b""
    if len(data) != 8 * len(ids):
        raise InvalidMessageId(f"a message has an id that is not 16 hex digits, among {ids[:3]!r}")
    return native(data)


def record_of(base_sequence: int, messages: Sequence[SpooledMessage]) -> RecordBatch:
    """Make a record of messages, at least one; the first has `base_sequence`."""
    ids, times_ns, attempts, bodies, headers = zip(*messages, strict=True)
    columns = (array("Q", ids), array("q", times_ns), array("H", attempts))
    metadata = _MARK + b"".join(map(big_endian, columns))
    if any(headers):
        texts = json.dumps(headers, ensure_ascii=False).encode()
        metadata = _MARK_WITH_HEADERS + len(texts).to_bytes(4, "big") + texts + metadata[1:]
    return RecordBatch(base_sequence, ids[0], max(0, times_ns[0]), 0, pack_messages(bodies), metadata)


def columns_of(batch: RecordBatch) -> MessageColumns | None:
    """Return the values of the messages of a record, or of a part of one; None if it is not a record of a spool."""
    if not batch.metadata.startswith((_MARK, _MARK_WITH_HEADERS)):
        return None
    data, _ = _split(batch.metadata)
    count = len(data) // _MESSAGE_BYTES
    ids = native(data[: 8 * count])
    start = batch.first_id - ids[0]  # parts of a record count the id up
    part = slice(start, start + batch.count)
    return MessageColumns(
        ids[part], native(data[8 * count : 16 * count], "q")[part], native(data[16 * count :], "H")[part]
    )


def headers_of(batch: RecordBatch) -> Sequence[str]:
    """Return the text of the headers of each message of a record, of a spool or of a broker; empty if none has some."""
    if not batch.metadata.startswith(_MARK_WITH_HEADERS):
        return headers_in(batch.metadata, batch.count)
    data, headers = _split(batch.metadata)
    start = batch.first_id - native(data[:8])[0]  # see `columns_of`
    found = headers[start : start + batch.count]
    return found if any(found) else ()


def _split(metadata: bytes) -> tuple[bytes, Sequence[str]]:
    """Return the columns in the metadata of a record of a spool, and the text of the headers of each message."""
    if metadata.startswith(_MARK):
        return metadata[len(_MARK) :], ()
    size = int.from_bytes(metadata[1:5], "big")
    start = 5 + size
    headers: list[str] = json.loads(metadata[5:start])
    return metadata[start:], headers


@dataclass(frozen=True, slots=True)
class SpoolPlace:
    """The messages of one nsqd in a spool, see `LogPlace`.

    Attributes:
        label: The nsqd, `host:port`.
        folder: The folder of its log. All messages that are read must be synced.
        by_hour: See `SpoolLog`.
    """

    label: str
    folder: str
    by_hour: bool = False

    @property
    def where(self) -> str:
        return self.label

    def named(self, label: str, incarnation: str | None) -> "SpoolPlace":
        return replace(self, label=label)

    def open(self) -> "SpoolLog":
        return SpoolLog(Path(self.folder), by_hour=self.by_hour)


class SpoolLog(SegmentLog):
    """The log of one nsqd in a spool.

    Args:
        by_hour: Read a span hour by hour: a channel mixes old and new messages, and an export starts a new file
            whenever the date or hour changes.
    """

    def __init__(self, folder: Path, *, by_hour: bool = False) -> None:
        super().__init__(folder)
        self._by_hour = by_hour

    def bounds(self, at: str = "latest") -> Bounds:
        """See `SegmentLog.bounds`. The log has no identity: once it is exported, another one may continue it."""
        return super().bounds(at)._replace(incarnation=None)

    def starts(self) -> list[int]:
        """Return nothing: ranges of a spool have the size that the export asks for."""
        return []

    def read(self, span: Span) -> Iterator[Found]:
        """See `SegmentLog.read`. With `by_hour`, the span is read once more for each hour."""
        if not self._by_hour:
            yield from super().read(span)
            return
        hours: set[int] = set()
        for found in super().read(span):
            if isinstance(found, Gap):
                yield found
            else:
                hours.add(found.timestamp_ns // HOUR_NS)
        for hour in sorted(hours):
            for found in super().read(span):
                if isinstance(found, RecordBatch) and found.timestamp_ns // HOUR_NS == hour:
                    yield found
