"""Reads the messages that only the archive of a running broker has."""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EHOSTDOWN, ENOENT
from pathlib import Path
from threading import Lock
from typing import Any, Final

from ..log.disk.history import ArchivedFile
from ..log.errors import LogReadError, NotASegmentError, UnusableSegmentError
from ..log.files import OpenFiles
from ..log.segment.format import segment_path
from ..log.segment.identity import FILE_NAME as INCARNATION_FILE
from ..log.segment.identity import Identity
from ..log.segment.index import SUFFIX as INDEX_SUFFIX
from ..log.segment.reader import Segment
from ..storage import Storage, StorageError
from .segment_names import ARCHIVED_SUFFIX, segment_name_of, segment_object
from .stored_files import ReadableFiles

logger: logging.Logger = logging.getLogger("trio_nsq.archive")

_BLOCK_BYTES: Final = 2 * 1024 * 1024
_OPEN_FILES: Final = 16
"""Each keeps up to three blocks in memory: 96 MiB in all."""
_KNOWN_SEGMENTS: Final = 64
"""Segments whose head and index stay in memory."""


class ArchiveReader:
    """Opens archived segments. Thread-safe, and blocking.

    Args:
        storage: The archive.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files = ArchivedFiles(storage)
        self._open_files = OpenFiles(self._files, _OPEN_FILES)
        self._lock = Lock()
        self._known: OrderedDict[Path, Segment] = OrderedDict()

    def open(self, folder: Path, identity: Identity, file: ArchivedFile) -> Segment | None:
        """See `SegmentArchive.open`."""
        on_disk = segment_path(folder, file.base_sequence)
        path = path_of(segment_object(on_disk, identity.incarnation, file.next_sequence))
        if path in self._files.missing:
            return None
        with self._lock:
            if path in self._known:
                self._known.move_to_end(path)
                return self._known[path]
        segment = self._open(path, identity)
        if segment is not None:
            segment.next_sequence = file.next_sequence
            with self._lock:
                self._known[path] = segment
                if len(self._known) > _KNOWN_SEGMENTS:
                    self._known.popitem(last=False)
        return segment

    def close(self) -> None:
        """Close the files. Nothing may be read any more."""
        for segment in self._known.values():
            segment.close()

    def _open(self, path: Path, identity: Identity) -> Segment | None:
        """Return None if the archive does not have the segment, or nothing in it can be read. Raises LogReadError."""
        try:
            return Segment.open(self._open_files, path, identity)
        except (UnusableSegmentError, NotASegmentError) as exc:
            url = self._storage.url_of(path.parent.as_posix())
            logger.error("%s: %s; its messages are skipped", url, exc.reason)
            self._files.missing.add(path)
        except LogReadError:
            if path not in self._files.missing:
                raise
        return None


class ArchivedFiles(ReadableFiles):
    """The segments of an archive: the path of each is its name, and behind that the name that it had on the disk.

    Attributes:
        missing: The paths of segments that the archive does not have any more: their names are not used again.
    """

    def __init__(self, storage: Storage, block_bytes: int = _BLOCK_BYTES) -> None:
        super().__init__(storage, block_bytes)
        self.missing: set[Path] = set()
        self._paths: dict[int, Path] = {}

    def _opened(self, path: Path) -> tuple[Any, int]:
        name = _name(path)
        with _as_os_error():
            try:
                file = self._storage.open_input(name)
                return file, file.size()
            except FileNotFoundError as exc:
                self._note_missing(path)
                raise OSError(ENOENT, f"{self._storage.url_of(name)} does not exist") from exc

    def open_read_only(self, path: Path) -> int:
        fd = super().open_read_only(path)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        with _as_os_error():
            try:
                return super().read(fd, size, offset)
            except StorageError:
                path = self._paths.get(fd)
                if path is not None and self._storage.size(_name(path)) is None:
                    self._note_missing(path)
                raise

    def _note_missing(self, path: Path) -> None:
        """Note that a segment is missing, unless the whole folder is: then the archive is away."""
        log_is_there = self._storage.size(f"{path.parent.parent.as_posix()}/{INCARNATION_FILE}") is not None
        if log_is_there and path.suffix != INDEX_SUFFIX and path not in self.missing:
            self.missing.add(path)
            logger.error("%s is missing; its messages are skipped", self._storage.url_of(_name(path)))


def path_of(name: str) -> Path:
    """Return the path of a segment in `ArchivedFiles`."""
    return Path(name, segment_name_of(name.rpartition("/")[2]))


def _name(path: Path) -> str:
    name = path.parent.as_posix()
    if path.name == INCARNATION_FILE:
        return f"{path.parent.parent.as_posix()}/{INCARNATION_FILE}"
    return name.removesuffix(ARCHIVED_SUFFIX) + INDEX_SUFFIX if path.suffix == INDEX_SUFFIX else name


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise OSError instead of StorageError: an archive that is away is no bad block."""
    try:
        yield
    except StorageError as exc:
        raise OSError(EHOSTDOWN, str(exc)) from exc
