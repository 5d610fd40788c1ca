"""The segments of a data folder that the broker no longer changes: they are archived under names of their own.

An archived segment is written once. If its name is taken by other content, because the data folder was restored from
an older state, the segment is not archived: checkpoints have it like any other file.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..log.errors import LogReadError, NotASegmentError
from ..log.files import Files
from ..log.segment.format import FILE_HEADER_BYTES, base_in_name, decode_file_header
from ..log.segment.identity import FILE_NAME as INCARNATION_FILE
from ..log.segment.identity import Identity
from ..log.segment.index import SUFFIX as INDEX_SUFFIX
from ..log.segment.index import WITHOUT_INDEX_BYTES, SparseIndex
from ..platform.checksum import crc32
from ..replication.inventory import (
    SEGMENT_SUFFIX,
    FileDigest,
    absolute,
    block_count,
    list_folder,
)
from ..replication.operations import InvalidOperation, check_path, joined
from ..replication.recorder import RecordingFiles
from ..storage import Storage, naming_file
from .manifest import ArchiveDamaged, Checkpoint, read_object
from .segment_names import ARCHIVED_SUFFIX, segment_object

logger: logging.Logger = logging.getLogger("trio_nsq.archive")

_TOPICS: Final = b"topics"
_COPY_BYTES: Final = 4 * 1024 * 1024
_SEEN_S: Final = 60.0
"""So long after an object was seen, the only other copy may be deleted."""
_MOST_INDEX_BYTES: Final = 64 * 1024 * 1024
_LAST: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ArchivedSegment:
    """A segment in the archive.

    Attributes:
        path: Relative to the data folder, as operations have it.
        name: The object.
        crc: CRC-32 of the whole file.
        end: A batch begins at this offset. No other batch has its ids, so a file with the same bytes from there on is
            the same segment. None: not known.
        end_crc: CRC-32 of the bytes from there on.
    """

    path: bytes
    name: str
    size: int
    crc: int
    end: int | None = None
    end_crc: int = 0


def encode_segments(segments: Iterable[ArchivedSegment]) -> bytes:
    """Return the content of the object `segments` of a checkpoint."""
    lines = (
        json.dumps(asdict(each) | {"path": each.path.decode(errors="surrogateescape")}) for each in segments
    )
    return "".join(line + "\n" for line in lines).encode()


def read_segments(storage: Storage, checkpoint: Checkpoint) -> dict[bytes, ArchivedSegment]:
    """Return the archived segments of a checkpoint, by path. Raises ArchiveDamaged, StorageError, OSError."""
    name = checkpoint.segments_name
    lines = read_object(storage, name).splitlines()
    try:
        segments = [_segment(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError, InvalidOperation, RecursionError) as exc:
        raise ArchiveDamaged(f"{storage.url_of(name)} is damaged") from exc
    return {each.path: each for each in segments}


def _segment(content: Any) -> ArchivedSegment:
    path = content["path"].encode(errors="surrogateescape")
    check_path(path)
    if not isinstance(content["name"], str) or not isinstance(content["size"], int):
        raise ValueError(content)
    end = content.get("end")
    return ArchivedSegment(
        *(path, content["name"], content["size"], int(content["crc"])),
        *(None if end is None else int(end), int(content.get("end_crc", 0))),
    )


def sealed_segments(files: Files, root: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each segment that has a next one in its folder: its path, and the first sequence of the next one."""
    with suppress(FileNotFoundError):
        for topic in list_folder(files, root, _TOPICS, follows_links=True)[1]:
            folder = joined(_TOPICS, topic)
            with suppress(FileNotFoundError, NotADirectoryError):
                names = list_folder(files, root, folder, follows_links=True)[0]
                paths = [joined(folder, name) for name in names if name.endswith(SEGMENT_SUFFIX)]
                with suppress(NotASegmentError):
                    bases = [base_in_name(absolute(root, path)) for path in paths]
                    yield from zip(paths, bases[1:], strict=False)


