"""Copy the closed segments of a topic into an archive.

Each object is written once and whole, under a name that never changes, so that several processes may copy the same
segments, and a killed one is simply started again.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...archive.segment_names import ARCHIVED_SUFFIX, ArchivedName
from ...fleet.log_identity import common_span, last_common, last_readable
from ...log.errors import LogReadError, NotASegmentError
from ...log.files import Files
from ...log.inspection.findings import Finding, Kind
from ...log.inspection.segments import SegmentPath, find_identity, scan_segment, segment_paths
from ...log.segment.format import FILE_HEADER_BYTES, base_in_name
from ...log.segment.identity import FILE_NAME as INCARNATION_FILE
from ...log.segment.identity import Identity, find_header
from ...log.segment.index import SUFFIX as INDEX_SUFFIX
from ...log.segment.index import WITHOUT_INDEX_BYTES, SparseIndex
from ...storage import LocalStorage, Storage, StorageError, naming_file
from .log import ArchivedLog, SegmentLog

_LOCK = "lock"
_COPY_BYTES = 8 * 1024 * 1024

Progress = Callable[[int], None]
"""Called with the number of bytes copied or skipped since the last call."""


@dataclass(slots=True)
class ArchivedTopic:
    """The result of archiving one topic.

    Attributes:
        incarnation: The topic's incarnation, 32 hex digits; None if it has no segment.
        copied, copied_bytes: The segments that were copied, and their size.
        present: The number of segments that the archive had before.
        next_sequence: The sequence after the last archived message.
        findings: Damage in the copied segments, and files that were not copied.
    """

    topic: str
    incarnation: str | None = None
    copied: int = 0
    copied_bytes: int = 0
    present: int = 0
    next_sequence: int = 0
    findings: list[Finding] = field(default_factory=list)


class TopicArchiver:
    """Copies the segments of one topic. `archive` may be called again when the broker has closed more segments.

    Attributes:
        report: The result of the last call of `archive`, also of one that failed.

    Args:
        folder: The topic's folder; a broker may use it.
        storage_of: Returns the archive's folder of an incarnation, given as 32 hex digits.
        tail: Whether to copy the last segment, too: of a broker that will not append to it. Otherwise it is copied
            when the broker has begun another one.
    """

    def __init__(
        self, topic: str, folder: Path, storage_of: Callable[[str], Storage], *, tail: bool = False
    ) -> None:
        self.report: ArchivedTopic = ArchivedTopic(topic)
        self._folder = folder
        self._storage_of = storage_of
        self._tail = tail
        self._files = Files()

    def archive(self, progress: Progress | None = None) -> ArchivedTopic:
        """Copy the segments that the archive does not have.

        Raises:
            LogReadError: The operating system failed to read a segment.
            StorageError, OSError: The archive cannot be written, or another process copies to the same local folder.
        """
        segments, findings = segment_paths(self._folder, self._files)
        report = self.report = ArchivedTopic(self.report.topic, findings=findings)
        identity, finding = find_identity(self._files, self._folder)
        report.findings += [finding] if finding is not None else []
        if not segments:
            return report
        if identity is None:
            identity = Identity.derive(self._files, [segment.path for segment in segments])
        report.incarnation = identity.incarnation.hex()
        storage = self._storage_of(report.incarnation)
        with ExitStack() as stack:
            if isinstance(storage, LocalStorage):
                # A killed process leaves an unfinished file there; in a bucket it leaves nothing.
                stack.enter_context(storage.hold(_LOCK, partial(_is_busy, storage.shown)))
                storage.remove_unfinished([""])
            self._copy_all(segments, storage, identity, progress)
        return report

    def _copy_all(
        self, segments: list[SegmentPath], storage: Storage, identity: Identity, progress: Progress | None
    ) -> None:
        report = self.report
        listed = storage.files()
        there = {file.name for file in listed} if isinstance(listed, list) else set()
        if any(name.endswith(ARCHIVED_SUFFIX) for name in there) and (reason := self._why_other(storage)):
            report.findings.append(Finding(Kind.DAMAGE, self._folder, 0, 0, f"not copied: {reason}"))
            return
        if INCARNATION_FILE not in there:
            storage.put_new(INCARNATION_FILE, identity.encode())
        copies = [each for name in sorted(there) if (each := ArchivedName.parse(name)) is not None]
        archived = {each.first: each.last for each in copies if each.suffix == ARCHIVED_SUFFIX}
        for segment in segments:
            limit = self._end() if segment.limit is None and self._tail else segment.limit
            base_sequence = base_in_name(segment.path)
            if limit is None or limit == base_sequence:
                continue
            if archived.get(base_sequence, -1) >= limit - 1:
                report.present += 1
                report.next_sequence = limit
            else:
                last = archived.get(base_sequence, -1)
                self._copy(segment, limit, last, storage, identity, report, progress)

    def _why_other(self, storage: Storage) -> str:
        """Return why the archive cannot have the messages of the folder: it has others; empty: it can."""
        archived, log = ArchivedLog(storage), SegmentLog(self._folder)
        span = common_span(archived.bounds(), log.bounds())
        if span is None:
            return ""
        last = last_common(archived, log, span) or last_readable(archived, log, span)
        if last is None:
            return "no message of the archive can be read in both, to compare them"
        if last.is_same:
            return ""
        return (
            f"message {last.sequence} in the archive is another one: the broker was restored from a backup, or a power "
            "cut took its last messages. Copy to another archive"
        )

    def _end(self) -> int:
        return SegmentLog(self._folder).bounds().end

    def _copy(
        self,
        segment: SegmentPath,
        limit: int,
        archived_last: int,
        storage: Storage,
        identity: Identity,
        report: ArchivedTopic,
        progress: Progress | None,
    ) -> None:
        """Check and copy a segment, and make its index.

        Args:
            limit: The sequence after the segment, if its last messages, or the segment after it, are not lost.
            archived_last: The last sequence of the segment in the archive; -1: it is not there.
        """
        path = segment.path
        try:
            fd = self._files.open_read_only(path)
        except FileNotFoundError:
            report.findings.append(Finding(Kind.NOTE, path, 0, 0, "deleted before it was copied"))
            return
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        try:
            size, seed = self._check_header(fd, path, identity)
            end = None
            index = SparseIndex(size)
            records_end = FILE_HEADER_BYTES
            for found in scan_segment(segment, self._files):
                if isinstance(found, Finding):
                    report.findings.append(found)
                    if found.kind is Kind.DAMAGE:
                        records_end = max(records_end, found.end)
                else:
                    end = found.header.next_sequence
                    index.add(found.header.base_sequence, found.offset)
                    records_end = found.offset + found.header.record_bytes
            if segment.limit is None:
                size = index.up_to = min(size, records_end)  # without zeros that a broker has written ahead
            # Messages between its last one and the next segment are lost, and the archive may have them.
            name = ArchivedName(segment.base_sequence, min(end or limit, limit) - 1, ARCHIVED_SUFFIX)
            report.next_sequence = limit
            if archived_last >= name.last:
                report.present += 1
                return
            # Before the segment, so that a segment in the archive has its index. The broker's own may not be saved yet.
            if size > WITHOUT_INDEX_BYTES:
                storage.put_new(str(name._replace(suffix=INDEX_SUFFIX)), index.encode(seed))
            if self._copy_bytes(fd, size, str(name), storage, progress):
                report.copied += 1
                report.copied_bytes += size
            else:
                report.present += 1
        except NotASegmentError as exc:
            what = f"not copied: {exc.reason}"
            base = segment.base_sequence
            report.findings.append(Finding(Kind.DAMAGE, path, 0, 0, what, base, limit - base))
        finally:
            self._files.close(fd)

    def _check_header(self, fd: int, path: Path, identity: Identity) -> tuple[int, int]:
        """Return the size and the seed of a segment.

        Raises LogReadError, and NotASegmentError if it is not one of the topic's.
        """
        try:
            size = self._files.size(fd)
            header = find_header(partial(self._files.read, fd), size, path, identity)
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        return size, header.seed if header is not None else 0

    def _copy_bytes(self, fd: int, size: int, name: str, storage: Storage, progress: Progress | None) -> bool:
        """Copy a file; return False if the archive has it already."""
        with naming_file(storage.url_of(name)):
            file = storage.create(name)
            try:
                for offset in range(0, size, _COPY_BYTES):
                    data = self._files.read_fully(fd, min(_COPY_BYTES, size - offset), offset)
                    file.write(data)
                    if progress is not None:
                        progress(len(data))
                return file.publish()
            except BaseException:
                file.discard()
                raise


def _is_busy(place: str, process: str) -> StorageError:
    return StorageError(f"{process} copies segments to {place}: run the command again when it has ended")
