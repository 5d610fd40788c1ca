"""Tests for errors of the operating system: failed appends cannot be read, and the log works afterwards."""

import errno
import os
import resource
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from log.support import (
    FILE_HEADER_BYTES,
    FIRST,
    FailingFiles,
    SimulatedDisk,
    append_each,
    batch,
    check_usable,
    contents,
    copied,
    numbered,
    open_descriptors,
    segment_files,
)
from trio_nsq.log import DiskLog, Files, LogReadError, LogWriteError, RecordBatch
from trio_nsq.protocol import NSQError

BEFORE = [batch(0, b"a"), batch(1, b"b", b"c")]
FAILED = [batch(3, b"lost"), batch(4, b"lost", b"too")]
FAILED_BYTES = sum(one.record_bytes for one in FAILED)


def check_unchanged(log: DiskLog, expected: Sequence[RecordBatch]) -> None:
    """Check that the failed append left no trace."""
    assert contents(log) == list(expected)
    assert log.next_sequence == (expected[-1].next_sequence if expected else 0)
    assert log.read(log.next_sequence) == []
    assert [header.base_sequence for header in log.headers(0)] == [one.base_sequence for one in expected]


@pytest.mark.parametrize("sync", [True, False])
def test_write_fails_after_any_number_of_bytes(tmp_path: Path, sync: bool) -> None:
    for room in range(FAILED_BYTES):
        folder = tmp_path / str(room)
        files = FailingFiles()
        log = DiskLog(folder, files=files)
        append_each(log, BEFORE)
        size = log.size_bytes
        files.failing["write"] = errno.ENOSPC
        files.room = room
        with pytest.raises(LogWriteError) as caught:
            log.append(FAILED, sync=sync)
        assert str(caught.value) == f"cannot write {folder / FIRST}: No space left on device"
        assert caught.value.path == folder / FIRST
        check_unchanged(log, BEFORE)
        assert log.size_bytes == size == (folder / FIRST).stat().st_size
        copied(folder, tmp_path / "killed")  # now
        files.heal()
        following = batch(3, b"x") if room % 2 else batch(3, *[b"y" * 100] * 5)
        log.append([following], sync=sync)
        check_unchanged(log, [*BEFORE, following])
        log.close()
        check_usable(folder, [*BEFORE, following])
        check_usable(tmp_path / "killed", BEFORE)


