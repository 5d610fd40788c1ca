"""Reading a segment from end to end, past whatever is wrong with it, and saying what that is.

Nothing here writes, nor keeps the log's owner from writing: a broker may be appending meanwhile. So what does not
look right is read a second time before it is called damaged, and what was being written when the file was opened is
not judged.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from errno import EIO
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from ..errors import LogReadError, NotASegmentError, UnusableSegmentError
from ..files import NO_FILE, Files
from ..records import HEADER_BYTES, RecordHeader, decode_header, find_headers
from ..segment.format import FILE_HEADER_BYTES, SUFFIX, base_in_name, decode_file_header
from ..segment.identity import Identity, find_header

_READ_BYTES = 4 * 1024 * 1024
"""Large, because a record that reaches past the end of what was read is read again."""
_SEARCH_BYTES = 1024 * 1024
_NO_LIMIT = 2**64
NOT_SERVED = "a broker does not serve the topic"
_UNFINISHED = "an unfinished record batch, which the next start of the broker cuts off"
_NOTHING = memoryview(b"")
_PAYLOAD_CRC = slice(8, 12)


class Kind(StrEnum):
    """What a finding means.

    DAMAGE: messages that were stored cannot be read, or a file is not as a broker has left it.
    TORN: what a crash leaves of a write that was under way, and nobody was told had been stored; the next start of
        the broker cleans it up.
    NOTE: worth knowing, nothing lost.
    """

    DAMAGE = "damage"
    TORN = "torn"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        kind: How bad it is.
        path: The file.
        offset, end: Which of its bytes; equal where something is missing.
        what: The same in words.
        sequence: The first message concerned; None if that is not known, or no message is.
        messages: How many it costs; None if that cannot be known.
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
        """The sequence after the messages concerned, as far as they are known; 0 if none is."""
        return 0 if self.sequence is None else self.sequence + (self.messages or 0)


class ScannedRecord(NamedTuple):
    """An undamaged record batch; the payload is empty if it was not wanted, and was not checked then."""

    path: Path
    offset: int
    header: RecordHeader
    payload: memoryview


class SegmentPath(NamedTuple):
    """A segment's file; `limit` is the first sequence of the segment after it, None for the last one."""

    path: Path
    limit: int | None


def segment_paths(folder: Path, files: Files) -> tuple[list[SegmentPath], list[Finding]]:
    """The segments of a log, oldest first, and what is named like one and is none.

    A folder that is not there has none: a broker makes it with the first message, and may delete it any time.
    If something else has its name, there are none either, and that is found.

    Raises:
        LogReadError: The folder cannot be read.
    """
    try:
        # Of two files that a broker makes meanwhile, only the second may be seen. One that is older than any that has
        # been seen is seen the next time, if it is still there.
        last = max((name for name in files.names(folder) if name.endswith(SUFFIX)), default="")
        names = [name for name in files.names(folder) if name.endswith(SUFFIX) and name <= last]
        paths = [folder / name for name in sorted(names)]
    except FileNotFoundError:
        return [], []
    except NotADirectoryError:
        return [], [Finding(Kind.DAMAGE, folder, 0, 0, f"it is not a folder; {NOT_SERVED}")]
    except OSError as exc:
        raise LogReadError(folder, exc) from exc
    bases: dict[Path, int] = {}
    findings: list[Finding] = []
    for path in paths:
        try:
            bases[path] = base_in_name(path)
        except NotASegmentError as exc:
            what = f"not a segment: {exc.reason}; {NOT_SERVED}"
            findings.append(Finding(Kind.DAMAGE, path, 0, 0, what))
    limits = chain(islice(bases.values(), 1, None), [None])
    return [SegmentPath(path, limit) for path, limit in zip(bases, limits, strict=False)], findings


