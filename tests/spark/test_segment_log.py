"""Tests for reading a topic's segments without a broker: the same messages, gaps and positions as the broker has."""

import itertools
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.support import (
    FILE_HEADER_BYTES,
    CountingFiles,
    HastyFiles,
    append_each,
    batch,
    contents,
    copied,
    link,
    numbered,
    segment_files,
)
from soak import examples
from trio_nsq.client.reading.broker_log import LogReplaced
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.log.gaps import Gap, Span
from trio_nsq.log.positions import parse_position
from trio_nsq.spark.segments.log import SegmentLog
from trio_nsq.spark.segments.places import parse_places


def make_log(folder: Path, groups: Sequence[Sequence[RecordBatch]], segment_bytes: int) -> None:
    """Write groups of linked records into a new log."""
    log = DiskLog(folder, segment_bytes=segment_bytes, files=HastyFiles())
    for group in groups:
        log.append(list(group), sync=False)
    log.close()


def grouped(batches: Sequence[RecordBatch], sizes: Sequence[int]) -> list[list[RecordBatch]]:
    """Link batches to groups of these sizes, which repeat."""
    left, groups = list(batches), list[list[RecordBatch]]()
    for size in itertools.cycle(sizes):
        if not left:
            return groups
        groups.append(link(left[:size]))
        left = left[size:]
    return groups


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


def check_same(folder: Path, to: Path) -> None:
    """Check that the segments have the same messages and bounds as the log that a broker opens of a copy."""
    log = DiskLog(copied(folder, to), files=HastyFiles())
    try:
        expected = contents(log)
        bounds = SegmentLog(folder).bounds()
        assert (bounds.first, bounds.end, bounds.at) == (
            log.first_sequence,
            log.next_sequence,
            log.next_sequence,
        )
        if bounds.first == bounds.end:
            assert expected == []
            return
        found = list(SegmentLog(folder).read(Span(bounds.first, bounds.end)))
        assert [each for each in found if isinstance(each, RecordBatch)] == expected
        at = bounds.first
        for each in found:
            begins = each.first_sequence if isinstance(each, Gap) else each.base_sequence
            assert begins == at
            at = each.next_sequence
        assert at == bounds.end
        for time_ns in {each.timestamp_ns + more for each in expected for more in (0, 1)}:
            place = f"@{time_ns // 10**9}.{time_ns % 10**9:09d}"
            assert SegmentLog(folder).bounds(place).at == parse_position(place, 0).sequence_in(log)
    finally:
        log.close()


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    flips=st.lists(st.integers(0, 2**20), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 2**20)),
    segment_bytes=st.sampled_from([1, 300, 700, 10**6]),
)
def test_damaged_and_torn_logs_are_read_as_a_broker_reads_them(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    flips: list[int],
    cut: int | None,
    segment_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("log")
    make_log(folder / "log", grouped(numbered(0, 14), sizes), segment_bytes)
    files = segment_files(folder / "log")
    for place in flips:
        path = files[place % len(files)]
        flip(path, FILE_HEADER_BYTES + place // len(files) % (path.stat().st_size - FILE_HEADER_BYTES))
    if cut is not None:
        most = files[-1].stat().st_size - FILE_HEADER_BYTES + 1
        os.truncate(files[-1], FILE_HEADER_BYTES + cut % most)
    check_same(folder / "log", folder / "copy")


def test_discarded_and_damaged_messages_are_gaps(tmp_path: Path) -> None:
    batches = numbered(0, 60)
    make_log(tmp_path, [[each] for each in batches], 400)
    first, second, third, *_ = segment_files(tmp_path)
    first.unlink()
    flip(third, 120)
    log = SegmentLog(tmp_path)
    kept, damaged = int(second.stem), int(third.stem)
    found = list(log.read(Span(0, log.bounds().end)))
    assert found[0] == Gap(0, kept, "discarded")
    (gap,) = [each for each in found[1:] if isinstance(each, Gap)]
    assert (gap.first_sequence, gap.reason) == (damaged, "damaged")
    assert (log.id_at(0), log.id_at(damaged), log.id_at(kept)) == (None, None, f"{10**15 + 3 * kept:016x}")


def test_only_messages_of_the_span(tmp_path: Path) -> None:
    make_log(tmp_path, grouped(numbered(0, 60), [1, 3]), 400)
    log = SegmentLog(tmp_path)
    end = log.bounds().end
    for span in (Span(0, 1), Span(7, 8), Span(5, 50), Span(end - 1, end), Span(end - 7, end - 2)):
        found = [each for each in log.read(span) if isinstance(each, RecordBatch)]
        assert (found[0].base_sequence, found[-1].next_sequence) == span
        assert sum(each.count for each in found) == span.length


def test_index_leads_to_the_first_record(tmp_path: Path) -> None:
    make_log(tmp_path, [[each] for each in numbered(0, 300, size=1000)], 400_000)
    segment, *_ = segment_files(tmp_path)
    assert segment.with_suffix(".index").exists()
    counting = CountingFiles()
    log = SegmentLog(tmp_path, counting)
    limit = int(segment_files(tmp_path)[1].stem)
    (found,) = log.read(Span(limit - 1, limit))
    assert found.next_sequence == limit
    assert counting.read_bytes < 200_000


def test_a_log_that_ends_before_the_span_is_another_one(tmp_path: Path) -> None:
    make_log(tmp_path, [[each] for each in numbered(0, 10)], 400)
    end = SegmentLog(tmp_path).bounds().end
    with pytest.raises(LogReplaced, match=f"ends before message {end}"):
        list(SegmentLog(tmp_path).read(Span(0, end + 1)))


def test_a_planned_log_is_not_read_from_another_one_in_its_folder(tmp_path: Path) -> None:
    """The topic is deleted and recreated after the plan, and soon has as many messages."""
    folder = tmp_path / "t.topic"
    make_log(folder, [[each] for each in numbered(0, 10)], 400)
    (found,) = parse_places([str(folder)], "t")
    bounds = found.open().bounds()
    planned = pickle.loads(pickle.dumps(found.named("b", bounds.incarnation)))
    span = Span(0, bounds.end)
    assert list(planned.open().read(span)) == list(found.open().read(span))
    shutil.rmtree(folder)
    make_log(folder, [[each] for each in numbered(0, 10)], 400)
    assert found.open().bounds().incarnation != bounds.incarnation
    with pytest.raises(LogReplaced, match="deleted and recreated"):
        list(planned.open().read(span))


@pytest.mark.parametrize("size", [0, FILE_HEADER_BYTES - 1, FILE_HEADER_BYTES])
def test_first_segments_without_a_record(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "log"
    make_log(folder, [[each] for each in numbered(0, 60)], 400)
    for path in segment_files(folder)[:2]:
        os.truncate(path, size)
    check_same(folder, tmp_path / "copy")


def test_an_empty_last_segment(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles())
    append_each(log, numbered(0, 10))
    log.rotate_unless_empty()
    log.close()
    check_same(tmp_path, tmp_path.with_name("copy"))


def test_a_running_log_is_read_to_its_last_complete_batch(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles())
    append_each(log, numbered(0, 10))
    end = log.next_sequence
    log.write(link([batch(end, b"x"), batch(end + 1, b"y")])[:1])
    assert SegmentLog(tmp_path).bounds().end == end
    log.close()
