"""The manifest of an exported topic: its planned and exported ranges.

A range is stored before a task exports it, and its bounds never change. If a task that was considered dead still runs,
it writes the same files with the same content. Each task writes its result to a separate file (`RangeResult`), which
the job merges into the manifest. In addition to the files with messages, an export folder has

    _nsq/TOPIC/manifest.json
    _nsq/TOPIC/done/RANGE.json
    _nsq/TOPIC/lock
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...log.gaps import Span
from ...protocol.errors import NSQError
from ..ranges import BrokerRanges, LastMessage, split, subtract
from .layout import Layout, range_name, safe_name

VERSION = 1
FOLDER = "_nsq"
"""Spark, pyarrow and others ignore names that start with an underscore."""


class ManifestError(NSQError):
    """A manifest cannot be used; the text has the reason."""


@dataclass(frozen=True, slots=True)
class RangeResult:
    """An exported range: each of its messages is in a file or in `gaps`. The field names are the keys of its file.

    Attributes:
        first, end: The range.
        messages: The number of messages in files.
        body_bytes: The size of their bodies.
        files: File names, relative to the folder; empty if there were no messages.
        file_bytes: The size of the files.
        gaps: `[first, end, reason]` of the missing messages.
        for_one_channel: Messages that were republished to one channel; they are not exported again.
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
        return Span(self.first, self.end)

    def to_bytes(self) -> bytes:
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
class Manifest:
    """The manifest of one topic."""

    topic: str
    layout: Layout
    brokers: dict[str, BrokerRanges] = field(default_factory=dict)

    def ranges_of(self, broker: str) -> BrokerRanges:
        """Return the ranges of a broker, which may be new.

        Raises:
            ManifestError: Another broker would have the same file names.
        """
        if broker not in self.brokers:
            for other in self.brokers:
                if safe_name(other) == safe_name(broker):
                    raise ManifestError(f"the files of {broker} and {other} would have the same names")
            self.brokers[broker] = BrokerRanges()
        return self.brokers[broker]

    def plan(self, broker: str, wanted: Span | None, messages_per_range: int) -> list[Span]:
        """Plan the part of a span that is not planned yet.

        Args:
            wanted: The span; None: nothing to export.
            messages_per_range: The maximum length of a new range.

        Returns:
            The ranges to export, in order: all that are pending and overlap the span.
        """
        ranges = self.ranges_of(broker)
        if wanted is None:
            return []
        for left in subtract(wanted, ranges.planned):
            ranges.pending += split(left, messages_per_range)
        ranges.pending.sort()
        return [span for span in ranges.pending if span.overlaps(wanted)]

    def mark_done(self, result: RangeResult) -> None:
        """Mark a range as exported; idempotent."""
        ranges = self.ranges_of(result.broker)
        if result.span in ranges.pending:
            ranges.pending.remove(result.span)
        ranges.done[result.span] = result.messages
        if result.last_id is not None and (ranges.last is None or result.end > ranges.last.sequence):
            ranges.last = LastMessage(result.end - 1, result.last_id)

    def to_bytes(self) -> bytes:
        brokers = {
            label: {
                "done": [[*span, messages] for span, messages in sorted(ranges.done.items())],
                "pending": ranges.pending,
                "last": ranges.last,
            }
            for label, ranges in self.brokers.items()
        }
        found = {
            "version": VERSION,
            "topic": self.topic,
            "layout": self.layout.to_json(),
            "brokers": brokers,
        }
        return json.dumps(found, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parse the content of a file. Raises ManifestError."""
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise ManifestError(
                    f"it has version {found['version']}; this program supports only version {VERSION}"
                )
            brokers = {label: _parse_ranges(ranges) for label, ranges in found["brokers"].items()}
            return cls(found["topic"], Layout.from_json(found["layout"]), brokers)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ManifestError(f"it cannot be read: {exc!r}") from exc


def _parse_ranges(found: Mapping[str, Any]) -> BrokerRanges:
    done = {Span(first, end): messages for first, end, messages in found["done"]}
    last = LastMessage(*found["last"]) if found["last"] else None
    return BrokerRanges(done, [Span(first, end) for first, end in found["pending"]], last)


def manifest_path(topic: str) -> str:
    """Return the path of a manifest, relative to the export folder."""
    return f"{FOLDER}/{safe_name(topic)}/manifest.json"


def results_folder(topic: str) -> str:
    """Return the folder of the results of ranges, relative to the export folder."""
    return f"{FOLDER}/{safe_name(topic)}/done"


def result_path(topic: str, broker: str, span: Span) -> str:
    """Return the path of the result of one range, relative to the export folder."""
    return f"{results_folder(topic)}/{range_name(topic, broker, span)}.json"
