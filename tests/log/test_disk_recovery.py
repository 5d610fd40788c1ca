"""Tests for opening a log after a crash, damage or changes by users: it keeps as much as possible, and
reports the rest.
"""

import logging
import random
import shutil
from collections.abc import Sequence
from errno import EIO
from pathlib import Path

import pytest

from log.support import (
    FILE_HEADER_BYTES,
    FIRST,
    FailingFiles,
    HastyFiles,
    append_each,
    batch,
    check_usable,
    contents,
    copied,
    link,
    numbered,
    open_descriptors,
    open_descriptors_before,
    record_offsets,
    segment_files,
)
from soak import some
from trio_nsq.log import DiskLog, LogReadError, NotASegmentError, RecordBatch
from trio_nsq.log.files import OpenFiles, OverlayFiles
from trio_nsq.log.records import HEADER_BYTES
from trio_nsq.log.segment.reader import Segment
from trio_nsq.log.segment.recovery import recover

BATCHES = [batch(0, b"a"), batch(1, b"bc", b"def"), batch(3, b"g" * 20), batch(4, b"h", b"ij")]
LOGGER = "trio_nsq.log"


def make_log(
    folder: Path, batches: Sequence[RecordBatch], segment_bytes: int = 10**6, *, together: bool = False
) -> None:
    log = DiskLog(folder, segment_bytes=segment_bytes, files=HastyFiles())
    if together:
        log.append(batches, sync=False)
    else:
        append_each(log, batches)
    log.close()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the reports of damage, and clear them."""
    found = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    caplog.clear()
    return found


# ---------------------------------------------------------------------- several records of one batch of messages

LINKED = [
    batch(0, b"a"),
    *link([batch(1, b"bc", b"def"), batch(3, b"g" * 20), batch(4, b"h")]),
    batch(5, b"ij"),
]


def test_incomplete_linked_batch_is_cut_off(tmp_path: Path) -> None:
    make_log(tmp_path / "whole", [LINKED[0], *LINKED[1:4]], together=True)
    offsets = record_offsets(LINKED[:4])
    for size in some(range(offsets[1], offsets[-1]), *offsets):
        folder = copied(tmp_path / "whole", tmp_path / "torn")
        with (folder / FIRST).open("r+b") as file:
            file.truncate(size)
        check_usable(folder, LINKED[:1])
    check_usable(tmp_path / "whole", LINKED[:4])


@pytest.mark.parametrize("part", ["header", "payload"])
@pytest.mark.parametrize("record", [1, 2, 3])
def test_damage_found_by_recovery_drops_all_records_of_the_batch(
    tmp_path: Path, record: int, part: str
) -> None:
    make_log(tmp_path / "log", LINKED, together=True)
    offsets = record_offsets(LINKED)
    flip(tmp_path / "log" / FIRST, offsets[record] + (10 if part == "header" else HEADER_BYTES + 4))
    for _ in range(2):  # also at the next start
        log = DiskLog(tmp_path / "log", files=HastyFiles())
        assert contents(log) == [LINKED[0], LINKED[4]]
        log.close()
    check_usable(tmp_path / "log", [LINKED[0], LINKED[4]])


def test_linked_batch_can_be_read_from_any_of_its_messages(tmp_path: Path) -> None:
    make_log(tmp_path / "log", LINKED, together=True)
    log = DiskLog(tmp_path / "log", files=HastyFiles())
    assert [header.has_next for header in log.headers(0)] == [False, True, True, False, False]
    for sequence in range(6):
        assert log.read(sequence, 1)[0].base_sequence <= sequence < log.read(sequence, 1)[0].next_sequence
    log.close()


# ---------------------------------------------------------------------- torn tails


def test_tail_torn_at_any_byte(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_log(tmp_path / "whole", BATCHES)
    offsets = record_offsets(BATCHES)
    assert (tmp_path / "whole" / FIRST).stat().st_size == offsets[-1]
    for size in some(range(offsets[-1] + 1), *offsets, FILE_HEADER_BYTES - 1):
        folder = copied(tmp_path / "whole", tmp_path / "torn")
        with (folder / FIRST).open("r+b") as file:
            file.truncate(size)
        whole = [one for one, end in zip(BATCHES, offsets[1:], strict=True) if end <= size]
        check_usable(folder, whole)
        end = record_offsets(whole)[-1]
        if size < FILE_HEADER_BYTES:
            assert complaints(caplog) == [f"{folder / FIRST}: removed, it holds no record"]
        elif size > end:
            assert complaints(caplog) == [
                f"{folder / FIRST}: cut {size - end} bytes of an unfinished record at byte {end}"
            ]
        else:
            assert complaints(caplog) == []


def test_tail_torn_at_any_byte_after_another_segment(tmp_path: Path) -> None:
    make_log(tmp_path / "whole", BATCHES, segment_bytes=1)
    last = segment_files(tmp_path / "whole")[-1]
    for size in some(range(last.stat().st_size), FILE_HEADER_BYTES, FILE_HEADER_BYTES + HEADER_BYTES):
        folder = copied(tmp_path / "whole", tmp_path / "torn")
        with (folder / last.name).open("r+b") as file:
            file.truncate(size)
        check_usable(folder, BATCHES[:-1])


@pytest.mark.parametrize(
    "tail", [b"\0", b"\0" * 55, b"\0" * 56, b"\0" * 5000, b"\0" * 3_000_000, b"NSQB", b"x" * 500]
)
def test_invalid_bytes_at_the_end(tmp_path: Path, tail: bytes) -> None:
    """A file system may extend the file before it writes the data."""
    make_log(tmp_path, BATCHES)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(tail)
    check_usable(tmp_path, BATCHES)


def test_zeros_at_the_end(tmp_path: Path) -> None:
    """The full length, without the last bytes. A record that is lost this way was not acknowledged."""
    make_log(tmp_path / "whole", BATCHES)
    content = (tmp_path / "whole" / FIRST).read_bytes()
    offsets = record_offsets(BATCHES)
    for size in some(
        range(FILE_HEADER_BYTES, offsets[-1] - 3), *offsets
    ):  # a longer tail would not change the result
        folder = copied(tmp_path / "whole", tmp_path / "torn")
        (folder / FIRST).write_bytes(content[:size].ljust(len(content), b"\0"))
        whole = [one for one, end in zip(BATCHES, offsets[1:], strict=True) if end <= size]
        check_usable(folder, whole)


def test_recovery_runs_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_log(tmp_path, BATCHES)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(b"x" * 100)
    DiskLog(tmp_path).close()
    assert len(complaints(caplog)) == 1
    DiskLog(tmp_path).close()
    assert complaints(caplog) == []
    assert (tmp_path / FIRST).stat().st_size == record_offsets(BATCHES)[-1]


def test_zeros_that_were_written_ahead_are_cut_off_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_log(tmp_path, BATCHES)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(bytes(100_000))
    check_usable(tmp_path, BATCHES)
    assert complaints(caplog) == []


# ---------------------------------------------------------------------- damage


def damaged_index(at: int, offsets: Sequence[int]) -> int:
    """Return the index of the record with this byte."""
    return next(i for i, end in enumerate(offsets[1:]) if at < end)


def test_bit_flipped_at_any_byte_of_the_last_segment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found at the start, costs that record, is reported, and its sequences are not reused."""
    make_log(tmp_path / "whole", BATCHES)
    offsets = record_offsets(BATCHES)
    for at in some(range(FILE_HEADER_BYTES, offsets[-1]), *offsets):
        folder = copied(tmp_path / "whole", tmp_path / "damaged")
        flip(folder / FIRST, at)
        index = damaged_index(at, offsets)
        expected = [*BATCHES[:index], *BATCHES[index + 1 :]]
        log = DiskLog(folder, files=HastyFiles())
        assert contents(log) == expected
        # A last record without a valid header looks like one that was being written.
        cut = index == len(BATCHES) - 1 and at < offsets[index] + HEADER_BYTES
        assert log.next_sequence == (BATCHES[index].base_sequence if cut else BATCHES[-1].next_sequence)
        log.close()
        (complaint,) = complaints(caplog)
        assert str(folder / FIRST) in complaint
        assert f"byte {offsets[index]}" in complaint
        check_usable(folder, expected)
        caplog.clear()


