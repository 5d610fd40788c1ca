"""What was planned for a folder, and what of it is done: the books of an export.

A range is written down before anybody works on it, and never cut anew: an attempt that was thought to be dead may still
be at it, and then writes the same names with the same content. What is done is put down by the task itself, in a file
beside the manifest (`RangeResult`), and taken over into it when the next chance comes.

In a folder of exports lie, beside the files with messages,

    _nsq/TOPIC/manifest.json
    _nsq/TOPIC/done/RANGE.json
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ...protocol.errors import NSQError
from ..ranges import Span, covered_up_to, split, subtract
from .layout import Layout, range_name, safe_name

VERSION = 1
FOLDER = "_nsq"
"""Spark, pyarrow and others pass over what begins with an underline."""


class ManifestError(NSQError):
    """A manifest cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What became of a range: everything in it is in files, or is not there.

    Attributes:
        broker: Its label.
        first, end: The range.
        messages: In files.
        body_bytes: Bytes of their bodies.
        files: Names below the folder; none if there was nothing.
        file_bytes: Bytes of all of these.
        gaps: `[first, end, reason]` of what is missing.
        for_one_channel: Messages that had been brought back for one channel, and are not in files a second time.
        unparsed: Messages whose body is in the column `unparsed`.
        last_id: The id of the message `end - 1`, 16 hex digits; None if that is missing.
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
        """As a file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RangeResult":
        """From there. Raises ManifestError."""
        try:
            found = json.loads(data)
            found["gaps"] = [(first, end, reason) for first, end, reason in found["gaps"]]
            return cls(**found)
        except (ValueError, KeyError, TypeError) as exc:
            raise ManifestError(f"what was noted of a range cannot be read: {exc}") from exc


class LastMessage(NamedTuple):
    """A message by which a log can be told from another."""

    sequence: int
    id: str


@dataclass(slots=True)
class BrokerRanges:
    """What is planned and done of one broker's log."""

    done: dict[Span, int] = field(default_factory=dict)
    """Messages in files, by range."""
    pending: list[Span] = field(default_factory=list)
    last: LastMessage | None = None


@dataclass(slots=True)
class Manifest:
    """See the module."""

    topic: str
    layout: Layout
    brokers: dict[str, BrokerRanges] = field(default_factory=dict)

    def book(self, broker: str) -> BrokerRanges:
        """One broker's; it may be new.

        Raises:
            ManifestError: Files of another broker would be called the same.
        """
        if broker not in self.brokers:
            for other in self.brokers:
                if safe_name(other) == safe_name(broker):
                    raise ManifestError(f"the files of {broker} and of {other} would be called the same")
            self.brokers[broker] = BrokerRanges()
        return self.brokers[broker]

    def plan(self, broker: str, wanted: Span | None, messages_per_range: int) -> list[Span]:
        """Plan what is wanted and not planned yet.

        Args:
            broker: Its label.
            wanted: The span; None: nothing but what was planned before.
            messages_per_range: The most.

        Returns:
            The ranges to be worked on, in order: the new ones, and those of before that are not done and have to do
            with what is wanted; these as a whole.
        """
        book = self.book(broker)
        if wanted is None:
            return []
        for left in subtract(wanted, [*book.done, *book.pending]):
            book.pending += split(left, messages_per_range)
        book.pending.sort()
        return [span for span in book.pending if span.overlaps(wanted)]

    def finish(self, done: RangeResult) -> None:
        """Note that a range is done; it does not matter if that was noted before."""
        book = self.book(done.broker)
        if done.span in book.pending:
            book.pending.remove(done.span)
        book.done[done.span] = done.messages
        if done.last_id is not None and (book.last is None or done.end > book.last.sequence):
            book.last = LastMessage(done.end - 1, done.last_id)

    def done_within(self, broker: str, wanted: Span) -> list[Span]:
        """The ranges that are done and have to do with a span."""
        return [span for span in self.book(broker).done if span.overlaps(wanted)]

    def covered_up_to(self, broker: str, first: int) -> int:
        """The first sequence from `first` on that is not done."""
        return covered_up_to(first, self.book(broker).done)

    def to_bytes(self) -> bytes:
        """As a file."""
        brokers = {
            label: {
                "done": [[*span, messages] for span, messages in sorted(book.done.items())],
                "pending": book.pending,
                "last": book.last and [book.last.sequence, book.last.id],
            }
            for label, book in self.brokers.items()
        }
        found = {
            "version": VERSION,
            "topic": self.topic,
            "layout": self.layout.as_json(),
            "brokers": brokers,
        }
        return json.dumps(found, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """From there. Raises ManifestError."""
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise ManifestError(
                    f"it is of version {found['version']}, and this program knows {VERSION} only"
                )
            brokers = {label: _book(book) for label, book in found["brokers"].items()}
            return cls(found["topic"], Layout.from_json(found["layout"]), brokers)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ManifestError(f"it cannot be read: {exc!r}") from exc


def _book(found: Mapping[str, Any]) -> BrokerRanges:
    done = {Span(first, end): messages for first, end, messages in found["done"]}
    last = LastMessage(*found["last"]) if found["last"] else None
    return BrokerRanges(done, [Span(first, end) for first, end in found["pending"]], last)


def manifest_path(topic: str) -> str:
    """Where a manifest lies, below the folder of the export."""
    return f"{FOLDER}/{safe_name(topic)}/manifest.json"


def done_folder(topic: str) -> str:
    """Where tasks note what they have done, likewise."""
    return f"{FOLDER}/{safe_name(topic)}/done"


def done_path(topic: str, broker: str, span: Span) -> str:
    """Where it is noted of one range, likewise."""
    return f"{done_folder(topic)}/{range_name(topic, broker, span)}.json"
