"""Tests for zeros that a log writes ahead of its records, so that small syncs need not make the file longer."""

import shutil
from collections.abc import Callable, Sequence
from errno import ENOSPC
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.support import FIRST, CountingFiles, HastyFiles, batch, check_usable, contents, link, record_offsets
from soak import examples
from trio_nsq.log import DiskLog, Files, LogWriteError, OpenFiles, RecordBatch
from trio_nsq.log.inspection.findings import Kind
from trio_nsq.log.inspection.log import InspectedLog
from trio_nsq.log.inspection.segments import segment_paths
from trio_nsq.log.inspection.verify import verify_log
from trio_nsq.log.segment.reader import Segment

BODY = b"x" * 200
MOST_ZEROS = 128 * 1024


def append(log: DiskLog, count: int, *, body: bytes = BODY) -> list[RecordBatch]:
    """Append messages, each with a sync."""
    made = [batch(log.next_sequence + n, body) for n in range(count)]
    for one in made:
        log.append([one], sync=True)
    return made


def zeros(folder: Path, log: DiskLog) -> int:
    """Return how many zeros follow the records of the last file."""
    path = max(folder.glob("*.log"))
    size = log.files[-1].size
    ahead = path.read_bytes()[size:]
    assert not ahead.strip(b"\0")
    return len(ahead)


class Sizes(Files):
    """Notes the sizes of a file at its syncs."""

    def __init__(self) -> None:
        self.synced: list[int] = []

    def sync(self, fd: int) -> None:
        self.synced.append(self.size(fd))
        super().sync(fd)


def test_few_small_syncs_make_the_file_longer(tmp_path: Path) -> None:
    files = Sizes()
    log = DiskLog(tmp_path, files=files)
    append(log, 2000)
    assert len(set(files.synced)) < 50
    assert 0 < zeros(tmp_path, log) <= MOST_ZEROS
    log.close()


def test_zeros_are_no_more_than_what_small_syncs_have_stored(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles())
    for _ in range(300):
        append(log, 1)
        assert zeros(tmp_path, log) <= log.files[-1].size
    log.close()


@pytest.mark.parametrize("size", [40_000, 300_000])
def test_large_syncs_have_no_zeros(tmp_path: Path, size: int) -> None:
    files = CountingFiles()
    log = DiskLog(tmp_path, files=files)
    append(log, 1)
    files.reset()
    append(log, 10, body=bytes(size))
    assert (files.writes, zeros(tmp_path, log)) == (10, 0)
    log.close()


def test_logs_that_are_not_synced_have_none(tmp_path: Path) -> None:
    log = DiskLog(tmp_path)
    for n in range(300):
        log.append([batch(n, BODY)], sync=False)
    assert zeros(tmp_path, log) == 0
    log.close()


def test_zeros_are_cut_off_by_a_close(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles())
    made = append(log, 300)
    assert zeros(tmp_path, log)
    log.close()
    assert (tmp_path / FIRST).stat().st_size == record_offsets(made)[-1]
    check_usable(tmp_path, made)


def test_close_after_the_folder_was_moved_away_reports_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Closes each file that need not stay open.
    log = DiskLog(tmp_path / "log", open_files=OpenFiles(HastyFiles(), 0))
    append(log, 300)
    assert zeros(tmp_path / "log", log)
    (tmp_path / "log").rename(tmp_path / "deleted")
    log.close()
    assert not caplog.records


def test_zeros_are_cut_off_before_the_next_file(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles(), segment_bytes=50_000)
    made = append(log, 300)
    assert len(log.files) == 2
    for path, facts in zip(sorted(tmp_path.glob("*.log"))[:-1], log.files, strict=False):
        assert path.stat().st_size == facts.size
    assert contents(log, 10**6) == made
    log.close()


def test_cut_of_the_zeros_is_durable_before_the_next_file(tmp_path: Path) -> None:
    """A file with zeros at its end would count as damaged if another one follows."""
    log = DiskLog(tmp_path, files=HastyFiles())
    append(log, 300)
    assert zeros(tmp_path, log)
    log.finish_cut()
    assert (zeros(tmp_path, log), log.has_unsynced_cut) == (0, True)
    log.close()


def test_zeros_after_a_kill_are_cut_off_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = DiskLog(tmp_path / "log", files=HastyFiles())
    made = append(log, 300)
    assert zeros(tmp_path / "log", log)
    shutil.copytree(tmp_path / "log", tmp_path / "killed")
    assert verify_log(tmp_path / "log").findings == []
    log.close()
    assert verify_log(tmp_path / "killed").findings == []
    check_usable(tmp_path / "killed", made)
    assert caplog.records == []


def test_readers_without_a_broker_see_records_in_the_place_of_zeros(tmp_path: Path) -> None:
    """Such records do not change the size of the file."""
    log = DiskLog(tmp_path, files=HastyFiles())
    recovered: dict[tuple[Path, int], Segment] = {}

    def end() -> int:
        return InspectedLog(tmp_path, Files(), segment_paths(tmp_path, Files())[0], recovered).next_sequence

    append(log, 300)
    assert (end(), end()) == (300, 300)
    size = (tmp_path / FIRST).stat().st_size
    append(log, 5)
    assert (tmp_path / FIRST).stat().st_size == size
    assert (end(), end()) == (305, 305)
    log.close()
    assert end() == 305


