"""The log of a topic, as a broker sends it: batches, and the gaps between them. No IO, no trio."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...api import broker as api
from ...api.request import Procedure, ask
from ...log.gaps import Gap, Span, gaps
from ...log.raw import RawStreamReader
from ...log.record_metadata import metadata_of_part, only_channel
from ...log.records import RecordBatch
from ...protocol import MessageSet

Found: TypeAlias = RecordBatch | Gap


class LogStream:
    """An answer to `api.log` in the format `raw`: takes its bytes, and returns batches and gaps.

    If messages are missing, its procedures ask for the oldest retained sequence: retention may have deleted them
    meanwhile.

    Args:
        header: Returns a header of the answer by its name in lower case; None: there is none.
        span: The range that was asked for; None: the answer tells it.

    Attributes:
        kept_from: The oldest retained sequence.
        begins, ends: Where the answer begins, and where it ends at the latest; None: that is open.
        incarnation: The identity of the log; None: unknown.
        position, end: What is left of the range.
        known: A sequence that the answer repeats, and the id of its message as it was read before; None: nothing is
            compared. `position` is behind it.
        is_another: Whether the message there was another one: the log is another one, or has lost its last messages.
            `position` goes back to it.

    Raises:
        ValueError: The headers are not those of a broker.
    """

    def __init__(self, topic: str, header: Callable[[str], str | None], span: Span | None = None) -> None:
        self.kept_from: int = int(header("x-nsq-first-sequence") or "")
        self.begins: int = int(header("x-nsq-start-sequence") or "")
        ends = header("x-nsq-end-sequence")
        self.ends: int | None = None if ends is None and span is None else int(ends or "")
        self.incarnation: str | None = header("x-nsq-incarnation")
        self.position: int = self.begins if span is None else span[0]
        self.end: int | None = self.ends if span is None else span[1]
        self.known: tuple[int, str] | None = None
        self.is_another: bool = False
        self._topic = topic
        self._decoder = RawStreamReader()

    def receive_records(self, data: bytes) -> list[RecordBatch]:
        """Take bytes and return the records that they complete and that have messages of the range, uncut.

        Raises RawStreamError.
        """
        found: list[RecordBatch] = []
        at = self.position
        for record in self._decoder.receive_data(data):
            if self.known is not None and self._is_another(record, *self.known):
                self.position = at = self.known[0]
                self.is_another, self.known = True, None
            if at < record.next_sequence and (self.end is None or record.base_sequence < self.end):
                found.append(record)
                at = record.next_sequence
        return found

    @staticmethod
    def _is_another(record: RecordBatch, sequence: int, message_id: str) -> bool:
        return (
            record.base_sequence <= sequence < record.next_sequence and record.id_of(sequence) != message_id
        )

    def receive(self, data: bytes) -> Procedure[list[Found]]:
        """Take bytes and return what they complete of the range, with the gaps before. Raises RawStreamError."""
        records = self.receive_records(data)
        if has_gaps(records, self.position):
            yield from self.update_kept_from()
        found = batches_and_gaps(records, self.position, self.end, self.kept_from)
        if found:
            self.position = found[-1].next_sequence
        return found

    def finish(self) -> None:
        """End the answer. Raises RawStreamError: it is not complete."""
        self._decoder.end()

    def missing(self) -> Procedure[list[Found]]:
        """Return the rest of the range as gaps, after an answer without its messages."""
        found: list[Found] = []
        if self.end is not None and self.position < self.end:
            yield from self.update_kept_from()
            found += gaps(self.position, self.end, self.kept_from)
            self.position = self.end
        return found

    def update_kept_from(self) -> Procedure[None]:
        """Ask for the oldest retained sequence."""
        bounds = yield from ask(api.bounds(self._topic))
        self.kept_from = max(self.kept_from, bounds["first_sequence"])


def has_gaps(batches: Sequence[RecordBatch], position: int) -> bool:
    """Whether a message from `position` on is missing before or between batches."""
    ends = (position, *(batch.next_sequence for batch in batches))
    return any(batch.base_sequence > end for end, batch in zip(ends, batches, strict=False))


def batches_and_gaps(
    batches: Sequence[RecordBatch], position: int, end: int | None, first_sequence: int
) -> list[Found]:
    """Return the parts of batches that are in a range, and the gaps before and between them.

    Args:
        batches: In order, each with messages of the range.
        position: The start of the range.
        end: The end of the range; None: unlimited.
        first_sequence: The oldest retained sequence. If there are gaps, ask for it after the batches were received:
            retention may have deleted the missing messages meanwhile.
    """
    found: list[Found] = []
    for batch in batches:
        if batch.base_sequence > position:
            found += gaps(position, batch.base_sequence, first_sequence)
        found.append(_part(batch, position, end))
        position = found[-1].next_sequence
    return found


def is_for_all_channels(batch: RecordBatch) -> bool:
    """Whether a batch was published to the topic, not republished to one channel."""
    return is_for(None, batch)


def is_for(channel: str | None, batch: RecordBatch) -> bool:
    """Whether a channel gets the messages of a batch; None: whether all do."""
    return not batch.due_ns or only_channel(batch.metadata) in (None, channel)


def _part(batch: RecordBatch, first: int, end: int | None) -> RecordBatch:
    """Return the messages of a batch that are in a range, as a batch."""
    start = max(first - batch.base_sequence, 0)
    stop = batch.count if end is None else min(end - batch.base_sequence, batch.count)
    if stop - start == batch.count:
        return batch
    sizes = batch.messages.sizes
    data_start = sum(sizes[:start]) + 4 * start
    part = sizes[start:stop]
    data = batch.messages.data[data_start : data_start + sum(part) + 4 * len(part)]
    return RecordBatch(
        batch.base_sequence + start,
        batch.first_id + start,
        batch.timestamp_ns,
        batch.due_ns,
        MessageSet(data, part),
        metadata_of_part(batch.metadata, start, stop, batch.count) if batch.metadata else b"",
    )
