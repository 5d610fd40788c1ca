"""Segments in a bucket or in an archive, as the files that the readers of `trio_nsq.log.inspection` expect."""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from errno import EBADF, ENOENT
from pathlib import Path
from typing import Any, Protocol

from ...archive.segment_names import segment_name_of
from ...log.files import Files
from ...storage import LocalStorage, Storage, StoredFile

_BLOCK_BYTES = 8 * 1024 * 1024
"""The size of a request: a request for this much takes longer to transfer than to start."""


class StoredFiles(Files):
    """The files of one topic in a place: a topic's folder in a bucket, or one incarnation in an archive.

    Only for reading. Files of an archive have the names that they have in a topic's folder. The place is listed when
    `names` is called, and when a file is opened before that.

    Args:
        storage: The place that has the files, without subfolders.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files: Mapping[str, StoredFile] | None = None
        self._open: dict[int, _Reader] = {}
        self._next_fd = 0
        self._lock = threading.Lock()

    def names(self, path: Path) -> list[str]:
        """Return the names of all files, whatever `path` is."""
        found = self._storage.files()
        listed = found if isinstance(found, list) else []
        # Sorted, so that of two copies of a segment the one with more messages is used.
        self._files = {segment_name_of(file.name): file for file in sorted(listed) if "/" not in file.name}
        return list(self._files)

    def stored_name(self, name: str) -> str:
        """Return the name in the place of a file that `names` returned."""
        assert self._files is not None
        return self._files[name].name

    def open_read_only(self, path: Path) -> int:
        if self._files is None:
            self.names(path)
        file = (self._files or {}).get(path.name)
        if file is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
        reads = _Reader if isinstance(self._storage, LocalStorage) else _AheadReader
        reader = reads(self._storage.open_input(file.name), file.size_bytes)
        with self._lock:
            self._next_fd += 1
            self._open[self._next_fd] = reader
            return self._next_fd

    def close(self, fd: int) -> None:
        self._open.pop(fd).close()

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return self._reader(fd).read(size, offset)

    def size(self, fd: int) -> int:
        return self._reader(fd).size

    def _reader(self, fd: int) -> "_Reader":
        try:
            return self._open[fd]
        except KeyError:
            raise OSError(EBADF, os.strerror(EBADF)) from None


class _Input(Protocol):
    def seek(self, offset: int, /) -> Any: ...
    def read(self, size: int, /) -> Any: ...
    def close(self) -> Any: ...


class _Reader:
    """Reads a file at offsets."""

    def __init__(self, file: _Input, size: int) -> None:
        self.size = size
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


class _AheadReader(_Reader):
    """Reads blocks, each while the one before it is being used, because a request to a bucket takes long to start.

    It keeps three blocks.
    """

    def __init__(self, file: _Input, size: int) -> None:
        super().__init__(file, size)
        self._thread = ThreadPoolExecutor(1, "trio-nsq-segment")
        self._blocks: dict[int, Future[bytes]] = {}

    def read(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        parts = []
        for number in range(offset // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
            start = number * _BLOCK_BYTES
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
        return self._blocks[number].result()

    def _start(self, number: int) -> None:
        if number not in self._blocks and number * _BLOCK_BYTES < self.size:
            self._blocks[number] = self._thread.submit(super().read, _BLOCK_BYTES, number * _BLOCK_BYTES)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._blocks.clear()
        super().close()