def test_readers_without_a_broker_end_before_a_torn_record(tmp_path: Path) -> None:
    """They do not know what is stable: the next messages of the broker may get its sequences."""
    log = DiskLog(tmp_path / "log", files=HastyFiles())
    made = append(log, 300)
    shutil.copytree(tmp_path / "log", tmp_path / "cut")
    log.close()
    data = bytearray((tmp_path / "cut" / FIRST).read_bytes())
    end = record_offsets(made)[-1]
    data[end - 100 : end] = bytes(100)
    (tmp_path / "cut" / FIRST).write_bytes(data)
    found = InspectedLog(tmp_path / "cut", Files(), segment_paths(tmp_path / "cut", Files())[0], {})
    assert found.next_sequence == 299
    log = DiskLog(tmp_path / "cut", files=HastyFiles(), stable_end=1)
    assert log.next_sequence == 299
    log.close()


class Full(HastyFiles):
    """A disk that has no space for the next write of zeros, or of anything that a condition selects."""

    refuses: Callable[[bytes], bool] = staticmethod(lambda data: False)
    refused = 0

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        if self.refuses(data):
            self.refused += 1
            super().write(fd, offset, [data[: len(data) // 2]])
            raise OSError(ENOSPC, "No space left on device")
        super().write(fd, offset, parts)


def test_log_goes_on_without_space_for_zeros(tmp_path: Path) -> None:
    files = Full()
    files.refuses = lambda data: not data.strip(b"\0")
    log = DiskLog(tmp_path, files=files)
    made = append(log, 300)
    assert (files.refused, zeros(tmp_path, log)) == (1, 0)
    log.close()
    check_usable(tmp_path, made)


def test_failed_write_frees_the_zeros(tmp_path: Path) -> None:
    files = Full()
    log = DiskLog(tmp_path, files=files)
    made = append(log, 300)
    assert zeros(tmp_path, log)
    files.refuses = lambda data: True
    with pytest.raises(LogWriteError):
        append(log, 1)
    assert zeros(tmp_path, log) == 0
    files.refuses = lambda data: False
    made += append(log, 100)
    assert zeros(tmp_path, log) == 0  # the disk is nearly full
    log.close()
    check_usable(tmp_path, made)


def test_refused_messages_do_not_come_back_from_the_place_of_zeros(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, files=HastyFiles())
    made = append(log, 300)
    log.write([batch(300, b"refused")])
    log.rollback()
    assert zeros(tmp_path, log) == 0
    made += append(log, 3)
    assert zeros(tmp_path, log)
    shutil.copytree(tmp_path, tmp_path / "killed")
    log.close()
    check_usable(tmp_path / "killed", made)


@settings(deadline=None, max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(1, 6000), min_size=1, max_size=4),
    linked=st.booleans(),
    torn=st.floats(0, 1),
    ahead=st.integers(1, 20_000),
)
def test_record_torn_at_any_byte_of_the_zeros_is_not_damaged(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], linked: bool, torn: float, ahead: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "torn-in-zeros"
    shutil.rmtree(folder, ignore_errors=True)
    stable = [batch(n, b"stable") for n in range(3)]
    unsynced = [batch(3 + n, bytes([1 + size % 255]) * size) for n, size in enumerate(sizes)]
    made = [*stable, *(link(unsynced) if linked else unsynced)]
    log = DiskLog(folder, files=HastyFiles())
    log.append(made, sync=True)
    log.close()
    data = (folder / FIRST).read_bytes()
    start = record_offsets(made)[len(stable)]
    end = start + round(torn * (len(data) - start))
    (folder / FIRST).write_bytes(data[:end] + bytes(len(data) - end + ahead))
    assert {finding.kind for finding in verify_log(folder, stable_end=3).findings} <= {Kind.TORN}
    log = DiskLog(folder, files=HastyFiles(), stable_end=3)
    found, following = contents(log, 10**6), log.next_sequence
    log.close()
    assert found == made[: len(found)]
    assert len(found) == following >= len(stable)  # nothing counts as damaged
    assert not (found and found[-1].has_next)
    check_usable(folder, found)


@pytest.mark.parametrize(
    ("body", "offsets"), [(BODY, (0, 5, 20, 70, 200)), (b"x" * 190 + bytes(10), (0, 5, 20))]
)
def test_damaged_last_record_is_still_reported(tmp_path: Path, body: bytes, offsets: Sequence[int]) -> None:
    """Of a header, its payload shows that it was whole; of a payload, that it does not end in zeros."""
    log = DiskLog(tmp_path / "log", files=HastyFiles())
    made = append(log, 300, body=body)
    assert zeros(tmp_path / "log", log)
    offset = record_offsets(made)[-2]
    for at in offsets:
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(tmp_path / "log", tmp_path / "damaged")
        data = bytearray((tmp_path / "damaged" / FIRST).read_bytes())
        data[offset + at] ^= 0x10
        (tmp_path / "damaged" / FIRST).write_bytes(data)
        report = verify_log(tmp_path / "damaged", stable_end=1)
        assert [finding.kind for finding in report.findings] == [Kind.DAMAGE], at
    log.close()
