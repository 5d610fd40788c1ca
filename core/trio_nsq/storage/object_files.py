"""Objects as files: for writing whole objects, and for reading parts of them."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import SEEK_CUR, SEEK_END, RawIOBase
from typing import IO, Any

from .interface import NewFile, StorageError

_GIB = 1 << 30
MAX_BYTES = 5 * _GIB
"""The limit of one request to S3; the others have more."""


class NewObject(NewFile):
    """A new object: a file without a name in the folder for temporary files, until it is published.

    Args:
        url: The object, for messages.
        put: Writes the object from a file with a number of bytes; returns False if it exists.
    """

    def __init__(self, url: str, put: Callable[[IO[bytes], int], bool]) -> None:
        self._url = url
        self._put = put
        with self._naming_folder():
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="trio-nsq-")  # noqa: SIM115

    @contextmanager
    def _naming_folder(self) -> Iterator[None]:
        """Convert errors of the file: the disk is that of this machine, not the store."""
        try:
            yield
        except OSError as exc:
            raise StorageError(
                f"the object {self._url} cannot be collected in the folder for temporary files, {_folder()}: "
                f"{exc.strerror or exc}. Set TMPDIR to a folder with more space"
            ) from exc

    def write(self, data: Any, /) -> int:
        with self._naming_folder():
            return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        if not self.closed:
            with self._naming_folder():
                self._file.flush()

    def close(self) -> None:
        if not self.closed:
            try:
                with self._naming_folder():
                    self._file.flush()
                self.size = self._file.tell()
            finally:
                with suppress(StorageError):  # it flushes again
                    super().close()

    def publish(self) -> bool:
        self.close()
        if self.size > MAX_BYTES:
            raise StorageError(
                f"the object {self._url} would have {self.size / _GIB:.1f} GiB, more than the 5 GiB that S3 takes at "
                "once: use a smaller --target-file-size"
            )
        published = self._put(self._file, self.size)
        self.discard()
        return published

    def discard(self) -> None:
        with suppress(StorageError, ValueError):
            super().close()
        with suppress(OSError):
            self._file.close()


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "TMPDIR"


class ObjectInput(RawIOBase):
    """An object as a seekable file. Each read is one request.

    Args:
        size_bytes: The size of the object.
        read_range: Reads the bytes from a start to an end.
    """

    def __init__(self, size_bytes: int, read_range: Callable[[int, int], bytes]) -> None:
        self._size_bytes = size_bytes
        self._read_range = read_range
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {SEEK_CUR: self._at, SEEK_END: self._size_bytes}.get(whence, 0)
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size_bytes - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if not count:
            return b""
        data = self._read_range(self._at, self._at + count)
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