def test_bit_flipped_at_any_byte_of_an_old_segment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is found by a read: old segments are not checked at the start."""
    make_log(tmp_path / "whole", BATCHES, segment_bytes=record_offsets(BATCHES)[-1])
    log = DiskLog(tmp_path / "whole", segment_bytes=1)
    log.append([batch(6, b"in another segment")], sync=False)
    log.close()
    offsets = record_offsets(BATCHES)
    for at in some(range(FILE_HEADER_BYTES, offsets[-1]), *offsets):
        folder = copied(tmp_path / "whole", tmp_path / "damaged")
        flip(folder / FIRST, at)
        index = damaged_index(at, offsets)
        expected = [*BATCHES[:index], *BATCHES[index + 1 :], batch(6, b"in another segment")]
        log = DiskLog(folder, files=HastyFiles())
        assert complaints(caplog) == []
        for max_bytes in (0, 70, 1000):
            assert contents(log, max_bytes) == expected
        (complaint,) = complaints(caplog)  # reported once, however often it is read
        assert str(folder / FIRST) in complaint
        assert f"byte {offsets[index]}" in complaint
        # Reading from the damaged message returns the following ones.
        assert log.read(BATCHES[index].base_sequence)[0] == expected[index]
        assert log.next_sequence == 7
        log.close()


def test_bit_flipped_while_the_log_is_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    offsets = record_offsets(BATCHES)
    for at in some(range(FILE_HEADER_BYTES, offsets[-1]), *offsets):
        folder = tmp_path / str(at)
        log = DiskLog(folder, files=HastyFiles())
        append_each(log, BATCHES)
        with (folder / FIRST).open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0x40]))
        index = damaged_index(at, offsets)
        expected = [*BATCHES[:index], *BATCHES[index + 1 :]]
        assert contents(log) == expected
        following = batch(log.next_sequence, b"next")
        log.append([following], sync=False)
        assert log.next_sequence == 7
        assert contents(log) == [*expected, following]
        assert log.read(BATCHES[index].base_sequence)[0] == [*expected, following][index]
        assert len(complaints(caplog)) == 1
        log.close()


def test_headers_skip_damage(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES)
    offsets = record_offsets(BATCHES)
    flip(tmp_path / FIRST, offsets[1] + 30)  # a header
    flip(tmp_path / FIRST, offsets[2] + HEADER_BYTES + 5)  # a payload, which is not read
    log = DiskLog(tmp_path)
    assert [header.base_sequence for header in log.headers(0)] == [0, 3, 4]
    assert [header.base_sequence for header in log.headers(1)] == [3, 4]
    log.close()


def test_fully_damaged_old_segment_costs_that_segment(tmp_path: Path) -> None:
    batches = numbered(0, 20)
    make_log(tmp_path, batches, segment_bytes=300)
    second, third = segment_files(tmp_path)[1:3]
    size = second.stat().st_size
    second.write_bytes(second.read_bytes()[:FILE_HEADER_BYTES] + b"?" * (size - FILE_HEADER_BYTES))
    lost = range(int(second.stem), int(third.stem))
    check_usable(tmp_path, [one for one in batches if one.base_sequence not in lost])


def test_reader_waits_at_damage_at_the_end_of_an_open_log(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles())
    append_each(log, BATCHES)
    flip(tmp_path / FIRST, record_offsets(BATCHES)[3] + HEADER_BYTES)
    assert log.read(4) == []
    assert log.read(4) == []
    log.append([batch(6, b"next")], sync=False)
    assert log.read(4) == [batch(6, b"next")]
    log.close()


def test_large_damaged_range_is_skipped(tmp_path: Path) -> None:
    """Larger than one search window, with headers at the window boundaries."""
    mib = 1024 * 1024
    places = [mib + 1, mib + 50, mib + 56, *[2 * mib + shift for shift in (-57, -56, -55, -3, -2, -1, 0, 1)]]
    for place in places:
        folder = tmp_path / str(place)
        start = FILE_HEADER_BYTES + 1  # of the search
        big = batch(0, b"x" * (start + place - FILE_HEADER_BYTES - HEADER_BYTES - 4))
        make_log(folder, [big, batch(1, b"after")], segment_bytes=10**7)
        assert record_offsets([big])[-1] == start + place
        flip(folder / FIRST, FILE_HEADER_BYTES + 10)
        log = DiskLog(folder, files=HastyFiles())
        assert contents(log) == [batch(1, b"after")]
        log.close()


@pytest.mark.parametrize("size", [1, 2, 55, 56, 57, 1000])
def test_inserted_bytes_between_records(tmp_path: Path, size: int) -> None:
    for kind, garbage in enumerate((b"\0" * size, b"N" * size, b"NSQB".ljust(size, b"?")[:size])):
        for n in range(len(BATCHES)):
            folder = tmp_path / f"{kind} {n}"
            make_log(folder, BATCHES)
            content = (folder / FIRST).read_bytes()
            at = record_offsets(BATCHES)[n]
            (folder / FIRST).write_bytes(content[:at] + garbage + content[at:])
            check_usable(folder, BATCHES)


def test_overlapping_segments_have_no_duplicates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A newer segment was copied beside an older one: the newer one is used."""
    make_log(tmp_path / "old", [batch(n, b"old") for n in range(6)])
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "old" / "incarnation", tmp_path / "new")
    make_log(tmp_path / "new", [batch(n, b"new") for n in range(6)], segment_bytes=FILE_HEADER_BYTES + 3 * 63)
    newer = f"{3:020d}.log"
    (tmp_path / "old" / newer).write_bytes((tmp_path / "new" / newer).read_bytes())
    expected = [*[batch(n, b"old") for n in range(3)], *[batch(n, b"new") for n in range(3, 6)]]
    log = DiskLog(tmp_path / "old", files=HastyFiles())
    assert [header.base_sequence for header in log.headers(0)] == list(range(6))
    for n in range(6):
        assert log.read(n, 0) == [expected[n]]
    log.close()
    assert len(complaints(caplog)) == 1
    check_usable(tmp_path / "old", expected)


