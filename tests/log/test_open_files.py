"""Tests for the limit of open files, however many segments there are."""

import gc
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from log.support import (
    HastyFiles,
    append_each,
    batch,
    contents,
    open_descriptors,
    open_descriptors_before,
    segment_files,
)
from trio_nsq.log import DiskLog, Files, LogReadError, OpenFiles, reasonable_limit

SEGMENTS = 400


def many_segments(folder: Path, files: Files, most: int = 16, segments: int = SEGMENTS) -> DiskLog:
    """A log with one record in each segment."""
    log = DiskLog(folder, segment_bytes=1, open_files=OpenFiles(files, most))
    append_each(log, [batch(n, b"%d" % n) for n in range(segments)])
    assert len(segment_files(folder)) == segments
    return log


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """As `ulimit -n 128`, and as many more as this process has open: earlier tests may have left some."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (128 + in_use, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_segments_under_a_low_limit(tmp_path: Path, few_descriptors: None) -> None:
    before = open_descriptors_before()
    log = DiskLog(tmp_path, segment_bytes=1, files=HastyFiles())
    append_each(log, [batch(n, b"%d" % n) for n in range(SEGMENTS)])
    assert contents(log) == [batch(n, b"%d" % n) for n in range(SEGMENTS)]
    assert open_descriptors() - before <= reasonable_limit() < 100
    log.close()
    assert open_descriptors() == before
    log = DiskLog(tmp_path, segment_bytes=1, files=HastyFiles())
    for n in (0, SEGMENTS - 1, 7, SEGMENTS // 2):
        assert log.read(n, 0) == [batch(n, b"%d" % n)]
    log.append([batch(SEGMENTS, b"next")], sync=True)
    log.discard_before(SEGMENTS - 3)
    assert contents(log) == [batch(n, b"%d" % n) for n in range(SEGMENTS - 3, SEGMENTS)] + [
        batch(SEGMENTS, b"next")
    ]
    assert open_descriptors() - before <= 4 + 1
    log.close()
    assert open_descriptors() == before


def test_logs_share_the_limit(tmp_path: Path) -> None:
    before = open_descriptors_before()
    open_files = OpenFiles(HastyFiles(), 20)
    logs = [DiskLog(tmp_path / str(n), open_files=open_files) for n in range(100)]
    for turn in range(3):
        for number, log in enumerate(logs):
            log.append([batch(turn, b"%d %d" % (number, turn))], sync=True)
    for number, log in enumerate(logs):
        assert contents(log) == [batch(turn, b"%d %d" % (number, turn)) for turn in range(3)]
    assert open_descriptors() - before == 20
    for log in logs:
        log.close()
    assert open_descriptors() == before


def test_files_are_closed_if_the_process_has_too_many_others(tmp_path: Path, few_descriptors: None) -> None:
    log = many_segments(tmp_path, HastyFiles(), most=50, segments=60)
    others: list[int] = []
    try:
        with suppress(OSError):
            while True:
                others.append(os.dup(0))
        assert contents(log) == [batch(n, b"%d" % n) for n in range(60)]
        log.append([batch(60, b"next")], sync=True)
    finally:
        for fd in others:
            os.close(fd)
        log.close()


class NotingFiles(HastyFiles):
    """Records which descriptors are closed and synced, and whether there was a write in between."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.dirty: set[int] = set()

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        self.dirty.add(fd)
        super().write(fd, offset, parts)

    def sync(self, fd: int) -> None:
        self.dirty.discard(fd)
        super().sync(fd)

    def close(self, fd: int) -> None:
        assert fd not in self.dirty, "written data was not synced"
        self.closed.append(fd)
        super().close(fd)


def test_written_file_stays_open_until_it_is_synced(tmp_path: Path) -> None:
    files = NotingFiles()
    open_files = OpenFiles(files, 1)
    logs = [DiskLog(tmp_path / str(n), open_files=open_files) for n in range(5)]
    for log in logs:
        log.append([batch(0, b"x")], sync=False)
        log.append([batch(1, b"y")], sync=False)
    assert len(files.dirty) == 5
    files.closed.clear()
    for log in logs:
        log.sync()
    assert len(files.closed) == 4
    for log in logs:
        log.close()


def test_reader_continues_in_a_discarded_file_that_was_closed(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=1000, open_files=OpenFiles(HastyFiles(), 1))
    append_each(log, [batch(n, b"x" * 100) for n in range(20)])
    headers = log.headers(0)
    assert next(headers).base_sequence == 0
    log.discard_before(19)
    assert next(headers).base_sequence == 1
    assert next(headers).base_sequence == 2
    log.close()


def test_externally_deleted_segment_is_a_read_error(tmp_path: Path) -> None:
    log = many_segments(tmp_path, HastyFiles(), most=1, segments=3)
    segment_files(tmp_path)[1].unlink()
    with pytest.raises(LogReadError, match="No such file"):
        log.read(1, 0)
    assert log.read(2, 0) == [batch(2, b"2")]
    log.close()


def test_threads_read_concurrently(tmp_path: Path) -> None:
    log = many_segments(tmp_path, HastyFiles(), most=2, segments=200)
    before = open_descriptors_before()
    errors: list[BaseException] = []

    def read(step: int) -> None:
        try:
            for turn in range(250):
                n = turn * step % 200
                assert log.read(n, 0) == [batch(n, b"%d" % n)]
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 7, 11, 199)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert open_descriptors() == before
    log.close()
    assert open_descriptors() == before - 2
