"""Tests for the log on disk: its files, and reopening it."""

import stat
import tracemalloc
from errno import ENOSPC
from pathlib import Path
from struct import pack
from zlib import crc32

import pytest

from log.support import (
    FILE_HEADER_BYTES,
    FIRST,
    CountingFiles,
    FailingFiles,
    HastyFiles,
    append_each,
    batch,
    contents,
    numbered,
    open_descriptors,
    open_descriptors_before,
    segment_files,
)
from trio_nsq.log import DiskLog, LogReadError, LogWriteError, RecordBatch
from trio_nsq.log.interface import READ_BYTES


def test_empty_log_creates_no_files(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "log")
    log.sync()
    assert log.read(0) == []
    log.discard_before(5)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_files_are_readable_by_the_user_only(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "log")
    log.append([batch(0, b"secret")], sync=True)
    log.close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "log" / FIRST).stat().st_mode) == 0o600


def test_layout_of_a_segment(tmp_path: Path) -> None:
    """Byte for byte: the next version must be able to read today's files."""
    log = DiskLog(tmp_path, now_ns=lambda: 0x0102030405060708)
    log.append([batch(0, b"a", b"bc")], sync=True)
    log.close()
    noted = (tmp_path / "incarnation").read_bytes()
    incarnation = noted[16:]
    assert noted == b"\x89NSQTOP\n\0\0\0\1" + pack(">I", crc32(incarnation)) + incarnation
    assert len(incarnation) == 16
    content = (tmp_path / FIRST).read_bytes()
    head, record = content[:52], content[52:]
    assert head[:12] == b"\x89NSQLOG\n\0\2\0\0"
    assert head[12:16] == pack(">I", crc32(bytes(8) + incarnation))
    assert head[16:48] == bytes(8) + bytes(range(1, 9)) + incarnation
    assert head[48:] == pack(">I", crc32(head[:48]))
    assert record[:4] == b"NSQB"
    assert record[56:] == b"\0\0\0\1a\0\0\0\2bc"


def test_missing_parent_folder_is_refused(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "a" / "b")
    with pytest.raises(LogWriteError, match="No such file or directory"):
        log.append([batch(0, b"x")], sync=True)
    (tmp_path / "a").mkdir()
    log.append([batch(0, b"x")], sync=True)
    assert contents(log) == [batch(0, b"x")]
    log.close()


def test_file_instead_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    with pytest.raises(LogReadError, match="Not a directory"):
        DiskLog(tmp_path / "log")


def test_unreadable_folder_is_not_an_empty_log(tmp_path: Path) -> None:
    DiskLog(tmp_path).close()
    files = FailingFiles()
    files.failing["names"] = 13
    with pytest.raises(LogReadError, match=f"cannot read {tmp_path}: Permission denied"):
        DiskLog(tmp_path, files=files)


# ---------------------------------------------------------------------- segments


def test_new_segment_begins_where_the_old_one_would_be_too_large(tmp_path: Path) -> None:
    record_bytes = batch(0, b"x" * 40).record_bytes
    assert record_bytes == 100
    log = DiskLog(tmp_path, segment_bytes=FILE_HEADER_BYTES + 300)
    append_each(log, [batch(n, b"x" * 40) for n in range(7)])
    assert [(path.name, path.stat().st_size) for path in segment_files(tmp_path)] == [
        (f"{0:020d}.log", 352),
        (f"{3:020d}.log", 352),
        (f"{6:020d}.log", 152),
    ]
    assert log.size_bytes == 352 + 352 + 152
    # An append is not split, even if it is larger than a segment.
    log.append([batch(7 + n, b"x" * 40) for n in range(5)], sync=False)
    log.append([batch(12, b"x" * 40)], sync=False)
    assert [(path.name, path.stat().st_size) for path in segment_files(tmp_path)][3:] == [
        (f"{7:020d}.log", 552),
        (f"{12:020d}.log", 152),
    ]
    assert [one.base_sequence for one in contents(log)] == list(range(13))
    log.close()


def test_first_record_of_a_segment_may_have_any_size(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=10)
    append_each(log, [batch(0, b"x" * 1000), batch(1, b"y" * 1000)])
    assert [path.stat().st_size for path in segment_files(tmp_path)] == [FILE_HEADER_BYTES + 56 + 1004] * 2
    log.close()


@pytest.mark.parametrize("segment_bytes", [1, 300, 1000, 10**8])
@pytest.mark.parametrize("sync", [True, False])
def test_reopened_log_is_the_same(tmp_path: Path, segment_bytes: int, sync: bool) -> None:
    batches = numbered(0, 15)
    expected: list[RecordBatch] = []
    for one in batches:
        log = DiskLog(tmp_path, segment_bytes=segment_bytes, files=None if sync else HastyFiles())
        assert contents(log) == expected
        assert log.next_sequence == one.base_sequence
        log.append([one], sync=sync)
        expected.append(one)
        assert contents(log) == expected
        size = log.size_bytes
        log.close()
    log = DiskLog(tmp_path, segment_bytes=segment_bytes)
    assert contents(log) == batches
    assert log.size_bytes == size
    assert (log.first_sequence, log.next_sequence) == (0, batches[-1].next_sequence)
    for sequence in range(log.next_sequence):
        (one, *_) = log.read(sequence, 0)
        assert one.base_sequence <= sequence < one.next_sequence
    log.close()


