"""Verification of a log, with or without a running broker: all headers, all checksums, no missing sequences."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DamagedSegmentError, ForeignSegmentError, LogReadError
from ..files import Files
from ..segment.format import SUFFIX, base_in_name
from ..segment.unwritten import ALL_STABLE
from .findings import Finding, Kind
from .segments import SegmentPath, find_identity, scan_segment, segment_bytes, segment_paths

Progress = Callable[[int], None]
"""Called repeatedly with the number of bytes checked since the last call."""

_REPORT_EVERY_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class LogReport:
    """The content of a log, or of one segment, and its problems.

    Attributes:
        records, messages: Number of undamaged records and messages.
        next_sequence: The sequence after the last readable message; equal to `first_sequence` for an empty log.
        findings: Problems, in the order of files and offsets.
    """

    path: Path
    segments: int = 0
    size_bytes: int = 0
    records: int = 0
    messages: int = 0
    first_sequence: int = 0
    next_sequence: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether stored messages are lost, or a broker would not serve the topic."""
        return any(finding.kind is Kind.DAMAGE for finding in self.findings)

    @property
    def lost_messages(self) -> int:
        """Number of lost messages, as far as known."""
        return sum(finding.messages or 0 for finding in self.findings)


def verify_log(
    folder: Path,
    *,
    files: Files | None = None,
    progress: Progress | None = None,
    stable_end: int = ALL_STABLE,
) -> LogReport:
    """Read and check a whole log; `stable_end` as in `UnwrittenRecords`. Raises LogReadError if a read fails."""
    files = files or Files()
    segments, findings = segment_paths(folder, files)
    _, finding = find_identity(files, folder)
    findings += [finding] if finding is not None else []
    findings += _set_aside(folder, files)
    report = LogReport(folder, findings=findings)
    while segments:
        for segment in segments:
            _verify_segment(report, segment, files, progress, stable_end)
        last = segments[-1].path
        if last.exists():
            break
        # A broker began another segment and deleted this one meanwhile.
        segments = [segment for segment in segment_paths(folder, files)[0] if segment.path > last]
    return report


def _set_aside(folder: Path, files: Files) -> Iterator[Finding]:
    """Yield findings for files that a broker renamed because they cannot belong to the log. Raises LogReadError."""
    try:
        names = files.names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as exc:
        raise LogReadError(folder, exc) from exc
    for name in sorted(names):
        if f"{SUFFIX}{ForeignSegmentError.suffix}" in name or f"{SUFFIX}{DamagedSegmentError.suffix}" in name:
            yield Finding(Kind.NOTE, folder / name, 0, 0, "a broker has set it aside at its start")


def verify_segment(path: Path, *, files: Files | None = None, progress: Progress | None = None) -> LogReport:
    """Read and check one segment; it must end where the next one begins. Arguments as `verify_log`.

    Raises:
        LogReadError: The operating system failed to read.
    """
    files = files or Files()
    segments, findings = segment_paths(path.parent, files)
    report = LogReport(path, findings=[finding for finding in findings if finding.path == path])
    for segment in segments:
        if segment.path == path:
            _verify_segment(report, segment, files, progress, ALL_STABLE)
    return report


def _verify_segment(
    report: LogReport, segment: SegmentPath, files: Files, progress: Progress | None, stable_end: int
) -> None:
    size = segment_bytes(segment, files)
    base_sequence = base_in_name(segment.path)
    if not report.segments:
        report.first_sequence = base_sequence
    report.segments += 1
    report.size_bytes += size
    following = base_sequence
    reported = 0
    for found in scan_segment(segment, files, stable_end=stable_end):
        if isinstance(found, Finding):
            report.findings.append(found)
            following = max(following, found.next_sequence)
            continue
        report.records += 1
        report.messages += found.header.count
        following = found.header.next_sequence
        if progress is not None and found.offset - reported >= _REPORT_EVERY_BYTES:
            progress(found.offset - reported)
            reported = found.offset
    report.next_sequence = following
    if progress is not None:
        progress(size - reported)
