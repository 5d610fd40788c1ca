"""Which topic a log belongs to: the file `incarnation` beside its segments.

     0                 8         12     16            32
    +-----------------+---------+------+-------------+-------------------------------------- - -
    | 89 NSQTOP 0a    | version | crc  | incarnation | (base_sequence, seed), 8 bytes each, x n
    +-----------------+---------+------+-------------+-------------------------------------- - -

All integers are big-endian; the crc covers what follows it. The incarnation is 16 random bytes, made with the log's
first segment: a topic that is deleted and made again has another. Each segment names it, and a segment that names
another one is not this topic's. Segments of format 1 do not; so they are noted here, when they are found first.

If the file is lost, it is made again by what the segments say.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from errno import EFBIG, EIO
from functools import partial
from pathlib import Path
from struct import Struct

from zlib_ng.zlib_ng import crc32

from ..errors import DamagedSegmentError, ForeignSegmentError, LogReadError, NotASegmentError
from ..files import Files
from ..records import HEADER_BYTES, decode_header
from .format import (
    FILE_HEADER_BYTES,
    HEADER_BYTES_1,
    INCARNATION_BYTES,
    VERSION,
    FileHeader,
    Read,
    decode_file_header,
    encode_file_header,
    find_seed,
    is_unfinished,
    seed_for,
    version_in,
)

FILE_NAME = "incarnation"
_MAGIC = b"\x89NSQTOP\n"
_VERSION = 1
_HEAD = Struct(">8sII")
_NOTED = Struct(">QQ")
_NAME_DIGITS = 20
_NO_SEQUENCE = 2**63
_BLOCK_BYTES = 4096
_MOST_BYTES = 64 * 1024 * 1024
"""A larger file is damaged: this is room for four million segments of format 1."""


@dataclass(slots=True)
class Identity:
    """What tells a log's files from those of others.

    Attributes:
        incarnation: Of the topic.
        noted: The seeds of its segments of format 1, by base sequence; those that are deleted stay noted.
    """

    incarnation: bytes = field(default_factory=lambda: os.urandom(INCARNATION_BYTES))
    noted: dict[int, int] = field(default_factory=dict)

    @classmethod
    def learn(cls, files: Files, paths: Iterable[Path]) -> "Identity":
        """That of a log whose file is lost, or which an older program has made, by its segments.

        It is what most of them say, the newest if they differ. All those that do not say it are its own.

        Args:
            files: The file system.
            paths: Of its segments, oldest first.

        Raises:
            LogReadError: The operating system refused.
            NotASegmentError: A name is not a segment's.
        """
        found = [(base_in_name(path), _glance(files, path)) for path in paths]
        headers = [told for _, told in reversed(found) if isinstance(told, FileHeader)]
        named = Counter(header.incarnation for header in headers if header.incarnation is not None)
        identity = cls(named.most_common(1)[0][0]) if named else cls()
        for base_sequence, told in found:
            seed = told.seed if isinstance(told, FileHeader) and told.incarnation is None else told
            if isinstance(seed, int) and seed != seed_for(base_sequence, identity.incarnation):
                identity.noted[base_sequence] = seed
        return identity

    @classmethod
    def read(cls, files: Files, folder: Path) -> "Identity | None":
        """That of the log in this folder; None if it is not there, or damaged.

        Raises:
            LogReadError: The operating system refused. That may pass: what is read then is not to be taken for lost.
        """
        path = folder / FILE_NAME
        try:
            data = files.content(path, _MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            if exc.errno == EFBIG:
                return None
            raise LogReadError(path, exc) from exc
        content = data[_HEAD.size :]
        if len(content) < INCARNATION_BYTES or (len(content) - INCARNATION_BYTES) % _NOTED.size:
            return None
        if _HEAD.unpack_from(data) != (_MAGIC, _VERSION, crc32(content)):
            return None
        return cls(content[:INCARNATION_BYTES], dict(_NOTED.iter_unpack(content[INCARNATION_BYTES:])))

    def encode(self) -> bytes:
        """The file's content."""
        content = self.incarnation + b"".join(map(_NOTED.pack, self.noted.keys(), self.noted.values()))
        return _HEAD.pack(_MAGIC, _VERSION, crc32(content)) + content

    def create(self, files: Files, folder: Path) -> None:
        """Write the file, for a log that has no segment yet; making that makes its name durable. Raises OSError."""
        fd = files.create_or_empty(folder / FILE_NAME)
        try:
            files.write(fd, 0, [self.encode()])
            files.sync(fd)
        finally:
            files.close(fd)

    def seeds(self, base_sequence: int) -> set[int]:
        """Those that a segment of this log may have which begins with this sequence."""
        noted = self.noted.get(base_sequence)
        return {seed_for(base_sequence, self.incarnation)} | ({noted} if noted is not None else set())

    def note(self, headers: Iterable[FileHeader]) -> bool:
        """Note those of its segments that do not say whose they are; returns whether any was not noted yet."""
        new = {each.base_sequence: each.seed for each in headers if each.incarnation is None}
        known = new.keys() <= self.noted.keys()
        self.noted.update(new)
        return not known

    def owns(self, header: FileHeader) -> bool:
        """Whether a segment with this header is one of the log's."""
        if header.incarnation is not None:
            return header.incarnation == self.incarnation
        if header.base_sequence in self.noted:
            return self.noted[header.base_sequence] == header.seed
        # An older program may have gone on with the topic after this one had noted what there was.
        return header.base_sequence > max(self.noted, default=header.base_sequence)


