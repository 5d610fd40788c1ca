"""Tests for reading, syncing and discarding while another thread appends."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from log.support import FailingFiles, HastyFiles, batch
from trio_nsq.log import DiskLog, LogWriteError, RecordBatch

TraceFunction = Callable[[FrameType, str, Any], Any]
APPENDS = 400
APPENDS_PER_TURN = 5


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Switch threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def expected_batch(sequence: int) -> RecordBatch:
    """Return the batch with this sequence, as the appender makes it."""
    return batch(sequence, b"%d" % sequence * 20, b"%d" % sequence)


class Appender(threading.Thread):
    """Appends two batches of two messages at a time, as often as allowed."""

    def __init__(self, log: DiskLog, *, sync: bool) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.appended = 0  # everything before this sequence is in the log
        self.permits = threading.Semaphore(0)
        self._log = log
        self._sync = sync

    def run(self) -> None:
        try:
            for n in range(APPENDS):
                assert self.permits.acquire(timeout=20)
                sequence = 4 * n
                both = [expected_batch(sequence), expected_batch(sequence + 2)]
                self._log.append(both, sync=self._sync)
                self.appended = sequence + 4
        except BaseException as exc:
            self.error = exc


def while_appending(log: DiskLog, work: Callable[[Appender], None], *, sync: bool = False) -> None:
    """Call `work` repeatedly, with a few appends beside each call, until everything is appended."""
    appender = Appender(log, sync=sync)
    appender.start()
    try:
        for _ in range(APPENDS // APPENDS_PER_TURN):
            appender.permits.release(APPENDS_PER_TURN)
            work(appender)
    finally:
        appender.permits.release(APPENDS)
        appender.join()
    work(appender)
    assert appender.error is None
    assert appender.appended == log.next_sequence == 4 * APPENDS


@pytest.mark.parametrize("segment_bytes", [2000, 10**7])
@pytest.mark.parametrize("sync", [True, False])
def test_readers_see_whole_appends_only(
    tmp_path: Path, segment_bytes: int, sync: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log = DiskLog(tmp_path, segment_bytes=segment_bytes, files=HastyFiles())
    place = 0

    def read(appender: Appender) -> None:
        nonlocal place
        known = appender.appended
        end = log.next_sequence
        assert end >= known
        assert end % 4 == 0
        found = log.read(place)
        for one in found:
            assert one == expected_batch(place)
            place = one.next_sequence
        if place < known:
            assert found, "nothing, where something had been appended"
        assert sum(header.count for header in log.headers(max(0, known - 40))) >= min(known, 40)

    while_appending(log, read, sync=sync)
    while place < log.next_sequence:
        (one, *_) = log.read(place, 0)
        assert one == expected_batch(place)
        place = one.next_sequence
    assert caplog.text == ""  # a partial write is not reported as damage
    log.close()


@pytest.mark.uncompiled
@pytest.mark.parametrize("segment_bytes", [1, 10**7])
def test_reader_at_every_line_of_an_append(
    tmp_path: Path, segment_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever the appending thread stops, readers get complete and correct batches."""
    log = DiskLog(tmp_path, segment_bytes=segment_bytes, files=HastyFiles())
    log.append([expected_batch(0)], sync=True)
    lines = 0

    def look(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal lines
        if "trio_nsq/log/" not in frame.f_code.co_filename:
            return None
        lines += 1
        end = log.next_sequence
        assert end in (2, 6)
        assert log.read(0, 10_000)[:1] == [expected_batch(0)]
        for place in range(0, end, 2):
            assert log.read(place, 0) == [expected_batch(place)]
        assert [header.base_sequence for header in log.headers(0)][: end // 2] == list(range(0, end, 2))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        log.append([expected_batch(2), expected_batch(4)], sync=True)
    finally:
        sys.settrace(before)
    assert lines > 30
    assert caplog.text == ""
    assert log.next_sequence == 6
    log.close()


def test_discarding_and_syncing_beside_appends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = DiskLog(tmp_path, segment_bytes=2000, files=HastyFiles())

    def work(appender: Appender) -> None:
        known = appender.appended
        log.discard_before(max(0, known - 100))
        assert log.first_sequence <= max(0, known - 100)
        log.sync()
        for place in (0, log.first_sequence, known - 100, known - 4):
            found = log.read(max(0, place))
            for one in found:
                assert one == expected_batch(one.base_sequence)
            assert found or not known
        assert log.size_bytes > 0 or not known

    while_appending(log, work)
    assert log.first_sequence > 0
    assert caplog.text == ""
    log.close()


def test_several_readers_in_threads(tmp_path: Path) -> None:
    """They share the index of old segments, which is built during their reads."""
    log = DiskLog(tmp_path, segment_bytes=200_000, files=HastyFiles())
    for sequence in range(0, 6000, 2):
        log.append([expected_batch(sequence)], sync=False)
    log.close()
    log = DiskLog(tmp_path, segment_bytes=200_000, files=HastyFiles())
    errors: list[BaseException] = []

    def read(first: int) -> None:
        try:
            for step in range(0, 6000, 70):
                place = (first + step) % 6000
                (found, *_) = log.read(place, 0)
                assert found == expected_batch(place - place % 2)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=read, args=(1500 * n + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    log.close()


def test_failed_appends_are_never_visible(tmp_path: Path) -> None:
    """The records are in the file for a moment; a concurrent reader does not find them."""
    reading = threading.Event()
    seen: list[list[RecordBatch]] = []

    class Slow(FailingFiles):
        def sync(self, fd: int) -> None:
            if "sync" in self.failing:
                reading.set()
                looked.wait(20)
            super().sync(fd)

    looked = threading.Event()
    files = Slow()
    log = DiskLog(tmp_path, files=files)
    log.append([expected_batch(0)], sync=True)
    files.failing["sync"] = 5

    def look() -> None:
        reading.wait(20)
        seen.append(log.read(0))
        seen.append(log.read(2))
        seen.append(log.read(3))
        looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    with pytest.raises(LogWriteError):
        log.append([expected_batch(2)], sync=True)
    thread.join()
    assert seen == [[expected_batch(0)], [], []]
    files.heal()
    log.close()


def discarding_at(line: int, log: DiskLog, what: str) -> tuple[list[int], bool]:
    """Return the sequences that were read, and whether the reader reached this line, at which a file is
    discarded.
    """
    discarded = False

    def look(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal line, discarded
        if "trio_nsq/log/" not in frame.f_code.co_filename:
            return None
        line -= 1
        if line <= 0 and not discarded:
            discarded = True
            log.discard_before(4)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        found = list(getattr(log, what)(0))
    finally:
        sys.settrace(before)
    return [getattr(one, "header", one).base_sequence for one in found], discarded


@pytest.mark.parametrize("what", ["read", "read_raw", "headers"])
def test_files_are_discarded_at_every_line_of_a_read(tmp_path: Path, what: str) -> None:
    """A read returns all messages, or the remaining ones, and never fails."""
    line, discarded = 0, True
    while discarded:
        line += 1
        log = DiskLog(tmp_path / str(line), segment_bytes=1, files=HastyFiles())
        for sequence in (0, 2, 4):
            log.append([expected_batch(sequence)], sync=False)
        found, discarded = discarding_at(line, log, what)
        assert found in ([[0, 2, 4], [0, 4], [4]] if what == "headers" else [[0], [4]])
        log.close()
    assert line > 30
