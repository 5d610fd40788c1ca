"""The identity of a log: whether a log is the one that was read before, at whatever address it is now.

A log is known by its incarnation, and by the ids of its messages. A broker's address is only how to reach it: another
one may reach the same log, and the same address may reach another log. Whatever keeps a position keeps a `LogMark`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..client.reading.broker_log import Bounds, LogReplaced


class CopyDiffers(LogReplaced):
    """A log is a copy of another one, and both have got messages since: only one of them can be read."""

    def __init__(self, copy: str, other: str) -> None:
        super().__init__(
            f"the log at {copy} is a copy of the one at {other}, and has other messages since: give one of them"
        )


class IdentifiedLog(Protocol):
    """A log that can be asked for the ids of its messages."""

    def id_at(self, sequence: int) -> str | None:
        """Return the id of a message, 16 hex digits; None if it is not retained."""


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


def missing_at(other: FoundAt, found: FoundAt) -> int | None:
    """Return how many messages of a log another address lacks; None: another log is there.

    Ask the other address last: at two addresses of one broker, it then has at least as many messages.

    Raises:
        CopyDiffers: The other address has a copy, and both have got messages since.
        NSQError, OSError: The errors of the logs.
    """
    if are_different(found.bounds.incarnation, other.bounds.incarnation):
        return None
    last = min(found.bounds.end, other.bounds.end) - 1
    if last >= max(found.bounds.first, other.bounds.first):
        ids = found.log.id_at(last), other.log.id_at(last)
        if None not in ids and ids[0] != ids[1]:
            raise CopyDiffers(found.address, other.address)
    return max(0, found.bounds.end - other.bounds.end)
