"""A disk that cannot read some places: for a while that is an error, then it is damage, which costs what lies there."""

import logging
import os
import re
from collections.abc import Iterator
from errno import EIO, ENOMEM
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from log.support import FIRST, HastyFiles, append_each, batch, record_offsets
from trio_nsq.log import DiskLog, LogReadError, RecordBatch
from trio_nsq.log.files.tolerant_reader import PATIENCE_S

BLOCK = 4096
SECOND = 1.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0


class BadSectors(HastyFiles):
    """A disk on which some blocks of every file cannot be read. As Linux does, it first gives what lies before them.

    Attributes:
        bad: The blocks.
        error: What reading them gives.
        attempts: How often that was tried.
    """

    def __init__(self) -> None:
        self.bad: set[int] = set()
        self.error = EIO
        self.attempts = 0
        self.clock = Clock()

    def monotonic_s(self) -> float:
        return self.clock.now_s

    def read(self, fd: int, size: int, offset: int) -> bytes:
        end = offset
        while end < offset + size and end // BLOCK not in self.bad:
            end = (end // BLOCK + 1) * BLOCK
        if end == offset:
            self.attempts += 1
            raise OSError(self.error, os.strerror(self.error))
        return super().read(fd, min(size, end - offset), offset)


@pytest.fixture
def files() -> BadSectors:
    return BadSectors()


@pytest.fixture
def clock(files: BadSectors) -> Clock:
    return files.clock


@pytest.fixture
def log(tmp_path: Path, files: BadSectors) -> Iterator[DiskLog]:
    """A log open for a while, whose disk then begins to fail."""
    log = DiskLog(tmp_path, files=files)
    append_each(log, BATCHES)
    yield log
    log.close()


BATCHES = [batch(n, b"%d" % n * 300) for n in range(100)]
OFFSETS = record_offsets(BATCHES)


def blocks_of(number: int) -> range:
    """The blocks in which a record lies."""
    return range(OFFSETS[number] // BLOCK, (OFFSETS[number + 1] - 1) // BLOCK + 1)


def touched(bad: set[int]) -> list[int]:
    """The records that lie in any of these blocks."""
    return [n for n in range(len(BATCHES)) if bad & set(blocks_of(n))]


def read_on(log: DiskLog, place: int = 0) -> tuple[list[RecordBatch], int, str]:
    """What can be read from there on, where that ended, and the error that ended it."""
    found: list[RecordBatch] = []
    try:
        while records := log.read(place, 10_000):
            found += records
            place = records[-1].next_sequence
    except LogReadError as exc:
        return found, place, str(exc)
    return found, place, ""


def test_what_lies_before_a_bad_sector_is_read(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    files.bad = {blocks_of(50)[0]}
    first, *_ = touched(files.bad)
    found, place, error = read_on(log)
    assert found == BATCHES[:first]
    assert place == first
    assert error.endswith(f"{FIRST}: Input/output error")


def test_a_bad_sector_that_can_be_read_again_costs_nothing(
    log: DiskLog, files: BadSectors, clock: Clock
) -> None:
    files.bad = {blocks_of(50)[0]}
    for _ in range(9):
        assert read_on(log)[2]
        clock.now_s += SECOND
    files.bad = set()
    assert read_on(log) == (BATCHES, 100, "")


def test_a_bad_sector_is_given_up_after_a_while(
    log: DiskLog, files: BadSectors, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    bad = blocks_of(50)[0]
    files.bad = {bad}
    lost = touched(files.bad)
    assert read_on(log)[2]
    clock.now_s += 10 * SECOND
    assert read_on(log) == ([one for n, one in enumerate(BATCHES) if n not in lost], 100, "")
    place = f"{log.folder / FIRST}: the disk cannot read bytes {bad * BLOCK} to {(bad + 1) * BLOCK}, skipped"
    assert caplog.text.count(place) == 1
    attempts = files.attempts
    for sequence in range(100):
        assert (log.read(sequence, 0) == [BATCHES[sequence]]) is (sequence not in lost)
    assert files.attempts == attempts, "the disk is asked again for what it cannot read"
    assert caplog.text.count(place) == 1


def test_the_time_begins_anew_after_a_success(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    bad = {blocks_of(50)[0]}
    for _ in range(3):
        files.bad = bad
        assert read_on(log)[2]
        clock.now_s += 9 * SECOND
        files.bad = set()
        assert read_on(log)[0] == BATCHES
        clock.now_s += 9 * SECOND


def test_each_place_has_its_own_time(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    files.bad = {blocks_of(20)[0], blocks_of(70)[0]}
    assert read_on(log)[1] == touched(files.bad)[0]
    clock.now_s += 10 * SECOND
    _, place, error = read_on(log)
    assert place == touched({blocks_of(70)[0]})[0]
    assert error
    clock.now_s += 10 * SECOND
    lost = touched(files.bad)
    assert read_on(log) == ([one for n, one in enumerate(BATCHES) if n not in lost], 100, "")


def test_errors_of_other_kinds_are_never_given_up(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    files.bad = {blocks_of(50)[0]}
    files.error = ENOMEM
    for _ in range(5):
        assert "Cannot allocate memory" in read_on(log)[2]
        clock.now_s += 3600 * SECOND
    files.bad = set()
    assert read_on(log)[0] == BATCHES


def test_nothing_can_be_read_up_to_the_end(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    files.bad = set(range(blocks_of(50)[0], 1000))
    lost = touched(files.bad)
    assert read_on(log)[1] == lost[0]
    clock.now_s += 10 * SECOND
    assert read_on(log) == (BATCHES[: lost[0]], lost[0], "")
    files.bad = set()
    log.append([batch(100, b"goes on")], sync=True)
    assert read_on(log, 90) == ([batch(100, b"goes on")], 101, "")


class ImpatientFiles(BadSectors):
    """So much time passes at each look at the clock that a place is given up at once."""

    def monotonic_s(self) -> float:
        self.clock.now_s += PATIENCE_S
        return self.clock.now_s


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=200)
@given(bad=st.sets(st.integers(0, OFFSETS[-1] // BLOCK), max_size=6), place=st.integers(0, 99))
def test_what_does_not_lie_there_is_found(
    bad: set[int], place: int, log: DiskLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever blocks are bad. A stretch of them may take as many good ones with it."""
    files = ImpatientFiles()
    again = DiskLog(log.folder, files=files)
    files.bad = bad
    caplog.clear()
    found: list[RecordBatch] = []
    following, error = place, "not read yet"
    for _ in range(len(bad) + 1):  # the first look at the clock is the first failure of a place
        if not error:
            break
        more, following, error = read_on(again, following)
        found += more
    again.close()
    assert (following, error) in [(100, ""), (found[-1].next_sequence if found else place, "")]
    given_up: set[int] = set()
    for start, stop in re.findall(r"cannot read bytes (\d+) to (\d+), skipped", caplog.text):
        blocks = range(int(start) // BLOCK, -(-int(stop) // BLOCK))
        given_up.update(blocks)
        assert len(blocks) <= 2 * (max(bad & set(blocks)) - blocks[0] + 1)
    assert [one for one in BATCHES[place:] if one.base_sequence not in touched(given_up)] == found


def test_a_log_is_not_opened_over_a_bad_sector_in_its_last_segment(
    log: DiskLog, files: BadSectors, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies at the end would have to be cut off, unread."""
    caplog.set_level(logging.INFO)
    files.bad = {blocks_of(99)[-1]}
    size = (log.folder / FIRST).stat().st_size
    with pytest.raises(LogReadError, match="Input/output error"):
        DiskLog(log.folder, files=files)
    assert (log.folder / FIRST).stat().st_size == size


class BadBeginnings(BadSectors):
    """The same, but small files can be read."""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return super().read(fd, size, offset) if self.size(fd) > BLOCK else os.pread(fd, size, offset)


def test_a_files_header_that_cannot_be_read_costs_what_lies_in_its_block(tmp_path: Path) -> None:
    batches = [batch(n, b"x" * 1000) for n in range(12)]
    log = DiskLog(tmp_path, segment_bytes=11_000, files=HastyFiles())
    append_each(log, batches)
    log.close()
    files = BadBeginnings()
    files.bad = {0}
    log = DiskLog(tmp_path, files=files)
    with pytest.raises(LogReadError):
        log.read(0)
    files.clock.now_s += PATIENCE_S
    first = sum(offset < BLOCK for offset in record_offsets(batches))
    assert log.read(0, 10**6) == batches[first:10]
    assert log.read(10) == batches[10:]
    log.close()
