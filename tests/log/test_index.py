"""Tests for the index file of a full segment."""

import logging
import os
import shutil
from errno import EIO, ENOSPC
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.support import CountingFiles, FailingFiles, HastyFiles, append_each, batch, contents, segment_files
from trio_nsq.log import DiskLog, Files
from trio_nsq.log.segment.index import SparseIndex

BATCHES = [batch(n, b"x" * 100) for n in range(5000)]
SEGMENT_BYTES = 300_000


def index_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.index"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three segments, two of them full."""
    folder = tmp_path_factory.mktemp("log")
    log = DiskLog(folder, segment_bytes=SEGMENT_BYTES, files=HastyFiles())
    append_each(log, BATCHES)
    log.close()
    assert len(segment_files(folder)) == 3
    assert [path.stem for path in index_files(folder)] == [path.stem for path in segment_files(folder)[:2]]
    return folder


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    """A copy of the folder, to be changed."""
    shutil.copytree(written, tmp_path / "log")
    return tmp_path / "log"


def check(folder: Path, files: Files | None = None) -> None:
    """Check that every message is found, from any position."""
    log = DiskLog(folder, segment_bytes=SEGMENT_BYTES, files=files or HastyFiles())
    for n in [4999, 0, 1, 1000, *range(500, 4500, 37)]:
        assert log.read(n, 0) == [BATCHES[n]]
    log.close()


def read_to_find(folder: Path, place: int) -> int:
    """Return the bytes of segments that the first lookup after opening reads."""
    files = CountingFiles()
    log = DiskLog(folder, segment_bytes=SEGMENT_BYTES, files=files)
    files.reset()
    assert log.read(place, 0) == [BATCHES[place]]
    log.close()
    return files.read_bytes


def test_first_lookup_after_a_restart_reads_little(folder: Path) -> None:
    assert read_to_find(folder, 1500) < 70_000
    check(folder)


def test_missing_index_is_rebuilt_at_the_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = [path.read_bytes() for path in index_files(folder)]
    index_files(folder)[0].unlink()
    caplog.set_level(logging.INFO)
    assert read_to_find(folder, 1500) < 70_000
    assert f"{segment_files(folder)[0]}: rebuilding its lost index" in caplog.text
    assert [path.read_bytes() for path in index_files(folder)] == before


@pytest.mark.parametrize("at", [0, 8, 12, 16, 30, -1])
def test_damaged_index_is_not_used(folder: Path, at: int) -> None:
    for path in index_files(folder):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    check(folder)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 20, 24, 25, 40])
def test_truncated_index_is_not_used(folder: Path, size: int) -> None:
    for path in index_files(folder):
        path.write_bytes(path.read_bytes()[:size])
    check(folder)


def test_index_of_another_segment_is_not_used(folder: Path) -> None:
    first, second = index_files(folder)
    second.write_bytes(first.read_bytes())
    check(folder)


def test_index_of_a_truncated_segment_is_not_used(folder: Path) -> None:
    path = segment_files(folder)[0]
    path.write_bytes(path.read_bytes()[:200_000])
    log = DiskLog(folder, files=HastyFiles())
    (found, *_) = log.read(1000, 0)
    assert found == BATCHES[1000]
    (found, *_) = log.read(1800, 0)  # it was in the missing part
    assert found.base_sequence == int(segment_files(folder)[1].stem)
    log.close()


def test_named_pipe_instead_of_an_index_does_not_block(folder: Path) -> None:
    for path in index_files(folder):
        path.unlink()
        os.mkfifo(path)
    check(folder)


def test_index_is_deleted_with_its_segment(folder: Path) -> None:
    log = DiskLog(folder, files=HastyFiles())
    log.discard_before(int(segment_files(folder)[1].stem))
    assert len(index_files(folder)) == 1
    log.close()


