"""The carried-forward segment: messages that channels still need, copied from segments that are then discarded.

     0                 8         12     16      24            40
    +-----------------+---------+------+-------+-------------+-----------------+---------------+-------- - -
    | 89 NSQOLD 0a    | version | crc  |   n   | incarnation | sequences, 8 x n | offsets, 8 x n | records
    +-----------------+---------+------+-------+-------------+-----------------+---------------+-------- - -

All integers are big-endian; sequences ascend. The crc covers the bytes between it and the records. The records are as
in a segment, most of them with one message, with its own sequence and id. The incarnation is the topic's, see
`Identity`; the seed of the records' checksums is its CRC-32. So the records can be read even if the bytes before them
are damaged.

This is format 2. Format 1 has no incarnation, and its crc is the seed of the records' checksums.

The file is never changed, only replaced atomically, before the segments whose messages it holds are deleted. So a
message is in a segment, here, or temporarily in both.
"""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from struct import Struct, error
from typing import NamedTuple

from ...platform.checksum import crc32
from ...protocol import pack_messages
from ..errors import LogReadError, LogWriteError
from ..files import Files, LogFile, OpenFiles, OwnedFile
from ..records import HEADER_BYTES, RecordBatch, decode_header, decode_payload, encode_header, find_headers
from ..segment.format import INCARNATION_BYTES
from ..segment.index import big_endian, native
from ..segment.seed_search import find_seed

logger: logging.Logger = logging.getLogger("trio_nsq.log")

FILE_NAME = "stragglers"
_MAGIC = b"\x89NSQOLD\n"
_VERSION = 2
_HEAD = Struct(">8sIIQ")
_CRC_END = 16


class Index(NamedTuple):
    """The beginning of the file: the positions of its records.

    Attributes:
        seed: The initial value of the checksums of its records.
        sequences, offsets: First sequence and offset of each record.
        incarnation: The topic's incarnation; None in format 1.
        derived: Whether the index was damaged and was derived from the records.
    """

    seed: int
    sequences: "array[int]"
    offsets: "array[int]"
    size: int
    incarnation: bytes | None
    derived: bool = False


class CarriedForwardSegment:
    """A carried-forward segment, created by `open` or `replace`. Any thread may read it, even after it is replaced.

    Attributes:
        sequences: The first sequence of each record.
    """

    def __init__(self, files: Files, file: LogFile, index: Index) -> None:
        self.path: Path = file.path
        self.sequences: array[int] = index.sequences
        self.size: int = index.size
        self._file = file
        self._files = files
        self._release = OwnedFile(file)  # not during a read in another thread
        self._seed = index.seed
        self._offsets = index.offsets
        self._reported: set[int] = set()

    @classmethod
    def open(cls, open_files: OpenFiles, folder: Path, incarnation: bytes) -> "CarriedForwardSegment | None":
        """Open the carried-forward segment of a log; None if it has none.

        Renames a file that belongs to another topic or has no undamaged record, and logs this.

        Raises:
            LogReadError, LogWriteError: The operating system failed to read or write.
        """
        path, files = folder / FILE_NAME, open_files.files
        try:
            file = open_files.open(path)
            try:
                with file as fd:
                    index = read_index(files, fd, incarnation)
            except BaseException:
                file.close()
                raise
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        if index is not None and index.incarnation in (None, incarnation):
            if index.derived:
                logger.error("%s: its beginning is damaged; its records are still readable", path)
            return cls(files, file, index)
        file.close()
        suffix, reason = ".foreign", "it belongs to another topic"
        if index is None:
            suffix, reason = ".damaged", "damaged, the messages in it are lost"
        try:
            aside = files.set_aside(path, suffix)
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        logger.error("%s: set aside as %s: %s", path, aside.name, reason)
        return None

    @classmethod
    def replace(
        cls,
        open_files: OpenFiles,
        folder: Path,
        incarnation: bytes,
        records: Sequence[RecordBatch],
        old: "CarriedForwardSegment | None",
    ) -> "CarriedForwardSegment":
        """Replace the file durably by one with these records, at least one, in the order of their sequences.

        Raises:
            LogWriteError: The old file is still there.
        """
        path = folder / FILE_NAME
        sequences = array("Q", [record.base_sequence for record in records])
        start = _HEAD.size + INCARNATION_BYTES + 16 * len(records)
        offsets = array("Q", accumulate((record.record_bytes for record in records[:-1]), initial=start))
        checked = len(records).to_bytes(8, "big") + incarnation + big_endian(sequences) + big_endian(offsets)
        seed = crc32(incarnation)
        parts = [_MAGIC, _VERSION.to_bytes(4, "big"), crc32(checked).to_bytes(4, "big"), checked]
        for record in records:
            parts += (encode_header(record, seed), record.messages.data, record.metadata)
        content = b"".join(parts)
        try:
            if old is not None:
                old._file.hold(True)  # after the replacement, it cannot be opened again
            open_files.files.replace(path, content)
            file = open_files.open(path)
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        index = Index(seed, sequences, offsets, len(content), incarnation)
        return cls(open_files.files, file, index)

    def read(self, sequence: int) -> RecordBatch | None:
        """Return the record that holds a message; None if it is missing, or damaged, which is logged.

        Raises:
            LogReadError: The operating system failed to read.
        """
        index = bisect_right(self.sequences, sequence) - 1
        if index < 0:
            return None
        offset = self._offsets[index]
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self.size
        try:
            with self._file as fd:
                data = self._files.read_fully(fd, end - offset, offset)
        except OSError as exc:
            raise LogReadError(self.path, exc) from exc
        header = decode_header(data, 0, self._seed)
        record = (
            decode_payload(header, data[HEADER_BYTES : header.record_bytes]) if header is not None else None
        )
        if record is None and index not in self._reported:
            self._reported.add(index)
            logger.error("%s: the record at byte %d is damaged, skipped", self.path, offset)
        return record if record is not None and sequence < record.next_sequence else None

    def remove(self) -> None:
        """Delete the file. It can be read until it is closed. Raises LogWriteError."""
        try:
            self._file.hold(True)
            self._files.unlink(self.path)
        except FileNotFoundError:
            pass  # already deleted
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc

    def close(self) -> None:
        """Close the file after the reads in progress."""
        self._release()


