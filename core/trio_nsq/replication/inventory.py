"""What a follower's data folder has, so that its leader sends only what is missing or different."""

import stat
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from tempfile import SpooledTemporaryFile
from typing import Final, NamedTuple

from ..log.files import Files
from .operations import InvalidOperation, check_path, is_shared, joined

BLOCK_BYTES: Final = 1024 * 1024
DIGEST_BYTES: Final = 16
_HEAD = Struct(">HQI")
SEGMENT_SUFFIX: Final = b".log"
END_BYTES: Final = 64 * 1024
"""How much of the end of a segment says what is before, at least."""
RECORD_BYTES: Final = 16 * 1024 * 1024
"""By default, no record is larger: the bodies of an MPUB are up to 5 MiB."""
_NEW_SEGMENTS: Final = 2
"""So many of the newest segments of a folder may end with a record that the leader has again, with another id at its
begin: a producer that got no OK has sent the same bodies to the next leader."""
_SIZE = Struct(">I")
MEMORY_BYTES: Final = 4 * 1024 * 1024
MOST_INVENTORY_BYTES: Final = 1024 * 1024 * 1024
_TEMPORARY: Final = "replica-inventory-"


class FileDigest(NamedTuple):
    """The content of a file, as far as it must be known.

    Attributes:
        first_block: Blocks before this one are not known. It is not 0 for a segment that is only appended to: two with
            the same end have the same beginning.
        digests: `DIGEST_BYTES` for each block of `BLOCK_BYTES` from there on; the last block may be shorter.
    """

    size: int
    first_block: int
    digests: bytes

    def encode(self, path: bytes) -> bytes:
        """Return the file's entry in an inventory."""
        return _HEAD.pack(len(path), self.size, self.first_block) + path + self.digests


def digest_of(block: bytes) -> bytes:
    """Return what identifies the content of a block."""
    return blake2b(block, digest_size=DIGEST_BYTES).digest()


