"""One topic's log, read from its segments instead of from a broker.

The files are those of a stopped broker, of a backup, or of a running broker; nothing is written. The log has the
messages that a broker would have after a start with these files, with one exception: messages that only the
carried-forward segment has are not read, because brokers do not return them by sequence either.
"""

import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Self

from ...archive.segment_names import ArchivedName, parse_incarnation
from ...archive.stored_files import StoredFiles
from ...client.reading.broker_log import Bounds, LogReplaced
from ...client.reading.log_stream import Found, batches_and_gaps
from ...log.files import Files
from ...log.gaps import Span, gaps
from ...log.inspection.log import InspectedLog
from ...log.inspection.segments import SegmentPath, find_identity, segment_paths
from ...log.positions import parse_position
from ...log.segment.reader import Segment
from ...storage import Storage, StorageError


class SegmentLog:
    """The log of one topic in a folder of segments. Every call lists the folder again.

    Args:
        folder: The topic's folder, with its segments and the file `incarnation`.
        files: The file system of the folder; None: the local one.
        shown: The folder for messages; None: its path.
    """

    def __init__(self, folder: Path, files: Files | None = None, shown: str | None = None) -> None:
        self._folder = folder
        self._files = files or Files()
        self._shown = str(folder) if shown is None else shown
        self._incarnation: str | None = None
        self._recovered: dict[tuple[Path, int], Segment] = {}

    def expecting(self, incarnation: str | None) -> Self:
        """Return the same log, with what it knows, which fails to read another incarnation of the topic.

        Args:
            incarnation: 32 hex digits; None: not checked.
        """
        found = copy(self)
        found._incarnation = incarnation
        return found

    # ------------------------------------------------------------------ the log

    def bounds(self, at: str = "latest") -> Bounds:
        """Return the bounds of the log, and the sequence of a position.

        Args:
            at: A position, see docs/how-to/read-and-replay.md.

        Raises:
            LogReadError, StorageError: The segments cannot be read.
            ValueError: `at` is not a position.
        """
        position = parse_position(at, time.time_ns())
        log = self._open()
        first, end = log.first_sequence, log.next_sequence
        if not log.files:
            return Bounds(first, end, 0, end)
        at_sequence = position.sequence_in(log)
        ahead = log.bytes_from(at_sequence)
        return Bounds(first, end, log.size_bytes, at_sequence, ahead, self._identity())

    def _identity(self) -> str | None:
        """Return the incarnation of the log, 32 hex digits; None: unknown."""
        identity, _ = find_identity(self._files, self._folder)
        return identity.incarnation.hex() if identity is not None else None

    def id_at(self, sequence: int) -> str | None:
        """See `Log.id_at`; None also if the message is damaged. Raises the errors of `bounds`."""
        for found in self._open().batches(Span(sequence, sequence + 1)):
            return found.id_of(sequence)
        return None

    def read(self, span: Span) -> Iterator[Found]:
        """Read the records and the gaps of a span, in order. Each record's checksums are verified.

        Raises:
            LogReplaced: The folder has another incarnation of the topic, or the log ends before the span.
            LogReadError, StorageError: The segments cannot be read.
        """
        log = self._expected()
        at, kept_from = span.first, log.first_sequence
        for batch in log.batches(span):
            if batch.base_sequence == at and batch.next_sequence <= span.end:
                yield batch  # most are wanted as they are, and there may be one for each message
                at = batch.next_sequence
                continue
            if batch.base_sequence > at:
                # A running broker may have deleted segments meanwhile.
                kept_from = max(kept_from, self._expected().first_sequence)
            for found in batches_and_gaps([batch], at, span.end, kept_from):
                yield found
                at = found.next_sequence
        if at < span.end:
            log = self._expected()
            if log.next_sequence < span.end:
                raise LogReplaced(
                    f"the log in {self._shown} ends before message {log.next_sequence}, and had message "
                    f"{span.end - 1}: it is another log, or lost its last messages"
                )
            yield from gaps(at, span.end, max(kept_from, log.first_sequence))

    def starts(self) -> list[int]:
        """Return the first sequence of each segment, in order: a task that reads whole segments reads least."""
        return [segment.base_sequence for segment in self._open().files]

    def _open(self) -> InspectedLog:
        """List the segments. Raises the errors of `bounds`."""
        return InspectedLog(self._folder, self._files, self._list(), self._recovered)

    def _expected(self) -> InspectedLog:
        """List the segments of the expected log. Raises the errors of `read`."""
        log = self._open()
        if self._incarnation and log.identity and log.identity.incarnation.hex() != self._incarnation:
            raise LogReplaced(
                f"the log in {self._shown} is not the one that was planned: the topic was deleted and recreated"
            )
        return log

    def _list(self) -> list[SegmentPath]:
        return segment_paths(self._folder, self._files)[0]


class ArchivedLog(SegmentLog):
    """The log of one incarnation of a topic in an archive. Every segment is complete, and its name has its end.

    Args:
        storage: The folder of the incarnation.
    """

    def __init__(self, storage: Storage) -> None:
        self._stored = StoredFiles(storage)
        super().__init__(Path(storage.shown), self._stored, storage.shown)

    def _identity(self) -> str | None:
        """Return the name of the folder: the incarnation."""
        found = parse_incarnation(self._folder.name)
        return found.hex() if found is not None else None

    def _list(self) -> list[SegmentPath]:
        segments: list[SegmentPath] = []
        end = 0
        for path, _ in super()._list():
            name = ArchivedName.parse(self._stored.stored_name(path.name))
            if name is not None:
                if name.first < end:
                    raise StorageError(
                        f"the archive {self._shown} has messages twice from {name.first} on: segments of a broker "
                        "before and after it was restored from a backup. Move those of one of them away"
                    )
                end = name.last + 1
                segments.append(SegmentPath(path, end))
        return segments
