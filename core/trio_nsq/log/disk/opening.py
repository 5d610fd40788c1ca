"""Opening the folder of a log: finds its files, removes the remains of a crash, and recovers the last segment."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import ForeignSegmentError, LogReadError, LogWriteError, UnusableSegmentError
from ..files import OpenFiles, temporary_of
from ..segment.format import SUFFIX, base_in_name
from ..segment.identity import FILE_NAME as IDENTITY
from ..segment.identity import Identity, owner_of
from ..segment.index import SUFFIX as INDEX_SUFFIX
from ..segment.reader import Segment
from ..segment.recovery import holds_beyond, recover
from ..segment.writer import SegmentWriter
from .carried_forward import FILE_NAME as CARRIED_FORWARD
from .carried_forward import CarriedForwardSegment
from .history import FILE_NAME as ARCHIVED

logger: logging.Logger = logging.getLogger("trio_nsq.log")

DEFAULT_SEGMENT_BYTES = 100 * 1024 * 1024
"""The default of nsqd's max-bytes-per-file."""
_MIN_MESSAGE_BYTES = 4
"""The size field of an empty message."""


class OpenedFolder:
    """The content of a log's folder. `open` sets the attributes.

    Args:
        folder: The log's folder; it need not exist.
        segment_bytes: The size after which the log begins a new segment.
        now_ns: The wall clock, Unix nanoseconds.
        stable_end: As in `UnwrittenRecords`.

    Attributes:
        identity: The log's identity; None if it has no segment yet.
        segments: The segments, oldest first.
        writer: The writer of the last segment; None if there is none.
        carried_forward: The carried-forward segment, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        open_files: OpenFiles,
        segment_bytes: int,
        now_ns: Callable[[], int],
        stable_end: int,
    ) -> None:
        self.identity: Identity | None = None
        self.segments: tuple[Segment, ...] = ()
        self.writer: SegmentWriter | None = None
        self.carried_forward: CarriedForwardSegment | None = None
        self._folder = folder
        self._open_files = open_files
        self._files = open_files.files
        self._segment_bytes = segment_bytes
        self._now_ns = now_ns
        self._stable_end = stable_end

    def open(self) -> None:
        """Open all files of the log, and recover the last segment.

        Raises:
            NotASegmentError: A file in the folder has the name of a segment but is not one.
            LogReadError, LogWriteError: The operating system failed to read or write.
        """
        try:
            names = self._files.names(self._folder)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise LogReadError(self._folder, exc) from exc
        paths = [self._folder / name for name in sorted(names) if name.endswith(SUFFIX)]
        self.identity = self._load_identity(paths, exists=IDENTITY in names)
        if self.identity is None:
            return
        unusable = self._open_segments(paths, self.identity)
        self._remove_unused_last_segment()
        if self.identity.list_format_1(segment.header for segment in self.segments):
            self._save_identity(self.identity)
        if unusable:
            self._set_aside(unusable, self.identity.incarnation)
        if not self.segments:
            return
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            segment.next_sequence = following.base_sequence
        self._check_other_files(set(names))
        if CARRIED_FORWARD in names:
            incarnation = self.identity.incarnation
            self.carried_forward = CarriedForwardSegment.open(self._open_files, self._folder, incarnation)
        self.writer = recover(self._files, self.segments[-1], self._stable_end)

    def close(self) -> None:
        """Close all files, after opening failed."""
        for segment in self.segments:
            segment.close()
        if self.carried_forward is not None:
            self.carried_forward.close()

    def _load_identity(self, paths: Sequence[Path], *, exists: bool) -> Identity | None:
        """Read the log's identity; if the file is missing (not `exists`) or damaged, derive it from the segments."""
        identity = Identity.read(self._files, self._folder)
        if identity is None and paths:
            if exists:
                logger.error("%s: damaged; rebuilt from the segments", self._folder / IDENTITY)
            identity = Identity.derive(self._files, paths)
            self._save_identity(identity)
        return identity

    def _save_identity(self, identity: Identity) -> None:
        try:
            self._files.replace(self._folder / IDENTITY, identity.encode())
        except OSError as exc:
            logger.warning("%s", LogWriteError(self._folder / IDENTITY, exc))  # the next start retries

    def _open_segments(self, paths: Sequence[Path], identity: Identity) -> list[UnusableSegmentError]:
        """Open the segments, remove empty ones except the last, and return why some cannot be used."""
        unusable: list[UnusableSegmentError] = []
        for path in paths:
            try:
                segment = Segment.open(self._open_files, path, identity)
            except UnusableSegmentError as exc:
                unusable.append(exc)
                continue
            if segment is not None and (not segment.is_empty or path == paths[-1]):
                self.segments += (segment,)
                continue
            logger.warning("%s: removed, it holds no record", path)
            self._unlink(path)
        return unusable

    def _unlink(self, path: Path) -> None:
        try:
            self._files.unlink(path)
        except OSError as exc:
            raise LogWriteError(path, exc) from exc

    def _remove_unused_last_segment(self) -> None:
        """Remove an empty last segment if the segment before it was written to after it was created."""
        if len(self.segments) < 2 or not self.segments[-1].is_empty:
            return
        before, last = self.segments[-2:]
        if not holds_beyond(before, last.base_sequence):
            return
        logger.warning(
            "%s: removed, it holds no record, and the previous file was written to later", last.path
        )
        self._unlink(last.path)
        last.close()
        self.segments = self.segments[:-1]

    def _set_aside(self, unusable: Sequence[UnusableSegmentError], incarnation: bytes) -> None:
        """Rename files that cannot belong to the log.

        If they are the last, the log continues after all sequences that they may have used.
        """
        last = self.segments[-1] if self.segments else None
        after = [each for each in unusable if last is None or base_in_name(each.path) > last.base_sequence]
        if after:
            end = max(end_of_unusable(error, self._segment_bytes) for error in after)
            if last is not None:
                recover(self._files, last).seal()  # it may have been the last one written to
                end = max(end, last.next_sequence)
            # Before the renames, because without the files their sequences would be used again.
            writer = SegmentWriter.create(self._open_files, self._folder, end, self._now_ns(), incarnation)
            self.segments += (writer.segment,)
        for error in unusable:
            reason = error.reason
            if isinstance(error, ForeignSegmentError):
                owner = owner_of(error, self._files, self._folder)
                reason += f", whose log is {owner}" if owner is not None else ""
            try:
                aside = self._files.set_aside(error.path, error.suffix)
            except OSError as exc:
                raise LogWriteError(error.path, exc) from exc
            logger.error("%s: set aside as %s: %s", error.path, aside.name, reason)

    def _check_other_files(self, names: set[str]) -> None:
        """Remove the files that no segment needs, and build missing indexes.

        Removes the remains of interrupted writes first, because building an index uses the same temporary file.
        """
        needed = {segment.index_path.name for segment in self.segments}
        leftovers = {temporary_of(self._folder / name).name for name in (CARRIED_FORWARD, IDENTITY, ARCHIVED)}
        for name in sorted(names - needed):
            if INDEX_SUFFIX in name or name in leftovers:
                self._unlink(self._folder / name)
        for segment in self.segments[:-1]:
            if segment.index_path.name not in names and segment.is_worth_an_index:
                logger.info("%s: rebuilding its lost index", segment.path)
                try:
                    segment.make_index()
                except LogReadError as exc:
                    logger.warning("%s: continuing without an index, look-ups read more", exc)


def end_of_unusable(error: UnusableSegmentError, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> int:
    """Return a sequence above all that an unusable file, or the file that it replaced, can have contained.

    Args:
        segment_bytes: The size after which the log begins a new segment.
    """
    size = error.size
    if isinstance(error, ForeignSegmentError):
        size = max(size, segment_bytes)
    return base_in_name(error.path) + 1 + size // _MIN_MESSAGE_BYTES
