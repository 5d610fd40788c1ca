"""Tests for concurrent writes, syncs and commits, and for files that a failure leaves."""

from collections.abc import Callable, Sequence
from errno import EIO, EMFILE
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.support import batch, contents
from trio_nsq.log import DiskLog, Files, LogWriteError
from trio_nsq.log.files.open_files import OpenFiles

MIB: Final = 2**20


class BesideAWrite(Files):
    """A real file system that calls a function during a write, and whose files may fail to open."""

    beside: Callable[[], None] | None = None
    opens = True
    closed = 0

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        super().write(fd, offset, parts)
        if self.beside is not None:
            beside, self.beside = self.beside, None
            beside()

    def open(self, path: Path) -> int:
        if not self.opens:
            raise OSError(EMFILE, "Too many open files")
        return super().open(path)

    def close(self, fd: int) -> None:
        self.closed += 1
        super().close(fd)


def test_write_during_the_end_of_a_sync_is_stored_or_not(tmp_path: Path) -> None:
    """The sync releases the file, whose descriptor is then needed by others, and which cannot be reopened."""
    files = BesideAWrite()
    log = DiskLog(tmp_path / "t", open_files=OpenFiles(files, 0))
    first = [batch(0, b"first")]
    log.append(first, sync=False)
    files.beside, files.opens = log.sync, False
    kept = first
    try:
        log.append([batch(1, b"second")], sync=False)
        kept = [*kept, batch(1, b"second")]
    except LogWriteError:
        pass
    files.opens = True
    last = [batch(log.next_sequence, b"last")]
    log.append(last, sync=True)
    assert contents(log) == [*kept, *last]
    log.close()
    assert contents(DiskLog(tmp_path / "t")) == [*kept, *last]


def test_file_stays_open_while_it_has_unsynced_data(tmp_path: Path) -> None:
    """A sync does not close it if a write follows: only the first descriptor surely gets write errors."""
    files = BesideAWrite()
    log = DiskLog(tmp_path / "t", open_files=OpenFiles(files, 0))
    log.append([batch(0, b"first")], sync=False)
    files.closed = 0
    point = log.sync_point()
    log.write([batch(1, b"written during the sync")])
    point.sync()
    assert log.end_sync(point, None) is None
    assert (files.closed, log.unsynced_bytes > 0) == (0, True)
    log.sync()
    assert (files.closed, log.unsynced_bytes) == (1, 0)


def test_a_sync_after_a_failed_one_counts_only_if_it_writes_the_bytes_again(tmp_path: Path) -> None:
    """The kernel reports an error once, and drops the bytes: the next sync of the same file succeeds without them."""
    log = DiskLog(tmp_path / "t")
    log.rotate()
    log.write([batch(0, b"first")])
    failed, stale = log.sync_point(), log.sync_point()
    assert log.end_sync(failed, OSError(EIO, "broken")) is not None
    stale.sync()
    assert log.end_sync(stale, None) is not None
    again = log.sync_point()
    again.sync()
    assert log.end_sync(again, None) is None
    assert (log.unsynced_bytes, log.failed_syncs) == (0, 2)


def test_write_refused_during_a_sync_is_removed_durably_by_the_next(tmp_path: Path) -> None:
    """Until then a crash may bring it back, so nothing may be written in its place in the write-ahead log only."""
    log = DiskLog(tmp_path / "t")
    log.append([batch(0, b"kept")], sync=False)
    point = log.sync_point()
    log.write([batch(1, b"refused")])
    log.rollback()
    point.sync()
    assert log.end_sync(point, None) is None
    assert log.has_unsynced_cut
    assert log.pending_wal() is None
    log.sync()
    assert not log.has_unsynced_cut
    assert log.pending_wal() is not None


def test_writes_in_the_place_of_refused_ones_need_a_sync(tmp_path: Path) -> None:
    """The refused ones were synced, and something else failed."""
    log = DiskLog(tmp_path / "t")
    log.rotate()
    log.write([batch(0, b"refused")])
    log.sync()
    log.rollback()
    log.write([batch(0, b"kept")])
    assert log.unsynced_bytes == batch(0, b"kept").record_bytes


def test_uncommitted_data_counts_for_the_size_of_a_segment(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "t", segment_bytes=1000)
    log.rotate()
    log.write([batch(0, bytes(800))])
    assert log.needs_rotation(800)
    log.commit(1)
    assert log.needs_rotation(800)


@given(
    room=st.integers(0, 6 * MIB),
    sizes=st.lists(st.integers(1, 600_000), min_size=1, max_size=30),
    late=st.integers(0, 3),
)
@settings(max_examples=20, deadline=None)
def test_little_is_unsynced_when_a_file_is_full(room: int, sizes: list[int], late: int) -> None:
    """The next file waits for the sync of the last one, and publishers with it. A sync takes as long as some writes."""
    with TemporaryDirectory() as folder:
        log = DiskLog(Path(folder) / "t", segment_bytes=room)
        log.rotate()
        waited = 0
        for size in cycle(sizes):
            one = batch(log.written_sequence, bytes(size))
            if log.needs_rotation(one.record_bytes):
                break
            log.append([one], sync=False)
            waited += log.wants_sync
            if waited > late:
                log.sync()
                waited = 0
        assert log.unsynced_bytes < MIB + (late + 2) * (max(sizes) + 100)
        log.close()


def test_much_is_synced_before_a_schedule_asks_for_it(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "t", segment_bytes=1000 * MIB)
    log.rotate()
    while not log.wants_sync:
        log.append([batch(log.written_sequence, bytes(MIB))], sync=False)
    assert 16 * MIB <= log.unsynced_bytes < 17 * MIB + 1000
    log.sync()
    assert not log.wants_sync
    log.close()


def test_file_discarded_while_its_index_is_saved_leaves_no_index(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "t", segment_bytes=600_000)
    log.append([batch(0, bytes(600_000))], sync=True)
    rotation = log.rotation()
    rotation.create()
    rotation.use()
    log.append([batch(1, b"in the next file")], sync=True)
    log.discard_before(1)
    rotation.finish()
    assert list((tmp_path / "t").glob("*.index")) == []
    log.close()


class NoNewNames(Files):
    """New names cannot be made durable, nor removed."""

    fails = False

    def sync_folder(self, path: Path) -> None:
        if self.fails:
            raise OSError(EIO, "broken")
        super().sync_folder(path)

    def unlink(self, path: Path) -> None:
        if self.fails:
            raise OSError(EIO, "broken")
        super().unlink(path)


def test_data_after_a_failed_new_segment_is_kept(tmp_path: Path) -> None:
    """The empty file stays, and the previous segment continues past its sequence."""
    files = NoNewNames()
    log = DiskLog(tmp_path / "t", segment_bytes=1000, files=files)
    log.append([batch(0, bytes(800))], sync=True)
    files.fails = True
    with pytest.raises(LogWriteError):
        log.append([batch(1, bytes(800))], sync=True)
    files.fails = False
    log.append([batch(1, b"acknowledged")], sync=True)
    assert len(list((tmp_path / "t").glob("*.log"))) == 2
    again = DiskLog(tmp_path / "t", segment_bytes=1000)
    assert contents(again) == contents(log)
    again.append([batch(2, bytes(800))], sync=True)
    assert contents(DiskLog(tmp_path / "t")) == contents(again)
    for each in (log, again):
        each.close()
