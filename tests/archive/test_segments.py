"""Which segments of a data folder an archive has, and which ones stay in it."""

import time
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from shutil import rmtree

import pytest

from log.support import append_each, batch, numbered, segment_files
from trio_nsq.archive.manifest import Checkpoint, change_manifest
from trio_nsq.archive.pruning import prune_segments
from trio_nsq.archive.segments import ArchivedSegments, encode_segments, sealed_segments
from trio_nsq.archive.stored_files import ReadableFiles
from trio_nsq.log import DiskLog
from trio_nsq.replication.recorder import RecordingFiles
from trio_nsq.replication.stream import OperationStream
from trio_nsq.storage import LocalStorage, StorageError, storage_at


def archive_of(data: Path, archive: LocalStorage) -> ArchivedSegments:
    """Archive the segments of a data folder."""
    files = RecordingFiles(data, OperationStream(1 << 30))
    segments = ArchivedSegments(files, archive, {})
    segments.archive(sealed_segments(files, data), lambda: None)
    return segments


def make_topic(data: Path) -> tuple[bytes, list[tuple[Path, int]]]:
    """Write three segments; returns the incarnation, and the path of each with the sequence after its last message."""
    folder = data / "topics" / "t.topic"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with closing(DiskLog(folder, segment_bytes=500)) as log:
        append_each(log, numbered(0, 40))
        assert log.incarnation is not None
        starts = [file.base_sequence for file in log.files]
        return log.incarnation, list(zip(segment_files(folder), starts[1:], strict=False))


def test_a_topic_that_is_created_again_is_not_archived_yet(tmp_path: Path) -> None:
    """Its files have the names of the former ones."""
    data, archive = tmp_path / "data", LocalStorage(tmp_path / "archive")
    incarnation, former = make_topic(data)
    segments = archive_of(data, archive)
    assert len(former) > 1
    assert all(segments.has(path, incarnation, end) for path, end in former)
    rmtree(data / "topics" / "t.topic")
    again, files = make_topic(data)
    assert files == former
    assert not any(segments.has(path, again, end) for path, end in files)
    segments.archive(sealed_segments(RecordingFiles(data, OperationStream(1)), data), lambda: None)
    assert all(segments.has(path, again, end) for path, end in files)
    for path, _ in files:
        (there,) = (tmp_path / "archive" / "t" / again.hex()).glob(f"{path.stem}-*.seg")
        assert there.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("is_saved", [True, False])
def test_index_that_is_saved_after_the_next_file_begins_is_archived(tmp_path: Path, is_saved: bool) -> None:
    """If it could not be saved, the segment is archived without it."""
    data, archive = tmp_path / "data", LocalStorage(tmp_path / "archive")
    folder = data / "topics" / "t.topic"
    folder.parent.mkdir(parents=True)
    with closing(DiskLog(folder, segment_bytes=300_000)) as log:
        append_each(log, [batch(0, bytes(100_000)), batch(1, bytes(100_000))])
        rotation = log.rotation()
        rotation.create()
        rotation.use()
        append_each(log, [batch(2, b"in the next file")])
        segments = archive_of(data, archive)
        assert not segments.found
        if is_saved:
            rotation.finish()
        segments.archive(sealed_segments(RecordingFiles(data, OperationStream(1)), data), lambda: None)
        (found,) = segments.found.values()
    assert (found.end is not None) == is_saved
    assert len(list((tmp_path / "archive").rglob("*.index"))) == is_saved


def test_which_segments_stay(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", LocalStorage(tmp_path / "archive")
    make_topic(data)
    names = sorted(each.name for each in archive_of(data, archive).found.values())
    segments = archive_of(data, archive).found.values()
    of_checkpoint = [each for each in segments if each.name == names[1]]
    checkpoint = Checkpoint(1, "run", 0, 0, None, 0, 0)
    archive.put(checkpoint.segments_name, encode_segments(of_checkpoint))
    change_manifest(archive, lambda found: replace(found, checkpoints=(checkpoint,)))
    for folder, file in (("t/other", "1.seg"), ("@stream/0000000001", names[0].rpartition("/")[2])):
        archive.put(f"{folder}/{file}", b"")
    there = {name for name, _ in archive.ages()}
    assert prune_segments(archive, int(time.time() * 1000) - 3_600_000, set()) == 0
    assert {name for name, _ in archive.ages()} == there
    removed = prune_segments(archive, int(time.time() * 1000) + 3_600_000, {names[0]})
    assert removed == len(names) - 2 > 0
    assert {name for name, _ in archive.ages()} == there - set(names[2:])


def test_a_block_that_could_not_be_read_is_read_again() -> None:
    class Input(BytesIO):
        fails = True

        def read(self, size: int | None = -1, /) -> bytes:
            if self.fails:
                raise StorageError("the bucket is away")
            return super().read(size)

    file = Input(bytes(range(100)))

    class Files(ReadableFiles):
        def _opened(self, path: Path) -> tuple[Input, int]:
            return file, 100

    files = Files(storage_at("s3://bucket"), block_bytes=10)
    fd = files.open_read_only(Path("x"))
    for _ in range(2):
        with pytest.raises(StorageError):
            files.read(fd, 25, 5)
    file.fails = False
    assert files.read(fd, 25, 5) == bytes(range(5, 30))
    assert files.read(fd, 25, 90) == bytes(range(90, 100))
    files.close(fd)
