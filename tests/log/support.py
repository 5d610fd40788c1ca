"""Helpers for tests of logs: batches of messages, every kind of log, the content of a log and its files, and
file layers that count, fail on request, or simulate power cuts.
"""

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from errno import EIO
from pathlib import Path

from trio_nsq.log import DiskLog, Files, Log, LogWriteError, MemoryLog, RecordBatch
from trio_nsq.log.records import HEADER_BYTES
from trio_nsq.log.write_ahead.file import WriteAheadFile
from trio_nsq.protocol import pack_messages

FILE_HEADER_BYTES = 52
FIRST = f"{0:020d}.log"


LOG_KINDS: dict[str, Callable[[Path], Log]] = {
    "disk": lambda folder: DiskLog(folder / "log"),
    "disk, small segments": lambda folder: DiskLog(folder / "log", segment_bytes=400, files=HastyFiles()),
    "disk, a segment for each append": lambda folder: DiskLog(
        folder / "log", segment_bytes=1, files=HastyFiles()
    ),
    "memory": lambda folder: MemoryLog(),
}
"""Makes each kind of log in a folder, by its name in test ids."""


def batch(sequence: int, *bodies: bytes, due_ns: int = 0) -> RecordBatch:
    """Return a batch of these messages. Its other numbers depend on its sequence, so that mixed-up batches
    are detected.
    """
    return RecordBatch(
        sequence, 10**15 + 3 * sequence, 1_700_000_000_000_000_000 + sequence, due_ns, pack_messages(bodies)
    )


def link(batches: Sequence[RecordBatch]) -> list[RecordBatch]:
    """Return the batches as linked records of one batch of messages."""
    last = len(batches) - 1
    return [replace(one, has_previous=at > 0, has_next=at < last) for at, one in enumerate(batches)]


def numbered(start: int, count: int, *, size: int = 10) -> list[RecordBatch]:
    """Return `count` batches of one to three messages from sequence `start` on, each body `size` bytes long."""
    batches = []
    for n in range(count):
        bodies = [b"%0*d" % (size, start + i) for i in range(n % 3 + 1)]
        batches.append(batch(start, *bodies))
        start += len(bodies)
    return batches


def append_each(log: Log, batches: Sequence[RecordBatch], *, sync: bool = False) -> None:
    """Append the batches one by one."""
    for one in batches:
        log.append([one], sync=sync)


def contents(log: Log, max_bytes: int = 1000) -> list[RecordBatch]:
    """Return all readable batches from the beginning, as a reader gets them."""
    found: list[RecordBatch] = []
    sequence = log.first_sequence
    while batches := log.read(sequence, max_bytes):
        found += batches
        assert batches[-1].next_sequence > sequence
        sequence = batches[-1].next_sequence
    return found


def segment_files(folder: Path) -> list[Path]:
    """Return the segments of a log, oldest first."""
    return sorted(folder.glob("*.log"))


def record_offsets(batches: Sequence[RecordBatch], start: int = FILE_HEADER_BYTES) -> list[int]:
    """Return the start of each record of a segment, and the end of the last."""
    offsets = [start]
    for one in batches:
        offsets.append(offsets[-1] + HEADER_BYTES + len(one.messages.data))
    return offsets


def copied(folder: Path, to: Path) -> Path:
    """Copy a log's folder; an older copy is replaced."""
    if to.exists():
        shutil.rmtree(to)
    shutil.copytree(folder, to)
    return to


def open_descriptors_before() -> int:
    """Return the number of open files before a test, after closing files that wait for the garbage collector."""
    gc.collect()
    return open_descriptors()


def open_descriptors() -> int:
    """Return the number of open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def check_usable(
    folder: Path, expected: Sequence[RecordBatch], *, bodies: Sequence[bytes] = (b"next",)
) -> None:
    """Check that the log in `folder` has exactly `expected`, accepts an append, and is the same when
    reopened.
    """
    log = DiskLog(folder, files=HastyFiles())
    try:
        assert contents(log) == list(expected)
        following = batch(log.next_sequence, *bodies)
        log.append([following], sync=True)
        assert contents(log) == [*expected, following]
    finally:
        log.close()
    log = DiskLog(folder, files=HastyFiles())
    try:
        assert contents(log) == [*expected, following]
        assert log.next_sequence == following.next_sequence
    finally:
        log.close()


class HastyFiles(Files):
    """Syncs nothing: for tests without power cuts."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class CountingFiles(Files):
    """Counts operations."""

    def __init__(self) -> None:
        self.writes = self.reads = self.syncs = self.read_bytes = 0

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        self.writes += 1
        super().write(fd, offset, parts)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read(fd, size, offset)
        self.reads += 1
        self.read_bytes += len(data)
        return data

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)

    def reset(self) -> None:
        """Reset the counts."""
        self.writes = self.reads = self.syncs = self.read_bytes = 0


