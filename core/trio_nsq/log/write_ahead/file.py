"""Writing a write-ahead file."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import LogWriteError
from ..files import Files
from ..interface import SyncPoint
from ..records import UnsyncedPart
from .format import encode_entry_header, encode_file_header

_ZEROS = bytes(128 * 1024)
"""Written ahead, so that not each sync makes the file longer: docs/decisions/0049."""
_SMALL_BYTES = 32 * 1024
"""Zeros follow an append of at most so many bytes."""
_NAME = re.compile(r"write-ahead\.([0-9]+)\Z")


def write_ahead_files(folder: Path, names: Iterable[str]) -> list[tuple[int, Path]]:
    """Return the number and the path of each write-ahead file among these names, the oldest first."""
    found = [(int(match[1]), folder / name) for name in names if (match := _NAME.match(name))]
    return sorted(found)


class _FileSync:
    """The `SyncPoint` of a write-ahead file."""

    def __init__(self, files: Files, path: Path, fd: int, size: int) -> None:
        self.size = size
        self._files = files
        self._path = path
        self._fd = fd

    def sync(self) -> None:
        try:
            self._files.sync(self._fd)
        except OSError as exc:
            raise LogWriteError(self._path, exc) from exc


class WriteAheadFile:
    """A write-ahead file. One thread has it; others may sync to a point of it.

    After an error, nothing may be appended: `discard_unsynced`, and use another file.

    Attributes:
        path: Its path.
        size: Bytes that are written.
        synced_size: Bytes that are on stable storage.
        error: Why an append or a sync failed.
    """

    def __init__(self, files: Files, path: Path, fd: int, seed: int, size: int) -> None:
        self.path = path
        self.size: int = size
        self.synced_size: int = size
        self.error: Exception | None = None
        self._zeros_to = size  # where the file ends; from `size` on it has zeros
        self._writes_zeros: bool = (
            files.writes_zeros_ahead
        )  # and none could not be written: the disk may be full
        self._files = files
        self._fd = fd
        self._seed = seed

    @classmethod
    def create(cls, files: Files, folder: Path, number: int) -> "WriteAheadFile":
        """Create an empty file, durably. Raises LogWriteError."""
        path = folder / f"write-ahead.{number}"
        header, seed = encode_file_header()
        try:
            fd = files.create(path)
            try:
                files.write(fd, 0, [header])
                files.sync(fd)
                files.sync_folder(folder)
            except BaseException:
                files.close(fd)
                try:
                    files.unlink(path)
                except OSError:
                    pass  # it holds no entry: the next start removes it
                raise
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        return cls(files, path, fd, seed, len(header))

    def append(self, parts: Sequence[tuple[bytes, UnsyncedPart]]) -> None:
        """Append parts of segments, each with its topic's name. Raises LogWriteError."""
        pieces: list[bytes] = []
        size = self.size
        for name, part in parts:
            header = encode_entry_header(name, part, self.synced_size, self._seed)
            pieces.append(header)
            pieces += part.data
            size += len(header) + part.size
        try:
            self._files.write(self._fd, self.size, pieces)
        except OSError as exc:
            error = self.error = LogWriteError(self.path, exc)
            raise error from exc
        is_small = size - self.size <= _SMALL_BYTES
        self.size = size
        if size > self._zeros_to:
            self._zeros_to = size
            if is_small and self._writes_zeros:
                self._write_zeros()

    def _write_zeros(self) -> None:
        try:
            self._files.write(self._fd, self.size, [_ZEROS])
        except OSError:
            self._writes_zeros = False  # the next append replaces what was written of them
        else:
            self._zeros_to = self.size + len(_ZEROS)

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that the next sync stores."""
        return self.size - self.synced_size

    def sync_point(self) -> _FileSync:
        return _FileSync(self._files, self.path, self._fd, self.size)

    def end_sync(self, point: SyncPoint, error: Exception | None) -> Exception | None:
        """As `Log.end_sync`. After an error, no later sync counts."""
        assert isinstance(point, _FileSync)
        self.error = self.error or error
        if self.error is None:
            self.synced_size = max(self.synced_size, point.size)
        return self.error

    def discard_unsynced(self) -> None:
        """After an error: durably cut off what is not synced, so that it is not replayed. Raises LogWriteError.

        Any thread may call it, during no sync.
        """
        try:
            self._files.truncate(self._fd, self.synced_size)
            self._files.sync(self._fd)
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc

    def remove(self) -> None:
        """Delete the file; durably after an error, because it may have what was refused. Raises LogWriteError.

        Any thread may call it.
        """
        try:
            try:
                self._files.unlink(self.path)
            except FileNotFoundError:
                pass  # an earlier attempt has deleted it
            if self.error is not None:
                self._files.sync_folder(self.path.parent)
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc

    def close(self) -> None:
        """Close the file, during no sync."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)
