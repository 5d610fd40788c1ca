"""Reading segments as they will be after the next start of the broker, without changing them."""

from collections.abc import Sequence
from errno import EROFS
from pathlib import Path

from ..errors import LogError
from ..files import Files
from .file import write_ahead_files
from .replay import Replay


class ReplayedFiles(Files):
    """The file system for readers. Writes of a `Replay` stay in memory; reads return them."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        self._written: dict[Path, list[tuple[int, bytes]]] = {}

    def open(self, path: Path) -> int:
        return self.open_read_only(path)

    def open_read_only(self, path: Path) -> int:
        fd = super().open_read_only(path)
        self._paths[fd] = path.resolve()
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, offset: int, parts: Sequence[bytes]) -> None:
        self._written.setdefault(self._paths[fd], []).append((offset, b"".join(parts)))

    def sync(self, fd: int) -> None:
        pass

    def unlink(self, path: Path) -> None:
        raise OSError(EROFS, "it is only read")

    def size(self, fd: int) -> int:
        ends = [offset + len(data) for offset, data in self._written.get(self._paths[fd], ())]
        return max(super().size(fd), *ends) if ends else super().size(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read(fd, size, offset)
        for start, written in self._written.get(self._paths[fd], ()):
            begin, end = max(start, offset), min(start + len(written), offset + size)
            if begin < end:
                whole = bytearray(data.ljust(end - offset, b"\0"))
                whole[begin - offset : end - offset] = written[begin - start : end - start]
                data = bytes(whole)
        return data


def replayed_files(data_path: Path) -> tuple[Files, list[tuple[Path, str]]]:
    """Return the files of a data folder as they will be after the next start of the broker.

    A broker may be running, and delete write-ahead files meanwhile: then the topics' segments have what was in them.

    Returns:
        The files; and what is damaged in write-ahead files, or keeps them from being read.
    """
    files = ReplayedFiles()
    try:
        if not write_ahead_files(data_path, files.names(data_path)):
            return Files(), []
        replay = Replay(files, data_path)
        problems = list(replay.damage)
        for topic in replay.topics:
            try:
                replay.apply(topic, data_path / "topics" / f"{topic}.topic")
            except LogError as exc:
                problems.append((data_path, str(exc)))
    except (OSError, LogError, ValueError) as exc:
        return Files(), [(data_path, f"the write-ahead log cannot be read: {exc}")]
    return files, problems
