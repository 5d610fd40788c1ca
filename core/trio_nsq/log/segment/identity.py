"""The identity of a log, in the file `incarnation` beside the segments: it determines which segments are the log's.

     0                 8         12     16            32
    +-----------------+---------+------+-------------+-------------------------------------- - -
    | 89 NSQTOP 0a    | version | crc  | incarnation | (base_sequence, seed), 8 bytes each, x n
    +-----------------+---------+------+-------------+-------------------------------------- - -

All integers are big-endian; the crc covers the bytes after it. The incarnation is 16 random bytes, created with the
log's first segment: a topic that is deleted and created again gets another one. A segment's header contains it, and a
segment with another incarnation belongs to another topic. Segments of format 1 have none; the file lists them, with
their seeds, when the log first opens them.

If the file is lost, the log rebuilds it from the segments.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from errno import EFBIG, EIO
from functools import partial
from pathlib import Path
from struct import Struct

from ...platform.checksum import crc32
from ..errors import DamagedSegmentError, ForeignSegmentError, LogReadError, NotASegmentError
from ..files import Files
from ..records import HEADER_BYTES, decode_header
from .format import (
    FILE_HEADER_BYTES,
    HEADER_BYTES_1,
    INCARNATION_BYTES,
    VERSION,
    FileHeader,
    base_in_name,
    decode_file_header,
    encode_file_header,
    is_unfinished,
    seed_for,
    segment_path,
    version_in,
)
from .scan import Read
from .seed_search import find_seed

FILE_NAME = "incarnation"
_MAGIC = b"\x89NSQTOP\n"
_VERSION = 1
_HEAD = Struct(">8sII")
_ENTRY = Struct(">QQ")
_BLOCK_BYTES = 4096
_MOST_BYTES = 64 * 1024 * 1024
"""Maximum size; enough for four million segments of format 1. A larger file is damaged."""


@dataclass(slots=True)
class Identity:
    """The content of the file, which distinguishes a log's segments from those of other logs.

    Attributes:
        incarnation: The topic's incarnation.
        format_1_seeds: The seeds of its segments of format 1, by base sequence, including deleted segments.
    """

    incarnation: bytes = field(default_factory=lambda: os.urandom(INCARNATION_BYTES))
    format_1_seeds: dict[int, int] = field(default_factory=dict)

    @classmethod
    def derive(cls, files: Files, paths: Iterable[Path]) -> "Identity":
        """Derive a log's identity from its segments, if the file is lost or an earlier version created the log.

        The incarnation is the most frequent one, in a tie the newest segment's. Segments without one count as the
        log's.

        Args:
            paths: The log's segments, oldest first.

        Raises:
            LogReadError: The operating system failed to read.
            NotASegmentError: A name is not the name of a segment.
        """
        found = [(base_in_name(path), _header_or_seed(files, path)) for path in paths]
        headers = [evidence for _, evidence in reversed(found) if isinstance(evidence, FileHeader)]
        named = Counter(header.incarnation for header in headers if header.incarnation is not None)
        identity = cls(named.most_common(1)[0][0]) if named else cls()
        for base_sequence, evidence in found:
            seed = (
                evidence.seed
                if isinstance(evidence, FileHeader) and evidence.incarnation is None
                else evidence
            )
            if isinstance(seed, int) and seed != seed_for(base_sequence, identity.incarnation):
                identity.format_1_seeds[base_sequence] = seed
        return identity

    @classmethod
    def read(cls, files: Files, folder: Path) -> "Identity | None":
        """Read the identity of the log in this folder; None if the file is missing or damaged.

        Raises:
            LogReadError: The operating system failed to read, possibly temporarily: the file is not lost.
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
        return cls.decode(data)

    @classmethod
    def decode(cls, data: bytes) -> "Identity | None":
        """Return the identity in the content of a file; None if it is damaged."""
        content = data[_HEAD.size :]
        if len(content) < INCARNATION_BYTES or (len(content) - INCARNATION_BYTES) % _ENTRY.size:
            return None
        if _HEAD.unpack_from(data) != (_MAGIC, _VERSION, crc32(content)):
            return None
        return cls(content[:INCARNATION_BYTES], dict(_ENTRY.iter_unpack(content[INCARNATION_BYTES:])))

    def encode(self) -> bytes:
        content = self.incarnation + b"".join(_ENTRY.pack(*entry) for entry in self.format_1_seeds.items())
        return _HEAD.pack(_MAGIC, _VERSION, crc32(content)) + content

    def create(self, files: Files, folder: Path) -> None:
        """Write the file for a log without segments; creating the first segment syncs the folder. Raises OSError."""
        fd = files.create_or_empty(folder / FILE_NAME)
        try:
            files.write(fd, 0, [self.encode()])
            files.sync(fd)
        finally:
            files.close(fd)

    def seeds(self, base_sequence: int) -> set[int]:
        """Return the seeds that this log's segment with this base sequence can have."""
        listed = self.format_1_seeds.get(base_sequence)
        return {seed_for(base_sequence, self.incarnation)} | ({listed} if listed is not None else set())

    def list_format_1(self, headers: Iterable[FileHeader]) -> bool:
        """List the segments of format 1 among these, and return whether any was not listed before."""
        new = {each.base_sequence: each.seed for each in headers if each.incarnation is None}
        known = new.keys() <= self.format_1_seeds.keys()
        self.format_1_seeds.update(new)
        return not known

    def owns(self, header: FileHeader) -> bool:
        """Whether the segment with this header belongs to the log."""
        if header.incarnation is not None:
            return header.incarnation == self.incarnation
        if header.base_sequence in self.format_1_seeds:
            return self.format_1_seeds[header.base_sequence] == header.seed
        # An earlier version may have appended to the topic after this version listed its segments.
        return header.base_sequence > max(self.format_1_seeds, default=header.base_sequence)


