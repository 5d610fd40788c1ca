"""A disk for power cut tests: it records all operations, and can return to the state at any of them.

The tests rely only on the guarantees of a file system: data of a completed file sync is in the file, and names of a
completed folder sync are in the folder. Of all other changes, any part may be present: writes in any order, whole or
torn at any byte, or as zeros; a folder's names in the order of their creation, but independent of other folders; a name
without the data of its file. A rename to another folder is present in both folders or in none, and after all changes of
names before it, as in file systems with a journal.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from log.support import Change, DiskFile, apply_change, only_the_end, torn, zeros
from trio_nsq.log import Files

Image = dict[str, "bytes | Image"]
"""The content of a folder: files and folders by name."""


def write_image(image: Image, folder: Path) -> None:
    """Create a folder, which must not exist, from an image."""
    folder.mkdir()
    for name, content in image.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_image(content, folder / name)


def read_image(folder: Path) -> Image:
    """Return the content of a folder."""
    return {path.name: read_image(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the file system; its kind determines which fields apply.

    kind: `create`, `open`, `write`, `truncate`, `sync`, `synced`, `create_folder`, `sync_folder`,
        `folder_synced`, `rename`, `link`, `unlink`, `remove_folder`. A sync has two operations: only
        changes before its begin are stable after its end.
    handle: An open file, or a sync of a folder; never reused.
    path, to: Relative to the root.
    """

    kind: str
    handle: int = 0
    path: tuple[str, ...] = ()
    to: tuple[str, ...] = ()
    offset: int = 0
    data: bytes = b""


class RecordingFiles(Files):
    """Real files with a journal of all operations. Syncs take time, but do not sync the real files.

    Args:
        root: The folder of all files; it exists, and its name is durable.

    Attributes:
        journal: All operations in their order, from any thread.
    """

    def __init__(self, root: Path, sync_takes_s: float = 0.001) -> None:
        self.journal: list[Operation] = []
        self._root = root
        self._sync_takes_s = sync_takes_s
        self._lock = threading.Lock()
        self._handles: dict[int, int] = {}
        self._next_handle = 0

    @property
    def position(self) -> int:
        """The position of the next operation in the journal."""
        return len(self.journal)

    def _note(self, kind: str, handle: int = 0, **fields: bytes | int | tuple[str, ...]) -> None:
        self.journal.append(Operation(kind, handle, **fields))  # type: ignore[arg-type]

    def _below(self, path: Path) -> tuple[str, ...]:
        return path.relative_to(self._root).parts

    def _opened(self, kind: str, fd: int, path: Path) -> int:
        self._next_handle += 1
        self._handles[fd] = self._next_handle
        self._note(kind, self._next_handle, path=self._below(path))
        return fd

    def create(self, path: Path) -> int:
        with self._lock:
            return self._opened("create", super().create(path), path)

    def create_or_empty(self, path: Path) -> int:
        with self._lock:
            there = path.exists()
            fd = self._opened("open" if there else "create", super().create_or_empty(path), path)
            if there:
                self._note("truncate", self._handles[fd], offset=0)
            return fd

    def open(self, path: Path) -> int:
        with self._lock:
            return self._opened("open", super().open(path), path)

    def close(self, fd: int) -> None:
        with self._lock:
            self._handles.pop(fd, None)
            super().close(fd)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        with self._lock:
            super().write(fd, offset, parts)
            self._note("write", self._handles[fd], offset=offset, data=b"".join(parts))

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            super().truncate(fd, size)
            self._note("truncate", self._handles[fd], offset=size)

    def sync(self, fd: int) -> None:
        handle = self._handles[fd]
        with self._lock:
            self._note("sync", handle)
        time.sleep(self._sync_takes_s)
        with self._lock:
            self._note("synced", handle)

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            self._next_handle += 1
            handle = self._next_handle
            self._note("sync_folder", handle, path=self._below(path))
        time.sleep(self._sync_takes_s)
        with self._lock:
            self._note("folder_synced", handle)

    def create_folder(self, path: Path) -> None:
        with self._lock:
            super().create_folder(path)
            self._note("create_folder", path=self._below(path))

    def rename(self, path: Path, to: Path) -> None:
        with self._lock:
            super().rename(path, to)
            self._note("rename", path=self._below(path), to=self._below(to))

    def link(self, path: Path, to: Path) -> None:
        with self._lock:
            super().link(path, to)
            self._note("link", path=self._below(path), to=self._below(to))

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)
            self._note("unlink", path=self._below(path))

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            super().remove_folder(path)
            self._note("remove_folder", path=self._below(path))