def test_reopening_after_discarding(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=300, files=HastyFiles())
    append_each(log, numbered(0, 20))
    log.discard_before(20)
    expected, first, end = contents(log), log.first_sequence, log.next_sequence
    assert 0 < first <= 20
    log.close()
    log = DiskLog(tmp_path, segment_bytes=300, files=HastyFiles())
    assert (contents(log), log.first_sequence, log.next_sequence) == (expected, first, end)
    log.discard_before(10**9)
    assert len(segment_files(tmp_path)) == 1
    log.close()
    log = DiskLog(tmp_path, segment_bytes=300)
    assert log.next_sequence == end  # the last segment stays and keeps the next sequence
    log.close()


def test_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    for name in ("state.json", "state.json.tmp", "README", "00000000000000000000.log.gz", "x.LOG"):
        (tmp_path / name).write_bytes(b"")
    log = DiskLog(tmp_path)
    log.append([batch(0, b"a")], sync=True)
    log.close()
    assert len(list(tmp_path.iterdir())) == 7


# ---------------------------------------------------------------------- discarding


def test_discarding_deletes_whole_segments_and_no_needed_messages(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=FILE_HEADER_BYTES + 2 * 100, files=HastyFiles())
    append_each(log, [batch(2 * n, b"x" * 20, b"y" * 16) for n in range(9)])  # 100 bytes, 2 messages each
    assert [int(path.stem) for path in segment_files(tmp_path)] == [0, 4, 8, 12, 16]
    for sequence, left in [(3, [0, 4, 8, 12, 16]), (4, [4, 8, 12, 16]), (11, [8, 12, 16]), (99, [16])]:
        log.discard_before(sequence)
        assert [int(path.stem) for path in segment_files(tmp_path)] == left
        assert log.first_sequence == left[0]
    assert contents(log) == [batch(16, b"x" * 20, b"y" * 16)]
    log.close()


def test_discarding_closes_files(tmp_path: Path) -> None:
    before = open_descriptors_before()
    log = DiskLog(tmp_path, segment_bytes=1, files=HastyFiles())
    append_each(log, numbered(0, 10))
    assert open_descriptors() == before + 10
    log.discard_before(log.next_sequence)
    assert open_descriptors() == before + 1
    log.close()
    assert open_descriptors() == before


def test_file_that_cannot_be_deleted_stays_in_the_log(tmp_path: Path) -> None:
    files = FailingFiles()
    log = DiskLog(tmp_path, segment_bytes=1, files=files)
    batches = numbered(0, 5)
    append_each(log, batches)
    files.failing["unlink"] = 1
    with pytest.raises(LogWriteError, match=f"cannot write {tmp_path / FIRST}: Operation not permitted"):
        log.discard_before(log.next_sequence)
    assert contents(log) == batches
    files.heal()
    log.discard_before(log.next_sequence)
    assert contents(log) == batches[-1:]
    log.close()


def test_externally_deleted_file_is_discarded_silently(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=1)
    batches = numbered(0, 3)
    append_each(log, batches)
    segment_files(tmp_path)[0].unlink()
    assert contents(log) == batches  # it is still open
    log.discard_before(log.next_sequence)
    assert contents(log) == batches[-1:]
    log.close()


def test_reader_keeps_a_discarded_file_until_it_is_done(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=10**6, files=HastyFiles())
    batches = numbered(0, 3000, size=100)  # more than one window
    append_each(log, batches)
    log.rotate()
    log.append([batch(log.next_sequence, b"in another segment")], sync=False)
    headers = log.headers(0)
    found = [next(headers)]
    before = open_descriptors_before()
    log.discard_before(log.next_sequence)
    assert len(segment_files(tmp_path)) == 1
    other = (tmp_path / "takes the number").open("wb")  # of a file that was closed too early
    found += list(headers)
    other.close()
    assert [header.base_sequence for header in found[:-1]] == [one.base_sequence for one in batches]
    del headers
    assert open_descriptors() == before - 1
    log.close()


def test_discarded_file_is_closed_at_once_in_spite_of_references_from_an_error(tmp_path: Path) -> None:
    """Otherwise the disk space would be free only after a garbage collection."""
    files = FailingFiles()
    log = DiskLog(tmp_path, files=files)
    append_each(log, numbered(0, 3))
    before = open_descriptors()
    files.failing["sync"] = ENOSPC
    with pytest.raises(LogWriteError) as kept:
        log.append([batch(log.next_sequence, b"refused")], sync=True)
    files.heal()
    log.rotate_unless_empty()
    assert open_descriptors() == before + 1
    log.discard_before(log.next_sequence)
    assert open_descriptors() == before
    del kept
    log.close()


# ---------------------------------------------------------------------- gaps and hints