def scan_segment(
    segment: SegmentPath, files: Files, wanted: Callable[[RecordHeader], bool] | None = None
) -> Iterator[ScannedRecord | Finding]:
    """Every record of a segment, in order, and everything that is wrong with it.

    Args:
        segment: See there.
        files: The file system.
        wanted: Whether to read and check the payload that belongs to a header; None: every one.

    Raises:
        LogReadError: The operating system refused. A disk that cannot read a place is a finding, and so is anything
            else than a file, such as a folder of this name.
    """
    path = segment.path
    try:
        fd = files.open_read_only(path)
    except FileNotFoundError:
        yield Finding(
            Kind.NOTE, path, 0, 0, "gone since this began: a broker deletes what nobody needs any more"
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
        yield from _Scan(segment, files, fd, wanted).run()
    except OSError as exc:
        raise LogReadError(path, exc) from exc
    finally:
        files.close(fd)


def find_identity(files: Files, folder: Path) -> tuple[Identity | None, Finding | None]:
    """As `Identity.read`; if something else than a file has its name, that is found. Raises LogReadError."""
    try:
        return Identity.read(files, folder), None
    except LogReadError as exc:
        if exc.errno not in NO_FILE:
            raise
        return None, Finding(Kind.DAMAGE, exc.path, 0, 0, f"{exc.reason}; {NOT_SERVED}")


class _UnreadableError(Exception):
    """The disk cannot read a place."""


class _Scan:
    """A walk through one file, open as `fd`; see `scan_segment`."""

    def __init__(
        self, segment: SegmentPath, files: Files, fd: int, wanted: Callable[[RecordHeader], bool] | None
    ) -> None:
        self._path = segment.path
        self._is_last = segment.limit is None
        self._limit = _NO_LIMIT if segment.limit is None else segment.limit
        self._files = files
        self._fd = fd
        self._end = files.size(fd)  # what comes later is not judged
        self._wanted = wanted
        self._expected = base_in_name(segment.path)
        self._seed = 0
        self._data = b""
        self._start = 0  # where in the file `_data` was read

    def run(self) -> Iterator[ScannedRecord | Finding]:
        """See `scan_segment`. Raises OSError."""
        unfinished: list[ScannedRecord] = []  # of a batch of messages whose last record is yet to come
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
        elif unfinished and self._files.size(self._fd) <= self._end:  # else a broker is writing the rest
            yield Finding(Kind.TORN, self._path, unfinished[0].offset, self._end, _UNFINISHED)

    def _walk(self) -> Iterator[ScannedRecord | Finding]:
        """The same; records of a batch that was never finished are among them."""
        offset = 0
        try:
            offset = yield from self._pass_file_header()
            while offset < self._end:
                header = self._header(offset)
                if header is None:
                    offset = yield from self._find_way(offset)
                    continue
                payload = self._payload(offset, header)
                if payload is None:
                    yield self._judge(offset, header)
                else:
                    self._expected = header.next_sequence
                    yield ScannedRecord(self._path, offset, header, payload)
                offset += header.record_bytes
        except _UnreadableError:
            yield self._damage(offset, self._end, "the disk cannot read this", self._left)
            return
        if self._left:
            what = "messages are missing at the end: the file was cut, or the one after it is gone"
            yield self._damage(self._end, self._end, what, self._left)

    # ------------------------------------------------------------------ reading

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return self._files.read(self._fd, size, offset)
        except OSError as exc:
            if exc.errno == EIO:
                raise _UnreadableError from exc
            raise

    def _at(self, offset: int, size: int, *, again: bool = False) -> int:
        """Where in `_data` the file's byte at `offset` is; `size` bytes follow there, if the file has them."""
        position = offset - self._start
        if again or position < 0 or position + size > len(self._data):
            try:
                self._data = self._read(max(size, _READ_BYTES), offset)
            except _UnreadableError:
                self._data = self._read(size, offset)  # the bad place may lie behind
            self._start, position = offset, 0
        return position

    def _header(self, offset: int) -> RecordHeader | None:
        """The header that has to be at `offset`; None if something else is there."""
        at = self._at(offset, HEADER_BYTES)
        header = decode_header(self._data, at, self._seed)
        if header is None or header.base_sequence != self._expected or header.next_sequence > self._limit:
            return None
        return header

    def _payload(self, offset: int, header: RecordHeader) -> memoryview | None:
        """What follows the header at `offset`, empty if it is not wanted; None if it is not what the header says."""
        if self._wanted is not None and not self._wanted(header):
            following = offset + header.record_bytes
            return _NOTHING if following <= self._end or following <= self._files.size(self._fd) else None
        for again in (False, True):
            at = self._at(offset, header.record_bytes, again=again)
            payload = memoryview(self._data)[at + HEADER_BYTES : at + header.record_bytes]
            if len(payload) == header.length and crc32(payload) == header.payload_crc:
                return payload
        return None

    # ------------------------------------------------------------------ what is wrong

    @property
    def _left(self) -> int | None:
        """Messages from the one expected next to the end of the segment; None if the end is open."""
        return None if self._is_last else self._limit - self._expected

    def _damage(self, offset: int, end: int, what: str, messages: int | None) -> Finding:
        finding = Finding(Kind.DAMAGE, self._path, offset, end, what, self._expected, messages)
        self._expected += messages or 0
        return finding

    def _pass_file_header(self) -> Generator[Finding, None, int]:
        """Check the file's header; returns where to look for records."""
        try:
            identity, _ = find_identity(self._files, self._path.parent)
            found = find_header(partial(self._files.read, self._fd), self._end, self._path, identity)
        except UnusableSegmentError as exc:
            what = f"{exc.reason}; the next start of a broker sets the file aside"
            yield self._damage(0, self._end, what, self._left)
            return self._end
        except NotASegmentError as exc:
            what = f"not a segment: {exc.reason}; {NOT_SERVED}"
            header = decode_file_header(self._read(FILE_HEADER_BYTES, 0))
            if header is None:
                yield self._damage(0, self._end, what, self._left)
                return self._end
            yield Finding(Kind.DAMAGE, self._path, 0, header.size, what)
            self._seed = header.seed  # the file was renamed
            return header.size
        except OSError as exc:
            if exc.errno == EIO:
                raise _UnreadableError from exc
            raise
        if found is None:
            if self._left:
                yield self._damage(0, self._end, "the file is empty", self._left)
            else:
                what = "a file that was never finished being made; it holds no record"
                yield Finding(Kind.TORN, self._path, 0, self._end, what)
            return self._end
        if found.damaged:
            what = "the file's header is damaged; its records are read all the same"
            yield Finding(Kind.DAMAGE, self._path, 0, found.header.size, what)
        self._seed = found.header.seed
        return found.header.size

    def _find_way(self, offset: int) -> Generator[Finding, None, int]:
        """Say what is at `offset` instead of the header that should be there; returns where to go on."""
        if self._files.size(self._fd) <= offset:
            return self._end  # a broker has taken back an append that failed
        at = self._at(offset, HEADER_BYTES, again=True)
        header = decode_header(self._data, at, self._seed)
        if header is not None and header.base_sequence < self._expected:
            following = offset + header.record_bytes
            what = f"a record batch that begins with sequence {header.base_sequence} again"
            yield Finding(Kind.DAMAGE, self._path, offset, following, what)
            return following
        found = self._find_header(offset)
        if found is not None:
            start, header = found
            self._data = b""  # what was seen there has been read anew
            if start == offset and header.base_sequence == self._expected:
                return offset  # a broker has just written it
            what = (
                "the header of a record batch is damaged" if start > offset else "messages are missing here"
            )
            yield self._damage(offset, start, what, header.base_sequence - self._expected)
            return start
        if not self._is_last or self._is_whole_record(offset):
            what = "the header of a record batch is damaged"
            if self._is_last:
                what += "; it is the last one, and the next start of the broker cuts it off"
            yield self._damage(offset, self._end, what, self._left)
        else:
            yield Finding(Kind.TORN, self._path, offset, self._end, _UNFINISHED)
        return self._end

    def _find_header(self, offset: int) -> tuple[int, RecordHeader] | None:
        """The first header from `offset` on whose sequences fit in, and where it is."""
        while offset < self._end:
            data = self._read(_SEARCH_BYTES + HEADER_BYTES, offset)
            for at, header in find_headers(data, 0, self._seed):
                if header.base_sequence >= self._expected and header.next_sequence <= self._limit:
                    return offset + at, header
            offset += _SEARCH_BYTES
        return None

    def _is_whole_record(self, offset: int) -> bool:
        """Whether a record lies between here and the end of the file that lacks nothing but a good header."""
        data = self._read(self._end - offset, offset)
        return (
            len(data) > HEADER_BYTES
            and crc32(memoryview(data)[HEADER_BYTES:]).to_bytes(4, "big") == data[_PAYLOAD_CRC]
        )

    def _judge(self, offset: int, header: RecordHeader) -> Finding:
        """What is wrong with a record whose header is good."""
        following = offset + header.record_bytes
        size = self._files.size(self._fd)
        if following <= size:
            what = "a record batch does not match its checksum"
            return self._damage(offset, following, what, header.count)
        if self._is_last:
            return Finding(Kind.TORN, self._path, offset, size, _UNFINISHED)
        return self._damage(offset, size, "the file ends within a record batch", self._left)
