"""What a leader records is what it did."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from log.support import FIRST, batch
from replication.leader import NaiveFolder, RandomChanges, tree_of
from trio_nsq.log import DiskLog
from trio_nsq.replication.operations import MOST_DATA_BYTES, Kind, Operation, decode_all
from trio_nsq.replication.recorder import RecordingFiles
from trio_nsq.replication.stream import OperationStream, TooFarBehind


def operations_in(stream: OperationStream) -> list[Operation]:
    """Return all operations of a stream that has kept them."""
    _, pieces = stream.after(0, 1 << 40)
    return list(decode_all(b"".join(pieces)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("seed", range(20))
def test_operations_give_the_same_files(root: Path, seed: int) -> None:
    stream = OperationStream(1 << 30)
    changes = RandomChanges(RecordingFiles(root, stream), root, seed)
    for _ in range(150):
        changes.step()
    changes.close()
    copy = NaiveFolder()
    operations = operations_in(stream)
    assert [each.number for each in operations] == list(range(1, len(operations) + 1))
    copy.apply(operations)
    assert copy.tree == tree_of(root)


def test_a_large_write_is_several_operations(root: Path) -> None:
    stream = OperationStream(1 << 30)
    files = RecordingFiles(root, stream)
    fd = files.create(root / "f")
    parts = [b"a" * (MOST_DATA_BYTES - 1), b"bc", b"d" * MOST_DATA_BYTES]
    files.write(fd, 5, parts)
    files.close(fd)
    copy = NaiveFolder()
    copy.apply(operations_in(stream))
    assert copy.tree == tree_of(root)
    assert len(operations_in(stream)) == 4


def test_logs_write_no_zeros_ahead(root: Path) -> None:
    """The other members would get them."""
    log = DiskLog(root / "log", files=RecordingFiles(root, OperationStream(1 << 30)))
    for n in range(60):
        log.append([batch(n, b"x" * 200)], sync=True)
    assert (root / "log" / FIRST).stat().st_size == log.files[-1].size
    log.close()


def test_what_failed_is_not_recorded(root: Path) -> None:
    stream = OperationStream(1 << 30)
    files = RecordingFiles(root, stream)
    fd = files.create(root / "f")
    before = stream.last_number
    with pytest.raises(FileExistsError):
        files.create(root / "f")
    with pytest.raises(FileNotFoundError):
        files.rename(root / "g", root / "h")
    with pytest.raises(FileNotFoundError):
        files.unlink(root / "g")
    with pytest.raises(OSError, match="Invalid argument"):
        files.truncate(fd, -1)
    files.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.write(fd, 0, [b"x"])
    assert stream.last_number == before


def test_nothing_is_recorded_for_a_file_that_has_no_name(root: Path) -> None:
    stream = OperationStream(1 << 30)
    files = RecordingFiles(root, stream)
    gone, replaced, new = (files.create(root / name) for name in ("gone", "replaced", "new"))
    files.unlink(root / "gone")
    files.rename(root / "new", root / "replaced")
    before = stream.last_number
    files.write(gone, 0, [b"x"])
    files.write(replaced, 0, [b"x"])
    assert stream.last_number == before
    files.write(new, 0, [b"x"])
    assert operations_in(stream)[-1] == Operation(before + 1, Kind.WRITE, b"replaced", data=b"x")
    for fd in (gone, replaced, new):
        files.close(fd)


class SlowStream(OperationStream):
    """Before it adds the first write, another thread may change names."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__(1 << 30)
        self.thread = threading.Thread(target=change)

    def append(
        self, kind: Kind, path: bytes, position: int = 0, to: bytes = b"", data: Sequence[bytes] = ()
    ) -> None:
        if kind is Kind.WRITE and self.thread.ident is None:
            self.thread.start()
            self.thread.join(0.2)  # in vain, because the change waits for the write
        super().append(kind, path, position, to, data)


@pytest.mark.parametrize("change", ["rename", "replace", "unlink", "rename the folder"])
def test_a_name_that_changes_during_a_write(root: Path, change: str) -> None:
    """The operations have the order of the changes, although the recording of the write takes long."""

    def make() -> None:
        match change:
            case "rename":
                files.rename(root / "folder" / "f", root / "folder" / "h")
            case "replace":
                files.rename(root / "folder" / "g", root / "folder" / "f")
            case "unlink":
                files.unlink(root / "folder" / "f")
            case _:
                files.rename(root / "folder", root / "other")

    stream = SlowStream(make)
    files = RecordingFiles(root, stream)
    files.create_folder(root / "folder")
    fd, other = files.create(root / "folder" / "f"), files.create(root / "folder" / "g")
    files.write(fd, 0, [b"first"])
    stream.thread.join()
    files.write(fd, 5, [b"second"])
    for each in (fd, other):
        files.close(each)
    copy = NaiveFolder()
    copy.apply(operations_in(stream))
    assert copy.tree == tree_of(root)


def test_a_stream_keeps_the_newest_operations() -> None:
    stream = OperationStream(1000)
    for number in range(100):
        stream.append(Kind.WRITE, b"f", number, data=[b"x" * 100])
    last, pieces = stream.after(97, 1)
    assert (last, [each.position for each in decode_all(b"".join(pieces))]) == (98, [97])
    assert stream.after(100, 1) == (100, [])
    assert stream.has_after(100)
    assert stream.has_after(95)
    assert not stream.has_after(10)
    assert not stream.has_after(101), "a number of another epoch"
    assert stream.kept_bytes <= 1000
    with pytest.raises(TooFarBehind):
        stream.after(10, 1)
