"""Appending to the last segment of a log, and syncing it.

A write that fails is cut off again, so that the file ends after a whole record; until that succeeds the file is "torn".
After a failed sync all unsynced bytes are written again: the kernel may have dropped them.
"""

import logging
from collections import deque
from collections.abc import Sequence
from errno import EIO
from pathlib import Path
from threading import Lock

from ..errors import LogWriteError
from ..files import Files, LogFile, OpenFiles
from ..records import RecordBatch, encode_header
from .format import FILE_HEADER_BYTES, decode_file_header, encode_file_header, segment_path
from .reader import Segment

logger = logging.getLogger("trio_nsq.log")

_REWRITE_BYTES = 1024 * 1024


class SegmentWriter:
    """Appends to a segment. Make one with `create`, or with `recover` for a segment that exists.

    One thread may write while others read or sync.

    Args:
        segment: All its bytes are whole records, and committed.
        synced_to: Bytes up to here are on stable storage.

    Attributes:
        segment: For reading. Readers do not see what is written before `commit`.
        written_size: Bytes up to the end of the last written record, committed or not.
    """

    def __init__(self, files: Files, segment: Segment, synced_to: int) -> None:
        self.segment = segment
        self.written_size = segment.size
        self._files = files
        self._file = segment.file
        self._seed = segment.seed
        # Written and not committed: the batches of each write, and the offset of its end.
        self._uncommitted: deque[tuple[Sequence[RecordBatch], int]] = deque()
        self._synced_to = synced_to
        self._sync_failed = False
        self._sync_lock = Lock()
        # Held while `written_size` changes, and while the file is released because everything written is synced.
        self._size_lock = Lock()
        self._torn = False  # a failed write could not be cut off: there are bytes after `written_size`

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
                    pass  # it holds no record: the next attempt uses it, or the next start removes it
                raise
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        segment = Segment(files, file, header)
        return cls(files, segment, segment.size)

    def write(self, batches: Sequence[RecordBatch]) -> None:
        """Write batches after all that is written, as `Log.write`. Raises LogWriteError: nothing was written."""
        if self._torn:
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
                with self._size_lock:
                    self.written_size = start + sum([batch.record_bytes for batch in batches])
                    self._file.hold(True)  # a sync meanwhile may have released it; it is still open
        except BaseException as exc:
            self._try_cut()
            if isinstance(exc, OSError):
                raise LogWriteError(self.segment.path, exc) from exc
            raise
        self._uncommitted.append((batches, self.written_size))

    def commit(self, sequence: int) -> None:
        """Let readers see what is written below a sequence, as `Log.commit`."""
        segment = self.segment
        uncommitted = self._uncommitted
        while uncommitted and uncommitted[0][0][-1].next_sequence <= sequence:
            batches, end = uncommitted.popleft()
            start = at = segment.size
            for batch in batches:
                segment.index.add(batch.base_sequence, at)
                at += batch.record_bytes
            segment.index.up_to = end
            if start <= segment.header.size:
                segment.first_ns = batches[0].timestamp_ns
            segment.newest_ns = batches[-1].timestamp_ns
            # In this order: a reader reads `size` first, so that no record it finds is beyond `next_sequence`.
            segment.next_sequence = batches[-1].next_sequence
            segment.size = end

    def take_back(self) -> None:
        """Cut off what is written and not committed, as `Log.take_back`."""
        self._uncommitted.clear()
        self.written_size = self.segment.size
        self._synced_to = min(self._synced_to, self.segment.size)
        self._try_cut()

    def _try_cut(self) -> None:
        try:
            self.cut()
        except LogWriteError as exc:
            # The bytes after `written_size` are never read, and the next write begins with a cut.
            logger.error("%s, nor cut it back to %d bytes", exc, self.written_size)

    def cut(self) -> None:
        """Cut the file to `written_size`. Raises LogWriteError."""
        self._torn = True
        try:
            with self._file as fd:
                self._files.truncate(fd, self.written_size)
        except OSError as exc:
            raise LogWriteError(self.segment.path, exc) from exc
        self._torn = False

    def sync(self) -> None:
        """Return when all that was written before the call is on stable storage. Raises LogWriteError."""
        size = self.written_size
        try:
            self._sync()
        except OSError as exc:
            raise LogWriteError(self.segment.path, exc) from exc
        self._synced_to = max(self._synced_to, size)
        with self._size_lock:
            if self._synced_to == self.written_size and not self._torn:
                self._file.hold(False)

    def _sync(self) -> None:
        """Sync the file; after a failure, first write again what was not synced before.

        A sync that fails leaves the kernel with pages that it calls clean, though the disk does not have them. The
        next sync would not write them and would report success.
        """
        with self._sync_lock, self._file as fd:
            if self._sync_failed:
                offset, end = self._synced_to, self.written_size
                while offset < end:
                    data = self._files.read(fd, min(_REWRITE_BYTES, end - offset), offset)
                    if not data:
                        raise OSError(EIO, "the file was cut by somebody else")
                    self._files.write(fd, offset, [data])
                    offset += len(data)
            self._sync_failed = True
            self._files.sync(fd)
            self._sync_failed = False

    def seal(self) -> None:
        """Sync the segment for the last time, and save its index: another follows. Raises LogWriteError."""
        if self._torn:
            self.cut()
        self.sync()
        self.segment.save_index()

    def close(self) -> None:
        """Cut off a failed write, if there is one. The segment is closed separately."""
        if self._torn:
            self._try_cut()


def _create_file(open_files: OpenFiles, path: Path) -> LogFile:
    try:
        return open_files.create(path)
    except FileExistsError:
        file = open_files.open(path)
        with file as fd:
            if open_files.files.size(fd) <= FILE_HEADER_BYTES:
                return file  # a creation that failed left it
        file.close()
        raise
