"""Appending to the last segment of a log, and syncing it.

The writer truncates a failed write, so that the file ends after a whole record; until that succeeds, the file is
"torn". After a failed sync, all unsynced bytes are written again, because the kernel may have dropped them.

If syncs store little, most of their time goes into metadata: each makes the file longer and takes new blocks, which
commits the file system's journal. So the writer then writes zeros ahead, and the next writes replace them: see
docs/decisions/0049. Zeros are no record. They are cut off before the next segment begins, and when the log is closed.

One thread has the writer. Another one may sync meanwhile: it gets a `SegmentSync`, and the writer gets the result.
"""

import logging
from collections import deque
from collections.abc import Sequence
from errno import EIO
from pathlib import Path
from typing import Final

from ..errors import LogWriteError
from ..files import Files, LogFile, OpenFiles
from ..records import RecordBatch, UnsyncedPart, encode_header
from .format import FILE_HEADER_BYTES, decode_file_header, encode_file_header, segment_path
from .reader import Segment

logger: logging.Logger = logging.getLogger("trio_nsq.log")

_REWRITE_BYTES: Final = 1024 * 1024
_SMALL_SYNC_BYTES: Final = 32 * 1024
"""A sync that stores more takes longer for its bytes than for the metadata."""
_LEAST_ZEROS: Final = 4 * 1024
_ZEROS: Final = bytes(128 * 1024)
"""The most that is written ahead. Less is, until so much was stored by small syncs: a topic with few messages has at
most as many zeros as bytes."""


class SegmentSync:
    """The `SyncPoint` of a segment: it has a file, and no state of the writer.

    Attributes:
        segment: The segment.
        size: Where the segment's last write ends.
        cuts, failed_syncs: The writer's.
    """

    __slots__ = ("_files", "_rewrite_from", "cuts", "failed_syncs", "segment", "size")

    def __init__(
        self,
        files: Files,
        segment: Segment,
        size: int,
        cuts: int,
        failed_syncs: int,
        rewrite_from: int,
    ) -> None:
        self.segment: Segment = segment
        self.size: int = size
        self.cuts: int = cuts
        self.failed_syncs: int = failed_syncs
        self._files = files
        self._rewrite_from = rewrite_from

    def sync(self) -> None:
        """As `SyncPoint.sync`.

        After a failed sync, the kernel marks pages as clean although the disk does not have them. The next sync would
        not write them and would report success. So all unsynced bytes are written again first.
        """
        files, offset = self._files, self._rewrite_from
        try:
            with self.segment.file as fd:
                while offset < self.size:
                    data = files.read(fd, min(_REWRITE_BYTES, self.size - offset), offset)
                    if not data:
                        raise OSError(EIO, "another process truncated the file")
                    files.write(fd, offset, [data])
                    offset += len(data)
                files.sync(fd)
        except OSError as exc:
            raise LogWriteError(self.segment.path, exc) from exc


