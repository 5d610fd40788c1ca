"""Tests for scanning a log's files: findings for every kind of damage, consistency with readers, and no
writes.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from errno import EACCES, EIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.support import (
    FILE_HEADER_BYTES,
    FIRST,
    HastyFiles,
    append_each,
    batch,
    contents,
    copied,
    link,
    numbered,
    record_offsets,
    segment_files,
)
from soak import examples
from trio_nsq.log import DiskLog, Files, LogReadError, RecordBatch
from trio_nsq.log.inspection.findings import Finding, Kind
from trio_nsq.log.inspection.verify import LogReport, verify_log, verify_segment
from trio_nsq.log.records import HEADER_BYTES, encode_header

BATCHES = [batch(0, b"a"), batch(1, b"bc", b"def"), batch(3, b"g" * 20), batch(4, b"h", b"ij")]
"""Sequences 0 to 6."""
OFFSETS = record_offsets(BATCHES)


def make_log(folder: Path, batches: Iterable[RecordBatch] = BATCHES, segment_bytes: int = 10**6) -> Path:
    """Make a log of these batches; return its first segment."""
    log = DiskLog(folder, segment_bytes=segment_bytes, files=HastyFiles())
    append_each(log, list(batches))
    log.close()
    return segment_files(folder)[0]


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    """Change the content of a file."""
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip(path: Path, at: int) -> None:
    """Flip one bit of the byte at `at`."""

    def change(content: bytearray) -> None:
        content[at] ^= 1 << at % 8

    edit(path, change)


def brief(finding: Finding) -> tuple[Kind, str, int, int, int | None, int | None]:
    """Return a finding without its text."""
    return (
        finding.kind,
        finding.path.name,
        finding.offset,
        finding.end,
        finding.sequence,
        finding.messages,
    )


def only(report: LogReport) -> tuple[Kind, str, int, int, int | None, int | None]:
    """Return the only finding."""
    (finding,) = report.findings
    return brief(finding)


def test_undamaged_log(tmp_path: Path) -> None:
    batches = numbered(0, 300)
    make_log(tmp_path / "log", batches, segment_bytes=2000)
    report = verify_log(tmp_path / "log")
    assert (report.findings, report.damaged, report.lost_messages) == ([], False, 0)
    assert (report.records, report.messages) == (300, batches[-1].next_sequence)
    assert (report.first_sequence, report.next_sequence) == (0, batches[-1].next_sequence)
    files = segment_files(tmp_path / "log")
    assert report.segments == len(files) > 5
    assert report.size_bytes == sum(path.stat().st_size for path in files)


def test_log_without_its_oldest_segments(tmp_path: Path) -> None:
    make_log(tmp_path, numbered(0, 300), segment_bytes=2000)
    first, *kept = segment_files(tmp_path)
    first.unlink()
    report = verify_log(tmp_path)
    assert (report.findings, report.first_sequence) == ([], int(kept[0].stem))


def test_log_without_messages(tmp_path: Path) -> None:
    assert verify_log(tmp_path / "none") == LogReport(tmp_path / "none")
    log = DiskLog(tmp_path / "log", files=HastyFiles())
    append_each(log, [batch(0, b"a")])
    log.close()
    edit(tmp_path / "log" / FIRST, lambda content: content.__delitem__(slice(FILE_HEADER_BYTES, None)))
    report = verify_log(tmp_path / "log")
    assert (report.findings, report.messages, report.next_sequence) == ([], 0, 0)


def test_one_segment(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES, segment_bytes=1)
    files = segment_files(tmp_path)
    report = verify_segment(files[1])
    assert (report.findings, report.messages, report.first_sequence, report.next_sequence) == ([], 2, 1, 3)
    flip(files[2], 40)
    assert verify_segment(files[1]).findings == []
    assert verify_segment(files[2]).damaged


# ---------------------------------------------------------------------- torn tails


def test_tail_torn_at_any_byte_is_not_damage(tmp_path: Path) -> None:
    make_log(tmp_path / "whole")
    for size in range(OFFSETS[-1]):
        path = copied(tmp_path / "whole", tmp_path / "torn") / FIRST
        os.truncate(path, size)
        report = verify_log(path.parent)
        start = max((offset for offset in OFFSETS if offset <= size), default=0)
        assert not report.damaged
        assert [brief(finding) for finding in report.findings] == (
            [] if size == start and size else [(Kind.TORN, FIRST, start, size, None, 0)]
        ), size
        whole = [one for one, end in zip(BATCHES, OFFSETS[1:], strict=True) if end <= size]
        assert report.records == len(whole)
        assert report.next_sequence == (whole[-1].next_sequence if whole else 0)


def test_zeros_at_the_end_are_no_finding(tmp_path: Path) -> None:
    """A broker writes them ahead."""
    path = make_log(tmp_path)
    edit(path, lambda content: content.extend(bytes(500)))
    assert verify_log(tmp_path).findings == []


def test_other_bytes_at_the_end_are_not_damage(tmp_path: Path) -> None:
    path = make_log(tmp_path)
    edit(path, lambda content: content.extend(bytes(400) + b"x" * 100))
    assert only(verify_log(tmp_path)) == (Kind.TORN, FIRST, OFFSETS[-1], OFFSETS[-1] + 500, None, 0)


def test_tail_torn_in_an_earlier_segment_is_damage(tmp_path: Path) -> None:
    make_log(tmp_path / "whole", segment_bytes=OFFSETS[2])
    first, second, _ = segment_files(tmp_path / "whole")
    assert int(second.stem) == 3
    for size in range(first.stat().st_size):
        path = copied(tmp_path / "whole", tmp_path / "torn") / FIRST
        os.truncate(path, size)
        report = verify_log(path.parent)
        assert report.damaged
        messages = 3 if size < OFFSETS[1] else 2
        assert report.lost_messages == messages, size
        assert report.findings[-1].next_sequence == 3
        assert (report.messages, report.next_sequence) == (6 - messages, 6)


def test_complete_record_at_the_end_is_not_reported_as_torn(tmp_path: Path) -> None:
    """Its header is damaged, and recovery would cut it off. Before that, it can still be saved."""
    for at in range(HEADER_BYTES):
        path = make_log(tmp_path / str(at))
        flip(path, OFFSETS[-2] + at)
        finding = only(verify_log(path.parent))
        # It is recognized by the checksum of its payload.
        kind = Kind.TORN if 8 <= at < 12 else Kind.DAMAGE
        assert finding == (
            kind,
            FIRST,
            OFFSETS[-2],
            OFFSETS[-1],
            4 if kind is Kind.DAMAGE else None,
            None if kind is Kind.DAMAGE else 0,
        )


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("record", range(3))
@pytest.mark.parametrize("at", [0, 5, 10, 20, 30, 40, HEADER_BYTES - 1])
def test_damaged_header_in_the_middle(tmp_path: Path, record: int, at: int) -> None:
    path = make_log(tmp_path)
    flip(path, OFFSETS[record] + at)
    damaged = BATCHES[record]
    assert only(verify_log(tmp_path)) == (
        Kind.DAMAGE,
        FIRST,
        OFFSETS[record],
        OFFSETS[record + 1],
        damaged.base_sequence,
        damaged.count,
    )


@pytest.mark.parametrize("record", range(4))
def test_damaged_payload(tmp_path: Path, record: int) -> None:
    path = make_log(tmp_path)
    damaged = BATCHES[record]
    flip(path, OFFSETS[record + 1] - 1)
    report = verify_log(tmp_path)
    assert only(report) == (
        Kind.DAMAGE,
        FIRST,
        OFFSETS[record],
        OFFSETS[record + 1],
        damaged.base_sequence,
        damaged.count,
    )
    assert (report.records, report.messages, report.next_sequence) == (3, 6 - damaged.count, 6)


@pytest.mark.parametrize("at", range(FILE_HEADER_BYTES))
def test_damaged_file_header(tmp_path: Path, at: int) -> None:
    path = make_log(tmp_path, segment_bytes=1)
    flip(path, at)
    report = verify_log(tmp_path)
    finding = only(report)
    assert finding == (Kind.DAMAGE, FIRST, 0, FILE_HEADER_BYTES, None, 0)
    assert report.messages == 6
    # Also without the file that has the expected header.
    (tmp_path / "incarnation").unlink()
    assert verify_log(tmp_path) == report


def test_segment_of_another_log(tmp_path: Path) -> None:
    """Before and after a broker has seen it."""
    make_log(tmp_path / "log", segment_bytes=1)
    make_log(tmp_path / "other", segment_bytes=1)
    first = tmp_path / "log" / FIRST
    shutil.copy(tmp_path / "other" / FIRST, first)
    report = verify_log(tmp_path / "log")
    assert only(report) == (Kind.DAMAGE, FIRST, 0, first.stat().st_size, 0, 1)
    assert (
        "it belongs to another topic; the broker renames the file at its next start"
        in report.findings[0].what
    )
    assert report.messages == 5
    DiskLog(tmp_path / "log", files=HastyFiles()).close()
    report = verify_log(tmp_path / "log")
    assert only(report) == (Kind.NOTE, f"{FIRST}.foreign", 0, 0, None, 0)
    assert not report.damaged


def test_missing_segment(tmp_path: Path) -> None:
    make_log(tmp_path, segment_bytes=1)
    files = segment_files(tmp_path)
    files[1].unlink()
    size = files[0].stat().st_size
    assert only(verify_log(tmp_path)) == (Kind.DAMAGE, FIRST, size, size, 1, 2)


def test_empty_file_in_the_middle(tmp_path: Path) -> None:
    make_log(tmp_path, segment_bytes=1)
    files = segment_files(tmp_path)
    files[1].write_bytes(b"")
    assert only(verify_log(tmp_path)) == (Kind.DAMAGE, files[1].name, 0, 0, 1, 2)


def test_file_that_is_named_like_a_segment(tmp_path: Path) -> None:
    make_log(tmp_path)
    (tmp_path / "notes.log").write_text("remember the milk")
    report = verify_log(tmp_path)
    assert only(report) == (Kind.DAMAGE, "notes.log", 0, 0, None, 0)
    assert (report.segments, report.messages) == (1, 6)


def test_record_of_another_file_is_not_accepted(tmp_path: Path) -> None:
    other = make_log(tmp_path / "other", [batch(0, b"x"), batch(1, b"a record that was published")])
    make_log(tmp_path / "log", [batch(0, b"a"), batch(1, other.read_bytes()), batch(2, b"b")])
    flip(tmp_path / "log" / FIRST, OFFSETS[1])
    report = verify_log(tmp_path / "log")
    assert (report.messages, report.lost_messages) == (2, 1)


def test_missing_and_repeated_sequences(tmp_path: Path) -> None:
    path = make_log(tmp_path, BATCHES[:1])
    seed = int.from_bytes(path.read_bytes()[12:16], "big")
    odd = [batch(5, b"later"), batch(2, b"again"), batch(6, b"last")]
    with path.open("ab") as file:
        for one in odd:
            file.write(encode_header(one, seed) + one.messages.data)
    report = verify_log(tmp_path)
    offsets = record_offsets(odd, OFFSETS[1])
    assert [brief(finding) for finding in report.findings] == [
        (Kind.DAMAGE, FIRST, offsets[0], offsets[0], 1, 4),
        (Kind.DAMAGE, FIRST, offsets[1], offsets[2], None, 0),
    ]
    assert (report.messages, report.next_sequence) == (3, 7)


def test_sequences_that_belong_to_the_next_segment(tmp_path: Path) -> None:
    """As in `DiskLog`, the names of the files decide."""
    make_log(tmp_path, segment_bytes=OFFSETS[2])
    _, second, _ = segment_files(tmp_path)
    second.unlink()
    first = tmp_path / FIRST
    seed = int.from_bytes(first.read_bytes()[12:16], "big")
    beyond = batch(3, b"x", b"y")  # the third segment begins with 4
    with first.open("ab") as file:
        file.write(encode_header(beyond, seed) + beyond.messages.data)
    report = verify_log(tmp_path)
    assert (report.messages, report.next_sequence) == (5, 6)
    assert only(report) == (Kind.DAMAGE, FIRST, OFFSETS[2], first.stat().st_size, 3, 1)


@settings(max_examples=examples(300))
@given(
    flips=st.lists(st.integers(0, 2**20), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 2**20)),
    segment_bytes=st.sampled_from([1, 300, 10**6]),
)
def test_undamaged_messages_of_a_scan_equal_those_of_a_reader(
    tmp_path_factory: pytest.TempPathFactory, flips: list[int], cut: int | None, segment_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    batches = numbered(0, 12)
    make_log(folder, batches, segment_bytes)
    files = segment_files(folder)
    for place in flips:
        path = files[place % len(files)]
        # Not in the file's header: with all its records damaged, too, the log would continue far behind it.
        flip(path, FILE_HEADER_BYTES + place // len(files) % (path.stat().st_size - FILE_HEADER_BYTES))
    if cut is not None:
        most = files[-1].stat().st_size - FILE_HEADER_BYTES + 1
        os.truncate(files[-1], FILE_HEADER_BYTES + cut % most)
    report = verify_log(folder)
    log = DiskLog(folder, files=HastyFiles())
    found = contents(log)
    log.close()
    assert report.records == len(found)
    assert report.messages == sum(one.count for one in found)
    # Every message is accounted for. Recovery also cuts off damage before a torn record.
    assert log.next_sequence <= report.next_sequence
    if all(finding.messages is not None for finding in report.findings):
        assert report.messages + report.lost_messages == report.next_sequence


# ---------------------------------------------------------------------- disks and brokers


class Disk(Files):
    """Cannot read from `bad_from` on, or fails to open with `error`."""

    def __init__(self, bad_from: int | None = None, error: int | None = None) -> None:
        self._bad_from = bad_from
        self._error = error

    def open_read_only(self, path: Path) -> int:
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        return super().open_read_only(path)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if self._bad_from is not None and offset + size > self._bad_from:
            raise OSError(EIO, os.strerror(EIO))
        return super().read(fd, size, offset)


def test_unreadable_sector_is_a_finding(tmp_path: Path) -> None:
    make_log(tmp_path)
    report = verify_log(tmp_path, files=Disk(bad_from=OFFSETS[2] + 10))
    assert report.messages == 3
    assert only(report) == (Kind.DAMAGE, FIRST, OFFSETS[2], OFFSETS[-1], 3, None)


def test_unreadable_sector_behind_the_records_is_a_finding(tmp_path: Path) -> None:
    """Where a broker may have written zeros ahead."""
    path = make_log(tmp_path)
    edit(path, lambda content: content.extend(bytes(20_000)))
    report = verify_log(tmp_path, files=Disk(bad_from=OFFSETS[-1] + 10_000))
    assert only(report) == (Kind.DAMAGE, FIRST, OFFSETS[-1], OFFSETS[-1] + 20_000, 6, None)


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    make_log(tmp_path)
    with pytest.raises(LogReadError, match="Permission denied"):
        verify_log(tmp_path, files=Disk(error=EACCES))


def test_nothing_is_written(tmp_path: Path) -> None:
    make_log(tmp_path / "log", segment_bytes=OFFSETS[2])
    for path in segment_files(tmp_path / "log"):
        os.truncate(path, path.stat().st_size - 1)
        path.chmod(0o400)
    (tmp_path / "log").chmod(0o500)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in segment_files(tmp_path / "log")}
    assert verify_log(tmp_path / "log").damaged
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in segment_files(tmp_path / "log")}
    assert after == before
    (tmp_path / "log").chmod(0o700)


class BusyFiles(Files):
    """Calls a function before each read."""

    def __init__(self, happens: Callable[[int], None]) -> None:
        self.reads = 0
        self._happens = happens

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self.reads += 1
        self._happens(self.reads)
        return super().read(fd, size, offset)


def test_log_that_grows_during_the_scan(tmp_path: Path) -> None:
    """Between two reads, any part of a record may be at the end."""
    make_log(tmp_path / "grown")
    whole = (tmp_path / "grown" / FIRST).read_bytes()
    for step in (1, 7, 50):
        path = make_log(tmp_path / str(step), BATCHES[:1])
        shutil.copy(tmp_path / "grown" / "incarnation", path.parent)

        def grow(_reads: int, path: Path = path, step: int = step) -> None:
            size = path.stat().st_size
            with path.open("ab") as file:
                file.write(whole[size : size + step])

        os.truncate(path, OFFSETS[1])
        edit(path, lambda content: content.extend(whole[OFFSETS[1] : OFFSETS[1] + 1]))
        # The seed is that of the file it was copied from.
        edit(path, lambda content: content.__setitem__(slice(0, OFFSETS[1]), whole[: OFFSETS[1]]))
        report = verify_log(path.parent, files=BusyFiles(grow))
        assert not report.damaged
        assert report.messages >= 1


def test_segment_deleted_during_the_scan(tmp_path: Path) -> None:
    make_log(tmp_path, segment_bytes=1)
    files = segment_files(tmp_path)

    def delete(_reads: int) -> None:
        files[1].unlink(missing_ok=True)

    report = verify_log(tmp_path, files=BusyFiles(delete))
    assert not report.damaged
    assert only(report) == (Kind.NOTE, files[1].name, 0, 0, None, 0)


def test_append_withdrawn_during_the_scan(tmp_path: Path) -> None:
    path = make_log(tmp_path)
    edit(path, lambda content: content.extend(b"NSQB and what else there was room for"))

    def rollback(_reads: int) -> None:
        os.truncate(path, OFFSETS[-1])

    assert verify_log(tmp_path, files=BusyFiles(rollback)).findings == []


def test_partial_write_is_not_damage(tmp_path: Path) -> None:
    path = make_log(tmp_path)
    whole = path.read_bytes()
    edit(
        path,
        lambda content: content.__setitem__(slice(OFFSETS[1], OFFSETS[3]), bytes(OFFSETS[3] - OFFSETS[1])),
    )

    def write(reads: int) -> None:
        if reads > 2:  # after the file's header, and the first read after it
            path.write_bytes(whole)

    assert verify_log(tmp_path, files=BusyFiles(write)).findings == []


def test_partially_written_payload_is_not_damage(tmp_path: Path) -> None:
    path = make_log(tmp_path)
    whole = path.read_bytes()
    flip(path, OFFSETS[2] - 1)

    def write(reads: int) -> None:
        if reads > 2:
            path.write_bytes(whole)

    assert verify_log(tmp_path, files=BusyFiles(write)).findings == []


def test_incomplete_linked_batch(tmp_path: Path) -> None:
    linked = link(BATCHES[1:])
    whole = tmp_path / "whole"
    log = DiskLog(whole, files=HastyFiles())
    log.append([BATCHES[0], *linked], sync=False)
    log.close()
    assert verify_log(whole).messages == 6
    for size in range(OFFSETS[1] + 1, OFFSETS[-1]):
        torn = copied(whole, tmp_path / "torn")
        os.truncate(torn / FIRST, size)
        report = verify_log(torn)
        assert only(report) == (Kind.TORN, FIRST, OFFSETS[1], size, None, 0)
        assert report.messages == 1
        assert contents(DiskLog(torn, files=HastyFiles())) == BATCHES[:1]