def test_missing_segment_is_skipped(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=300, files=HastyFiles())
    batches = numbered(0, 20)
    append_each(log, batches)
    log.close()
    paths = segment_files(tmp_path)
    gone, after = int(paths[2].stem), int(paths[3].stem)
    paths[2].unlink()
    log = DiskLog(tmp_path, segment_bytes=300)
    assert contents(log) == [b for b in batches if not gone <= b.base_sequence < after]
    for sequence in range(gone, after + 1):
        assert log.read(sequence)[0].base_sequence == after
    assert log.read(gone - 1)[0].next_sequence == gone
    log.close()


def test_hints_of_a_deleted_segment_are_forgotten(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=300, files=HastyFiles())
    batches = numbered(0, 30)
    append_each(log, batches)
    by_base = {one.base_sequence: one for one in batches}
    for one in batches:  # a hint for every record
        assert log.read(one.base_sequence, 0) == [one]
    log.discard_before(batches[15].base_sequence)
    for one in contents(log, 0):
        assert by_base[one.base_sequence] == one
        assert log.read(one.base_sequence, 0) == [one]
    log.close()


def test_hints_of_readers_are_limited(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles())
    append_each(log, [batch(n, b"x" * 10_000) for n in range(3000)])
    tracemalloc.start()
    try:
        for n in reversed(range(3000)):  # in ascending order, each read would continue the previous one
            log.read(n, 0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 400_000, "the place where each of 3,000 reads ended is kept"
    log.close()


# ---------------------------------------------------------------------- amount of IO


@pytest.mark.parametrize("sync", [True, False])
def test_append_is_one_write_and_one_sync(tmp_path: Path, sync: bool) -> None:
    files = CountingFiles()
    log = DiskLog(tmp_path, files=files)
    log.append([batch(0, b"the segment is made now")], sync=False)
    files.reset()
    log.append([batch(1 + 3 * n, b"a", b"b", b"c") for n in range(100)], sync=sync)
    assert (files.writes, files.syncs, files.reads) == (1, int(sync), 0)
    files.reset()
    log.sync()
    assert (files.writes, files.syncs, files.reads) == (0, 1, 0)
    log.close()


def test_sequential_read_reads_nothing_twice(tmp_path: Path) -> None:
    files = CountingFiles()
    log = DiskLog(tmp_path, segment_bytes=10**6)
    append_each(log, [batch(n, b"x" * 960) for n in range(3000)])  # three segments of 1 MiB
    assert len(segment_files(tmp_path)) == 4
    log.close()
    log = DiskLog(tmp_path, files=files)
    files.reset()
    found = contents(log, READ_BYTES)
    assert len(found) == 3000
    # No lookups: each byte was read once, except the record at the end of each piece.
    assert files.read_bytes < 1.02 * log.size_bytes
    assert files.reads < log.size_bytes / READ_BYTES + 2 * 4
    log.close()


def test_sequential_reads_beside_others_read_nothing_twice(tmp_path: Path) -> None:
    files = CountingFiles()
    log = DiskLog(tmp_path, files=files)
    append_each(log, [batch(n, b"x" * 960) for n in range(2000)])
    files.reset()
    places = [0, 500, 1000, 1500]
    for place in places:
        log.read(place, 0)  # one lookup
    files.reset()
    for _ in range(5):
        places = [log.read(place, 20_000)[-1].next_sequence for place in places]
    assert files.read_bytes < 4 * 5 * 20_000 + 4 * 4096 + 4 * 65_536
    log.close()


def test_finding_one_message_reads_little(tmp_path: Path) -> None:
    files = CountingFiles()
    log = DiskLog(tmp_path, segment_bytes=10**6)
    append_each(log, [batch(n, b"x" * 100) for n in range(15_000)])
    log.close()
    log = DiskLog(tmp_path, files=files)
    files.reset()
    for n in range(5000, 5700, 7):
        (found, *_) = log.read(n, 0)
        assert found == batch(n, b"x" * 100)
    assert files.read_bytes / 100 < 64 * 1024 + 4096
    assert files.reads / 100 < 64 / 4 + 4
    log.close()


def test_damage_at_the_end_of_an_old_segment_is_not_searched_repeatedly(tmp_path: Path) -> None:
    files = CountingFiles()
    log = DiskLog(tmp_path, segment_bytes=10**6)
    append_each(log, [batch(n, b"x" * 960) for n in range(1000)])
    log.close()
    path = segment_files(tmp_path)[0]
    base = int(segment_files(tmp_path)[1].stem)
    size = path.stat().st_size - 100_000
    path.write_bytes(path.read_bytes()[:size] + b"?" * 100_000)
    log = DiskLog(tmp_path, files=files)
    assert log.read(10, 0) == [batch(10, b"x" * 960)]
    log.read(base - 1, 0)
    files.reset()
    assert log.read(10, 0) == [batch(10, b"x" * 960)]
    assert log.read(500, 0) == [batch(500, b"x" * 960)]
    assert files.read_bytes < 2 * 70_000
    log.read(base - 1, 0)
    assert files.read_bytes < 2 * 70_000 + 2 * 110_000 + 70_000
    log.close()
