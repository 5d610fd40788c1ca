"""Reading the selected records of a log's files, past damage."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..files import Files
from ..records import RecordBatch, RecordHeader, decode_payload
from ..segment.format import base_in_name
from ..selection import Selection
from .carried_forward import scan_carried_forward
from .findings import Finding, Kind
from .segments import ScannedRecord, SegmentPath, scan_segment


def select_batches(
    segments: Sequence[SegmentPath], selection: Selection, files: Files, folder: Path | None = None
) -> Iterator[RecordBatch | Finding]:
    """Yield the batches that hold selected messages, and findings about damage. As `select_records`."""
    for found in select_records(segments, selection, files, folder, payloads=True):
        if isinstance(found, Finding):
            yield found
            continue
        header = found.header
        batch = decode_payload(header, bytes(found.payload))
        if batch is not None:
            yield batch
            continue
        what = "a record batch whose messages do not match its size"
        end = found.offset + header.record_bytes
        yield Finding(Kind.DAMAGE, found.path, found.offset, end, what, header.base_sequence, header.count)


def select_records(
    segments: Sequence[SegmentPath],
    selection: Selection,
    files: Files,
    folder: Path | None = None,
    *,
    payloads: bool,
) -> Iterator[ScannedRecord | Finding]:
    """Yield the records that hold selected messages, and findings about damage.

    Args:
        segments: The segments to read, oldest first.
        folder: The log's folder, to also read messages before the first segment from its carried-forward segment.
            None: do not read it.
        payloads: Whether to read and check payloads; otherwise only headers are read.

    Raises:
        LogReadError: The operating system failed to read.
    """
    if folder is not None:
        yield from _select_carried_forward(segments, selection, files, folder)
    for segment in segments:
        if segment.limit is not None and segment.limit <= selection.first_sequence:
            continue
        if base_in_name(segment.path) >= selection.end_sequence:
            return
        wanted = selection.touches if payloads else lambda _: False
        for found in scan_segment(segment, files, wanted, selection.first_sequence):
            if isinstance(found, Finding):
                if _concerns(selection, found):
                    yield found
            elif found.header.base_sequence >= selection.end_sequence:
                return
            elif found.payload if payloads else selection.touches(found.header):
                yield found


def _select_carried_forward(
    segments: Sequence[SegmentPath], selection: Selection, files: Files, folder: Path
) -> Iterator[ScannedRecord | Finding]:
    begin = base_in_name(segments[0].path) if segments else sys.maxsize

    def is_wanted(header: RecordHeader) -> bool:
        return header.base_sequence < begin and selection.touches(header)

    for found in scan_carried_forward(folder, files, is_wanted):
        if not isinstance(found, Finding) or _concerns(selection, found):
            yield found


def _concerns(selection: Selection, finding: Finding) -> bool:
    if finding.sequence is None:
        return True
    ends_before = finding.messages is not None and finding.next_sequence <= selection.first_sequence
    return finding.sequence < selection.end_sequence and not ends_before