def test_truncated_old_segment_at_any_byte(tmp_path: Path) -> None:
    later = [batch(6, b"in another segment"), batch(7, b"and on")]
    make_log(tmp_path / "whole", BATCHES, segment_bytes=record_offsets(BATCHES)[-1])
    log = DiskLog(tmp_path / "whole", segment_bytes=1)
    log.append(later, sync=False)
    log.close()
    offsets = record_offsets(BATCHES)
    for size in some(range(offsets[-1]), *offsets):
        folder = copied(tmp_path / "whole", tmp_path / "cut")
        with (folder / FIRST).open("r+b") as file:
            file.truncate(size)
        whole = [one for one, end in zip(BATCHES, offsets[1:], strict=True) if end <= size]
        check_usable(folder, [*whole, *later])


@pytest.mark.parametrize("at", [5, HEADER_BYTES + 60, HEADER_BYTES + 200])
@pytest.mark.parametrize("in_an_old_segment", [True, False])
def test_messages_that_look_like_records_are_not_read_as_records(
    tmp_path: Path, at: int, in_an_old_segment: bool
) -> None:
    """Bodies are pieces of this log and of others, and the record around them is damaged."""
    old = [batch(0, b"old"), batch(1, b"older")]
    make_log(tmp_path / "log", old)
    make_log(tmp_path / "another", [batch(0, b"x"), *[batch(n, b"from another") for n in range(1, 50)]])
    of_this = (tmp_path / "log" / FIRST).read_bytes()[FILE_HEADER_BYTES:]
    of_another = (tmp_path / "another" / FIRST).read_bytes()[FILE_HEADER_BYTES:]
    around = batch(2, of_another, of_this, of_another)
    after = [batch(5, b"last"), batch(6, b"very last")]
    log = DiskLog(tmp_path / "log")
    append_each(log, [around, *after])
    log.close()
    if in_an_old_segment:
        log = DiskLog(tmp_path / "log", segment_bytes=1)
        log.append([batch(7, b"in another segment")], sync=False)
        log.close()
        after.append(batch(7, b"in another segment"))
    assert contents_of(tmp_path / "log") == [*old, around, *after]
    flip(tmp_path / "log" / FIRST, record_offsets(old)[-1] + at)
    check_usable(tmp_path / "log", [*old, *after])


