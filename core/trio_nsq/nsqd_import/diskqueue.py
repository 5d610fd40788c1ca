"""Read nsqd's queues on disk (diskqueue) like nsqd itself after a start, without changing them.

NAME.diskqueue.NNNNNN.dat       messages, `(int32 size, message)*`; NAME is TOPIC or TOPIC:CHANNEL
NAME.diskqueue.NNNNNN.dat.bad   a file that nsqd could not read, and ignores
NAME.diskqueue.meta.dat         three lines: depth / read file, position / write file, position

     0      4               12         14       30           4+size
    +------+---------------+----------+--------+------------+
    | size | timestamp_ns  | attempts |   id   |    body    |
    +------+---------------+----------+--------+------------+

Integers are big-endian; the id is 16 hex digits.
"""

import os
import re
from binascii import Error as NotHex
from binascii import unhexlify
from collections.abc import Iterator
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from ..log.inspection.findings import Finding, Kind
from ..log.inspection.verify import Progress
from ..text.wording import count_of

_NAME = re.compile(r"(?P<queue>.+)\.diskqueue\.(?P<number>[0-9]{6,}|meta)\.dat(?P<bad>\.bad)?", re.DOTALL)
_META = re.compile(rb"(-?\d+)\n(?P<read_file>\d+),(\d+)\n(?P<write_file>\d+),(\d+)\n?")
_HEAD = Struct(">iqH16s")
_SIZE_BYTES = 4
_MIN_MESSAGE_BYTES = _HEAD.size - _SIZE_BYTES
_READ_BYTES = 4 * 1024 * 1024
_EPOCH_TICKS = 1288834974288
"""The epoch of nsqd's ids, in ticks of 2**20 ns."""


class QueueMessage(NamedTuple):
    """A message in a queue, and the position of its body.

    Attributes:
        id: The id as 8 bytes.
        timestamp_ns: The publish time, Unix nanoseconds.
        attempts: How often it was delivered.
        number: The number of the file.
        offset: The offset of the body in the file.
    """

    id: bytes
    timestamp_ns: int
    attempts: int
    body: memoryview
    number: int
    offset: int


@dataclass(slots=True)
class QueueFiles:
    """The files of one queue: data files by number, the meta file or None, and the `.bad` files."""

    data: dict[int, Path] = field(default_factory=dict)
    meta: Path | None = None
    bad: list[Path] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The total size of the data files. Raises OSError."""
        return sum(path.stat().st_size for path in self.data.values())


def list_queues(folder: Path) -> dict[str, QueueFiles]:
    """Return the queues with files in nsqd's data folder, by name. Raises OSError."""
    queues: dict[str, QueueFiles] = {}
    for path in sorted(folder.iterdir()):
        found = _NAME.fullmatch(path.name)
        if found is None:
            continue
        files = queues.setdefault(found["queue"], QueueFiles())
        if found["bad"]:
            files.bad.append(path)
        elif found["number"] == "meta":
            files.meta = path
        else:
            files.data[int(found["number"])] = path
    return queues


class Queue:
    """One queue.

    Attributes:
        messages: How many messages `read` has found so far.
        findings: The damage that `read` has found so far.
    """

    def __init__(self, files: QueueFiles, progress: Progress | None = None) -> None:
        self.messages: int = 0
        self.findings: list[Finding] = []
        self._files = files
        self._progress = progress

    def read(self) -> Iterator[QueueMessage]:
        """Read the messages in nsqd's order.

        If a file cannot be read to its end, reading continues with the next file, as in nsqd. Raises OSError; an
        unreadable disk block is a finding.
        """
        for path in self._files.bad:
            size = path.stat().st_size
            what = "nsqd could not read it and renamed it: not imported"
            self.findings.append(Finding(Kind.NOTE, path, 0, size, what))
        meta_path = self._files.meta
        if meta_path is None:
            if self._files.data:
                first, *others = self._files.data.values()
                what = (
                    f"it has no meta file, so nsqd ignores it (and the {len(others)} after it): not imported"
                )
                self.findings.append(
                    Finding(Kind.DAMAGE, first, 0, self._files.size_bytes, what, messages=None)
                )
            return
        meta = self._read_meta(meta_path)
        if meta is None:
            return
        depth, read_file, start, write_file, write_position = meta
        stale = False
        written = self._files.data.get(write_file)
        if written is not None and write_position < (size := written.stat().st_size):
            # nsqd then starts a new file, and reads this one to its end.
            what = (
                f"older than its files (nsqd was killed): {written.name} is read up to byte {size}, not "
                f"{write_position}; this may include finished messages"
            )
            self.findings.append(Finding(Kind.NOTE, meta_path, 0, 0, what))
            stale, write_file, write_position = True, write_file + 1, 0
        damage = len(self.findings)
        found = 0
        for number, path in self._files.data.items():
            if read_file <= number <= write_file:
                found += number < write_file or write_position > 0
                begin = start if number == read_file else 0
                end = path.stat().st_size if number < write_file else write_position
                yield from self._read_file(path, number, begin, end)
        missing = write_file - read_file + (write_position > 0) - found
        self._judge(meta_path, depth, missing, complete=not stale and len(self.findings) == damage)

    def _read_meta(self, path: Path) -> tuple[int, ...] | None:
        content = path.read_bytes()
        found = _META.fullmatch(content)
        if found is not None and int(found["read_file"]) <= int(found["write_file"]):
            return tuple(map(int, found.groups()))
        what = f"damaged; the queue's files, {self._files.size_bytes} bytes, are not imported"
        self.findings.append(Finding(Kind.DAMAGE, path, 0, len(content), what, messages=None))
        return None

    def _judge(self, meta: Path, depth: int, missing: int, *, complete: bool) -> None:
        """Compare the read messages with the meta file.

        Args:
            depth: The number of messages in the meta file.
            missing: The number of missing files.
            complete: Whether all files were readable, and the meta file is not older than they are.
        """
        fewer = depth - self.messages
        # nsqd's depth includes the messages in `.bad` files.
        kind = Kind.DAMAGE if fewer > 0 and not self._files.bad else Kind.NOTE
        messages = max(0, fewer) if kind is Kind.DAMAGE else 0
        if missing:
            what = f"{missing} of the files between its read file and its write file are missing"
            self.findings.append(Finding(kind, meta, 0, 0, what, messages=messages))
        elif complete and fewer:
            what = f"counts {count_of(depth, 'message')}, there are {self.messages}"
            self.findings.append(Finding(kind, meta, 0, 0, what, messages=messages))

    def _read_file(self, path: Path, number: int, offset: int, end: int) -> Iterator[QueueMessage]:
        """Read the messages of a file that start at `offset` or later, and before `end`."""
        with path.open("rb", buffering=0) as file:
            reader = _Reader(file.fileno(), number, self._progress)
            while offset < end:
                try:
                    message, following, has_id = reader.message(offset)
                except _NotAMessage as exc:
                    what = f"{exc}; the rest of this file is not imported (nsqd would not read it either)"
                    last = max(offset, reader.size)
                    self.findings.append(Finding(Kind.DAMAGE, path, offset, last, what, messages=None))
                    return
                if not has_id:
                    what = "the id of a message is damaged; it gets a new one"
                    self.findings.append(Finding(Kind.NOTE, path, offset, following, what))
                self.messages += 1
                yield message
                offset = following


