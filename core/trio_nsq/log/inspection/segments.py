"""Reading a whole segment, and reporting all problems in it.

This module only reads, and a broker may append meanwhile. So it reads bytes that look damaged a second time, and does
not report a record that was being written when the file was opened.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from errno import EIO
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from ...platform.checksum import crc32
from ..errors import LogReadError, NotASegmentError, UnusableSegmentError
from ..files import NO_FILE, Files
from ..files.tolerant_reader import Window
from ..records import HEADER_BYTES, RecordHeader, decode_header
from ..segment.format import FILE_HEADER_BYTES, SUFFIX, FileHeader, base_in_name, decode_file_header
from ..segment.identity import Identity, find_header
from ..segment.index import SUFFIX as INDEX_SUFFIX
from ..segment.index import SparseIndex
from ..segment.scan import BULK_BYTES, NO_LIMIT, find_record, scan_records
from ..segment.unwritten import ALL_STABLE, UnwrittenRecords
from .findings import NOT_SERVED, Finding, Kind

_UNFINISHED = "an unfinished record batch, which the next start of the broker cuts off"
_UNWRITTEN = "a write that a power cut interrupted, which the next start of the broker cuts off"
_NOTHING = memoryview(b"")
_PAYLOAD_CRC = slice(8, 12)


class ScannedRecord(NamedTuple):
    """An undamaged record batch. The payload is empty and unchecked if it was not wanted."""

    path: Path
    offset: int
    header: RecordHeader
    payload: memoryview


class SegmentPath(NamedTuple):
    """A segment; `limit` is the base sequence of the segment after it, None for the last one."""

    path: Path
    limit: int | None

    @property
    def base_sequence(self) -> int:
        """The sequence in its name."""
        return base_in_name(self.path)


def with_limits(paths: Sequence[Path]) -> list[SegmentPath]:
    """Return the segments with these paths, the oldest first; the names are those of segments."""
    limits = [base_in_name(path) for path in paths[1:]]
    return [SegmentPath(path, limit) for path, limit in zip_longest(paths, limits)]


def segment_paths(folder: Path, files: Files) -> tuple[list[SegmentPath], list[Finding]]:
    """List the segments of a log, oldest first, and the files that have the name of a segment but are not one.

    A missing folder has no segments: a broker creates it with the first message, and may delete it. A path that is not
    a folder is a finding.

    Raises:
        LogReadError: The folder cannot be read.
    """
    try:
        # A listing may contain the second of two files that a broker creates meanwhile, but not the first. A second
        # listing contains it, if it still exists.
        last = max((name for name in files.names(folder) if name.endswith(SUFFIX)), default="")
        names = [name for name in files.names(folder) if name.endswith(SUFFIX) and name <= last]
        paths = [folder / name for name in sorted(names)]
    except FileNotFoundError:
        return [], []
    except NotADirectoryError:
        return [], [Finding(Kind.DAMAGE, folder, 0, 0, f"it is not a folder; {NOT_SERVED}")]
    except OSError as exc:
        raise LogReadError(folder, exc) from exc
    named: list[Path] = []
    findings: list[Finding] = []
    for path in paths:
        try:
            base_in_name(path)
            named.append(path)
        except NotASegmentError as exc:
            what = f"not a segment: {exc.reason}; {NOT_SERVED}"
            findings.append(Finding(Kind.DAMAGE, path, 0, 0, what))
    return with_limits(named), findings


def scan_segment(
    segment: SegmentPath,
    files: Files,
    wanted: Callable[[RecordHeader], bool] | None = None,
    first_sequence: int = 0,
    stable_end: int = ALL_STABLE,
) -> Iterator[ScannedRecord | Finding]:
    """Yield every record of a segment, in order, and findings about damage.

    Args:
        wanted: Whether to read and check the payload that belongs to a header; None: all payloads.
        first_sequence: If the segment's index tells where this sequence is, the records before it are not read.
        stable_end: As in `UnwrittenRecords`.

    Raises:
        LogReadError: The operating system failed to read. Bad blocks and paths that are not files are findings.
    """
    path = segment.path
    try:
        fd = files.open_read_only(path)
    except FileNotFoundError:
        yield Finding(
            Kind.NOTE, path, 0, 0, "deleted during this scan: a broker deletes segments that no channel needs"
        )
        return
    except OSError as exc:
        if exc.errno not in NO_FILE:
            raise LogReadError(path, exc) from exc
        base = base_in_name(path)
        messages = None if segment.limit is None else segment.limit - base
        yield Finding(Kind.DAMAGE, path, 0, 0, f"{exc.strerror}; {NOT_SERVED}", base, messages)
        return
    try:
        yield from _Scan(segment, files, fd, wanted, first_sequence, stable_end).run()
    except OSError as exc:
        raise LogReadError(path, exc) from exc
    finally:
        files.close(fd)


def segment_bytes(segment: SegmentPath, files: Files) -> int:
    """Return the size of a segment; 0 if a broker has deleted it, or it is not a file. Raises LogReadError."""
    try:
        fd = files.open_read_only(segment.path)
    except FileNotFoundError:
        return 0
    except OSError as exc:
        if exc.errno in NO_FILE:
            return 0
        raise LogReadError(segment.path, exc) from exc
    try:
        return files.size(fd)
    except OSError as exc:
        raise LogReadError(segment.path, exc) from exc
    finally:
        files.close(fd)


def find_identity(files: Files, folder: Path) -> tuple[Identity | None, Finding | None]:
    """As `Identity.read`; a path that is not a file is a finding. Raises LogReadError."""
    try:
        return Identity.read(files, folder), None
    except LogReadError as exc:
        if exc.errno not in NO_FILE:
            raise
        return None, Finding(Kind.DAMAGE, exc.path, 0, 0, f"{exc.reason}; {NOT_SERVED}")


class _UnreadableError(Exception):
    """The disk cannot read a block."""


class _Scan:
    """One scan of an open file, see `scan_segment`."""

    def __init__(
        self,
        segment: SegmentPath,
        files: Files,
        fd: int,
        wanted: Callable[[RecordHeader], bool] | None,
        first_sequence: int,
        stable_end: int,
    ) -> None:
        self._path = segment.path
        self._first_sequence = first_sequence
        self._is_last = segment.limit is None
        self._limit = NO_LIMIT if segment.limit is None else segment.limit
        self._files = files
        self._fd = fd
        self._end = files.size(fd)  # bytes written later are not checked
        self._wanted = wanted
        self._expected = base_in_name(segment.path)
        self._at = 0  # where the scan is
        self._findings: list[Finding] = []  # to be yielded before the next record
        self._seed = 0
        self._stable_end = stable_end
        self._unwritten: UnwrittenRecords | None = (
            None  # after the file's header was read, for the last segment
        )
        self._window = Window(self._read_window, BULK_BYTES)

    def run(self) -> Iterator[ScannedRecord | Finding]:
        """See `scan_segment`. Raises OSError."""
        unfinished: list[ScannedRecord] = []  # records of a batch whose last record is not read yet
        for found in self._walk():
            if isinstance(found, ScannedRecord):
                unfinished.append(found)
                if found.header.has_next:
                    continue
            elif found.kind is Kind.TORN and unfinished:
                found = replace(found, offset=unfinished[0].offset)
                unfinished.clear()
            yield from unfinished
            unfinished.clear()
            if isinstance(found, Finding):
                yield found
        if not self._is_last:
            yield from unfinished
        elif unfinished and self._files.size(self._fd) <= self._end:  # otherwise a broker is writing the rest
            yield Finding(Kind.TORN, self._path, unfinished[0].offset, self._end, _UNFINISHED)

    def _walk(self) -> Iterator[ScannedRecord | Finding]:
        """As `run`, with the records of an unfinished batch."""
        try:
            yield from self._check_file_header()
            self._skip_to_first()
            records = scan_records(
                *(self._window, self._seed, self._at, self._end, self._expected, self._limit), self._skip
            )
            for offset, header in records:
                self._at = offset
                if header.base_sequence > self._expected:
                    what = "messages are missing here"
                    self._damage(offset, offset, what, header.base_sequence - self._expected)
                payload = self._payload(offset, header)
                if payload is not None:
                    self._expected = header.next_sequence
                elif self._add_payload_finding(offset, header):
                    break
                if self._findings:
                    yield from self._pop_findings()
                self._at = offset + header.record_bytes
                if payload is not None:
                    yield ScannedRecord(self._path, offset, header, payload)
            else:
                if self._left:
                    what = (
                        "messages are missing at the end: the file was truncated, or the next file is missing"
                    )
                    self._damage(self._end, self._end, what, self._left)
        except _UnreadableError:
            self._damage(self._at, self._end, "the disk cannot read this", self._left)
        yield from self._pop_findings()

    def _skip_to_first(self) -> None:
        """Skip records before the first one to read, as far as an index tells where it is."""
        if self._first_sequence <= self._expected or self._at >= self._end:
            return
        try:
            data = self._files.content(self._path.with_suffix(INDEX_SUFFIX), self._end)
        except OSError:
            return
        index = SparseIndex.decode(data, self._seed, self._end)
        entry = index.entry_before(self._first_sequence) if index is not None else None
        if entry is not None:
            self._expected, self._at = entry

    # ------------------------------------------------------------------ reading

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return self._files.read(self._fd, size, offset)
        except OSError as exc:
            if exc.errno == EIO:
                raise _UnreadableError from exc
            raise

    def _read_fully(self, size: int, offset: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._read(size - len(data), offset + len(data))):
            data += more
        return data

    def _read_window(self, size: int, offset: int, needed: int) -> bytes:
        try:
            return self._read(size, offset)
        except _UnreadableError:
            return self._read(needed, offset)  # the bad block may be after it

    def _payload(self, offset: int, header: RecordHeader) -> memoryview | None:
        """Return the payload of the record at `offset`, empty if it is not wanted; None if it is damaged."""
        if self._wanted is not None and not self._wanted(header):
            following = offset + header.record_bytes
            return _NOTHING if following <= self._end or following <= self._files.size(self._fd) else None
        for _ in range(2):
            at = self._window.at(offset, header.record_bytes)
            payload = memoryview(self._window.data)[at + HEADER_BYTES : at + header.record_bytes]
            if header.matches(payload):
                return payload
            self._window.clear()
        return None

    # ------------------------------------------------------------------ findings

    @property
    def _left(self) -> int | None:
        """Number of messages missing up to the end of the segment; None for the last segment."""
        return None if self._is_last else self._limit - self._expected

    def _add(self, kind: Kind, offset: int, end: int, what: str) -> None:
        """Add a finding that concerns no message."""
        self._findings.append(Finding(kind, self._path, offset, end, what))

    def _damage(self, offset: int, end: int, what: str, messages: int | None) -> None:
        """Add a finding about the next messages."""
        self._findings.append(Finding(Kind.DAMAGE, self._path, offset, end, what, self._expected, messages))
        self._expected += messages or 0

    def _pop_findings(self) -> Iterator[Finding]:
        findings, self._findings = self._findings, []
        yield from findings

    def _check_file_header(self) -> Iterator[Finding]:
        """Check the file's header, and move to the first record."""
        try:
            identity, _ = find_identity(self._files, self._path.parent)
            header = find_header(partial(self._files.read, self._fd), self._end, self._path, identity)
        except UnusableSegmentError as exc:
            what = f"{exc.reason}; the broker renames the file at its next start"
            self._damage(0, self._end, what, self._left)
            self._at = self._end
        except NotASegmentError as exc:
            what = f"not a segment: {exc.reason}; {NOT_SERVED}"
            header = decode_file_header(self._read(FILE_HEADER_BYTES, 0))
            if header is None:
                self._damage(0, self._end, what, self._left)
                self._at = self._end
            else:
                self._add(Kind.DAMAGE, 0, header.size, what)  # the file was renamed
                self._begin(header)
        except OSError as exc:
            if exc.errno == EIO:
                raise _UnreadableError from exc
            raise
        else:
            if header is not None:
                if header.derived:
                    what = "the file's header is damaged; its records are still readable"
                    self._add(Kind.DAMAGE, 0, header.size, what)
                self._begin(header)
            elif self._left:
                self._damage(0, self._end, "the file is empty", self._left)
                self._at = self._end
            else:
                what = "the creation of this file was interrupted; it holds no record"
                self._add(Kind.TORN, 0, self._end, what)
                self._at = self._end
        yield from self._pop_findings()

    def _begin(self, header: FileHeader) -> None:
        self._at = header.size
        self._seed = header.seed
        if self._is_last:
            self._unwritten = UnwrittenRecords(header, self._stable_end, self._read_fully)

    def _is_unwritten(self, offset: int, end: int) -> bool:
        return self._unwritten is not None and self._unwritten.begin_at(offset, end, self._expected)

    def _skip(self, offset: int, expected: int) -> int:
        """Add a finding about the data at `offset`, which is not the expected record. As `skip` of `scan_records`."""
        if self._files.size(self._fd) <= offset:
            return self._end  # a broker has removed a failed append
        self._at = offset
        self._window.clear()  # it may have changed
        at = self._window.at(offset, HEADER_BYTES)
        header = decode_header(self._window.data, at, self._seed)
        if header is not None and header.base_sequence < expected:
            following = offset + header.record_bytes
            what = f"a record batch that begins with sequence {header.base_sequence} again"
            self._add(Kind.DAMAGE, offset, following, what)
            return following
        if self._unwritten is not None and self._unwritten.is_zeros(offset):
            return self._end  # a broker has written them ahead
        found = find_record(self._read, self._seed, offset, self._end, expected, self._limit)
        if found is not None:
            start, header = found
            self._window.clear()
            if start == offset:
                return offset  # a broker has just written it
            if self._is_unwritten(offset, start):
                self._add(Kind.TORN, offset, self._end, _UNWRITTEN)
                return self._end
            what = "the header of a record batch is damaged"
            self._damage(offset, start, what, header.base_sequence - expected)
            return start
        if not self._is_last or self._is_whole_record(offset):
            what = "the header of a record batch is damaged"
            if self._is_last:
                what += "; it is the last one, and the next start of the broker cuts it off"
            self._damage(offset, self._end, what, self._left)
        else:
            self._add(Kind.TORN, offset, self._end, _UNFINISHED)
        return self._end

    def _is_whole_record(self, offset: int) -> bool:
        """Whether the bytes up to the end of the file are a record with a damaged header and an intact payload.

        Zeros may follow it, which a broker has written ahead.
        """
        data = self._read(self._end - offset, offset)
        payload = data[HEADER_BYTES:].rstrip(b"\0")  # as far as it does not end in zeros itself
        if not payload:
            return False
        found, wanted = crc32(payload), int.from_bytes(data[_PAYLOAD_CRC], "big")
        for _ in range(len(data) - HEADER_BYTES - len(payload)):
            if found == wanted:
                break
            found = crc32(b"\0", found)
        return found == wanted

    def _add_payload_finding(self, offset: int, header: RecordHeader) -> bool:
        """Add a finding about a record with a damaged payload; return whether the records end there."""
        following = offset + header.record_bytes
        size = self._files.size(self._fd)
        if following <= size and not self._is_unwritten(offset, following):
            self._damage(offset, following, "a record batch does not match its checksum", header.count)
            return False
        if self._is_last:
            self._add(Kind.TORN, offset, size, _UNWRITTEN if following <= size else _UNFINISHED)
            return True
        self._damage(offset, size, "the file ends within a record batch", self._left)
        return False
