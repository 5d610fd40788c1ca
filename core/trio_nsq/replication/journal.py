"""A follower's journal: operations that its files may lack after a power cut.

     0                 8         12     16      32      40        48
    +-----------------+---------+------+-------+-------+--------+
    | 89 NSQJRN 0a    | version | crc  | nonce | epoch | number |
    +-----------------+---------+------+-------+-------+--------+

The crc covers the bytes after it; the crc of the nonce is the file's seed. All operations of the epoch up to `number`
are in the folder, durably. Rounds of operations follow:

     0      4          8          12     16       24            32
    +------+----------+----------+------+--------+-------------+------------+
    | NSQR | head_crc | data_crc | size | stable | last_number | operations |
    +------+----------+----------+------+--------+-------------+------------+

All integers are big-endian. `size` counts the operations' bytes, which data_crc covers; head_crc covers bytes 8..32.
Both start with the seed. `stable` is how much of the file was on stable storage before: what is damaged below it was
acknowledged.

A journal overwrites the last but one, because a sync of a file that grows takes longer: it also commits the file
system's own journal. What that one had behind the new rounds has another seed.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from ..log.errors import LogReadError
from ..log.files import Files
from ..platform.checksum import crc32

VERSION = 1
_MAGIC = b"\x89NSQJRN\n"
_HEAD = Struct(">8sII")
_REST = Struct(">16sQQ")
FILE_HEADER_BYTES = _HEAD.size + _REST.size
_ROUND_MAGIC = b"NSQR"
_ROUND_HEAD = Struct(">4sI")
_ROUND_REST = Struct(">IIQQ")
ROUND_HEADER_BYTES = _ROUND_HEAD.size + _ROUND_REST.size
_NAME = re.compile(r"replica-journal\.([0-9]+)\Z")
_MOST_BYTES = 1024**3
"""Maximum size of a journal, far above what a follower writes."""


class Position(NamedTuple):
    """A place in the operations of all leaders: the first `number` operations of an epoch, and what was before it."""

    epoch: int
    number: int


class Round(NamedTuple):
    """Operations that were stored together.

    Attributes:
        last_number: The number of the last operation of the leader that they contain.
    """

    last_number: int
    operations: bytes | memoryview  # memoryview alone is an error in compiled code


class JournalDamaged(Exception):
    """A journal lacks operations that were acknowledged."""


def journals(folder: Path, names: Sequence[str]) -> list[tuple[int, Path]]:
    """Return the number and the path of each journal among these names, the oldest first."""
    return sorted((int(match[1]), folder / name) for name in names if (match := _NAME.match(name)))


class StoredJournal:
    """A journal that a follower finds at its start.

    Attributes:
        base: What the folder has without it.
        rounds: Its rounds, in order, without an unfinished one at the end.

    Raises:
        JournalDamaged: Rounds that were acknowledged are damaged, or the version is unknown.
    """

    def __init__(self, content: bytes) -> None:
        if not _has_header(content):
            raise JournalDamaged("its header is damaged, or from another version")
        nonce, epoch, number = _REST.unpack_from(content, _HEAD.size)
        self.base: Position = Position(epoch, number)
        self.rounds: list[Round] = []
        seed, view = crc32(nonce), memoryview(content)
        at = FILE_HEADER_BYTES
        while (found := _round_at(view, at, seed)) is not None:
            at, _, complete = found
            self.rounds.append(complete)
        for stable in _later_rounds(content, view, at, seed):
            if stable > at:
                raise JournalDamaged(f"bytes {at} to {stable} are damaged")


def _has_header(content: bytes) -> bool:
    if len(content) < FILE_HEADER_BYTES:
        return False
    magic, version, crc = _HEAD.unpack_from(content)
    return (magic, version, crc) == (_MAGIC, VERSION, crc32(content[_HEAD.size : FILE_HEADER_BYTES]))


def _round_at(view: memoryview, at: int, seed: int) -> tuple[int, int, Round] | None:
    """Return the end of the round at an offset, its `stable`, and itself; None if there is no undamaged one."""
    if len(view) - at < ROUND_HEADER_BYTES:
        return None
    magic, head_crc = _ROUND_HEAD.unpack_from(view, at)
    begin = at + ROUND_HEADER_BYTES
    if magic != _ROUND_MAGIC or crc32(view[at + _ROUND_HEAD.size : begin], seed) != head_crc:
        return None
    data_crc, size, stable, last_number = _ROUND_REST.unpack_from(view, at + _ROUND_HEAD.size)
    end = begin + size
    if end > len(view) or crc32(view[begin:end], seed) != data_crc:
        return None
    return end, stable, Round(last_number, view[begin:end])


def _later_rounds(content: bytes, view: memoryview, at: int, seed: int) -> Iterator[int]:
    """Yield the `stable` of each undamaged round after an offset."""
    while (at := content.find(_ROUND_MAGIC, at)) >= 0:
        found = _round_at(view, at, seed)
        if found is None:
            at += 1
        else:
            at = found[0]
            yield found[1]


def read_journal(files: Files, folder: Path) -> StoredJournal | None:
    """Return the journal of a data folder; None if there is none.

    Raises:
        JournalDamaged: As `StoredJournal`.
        LogReadError: The operating system failed to read.
    """
    try:
        found = journals(folder, files.names(folder))
    except OSError as exc:
        raise LogReadError(folder, exc) from exc
    for _, path in reversed(found):
        try:
            content = files.content(path, _MOST_BYTES)
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        if len(content) > FILE_HEADER_BYTES or _has_header(content):
            return StoredJournal(content)
        # Its creation was interrupted: the one before is still needed, if there is one.
    return None


class Journal:
    """The journal that a follower writes. One thread has it. Every method may raise OSError.

    Attributes:
        size: Its size in bytes.
    """

    def __init__(self, files: Files, fd: int, base: Position) -> None:
        self._files = files
        self._fd = fd
        nonce = os.urandom(16)
        rest = _REST.pack(nonce, *base)
        self._seed = crc32(nonce)
        self.size: int = FILE_HEADER_BYTES
        self._stable = FILE_HEADER_BYTES
        files.write(fd, 0, [_HEAD.pack(_MAGIC, VERSION, crc32(rest)) + rest])
        files.sync(fd)

    @classmethod
    def begin(cls, files: Files, folder: Path, base: Position) -> "Journal":
        """Begin a journal, durably, with all operations up to `base` in the folder: no earlier one is needed.

        The last one stays, to be overwritten by the next one.
        """
        numbered = journals(folder, files.names(folder))
        earlier = [path for _, path in numbered]
        path = folder / f"replica-journal.{numbered[-1][0] + 1 if numbered else 1}"
        # Not under the new name before it has a new header: with its old one, it would be taken for the newest.
        written = earlier[0] if len(earlier) > 1 else path
        fd = files.create(path) if written == path else files.open(written)
        try:
            journal = cls(files, fd, base)
            if written != path:
                files.rename(written, path)
            files.sync_folder(folder)
            for each in earlier[1 if written != path else 0 : -1]:
                files.unlink(each)
        except BaseException:
            files.close(fd)
            raise
        return journal

    def append(self, operations: Sequence[bytes | memoryview], last_number: int) -> None:
        """Add a round, durably."""
        size = sum(map(len, operations))
        data_crc = self._seed
        for piece in operations:
            data_crc = crc32(piece, data_crc)
        rest = _ROUND_REST.pack(data_crc, size, self._stable, last_number)
        head = _ROUND_HEAD.pack(_ROUND_MAGIC, crc32(rest, self._seed)) + rest
        self._files.write(self._fd, self.size, [head, *operations])
        self._files.sync(self._fd)
        self.size += ROUND_HEADER_BYTES + size
        self._stable = self.size

    def close(self) -> None:
        """Close the file; it stays."""
        self._files.close(self._fd)


def remove_journals(files: Files, folder: Path) -> None:
    """Remove all journals, durably: the folder no longer follows. Raises OSError."""
    # The last one last: an earlier one must not be taken for it.
    for _, path in journals(folder, files.names(folder)):
        files.unlink(path)
    files.sync_folder(folder)
