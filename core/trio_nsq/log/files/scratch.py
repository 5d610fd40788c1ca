"""Files that only this process has, in one temporary file without a name: nothing is left of them when it ends."""

import os
import stat
from collections.abc import Callable, Sequence
from errno import EBADF, EEXIST, EISDIR, ENOENT, ENOTDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, TypeAlias

from .file_system import Files

_BLOCK_BYTES: Final = 64 * 1024
_ZEROS: Final = bytes(_BLOCK_BYTES)


class _Space:
    """Blocks of the temporary file. A block that is given back is used again."""

    def __init__(self) -> None:
        self._file = TemporaryFile(prefix="trio-nsq-", buffering=0)  # noqa: SIM115 - closed in __del__
        self.fd: int = self._file.fileno()
        self._free: list[int] = []
        self._count = 0

    def __del__(self) -> None:
        self._file.close()

    def take(self) -> int:
        """Return a block; its bytes are any."""
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def give_back(self, blocks: list[int]) -> None:
        """Any thread may call this."""
        self._free += blocks


class _Content:
    """The content of a file.

    Attributes:
        size: In bytes.
        frozen: A snapshot needs the bytes before this one.
    """

    def __init__(self, space: _Space) -> None:
        self.size: int = 0
        self.frozen: int = 0
        self._space = space
        self._blocks: list[int] = []

    def __del__(self) -> None:
        self._space.give_back(self._blocks)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if offset > self.size:
            self.extend(offset)
        self._put(offset, memoryview(data))
        self.size = max(self.size, offset + len(data))

    def extend(self, size: int) -> None:
        """Fill with zeros up to a size."""
        while self.size < size:
            count = min(size - self.size, _BLOCK_BYTES)
            self._put(self.size, memoryview(_ZEROS)[:count])
            self.size += count

    def _put(self, offset: int, data: memoryview) -> None:
        while data:
            number, at = divmod(offset, _BLOCK_BYTES)
            while number >= len(self._blocks):
                self._blocks.append(self._space.take())
            part = data[: _BLOCK_BYTES - at]
            position, left = self._blocks[number] * _BLOCK_BYTES + at, part
            while left:
                written = os.pwrite(self._space.fd, left, position)
                position, left = position + written, left[written:]
            offset, data = offset + len(part), data[len(part) :]

    def read(self, size: int, offset: int) -> bytes:
        size = min(size, self.size - offset)
        parts: list[bytes] = []
        while size > 0:
            number, at = divmod(offset, _BLOCK_BYTES)
            count = min(size, _BLOCK_BYTES - at)
            parts.append(os.pread(self._space.fd, count, self._blocks[number] * _BLOCK_BYTES + at))
            offset, size = offset + count, size - count
        return b"".join(parts)

    def copied(self, size: int) -> "_Content":
        """Return a copy of the beginning."""
        copy = _Content(self._space)
        for offset in range(0, size, _BLOCK_BYTES):
            copy.write(offset, self.read(min(_BLOCK_BYTES, size - offset), offset))
        return copy


class _File:
    """A file that has names, or is open.

    Attributes:
        is_dropped: It reads as empty, whatever is written to it.
    """

    def __init__(self, space: _Space) -> None:
        self.content = _Content(space)
        self.is_dropped = False

    def changeable(self, keeps: int) -> _Content:
        """Return the content, of which the bytes from `keeps` on may be changed."""
        if keeps < self.content.frozen:
            self.content = self.content.copied(self.content.size)
        return self.content


_Folder: TypeAlias = dict[str, "_File | _Folder"]


