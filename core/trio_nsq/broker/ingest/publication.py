"""What is published together: by one command, and, of one topic, by one write."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...log import RecordBatch
from ...log.records import HEADER_BYTES, MAX_RECORD_BYTES, MAX_RECORD_MESSAGES, linked_records
from ...protocol import MessageSet
from ..errors import PublishRefused
from ..state.broker import MessageIds
from ..state.record_metadata import is_about_messages


@dataclass(slots=True)
class Publication:
    """What one command publishes.

    Attributes:
        sets: The messages, in order, at least one: sets of any size. Each takes at least one record of the log, unless
            the publication has only one, and shares its record with others. `SetsForRecords` makes sets that fill one.
        due_ns: When it may be delivered, Unix nanoseconds; 0: at once.
        metadata: What the broker has to know of it besides, see `record_metadata.py`; empty: nothing.
    """

    sets: Sequence[MessageSet]
    due_ns: int = 0
    metadata: bytes = b""

    @property
    def count(self) -> int:
        return sum([len(messages.sizes) for messages in self.sets])

    @property
    def record_bytes(self) -> int:
        """What it takes in the log at most: if it shares its record with none."""
        size = len(self.metadata)
        for messages in self.sets:
            own = HEADER_BYTES + len(messages.data)
            if own > MAX_RECORD_BYTES or len(messages.sizes) > MAX_RECORD_MESSAGES:
                # Of two neighbouring records that have fewer messages than they may, one is more than half full.
                own += HEADER_BYTES * (
                    len(messages.sizes) // MAX_RECORD_MESSAGES + 2 * own // MAX_RECORD_BYTES
                )
            size += own
        return size


class SetsForRecords:
    """Gathers messages, in order, into sets that fit one record each, and that are as large as they may be.

    A million messages that are taken apart here in steps need not be when they are written.
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
        """The sets; none if there are no messages."""
        if self._last:
            self._end_last()
        return self._sets

    def _end_last(self) -> None:
        self._sets.append(MessageSet.join(self._last))
        self._last = []


@dataclass(slots=True, eq=False)
class Group:
    """Publications of one topic that will be stored by one write.

    Attributes:
        publications: What to store, in order.
        size: Bytes of their records, if none shares its own.
        on_complete: Called when they are stored, or are not, in order.
    """

    publications: list[Publication] = field(default_factory=list)
    size: int = 0
    on_complete: list[Callable[[PublishRefused | None], None]] = field(default_factory=list)

    @property
    def messages(self) -> int:
        return sum([publication.count for publication in self.publications])

    def complete(self, error: PublishRefused | None) -> None:
        for on_complete in self.on_complete:
            on_complete(error)


@dataclass(frozen=True, slots=True)
class Write:
    """A group that is written and not committed.

    Attributes:
        number: Of the write, as `Log.writes` counts.
        records: What was written, at least one.
    """

    number: int
    group: Group
    records: Sequence[RecordBatch]
    took_s: float


def records_for(publications: Sequence[Publication], sequence: int, ids: MessageIds) -> list[RecordBatch]:
    """Records for these publications, from a sequence on; neighbours share one while it is small.

    What is too large for one record has several, which recovery keeps together. But not if its metadata tells of
    each of its messages, in their order: there are few of those.
    """
    records: list[RecordBatch] = []
    timestamp_ns = time.time_ns()
    for together in _sharing_records(publications):
        first = together[0]
        sets: Sequence[MessageSet] = first.sets
        if len(together) > 1:
            sets = [MessageSet.join([publication.sets[0] for publication in together])]
        elif is_about_messages(first.metadata):
            sets = [MessageSet.join(sets)]
        else:
            sets = [piece for large in sets for piece in large.split(MAX_RECORD_MESSAGES, MAX_RECORD_BYTES)]
        count = sum([len(messages.sizes) for messages in sets])
        first_id = ids.take(count)
        record = RecordBatch(sequence, first_id, timestamp_ns, first.due_ns, sets[0], first.metadata)
        if len(sets) == 1:
            records.append(record)
        else:
            records += linked_records(record, sets[1:])
        sequence += count
    return records


def _sharing_records(publications: Sequence[Publication]) -> Sequence[Sequence[Publication]]:
    """Neighbours that share a record: while it is small, and nothing is to be said of them that is not said of all."""
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
