"""The format of the records of a spool, and reading them in a task.

A channel delivers messages in arbitrary order, each with its own id, timestamp and attempts. Messages that were
received together are one record of the log. Its metadata has these columns, one after the other, all big-endian:

    0             8n                16n           18n
    +-------------+-----------------+-------------+
    | id  uint64  | time  int64, ns | attempts 16 |
    +-------------+-----------------+-------------+
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...log.files import Files
from ...log.gaps import Gap, Span, gaps
from ...log.inspection.segments import segment_paths
from ...log.inspection.selection import select_batches
from ...log.records import RecordBatch
from ...log.segment.format import base_in_name
from ...log.segment.index import big_endian, native
from ...log.selection import Selection
from ...protocol.errors import NSQError
from ...protocol.messages import pack_messages

if TYPE_CHECKING:
    from .spool import NsqdLog

_METADATA_BYTES = 18
"""Bytes per message."""


class InvalidMessageId(NSQError):
    """A broker sent a message id that is not 16 hex digits."""


@dataclass(frozen=True, slots=True)
class SpooledRows:
    """Messages of a spool, as columns of equal length, ordered by sequence.

    Attributes:
        ids: The ids as integers.
        times_ns: The publish times, Unix nanoseconds.
        attempts: The number of deliveries, including this one.
    """

    sequences: "array[int]"
    ids: "array[int]"
    times_ns: "array[int]"
    attempts: "array[int]"
    bodies: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.bodies)

    def take(self, indexes: Sequence[int]) -> "SpooledRows":
        if len(indexes) == len(self):
            return self

        def some(column: "array[int]") -> "array[int]":
            return array(column.typecode, map(column.__getitem__, indexes))

        return SpooledRows(
            some(self.sequences),
            some(self.ids),
            some(self.times_ns),
            some(self.attempts),
            [self.bodies[index] for index in indexes],
        )


Spooled: TypeAlias = SpooledRows | Gap


def parse_ids(ids: Sequence[bytes]) -> "array[int]":
    """Parse ids of 16 hex digits. Raises InvalidMessageId."""
    try:
        data = bytes.fromhex(b"".join(ids).decode("ascii"))
    except ValueError:
        data = b""
    if len(data) != 8 * len(ids):
        raise InvalidMessageId(f"a message has an id that is not 16 hex digits, among {ids[:3]!r}")
    return native(data)


def record_of(
    base_sequence: int,
    ids: "array[int]",
    times_ns: Sequence[int],
    attempts: Sequence[int],
    bodies: Sequence[bytes],
) -> RecordBatch:
    """Make a record of messages, at least one; the first has `base_sequence`."""
    columns = (ids, array("q", times_ns), array("H", attempts))
    metadata = b"".join(map(big_endian, columns))
    return RecordBatch(base_sequence, ids[0], max(0, times_ns[0]), 0, pack_messages(bodies), metadata)


def rows_of(batch: RecordBatch) -> SpooledRows:
    """Return the messages of a record. Raises ValueError if it is not a record of a spool."""
    count, metadata = batch.count, batch.metadata
    if len(metadata) != _METADATA_BYTES * count:
        raise ValueError(f"the metadata of {count} messages has {len(metadata)} bytes")
    return SpooledRows(
        array("q", range(batch.base_sequence, batch.next_sequence)),
        native(metadata[: 8 * count]),
        native(metadata[8 * count : 16 * count], "q"),
        native(metadata[16 * count :], "H"),
        batch.messages.bodies(),
    )


@dataclass(frozen=True, slots=True)
class SpoolPlace:
    """The messages of one nsqd in a spool, see `LogPlace`.

    Attributes:
        label: The nsqd, `host:port`.
        folder: The folder of its log, which tasks read with `read_spool`.
        log: The open log, in the process that has the spool open.
    """

    label: str
    folder: Path
    log: "NsqdLog | None" = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return SpoolPlace, (self.label, self.folder)

    def open(self) -> "NsqdLog":
        assert self.log is not None, "only the process that has the spool open plans its export"
        return self.log


def read_spool(folder: Path, span: Span, key_of: Callable[[int], int] | None = None) -> Iterator[Spooled]:
    """Read the messages of a span, and its gaps.

    This does not write, so several processes can read at the same time. With `key_of`, messages are grouped by key, and
    the span is read once for each key: a channel mixes old and new messages, and an export starts a new file whenever
    the date or hour changes.

    Args:
        span: The span; all of it must be synced.
        key_of: Returns the key of a publish time in Unix nanoseconds; None: read in order of sequence.

    Raises:
        LogReadError: The operating system returned an error.
    """
    if key_of is None:
        yield from _read(folder, span)
        return
    keys: set[int] = set()
    for found in _read(folder, span):
        if isinstance(found, Gap):
            yield found
        else:
            keys.update(map(key_of, found.times_ns))
    for key in sorted(keys):
        for found in _read(folder, span):
            if isinstance(found, SpooledRows):
                times = enumerate(found.times_ns)
                indexes = [index for index, time_ns in times if key_of(time_ns) == key]
                if indexes:
                    yield found.take(indexes)


def _read(folder: Path, span: Span) -> Iterator[Spooled]:
    """Read a span in order."""
    files = Files()
    segments, _ = segment_paths(folder, files)
    kept_from = base_in_name(segments[0].path) if segments else span.end
    selection = Selection(first_sequence=span.first, end_sequence=span.end)
    at = span.first
    for batch in select_batches(segments, selection, files):
        if isinstance(batch, RecordBatch):
            yield from gaps(at, max(at, batch.base_sequence), kept_from)
            at = min(span.end, batch.next_sequence)
            yield rows_of(batch).take(selection.indexes(batch))
    yield from gaps(at, span.end, kept_from)