class ArchivedSegments:
    """The segments that the archive has of a data folder: what a catch-up need not copy.

    Args:
        files: Of the data folder.
        known: What an earlier checkpoint of the archive has, by path.

    Attributes:
        found: Those that this folder has, too, by path.
        conflicts: The names under which the archive has other messages than this folder.
    """

    def __init__(self, files: RecordingFiles, storage: Storage, known: dict[bytes, ArchivedSegment]) -> None:
        self.found: dict[bytes, ArchivedSegment] = {}
        self._files = files
        self._root = files.root
        self._storage = storage
        self._known = known
        self.conflicts: set[str] = set()
        self._refused: set[str] = set()  # names of segments without messages
        self._without_index: set[str] = set()  # names of segments that had no index when they were looked at
        self._asked: set[bytes] = set()  # paths
        self._seen_s: dict[bytes, float] = {}  # when the archive was seen to have these paths

    def find(self, path: bytes) -> FileDigest | None:
        """Return what is archived of a file: all of it, so that no block is compared; None: it is not archived."""
        segment = self.found.get(path)
        return None if segment is None else FileDigest(segment.size, block_count(segment.size), b"")

    def has(self, path: Path, incarnation: bytes, next_sequence: int) -> bool:
        """Whether this segment of a log is archived under its name. Any thread may ask."""
        found = self.found.get(os.fsencode(path.relative_to(self._root)))
        return found is not None and found.name == segment_object(path, incarnation, next_sequence)

    def still_has(self, path: Path, incarnation: bytes, next_sequence: int) -> bool:
        """As `SegmentArchive.still_has`; `archive` looks. Any thread may ask."""
        key = os.fsencode(path.relative_to(self._root))
        if not self.has(path, incarnation, next_sequence):
            return False
        seen_s = self._seen_s.get(key)
        if seen_s is not None and time.monotonic() < seen_s + _SEEN_S:
            return True
        self._asked.add(key)
        return False

    def _look(self, check: Callable[[], None]) -> bool:
        """Look for the segments that were asked for, forget those that are gone, and return whether there were any."""
        asked = self._asked.copy()
        for path in asked:
            segment = self.found.get(path)
            if segment is not None:
                check()
                if self._storage.size(segment.name) == segment.size:
                    self._seen_s[path] = time.monotonic()
                else:
                    logger.error(
                        "%s is missing or cut off: it is archived again", self._storage.url_of(segment.name)
                    )
                    self._known.pop(path, None)
                    del self.found[path]
            self._asked.discard(path)
        return bool(asked)

    def names(self, sealed: Iterable[tuple[bytes, int]]) -> set[str]:
        """Return the names of segments of `sealed_segments`, archived or not. Raises LogReadError."""
        names = set[str]()
        for path, next_base in sealed:
            at = absolute(self._root, path)
            identity = Identity.read(self._files, at.parent)
            if identity is not None:
                names.add(segment_object(at, identity.incarnation, next_base))
        return names

    def archive(self, sealed: Iterable[tuple[bytes, int]], check: Callable[[], None]) -> bool:
        """Archive segments of `sealed_segments` that are not archived yet; forgets those that are not there any more.

        Args:
            check: Called before each of them; may raise to end it.

        Returns whether `has` or `still_has` answer otherwise than before. Raises StorageError, OSError.
        """
        there = dict(sealed)
        for path in self.found.keys() - there.keys():
            del self.found[path]
            self._seen_s.pop(path, None)
        is_changed, before = self._look(check), self.found.copy()
        folder, identity = Path(), None
        for path, next_base in there.items():
            at = absolute(self._root, path)
            try:
                if at.parent != folder:
                    folder, identity = at.parent, Identity.read(self._files, at.parent)
                if identity is None:
                    continue  # the log has no messages
                name = segment_object(at, identity.incarnation, next_base)
                if path in self.found and self.found[path].name != name:
                    del self.found[path]  # the topic was deleted and created again
                if path not in self.found and name not in self._refused | self.conflicts:
                    check()
                    self._archive(path, next_base, identity, name)
            except (FileNotFoundError, NotASegmentError):
                pass  # it was deleted meanwhile
            except LogReadError as exc:
                logger.warning("%s", exc)
        return is_changed or self.found != before

    def _archive(self, path: bytes, next_base: int, identity: Identity, name: str) -> None:
        at = absolute(self._root, path)
        known = self._known.get(path)
        if known is not None and known.name != name:
            known = None
        if known is not None and self._has_end(at, known):
            self.found[path] = known
            return
        index = b""
        with suppress(OSError):  # readers do without an index
            index = self._files.content(at.with_suffix(INDEX_SUFFIX), _MOST_INDEX_BYTES)
        if not index and name not in self._without_index and self._size(at) > WITHOUT_INDEX_BYTES:
            self._without_index.add(name)
            return  # the broker saves it beside its writes to the next file: the next look archives both
        self._without_index.discard(name)
        size, crc = _extent(self._files, at)
        end, end_crc = self._end_of(at, size, index)
        if known is not None and (known.size, known.crc) == (size, crc):
            self.found[path] = replace(known, end=end, end_crc=end_crc)
            return
        if next_base == base_in_name(at) or not size:
            self._refused.add(name)
            return
        self._storage.put_new(f"{name.rpartition('/')[0]}/{INCARNATION_FILE}", identity.encode())
        if index:
            self._storage.put_new(name.removesuffix(ARCHIVED_SUFFIX) + INDEX_SUFFIX, index)
        segment = ArchivedSegment(path, name, size, crc, end, end_crc)
        if self._copy(at, segment) or self._is_there(segment):
            self.found[path] = segment
        else:
            self.conflicts.add(name)
            logger.warning(
                "%s has other messages than %s: this log was restored from an older state. Only checkpoints have the "
                "segment, and retention keeps it on the disk. Give --archive another place",
                *(self._storage.url_of(segment.name), at),
            )

    def _end_of(self, at: Path, size: int, index: bytes) -> tuple[int | None, int]:
        """Return `end` and `end_crc` of a segment with this index. Small segments have none: they are read quickly."""
        with self._opened(at) as fd:
            header = decode_file_header(self._files.read_fully(fd, FILE_HEADER_BYTES, 0))
            found = None if header is None else SparseIndex.decode(index, header.seed, size)
            entry = None if found is None else found.entry_before(_LAST)
            if entry is None:
                return None, 0
            return entry[1], crc32(self._files.read_fully(fd, size - entry[1], entry[1]))

    def _has_end(self, at: Path, segment: ArchivedSegment) -> bool:
        """Whether a file has the size and the end of an archived segment."""
        if (end := segment.end) is None:
            return False
        with self._opened(at) as fd:
            size = self._files.size(fd)
            return (
                size == segment.size and crc32(self._files.read_fully(fd, size - end, end)) == segment.end_crc
            )

    def _size(self, at: Path) -> int:
        with self._opened(at) as fd:
            return self._files.size(fd)

    @contextmanager
    def _opened(self, at: Path) -> Iterator[int]:
        fd = self._files.open_read_only(at)
        try:
            yield fd
        finally:
            self._files.close(fd)

    def _copy(self, at: Path, segment: ArchivedSegment) -> bool:
        """Write a segment into the archive; False if the name is taken."""
        with naming_file(self._storage.url_of(segment.name)):
            file = self._storage.create(segment.name)
            try:
                for data in _blocks(self._files, at):
                    file.write(data)
                return file.publish()
            except BaseException:
                file.discard()
                raise

    def _is_there(self, segment: ArchivedSegment) -> bool:
        """Whether the archive has this content under the name, from a writer that ended before its checkpoint."""
        there = self._storage.size(segment.name)
        if there != segment.size:
            return False
        found = self._storage.read(segment.name)
        return found is not None and crc32(found.data) == segment.crc


def _blocks(files: Files, path: Path) -> Iterator[bytes]:
    fd = files.open_read_only(path)
    try:
        offset = 0
        while data := files.read_fully(fd, _COPY_BYTES, offset):
            yield data
            offset += len(data)
    finally:
        files.close(fd)


def _extent(files: Files, path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file."""
    size = crc = 0
    for data in _blocks(files, path):
        size += len(data)
        crc = crc32(data, crc)
    return size, crc


def fetch_segment(storage: Storage, segment: ArchivedSegment) -> Iterator[tuple[int, bytes]]:
    """Yield the content of an archived segment, each piece with its offset.

    Raises:
        ArchiveDamaged: It is missing, or has other content than when it was archived.
        StorageError, OSError: It cannot be read.
    """
    url = storage.url_of(segment.name)
    try:
        file = storage.open_input(segment.name)
    except FileNotFoundError:
        raise ArchiveDamaged(f"{url} is missing") from None
    with file:
        offset = crc = 0
        while data := file.read(_COPY_BYTES):
            crc = crc32(data, crc)
            yield offset, bytes(data)
            offset += len(data)
    if (offset, crc) != (segment.size, segment.crc):
        raise ArchiveDamaged(f"{url} has other content than when it was archived")
