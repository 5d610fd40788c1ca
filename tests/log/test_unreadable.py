"""Tests for unreadable sectors: for some time they are an error, then damage, which costs only their records."""

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
from soak import examples
from trio_nsq.log import DiskLog, LogReadError, RecordBatch
from trio_nsq.log.files.tolerant_reader import PATIENCE_S

BLOCK = 4096
SECOND = 1.0


class Clock:
    """A clock that moves only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0


class BadSectors(HastyFiles):
    """A disk on which some blocks of every file cannot be read. As in Linux, the blocks before them are read
    first.

    Attributes:
        bad: The blocks.
        error: The error for reading them.
        attempts: The number of attempts.
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
    """A log that is open, and whose disk then begins to fail."""
    log = DiskLog(tmp_path, files=files)
    append_each(log, BATCHES)
    yield log
    log.close()


BATCHES = [batch(n, b"%d" % n * 300) for n in range(100)]
OFFSETS = record_offsets(BATCHES)


def blocks_of(number: int) -> range:
    """Return the blocks of a record."""
    return range(OFFSETS[number] // BLOCK, (OFFSETS[number + 1] - 1) // BLOCK + 1)


def touched(bad: set[int]) -> list[int]:
    """Return the records in any of these blocks."""
    return [n for n in range(len(BATCHES)) if bad & set(blocks_of(n))]


def read_on(log: DiskLog, place: int = 0) -> tuple[list[RecordBatch], int, str]:
    """Return the batches that can be read from a sequence on, the end, and the error there."""
    found: list[RecordBatch] = []
    try:
        while records := log.read(place, 10_000):
            found += records
            place = records[-1].next_sequence
    except LogReadError as exc:
        return found, place, str(exc)
    return found, place, ""


def test_batches_before_a_bad_sector_are_read(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    files.bad = {blocks_of(50)[0]}
    first, *_ = touched(files.bad)
    found, place, error = read_on(log)
    assert found == BATCHES[:first]
    assert place == first
    assert error.endswith(f"{FIRST}: Input/output error")


def test_bad_sector_that_becomes_readable_costs_nothing(
    log: DiskLog, files: BadSectors, clock: Clock
) -> None:
    files.bad = {blocks_of(50)[0]}
    for _ in range(9):
        assert read_on(log)[2]
        clock.now_s += SECOND
    files.bad = set()
    assert read_on(log) == (BATCHES, 100, "")


def test_bad_sector_becomes_damage_after_some_time(
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
    assert files.attempts == attempts, "the bad sector is read again"
    assert caplog.text.count(place) == 1


def test_time_restarts_after_a_success(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    bad = {blocks_of(50)[0]}
    for _ in range(3):
        files.bad = bad
        assert read_on(log)[2]
        clock.now_s += 9 * SECOND
        files.bad = set()
        assert read_on(log)[0] == BATCHES
        clock.now_s += 9 * SECOND


def test_each_sector_has_its_own_time(log: DiskLog, files: BadSectors, clock: Clock) -> None:
    files.bad = {blocks_of(20)[0], blocks_of(70)[0]}
    assert read_on(log)[1] == touched(files.bad)[0]
    clock.now_s += 10 * SECOND
    _, place, error = read_on(log)
    assert place == touched({blocks_of(70)[0]})[0]
    assert error
    clock.now_s += 10 * SECOND
    lost = touched(files.bad)
    assert read_on(log) == ([one for n, one in enumerate(BATCHES) if n not in lost], 100, "")


def test_other_errors_never_become_damage(log: DiskLog, files: BadSectors, clock: Clock) -> None:
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
    """A sector becomes damage at once: time passes at each call of the clock."""

    def monotonic_s(self) -> float:
        self.clock.now_s += PATIENCE_S
        return self.clock.now_s


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=examples(200),
)
@given(bad=st.sets(st.integers(0, OFFSETS[-1] // BLOCK), max_size=6), place=st.integers(0, 99))
def test_batches_outside_the_bad_blocks_are_found(
    bad: set[int], place: int, log: DiskLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever blocks are bad. A range of bad blocks may cost as many good ones after it."""
    files = ImpatientFiles()
    again = DiskLog(log.folder, files=files)
    files.bad = bad
    caplog.clear()
    found: list[RecordBatch] = []
    following, error = place, "not read yet"
    for _ in range(len(bad) + 1):  # the first call of the clock is the first failure of a sector
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


def test_log_is_not_opened_with_a_bad_sector_in_its_last_segment(
    log: DiskLog, files: BadSectors, caplog: pytest.LogCaptureFixture
) -> None:
    """The unread data at the end would have to be cut off."""
    caplog.set_level(logging.INFO)
    files.bad = {blocks_of(99)[-1]}
    size = (log.folder / FIRST).stat().st_size
    with pytest.raises(LogReadError, match="Input/output error"):
        DiskLog(log.folder, files=files)
    assert (log.folder / FIRST).stat().st_size == size


class BadBeginnings(BadSectors):
    """Like BadSectors, but small files can be read."""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return super().read(fd, size, offset) if self.size(fd) > BLOCK else os.pread(fd, size, offset)


def test_unreadable_file_header_costs_only_its_block(tmp_path: Path) -> None:
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
