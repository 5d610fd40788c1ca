"""Segments in a bucket or in an archive, as the files that the readers of `trio_nsq.log` expect."""

import os
import threading
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from errno import EBADF, ENOENT
from pathlib import Path
from typing import Any, Protocol

from ..log.files import Files
from ..log.files.scratch import ScratchSnapshot
from ..storage import LocalStorage, Storage, StoredFile
from .segment_names import segment_name_of

_BLOCK_BYTES = 8 * 1024 * 1024
"""The size of a request: a request for this much takes longer to transfer than to start."""


class ReadableFiles(Files):
    """Files in a place, for reading by any thread.

    Args:
        storage: The place.
        block_bytes: The size of a request to a bucket. An open file keeps up to three such blocks.
    """

    def __init__(self, storage: Storage, block_bytes: int = _BLOCK_BYTES) -> None:
        self._storage = storage
        self._block_bytes = block_bytes
        self._readers: dict[int, _Reader] = {}
        self._next_fd = 0
        self._lock = threading.Lock()

    @abstractmethod
    def _opened(self, path: Path) -> tuple[Any, int]:
        """Open a file; returns it and its size. Raises StorageError, OSError."""

    def open_read_only(self, path: Path) -> int:
        file, size = self._opened(path)
        if isinstance(self._storage, LocalStorage) or isinstance(file, _NewestInput):
            reader = _Reader(file, size)
        else:
            reader = _AheadReader(file, size, self._block_bytes)
        with self._lock:
            self._next_fd += 1
            self._readers[self._next_fd] = reader
            return self._next_fd

    def open(self, path: Path) -> int:
        return self.open_read_only(path)

    def close(self, fd: int) -> None:
        self._readers.pop(fd).close()

    def read(self, fd: int, size: int, offset: int) -> bytes:
        reader = self._reader(fd)
        with reader.lock:
            return reader.read(size, offset)

    def read_cached(self, fd: int, size: int, offset: int) -> bytes | None:
        return None

    def prefetch(self, fd: int, size: int, offset: int) -> None:
        """Nothing to do: blocks are read ahead."""

    def size(self, fd: int) -> int:
        return self._reader(fd).size

    def _reader(self, fd: int) -> "_Reader":
        try:
            return self._readers[fd]
        except KeyError:
            raise OSError(EBADF, os.strerror(EBADF)) from None


class StoredFiles(ReadableFiles):
    """The files of one topic in a place: a topic's folder in a bucket, or one incarnation in an archive.

    Files of an archive have the names that they have in a topic's folder. The place is listed when `names` is called,
    and when a file is opened before that.

    Args:
        storage: The place that has the files, without subfolders.
        newest: Files that the place has not got yet, by the name in a topic's folder.
        is_listed: Whether the place is listed; otherwise only `newest` is there.
    """

    def __init__(
        self,
        storage: Storage,
        newest: Mapping[str, ScratchSnapshot] | None = None,
        *,
        is_listed: bool = True,
    ) -> None:
        super().__init__(storage)
        self._newest = newest or {}
        self._is_listed = is_listed
        self._files: Mapping[str, StoredFile] | None = None

    def names(self, path: Path) -> list[str]:
        """Return the names of all files, whatever `path` is."""
        found = self._storage.files() if self._is_listed else None
        listed = found if isinstance(found, list) else []
        # Sorted, so that of two copies of a segment the one with more messages is used.
        self._files = {segment_name_of(file.name): file for file in sorted(listed) if "/" not in file.name}
        return [*self._files, *(self._newest.keys() - self._files.keys())]

    def stored_name(self, name: str) -> str | None:
        """Return the name in the place of a file that `names` returned; None: it is one of the newest."""
        assert self._files is not None
        found = self._files.get(name)
        return None if found is None else found.name

    def _opened(self, path: Path) -> tuple[Any, int]:
        if self._files is None:
            self.names(path)
        file = (self._files or {}).get(path.name)
        if file is not None:
            return self._storage.open_input(file.name), file.size_bytes
        if path.name in self._newest:
            return _NewestInput(self._newest[path.name]), self._newest[path.name].size
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))


class _Input(Protocol):
    def seek(self, offset: int, /) -> Any: ...
    def read(self, size: int, /) -> Any: ...
    def close(self) -> Any: ...


class _Reader:
    """Reads a file at offsets."""

    def __init__(self, file: _Input, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._file = file

    def read(self, size: int, offset: int) -> bytes:
        """Read `size` bytes; fewer at the end of the file."""
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        self._file.seek(offset)
        return bytes(self._file.read(size))

    def close(self) -> None:
        self._file.close()


class _NewestInput:
    """A file that the place has not got yet."""

    def __init__(self, file: ScratchSnapshot) -> None:
        self._file = file
        self._offset = 0

    def seek(self, offset: int, /) -> None:
        self._offset = offset

    def read(self, size: int, /) -> bytes:
        return self._file.read(size, self._offset)

    def close(self) -> None:
        """Do nothing: others may read the file."""


class _AheadReader(_Reader):
    """Reads blocks, each while the one before it is being used, because a request to a bucket takes long to start.

    It keeps three blocks.
    """

    def __init__(self, file: _Input, size: int, block_bytes: int) -> None:
        super().__init__(file, size)
        self._block_bytes = block_bytes
        self._thread = ThreadPoolExecutor(1, "trio-nsq-segment")
        self._blocks: dict[int, Future[bytes]] = {}

    def read(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        parts = []
        for number in range(offset // self._block_bytes, -(-end // self._block_bytes)):
            start = number * self._block_bytes
            block = self._block(number)
            parts.append(memoryview(block)[max(0, offset - start) : end - start])
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        follows = number - 1 in self._blocks
        for old in [old for old in self._blocks if abs(old - number) > 1]:
            self._blocks.pop(old).cancel()
        self._start(number)
        if follows:  # the file is read in order
            self._start(number + 1)
        try:
            return self._blocks[number].result()
        except BaseException:
            del self._blocks[number]  # the next read tries again
            raise

    def _start(self, number: int) -> None:
        size = self._block_bytes
        if number not in self._blocks and number * size < self.size:
            self._blocks[number] = self._thread.submit(super().read, size, number * size)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._blocks.clear()
        super().close()
