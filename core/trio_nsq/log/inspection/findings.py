"""Findings: problems that an inspection of a log's files, or of files to import, reports."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

NOT_SERVED = "a broker does not serve the topic"


class Kind(StrEnum):
    """The severity of a finding.

    DAMAGE: stored messages cannot be read, or a file was changed by something other than a broker.
    TORN: a crash interrupted a write that was not acknowledged; the next start of the broker removes its remains.
    NOTE: nothing is lost.
    """

    DAMAGE = "damage"
    TORN = "torn"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a file.

    Attributes:
        offset, end: The bytes affected; equal if data is missing there.
        sequence: The first message affected; None if it is unknown, or no message is affected.
        messages: Number of lost messages; None if it is unknown.
    """

    kind: Kind
    path: Path
    offset: int
    end: int
    what: str
    sequence: int | None = None
    messages: int | None = 0

    @property
    def next_sequence(self) -> int:
        """The sequence after the affected messages, as far as known; 0 if no message is affected."""
        return 0 if self.sequence is None else self.sequence + (self.messages or 0)