def records_to_carry(
    sequences: Iterable[int],
    record_holding: Callable[[int], RecordBatch | None],
    keeps_metadata: Callable[[bytes], bool],
) -> Iterator[RecordBatch]:
    """Yield records that hold these messages, ascending, and few others.

    Args:
        sequences: Sequences of the messages, ascending.
        record_holding: Reads the record with a message; None if it is damaged.
        keeps_metadata: As for `Log.carry_forward`.
    """
    record: RecordBatch | None = None
    bodies: Sequence[bytes] = ()
    for sequence in sequences:
        if record is None or sequence >= record.next_sequence:
            record, bodies = record_holding(sequence), ()
            if record is not None and not keeps_metadata(record.metadata):
                record = replace(record, metadata=b"")
            if record is not None and (record.metadata or record.count == 1):
                yield record  # whole, because metadata describes all of its messages
        if record is None or record.metadata or record.count == 1:
            continue
        if not bodies:
            bodies = record.messages.bodies()
        at = sequence - record.base_sequence
        alone = pack_messages([bodies[at]])
        yield RecordBatch(sequence, record.first_id + at, record.timestamp_ns, record.due_ns, alone)


def read_index(files: Files, fd: int, incarnation: bytes | None) -> Index | None:
    """Read the beginning of an open file, or derive it from the records; None if there is no undamaged record.

    Args:
        incarnation: The topic's incarnation; None accepts any.

    Raises:
        OSError: The operating system failed to read.
    """
    size = files.size(fd)
    head = files.read_fully(fd, _HEAD.size, 0)
    try:
        magic, version, crc, count = _HEAD.unpack(head)
    except error:
        return None  # the file is too short
    extra = INCARNATION_BYTES if version == _VERSION else 0
    data = files.read_fully(fd, extra + 16 * count, _HEAD.size) if 16 * count <= size else b""
    if magic == _MAGIC and version in (1, _VERSION) and crc32(data, crc32(head[_CRC_END:])) == crc:
        named, half = data[:extra], extra + 8 * count
        seed = crc32(named) if named else crc
        return Index(seed, native(data[extra:half]), native(data[half:]), size, named or None)
    return _derive_index(files.read_fully(fd, size, 0), incarnation, version)


def _derive_index(data: bytes, incarnation: bytes | None, version: int) -> Index | None:
    """Derive the index of a file with this content from its records."""

    def read(size: int, offset: int) -> bytes:
        return data[offset : offset + size]

    found = None
    if incarnation is not None:
        found = find_seed(read, 0, len(data), 0, [crc32(incarnation)])
    if found is None and (incarnation is None or version != _VERSION):
        found = find_seed(read, 0, len(data), 0, ())  # of format 1, or of another topic
    if found is None:
        return None
    seed, _ = found
    sequences, offsets, end = array("Q"), array("Q"), 0
    for offset, header in find_headers(data, 0, seed):
        if offset >= end and (not sequences or header.base_sequence > sequences[-1]):
            sequences.append(header.base_sequence)
            offsets.append(offset)
            end = offset + header.record_bytes
    named = data[_HEAD.size :][:INCARNATION_BYTES]
    return Index(seed, sequences, offsets, len(data), named if crc32(named) == seed else None, derived=True)