class FailingFiles(HastyFiles):
    """Works like `HastyFiles`, and fails on request.

    Attributes:
        failing: Error numbers by the name of the method that raises them. `sync_new` is the sync of a file
            with only a header.
        room: Bytes that can still be written; then `write` raises its error.
    """

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.room: int | None = None

    def _maybe_fail(self, name: str) -> None:
        if name in self.failing:
            raise OSError(self.failing[name], os.strerror(self.failing[name]))

    def create(self, path: Path) -> int:
        self._maybe_fail("create")
        return super().create(path)

    def open(self, path: Path) -> int:
        self._maybe_fail("open")
        return super().open(path)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        if self.room is not None and len(data) > self.room:
            super().write(fd, offset, [data[: self.room]])
            self._maybe_fail("write")
        super().write(fd, offset, parts)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self._maybe_fail("read")
        return super().read(fd, size, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._maybe_fail("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._maybe_fail("sync")
        if self.size(fd) <= FILE_HEADER_BYTES:
            self._maybe_fail("sync_new")
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._maybe_fail("sync_folder")
        super().sync_folder(path)

    def names(self, path: Path) -> list[str]:
        self._maybe_fail("names")
        return super().names(path)

    def make_folder(self, path: Path) -> None:
        self._maybe_fail("make_folder")
        super().make_folder(path)

    def unlink(self, path: Path) -> None:
        self._maybe_fail("unlink")
        super().unlink(path)

    def heal(self) -> None:
        """Remove all failures."""
        self.failing.clear()
        self.room = None


Change = tuple[int, bytes | None]
"""Bytes written at an offset; with None, the file is truncated there."""
Keep = Callable[[list[Change]], list[Change]]


@dataclass
class DiskFile:
    """A file of the simulated disk: its stable content, and the unsynced changes in order."""

    stable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)
    named: bool = False  # the name is durable


def apply_change(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


class SimulatedDisk(HastyFiles):
    """Real files, and a record of what a power cut would leave of each.

    The disk may have written any unsynced changes, in any order; synced changes are stable. After a failed
    sync, the kernel treats the pages as written (as Linux does), but the disk does not have them.

    Attributes:
        sync_fails: The next syncs of files raise EIO.
    """

    def __init__(self) -> None:
        self.sync_fails = False
        self._files: dict[Path, DiskFile] = {}
        self._paths: dict[int, Path] = {}
        self._gone: dict[Path, DiskFile] = {}  # deleted, but the deletion may not be durable

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._files[path] = DiskFile()
        self._paths[fd] = path
        return fd

    def create_or_empty(self, path: Path) -> int:
        there = path.exists()
        fd = super().create_or_empty(path)
        self._paths[fd] = path
        if there:
            self._files[path].pending.append((0, None))
        else:
            self._files[path] = DiskFile()
        return fd

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self._paths[fd] = path
        if path not in self._files:
            self._files[path] = DiskFile(bytearray(path.read_bytes()), named=True)
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)  # opened for reading only
        super().close(fd)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        super().write(fd, offset, parts)
        self._files[self._paths[fd]].pending.append((offset, b"".join(parts)))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._files[self._paths[fd]].pending.append((size, None))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        file = self._files[self._paths[fd]]
        pending, file.pending = file.pending, []
        if self.sync_fails:
            raise OSError(EIO, os.strerror(EIO))
        for offset, data in pending:
            apply_change(file.stable, offset, data)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        for name, file in self._files.items():
            file.named = file.named or name.parent == path
        self._gone = {name: file for name, file in self._gone.items() if name.parent != path}

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        file = self._files.pop(path)
        if file.named:
            self._gone[path] = file

    def power_cuts(self) -> Iterator[dict[str, bytes]]:
        """Return files by name as a power cut now may leave them: a selection of the possibilities."""
        yield self._left(unnamed=False, deleted=True, keep=lambda pending: [])
        yield self._left(unnamed=True, deleted=False, keep=lambda pending: [])
        yield self._left(unnamed=True, deleted=True, keep=lambda pending: pending)
        yield self._left(unnamed=True, deleted=False, keep=zeros)
        for part in (0.0, 0.05, 0.5, 0.95):
            yield self._left(unnamed=True, deleted=False, keep=torn(part))
            yield self._left(unnamed=True, deleted=False, keep=only_the_end(part))

    def _left(self, *, unnamed: bool, deleted: bool, keep: Keep) -> dict[str, bytes]:
        left = {}
        files = self._gone | self._files if deleted else self._files
        for path, file in files.items():
            if file.named or unnamed:
                content = bytearray(file.stable)
                for offset, data in keep(file.pending):
                    apply_change(content, offset, data)
                left[path.name] = bytes(content)
        return left


def zeros(pending: list[Change]) -> list[Change]:
    """The size is stable, the data is not."""
    return [(offset, data and bytes(len(data))) for offset, data in pending]


def torn(part: float) -> Keep:
    """Only the beginning of the last change is stable."""

    def keep(pending: list[Change]) -> list[Change]:
        return [*pending[:-1], *[(at, data and data[: int(len(data) * part)]) for at, data in pending[-1:]]]

    return keep


def only_the_end(part: float) -> Keep:
    """Only the end of the last change is stable."""

    def keep(pending: list[Change]) -> list[Change]:
        return [
            (at, data) if data is None else (at + int(len(data) * part), data[int(len(data) * part) :])
            for at, data in pending[-1:]
        ]

    return keep


def carry_forward(
    log: Log, sequences: Sequence[int], max_bytes: int, keeps_metadata: Callable[[bytes], bool] = bool
) -> bool:
    """Replace a log's carried-forward segment, as a broker does in a thread. Returns False if they are too large."""
    use = log.carry_forward(sequences, max_bytes, keeps_metadata)()
    if use is not None:
        use()
    return use is not None


def sync_now(log: Log | WriteAheadFile) -> None:
    """Sync a log or a write-ahead file as a broker does. Raises LogWriteError."""
    point = log.sync_point()
    error: Exception | None = None
    try:
        point.sync()
    except LogWriteError as exc:
        error = exc
    if (error := log.end_sync(point, error)) is not None:
        raise error