class ScratchSnapshot:
    """The content of a file at one moment, whatever happens to the file. Any thread may read."""

    def __init__(self, content: _Content) -> None:
        content.frozen = self.size = content.size
        self._content = content

    def read(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes from `offset` on; fewer at the end."""
        return self._content.read(min(size, self.size - offset), offset)

    def continues(self, earlier: "ScratchSnapshot") -> bool:
        """Whether it begins with all that an earlier snapshot of the same file has."""
        return self._content is earlier._content


class ScratchFiles(Files):
    """A tree of files below a folder that does not exist. One thread at a time.

    Methods raise OSError as the operating system does, also if the disk of temporary files is full.

    Args:
        root: The folder; other paths are below it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._space = _Space()
        self._tree: _Folder = {}
        self._opened: dict[int, _File] = {}
        self._next_fd = 0

    # ------------------------------------------------------------------ names

    def _find(self, path: Path) -> "_File | _Folder | None":
        found: _File | _Folder | None = self._tree
        for name in path.relative_to(self._root).parts:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _folder(self, path: Path) -> _Folder:
        found = self._find(path)
        if isinstance(found, dict):
            return found
        raise _error(ENOENT if found is None else ENOTDIR, path)

    def _file(self, path: Path) -> _File:
        found = self._find(path)
        if isinstance(found, _File):
            return found
        raise _error(ENOENT if found is None else EISDIR, path)

    def kind(self, path: Path | bytes) -> int:
        found = self._find(Path(os.fsdecode(path)))
        return 0 if found is None else stat.S_IFREG if isinstance(found, _File) else stat.S_IFDIR

    def names(self, path: Path) -> list[str]:
        return list(self._folder(path))

    def create_folder(self, path: Path) -> None:
        parent = self._folder(path.parent)
        if path.name in parent:
            raise _error(EEXIST, path)
        parent[path.name] = {}

    def rename(self, path: Path, to: Path) -> None:
        parent, target = self._folder(path.parent), self._folder(to.parent)
        if path.name not in parent:
            raise _error(ENOENT, path)
        moved, there = parent[path.name], target.get(to.name)
        if isinstance(there, dict) and (there or isinstance(moved, _File)):
            raise _error(EISDIR, to)
        del parent[path.name]
        target[to.name] = moved

    def unlink(self, path: Path) -> None:
        self._file(path)
        del self._folder(path.parent)[path.name]

    def remove_folder(self, path: Path) -> None:
        if isinstance(self._find(path), dict):
            del self._folder(path.parent)[path.name]

    def sync_folder(self, path: Path) -> None:
        """Do nothing: nothing is kept."""

    # ------------------------------------------------------------------ content

    def open(self, path: Path) -> int:
        return self._open(self._file(path))

    def open_read_only(self, path: Path) -> int:
        return self._open(self._file(path))

    def create_or_empty(self, path: Path) -> int:
        parent = self._folder(path.parent)
        if isinstance(parent.get(path.name), dict):
            raise _error(EISDIR, path)
        file = parent[path.name] = _File(self._space)
        return self._open(file)

    def _open(self, file: _File) -> int:
        self._next_fd += 1
        self._opened[self._next_fd] = file
        return self._next_fd

    def _of(self, fd: int) -> _File:
        try:
            return self._opened[fd]
        except KeyError:
            raise OSError(EBADF, os.strerror(EBADF)) from None

    def close(self, fd: int) -> None:
        del self._opened[fd]

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        file = self._of(fd)
        for part in parts if not file.is_dropped else ():
            file.changeable(offset).write(offset, part)
            offset += len(part)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return self._of(fd).content.read(size, offset)

    def size(self, fd: int) -> int:
        return self._of(fd).content.size

    def truncate(self, fd: int, size: int) -> None:
        file = self._of(fd)
        if not file.is_dropped:
            content = file.changeable(size)
            content.extend(size)
            content.size = size

    def allocate(self, fd: int, size: int) -> None:
        file = self._of(fd)
        if not file.is_dropped:
            file.content.extend(size)

    def write_back(self, fd: int, size: int, offset: int) -> None:
        """Do nothing: nothing is kept."""

    def sync(self, fd: int) -> None:
        """Do nothing: nothing is kept."""

    # ------------------------------------------------------------------ for readers

    def drop(self, path: Path) -> None:
        """Forget the content of a file, and what is written to it. It keeps its name. Raises FileNotFoundError."""
        file = self._file(path)
        file.content, file.is_dropped = _Content(self._space), True

    def snapshots(self, folder: Path, wants: Callable[[str], bool]) -> dict[str, ScratchSnapshot]:
        """Return the files in a folder whose names are wanted, without those that were dropped.

        Raises FileNotFoundError, NotADirectoryError.
        """
        return {
            name: ScratchSnapshot(found.content)
            for name, found in self._folder(folder).items()
            if isinstance(found, _File) and not found.is_dropped and wants(name)
        }


def _error(errno: int, path: Path) -> OSError:
    return OSError(errno, os.strerror(errno), str(path))