class _NotAMessage(Exception):
    """There is no valid message at an offset; the text describes the data there."""


class _Reader:
    """Reads one data file.

    Attributes:
        size: The size of the file.
    """

    def __init__(self, fd: int, number: int, progress: Progress | None) -> None:
        self.size = os.fstat(fd).st_size
        self._fd = fd
        self._number = number
        self._progress = progress
        self._data = b""
        self._start = 0  # the offset of `_data` in the file

    def _at(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes at an offset, fewer at the end of the file. Raises OSError, _NotAMessage."""
        position = offset - self._start
        if position < 0 or position + size > len(self._data):
            try:
                self._data = self._read(max(size, _READ_BYTES), offset)
            except _NotAMessage:
                self._data = self._read(size, offset)  # the unreadable block may be after these bytes
            self._start, position = offset, 0
        return memoryview(self._data)[position : position + size]

    def _read(self, size: int, offset: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
        except OSError as exc:
            if exc.errno == EIO:
                raise _NotAMessage("the disk cannot read this block") from exc
            raise
        if self._progress is not None:
            self._progress(len(data))
        return data

    def message(self, offset: int) -> tuple[QueueMessage, int, bool]:
        """Return the message at `offset`, its end, and whether its id is valid. Raises OSError, _NotAMessage."""
        head = self._at(offset, _HEAD.size)
        if len(head) < _HEAD.size:
            raise _NotAMessage("an unfinished message" if offset < self.size else "the file ends too early")
        size, timestamp_ns, attempts, digits = _HEAD.unpack(head)
        end = offset + _SIZE_BYTES + size
        if size < _MIN_MESSAGE_BYTES:
            raise _NotAMessage(f"not a message ({size} bytes long)")
        if end > self.size:
            raise _NotAMessage(f"an unfinished message, or none ({size} bytes long)")
        timestamp_ns = max(0, timestamp_ns)
        message_id = _id_of(digits)
        # nsqd does not check ids. But if no valid message follows either, this is not a message.
        if message_id is None and end < self.size and not self._is_message(end):
            raise _NotAMessage("not a message (it has no id)")
        body_offset = offset + _HEAD.size
        body = self._at(body_offset, end - body_offset)
        known_id = message_id or _made_up_id(timestamp_ns)
        message = QueueMessage(known_id, timestamp_ns, attempts, body, self._number, body_offset)
        return message, end, message_id is not None

    def _is_message(self, offset: int) -> bool:
        head = self._at(offset, _HEAD.size)
        if len(head) < _HEAD.size:
            return False
        size, _, _, digits = _HEAD.unpack(head)
        fits = size >= _MIN_MESSAGE_BYTES and offset + _SIZE_BYTES + size <= self.size
        return fits and _id_of(digits) is not None


def _id_of(digits: bytes) -> bytes | None:
    try:
        return unhexlify(digits)
    except NotHex:
        return None


def _made_up_id(timestamp_ns: int) -> bytes:
    """Return an id like nsqd generates at this time."""
    ticks = max(0, (timestamp_ns >> 20) - _EPOCH_TICKS)
    return (ticks << 22 & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big")