@pytest.mark.parametrize("room", [0, 1, 60, FAILED_BYTES // 2, FAILED_BYTES - 1])
@pytest.mark.parametrize("bodies", [(b"x",), (b"lost",), (b"y" * 500,)])
def test_failed_write_that_cannot_be_truncated(
    tmp_path: Path, room: int, bodies: Sequence[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    files = FailingFiles()
    log = DiskLog(tmp_path, files=files)
    append_each(log, BEFORE)
    files.failing = {"write": errno.EIO, "truncate": errno.EROFS}
    files.room = room
    with pytest.raises(LogWriteError, match="Input/output error"):
        log.append(FAILED, sync=True)
    assert "Read-only file system, nor cut it back to" in caplog.text
    check_unchanged(log, BEFORE)
    # The leftover bytes must be removed before the next append.
    files.failing = {"truncate": errno.EROFS}
    files.room = None
    with pytest.raises(LogWriteError, match="Read-only file system"):
        log.append([batch(3, *bodies)], sync=True)
    check_unchanged(log, BEFORE)
    files.heal()
    log.append([batch(3, *bodies)], sync=True)
    check_unchanged(log, [*BEFORE, batch(3, *bodies)])
    copied(tmp_path, tmp_path / "killed")
    log.close()
    check_usable(tmp_path / "killed", [*BEFORE, batch(3, *bodies)])


@pytest.mark.parametrize("shorter", [True, False])
def test_failed_sync_that_cannot_be_truncated(tmp_path: Path, shorter: bool) -> None:
    """The worst case: complete, unacknowledged records in the file. They must not reappear before later ones."""
    files = FailingFiles()
    log = DiskLog(tmp_path / "log", files=files)
    append_each(log, BEFORE)
    files.failing = {"sync": errno.EIO, "truncate": errno.EIO}
    with pytest.raises(LogWriteError):
        log.append(FAILED, sync=True)
    check_unchanged(log, BEFORE)
    files.heal()
    following = batch(3, b"same") if shorter else batch(3, b"same", b"other")
    log.append([following], sync=True)
    check_unchanged(log, [*BEFORE, following])
    check_usable(copied(tmp_path / "log", tmp_path / "killed"), [*BEFORE, following])
    log.close()


def test_close_retries_the_truncation(tmp_path: Path) -> None:
    files = FailingFiles()
    log = DiskLog(tmp_path, files=files)
    append_each(log, BEFORE)
    files.failing = {"sync": errno.EIO, "truncate": errno.EIO}
    with pytest.raises(LogWriteError):
        log.append(FAILED, sync=True)
    files.heal()
    log.close()
    check_usable(tmp_path, BEFORE)


def test_new_segment_waits_for_the_truncation_of_the_old_one(tmp_path: Path) -> None:
    files = FailingFiles()
    log = DiskLog(tmp_path / "log", segment_bytes=320, files=files)
    append_each(log, BEFORE)
    files.failing = {"sync": errno.EIO, "truncate": errno.EIO}
    with pytest.raises(LogWriteError):
        log.append(FAILED, sync=True)
    files.failing = {"truncate": errno.EIO}
    large = batch(3, b"x" * 300)
    with pytest.raises(LogWriteError):
        log.append([large], sync=True)
    assert len(segment_files(tmp_path / "log")) == 1
    files.heal()
    log.append([large], sync=True)
    assert len(segment_files(tmp_path / "log")) == 2
    check_unchanged(log, [*BEFORE, large])
    check_usable(copied(tmp_path / "log", tmp_path / "killed"), [*BEFORE, large])
    log.close()


def test_interrupt_is_handled_like_an_error(tmp_path: Path) -> None:
    class Interrupted(FailingFiles):
        interrupt = False

        def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
            super().write(fd, offset, parts)
            if self.interrupt:
                raise KeyboardInterrupt

    files = Interrupted()
    log = DiskLog(tmp_path, files=files)
    append_each(log, BEFORE)
    files.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        log.append(FAILED, sync=False)
    check_unchanged(log, BEFORE)
    files.interrupt = False
    log.append([batch(3, b"x")], sync=False)
    log.close()
    check_usable(tmp_path, [*BEFORE, batch(3, b"x")])


# ---------------------------------------------------------------------- with real system calls


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may accept fewer bytes, at any point and also between the pieces."""
    whole_pwritev, whole_pwrite = os.pwritev, os.pwrite
    most = 1

    def pwritev(fd: int, parts: Sequence[bytes], offset: int) -> int:
        return whole_pwritev(fd, [b"".join(parts)[:most]], offset)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        return whole_pwrite(fd, data[:most], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "pwrite", pwrite)
    for most in (1, 7, 55, 56, 57, 100):
        folder = tmp_path / str(most)
        log = DiskLog(folder)
        append_each(log, BEFORE)
        log.append(FAILED, sync=True)
        log.close()
        check_usable(folder, [*BEFORE, *FAILED])


def test_more_pieces_than_a_system_call_accepts(tmp_path: Path) -> None:
    batches = [batch(n, b"%d" % n) for n in range(os.sysconf("SC_IOV_MAX") + 5)]
    log = DiskLog(tmp_path)
    log.append(batches, sync=True)
    assert contents(log, 10**6) == batches
    log.close()


class FileSizeLimit:
    """A limit on file sizes, with which the kernel first shortens and then refuses writes."""

    def __enter__(self) -> "FileSizeLimit":
        self._old = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return self

    def to(self, size: int) -> None:
        """Set the limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._old[1]))

    def lift(self) -> None:
        """Remove the limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._old)

    def __exit__(self, *args: object) -> None:
        self.lift()
        signal.signal(signal.SIGXFSZ, self._old_handler)


def test_kernel_refuses_in_the_middle_of_a_write(tmp_path: Path) -> None:
    with FileSizeLimit() as limit:
        log = DiskLog(tmp_path)
        append_each(log, BEFORE)
        size = log.size_bytes
        for room in (0, 1, 30, 56, 60, FAILED_BYTES - 1):
            limit.to(size + room)
            with pytest.raises(LogWriteError, match="File too large"):
                log.append(FAILED, sync=True)
            assert (tmp_path / FIRST).stat().st_size == size
            check_unchanged(log, BEFORE)
        limit.lift()
        log.append(FAILED, sync=True)
        check_unchanged(log, [*BEFORE, *FAILED])
        log.close()
    check_usable(tmp_path, [*BEFORE, *FAILED])


# ---------------------------------------------------------------------- new segments


@pytest.mark.parametrize(
    ("failing", "room"),
    [
        ("make_folder", None),
        ("create", None),
        ("write", 0),
        ("write", 10),
        ("write", FILE_HEADER_BYTES - 1),
        ("sync_new", None),
        ("sync_folder", None),
    ],
)
@pytest.mark.parametrize("unlink", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_segment_that_cannot_be_created(
    tmp_path: Path, failing: str, room: int | None, unlink: bool, first: bool
) -> None:
    files = FailingFiles()
    folder = tmp_path / "log"
    log = DiskLog(folder, segment_bytes=1, files=files)
    before = [] if first else BEFORE
    append_each(log, before)
    log.sync()
    descriptors = open_descriptors()
    files.failing = {failing: errno.EIO}
    if not unlink:
        files.failing["unlink"] = errno.EIO
    files.room = room
    following = batch(log.next_sequence, b"next")
    for _ in range(2):
        with pytest.raises(LogWriteError):
            log.append([following], sync=True)
        check_unchanged(log, before)
        assert open_descriptors() == descriptors
    copied(folder, tmp_path / "killed") if folder.exists() else (tmp_path / "killed").mkdir()
    files.heal()
    log.append([following], sync=True)  # also if a file was left there
    check_unchanged(log, [*before, following])
    log.close()
    check_usable(folder, [*before, following])
    check_usable(tmp_path / "killed", before)


def test_segment_with_records_is_never_overwritten(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=1)
    append_each(log, BEFORE)
    stray = tmp_path / f"{3:020d}.log"
    stray.write_bytes(b"x" * (FILE_HEADER_BYTES + 1))
    with pytest.raises(LogWriteError, match="File exists"):
        log.append(FAILED, sync=True)
    assert stray.read_bytes() == b"x" * (FILE_HEADER_BYTES + 1)
    stray.unlink()
    log.append(FAILED, sync=True)
    assert contents(log) == [*BEFORE, *FAILED]
    log.close()


def test_old_segment_is_synced_before_the_new_one_begins(tmp_path: Path) -> None:
    files = FailingFiles()
    log = DiskLog(tmp_path, segment_bytes=1, files=files)
    log.append(BEFORE[:1], sync=False)
    files.failing["sync"] = errno.EIO
    with pytest.raises(LogWriteError):
        log.append(BEFORE[1:], sync=False)
    assert len(segment_files(tmp_path)) == 1
    files.heal()
    log.append(BEFORE[1:], sync=False)
    assert contents(log) == BEFORE
    log.close()


# ---------------------------------------------------------------------- syncs that fail


def after_a_power_cut(disk: SimulatedDisk, to: Path) -> list[RecordBatch]:
    """Return the content after the worst power cut: all unsynced data is lost."""
    to.mkdir()
    for name, content in next(disk.power_cuts()).items():
        (to / name).write_bytes(content)
    log = DiskLog(to)
    found = contents(log)
    log.close()
    return found


def test_simulation_loses_unsynced_data(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    log = DiskLog(tmp_path / "log", files=disk)
    log.append(BEFORE, sync=True)
    log.append(FAILED, sync=False)
    assert after_a_power_cut(disk, tmp_path / "1") == BEFORE
    disk.sync_fails = True
    with pytest.raises(LogWriteError):
        log.sync()
    disk.sync_fails = False
    fd = disk.open(tmp_path / "log" / FIRST)
    disk.sync(fd)  # the kernel has nothing more to write
    disk.close(fd)
    assert after_a_power_cut(disk, tmp_path / "2") == BEFORE
    log.close()


def test_append_with_a_failed_sync_is_not_in_the_log(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    log = DiskLog(tmp_path / "log", files=disk)
    log.append(BEFORE, sync=True)
    disk.sync_fails = True
    with pytest.raises(LogWriteError, match="Input/output error"):
        log.append(FAILED, sync=True)
    check_unchanged(log, BEFORE)
    disk.sync_fails = False
    log.append([batch(3, b"x")], sync=True)
    check_unchanged(log, [*BEFORE, batch(3, b"x")])
    assert after_a_power_cut(disk, tmp_path / "cut") == [*BEFORE, batch(3, b"x")]
    log.close()


@pytest.mark.parametrize("by", ["sync", "append", "new segment"])
def test_next_sync_covers_the_data_of_a_failed_sync(tmp_path: Path, by: str) -> None:
    """After a failed sync the kernel treats the pages as clean, so a second sync alone would succeed without
    writing them.
    """
    disk = SimulatedDisk()
    log = DiskLog(tmp_path / "log", files=disk)
    log.append(BEFORE[:1], sync=True)
    log.append(BEFORE[1:], sync=False)
    disk.sync_fails = True
    for _ in range(2):
        with pytest.raises(LogWriteError, match="Input/output error"):
            log.sync()
        assert contents(log) == BEFORE  # they were appended, and remain
    log.append(FAILED[:1], sync=False)
    disk.sync_fails = False
    expected = [*BEFORE, FAILED[0]]
    if by == "sync":
        log.sync()
    elif by == "append":
        log.append(FAILED[1:], sync=True)
        expected.append(FAILED[1])
    else:
        log.rotate()
        log.append(FAILED[1:], sync=False)
    assert after_a_power_cut(disk, tmp_path / "cut") == expected
    log.close()


def test_failed_sync_of_an_append_keeps_other_appends(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    log = DiskLog(tmp_path / "log", files=disk)
    log.append(BEFORE, sync=False)
    disk.sync_fails = True
    with pytest.raises(LogWriteError):
        log.append(FAILED, sync=True)
    disk.sync_fails = False
    log.append([batch(3, b"x")], sync=True)
    assert after_a_power_cut(disk, tmp_path / "cut") == [*BEFORE, batch(3, b"x")]
    log.close()


def test_unsynced_data_of_a_killed_process_is_synced_before_it_is_visible(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    log = DiskLog(tmp_path / "log", files=disk)
    log.append(BEFORE, sync=True)
    log.append(FAILED, sync=False)
    log.close()
    log = DiskLog(tmp_path / "log", files=disk)
    assert contents(log) == [*BEFORE, *FAILED]
    assert after_a_power_cut(disk, tmp_path / "cut") == [*BEFORE, *FAILED]
    log.close()


# ---------------------------------------------------------------------- opening and reading


@pytest.mark.parametrize("failing", ["open", "read", "sync", "truncate", "names", "unlink"])
def test_failed_open_names_the_error_and_leaves_nothing_open(tmp_path: Path, failing: str) -> None:
    log = DiskLog(tmp_path, segment_bytes=1)
    append_each(log, numbered(0, 4))
    log.close()
    with segment_files(tmp_path)[-1].open("ab") as file:
        file.write(b"a tail to cut")
    if failing == "unlink":
        (tmp_path / f"{99:020d}.log").write_bytes(b"")
    files = FailingFiles()
    files.failing[failing] = errno.EIO
    descriptors = open_descriptors()
    with pytest.raises((LogReadError, LogWriteError), match=r"cannot (read|write) .*: Input/output error"):
        DiskLog(tmp_path, files=files)
    assert open_descriptors() == descriptors
    check_usable(tmp_path, numbered(0, 4))


def test_failed_read_loses_nothing(tmp_path: Path) -> None:
    files = FailingFiles()
    log = DiskLog(tmp_path, files=files)
    batches = numbered(0, 10)
    append_each(log, batches)
    assert log.read(0, 0) == batches[:1]
    files.failing["read"] = errno.EIO
    with pytest.raises(LogReadError, match=f"cannot read {tmp_path / FIRST}: Input/output error"):
        log.read(1)
    with pytest.raises(LogReadError):
        next(log.headers(0))
    log.append([batch(log.next_sequence, b"x")], sync=True)
    files.heal()
    assert log.read(1) == [*batches[1:], batch(log.next_sequence - 1, b"x")]
    log.close()


def test_read_after_close_does_not_read_another_file(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "log", segment_bytes=1)
    append_each(log, BEFORE)
    log.close()
    log = DiskLog(tmp_path / "log")
    first, *_ = log.files
    log.close()
    with (tmp_path / "log" / FIRST).open("rb"):  # gets the number of the closed descriptor
        with pytest.raises(LogReadError, match="Bad file descriptor"):
            first.last_ns()
    log.close()  # and again


def test_errors_are_those_of_the_library() -> None:
    for error in (LogReadError, LogWriteError):
        assert issubclass(error, NSQError)
        assert str(error(Path("x"), OSError("no number"))).endswith(": no number")


# ---------------------------------------------------------------------- Files


def test_replacing_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for content in (b"one", b"", b"x" * 100_000):
        Files().replace(path, content)
        assert path.read_bytes() == content
        assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_failed_replacement_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    Files().replace(path, b"old")
    with FileSizeLimit() as limit:
        limit.to(1000)
        with pytest.raises(OSError, match="File too large"):
            Files().replace(path, b"x" * 2000)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"], "it takes up room on a full disk"
    Files().replace(path, b"new")
    assert path.read_bytes() == b"new"


def test_creating_an_existing_folder(tmp_path: Path) -> None:
    Files().make_folder(tmp_path / "a")
    Files().make_folder(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileNotFoundError):
        Files().make_folder(tmp_path / "b" / "c")


def test_threads_create_the_same_folder(tmp_path: Path) -> None:
    """A topic's first message and its first channel are stored concurrently."""
    at_the_sync, go_on = threading.Event(), threading.Event()

    class Slow(Files):
        def sync_folder(self, path: Path) -> None:
            at_the_sync.set()
            go_on.wait(10)
            super().sync_folder(path)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(Slow().make_folder, tmp_path / "a")
        at_the_sync.wait()
        second = pool.submit(Files().make_folder, tmp_path / "a")
        with pytest.raises(TimeoutError):  # the name is not durable yet
            second.result(timeout=0.05)
        go_on.set()
        first.result()
        second.result()


def test_folder_whose_name_was_not_synced_is_created_again(tmp_path: Path) -> None:
    """Otherwise the next attempt would find it, and store messages under a name that a power cut removes."""
    files = FailingFiles()
    files.failing["sync_folder"] = errno.EIO
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            files.make_folder(tmp_path / "a")
        assert not (tmp_path / "a").exists()
    files.heal()
    files.make_folder(tmp_path / "a")
    assert (tmp_path / "a").is_dir()