def owner_of(error: ForeignSegmentError, files: Files, folder: Path) -> Path | None:
    """Return the log beside this folder that a foreign segment belongs to; None if there is none."""
    try:
        siblings = [folder.parent / name for name in sorted(files.names(folder.parent))]
    except OSError:
        return None
    for sibling in siblings:
        try:
            identity = Identity.read(files, sibling)
        except LogReadError:
            continue
        if (
            sibling != folder
            and identity is not None
            and error.seed in identity.seeds(base_in_name(error.path))
        ):
            return sibling
    return None


def find_header(read: Read, size: int, path: Path, identity: Identity | None) -> FileHeader | None:
    """Read a segment's header, or derive it from the records if it is damaged.

    Args:
        path: The segment's path; its name contains the base sequence.
        identity: The log's identity; None if unknown: then every segment is accepted.

    Returns:
        None if a crash interrupted the creation of the file: it holds no record.

    Raises:
        ForeignSegmentError: The segment belongs to another log.
        DamagedSegmentError: Neither its header nor any record in it can be read.
        NotASegmentError: The file was renamed, or a later version created it.
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
            name = segment_path(path.parent, header.base_sequence).stem
            raise NotASegmentError(path, f"it was renamed: its header says {name}")
        if identity is not None and not identity.owns(header):
            raise ForeignSegmentError(path, size, header.seed)
        return header
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
    return FileHeader(
        base_sequence,
        record.timestamp_ns,
        seed,
        None if is_of_format_1 else incarnation,
        HEADER_BYTES_1 if is_of_format_1 else FILE_HEADER_BYTES,
        encode_file_header(base_sequence, record.timestamp_ns, incarnation, seed),
        derived=True,
    )


def _header_or_seed(files: Files, path: Path) -> FileHeader | int | None:
    """Return a segment's header, or the seed of its records if the header is damaged. Raises LogReadError."""
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
