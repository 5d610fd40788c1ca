"""The manifest of an exported topic: its planned and exported ranges.

A range is stored before a task exports it. Its bounds never change, and its layout only if columns become wider. If a
task that was considered dead still runs, it writes the same files with the same content. Each task writes its result to
a separate file (`RangeResult`), which the job merges into the manifest. Finished ranges that touch become one, so that
the manifest of a continuous export does not grow with each round. In addition to the files with messages, an export
folder has

    _nsq/TOPIC/manifest.json
    _nsq/TOPIC/done/RANGE.json
    _nsq/TOPIC/lock
    _nsq/TOPIC/changes/...             with a key: the files with messages, until the table has them
    _nsq/TOPIC/deleted/NUMBER.parquet  with a key: the deleted keys, after the commit of this number
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...log.gaps import Span
from ...protocol.errors import NSQError
from ..ranges import BrokerRanges, LastMessage, merge_adjacent, split, subtract
from .layout import Layout, range_name, safe_name

VERSION, _NEWEST = 2, 3
"""A layout with a condition, masks, a schema, a key, or what `Layout.shapes` has makes it version 3: earlier programs
would write other rows. So do unfinished conversions: earlier programs know only those of longs to doubles, and would
note the others as finished."""
_READABLE = (1, 2, 3)
"""Version 1 has one layout, and neither an id nor commits; it is saved as version 2."""
_ID_BYTES = 8
FOLDER = "_nsq"
"""Spark, pyarrow and others ignore names that start with an underscore."""


class ManifestError(NSQError):
    """A manifest cannot be used; the text has the reason."""


@dataclass(frozen=True, slots=True)
class RangeResult:
    """An exported range: each of its messages is in a file or in `gaps`, or is counted as left out.

    The field names are the keys of its file.

    Attributes:
        first, end: The range.
        messages: The number of messages in files.
        body_bytes: The size of their bodies.
        files: File names, relative to the folder; empty if there were no messages.
        file_bytes: The size of the files.
        gaps: `[first, end, reason]` of the missing messages.
        for_one_channel: Messages that were republished to one channel; they are not exported again.
        unparsed: Messages whose body is in the column `unparsed`.
        without_column: Messages whose headers are not in the files, as the folder has no column for them.
        last_id: What `Log.id_at` returns for the message `end - 1`; None if it is missing.
        layout: The layout of the files, an index into the manifest's.
        misfits: The number of values that did not fit their column, by path, such as `user.age`.
        new_fields: Fields of JSON bodies without a column, with their inferred types; at most 100.
        widen: Columns that need a wider type for the values of this range, with that type. Then nothing was written.
        milliseconds: The number of timestamps in `misfits`, by field, that are plausible as Unix milliseconds.
        discarded: The number of values that the contract left out, by path.
        discarded_rows: Messages that the contract left out; they are not in `messages`.
        filtered: Messages that do not meet the condition of the layout; they are not exported.
        dead_letters: Messages that were published to the dead-letter topic; they are not in `messages`.
        masked: The number of values that masks have hidden, by the field of the mask.
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
    layout: int = 0
    misfits: dict[str, int] = field(default_factory=dict)
    new_fields: dict[str, str] = field(default_factory=dict)
    widen: dict[str, str] = field(default_factory=dict)
    milliseconds: dict[str, int] = field(default_factory=dict)
    without_column: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    discarded_rows: int = 0
    filtered: int = 0
    dead_letters: int = 0
    masked: dict[str, int] = field(default_factory=dict)

    @property
    def span(self) -> Span:
        return Span(self.first, self.end)

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json()).encode()

    def to_json(self) -> dict[str, Any]:
        """Convert to an object of the manifest. Earlier programs do not know these keys."""
        found = asdict(self)
        for key in ("discarded", "discarded_rows", "filtered", "dead_letters", "masked"):
            if not found[key]:
                del found[key]
        return found

    @classmethod
    def from_bytes(cls, data: bytes) -> "RangeResult":
        """Parse the content of a file. Raises ManifestError."""
        try:
            return cls.from_json(json.loads(data))
        except (ValueError, KeyError, TypeError) as exc:
            raise ManifestError(f"the result of a range cannot be read: {exc}") from exc

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "RangeResult":
        """Raises KeyError, TypeError or ValueError if it is not a result."""
        gaps = [(first, end, reason) for first, end, reason in found["gaps"]]
        return cls(**found | {"gaps": gaps})


