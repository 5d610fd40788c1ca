"""One topic's log, read from its segments instead of from a broker.

The files are those of a stopped broker, of a backup, or of a running broker; nothing is written. The log has the
messages that a broker would have after a start with these files, with one exception: messages that only the
carried-forward segment has are not read, because brokers do not return them by sequence either.
"""

import time
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Self

from ...archive.manifest import ArchiveDamaged
from ...archive.segment_names import ArchivedName, parse_incarnation
from ...archive.stored_files import StoredFiles
from ...archive.tail import ArchiveTail
from ...client.reading.broker_log import Bounds, LogReplaced
from ...client.reading.log_stream import Found, batches_and_gaps
from ...log.files import Files
from ...log.files.scratch import ScratchSnapshot
from ...log.gaps import Span, gaps
from ...log.inspection.log import InspectedLog
from ...log.inspection.segments import SegmentPath, find_identity, segment_paths
from ...log.positions import parse_position
from ...log.segment.format import base_in_name
from ...log.segment.reader import Segment
from ...log.segment.scan import NO_LIMIT
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
        return _id_in(self._open(sequence + 1), sequence)

    def read(self, span: Span) -> Iterator[Found]:
        """Read the records and the gaps of a span, in order. Each record's checksums are verified.

        Raises:
            LogReplaced: The folder has another incarnation of the topic, or the log ends before the span.
            LogReadError, StorageError: The segments cannot be read.
        """
        log = self._expected(span.end)
        at, kept_from = span.first, log.first_sequence
        for batch in log.batches(span):
            if batch.base_sequence == at and batch.next_sequence <= span.end:
                yield batch  # most are wanted as they are, and there may be one for each message
                at = batch.next_sequence
                continue
            if batch.base_sequence > at:
                # A running broker may have deleted segments meanwhile.
                kept_from = max(kept_from, self._expected(span.end).first_sequence)
            for found in batches_and_gaps([batch], at, span.end, kept_from):
                yield found
                at = found.next_sequence
        if at < span.end:
            log = self._expected(span.end)
            if log.next_sequence < span.end:
                if self.damage:
                    raise ArchiveDamaged(self.damage)
                raise LogReplaced(
                    f"the log in {self._shown} ends before message {log.next_sequence}, and had message "
                    f"{span.end - 1}: it is another log, or lost its last messages"
                )
            yield from gaps(at, span.end, max(kept_from, log.first_sequence))

    def starts(self) -> list[int]:
        """Return the first sequence of each segment, in order: a task that reads whole segments reads least."""
        return [segment.base_sequence for segment in self._open().files]

    @property
    def damage(self) -> str:
        """Why newer messages are not read, a sentence; empty if nothing is damaged."""
        return ""

    def _open(self, end: int = NO_LIMIT) -> InspectedLog:
        """List the segments, at least those of messages before `end`. Raises the errors of `bounds`."""
        segments = segment_paths(self._folder, self._files)[0]
        return InspectedLog(self._folder, self._files, segments, self._recovered)

    def _expected(self, end: int) -> InspectedLog:
        """List the segments of the expected log, as `_open` does. Raises the errors of `read`."""
        log = self._open(end)
        if self._incarnation and log.identity and log.identity.incarnation.hex() != self._incarnation:
            raise LogReplaced(
                f"the log in {self._shown} is not the one that was planned: the topic was deleted and recreated"
            )
        return log


class ArchivedLog(SegmentLog):
    """The log of one incarnation of a topic in an archive.

    Its segments are complete, and their names have their ends. Behind them are those that the broker has archived with
    its changes only.

    Args:
        storage: The folder of the incarnation.
        tail: What has the newest segments; None: the archive has none.
        topic: The topic in it.
    """

    def __init__(self, storage: Storage, tail: ArchiveTail | None = None, topic: str = "") -> None:
        super().__init__(Path(storage.shown), shown=storage.shown)
        self._storage = storage
        self._tail = tail
        self._topic = topic
        # Shared with the copies of `expecting`.
        self._compared: set[tuple[str, int]] = set()  # newest segments, by name and size
        self._last: list[ScratchSnapshot] = []  # the last segment, when it was recovered; at most one

    @property
    def damage(self) -> str:
        return self._tail.damage if self._tail is not None else ""

    def _identity(self) -> str | None:
        """Return the name of the folder: the incarnation."""
        found = parse_incarnation(self._folder.name)
        return found.hex() if found is not None else None

    def _open(self, end: int = NO_LIMIT) -> InspectedLog:
        if end < NO_LIMIT or self._tail is None:
            log = self._inspected({})
            if self._tail is None or log.next_sequence >= end:
                return log
        # Before the archived segments are listed: what is missing in it is one of them.
        newest = self._tail.log(self._topic)
        return self._inspected(newest.files if newest and newest.incarnation == self._identity() else {})

    def _inspected(self, newest: Mapping[str, ScratchSnapshot]) -> InspectedLog:
        """List the archived segments, with the newest ones behind them."""
        files = StoredFiles(self._storage, newest)
        segments: list[SegmentPath] = []
        end = 0
        in_both: SegmentPath | None = None
        for path, limit in segment_paths(self._folder, files)[0]:
            stored = files.stored_name(path.name)
            name = ArchivedName.parse(stored) if stored is not None else None
            if stored is not None and name is None:
                continue
            if (first := base_in_name(path)) < end:
                raise self._has_two(first)
            segment = SegmentPath(path, limit)
            if name is not None:
                end = name.last + 1
                segment = SegmentPath(path, end)
                in_both = segment if path.name in newest else in_both
            segments.append(segment)
        if segments and segments[-1].limit is None:
            self._forget_unless_it_continues(newest[segments[-1].path.name])
        log = InspectedLog(self._folder, files, segments, self._recovered, is_archived=True)
        if in_both is not None:
            self._compare(log, in_both, newest[in_both.path.name])
        return log

    def _forget_unless_it_continues(self, last: ScratchSnapshot) -> None:
        """Forget what recovery has found, unless the last segment begins with it: a failed write was cut off."""
        if self._last and not last.continues(self._last.pop()):
            self._recovered.clear()
        self._last.append(last)

    def _compare(self, log: InspectedLog, segment: SegmentPath, newest: ScratchSnapshot) -> None:
        """Check that a segment that is archived, and that the broker has, is the same one.

        It is another one if the broker was restored from an older state.
        """
        version = segment.path.name, newest.size
        if version in self._compared:
            return
        assert segment.limit is not None
        files = StoredFiles(self._storage, {segment.path.name: newest}, is_listed=False)
        ours = InspectedLog(self._folder, files, [SegmentPath(segment.path, None)], {})
        last = min(ours.next_sequence, segment.limit) - 1
        ids = (_id_in(ours, last), _id_in(log, last)) if last >= segment.base_sequence else (None, None)
        if None not in ids and ids[0] != ids[1]:
            raise self._has_two(last)
        self._compared.add(version)

    def _has_two(self, sequence: int) -> StorageError:
        return StorageError(
            f"the archive {self._shown} has messages twice from {sequence} on: segments of a broker before and after "
            "it was restored from a backup. Move those of one of them away"
        )


def _id_in(log: InspectedLog, sequence: int) -> str | None:
    """Return the id of a message; None: it is missing or damaged. Raises the errors of `SegmentLog.bounds`."""
    for found in log.batches(Span(sequence, sequence + 1)):
        return found.id_of(sequence)
    return None
