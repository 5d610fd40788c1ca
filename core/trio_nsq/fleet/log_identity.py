"""The identity of a log: whether a log is the one that was read before, at whatever address it is now.

A log is known by its incarnation, and by the ids of its messages. A broker's address is only how to reach it: another
one may reach the same log, and the same address may reach another log. Whatever keeps a position keeps a `LogMark`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..client.reading.broker_log import Bounds, LogReplaced
from ..client.reading.log_stream import Found
from ..log.gaps import Span
from ..log.records import RecordBatch


class CopyDiffers(LogReplaced):
    """A log is a copy of another one, and both have got messages since: only one of them can be read."""

    def __init__(self, copy: str, other: str) -> None:
        super().__init__(
            f"the log at {copy} is a copy of the one at {other}, and has other messages since: give one of them"
        )


class IdentifiedLog(Protocol):
    """A log that can be asked for the ids of its messages."""

    def id_at(self, sequence: int) -> str | None:
        """Return the id of a message, 16 hex digits; None if it is not retained, or damaged."""


class ReadableLog(IdentifiedLog, Protocol):
    """A log whose records can be read, too."""

    def starts(self) -> Sequence[int]:
        """Return the first sequence of each file, in order."""

    def read(self, span: Span) -> Iterator[Found]:
        """Read the records and the gaps of a span, in order."""


class FoundAt(NamedTuple):
    """A log at one of its addresses, with its bounds."""

    address: str
    log: IdentifiedLog
    bounds: Bounds


def are_different(incarnation: str | None, other: str | None) -> bool:
    """Whether two incarnations tell that the logs are different ones; an unknown one tells nothing."""
    return None not in (incarnation, other) and incarnation != other


@dataclass(frozen=True, slots=True)
class LogMark:
    """What a reader keeps of a log to recognize it.

    Attributes:
        incarnation: 32 hex digits; None: unknown. Older brokers do not tell it, older versions did not keep it, and a
            log without messages has none.
        end: The log had all messages before this sequence.
        last: The sequence and the id of one of its messages, the last one that is known; None: none is.
    """

    incarnation: str | None = None
    end: int = 0
    last: tuple[int, str] | None = None

    @classmethod
    def before(cls, sequence: int, last_id: str | None, incarnation: str | None) -> "LogMark":
        """Return the mark of a reader before a sequence.

        Args:
            last_id: The id of message `sequence - 1`; None: unknown.
        """
        return cls(incarnation, sequence, (sequence - 1, last_id) if last_id and sequence else None)

    def is_other(self, bounds: Bounds) -> bool:
        """Whether the incarnations tell that a log is another one."""
        return are_different(self.incarnation, bounds.incarnation)

    def is_same(self, bounds: Bounds) -> bool:
        """Whether the incarnations tell that a log is the same one; it may have lost its last messages."""
        return self.incarnation is not None and self.incarnation == bounds.incarnation

    def continues(self, log: IdentifiedLog, bounds: Bounds) -> bool:
        """Whether a log may be the same one, and still has what was read. Raises the errors of `log`."""
        if self.is_other(bounds) or self.end > bounds.end:
            return False
        return self._id_in(log, bounds) in (None, self.last and self.last[1])

    def has_message_of(self, log: IdentifiedLog, bounds: Bounds) -> bool:
        """Whether a log has the known message: ids do not repeat. Raises the errors of `log`."""
        found = None if self.is_other(bounds) or self.end > bounds.end else self._id_in(log, bounds)
        return found is not None and self.last is not None and found == self.last[1]

    def _id_in(self, log: IdentifiedLog, bounds: Bounds) -> str | None:
        """Return the id that a log has in place of the known message; None: neither is known."""
        if self.last is None or not bounds.first <= self.last[0] < bounds.end:
            return None
        return log.id_at(self.last[0])


def known_as(log: IdentifiedLog, bounds: Bounds, address: str, marks: Mapping[str, LogMark]) -> str | None:
    """Return the name under which a log is known; None: it is new, or another log has its address as the name.

    Args:
        address: The default name of the log: the label of its address.
        marks: The known logs, by name. A mark of an older version has no incarnation; its message recognizes the log.

    Raises the errors of `log`.
    """
    sure = [name for name, mark in marks.items() if mark.is_same(bounds)]
    sure = sure or [name for name, mark in marks.items() if mark.has_message_of(log, bounds)]
    if sure:
        # Older versions gave a log one name for each address: continue with the one that has most.
        return max(sure, key=lambda name: (marks[name].end, name == address))
    at_address = marks.get(address)
    return address if at_address is not None and at_address.continues(log, bounds) else None


class Common(NamedTuple):
    """The last message that two logs have.

    Attributes:
        is_same: It has the same id in both: they have the same messages up to it. Otherwise their histories differ from
            some message on, because ids are not used again.
    """

    sequence: int
    is_same: bool


def common_span(one: Bounds, other: Bounds) -> Span | None:
    """Return the sequences that two logs have; None: there are none."""
    span = Span(max(one.first, other.first), min(one.end, other.end))
    return span if span.length > 0 else None


def last_common(one: IdentifiedLog, other: IdentifiedLog, span: Span) -> Common | None:
    """Compare the last message of a span that two logs have; None: one of them cannot read it.

    Raises the errors of the logs.
    """
    last = span.end - 1
    ids = one.id_at(last), other.id_at(last)
    return Common(last, ids[0] == ids[1]) if None not in ids else None


def last_readable(one: ReadableLog, other: ReadableLog, span: Span) -> Common | None:
    """As `last_common`, of the last message that both can read: file by file of `one`, from the last one back."""
    end = span.end
    for start in reversed([each for each in one.starts() if each < end]):
        part = Span(max(span.first, start), end)
        if (found := _last_in(one, other, part)) is not None or part.first == span.first:
            return found
        end = start
    return None


def _last_in(one: ReadableLog, other: ReadableLog, span: Span) -> Common | None:
    ours, theirs = _ids(one, span), _ids(other, span)
    while ours and theirs:
        (base, end, offset), (other_base, other_end, other_offset) = ours[-1], theirs[-1]
        last = min(end, other_end) - 1
        if last >= max(base, other_base):
            return Common(last, offset == other_offset)
        (ours if base > other_base else theirs).pop()
    return None


def _ids(log: ReadableLog, span: Span) -> list[tuple[int, int, int]]:
    """Return the first and the next sequence of each record of a span, and how far its ids are ahead of them."""
    return [
        (each.base_sequence, each.next_sequence, each.first_id - each.base_sequence)
        for each in log.read(span)
        if isinstance(each, RecordBatch)
    ]


def missing_at(other: FoundAt, found: FoundAt) -> int | None:
    """Return how many messages of a log another address lacks; None: another log is there.

    Ask the other address last: at two addresses of one broker, it then has at least as many messages.

    Raises:
        CopyDiffers: The other address has a copy, and both have got messages since.
        NSQError, OSError: The errors of the logs.
    """
    if are_different(found.bounds.incarnation, other.bounds.incarnation):
        return None
    if (span := common_span(found.bounds, other.bounds)) is not None:
        last = last_common(found.log, other.log, span)
        if last is not None and not last.is_same:
            raise CopyDiffers(found.address, other.address)
    return max(0, found.bounds.end - other.bounds.end)