@dataclass(slots=True)
class Manifest:
    """The manifest of one topic.

    Attributes:
        brokers: The ranges of each log, by its label: the address where it was found first. It is in the names of its
            files, and stays when the broker has another address.
        layouts: The layouts of the files, oldest first; new ranges have the last one. Without a table, files at rest
            all have the last one.
        id: A random name of this export, which its commits to a table carry.
        commit: The number of the last commit to a table; 0 before the first.
        uncommitted: The results of commit `commit`, until it is known that the table has them.
        table: The table that has the files, as the options of `to-parquet`; empty: none.
        widening: Whether files are being converted to the last layout; some may have an older one.
        unreported: `(broker, first, end, reason)` of missing messages that no complete run has reported yet.
    """

    topic: str
    layouts: list[Layout]
    brokers: dict[str, BrokerRanges] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(_ID_BYTES))
    commit: int = 0
    uncommitted: list[RangeResult] = field(default_factory=list)
    table: str = ""
    widening: bool = False
    unreported: list[tuple[str, int, int, str]] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """The layout of new ranges."""
        return self.layouts[-1]

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

    def plan(
        self,
        broker: str,
        wanted: Span | None,
        messages_per_range: int,
        starts: Sequence[int] = (),
        kept_from: int = 0,
    ) -> list[Span]:
        """Plan the part of a span that is not planned yet.

        Args:
            wanted: The span; None: nothing to export.
            messages_per_range: The maximum length of a new range.
            starts: Where files of the log start, see `split`.
            kept_from: The oldest retained message. What is missing before it becomes one range, whose result says so.

        Returns:
            The ranges to export, in order: all that are pending, and overlap the span or are missing.
        """
        ranges = self.ranges_of(broker)
        for left in subtract(wanted, ranges.planned) if wanted is not None else ():
            cut = max(left.first, min(kept_from, left.end))
            new = [Span(left.first, cut)] if left.first < cut else []
            new += split(Span(cut, left.end), messages_per_range, starts) if cut < left.end else []
            ranges.pending |= dict.fromkeys(new, len(self.layouts) - 1)
        return sorted(
            span
            for span in ranges.pending
            if (wanted is not None and span.overlaps(wanted)) or span.end <= kept_from
        )

    def is_pending(self, result: RangeResult) -> bool:
        """Whether the range of a result is planned, and not done."""
        return result.broker in self.brokers and result.span in self.brokers[result.broker].pending

    def mark_done(self, results: Iterable[RangeResult]) -> list[RangeResult]:
        """Mark ranges as exported. Return the results of those that were pending: others were marked before."""
        new = []
        for result in results:
            ranges = self.ranges_of(result.broker)
            if ranges.pending.pop(result.span, None) is None:
                continue
            new.append(result)
            self.unreported += [(result.broker, *gap) for gap in result.gaps]
            ranges.done[result.span] = result.messages
            if result.last_id is not None and (ranges.last is None or result.end > ranges.last.sequence):
                ranges.last = LastMessage(result.end - 1, result.last_id)
        for broker in {result.broker for result in new}:
            self.brokers[broker].done = merge_adjacent(self.brokers[broker].done)
        return new

    def add_layout(self, layout: Layout) -> None:
        """Give new ranges this layout."""
        if layout != self.layout:
            self.layouts.append(layout)

    def widen(self, layout: Layout) -> None:
        """Give all files this layout, also those of pending ranges; the caller converts the files that are there."""
        self.layouts.append(layout)
        for ranges in self.brokers.values():
            ranges.pending = dict.fromkeys(ranges.pending, len(self.layouts) - 1)
        self.widening = True

    def to_bytes(self) -> bytes:
        brokers = {
            label: {
                "done": [[*span, messages] for span, messages in sorted(ranges.done.items())],
                "pending": [[*span, layout] for span, layout in sorted(ranges.pending.items())],
                "last": ranges.last,
                "incarnation": ranges.incarnation,
            }
            for label, ranges in self.brokers.items()
        }
        found = {
            "version": _NEWEST
            if self.widening
            or any(
                each.where or each.masks or each.body_schema or each.key or each.shapes
                for each in self.layouts
            )
            else VERSION,
            "topic": self.topic,
            "id": self.id,
            "layouts": [layout.to_json() for layout in self.layouts],
            "brokers": brokers,
            "commit": self.commit,
            "uncommitted": [result.to_json() for result in self.uncommitted],
            "table": self.table,
            "widening": self.widening,
            "unreported": self.unreported,
        }
        return json.dumps(found, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parse the content of a file. Raises ManifestError."""
        try:
            found = json.loads(data)
            if found["version"] not in _READABLE:
                raise ManifestError(
                    f"it has version {found['version']}; this program supports only versions up to {_NEWEST}"
                )
            if found["version"] == 1:
                _upgrade(found)
            return cls(
                found["topic"],
                [Layout.from_json(layout) for layout in found["layouts"]],
                {label: _parse_ranges(ranges) for label, ranges in found["brokers"].items()},
                found["id"],
                found["commit"],
                [RangeResult.from_json(result) for result in found["uncommitted"]],
                found.get("table", ""),
                bool(found.get("widening")),
                [(label, first, end, reason) for label, first, end, reason in found.get("unreported", ())],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ManifestError(f"it cannot be read: {exc!r}") from exc


def _upgrade(found: dict[str, Any]) -> None:
    """Convert the content of version 1."""
    found |= {
        "layouts": [found.pop("layout")],
        "id": secrets.token_hex(_ID_BYTES),
        "commit": 0,
        "uncommitted": [],
    }
    for ranges in found["brokers"].values():
        ranges["pending"] = [[first, end, 0] for first, end in ranges["pending"]]


def _parse_ranges(found: Mapping[str, Any]) -> BrokerRanges:
    done = {Span(first, end): messages for first, end, messages in found["done"]}
    pending = {Span(first, end): layout for first, end, layout in found["pending"]}
    last = LastMessage(*found["last"]) if found["last"] else None
    return BrokerRanges(merge_adjacent(done), pending, last, found.get("incarnation"))


def manifest_path(topic: str) -> str:
    """Return the path of a manifest, relative to the export folder."""
    return f"{FOLDER}/{safe_name(topic)}/manifest.json"


def results_folder(topic: str) -> str:
    """Return the folder of the results of ranges, relative to the export folder."""
    return f"{FOLDER}/{safe_name(topic)}/done"


def changes_folder(topic: str) -> str:
    """Return the folder of the files whose rows are not in a table with a key yet, relative to the export folder."""
    return f"{FOLDER}/{safe_name(topic)}/changes"


def deleted_folder(topic: str) -> str:
    """Return the folder of the keys that were deleted from a table, relative to the export folder."""
    return f"{FOLDER}/{safe_name(topic)}/deleted"


def result_path(topic: str, broker: str, span: Span) -> str:
    """Return the path of the result of one range, relative to the export folder."""
    return f"{results_folder(topic)}/{range_name(topic, broker, span)}.json"
