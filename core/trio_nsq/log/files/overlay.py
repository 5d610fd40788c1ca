"""Files that another process owns, for readers that have to change them: changes stay in memory."""

from collections.abc import Sequence
from errno import EROFS
from pathlib import Path

from .file_system import Files


class OverlayFiles(Files):
    """Files for readers. Nothing is written to them: what is written stays in memory, and reads return it.

    Args:
        files: The file system that is read; None: the local one.
    """

    is_read_only = True

    def __init__(self, files: Files | None = None) -> None:
        self._files = files or Files()
        self._paths: dict[int, Path] = {}
        self._written: dict[Path, list[tuple[int, bytes]]] = {}

    @property
    def is_changed(self) -> bool:
        """Whether reads return something else than the files have."""
        return bool(self._written)

    def names(self, path: Path) -> list[str]:
        return self._files.names(path)

    def open(self, path: Path) -> int:
        return self.open_read_only(path)

    def open_read_only(self, path: Path) -> int:
        fd = self._files.open_read_only(path)
        self._paths[fd] = path.resolve()
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        self._files.close(fd)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        self._written.setdefault(self._paths[fd], []).append((offset, b"".join(parts)))

    def truncate(self, fd: int, size: int) -> None:
        """Do nothing: the log does not read what it has cut off."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass

    def unlink(self, path: Path) -> None:
        raise OSError(EROFS, "it is only read")

    def size(self, fd: int) -> int:
        ends = [offset + len(data) for offset, data in self._written.get(self._paths[fd], ())]
        return max(self._files.size(fd), *ends) if ends else self._files.size(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = self._files.read(fd, size, offset)
        for start, written in self._written.get(self._paths[fd], ()):
            begin, end = max(start, offset), min(start + len(written), offset + size)
            if begin < end:
                whole = bytearray(data.ljust(end - offset, b"\0"))
                whole[begin - offset : end - offset] = written[begin - start : end - start]
                data = bytes(whole)
        return data
