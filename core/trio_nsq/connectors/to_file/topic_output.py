"""The output of one topic: writes batches to files, syncs, rotates, and saves checkpoints. It blocks: for a thread.

After an error (OSError) nothing is lost: everything that is not synced is removed from the file, and the next call
writes it again. So a full disk is a matter of calling again later.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice

from ...log import Files
from ..source.batch import Position, SourceBatch
from .checkpoint import Checkpoint, CheckpointFile
from .file_series import FileSeries, OutputSettings
from .file_system import make_folders
from .names import NameFormat
from .output_file import OutputFile

FLUSH_BYTES = 4 * 1024 * 1024
"""Compress, or write, when this many bytes are waiting."""
MESSAGE_BYTES = 64
"""About the memory of a message besides its body."""

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")


@dataclass(slots=True)
class _Piece:
    """Messages of a batch, from one index to another."""

    batch: SourceBatch
    start: int
    stop: int


@dataclass(slots=True)
class OutputCounts:
    """What was synced since the start."""

    messages: int = 0
    body_bytes: int = 0
    files: int = 0

    def add(self, other: OutputCounts) -> None:
        """Add the counts of another topic."""
        self.messages += other.messages
        self.body_bytes += other.body_bytes
        self.files += other.files


class TopicOutput:
    """Writes the files of a topic. One thread at a time uses it.

    Args:
        names: The names of the files.
        channel: The channel whose consumer this output is.

    Attributes:
        counts: Is updated by each sync.
        unsynced_bytes: About the memory of messages that were written and not synced.

    Raises:
        OutputInUse: Another process writes the topic's files.
        CheckpointDamaged: The checkpoint cannot be used.
        OSError: The folder cannot be read or written.
    """

    def __init__(
        self, settings: OutputSettings, names: NameFormat, topic: str, channel: str, files: Files
    ) -> None:
        self.counts: OutputCounts = OutputCounts()
        self.unsynced_bytes: int = 0
        self._settings = settings
        self._file: OutputFile | None = None
        self._queue: deque[_Piece] = deque()
        self._unsynced: deque[_Piece] = deque()  # written to the open file since the last sync
        self._raw: list[bytes] = []  # encoded, waiting for compression or writing
        self._raw_bytes = 0
        self._finished: list[SourceBatch] = []
        # Synced, and its checkpoint may or may not be on disk: these bytes must stay.
        self._unsaved: Checkpoint | None = None
        make_folders(files, settings.output_dir)
        self._store = CheckpointFile(settings.output_dir, topic, channel, files)
        try:
            self._positions = dict(self._store.saved.positions)
            self._series = FileSeries(settings, names, self._store, files)
            self._file = self._series.recover()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Close the file as it is, and release the locks. The next run continues it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._store.close()

    @property
    def positions(self) -> Mapping[str, Position]:
        """The saved positions, see `Checkpoint`."""
        return self._store.saved.positions

    def position(self, log: str) -> Position | None:
        """Return the saved position of a log; None: nothing was read from it."""
        return self.positions.get(log)

    def take_finished(self) -> list[SourceBatch]:
        """Return the batches that became durable since the last call."""
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------ writing

    def write(self, batches: Iterable[SourceBatch], now: float) -> None:
        """Write batches; they are durable after `sync`. Raises OSError: call again, without these batches."""
        self._queue.extend(_Piece(batch, 0, len(batch.bodies)) for batch in batches)
        if self._unsaved is not None:
            self.sync(now)
        try:
            self._write_queue(now)
        except OSError:
            self._roll_back()
            raise

    def _write_queue(self, now: float) -> None:
        while self._queue:
            rest = self._queue[0]
            if rest.start == rest.stop:
                self._move_position(rest)
                self._unsynced.append(self._queue.popleft())
                continue
            if self._needs_rotation(now):
                self._close_file()
                continue
            file = self._file or self._open_file(now)
            piece = _Piece(rest.batch, rest.start, self._fitting(file, rest))
            data = self._settings.encode(piece.batch, piece.start, piece.stop)
            self._raw.append(data)
            self._raw_bytes += len(data)
            file.raw_bytes += len(data)
            self.unsynced_bytes += len(data) + MESSAGE_BYTES * (piece.stop - piece.start)
            self._move_position(piece)
            self._unsynced.append(piece)
            if piece.stop == rest.stop:
                self._queue.popleft()
            else:
                rest.start = piece.stop
            if self._raw_bytes >= FLUSH_BYTES:
                self._flush(file)
        if self._file is not None and self._settings.compressor is None:
            self._flush(self._file)

    def _fitting(self, file: OutputFile, piece: _Piece) -> int:
        """Return the index after the last message for this file, at least one: the one that exceeds its size is in."""
        if not self._settings.rotate_size:
            return piece.stop
        room = self._settings.rotate_size - file.raw_bytes
        extra = self._settings.extra_bytes
        bodies = islice(piece.batch.bodies, piece.start, piece.stop)
        ends = list(accumulate(len(body) + extra for body in bodies))
        return min(piece.start + bisect_right(ends, room) + 1, piece.stop)

    def _move_position(self, piece: _Piece) -> None:
        batch = piece.batch
        if batch.position is None:
            return
        position = batch.position
        if piece.stop < len(batch.bodies):
            assert batch.sequences is not None
            position = Position(batch.sequences[piece.stop - 1] + 1, batch.ids[piece.stop - 1].decode())
        self._positions[batch.log_key] = position

    def _flush(self, file: OutputFile) -> None:
        if self._raw:
            compressor = self._settings.compressor
            file.append(compressor.compress(self._raw) if compressor else self._raw)
            self._store.touch()
            self._raw, self._raw_bytes = [], 0

    def _roll_back(self) -> None:
        """Remove what is not synced from the file, and write it again with the next call."""
        if self._unsaved is not None:
            return  # it is synced
        self._raw, self._raw_bytes, self.unsynced_bytes = [], 0, 0
        self._positions = dict(self._store.saved.positions)
        while self._unsynced:
            piece = self._unsynced.pop()
            if self._queue and self._queue[0].batch is piece.batch:
                self._queue[0].start = piece.start
            else:
                self._queue.appendleft(piece)
        if self._file is not None:
            self._file.roll_back()

    def discard(self) -> None:
        """Forget the messages that are not durable. Their brokers have them, too."""
        self._roll_back()
        self._queue.clear()

    # ------------------------------------------------------------------ durability

    def sync(self, now: float) -> None:
        """Make everything that was written durable, with the positions. Raises OSError: call again."""
        if self._unsaved is None:
            try:
                self._leave_lost_file()
                self._write_queue(now)
            except OSError:
                self._roll_back()
                raise
        self._commit()

    def _commit(self) -> None:
        """Sync the file and save the checkpoint."""
        if self._unsaved is None:
            try:
                self._unsaved = self._sync_file()
            except OSError:
                self._roll_back()
                raise
        if self._unsaved != self._store.saved:
            self._store.save(self._unsaved)
        self._unsaved = None
        self.unsynced_bytes = 0
        for piece in self._unsynced:
            count = piece.stop - piece.start
            self.counts.messages += count
            self.counts.body_bytes += sum(map(len, islice(piece.batch.bodies, piece.start, piece.stop)))
            if piece.stop == len(piece.batch.bodies):
                self._finished.append(piece.batch)
        self._unsynced.clear()

    def _sync_file(self) -> Checkpoint:
        if self._file is None:
            return Checkpoint(dict(self._positions))
        self._flush(self._file)
        self._file.sync()
        return Checkpoint(dict(self._positions), self._file.record())

    def _leave_lost_file(self) -> None:
        """Close the file if another program renamed, replaced or removed it; the next message begins another one."""
        file = self._file
        if file is None or file.has_name():
            return
        if file.is_removed():
            logger.warning("%s was removed by another program", file.path)
            self._file = None
            self._roll_back()  # its unsynced messages are written to the next file
        else:
            logger.info("%s was renamed by another program; its name begins a new file", file.path)
            self._flush(file)
            file.sync()
            self._file = None
        file.close()

    # ------------------------------------------------------------------ rotation

    def tick(self, now: float) -> None:
        """Do what is due without a message: rotation, a new empty file, a sync. Raises OSError: call again."""
        self.write((), now)
        if self._needs_rotation(now):
            self._close_file()
        if self._file is None and not self._settings.skip_empty_files:
            self._open_file(now)
        self.sync(now)

    def close_file(self, now: float) -> None:
        """Make everything durable and finish the open file. Raises OSError: call again."""
        self.write((), now)
        self.sync(now)
        self._close_file()

    def _needs_rotation(self, now: float) -> bool:
        return self._file is not None and self._series.is_due(self._file, now)

    def _open_file(self, now: float) -> OutputFile:
        self._file = self._series.open(now, dict(self._positions))
        return self._file

    def _close_file(self) -> None:
        self._leave_lost_file()
        file, settings = self._file, self._settings
        is_empty = file is not None and not file.end and not self._raw
        compressor = None if settings.skip_empty_files else settings.compressor
        # A file of a run without compression has no such suffix.
        if file is not None and is_empty and compressor and file.final.name.endswith(compressor.suffix):
            file.append(compressor.compress([b""]))  # no bytes are no valid gzip or zstd
        self._commit()
        if file is None:
            return
        if is_empty and settings.skip_empty_files:  # writing to it failed
            self._store.save(Checkpoint(dict(self._positions)))
            self._file = None
            self._series.remove(file)
            return
        self._series.finish(file, dict(self._positions))
        self._file = None
        self.counts.files += 1
        self._store.save(Checkpoint(dict(self._positions)))
