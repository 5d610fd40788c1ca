"""Tests for carrying messages forward, so that the files around them can be deleted."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from faults.disk import Disk, RecordingFiles, write_image
from log.support import FailingFiles, HastyFiles, append_each, batch, carry_forward, contents, numbered
from trio_nsq.log import DiskLog, LogReadError, LogWriteError, OpenFiles, RecordBatch
from trio_nsq.log.disk.carried_forward import FILE_NAME, CarriedForwardSegment
from trio_nsq.protocol import pack_messages

BATCHES = numbered(0, 40)
END = BATCHES[-1].next_sequence
PLENTY = 10**6


def full_log(folder: Path, **options: object) -> DiskLog:
    log = DiskLog(folder, segment_bytes=500, **({"files": HastyFiles()} | options))  # type: ignore[arg-type]
    append_each(log, BATCHES)
    return log


def bodies(log: DiskLog, *sequences: int) -> list[bytes | None]:
    """Return the log's bodies of these messages, read as for a redelivery."""
    found: list[bytes | None] = []
    for sequence in sequences:
        records = log.read(sequence, 1) if sequence >= log.first_sequence else []
        if not records or records[0].base_sequence > sequence:
            records = log.read_carried_forward(sequence)
        if records:
            found.append(records[0].messages.bodies()[sequence - records[0].base_sequence])
        else:
            found.append(None)
    return found


def body(sequence: int) -> bytes:
    return b"%010d" % sequence


def test_carried_messages_survive_the_deletion_of_their_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = full_log(tmp_path / "log")
    sequences = [1, 2, 3, 17, 40]
    assert carry_forward(log, sequences, PLENTY)
    log.discard_before(60)
    assert 40 < log.first_sequence <= 60
    for _ in range(2):
        assert bodies(log, *sequences, 60) == [body(n) for n in [*sequences, 60]]
        assert bodies(log, 0, 4, 16, 18, 39) == [None] * 5
        assert contents(log)[-1] == BATCHES[-1]
        assert contents(log)[0].base_sequence == log.first_sequence
        assert log.has_carried_forward
        log.close()
        log = DiskLog(tmp_path / "log", files=HastyFiles())
    log.close()
    assert not caplog.records


def test_damaged_message_is_not_carried_forward(tmp_path: Path) -> None:
    """Nor another one instead."""
    log = full_log(tmp_path / "log")
    for path in (tmp_path / "log").glob("*.log"):
        path.write_bytes(path.read_bytes().replace(body(17), body(99)))
    carry_forward(log, [16, 17, 40], PLENTY)
    log.discard_before(60)
    assert bodies(log, 17, 40) == [None, body(40)]
    assert log.read_carried_forward(18) == []
    log.close()


def test_deleted_carried_forward_segment_can_be_forgotten(tmp_path: Path) -> None:
    full_log(tmp_path / "log").close()
    for fewest_open in (False, True):
        log = DiskLog(tmp_path / "log", open_files=OpenFiles(HastyFiles(), 0 if fewest_open else 100))
        carry_forward(log, [1], PLENTY)
        (tmp_path / "log" / FILE_NAME).unlink()
        carry_forward(log, [], 0)
        assert not log.has_carried_forward
        log.close()


def test_record_keeps_all_but_its_other_messages(tmp_path: Path) -> None:
    log = full_log(tmp_path / "log")
    original = next(record for record in BATCHES if record.count == 3)
    carry_forward(log, [original.base_sequence + 1], PLENTY)
    (carried,) = log.read_carried_forward(original.base_sequence + 1)
    assert carried == RecordBatch(
        original.base_sequence + 1,
        original.first_id + 1,
        original.timestamp_ns,
        original.due_ns,
        pack_messages([body(original.base_sequence + 1)]),
    )
    log.close()


def test_record_with_metadata_is_kept_whole(tmp_path: Path) -> None:
    noted = RecordBatch(0, 7, 8, 9, pack_messages([b"a", b"b", b"c"]), b'{"channel":"c"}')
    log = DiskLog(tmp_path / "log", segment_bytes=100, files=HastyFiles())
    append_each(log, [noted, *(batch(n, b"x") for n in range(3, 9))])
    carry_forward(log, [1, 2, 4], PLENTY)
    log.discard_before(7)
    assert log.read_carried_forward(1) == log.read_carried_forward(2) == [noted]
    assert bodies(log, 4) == [b"x"]
    assert log.read_carried_forward(3) == []
    log.close()


def test_unneeded_metadata_is_dropped(tmp_path: Path) -> None:
    noted = [RecordBatch(n, 7 + n, 8, 9, pack_messages([b"a", b"b"]), b"%d" % n) for n in (0, 2)]
    log = DiskLog(tmp_path / "log", segment_bytes=100, files=HastyFiles())
    append_each(log, [*noted, *(batch(n, b"x") for n in range(4, 9))])
    carry_forward(log, [1, 3], PLENTY, lambda metadata: metadata == b"2")
    log.discard_before(7)
    assert log.read_carried_forward(1) == [RecordBatch(1, 8, 8, 9, pack_messages([b"b"]))]
    assert log.read_carried_forward(3) == noted[1:]
    log.close()


def test_unneeded_messages_are_forgotten(tmp_path: Path) -> None:
    log = full_log(tmp_path / "log")
    carry_forward(log, [1, 2, 3], PLENTY)
    log.discard_before(30)
    size = log.size_bytes
    carry_forward(log, [2, 33], PLENTY)
    log.discard_before(50)
    assert bodies(log, 1, 2, 3, 33) == [None, body(2), None, body(33)]
    assert log.size_bytes < size
    carry_forward(log, [], 0)
    assert not log.has_carried_forward
    assert not (tmp_path / "log" / FILE_NAME).exists()
    log.close()


