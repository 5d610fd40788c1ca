"""Archives that are made step by step, and restored."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock

import trio

from replication.leader import Tree, tree_of
from trio_nsq.archive.restore import RestorePoint, Restorer, find_restore_point
from trio_nsq.archive.writer import ArchiveWriter
from trio_nsq.broker.restoring import restore_folder
from trio_nsq.replication.journal import Position
from trio_nsq.replication.stream import FormerOperations, OperationStream
from trio_nsq.storage import LocalStorage, Storage

PATIENCE_S = 60.0


class WatchedStorage(LocalStorage):
    """A folder; calls a function after each write, when others can see it, and before the next one."""

    def __init__(self, folder: Path, after_write: Callable[[str], None]) -> None:
        super().__init__(folder)
        self._after_write = after_write
        self._lock = RLock()

    def put_new(self, name: str, data: bytes) -> bool:
        with self._lock:
            done = super().put_new(name, data)
            self._after_write(name)
            return done

    def put(self, name: str, data: bytes) -> None:
        with self._lock:
            super().put(name, data)
            self._after_write(name)


def writer_of(storage: Storage, data_path: Path, *, checkpoint_bytes: int = 2000) -> ArchiveWriter:
    """Return a writer that makes many small objects, and checkpoints often."""
    return ArchiveWriter(
        storage,
        data_path,
        interval_s=0.001,
        object_bytes=500,
        checkpoint_bytes=checkpoint_bytes,
        segments_s=0.01,
    )


async def until_archived(writer: ArchiveWriter) -> None:
    """Wait until all changes are in the archive."""
    with trio.fail_after(PATIENCE_S):
        while (status := writer.status()).lag_operations or status.state != "archiving":
            await trio.sleep(0.005)


def copy_archive(archive: Path, to: Path) -> Path:
    """Copy an archive as it is now. Files of archives are replaced, and never changed, so links are enough."""
    shutil.copytree(archive, to, copy_function=os.link, ignore=shutil.ignore_patterns(".*"))
    return to


def restore(archive: Path, to: Path, until_ms: int | None = None) -> RestorePoint:
    """Restore an archive into a new folder."""
    storage = LocalStorage(archive)
    point = find_restore_point(storage, until_ms)
    to.mkdir()
    Restorer(storage, to).restore(point)
    return point


def number_of(point: RestorePoint) -> int:
    """Return the number of the last operation of a state."""
    return point.stream[-1].about.last if point.stream else point.checkpoint.number


class Remembered:
    """All operations of a writer, also those that it has archived and keeps no longer."""

    def __init__(self, writer: ArchiveWriter) -> None:
        self._stream = writer.operations
        self._content = bytearray()
        self._last = 0
        writer.on_stored = self._remember  # then it forgets them

    def _remember(self, number: int) -> None:
        while self._last < number:
            self._last, pieces = self._stream.after(self._last, 1)
            self._content += b"".join(pieces)

    def stream(self) -> OperationStream:
        """Return a stream that has all of them."""
        self._remember(self._stream.last_number)
        return OperationStream(1 << 40, FormerOperations(Position(1, self._last), [bytes(self._content)]))


def without_ids(tree: Tree) -> Tree:
    """Leave out the files with reserved ids, which a restore raises."""
    return {path: content for path, content in tree.items() if not path.startswith(b"broker.json")}


def restored_tree(archive: Path | str, folder: Path) -> Tree:
    """Restore an archive into a new folder, and return what members share of it, without ids."""
    with TemporaryDirectory(dir=folder) as place:
        restore_folder(str(archive), Path(place) / "restored")
        return without_ids(tree_of(Path(place) / "restored"))