def contents_of(folder: Path) -> list[RecordBatch]:
    log = DiskLog(folder, files=HastyFiles())
    found = contents(log)
    log.close()
    return found


# ---------------------------------------------------------------------- files that are not segments


@pytest.mark.parametrize("at", some(range(FILE_HEADER_BYTES)))
@pytest.mark.parametrize("segment_bytes", [1, 10**6])
def test_damaged_byte_in_the_header_of_a_file_costs_nothing(
    tmp_path: Path, at: int, segment_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    make_log(tmp_path, BATCHES, segment_bytes)
    for path in (segment_files(tmp_path)[0], segment_files(tmp_path)[-1]):
        caplog.clear()
        flip(path, at)
        assert contents_of(tmp_path) == BATCHES
        assert complaints(caplog) == [f"{path}: its header is damaged; its records are still readable"]
        flip(path, at)
    flip(path, at)
    check_usable(tmp_path, BATCHES)


@pytest.mark.parametrize("zeros", [1, 8, 32, FILE_HEADER_BYTES])
@pytest.mark.parametrize("first_record_too", [False, True])
def test_header_of_zeros_costs_nothing(tmp_path: Path, zeros: int, first_record_too: bool) -> None:
    make_log(tmp_path, BATCHES)
    content = (tmp_path / FIRST).read_bytes()
    damaged = bytes(zeros) + content[zeros:]
    if first_record_too:
        damaged = (
            damaged[:FILE_HEADER_BYTES] + bytes(HEADER_BYTES) + damaged[FILE_HEADER_BYTES + HEADER_BYTES :]
        )
    (tmp_path / FIRST).write_bytes(damaged)
    check_usable(tmp_path, BATCHES[1:] if first_record_too else BATCHES)


def test_file_of_a_newer_version_is_refused_and_unchanged(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES)
    content = (tmp_path / FIRST).read_bytes()
    newer = content[:9] + b"\3" + content[10:FILE_HEADER_BYTES] + bytes(16) + b"records of another kind"
    (tmp_path / FIRST).write_bytes(newer)
    with pytest.raises(NotASegmentError) as caught:
        DiskLog(tmp_path)
    reason = "its version is 3, this program reads versions 1 to 2"
    assert (
        str(caught.value)
        == f"{tmp_path / FIRST} is not a log segment ({reason}): move it out of the data folder"
    )
    assert (tmp_path / FIRST).read_bytes() == newer


@pytest.mark.parametrize(
    "name",
    [
        "notes.log",
        ".log",
        "0.log",
        "1" * 19 + ".log",
        "0" * 21 + ".log",
        "-" + "0" * 19 + ".log",
        " " * 20 + ".log",
        "\u0660" * 20 + ".log",  # digits, but not ASCII
    ],
)
@pytest.mark.parametrize("content", [b"", b"\0" * 10, b"2024-01-01 INFO started\n" * 10])
def test_stray_file_is_refused_and_unchanged(tmp_path: Path, name: str, content: bytes) -> None:
    make_log(tmp_path, BATCHES)
    (tmp_path / name).write_bytes(content)
    before = open_descriptors_before()
    with pytest.raises(NotASegmentError) as caught:
        DiskLog(tmp_path)
    assert caught.value.path == tmp_path / name
    assert (tmp_path / name).read_bytes() == content
    assert open_descriptors() == before  # files opened before are closed
    (tmp_path / name).unlink()
    check_usable(tmp_path, BATCHES)


def test_renamed_segment_is_refused(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES)
    (tmp_path / FIRST).rename(tmp_path / f"{1:020d}.log")
    with pytest.raises(NotASegmentError, match="it was renamed"):
        DiskLog(tmp_path)
    (tmp_path / f"{1:020d}.log").rename(tmp_path / FIRST)
    check_usable(tmp_path, BATCHES)


def test_copy_of_a_segment_beside_it_is_refused(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES)
    (tmp_path / f"{0:020d} (copy).log").write_bytes((tmp_path / FIRST).read_bytes())
    with pytest.raises(NotASegmentError, match="its name is not a sequence"):
        DiskLog(tmp_path)


def test_folder_named_like_a_segment_is_refused(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES)
    (tmp_path / f"{99:020d}.log").mkdir()
    before = open_descriptors_before()
    with pytest.raises(LogReadError, match="Is a directory"):
        DiskLog(tmp_path)
    assert open_descriptors() == before


@pytest.mark.parametrize("content", [b"hello", b"hello" * 100, bytes(500)])
@pytest.mark.parametrize("name", ["first", "last"])
def test_file_without_a_header_or_a_record_is_renamed(
    tmp_path: Path, content: bytes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_log(tmp_path, BATCHES, segment_bytes=1)
    path = segment_files(tmp_path)[0 if name == "first" else -1]
    path.write_bytes(content)
    expected = BATCHES[1:] if name == "first" else BATCHES[:-1]
    assert contents_of(tmp_path) == expected
    assert not path.exists()
    assert path.with_name(path.name + ".damaged").read_bytes() == content
    assert any(f"{path}: set aside as {path.name}.damaged" in said for said in complaints(caplog))
    log = DiskLog(tmp_path, files=HastyFiles())
    assert log.next_sequence >= 6  # the sequences of its messages are not reused
    log.close()
    check_usable(tmp_path, expected)


@pytest.mark.parametrize("base", [1, 2, 10**6])
def test_last_segment_is_recovered_in_spite_of_a_stray_file_after_it(tmp_path: Path, base: int) -> None:
    make_log(tmp_path, BATCHES)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(b"NSQB torn")
    (tmp_path / f"{base:020d}.log").write_bytes(b"hello")
    check_usable(tmp_path, BATCHES)
    assert (tmp_path / FIRST).stat().st_size == record_offsets(BATCHES)[-1]


def test_renaming_replaces_no_file(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES, segment_bytes=1)
    path = segment_files(tmp_path)[0]
    for content in (b"one", b"two", b"three"):
        path.write_bytes(content)
        assert contents_of(tmp_path) == BATCHES[1:]
    aside = sorted(tmp_path.glob("*.damaged*"))
    assert [each.read_bytes() for each in aside] == [b"one", b"two", b"three"]


# ---------------------------------------------------------------------- files of other logs


def other_log(folder: Path, segment_bytes: int) -> list[RecordBatch]:
    """Make another log with the same sequences; return its batches."""
    batches = [batch(one.base_sequence, *[b"other"] * one.count) for one in BATCHES]
    make_log(folder, batches, segment_bytes)
    return batches


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("segment_bytes", [1, 10**6])
@pytest.mark.parametrize("noted", [True, False])
def test_segment_of_another_log_is_renamed_and_reported(
    tmp_path: Path, which: int, segment_bytes: int, noted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the log's incarnation is only in its segments, if there are several."""
    if segment_bytes > 1 and (which == 1 or not noted):
        return
    folder, other = tmp_path / "log", tmp_path / "other"
    make_log(folder, BATCHES, segment_bytes)
    other_log(other, segment_bytes)
    path = segment_files(folder)[which]
    shutil.copy(other / path.name, path)
    if not noted:
        (folder / "incarnation").unlink()
    base = int(path.stem)
    lost = [one for one in BATCHES if one.base_sequence == base] if segment_bytes == 1 else BATCHES
    left = [one for one in BATCHES if one not in lost]
    assert contents_of(folder) == left
    foreign = path.with_name(path.name + ".foreign")
    assert foreign.read_bytes() == (other / path.name).read_bytes()
    reason = f"it belongs to another topic, whose log is {other}"
    assert f"{path}: set aside as {foreign.name}: {reason}" in complaints(caplog)
    log = DiskLog(folder, files=HastyFiles())
    assert log.next_sequence >= 6
    log.close()
    check_usable(folder, left)
    check_usable(other, [batch(one.base_sequence, *[b"other"] * one.count) for one in BATCHES])


@pytest.mark.parametrize("at", some(range(FILE_HEADER_BYTES), 8))
def test_segment_of_another_log_with_a_damaged_header_is_not_read(tmp_path: Path, at: int) -> None:
    make_log(tmp_path / "log", BATCHES)
    other_log(tmp_path / "other", 10**6)
    path = tmp_path / "log" / FIRST
    shutil.copy(tmp_path / "other" / FIRST, path)
    flip(path, at)
    if at == 8:  # now it looks like a file of a newer version
        with pytest.raises(NotASegmentError, match="its version is 258"):
            DiskLog(tmp_path / "log")
        return
    assert contents_of(tmp_path / "log") == []
    assert path.with_name(FIRST + ".damaged").exists()


def test_restored_segment_is_read_again(tmp_path: Path) -> None:
    make_log(tmp_path / "log", BATCHES)
    other_log(tmp_path / "other", 10**6)
    ours, theirs = tmp_path / "log" / FIRST, tmp_path / "other" / FIRST
    ours.rename(tmp_path / "x")
    theirs.rename(ours)
    (tmp_path / "x").rename(theirs)
    assert contents_of(tmp_path / "log") == contents_of(tmp_path / "other") == []
    foreign = ours.with_name(FIRST + ".foreign"), theirs.with_name(FIRST + ".foreign")
    foreign[0].rename(theirs)
    foreign[1].rename(ours)
    assert contents_of(tmp_path / "log") == BATCHES
    check_usable(tmp_path / "log", BATCHES)


def test_recreated_log_has_another_incarnation(tmp_path: Path) -> None:
    make_log(tmp_path / "log", BATCHES)
    old = (tmp_path / "log" / FIRST).read_bytes()
    shutil.rmtree(tmp_path / "log")
    make_log(tmp_path / "log", [batch(0, b"new")])
    (tmp_path / "log" / f"{1:020d}.log").write_bytes(old)
    (tmp_path / "log" / FIRST).write_bytes(old)
    with pytest.raises(NotASegmentError, match="it was renamed"):
        DiskLog(tmp_path / "log")
    (tmp_path / "log" / f"{1:020d}.log").unlink()
    assert contents_of(tmp_path / "log") == []


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("segment_bytes", [1, 10**6])
def test_incarnation_file_is_recreated(
    tmp_path: Path, damage: str, segment_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    make_log(tmp_path, BATCHES, segment_bytes)
    path = tmp_path / "incarnation"
    whole = path.read_bytes()
    for at in some(range(len(whole))):
        if damage == "flip":
            flip(path, at)
        elif damage == "cut":
            path.write_bytes(whole[:at])
        else:
            path.unlink()
        caplog.clear()
        assert contents_of(tmp_path) == BATCHES
        assert len(complaints(caplog)) == (damage != "gone")
        assert path.read_bytes() == whole


def test_damaged_header_and_damaged_incarnation_file(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES)
    content = (tmp_path / FIRST).read_bytes()
    (tmp_path / FIRST).write_bytes(bytes(FILE_HEADER_BYTES) + content[FILE_HEADER_BYTES:])
    (tmp_path / "incarnation").unlink()
    assert contents_of(tmp_path) == BATCHES
    check_usable(tmp_path, BATCHES)


def test_nothing_is_renamed_while_the_disk_cannot_be_read(tmp_path: Path) -> None:
    """It may be readable again soon."""
    make_log(tmp_path, BATCHES, segment_bytes=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for missing in (False, True):
        files = FailingFiles()
        files.failing["read"] = EIO
        with pytest.raises(LogReadError):
            DiskLog(tmp_path, files=files)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        if not missing:
            (tmp_path / "incarnation").unlink()
            del before["incarnation"]
    check_usable(tmp_path, BATCHES)


# ---------------------------------------------------------------------- new segments


@pytest.mark.parametrize("left", [*some(range(FILE_HEADER_BYTES), 1, 31), "zeros", "some zeros", "middle"])
@pytest.mark.parametrize("end", ["missing", "zeros", "there, and the beginning is not"])
@pytest.mark.parametrize("segment_bytes", [1, 10**6])
def test_segment_that_was_being_created(
    tmp_path: Path, left: int | str, end: str, segment_bytes: int
) -> None:
    """At the crash it had no header, a part of one, or, without its data, zeros."""

    def of(header: bytes) -> bytes:
        if left == "middle":
            return bytes(10) + header[10:20] + bytes(12)
        if isinstance(left, str):
            return bytes(32 if left == "zeros" else 11)
        beginning = header[:left].ljust(FILE_HEADER_BYTES, b"\0")
        ends = {"missing": header[:left], "zeros": beginning}
        return ends.get(end, bytes(FILE_HEADER_BYTES - left) + header[FILE_HEADER_BYTES - left :])

    folder = tmp_path / "log"
    make_log(folder, [batch(0, b"x")])
    content = (folder / FIRST).read_bytes()[:FILE_HEADER_BYTES]
    (folder / FIRST).write_bytes(of(content))
    check_usable(folder, [])
    # And after others.
    folder = tmp_path / "with others"
    make_log(folder, [*BATCHES, batch(6, b"x" * 10**6)], segment_bytes)
    last = segment_files(folder)[-1]
    assert last.name == f"{6:020d}.log"
    last.write_bytes(of(last.read_bytes()[:FILE_HEADER_BYTES]))
    check_usable(folder, BATCHES)


class FolderSyncs(HastyFiles):
    """Records which folders are synced."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def sync_folder(self, path: Path) -> None:
        self.folders.append(path)


def test_name_of_an_empty_segment_is_made_durable(tmp_path: Path) -> None:
    """The process that created it may have been killed before."""
    log = DiskLog(tmp_path / "t")
    log.rotate()
    log.close()
    files = FolderSyncs()
    DiskLog(tmp_path / "t", files=files).close()
    assert files.folders == [tmp_path / "t"]


def test_segment_that_was_created_and_never_used(tmp_path: Path) -> None:
    make_log(tmp_path, BATCHES, segment_bytes=1)
    last = segment_files(tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:FILE_HEADER_BYTES])
    before = open_descriptors_before()
    log = DiskLog(tmp_path, segment_bytes=1)
    assert (contents(log), log.next_sequence) == (BATCHES[:3], 4)
    log.append(BATCHES[3:], sync=True)
    assert len(segment_files(tmp_path)) == 4  # it is used now
    assert open_descriptors() == before + 4
    assert contents(log) == BATCHES
    log.close()
    check_usable(tmp_path, BATCHES)


def test_empty_segment_in_the_middle_hides_nothing(tmp_path: Path) -> None:
    """A failed attempt to create it left it, and the previous segment was used further."""
    make_log(tmp_path / "other", [batch(0, b"x"), batch(1, b"y")], segment_bytes=1)
    (tmp_path / "log").mkdir()
    shutil.copy(tmp_path / "other" / "incarnation", tmp_path / "log")
    empty = (tmp_path / "other" / f"{1:020d}.log").read_bytes()[:FILE_HEADER_BYTES]
    folder = tmp_path / "log"
    make_log(folder, BATCHES)
    log = DiskLog(folder, segment_bytes=1)
    log.append([batch(6, b"in another segment")], sync=False)
    log.close()
    (folder / f"{1:020d}.log").write_bytes(empty)
    check_usable(folder, [*BATCHES, batch(6, b"in another segment")])
    assert not (folder / f"{1:020d}.log").exists()


@pytest.mark.parametrize("zeros", [8, 32, 4096])
def test_segment_with_an_overwritten_beginning_is_not_deleted(tmp_path: Path, zeros: int) -> None:
    batches = numbered(0, 100)
    make_log(tmp_path, batches, segment_bytes=2000)
    files = segment_files(tmp_path)[:2]
    damaged = {}
    for path in files:
        content = path.read_bytes()
        damaged[path] = bytes(min(zeros, len(content))) + content[zeros:]
        path.write_bytes(damaged[path])
    found = contents_of(tmp_path)
    if zeros < FILE_HEADER_BYTES:
        assert found == batches
    else:
        assert found == batches[-len(found) :]
        assert [path.with_name(path.name + ".damaged").read_bytes() for path in files] == list(
            damaged.values()
        )


def test_recovery_uses_the_logger_of_the_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_log(tmp_path, BATCHES)
    flip(tmp_path / FIRST, FILE_HEADER_BYTES + HEADER_BYTES)
    with caplog.at_level(logging.ERROR, LOGGER):
        contents_of(tmp_path)
    assert [(record.name, record.levelname) for record in caplog.records] == [(LOGGER, "ERROR")]


@pytest.mark.parametrize("damages", [False, True])
def test_recovery_of_a_file_that_has_grown_finds_what_that_of_the_whole_file_finds(
    tmp_path: Path, damages: bool
) -> None:
    chance = random.Random(1)
    folder = tmp_path / "t"
    log = DiskLog(folder, segment_bytes=10**6, files=HastyFiles())
    for _ in range(60):
        log.append(
            link(numbered(log.next_sequence, chance.randint(1, 5), size=chance.randint(1, 5000))), sync=False
        )
    log.close()
    (path,) = segment_files(folder)
    if damages:
        flip(path, path.stat().st_size // 2)
    whole = path.read_bytes()
    open_files = OpenFiles(OverlayFiles(), 1)
    known: Segment | None = None
    for size in [*sorted(chance.randint(FILE_HEADER_BYTES, len(whole)) for _ in range(40)), len(whole)]:
        path.write_bytes(whole[:size])
        found = []
        for known_before in (None, known):
            segment = Segment.open(open_files, path, None)
            assert segment is not None
            recover(open_files.files, segment, known=known_before)
            offsets = [segment.index.find(sequence) for sequence in range(segment.next_sequence)]
            times = segment.first_ns, segment.last_ns()
            found.append((segment.size, segment.next_sequence, segment.index.up_to, offsets, times))
        assert found[0] == found[1]
        known = segment
    assert known is not None
    assert known.next_sequence == log.next_sequence
