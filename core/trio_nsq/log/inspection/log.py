"""Reading a whole log from its files, as a broker that starts with them would have it. Nothing is written."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from errno import EIO, ENOENT
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from ..disk.opening import end_of_unusable
from ..errors import LogReadError, NotASegmentError, UnusableSegmentError
from ..files import NO_FILE, Files, OpenFiles, OverlayFiles
from ..gaps import Span
from ..interface import ArchivedFileFacts
from ..records import HEADER_BYTES, RecordBatch, RecordHeader
from ..segment.format import FILE_HEADER_BYTES
from ..segment.identity import Identity
from ..segment.reader import Segment
from ..segment.recovery import holds_beyond, recover
from ..segment.scan import NO_LIMIT
from .segments import SegmentPath, find_identity, segment_bytes, with_limits

_UNREADABLE = NO_FILE | {EIO, ENOENT}
"""Errors of files that count as damaged, or that a broker has deleted meanwhile."""


class InspectedLog:
    """The files of a log as they were listed.

    Messages that only the carried-forward segment has are not read: brokers do not return them by sequence either.

    Args:
        segments: The files, the oldest first. If the last one has a limit, it is complete, and not recovered.
        recovered: What recovery has found, by file and size: for the next object of the same log.
        is_archived: Whether only the last one may have no record, so that the first one is not opened to find out; and
            the last one still begins with what recovery has found.

    Attributes:
        files: The segments that a broker would use. The last one is opened and recovered when it is needed.

    Raises:
        LogReadError: The operating system failed to read.
        NotASegmentError: A broker would not serve the topic.
    """

    archived_files: Sequence[ArchivedFileFacts] = ()

    def __init__(
        self,
        folder: Path,
        files: Files,
        segments: Sequence[SegmentPath],
        recovered: dict[tuple[Path, int], Segment],
        *,
        is_archived: bool = False,
    ) -> None:
        self._files = files
        self._folder = folder
        self._recovered = recovered
        self._is_archived = is_archived
        self._tail: Segment | None = None  # the last one, recovered
        self._end: int | None = None
        self.files: Sequence[SegmentPath] = segments
        if segments and segments[-1].limit is None:  # otherwise all are complete
            while len(self.files) > 1 and not is_archived and not self._has_records(self.files[0]):
                self.files = self.files[1:]
            if len(self.files) == 1 or segment_bytes(segments[-1], files) <= FILE_HEADER_BYTES:
                self._end = self._find_end()  # a broker may not use the file

    @cached_property
    def identity(self) -> Identity | None:
        """The log's identity; None if it is unknown: then every segment is accepted."""
        return find_identity(self._files, self._folder)[0]

    @property
    def first_sequence(self) -> int:
        return self.files[0].base_sequence if self.files else self.next_sequence

    @property
    def next_sequence(self) -> int:
        if self._end is None:
            self._end = self._find_end()
        return self._end

    @property
    def _sizes(self) -> list[int]:
        return [segment_bytes(each, self._files) for each in self.files]

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes)

    def bytes_from(self, sequence: int) -> int:
        """As `Log.bytes_from`, without opening a file."""
        starts = [*(each.base_sequence for each in self.files), self.next_sequence]
        return sum(
            size * (following - max(start, min(sequence, following))) // max(1, following - start)
            for size, (start, following) in zip(self._sizes, pairwise(starts), strict=True)
        )

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        for place in self._from(sequence):
            with self._opened(place) as segment:
                if segment is not None:
                    yield from segment.headers(sequence)

    def batches(self, span: Span) -> Iterator[RecordBatch]:
        """Yield the undamaged batches that have messages of a span, in order. Raises LogReadError."""
        for place in self._from(span.first, span.end):
            if place.base_sequence >= span.end:
                return
            with self._opened(place) as segment:
                for batch in segment.batches(span.first) if segment is not None else ():
                    if batch.base_sequence >= span.end:
                        return
                    yield batch

    # ------------------------------------------------------------------ files

    def _from(self, sequence: int, end: int = NO_LIMIT) -> Iterator[SegmentPath]:
        """Yield the segments that have messages from `sequence` on; those from `end` on need not be right."""
        if self._end is None and self.files and self.files[-1].base_sequence < end:
            self._end = self._find_end()
        for place in self.files:
            if place.limit is None or place.limit > sequence:
                yield place

    @contextmanager
    def _opened(self, place: SegmentPath) -> Iterator[Segment | None]:
        """Open a segment; None if nothing of it can be read."""
        with ExitStack() as stack:
            if place.limit is None:
                segment = self._tail
            elif (segment := self._open(place, OverlayFiles(self._files))) is not None:
                stack.callback(segment.close)
                segment.next_sequence = place.limit
            yield segment

    def _open(self, place: SegmentPath, files: OverlayFiles, most: int = 1) -> Segment | None:
        """Open a segment; None if it has no record, or, unless it is the last one, if it cannot be used."""
        try:
            return Segment.open(OpenFiles(files, most), place.path, self.identity)
        except NotASegmentError:
            if place.limit is None:
                raise
        except LogReadError as exc:
            if place.limit is None or exc.errno not in _UNREADABLE:
                raise
        return None

    def _has_records(self, place: SegmentPath) -> bool:
        """Whether a broker uses a file that is not the last one."""
        with self._opened(place) as segment:
            return segment is not None and not segment.is_empty

    # ------------------------------------------------------------------ the end

    def _find_end(self) -> int:
        """Return the sequence after the last message, and leave out what a broker removes or sets aside at its start.

        As `trio_nsq.log.disk.opening`.
        """
        end = 0
        while self.files:
            last = self.files[-1]
            if last.limit is not None:
                return last.limit
            try:
                self._tail = self._recover(last)
                if self._tail is not None and not self._is_unused(self._tail):
                    return max(end, self._tail.next_sequence)
            except UnusableSegmentError as exc:
                end = max(end, end_of_unusable(exc))
            self.files = with_limits([each.path for each in self.files[:-1]])
        return end

    def _is_unused(self, last: Segment) -> bool:
        """Whether the last segment has no record and the one before was written to later, as after a failed write."""
        if not last.is_empty or len(self.files) < 2:
            return False
        with self._opened(self.files[-2]) as before:
            return before is not None and holds_beyond(before, last.base_sequence)

    def _recover(self, place: SegmentPath) -> Segment | None:
        """Return the last segment as recovery leaves it; None: it holds no record, its creation was interrupted."""
        version = (place.path, segment_bytes(place, self._files))
        cached = self._recovered.get(version)
        if cached is not None and not (cached.size < version[1] and self._has_more(cached)):
            return cached
        files = OverlayFiles(self._files)
        segment = self._open(place, files, 0)
        if segment is None:
            return None
        version = (place.path, segment.size)
        known = [
            each for each in list(self._recovered.values()) if self._is_archived and each.path == place.path
        ]
        recover(files, segment, known=known[0] if known else None)
        self._recovered.clear()
        if not files.is_changed:  # otherwise a broker may be writing there
            self._recovered[version] = segment
        return segment

    def _has_more(self, segment: Segment) -> bool:
        """Whether something else than zeros follows the records that recovery has found.

        A broker writes records in the place of zeros, which does not make the file longer: see `SegmentWriter`.
        """
        try:
            fd = self._files.open_read_only(segment.path)
            try:
                return bool(self._files.read_fully(fd, HEADER_BYTES, segment.size).strip(b"\0"))
            finally:
                self._files.close(fd)
        except OSError as exc:
            raise LogReadError(segment.path, exc) from exc
