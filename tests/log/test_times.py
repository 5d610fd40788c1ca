"""Tests for finding a sequence by time."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.support import FIRST, CountingFiles, HastyFiles, batch, record_offsets
from trio_nsq.log import DiskLog, Log, MemoryLog, RecordBatch
from trio_nsq.log.interface import sequence_at


def timed(counts_and_times: Sequence[tuple[int, int]]) -> list[RecordBatch]:
    """Return a batch for each (messages, timestamp)."""
    batches: list[RecordBatch] = []
    sequence = 0
    for count, timestamp_ns in counts_and_times:
        messages = batch(sequence, *(b"%d" % number for number in range(count))).messages
        batches.append(RecordBatch(sequence, 1000 + sequence, timestamp_ns, 0, messages))
        sequence += count
    return batches


def filled(log: Log, batches: Sequence[RecordBatch]) -> Log:
    for one in batches:
        log.append([one], sync=False)
    return log


def naive(batches: Sequence[RecordBatch], timestamp_ns: int) -> int:
    """Search from the first batch on."""
    for one in batches:
        if one.timestamp_ns >= timestamp_ns:
            return one.base_sequence
    return batches[-1].next_sequence if batches else 0


records = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=30)


@given(records, st.integers(0, 31), st.sampled_from([1, 150, 1000]))
def test_ascending_times(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[tuple[int, int]],
    timestamp_ns: int,
    segment_bytes: int,
) -> None:
    times = sorted(time for _, time in records)
    batches = timed([(count, time) for (count, _), time in zip(records, times, strict=True)])
    memory = filled(MemoryLog(), batches)
    disk = filled(
        DiskLog(tmp_path_factory.mktemp("log"), segment_bytes=segment_bytes, files=HastyFiles()), batches
    )
    assert (
        sequence_at(disk, timestamp_ns) == sequence_at(memory, timestamp_ns) == naive(batches, timestamp_ns)
    )
    disk.close()


@given(records, st.integers(0, 31))
def test_clock_that_was_set_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, int]], timestamp_ns: int
) -> None:
    """The result is a position where the next message is late enough and the previous one is not."""
    batches = timed(records)
    log = filled(DiskLog(tmp_path_factory.mktemp("log"), segment_bytes=200, files=HastyFiles()), batches)
    found = sequence_at(log, timestamp_ns)
    before = [one for one in batches if one.base_sequence < found]
    after = [one for one in batches if one.base_sequence >= found]
    assert not before or before[-1].timestamp_ns < timestamp_ns
    assert not after or after[0].timestamp_ns >= timestamp_ns
    assert found in {0, *(one.next_sequence for one in batches)}
    log.close()


def test_discarded_messages() -> None:
    log = filled(MemoryLog(max_messages=3), timed([(1, time) for time in range(10)]))
    assert log.first_sequence == 7
    assert [sequence_at(log, time) for time in (0, 7, 8, 9, 10)] == [7, 7, 8, 9, 10]


def test_damage_is_skipped(tmp_path: Path) -> None:
    batches = timed([(2, 10), (2, 20), (2, 30), (2, 40)])
    filled(DiskLog(tmp_path, files=HastyFiles()), batches).close()
    content = bytearray((tmp_path / FIRST).read_bytes())
    for index in (1, 2):
        content[record_offsets(batches)[index] + 8] ^= 1  # in the header
    (tmp_path / FIRST).write_bytes(content)
    log = DiskLog(tmp_path, files=HastyFiles())
    assert sequence_at(log, 10) == 0
    assert 2 <= sequence_at(log, 11) <= 6  # the message there cannot be read; the next one has time 40
    assert 2 <= sequence_at(log, 40) <= 6
    assert sequence_at(log, 41) == 8
    log.close()


def test_few_bytes_are_read(tmp_path: Path) -> None:
    """Of many segments, some headers and a part of one."""
    body = b"x" * 20_000
    log = DiskLog(tmp_path, segment_bytes=400_000, files=HastyFiles())
    for number in range(1000):
        one = batch(number, body)
        log.append([RecordBatch(number, number, number * 10, 0, one.messages)], sync=False)
    log.close()
    files = CountingFiles()
    log = DiskLog(tmp_path, segment_bytes=400_000, files=files)
    assert len(log.files) > 40
    files.reset()
    for number in (0, 1, 500, 777, 999):
        assert sequence_at(log, number * 10 - 5) == number
    assert files.read_bytes < 5 * 25 * 64 * 1024
    log.close()


def test_age_of_a_file_is_that_of_its_last_message(tmp_path: Path) -> None:
    """Also if several batches are written at once, and after a restart."""
    log = DiskLog(tmp_path, files=HastyFiles())
    log.append(timed([(1, 10), (2, 20), (1, 30)]), sync=False)
    assert (log.files[-1].first_ns, log.files[-1].last_ns()) == (10, 30)
    log.close()
    log = DiskLog(tmp_path, files=HastyFiles())
    assert (log.files[-1].first_ns, log.files[-1].last_ns()) == (10, 30)
    log.close()