def owner_of(header: FileHeader, files: Files, folder: Path) -> Path | None:
    """The log beside the one in this folder that a segment belongs to; None if it is none of them."""
    try:
        siblings = [folder.parent / name for name in sorted(files.names(folder.parent))]
    except OSError:
        return None
    for sibling in siblings:
        try:
            identity = Identity.read(files, sibling)
        except LogReadError:
            continue
        if sibling != folder and identity is not None and header.seed in identity.seeds(header.base_sequence):
            return sibling
    return None


def base_in_name(path: Path) -> int:
    """The base sequence that a segment of this name has. Raises NotASegmentError."""
    if len(path.stem) != _NAME_DIGITS or not path.stem.isascii() or not path.stem.isdigit():
        raise NotASegmentError(path, "its name is not a sequence")
    base_sequence = int(path.stem)
    if base_sequence >= _NO_SEQUENCE:
        raise NotASegmentError(path, "its name is no sequence: it is too large")
    return base_sequence


def name_for(base_sequence: int) -> str:
    """The name, without its suffix, of a segment that begins with this sequence: names sort as sequences do."""
    return f"{base_sequence:0{_NAME_DIGITS}d}"


@dataclass(frozen=True, slots=True)
class FoundHeader:
    """A segment's header, as it is or as it has to have been.

    Attributes:
        header: See there.
        damaged: It cannot be read, and is told by the records.
    """

    header: FileHeader
    damaged: bool


def find_header(read: Read, size: int, path: Path, identity: Identity | None) -> FoundHeader | None:
    """Find out what a segment is.

    Args:
        read: Reads the file.
        size: Of the file, bytes.
        path: Its name says where it begins.
        identity: Of the log; None if it is not known, so that every segment is taken for one of its.

    Returns:
        None if the file was never finished being made: it holds no record.

    Raises:
        ForeignSegmentError: It is one of another log.
        DamagedSegmentError: Neither its header nor any record in it can be read.
        NotASegmentError: It was renamed, or a newer program has made it.
        OSError: As `read`.
    """
    base_sequence = base_in_name(path)
    head, start, error = b"", 0, None
    try:
        head = read(FILE_HEADER_BYTES, 0)
    except OSError as exc:
        if exc.errno != EIO or identity is None:
            raise
        start, error = _BLOCK_BYTES, exc
    header = decode_file_header(head)
    if header is not None:
        if header.base_sequence != base_sequence:
            name = name_for(header.base_sequence)
            raise NotASegmentError(path, f"it was renamed: its header says {name}")
        if identity is not None and not identity.owns(header):
            raise ForeignSegmentError(path, size, header)
        return FoundHeader(header, damaged=False)
    incarnation = identity.incarnation if identity is not None else None
    if error is None and size <= FILE_HEADER_BYTES and is_unfinished(head, base_sequence, incarnation):
        return None
    likely = identity.seeds(base_sequence) if identity is not None else ()
    found = find_seed(read, start, size, base_sequence, likely)
    if found is None:
        if error is not None:
            raise error
        version = version_in(head)
        if version is not None and version > VERSION:
            reason = f"its version is {version}, this program reads versions 1 to {VERSION}"
            raise NotASegmentError(path, reason)
        raise DamagedSegmentError(path, size)
    seed, record = found
    if incarnation is not None:
        is_of_format_1 = seed != seed_for(base_sequence, incarnation)
    else:
        incarnation = bytes(INCARNATION_BYTES)
        is_of_format_1 = decode_header(read(HEADER_BYTES, HEADER_BYTES_1), 0, seed) is not None
    header = FileHeader(
        base_sequence,
        record.timestamp_ns,
        seed,
        None if is_of_format_1 else incarnation,
        HEADER_BYTES_1 if is_of_format_1 else FILE_HEADER_BYTES,
        encode_file_header(base_sequence, record.timestamp_ns, incarnation, seed),
    )
    return FoundHeader(header, damaged=True)


def _glance(files: Files, path: Path) -> FileHeader | int | None:
    """The header of a segment, or the seed of its records if that is damaged. Raises LogReadError."""
    try:
        fd = files.open_read_only(path)
        try:
            read, size = partial(files.read, fd), files.size(fd)
            header = decode_file_header(read(FILE_HEADER_BYTES, 0))
            if header is not None:
                return header
            found = find_seed(read, 0, size, base_in_name(path), ())
        finally:
            files.close(fd)
    except OSError as exc:
        raise LogReadError(path, exc) from exc
    return found[0] if found is not None else None