@dataclass(slots=True, eq=False)
class _Folder:
    """A folder: its names as programs see them, its durable names, and the changes between them, in order."""

    seen: "dict[str, _Folder | DiskFile]" = field(default_factory=dict)
    stable: "dict[str, _Folder | DiskFile]" = field(default_factory=dict)
    pending: "list[tuple[int, dict[str, _Folder | DiskFile | None]]]" = field(default_factory=list)

    def change(self, number: int, changes: "dict[str, _Folder | DiskFile | None]") -> None:
        """Add or remove (None) names, all of them at once; the numbers of changes ascend over all folders."""
        _apply_names(self.seen, changes)
        self.pending.append((number, changes))

    def count_upto(self, number: int) -> int:
        """Return how many of the pending changes have a number up to this one."""
        return sum(each <= number for each, _ in self.pending)


def _apply_names(
    names: "dict[str, _Folder | DiskFile]", changes: "dict[str, _Folder | DiskFile | None]"
) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """The state of a disk after recorded operations.

    Args:
        image: The initial content, all of it stable.
    """

    def __init__(self, image: Image) -> None:
        self._root = _from_image(image)
        self._files: dict[int, DiskFile] = {}
        self._syncs: dict[
            int, tuple[_Folder | DiskFile, int]
        ] = {}  # syncs in progress: the changes that they cover
        self._number = 0  # of the newest change of names
        self._moves: list[tuple[int, _Folder, _Folder]] = []  # renames to other folders: number, from, to

    # ------------------------------------------------------------------ operations

    def apply(self, operation: Operation) -> None:
        """Apply the next operation."""
        handle, path = operation.handle, operation.path
        self._number += 1
        match operation.kind:
            case "create":
                self._files[handle] = DiskFile()
                self._folder(path[:-1]).change(self._number, {path[-1]: self._files[handle]})
            case "open":
                node = self._folder(path[:-1]).seen[path[-1]]
                assert isinstance(node, DiskFile)
                self._files[handle] = node
            case "write":
                self._files[handle].pending.append((operation.offset, operation.data))
            case "truncate":
                self._files[handle].pending.append((operation.offset, None))
            case "sync":
                self._syncs[handle] = self._files[handle], len(self._files[handle].pending)
            case "synced":
                self._file_synced(*self._syncs.pop(handle))
            case "sync_folder":
                folder = self._folder(path)
                self._syncs[handle] = folder, len(folder.pending)
            case "folder_synced":
                self._folder_synced(*self._syncs.pop(handle))
            case "create_folder":
                self._folder(path[:-1]).change(self._number, {path[-1]: _Folder()})
            case "rename":
                self._rename(path, operation.to)
            case "link":
                folder = self._folder(path[:-1])
                assert operation.to[:-1] == path[:-1]
                folder.change(self._number, {operation.to[-1]: folder.seen[path[-1]]})
            case "unlink" | "remove_folder":
                self._folder(path[:-1]).change(self._number, {path[-1]: None})
            case kind:
                raise AssertionError(kind)

    def _rename(self, path: tuple[str, ...], to: tuple[str, ...]) -> None:
        source, target = self._folder(path[:-1]), self._folder(to[:-1])
        node = source.seen[path[-1]]
        if source is target:
            source.change(self._number, {path[-1]: None, to[-1]: node})
        else:
            target.change(self._number, {to[-1]: node})
            source.change(self._number, {path[-1]: None})
            self._moves.append((self._number, source, target))

    def _file_synced(self, node: "_Folder | DiskFile", count: int) -> None:
        assert isinstance(node, DiskFile)
        for offset, data in node.pending[:count]:
            apply_change(node.stable, offset, data)
        del node.pending[:count]

    def _folder_synced(self, node: "_Folder | DiskFile", count: int) -> None:
        assert isinstance(node, _Folder)
        for _, changes in node.pending[:count]:
            _apply_names(node.stable, changes)
        del node.pending[:count]

    def _folder(self, path: Sequence[str]) -> _Folder:
        folder = self._root
        for name in path:
            node = folder.seen[name]
            assert isinstance(node, _Folder)
            folder = node
        return folder

    # ------------------------------------------------------------------ state after a power cut

    def image(self) -> Image:
        """Return the files as programs see them: complete, as long as there is power."""
        return self._left(lambda count: count, lambda pending: pending)

    def power_cuts(self, chance: random.Random) -> Iterator[tuple[str, Image]]:
        """Yield possible states after a power cut at this moment, a selection, each with its name."""
        yield "nothing that was not synced", self._left(lambda count: 0, lambda pending: [])
        yield "names, but no data", self._left(lambda count: count, lambda pending: [])
        yield "everything", self.image()
        yield "zeros", self._left(lambda count: count, zeros)
        for part in (0.02, chance.random(), 0.98):
            yield f"torn at {part:.3f}", self._left(lambda count: count, torn(part))
            yield f"only the end from {part:.3f}", self._left(lambda count: count, only_the_end(part))
        yield (
            "some names",
            self._left(lambda count: chance.randint(0, count), lambda pending: pending),
        )
        yield "a bit of all", self._left(lambda count: chance.randint(0, count), _any(chance))

    def _left(self, names: Callable[[int], int], keep: Callable[[list[Change]], list[Change]]) -> Image:
        """Return what is left with this many of each folder's changed names, and of each file what `keep` selects."""
        chosen: dict[_Folder, int] = {}
        least = 0  # up to this number, all changes of names are present

        def count_of(folder: _Folder) -> int:
            if folder not in chosen:
                chosen[folder] = names(len(folder.pending))
            return max(chosen[folder], folder.count_upto(least))

        def is_present(number: int, folder: _Folder) -> bool:
            return number not in [each for each, _ in folder.pending[count_of(folder) :]]

        while torn := [
            number
            for number, *folders in self._moves
            if number > least and any(is_present(number, each) for each in folders)
        ]:
            least = max(torn)
        return _image(self._root, count_of, keep)