def test_index_without_a_segment_is_removed(folder: Path) -> None:
    for name in ("00000000000000000007.index", "00000000000000000008.index.tmp"):
        (folder / name).write_bytes(b"?")
    before = index_files(folder)
    check(folder)
    assert index_files(folder) == [path for path in before if "7.index" not in path.name]
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("lost", [True, False])
def test_temporary_file_of_an_index_is_removed(folder: Path, lost: bool) -> None:
    """After a failed rotation or a kill, a temporary file is beside the segment, with or without an index."""
    before = {path: path.read_bytes() for path in index_files(folder)}
    for path in index_files(folder):
        path.with_name(path.name + ".tmp").write_bytes(b"half an ind")
        if lost:
            path.unlink()
    check(folder)
    assert {path: path.read_bytes() for path in index_files(folder)} == before
    assert not list(folder.glob("*.tmp"))


def test_temporary_file_of_a_carried_forward_segment_is_removed(folder: Path) -> None:
    (folder / "stragglers.tmp").write_bytes(b"up to 64 MiB")
    check(folder)
    assert not list(folder.glob("*.tmp"))


def test_unreadable_segment_has_no_index(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = segment_files(folder)[0]
    index_files(folder)[0].unlink()
    files = UnreadableFrom(first, 100_000)
    log = DiskLog(folder, files=files)
    assert "Input/output error: continuing without an index" in caplog.text
    assert log.read(0, 0) == [BATCHES[0]]
    assert log.read(4000, 0) == [BATCHES[4000]]
    log.close()


class UnreadableFrom(HastyFiles):
    """A disk that cannot read one file from an offset on."""

    def __init__(self, path: Path, offset: int) -> None:
        self._inode = path.stat().st_ino
        self._offset = offset

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == self._inode and offset + size > self._offset:
            if offset >= self._offset:
                raise OSError(EIO, "Input/output error")
            size = self._offset - offset
        return super().read(fd, size, offset)


def test_small_segments_have_no_index(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=100_000, files=HastyFiles())
    append_each(log, BATCHES)
    log.close()
    assert index_files(tmp_path) == []


class NoRoomForIndexes(HastyFiles):
    """A disk on which no index can be written."""

    def replace(self, path: Path, content: bytes) -> None:
        raise OSError(ENOSPC, "No space left on device")


def test_failed_write_of_an_index_is_tolerated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = DiskLog(tmp_path, segment_bytes=SEGMENT_BYTES, files=NoRoomForIndexes())
    append_each(log, BATCHES)
    assert contents(log) == BATCHES
    log.close()
    assert "00000000000000000000.index: No space left on device" in caplog.text
    check(tmp_path, NoRoomForIndexes())


def test_index_that_cannot_be_removed_fails_the_start(folder: Path) -> None:
    (folder / "00000000000000000007.index").write_bytes(b"?")
    files = FailingFiles()
    files.failing["unlink"] = 30
    with pytest.raises(Exception, match=r"7\.index: Read-only file system"):
        DiskLog(folder, files=files)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(57, 200_000)), max_size=60), st.integers(0, 2**32 - 1)
)
def test_index_finds_a_position_close_before(records: list[tuple[int, int]], seed: int) -> None:
    """Records with these numbers of messages and bytes."""
    sequence, offset = 1000, 32
    index = SparseIndex(offset)
    places = []
    for messages, size in records:
        index.add(sequence, offset)
        places.append((sequence, offset))
        sequence, offset = sequence + messages, offset + size
    index.up_to = offset
    for one in (index, SparseIndex.decode(index.encode(seed), seed, offset)):
        assert one is not None
        assert one.find(999) is None
        for number, (begins, at) in enumerate(places):
            found = one.find(begins)
            assert found is not None
            assert found <= at
            assert found in [place for _, place in places]
            assert at - found < 64 * 1024 + (records[number - 1][1] if number else 0)
    assert SparseIndex.decode(index.encode(seed), seed, offset + 1) is None
    assert SparseIndex.decode(index.encode(seed), seed ^ 1, offset) is None