def test_too_large_carry_is_skipped(tmp_path: Path) -> None:
    log = full_log(tmp_path / "log")
    assert carry_forward(log, [1], 200)
    assert not carry_forward(log, [1, 2, 3, 4, 5, 6], 200)
    assert bodies(log, 1, 2) == [body(1), body(2)]
    assert (log.read_carried_forward(1), log.read_carried_forward(2)) == (log.read_carried_forward(1), [])
    log.close()


def test_reader_finishes_in_a_replaced_file(tmp_path: Path) -> None:
    open_files = OpenFiles(HastyFiles(), 0)  # closes each file that need not stay open
    records = [batch(1, body(1)), batch(2, body(2))]
    old = CarriedForwardSegment.replace(open_files, tmp_path, bytes(16), records, None)
    new = CarriedForwardSegment.replace(open_files, tmp_path, bytes(16), records[1:], old)
    assert old.read(1) == records[0]
    new.remove()
    assert (old.read(2), new.read(1), new.read(2)) == (records[1], None, records[1])
    old.close()
    new.close()


@pytest.mark.parametrize("operation", ["write", "sync", "sync_folder", "read"])
def test_error_changes_nothing(tmp_path: Path, operation: str) -> None:
    files = FailingFiles()
    log = full_log(tmp_path / "log", files=files)
    carry_forward(log, [1], PLENTY)
    files.room = 0
    files.failing[operation] = 5
    with pytest.raises((LogReadError, LogWriteError)):
        carry_forward(log, [1, 20], PLENTY)
    files.heal()
    assert bodies(log, 1, 20) == [body(1), body(20)]
    carry_forward(log, [1, 20], PLENTY)
    log.discard_before(40)
    assert bodies(log, 1, 20) == [body(1), body(20)]
    log.close()


def test_damage_affects_only_its_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = full_log(tmp_path / "log")
    carry_forward(log, [1, 2, 3], PLENTY)
    log.discard_before(30)
    log.close()
    path = tmp_path / "log" / FILE_NAME
    whole = path.read_bytes()
    beginning = 24 + 16 + 3 * 16
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 4
        path.write_bytes(data)
        caplog.clear()
        log = DiskLog(tmp_path / "log", files=HastyFiles())
        found = bodies(log, 1, 2, 3)
        assert found.count(None) == (at >= beginning)
        assert all(each in (None, body(n)) for n, each in enumerate(found, 1))
        assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
        log.close()


@pytest.mark.parametrize("size", [0, 5, 23, 24, 40, 71, 100])
def test_truncated_file_is_reported(tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    log = full_log(tmp_path / "log")
    carry_forward(log, [1, 2, 3], PLENTY)
    log.discard_before(30)
    log.close()
    path = tmp_path / "log" / FILE_NAME
    path.write_bytes(path.read_bytes()[:size])
    log = DiskLog(tmp_path / "log", files=HastyFiles())
    assert bodies(log, 1, 2, 3) == [None] * 3
    assert caplog.records[0].levelname == "ERROR"
    log.close()


def test_needed_messages_survive_a_power_cut_at_any_time(tmp_path: Path) -> None:
    """Messages are carried forward and files deleted twice, then all are forgotten."""
    root = tmp_path / "root"
    root.mkdir()
    files = RecordingFiles(root, sync_takes_s=0)
    log = full_log(root / "log", files=files)
    log.sync()
    steps: list[tuple[int, list[int]]] = []
    for sequences, before in (([1, 2, 17], 30), ([2, 33, 34], 60), ([], END)):
        steps.append((files.position, [*sequences, *range(before, END)]))
        carry_forward(log, sequences, PLENTY)
        log.discard_before(before)
    log.close()
    steps.append((files.position, []))
    cuts = 0
    disk, done, chance = Disk({}), 0, random.Random(1)
    for (start, wanted), (end, _) in pairwise(steps):
        for position in range(start, end + 1):
            for operation in files.journal[done:position]:
                disk.apply(operation)
            done = max(done, position)
            for name, image in disk.power_cuts(chance):
                cuts += 1
                after = tmp_path / f"after-{cuts}"
                write_image(image, after)
                found = DiskLog(after / "log", files=HastyFiles())
                assert bodies(found, *wanted) == [body(n) for n in wanted], name
                found.close()
    assert cuts > 100


class ReadingWhenClosed(HastyFiles):
    """Reads a message while a file is being closed, as another thread may do."""

    def __init__(self) -> None:
        self.log: DiskLog | None = None
        self.found: list[bytes | None] = []
        self.reads = 0

    def close(self, fd: int) -> None:
        super().close(fd)
        log, self.log = self.log, None
        if log is not None:
            self.reads += 1
            try:
                self.found += bodies(log, 1)
            finally:
                self.log = log


@pytest.mark.parametrize("following", [[1, 17], []], ids=["replaced", "removed"])
def test_reading_while_the_replaced_segment_is_closed(tmp_path: Path, following: list[int]) -> None:
    """The old segment is closed when nothing refers to it any more: then the log must have the new one."""
    files = ReadingWhenClosed()
    log = full_log(tmp_path / "log", files=files)
    assert carry_forward(log, [1, 40], PLENTY)
    log.discard_before(60)
    files.log = log
    assert carry_forward(log, following, PLENTY)
    files.log = None
    assert len(files.found) == files.reads > 0
    assert set(files.found) == {body(1) if following else None}
    log.close()