def disk_at(journal: Sequence[Operation], moments: Iterable[int]) -> Iterator[tuple[int, Disk]]:
    """Return the disk, initially empty, after this many operations of a journal; the numbers must ascend.

    It is the same object each time, so use it before the next call.
    """
    disk, done = Disk({}), 0
    for now in moments:
        for operation in journal[done:now]:
            disk.apply(operation)
        done = now
        yield now, disk


def _any(chance: random.Random) -> Callable[[list[Change]], list[Change]]:
    """Select some of the changes, each whole or in part."""

    def keep(pending: list[Change]) -> list[Change]:
        kept = [change for change in pending if chance.random() < 0.6]
        return [
            (offset, data and data[: chance.choice((len(data), chance.randint(0, len(data))))])
            for offset, data in kept
        ]

    return keep


def _from_image(image: Image) -> _Folder:
    folder = _Folder()
    for name, content in image.items():
        node = (
            DiskFile(bytearray(content), named=True) if isinstance(content, bytes) else _from_image(content)
        )
        folder.seen[name] = folder.stable[name] = node
    return folder


def _image(
    folder: _Folder, count_of: Callable[[_Folder], int], keep: Callable[[list[Change]], list[Change]]
) -> Image:
    nodes = folder.stable.copy()
    for _, changes in folder.pending[: count_of(folder)]:
        _apply_names(nodes, changes)
    image: Image = {}
    for name, node in nodes.items():
        if isinstance(node, _Folder):
            image[name] = _image(node, count_of, keep)
        else:
            content = bytearray(node.stable)
            for offset, data in keep(node.pending):
                apply_change(content, offset, data)
            image[name] = bytes(content)
    return image
