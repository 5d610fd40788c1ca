"""The files of a topic, one after the other: opening, rotation, final names, and recovery after a crash."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...log import Files
from ...text.wording import count_of
from ..source.batch import Position
from .checkpoint import Checkpoint, CheckpointFile, OpenFileRecord, OutputInUse
from .compression import Compressor
from .file_system import copy_end, make_folders, move
from .formats import Encoder
from .names import PART_SUFFIX, REVISION, NameFormat
from .output_file import OutputFile, find_file, tail_crc

_WRITE_S = 1.0
"""How long a write may take."""

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """How the files of all topics are written.

    Attributes:
        output_dir: The folder of finished files.
        work_dir: The folder of open files, on the same file system.
        encode: Returns the bytes of messages.
        extra_bytes: What `encode` adds to each body.
        terminator: What the last message in a file ends with; None: unknown.
        compressor: None: no compression.
        rotate_size: Begin a file when one has more than this many bytes before compression; 0: never.
        rotate_interval_s: Begin a file this long after the last one; 0: never.
        skip_empty_files: Create a file only for a message.
    """

    output_dir: Path
    work_dir: Path
    encode: Encoder
    extra_bytes: int
    terminator: bytes | None = None
    compressor: Compressor | None = None
    rotate_size: int = 0
    rotate_interval_s: float = 0
    skip_empty_files: bool = False

    @property
    def needs_revision(self) -> bool:
        """Whether `<REV>` must be in the names."""
        return bool(self.compressor or self.rotate_size or self.rotate_interval_s) or self.moves

    @property
    def moves(self) -> bool:
        """Whether finished files move to another folder."""
        return self.work_dir != self.output_dir

    @property
    def appends(self) -> bool:
        """Whether existing files are continued."""
        return not self.compressor and not self.rotate_interval_s


class FileSeries:
    """Opens and finishes the files of a topic, and records in the checkpoint which one is open.

    Methods raise OSError if the disk fails; then they may be called again.

    Args:
        store: The checkpoint.
    """

    def __init__(
        self, settings: OutputSettings, names: NameFormat, store: CheckpointFile, files: Files
    ) -> None:
        self._settings = settings
        self._names = names
        self._store = store
        self._files = files
        self._last: tuple[str, int] = "", -1  # key and revision of the last file

    def is_due(self, file: OutputFile, now: float) -> bool:
        """Return whether this file ends before the next message."""
        settings = self._settings
        return (
            file.finishing
            or file.key != self._names.key(now)
            or bool(settings.rotate_interval_s and now - file.opened_at > settings.rotate_interval_s)
            or bool(settings.rotate_size and file.raw_bytes > settings.rotate_size)
        )

    def finish(self, file: OutputFile, positions: Mapping[str, Position]) -> None:
        """Give a synced file its final name, and close it."""
        file.finishing = file.is_renamed
        while file.finishing:
            self._store.save(Checkpoint(positions, file.record()))
            make_folders(self._files, file.final.parent)
            try:
                move(self._files, file.path, file.final)
                break
            except FileExistsError:
                logger.warning("%s already exists; the next revision is used", file.final)
                file.revision += 1
                file.final = self._settings.output_dir / self._names.name(file.key, file.revision)
        logger.info("finished %s", file.final)
        file.close()

    def remove(self, file: OutputFile) -> None:
        """Remove an empty file that is not in the checkpoint."""
        file.close()
        self._files.unlink(file.path)

    def open(self, now: float, positions: Mapping[str, Position]) -> OutputFile:
        """Begin the next file, or continue an existing one.

        Raises:
            OutputInUse: Another process writes to the file, and names have no revision.
        """
        settings = self._settings
        key = self._names.key(now)
        revision = self._last[1] + 1 if self._last[0] == key else 0
        while True:
            name = self._names.name(key, revision)
            final, path = settings.output_dir / name, settings.work_dir / name
            if settings.compressor and not settings.moves:
                path = path.with_name(path.name + PART_SUFFIX)
            for folder in (path.parent, final.parent):
                make_folders(self._files, folder)
            taken = path != final and final.exists()
            fd = None if taken else self._open_or_create(path)
            if fd is not None and (file := self._take(fd, path, final, key, revision, now)) is not None:
                break
            revision += 1
        self._last = key, revision
        try:
            self._files.sync_folder(path.parent)
            self._store.save(Checkpoint(positions, file.record()))
        except OSError:
            if not file.end:
                self._files.unlink(path)  # otherwise each attempt would leave an empty file
            self._last = key, revision - 1
            file.close()
            raise
        return file

    def _open_or_create(self, path: Path) -> int | None:
        """Open a file for appending, or create it; None: the name is taken."""
        try:
            return self._files.create(path)
        except FileExistsError:
            return self._files.open(path) if self._settings.appends else None

    def _take(
        self, fd: int, path: Path, final: Path, key: str, revision: int, now: float
    ) -> OutputFile | None:
        """Return the open file, locked; None: it is another program's, or large enough."""
        settings = self._settings
        length = self._files.size(fd)
        crc = tail_crc(self._files, fd, length)
        record = OpenFileRecord(str(path), str(final), key, revision, 0, length, crc, length, now)
        try:
            if settings.rotate_size and length > settings.rotate_size:
                self._files.close(fd)
                return None
            file = OutputFile(self._files, fd, record)
        except OutputInUse:
            self._files.close(fd)
            if REVISION not in key:
                raise
            return None
        ending = settings.terminator
        if length and ending and self._files.read_fully(fd, len(ending), length - len(ending)) != ending:
            try:
                file.append([ending])  # a killed program left half a line
                file.sync()
            except OSError:
                file.close()
                raise
        return file

    def recover(self) -> OutputFile | None:
        """Continue the open file of the last run, and remove the bytes that are not in the checkpoint from it."""
        saved = self._store.saved
        record = saved.file
        if record is None:
            return None
        found = find_file(record, self._files)
        if found is None:
            logger.warning(
                "%s is not the file that was being written: it was removed, replaced or changed", record.path
            )
            self._store.save(Checkpoint(saved.positions))
            return None
        path, fd = found
        try:
            surplus = self._files.size(fd) - record.length
            file = OutputFile(self._files, fd, record)
        except BaseException:
            self._files.close(fd)
            raise
        try:
            if surplus and path.stat().st_mtime > self._store.last_write + _WRITE_S:
                copy = self._store.cut_path()
                copy_end(self._files, fd, record.length, copy)
                logger.warning(
                    "another program wrote to %s: the last %s are moved to %s",
                    path,
                    count_of(surplus, "byte"),
                    copy,
                )
            elif surplus:
                logger.info("removed %s after the last sync from %s", count_of(surplus, "byte"), path)
            file.sync()
            is_empty = file.is_renamed and not file.end
            if is_empty:
                self._store.save(Checkpoint(saved.positions))
                self._files.unlink(path)  # it may have been begun for another compression
            else:
                self._last = file.key, file.revision
                if path == file.path and not file.finishing:
                    return file
        except BaseException:
            file.close()
            raise
        if path == file.path and not is_empty:
            self.finish(file, saved.positions)
        else:
            file.close()  # it was renamed already, by us or by another program
        self._store.save(Checkpoint(saved.positions))
        return None
