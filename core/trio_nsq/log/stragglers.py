"""The few messages of a log that are still wanted though the files around them are not.

     0                 8         12     16      24
    +-----------------+---------+------+-------+-----------------+---------------+-------- - -
    | 89 NSQOLD 0a    | version | crc  |   n   | sequences, 8 x n | offsets, 8 x n | records
    +-----------------+---------+------+-------+-----------------+---------------+-------- - -

All integers are big-endian; sequences ascend. The crc covers what lies between it and the records, and is the seed of
their checksums. The records are as in a segment, most of them with one message, under its own sequence and id.

The file is never changed, but replaced by another in one step. It has what is wanted of the segments that are deleted
before the first of them is; so a message is in a segment, or here, or for a while in both.
"""

import logging
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from struct import Struct, error
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from .errors import LogReadError, LogWriteError
from .files import Files
from .index import big_endian, native
from .open_files import LogFile, OpenFiles
from .records import HEADER_BYTES, RecordBatch, decode_header, decode_payload, encode_header

logger = logging.getLogger("trio_nsq.log")

FILE_NAME = "stragglers"
_MAGIC = b"\x89NSQOLD\n"
_VERSION = 1
_HEAD = Struct(">8sIIQ")
_CRC_END = 16


class Index(NamedTuple):
    """What such a file says of itself: the seed of its records, where each begins, and its size in bytes."""

    seed: int
    sequences: "array[int]"
    offsets: "array[int]"
    size: int


class Stragglers:
    """What such a file holds. Made by `open` or `replace`; to be read by any thread, also once it is replaced.

    Attributes:
        path: Of the file.
        sequences: The first one of each record.
        size: Of the file, bytes.
    """

    def __init__(self, files: Files, file: LogFile, index: Index) -> None:
        self.path = file.path
        self.sequences = index.sequences
        self.size = index.size
        self._file = file
        self._files = files
        self._release = weakref.finalize(self, file.close)  # not under a reader in another thread
        self._seed = index.seed
        self._offsets = index.offsets
        self._reported: set[int] = set()

    @classmethod
    def open(cls, open_files: OpenFiles, folder: Path) -> "Stragglers | None":
        """Those of a log; None if it has none, or their file is damaged, which is reported. Raises LogReadError."""
        path, files = folder / FILE_NAME, open_files.files
        try:
            file = open_files.open(path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        try:
            with file as fd:
                index = read_index(files, fd)
        except OSError as exc:
            file.close()
            raise LogReadError(path, exc) from exc
        if index is None:
            file.close()
            logger.error("%s: damaged, the messages in it are lost", path)
            return None
        return cls(files, file, index)

    @classmethod
    def replace(
        cls, open_files: OpenFiles, folder: Path, records: Sequence[RecordBatch], old: "Stragglers | None"
    ) -> "Stragglers":
        """Put these records, at least one, their sequences ascending, in place of the old ones, durably.

        Raises:
            LogWriteError: The old ones are still there.
        """
        path = folder / FILE_NAME
        sequences = array("Q", [record.base_sequence for record in records])
        start = _HEAD.size + 16 * len(records)
        offsets = array("Q", accumulate((record.record_bytes for record in records[:-1]), initial=start))
        index = big_endian(sequences) + big_endian(offsets)
        count = len(records).to_bytes(8, "big")
        seed = crc32(index, crc32(count))
        parts = [_MAGIC, _VERSION.to_bytes(4, "big"), seed.to_bytes(4, "big"), count, index]
        for record in records:
            parts += (encode_header(record, seed), record.messages.data, record.note)
        content = b"".join(parts)
        try:
            if old is not None:
                old._file.hold(True)  # its readers may finish, though it cannot be opened again
            open_files.files.replace(path, content)
            file = open_files.open(path)
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        return cls(open_files.files, file, Index(seed, sequences, offsets, len(content)))

    def read(self, sequence: int) -> RecordBatch | None:
        """The record that holds a message; None if it is not here, or is damaged, which is reported.

        Raises:
            LogReadError: The operating system refused.
        """
        index = bisect_right(self.sequences, sequence) - 1
        if index < 0:
            return None
        offset = self._offsets[index]
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self.size
        try:
            with self._file as fd:
                data = read_at(self._files, fd, end - offset, offset)
        except OSError as exc:
            raise LogReadError(self.path, exc) from exc
        header = decode_header(data, 0, self._seed)
        record = decode_payload(header, data[HEADER_BYTES:]) if header is not None else None
        if record is None and index not in self._reported:
            self._reported.add(index)
            logger.error("%s: the record at byte %d is damaged, passed over", self.path, offset)
        return record if record is not None and sequence < record.next_sequence else None

    def remove(self) -> None:
        """Delete the file; who is reading it may finish. Raises LogWriteError."""
        try:
            self._file.hold(True)
            self._files.unlink(self.path)
        except FileNotFoundError:
            pass  # somebody else did
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc

    def close(self) -> None:
        """Give the file back."""
        self._release()


def read_index(files: Files, fd: int) -> Index | None:
    """What the file of this descriptor says of itself; None if it is damaged. Raises OSError."""
    size = files.size(fd)
    head = read_at(files, fd, _HEAD.size, 0)
    try:
        magic, version, crc, count = _HEAD.unpack(head)
    except error:
        return None  # it is shorter
    data = read_at(files, fd, 16 * count, _HEAD.size) if 16 * count <= size else b""
    if magic != _MAGIC or version != _VERSION or crc32(data, crc32(head[_CRC_END:])) != crc:
        return None
    half = 8 * count
    return Index(crc, native(data[:half]), native(data[half:]), size)


def read_at(files: Files, fd: int, size: int, offset: int) -> bytes:
    """So many bytes of a file, fewer at its end. Raises OSError."""
    data = b""
    while len(data) < size and (more := files.read(fd, size - len(data), offset + len(data))):
        data += more
    return data
