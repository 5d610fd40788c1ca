"""Reading a part of a log's files without a broker, or beside one: by sequence, by time, past damage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import Files
from ..records import RecordBatch, RecordHeader, decode_payload
from ..segment.format import base_in_name
from .carried_forward import scan_carried_forward
from .segments import Finding, Kind, ScannedRecord, SegmentPath, scan_segment

_NO_END = 2**64


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages of a log: those that meet all of this.

    Attributes:
        first_sequence, end_sequence: From this one on, and before that one.
        first_ns, end_ns: Published at this time or later, and before that one; Unix nanoseconds.
    """

    first_sequence: int = 0
    end_sequence: int = _NO_END
    first_ns: int = 0
    end_ns: int = _NO_END

    def touches(self, header: RecordHeader) -> bool:
        """Whether any of the record's messages is among them."""
        return (
            max(header.base_sequence, self.first_sequence) < min(header.next_sequence, self.end_sequence)
            and self.first_ns <= header.timestamp_ns < self.end_ns
        )

    def indexes(self, batch: RecordBatch) -> range:
        """Which messages of a record that `touches` are among them, counted from its first."""
        start = max(self.first_sequence - batch.base_sequence, 0)
        return range(start, min(self.end_sequence - batch.base_sequence, batch.count))

    def _concerns(self, finding: Finding) -> bool:
        if finding.sequence is None:
            return True
        ends_before = finding.messages is not None and finding.next_sequence <= self.first_sequence
        return finding.sequence < self.end_sequence and not ends_before


def select_headers(
    segments: Sequence[SegmentPath], selection: Selection, files: Files, folder: Path | None = None
) -> Iterator[ScannedRecord | Finding]:
    """The records that hold selected messages, without their payloads, and what is wrong among their headers.

    Args:
        segments: Those to read, the oldest first.
        selection: See there.
        files: The file system.
        folder: Where also the messages lie that were carried forward from before the first segment; None: these are
            not wanted.

    Raises:
        LogReadError: The operating system refused.
    """
    return _select(segments, selection, files, folder, payloads=False)


def select_batches(
    segments: Sequence[SegmentPath], selection: Selection, files: Files, folder: Path | None = None
) -> Iterator[RecordBatch | Finding]:
    """The batches that hold selected messages, and what is wrong between them. Arguments as `select_headers`.

    Raises:
        LogReadError: The operating system refused.
    """
    for found in _select(segments, selection, files, folder, payloads=True):
        if isinstance(found, Finding):
            yield found
            continue
        header = found.header
        batch = decode_payload(header, bytes(found.payload))
        if batch is not None:
            yield batch
            continue
        what = "a record batch whose messages do not fill it"
        end = found.offset + header.record_bytes
        yield Finding(Kind.DAMAGE, found.path, found.offset, end, what, header.base_sequence, header.count)


def _select(
    segments: Sequence[SegmentPath],
    selection: Selection,
    files: Files,
    folder: Path | None,
    *,
    payloads: bool,
) -> Iterator[ScannedRecord | Finding]:
    if folder is not None:
        yield from _select_carried_forward(segments, selection, files, folder)
    for segment in segments:
        if segment.limit is not None and segment.limit <= selection.first_sequence:
            continue
        if base_in_name(segment.path) >= selection.end_sequence:
            return
        for found in scan_segment(segment, files, selection.touches if payloads else _no_payload):
            if isinstance(found, Finding):
                if selection._concerns(found):
                    yield found
            elif found.header.base_sequence >= selection.end_sequence:
                return
            elif found.payload if payloads else selection.touches(found.header):
                yield found


def _select_carried_forward(
    segments: Sequence[SegmentPath], selection: Selection, files: Files, folder: Path
) -> Iterator[ScannedRecord | Finding]:
    begin = base_in_name(segments[0].path) if segments else _NO_END

    def is_wanted(header: RecordHeader) -> bool:
        return header.base_sequence < begin and selection.touches(header)

    for found in scan_carried_forward(folder, files, is_wanted):
        if not isinstance(found, Finding) or selection._concerns(found):
            yield found


def _no_payload(_header: RecordHeader) -> bool:
    return False
