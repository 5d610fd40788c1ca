"""Publications: the messages of one command, and their grouping into writes and records."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...log import RecordBatch
from ...log.record_metadata import due_by_other_clock, is_about_messages, metadata_with_headers
from ...log.records import HEADER_BYTES, MAX_RECORD_BYTES, MAX_RECORD_MESSAGES, linked_records
from ...protocol import MessageSet
from ..errors import PublishRefused
from ..state.broker import MessageIds


@dataclass(init=False, slots=True)
class Publication:
    """The messages that one command publishes.

    Attributes:
        sets: The messages, in order: one or more sets of any size. Each set takes at least one record of the log; only
            a single set may share a record with other publications. `SetsForRecords` makes sets that fill records.
        due_ns: Earliest delivery time by `BrokerClock.now_ns`, Unix nanoseconds; 0: at once.
        metadata: Record metadata, see `record_metadata.py`; may be empty.
        metadata_of_rest: With headers, the metadata of each set but the first, which then take one record each.

    Args:
        headers: The text of the headers of each message of each set, or one for all messages of a set. The sets must
            fit in a record each, see `fit_with_headers`. Empty if no message has headers.
    """

    sets: Sequence[MessageSet]
    due_ns: int
    metadata: bytes
    metadata_of_rest: Sequence[bytes]

    def __init__(
        self,
        sets: Sequence[MessageSet],
        due_ns: int = 0,
        metadata: bytes = b"",
        headers: Sequence[Sequence[str]] = (),
    ) -> None:
        self.sets = sets
        self.due_ns = due_ns
        self.metadata = metadata
        self.metadata_of_rest = ()
        if headers:
            self.metadata = metadata_with_headers(metadata, headers[0])
            # Each record says which channel gets it; a batch's number is in the first one only.
            of_rest = metadata if is_about_messages(metadata) else b""
            self.metadata_of_rest = [metadata_with_headers(of_rest, each) for each in headers[1:]]

    @property
    def count(self) -> int:
        return sum(len(messages.sizes) for messages in self.sets)

    @property
    def record_bytes(self) -> int:
        """Maximum bytes in the log: the size if it shares no record."""
        size = len(self.metadata)
        for metadata in self.metadata_of_rest:
            size += len(metadata)
        for messages in self.sets:
            own = HEADER_BYTES + len(messages.data)
            if own > MAX_RECORD_BYTES or len(messages.sizes) > MAX_RECORD_MESSAGES:
                # Of two consecutive records below the message limit, at least one is more than half full.
                own += HEADER_BYTES * (
                    len(messages.sizes) // MAX_RECORD_MESSAGES + 2 * own // MAX_RECORD_BYTES
                )
            size += own
        return size


def fit_with_headers(
    messages: MessageSet, headers: Sequence[str]
) -> tuple[list[MessageSet], list[Sequence[str]]]:
    """Split messages into sets that fit in a record each, with the text of the headers of each message.

    Returns the sets, and the headers of each, as a `Publication` takes them.
    """
    sets: list[MessageSet] = []
    texts: list[Sequence[str]] = []
    start = at = first_at = size = 0
    for index, body_bytes in enumerate(messages.sizes):
        more = 4 + body_bytes + len(headers[index])
        if index > start and (index - start >= MAX_RECORD_MESSAGES or size + more > MAX_RECORD_BYTES):
            sets.append(MessageSet(messages.data[first_at:at], messages.sizes[start:index]))
            texts.append(headers[start:index])
            start, first_at, size = index, at, 0
        size += more
        at += 4 + body_bytes
    sets.append(MessageSet(messages.data[first_at:], messages.sizes[start:]))
    texts.append(headers[start:])
    return sets, texts


class SetsForRecords:
    """Collects messages, in order, into the largest sets that fit into one record each.

    The caller can add a million messages in steps, so that the write need not split them all at once.
    """

    def __init__(self) -> None:
        self._sets: list[MessageSet] = []
        self._last: list[MessageSet] = []
        self._count = self._bytes = 0

    def add(self, messages: MessageSet) -> None:
        for piece in messages.split(MAX_RECORD_MESSAGES, MAX_RECORD_BYTES):
            self._count += len(piece.sizes)
            self._bytes += len(piece.data)
            if self._last and (self._count > MAX_RECORD_MESSAGES or self._bytes > MAX_RECORD_BYTES):
                self._end_last()
                self._count, self._bytes = len(piece.sizes), len(piece.data)
            self._last.append(piece)

    def take(self) -> list[MessageSet]:
        """Return the sets; empty if there are no messages."""
        if self._last:
            self._end_last()
        return self._sets

    def _end_last(self) -> None:
        self._sets.append(MessageSet.join(self._last))
        self._last = []


class Group:
    """Publications of one topic that one write will store.

    Attributes:
        publications: The publications, in order.
        size: Maximum bytes of their records.
        on_complete: Called, in order, when the publications are stored or refused.
    """

    __slots__ = ("on_complete", "publications", "size")

    def __init__(self) -> None:
        self.publications: list[Publication] = []
        self.size: int = 0
        self.on_complete: list[Callable[[PublishRefused | None], None]] = []

    @property
    def messages(self) -> int:
        return sum(publication.count for publication in self.publications)

    def complete(self, error: PublishRefused | None) -> None:
        for on_complete in self.on_complete:
            on_complete(error)


class Write:
    """A group that is written and not committed.

    Attributes:
        number: The number of the write, as `Log.writes` counts.
        records: The written records, at least one.
        ahead_ns: See `records_for`.
    """

    __slots__ = ("ahead_ns", "group", "number", "records", "took_s")

    def __init__(
        self, number: int, group: Group, records: Sequence[RecordBatch], took_s: float, ahead_ns: int
    ) -> None:
        self.number: int = number
        self.group: Group = group
        self.records: Sequence[RecordBatch] = records
        self.took_s: float = took_s
        self.ahead_ns: int = ahead_ns


def records_for(
    publications: Sequence[Publication], sequence: int, ids: MessageIds, ahead_ns: int = 0
) -> list[RecordBatch]:
    """Return records for these publications, from a sequence on; small neighbours share a record.

    A publication that is too large for one record gets several linked records, which recovery treats as a unit.
    Publications whose metadata describes single messages, in order, always get one record: they have few messages.

    Args:
        ahead_ns: How far the system clock, by which due times are in records, is ahead of that of the publications.
    """
    records: list[RecordBatch] = []
    timestamp_ns = time.time_ns()
    for together in _sharing_records(publications):
        first = together[0]
        sets: Sequence[MessageSet] = first.sets
        if len(together) > 1:
            sets = [MessageSet.join([publication.sets[0] for publication in together])]
        elif first.metadata_of_rest:
            pass  # each set has a record of its own
        elif first.metadata and is_about_messages(first.metadata):
            sets = [MessageSet.join(sets)]
        else:
            sets = [piece for large in sets for piece in large.split(MAX_RECORD_MESSAGES, MAX_RECORD_BYTES)]
        count = sum(len(messages.sizes) for messages in sets)
        first_id = ids.take(count)
        due_ns = due_by_other_clock(first.due_ns, ahead_ns) if first.due_ns else 0
        record = RecordBatch(sequence, first_id, timestamp_ns, due_ns, sets[0], first.metadata)
        if len(sets) == 1:
            records.append(record)
        else:
            records += linked_records(record, sets[1:], first.metadata_of_rest)
        sequence += count
    return records


def _sharing_records(publications: Sequence[Publication]) -> Sequence[Sequence[Publication]]:
    """Group neighbours that share a record: plain publications (not deferred, no metadata) within the record limits."""
    if len(publications) == 1:
        return [publications]
    shares: list[list[Publication]] = []
    size = count = 0
    open_for_more = False
    for publication in publications:
        messages = publication.sets[0]
        plain = not (publication.due_ns or publication.metadata or len(publication.sets) > 1)
        size += len(messages.data)
        count += len(messages.sizes)
        if open_for_more and plain and size <= MAX_RECORD_BYTES and count <= MAX_RECORD_MESSAGES:
            shares[-1].append(publication)
        else:
            shares.append([publication])
            size, count = len(messages.data), len(messages.sizes)
            open_for_more = plain
    return shares
