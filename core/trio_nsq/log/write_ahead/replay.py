"""Replay: writes to the segments what only the write-ahead files have, before the logs are opened.

A broker that stops cleanly removes its write-ahead files. After a crash, each entry is compared with its segment:

- The segment has the bytes: nothing to do. This is the rule if only the process died.
- The segment ends within the entry, or has other bytes there that are no undamaged record: the bytes are written.
- The segment has another undamaged record there, or the place is inside of one: the entry is out of date. Its messages
  were refused and removed from the log, which then continued; or the log did not reach the entry at an earlier start.
  While an entry is needed, its place cannot have another record: see `SegmentWriter.pending_wal`.
- The segment does not reach the entry, does not exist, or has another incarnation: the topic or its old messages were
  deleted, or the folder is a backup whose files were copied one after the other.

Replaying twice has the same result as once, so a crash in between does no harm.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import LogError, LogReadError, LogWriteError
from ..files import Files, OverlayFiles
from ..records import HEADER_BYTES, RecordHeader, decode_header
from ..segment.format import FILE_HEADER_BYTES as SEGMENT_HEADER_BYTES
from ..segment.format import decode_file_header as decode_segment_header
from ..segment.format import seed_for, segment_path
from ..segment.identity import Identity
from .file import write_ahead_files
from .format import FILE_HEADER_BYTES, VERSION, Entry, entries_in, read_file_header

logger: logging.Logger = logging.getLogger("trio_nsq.log")

_MOST_BYTES = 1024**3
"""Maximum size of a write-ahead file, far above what a broker writes."""


class Replay:
    """The write-ahead files that a broker finds at its start.

    Args:
        folder: The data folder.

    Attributes:
        next_number: The number of the next write-ahead file.
        damage: What is damaged, by file.
        lacks_entries: Entries are lost.

    Raises:
        LogReadError: The operating system failed to read.
        ValueError: A file is from a newer version.
    """

    def __init__(self, files: Files, folder: Path) -> None:
        self.next_number: int = 1
        self.damage: list[tuple[Path, str]] = []
        self.lacks_entries: bool = False
        self._files = files
        self._paths: list[Path] = []
        self._entries: dict[str, list[Entry]] = {}
        try:
            names = files.names(folder)
        except OSError as exc:
            raise LogReadError(folder, exc) from exc
        for number, path in write_ahead_files(folder, names):
            self.next_number = number + 1
            self._load(path)
            self._paths.append(path)

    @property
    def topics(self) -> Sequence[str]:
        """The names of the topics with entries that are not replayed."""
        return list(self._entries)

    def _load(self, path: Path) -> None:
        try:
            content = self._files.content(path, _MOST_BYTES)
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        header = read_file_header(content)
        if header is None:
            if len(content) > FILE_HEADER_BYTES:
                self._add_damage(path, 0, len(content))
            return  # otherwise its creation was interrupted
        if header.version != VERSION:
            raise ValueError(
                f"{path} is of format {header.version}; this version of the program reads format {VERSION}"
            )
        if header.is_damaged:
            self.damage.append((path, "the file's header is damaged; its entries are still readable"))
        stable = 0
        others: list[tuple[int, int]] = []
        for at, entry, end in entries_in(content, header.seed):
            if entry is None:
                others.append((at, end))
            else:
                stable = max(stable, entry.stable)
                self._entries.setdefault(entry.topic, []).append(entry)
        for at, end in others:
            if at < stable:
                self._add_damage(path, at, end)
            elif content[at:end].strip(b"\0"):  # zeros were written ahead
                logger.info("%s: bytes %d to %d are an unfinished write", path, at, end)

    def _add_damage(self, path: Path, at: int, end: int) -> None:
        self.lacks_entries = True
        what = "are damaged; messages are lost if they are not in their topics' segments either"
        self.damage.append((path, f"bytes {at} to {end} {what}"))

    def apply(self, topic: str, folder: Path) -> int:
        """Bring the segments of a topic up to date, durably. Thread-safe for different topics.

        Args:
            folder: The folder of the topic's segments.

        Returns:
            How many bytes were written: the segments did not have them.

        Raises:
            LogReadError, LogWriteError: The operating system failed to read or write; try again later.
        """
        by_segment: dict[tuple[int, bytes], list[Entry]] = {}
        for entry in self._entries.get(topic, ()):
            by_segment.setdefault((entry.base_sequence, entry.incarnation), []).append(entry)
        written = 0
        for (base_sequence, incarnation), entries in by_segment.items():
            path = segment_path(folder, base_sequence)
            try:
                with self._segment(path) as fd:
                    if fd is not None:
                        written += self._apply_to(path, fd, incarnation, entries)
            except OSError as exc:
                raise LogWriteError(path, exc) from exc
        self.forget(topic)
        return written

    def forget(self, topic: str) -> None:
        """Drop the entries of a topic, which was deleted."""
        self._entries.pop(topic, None)

    @contextmanager
    def _segment(self, path: Path) -> Iterator[int | None]:
        try:
            fd = self._files.open(path)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            self._files.close(fd)

    def _apply_to(self, path: Path, fd: int, incarnation: bytes, entries: Sequence[Entry]) -> int:
        base_sequence = entries[0].base_sequence
        header = decode_segment_header(self._files.read_fully(fd, SEGMENT_HEADER_BYTES, 0))
        if header is not None:
            seed = header.seed
            is_same = header.incarnation == incarnation
        else:
            seed = seed_for(base_sequence, incarnation)
            identity = Identity.read(self._files, path.parent)
            is_same = identity is not None and identity.incarnation == incarnation
        if not is_same:
            return 0
        written = 0
        for entry in entries:
            written += self._redo(path, fd, seed, entry)
        self._files.sync(fd)  # also what a killed process had written
        return written

    def _redo(self, path: Path, fd: int, seed: int, entry: Entry) -> int:
        """Write the bytes of an entry that its segment does not have; returns how many."""
        data = bytes(entry.data)
        there = self._files.read_fully(fd, len(data), entry.offset)
        if there == data:
            return 0
        if not self.lacks_entries and self._ends_before(fd, seed, entry.offset):
            logger.warning(
                "%s: ends before byte %d, from which on the write-ahead log has messages: they are left out. This is "
                "normal in a copy of a running broker's folder; otherwise, the segment has lost messages",
                *(path, entry.offset),
            )
            return 0
        at = 0
        while at < len(data):
            header = decode_header(data, at, seed)
            if header is None:
                logger.error(
                    "%s: the entry for byte %d in the write-ahead log is not a record", path, entry.offset
                )
                return 0
            end = at + header.record_bytes
            if there[at:end] != data[at:end]:
                break
            at = end
        if self._has_record(fd, seed, entry.offset + at) or (
            not at and self._is_inside_record(fd, seed, entry.offset)
        ):
            logger.info("%s: the entry for byte %d in the write-ahead log is out of date", path, entry.offset)
            return 0
        self._files.write(fd, entry.offset + at, [data[at:]])
        return len(data) - at

    def _ends_before(self, fd: int, seed: int, offset: int) -> bool:
        """Whether the records of the segment end before this offset. Zeros may follow them: see `SegmentWriter`."""
        if self._files.size(fd) < offset:
            return True
        before = max(SEGMENT_HEADER_BYTES, offset - HEADER_BYTES)
        if self._files.read_fully(fd, offset - before, before).strip(b"\0"):
            return False
        at = SEGMENT_HEADER_BYTES
        while at < offset and (header := self._header_at(fd, seed, at)) is not None:
            at += header.record_bytes
        return at < offset and not self._files.read_fully(fd, offset - at, at).strip(b"\0")

    def _has_record(self, fd: int, seed: int, offset: int) -> bool:
        """Whether the segment has an undamaged record at this offset."""
        header = self._header_at(fd, seed, offset)
        return header is not None and self._is_intact(fd, header, offset)

    def _is_inside_record(self, fd: int, seed: int, offset: int) -> bool:
        """Whether an undamaged record begins before this offset and ends after it. False after damage."""
        at = SEGMENT_HEADER_BYTES
        while at < offset and (header := self._header_at(fd, seed, at)) is not None:
            if at + header.record_bytes > offset:
                return self._is_intact(fd, header, at)
            at += header.record_bytes
        return False

    def _header_at(self, fd: int, seed: int, offset: int) -> RecordHeader | None:
        return decode_header(self._files.read_fully(fd, HEADER_BYTES, offset), 0, seed)

    def _is_intact(self, fd: int, header: RecordHeader, offset: int) -> bool:
        return header.matches(self._files.read_fully(fd, header.length, offset + HEADER_BYTES))

    def remove_files(self) -> None:
        """Delete the files, when all topics have been brought up to date. Raises LogWriteError."""
        while self._paths:
            try:
                self._files.unlink(self._paths[0])
            except OSError as exc:
                raise LogWriteError(self._paths[0], exc) from exc
            del self._paths[0]


def replayed_files(data_path: Path) -> tuple[Files, list[tuple[Path, str]]]:
    """Return the files of a data folder as they will be after the next start of the broker.

    A broker may be running, and delete write-ahead files meanwhile: then the topics' segments have what was in them.

    Returns:
        The files; and what is damaged in write-ahead files, or keeps them from being read.
    """
    files = OverlayFiles()
    try:
        if not write_ahead_files(data_path, files.names(data_path)):
            return Files(), []
        replay = Replay(files, data_path)
        problems = list(replay.damage)
        for topic in replay.topics:
            try:
                replay.apply(topic, data_path / "topics" / f"{topic}.topic")
            except LogError as exc:
                problems.append((data_path, str(exc)))
    except (OSError, LogError, ValueError) as exc:
        return Files(), [(data_path, f"the write-ahead log cannot be read: {exc}")]
    return files, problems
