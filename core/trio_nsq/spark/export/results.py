"""The result of one exported range, which its task writes to a file, and the result of a whole export.

The field names of `RangeResult` are the keys of that file; those of `ExportResult` are printed by qcli.
"""

import json
from dataclasses import asdict, dataclass, field, fields

from ...protocol.errors import NSQError
from ..ranges import Span


class ManifestError(NSQError):
    """A manifest cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class RangeResult:
    """A range that is done: each of its messages is in a file, or in `gaps`.

    Attributes:
        broker: The label of the broker.
        first, end: The range.
        messages: Messages in files.
        body_bytes: Bytes of their bodies.
        files: File names, relative to the folder; none if there were no messages.
        file_bytes: Bytes of the files.
        gaps: `[first, end, reason]` of the missing messages.
        for_one_channel: Messages that had been republished for a single channel; they are not exported again.
        unparsed: Messages whose body is in the column `unparsed`.
        last_id: The id of the message `end - 1`, 16 hex digits; None if it is missing.
    """

    broker: str
    first: int
    end: int
    messages: int = 0
    body_bytes: int = 0
    files: list[str] = field(default_factory=list)
    file_bytes: int = 0
    gaps: list[tuple[int, int, str]] = field(default_factory=list)
    for_one_channel: int = 0
    unparsed: int = 0
    last_id: str | None = None

    @property
    def span(self) -> Span:
        """The range."""
        return Span(self.first, self.end)

    def to_bytes(self) -> bytes:
        """The content of its file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RangeResult":
        """Parse the content of a file. Raises ManifestError."""
        try:
            found = json.loads(data)
            found["gaps"] = [(first, end, reason) for first, end, reason in found["gaps"]]
            return cls(**found)
        except (ValueError, KeyError, TypeError) as exc:
            raise ManifestError(f"the result of a range cannot be read: {exc}") from exc


@dataclass(slots=True)
class ExportResult:
    """The result of an export so far, counting what this process did unless said otherwise.

    Attributes:
        messages, body_bytes, files, file_bytes, ranges: What was written.
        planned_messages, planned_ranges: What was planned.
        planned_bytes: Bytes of the planned part of the log, estimated.
        skipped_ranges, skipped_messages: What was requested but exported before.
        missing: Messages that are no longer kept.
        damaged: Whether some of the missing messages are damaged.
        for_one_channel, unparsed: See `RangeResult`.
        repeated: Messages that a channel redelivered, and that were left out.
        gaps: `(broker, first, end, reason)`.
    """

    messages: int = 0
    body_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    ranges: int = 0
    planned_messages: int = 0
    planned_ranges: int = 0
    planned_bytes: int = 0
    skipped_ranges: int = 0
    skipped_messages: int = 0
    missing: int = 0
    damaged: bool = False
    for_one_channel: int = 0
    unparsed: int = 0
    repeated: int = 0
    gaps: list[tuple[str, int, int, str]] = field(default_factory=list)

    def add(self, done: RangeResult) -> None:
        """Add a range."""
        self.ranges += 1
        self.messages += done.messages
        self.body_bytes += done.body_bytes
        self.files += len(done.files)
        self.file_bytes += done.file_bytes
        self.for_one_channel += done.for_one_channel
        self.unparsed += done.unparsed
        for first, end, reason in done.gaps:
            self.add_gap(done.broker, Span(first, end), reason)

    def add_gap(self, broker: str, span: Span, reason: str) -> None:
        """Add missing messages."""
        self.missing += span.length
        self.damaged |= reason == "damaged"
        self.gaps.append((broker, *span, reason))

    def merge(self, other: "ExportResult") -> None:
        """Add another result."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, mine or theirs if isinstance(mine, bool) else mine + theirs)