def block_count(size: int) -> int:
    """Return how many blocks a file of this size has."""
    return -(-size // BLOCK_BYTES)


def decode_entry(entry: bytes) -> tuple[bytes, FileDigest]:
    """Return the path and the digest of an entry. Raises InvalidOperation."""
    if len(entry) < _HEAD.size:
        raise InvalidOperation("an entry of an inventory is cut off")
    path_bytes, size, first_block = _HEAD.unpack_from(entry)
    path = entry[_HEAD.size : _HEAD.size + path_bytes]
    digests = entry[_HEAD.size + path_bytes :]
    check_path(path)
    if len(digests) != DIGEST_BYTES * (block_count(size) - first_block):
        raise InvalidOperation(f"the inventory has {len(digests)} bytes of digests for {path[:200]!r}")
    return path, FileDigest(size, first_block, digests)


class Inventory:
    """What a follower has, at its leader: entries in the order of `take_inventory`, which are asked for in this order.

    Beyond some megabytes they are in a file without a name. A context manager.

    Args:
        folder: For this file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = SpooledTemporaryFile(  # noqa: SIM115 - closed in __exit__
            max_size=MEMORY_BYTES, prefix=_TEMPORARY, dir=str(folder)
        )
        self._added_bytes = 0
        self._next: tuple[list[tuple[bool, bytes]], FileDigest] | None = None
        self._is_read = False

    def __enter__(self) -> "Inventory":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, entries: Iterable[bytes]) -> None:
        """Add the next entries. Raises InvalidOperation: one is wrong, or they are too many; OSError."""
        for entry in entries:
            decode_entry(entry)
            self._added_bytes += len(entry)
            if self._added_bytes > MOST_INVENTORY_BYTES:
                raise InvalidOperation("the inventory is too large")
            self._file.write(_SIZE.pack(len(entry)) + entry)

    def find(self, path: bytes) -> FileDigest | None:
        """Return what the follower has under a path, which is behind the ones asked for before. Raises OSError.

        What is out of order is not found: then it is sent.
        """
        if not self._is_read:
            self._is_read = True
            self._file.seek(0)
            self._advance()
        wanted = _order_of(path)
        while self._next is not None and self._next[0] < wanted:
            self._advance()
        return self._next[1] if self._next is not None and self._next[0] == wanted else None

    def _advance(self) -> None:
        if not (head := self._file.read(_SIZE.size)):
            self._next = None
            return
        path, digest = decode_entry(self._file.read(_SIZE.unpack(head)[0]))
        self._next = _order_of(path), digest


def _order_of(path: bytes) -> list[tuple[bool, bytes]]:
    """Return a key for the order of a walk: in each folder first the files, then the folders, by name."""
    *folders, name = path.split(b"/")
    return [*((True, each) for each in folders), (False, name)]


class Source(NamedTuple):
    """A folder with files of a follower.

    Attributes:
        trusts_sealed: No sealed segment has a hole, so that its end says what is before.
        trusts_last: Nor has the last segment of a folder.
    """

    root: Path
    trusts_sealed: bool
    trusts_last: bool


def take_inventory(
    files: Files, sources: Sequence[Source], record_bytes: int = RECORD_BYTES
) -> Iterator[tuple[bytes, FileDigest]]:
    """Yield each file that members share, by relative path. If several sources have it, the first one counts.

    Args:
        record_bytes: No record of a segment is larger.

    Raises:
        OSError: A file cannot be read.
    """
    waiting = [b""]
    while waiting:
        folder = waiting.pop()
        found: dict[bytes, tuple[Source, int | None]] = {}  # how much of the end says what is before
        folders: set[bytes] = set()
        for source in sources:
            try:
                names, below = list_folder(files, source.root, folder, follows_links=False)
            except (FileNotFoundError, NotADirectoryError):
                continue
            segments = [name for name in names if name.endswith(SEGMENT_SUFFIX)]
            trusted = dict.fromkeys(segments[:-1] if source.trusts_sealed else (), END_BYTES)
            trusted |= dict.fromkeys(segments[-1:] if source.trusts_last else (), END_BYTES)
            for name in segments[-_NEW_SEGMENTS:]:
                if name in trusted:
                    trusted[name] += record_bytes
            for name in names:
                found.setdefault(name, (source, trusted.get(name)))
            folders.update(below)
        for name, (source, end_bytes) in sorted(found.items()):
            path = joined(folder, name)
            yield path, _digest(files, absolute(source.root, path), end_bytes)
        waiting += [joined(folder, name) for name in sorted(folders, reverse=True)]


def list_folder(
    files: Files, root: Path, folder: bytes, *, follows_links: bool
) -> tuple[list[bytes], list[bytes]]:
    """Return the names of the files and of the folders in a folder, sorted, without what members do not share.

    Named pipes and other things that are neither are left out: the broker has made none of them.
    """
    found: list[bytes] = []
    folders: list[bytes] = []
    path = absolute(root, folder)
    for name in files.names(path):
        encoded = name.encode(errors="surrogateescape")
        if not is_shared(joined(folder, encoded)):
            continue
        try:
            mode = (path / name).stat(follow_symlinks=follows_links).st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(mode):
            folders.append(encoded)
        elif stat.S_ISREG(mode):
            found.append(encoded)
    return sorted(found), sorted(folders)


def absolute(root: Path, path: bytes) -> Path:
    """Return the absolute path of a relative one."""
    return root / path.decode(errors="surrogateescape")


def _digest(files: Files, path: Path, end_bytes: int | None) -> FileDigest:
    """Return the digest of the whole file, or of its end."""
    fd = files.open_read_only(path)
    try:
        size = files.size(fd)
        first = max(0, size - end_bytes) // BLOCK_BYTES if end_bytes is not None else 0
        digests = bytearray()
        for at in range(first * BLOCK_BYTES, size, BLOCK_BYTES):
            digests += digest_of(files.read_fully(fd, min(BLOCK_BYTES, size - at), at))
        return FileDigest(size, first, bytes(digests))
    finally:
        files.close(fd)