class SegmentWriter:
    """Appends to a segment. Use `create` for a new segment, `recover` for an existing one.

    Args:
        segment: The segment; all its bytes are whole, committed records.
        synced_to: The offset up to which the file is on stable storage.

    Attributes:
        segment: For reading. Readers see writes only after `commit`.
        written_size: Bytes up to the end of the last written record, committed or not.
        failed_syncs: As `Log.failed_syncs`.
    """

    def __init__(self, files: Files, segment: Segment, synced_to: int) -> None:
        self.segment = segment
        self.written_size: int = segment.size
        self._zeros_to = segment.size  # where the file ends; from `written_size` on it has zeros
        self._small_bytes = 0  # stored by small syncs since the last large one
        self._writes_zeros: bool = files.writes_zeros_ahead  # and no write has failed: the disk may be full
        self._files = files
        self._file = segment.file
        self._seed = segment.seed
        # Uncommitted writes: the batches of each, the offset of its end, and its bytes.
        self._uncommitted: deque[tuple[Sequence[RecordBatch], int, Sequence[bytes]]] = deque()
        self._in_wal_to = 0  # the end of the last part that a write-ahead log has
        # How often the file was cut, and how often before its last good sync.
        self._cuts = self._synced_cuts = 0
        self._synced_to = synced_to
        self._sync_failed = False
        self.failed_syncs: int = 0
        self._has_torn_tail = (
            False  # a failed write could not be truncated: there are bytes after `written_size`
        )

    @classmethod
    def create(
        cls, open_files: OpenFiles, folder: Path, base_sequence: int, now_ns: int, incarnation: bytes
    ) -> "SegmentWriter":
        """Create an empty segment, durably. Raises LogWriteError."""
        files = open_files.files
        path = segment_path(folder, base_sequence)
        encoded = encode_file_header(base_sequence, now_ns, incarnation)
        header = decode_file_header(encoded)
        assert header is not None
        try:
            files.make_folder(folder)
            file = _create_file(open_files, path)
            try:
                with file as fd:
                    files.write(fd, 0, [encoded])
                    files.sync(fd)
                    files.sync_folder(folder)
            except BaseException:
                file.close()
                try:
                    files.unlink(path)
                except OSError:
                    pass  # the file holds no record: the next attempt uses it, or the next start removes it
                raise
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        segment = Segment(files, file, header)
        return cls(files, segment, segment.size)

    def write(self, batches: Sequence[RecordBatch]) -> None:
        """Write batches at the end, as `Log.write`. Raises LogWriteError if nothing was written."""
        if self._has_torn_tail:
            self.cut()
        parts: list[bytes] = []
        for batch in batches:
            parts += (encode_header(batch, self._seed), batch.messages.data)
            if batch.metadata:
                parts.append(batch.metadata)
        start = self.written_size
        try:
            self._file.hold(True)
            with self._file as fd:
                self._files.write(fd, start, parts)
        except BaseException as exc:
            self._writes_zeros = False
            self._try_cut()
            if isinstance(exc, OSError):
                raise LogWriteError(self.segment.path, exc) from exc
            raise
        self.written_size = start + sum(batch.record_bytes for batch in batches)
        self._uncommitted.append((batches, self.written_size, parts))
        if self.written_size > self._zeros_to:
            self._zeros_to = self.written_size
            if self._writes_zeros and self._small_bytes >= _LEAST_ZEROS:
                self._write_zeros()

    def _write_zeros(self) -> None:
        """Write zeros ahead. Without space for them, the log goes on."""
        zeros = memoryview(_ZEROS)[: self._small_bytes]
        try:
            with self._file as fd:
                self._files.write(fd, self.written_size, [zeros])
        except OSError:
            self._writes_zeros = False
            self._try_cut()
        else:
            self._zeros_to = self.written_size + len(zeros)

    def pending_wal(self) -> UnsyncedPart | None:
        """As `Log.pending_wal`.

        After a cut, the segment needs a sync of its own: until then the disk may have intact records in the place of
        the next ones, and replay could not tell which are the newer.
        """
        header = self.segment.header
        if self.has_unsynced_cut or header.incarnation is None:
            return None
        start = max(self.segment.size, self._in_wal_to)
        data: list[bytes] = []
        for _, end, parts in self._uncommitted:
            if end > start:
                data += parts
        end = self.written_size
        return UnsyncedPart(header.incarnation, header.base_sequence, start, end - start, data)

    @property
    def unsynced_bytes(self) -> int:
        """As `Log.unsynced_bytes`."""
        return self.written_size - self._synced_to

    def mark_in_wal(self) -> None:
        """As `Log.mark_in_wal`."""
        self._in_wal_to = self.written_size
        self._small_bytes = 0  # its sync is not needed soon

    def commit(self, sequence: int) -> None:
        """Make writes below a sequence visible to readers, as `Log.commit`."""
        segment = self.segment
        uncommitted = self._uncommitted
        while uncommitted and uncommitted[0][0][-1].next_sequence <= sequence:
            batches, end, _ = uncommitted.popleft()
            start = at = segment.size
            for batch in batches:
                segment.index.add(batch.base_sequence, at)
                at += batch.record_bytes
            segment.index.up_to = end
            if start <= segment.header.size:
                segment.first_ns = batches[0].timestamp_ns
            segment.newest_ns = batches[-1].timestamp_ns
            # This order matters: a reader reads `size` first, so that no record it finds is beyond `next_sequence`.
            segment.next_sequence = batches[-1].next_sequence
            segment.size = end

    def rollback(self) -> None:
        """Truncate the uncommitted writes, as `Log.rollback`."""
        self._uncommitted.clear()
        self.written_size = self.segment.size
        self._synced_to = min(self._synced_to, self.segment.size)
        self._in_wal_to = min(self._in_wal_to, self.segment.size)
        self._try_cut()

    @property
    def has_unsynced_cut(self) -> bool:
        """As `Log.has_unsynced_cut`."""
        return self._has_torn_tail or self._cuts != self._synced_cuts

    def finish_cut(self) -> None:
        """As `Log.finish_cut`."""
        if self._has_torn_tail or self._zeros_to > self.written_size:
            self.cut()

    def _try_cut(self) -> None:
        try:
            self.cut()
        except LogWriteError as exc:
            # The bytes after `written_size` are never read. Until they are cut, a kill makes them part of the log.
            logger.error("%s, nor cut it back to %d bytes", exc, self.written_size)

    def cut(self) -> None:
        """Truncate the file to `written_size`. Raises LogWriteError."""
        self._has_torn_tail = True
        self._cuts += 1
        try:
            with self._file as fd:
                self._files.truncate(fd, self.written_size)
        except OSError as exc:
            raise LogWriteError(self.segment.path, exc) from exc
        self._has_torn_tail = False
        self._zeros_to = self.written_size

    def sync_point(self) -> SegmentSync:
        """As `Log.sync_point`."""
        size = self.written_size
        rewrite_from = self._synced_to if self._sync_failed else size
        return SegmentSync(self._files, self.segment, size, self._cuts, self.failed_syncs, rewrite_from)

    def end_sync(self, point: SegmentSync, error: Exception | None) -> Exception | None:
        """As `Log.end_sync`."""
        if error is None and point.failed_syncs != self.failed_syncs:
            error = LogWriteError(self.segment.path, OSError(EIO, "an earlier sync failed"))
        if error is not None:
            self.failed_syncs += 1
            self._sync_failed = True
            return error
        self._sync_failed = False
        self._synced_cuts = point.cuts
        stored = point.size - self._synced_to
        if stored > 0:
            self._synced_to = point.size
            self._small_bytes = self._small_bytes + stored if stored <= _SMALL_SYNC_BYTES else 0
        if self._synced_to == self.written_size and not self._has_torn_tail:
            self._file.hold(False)
        return None

    def sync(self) -> None:
        """Return when all writes are on stable storage. Raises LogWriteError."""
        point = self.sync_point()
        error: Exception | None = None
        try:
            point.sync()
        except LogWriteError as exc:
            error = exc
        if (error := self.end_sync(point, error)) is not None:
            raise error

    def seal(self) -> None:
        """Sync the segment and save its index before the next segment begins. Raises LogWriteError."""
        self.finish_cut()
        self.sync()
        self.segment.save_index()

    def close(self) -> None:
        """Truncate a failed write, and zeros that were written ahead. The caller closes the segment separately."""
        if (self._has_torn_tail or self._zeros_to > self.written_size) and self._file_exists():
            self._try_cut()

    def _file_exists(self) -> bool:
        """Whether the file is open, or can be opened again: that of a deleted topic has another name."""
        try:
            with self._file:
                return True
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the cut logs why it fails


def _create_file(open_files: OpenFiles, path: Path) -> LogFile:
    try:
        return open_files.create(path)
    except FileExistsError:
        file = open_files.open(path)
        with file as fd:
            if open_files.files.size(fd) <= FILE_HEADER_BYTES:
                return file  # left by a failed creation
        file.close()
        raise
