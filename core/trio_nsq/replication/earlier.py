"""What a follower's folder had before a catch-up. Nothing of it is changed before the leader has compared it.

A catch-up makes its copy in an empty folder: at its begin, all that members share is moved into `replica-before`. What
the leader has, too, is taken from there, one file at a time. So operations that come before a file's turn do not find
it, and what was in a folder's or a file's place does not disturb. What is left at the end has diverged, unless it is
only old.

A file `replica-incomplete` is there while the folder is no state that a leader had. Without `replica-before`, its
content is the earlier one, whole or torn; with it, it is the copy. Renames between folders are atomic.
"""

import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from errno import ENOENT
from pathlib import Path
from typing import Final, NamedTuple

from ..log.files import Files
from .changed_files import ChangedFiles
from .inventory import SEGMENT_SUFFIX, Source
from .operations import is_shared, joined

logger: logging.Logger = logging.getLogger("trio_nsq.replication")

_INCOMPLETE: Final = "replica-incomplete"
_MOVING: Final = "replica-moving"
_BEFORE: Final = "replica-before"
_DIVERGED: Final = "diverged-"
_WRITE_AHEAD: Final = "write-ahead."
_MOST_BYTES: Final = 4096
_REMAINS: Final = re.compile(r"\.tmp\Z|\.topic-(deleted-[0-9]+|importing)\Z")
"""Names of what is left of unfinished work: it is not kept."""


class DivergedFolder(NamedTuple):
    """A folder with what a follower had, and its leader had not."""

    name: str
    files: int
    bytes: int


def diverged_names(root: Path) -> list[str]:
    """Return the names of the folders that catch-ups have kept in a data folder. Nothing removes them."""
    return sorted(path.name for path in root.glob(f"{_DIVERGED}*"))


def diverged_folders(root: Path) -> list[DivergedFolder]:
    """Return these folders, with what is in them. Raises OSError."""
    return [DivergedFolder(name, *_extent(root / name)) for name in diverged_names(root)]


def _extent(folder: Path) -> tuple[int, int]:
    """Return the number of files below a folder, and their bytes."""
    sizes = [(Path(at) / name).lstat().st_size for at, _, names in os.walk(folder) for name in names]
    return len(sizes), sum(sizes)


class _Marker(NamedTuple):
    """The content of `replica-incomplete`.

    Attributes:
        epoch: The earlier content is a state that the leader of this epoch had; None: of no known one.
        is_whole: It is what a leader or a follower left: its sealed segments have no holes.
    """

    epoch: int | None
    is_whole: bool


class EarlierContent:
    """The earlier content of a follower's folder. Methods raise OSError.

    Args:
        root: The data folder.
    """

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self._root = root

    # ------------------------------------------------------------------ the folder's state

    @property
    def is_incomplete(self) -> bool:
        """Whether the folder is no state that a leader had."""
        return (self._root / _INCOMPLETE).exists()

    def give_up(self, epoch: int | None, *, is_whole: bool) -> None:
        """Record durably that the folder is no state that a leader had, unless that is recorded.

        Args: See `_Marker`.
        """
        if not self.is_incomplete:
            self._files.replace(self._root / _INCOMPLETE, json.dumps([epoch, is_whole]).encode())

    def _marker(self) -> _Marker:
        try:
            content = json.loads(self._files.content(self._root / _INCOMPLETE, _MOST_BYTES))
        except (FileNotFoundError, ValueError):
            content = None
        match content:
            case [int() | None as epoch, bool(is_whole)]:
                return _Marker(epoch, is_whole)
        return _Marker(None, is_whole=False)

    def sources(self, epoch: int | None, *, is_whole: bool) -> list[Source]:
        """Return the folders in which files are looked for, the first one first.

        Args: As those of `give_up`; they count if nothing is recorded.
        """
        if self.is_incomplete:
            epoch, is_whole = self._marker()
        # A former leader may not have synced its last segments.
        trust = is_whole, epoch is not None
        if not self.is_incomplete:
            return [Source(self._root, *trust)]
        is_moved = (self._root / _BEFORE).exists()
        earlier = self._root / (_BEFORE if is_moved else _MOVING)
        # After a catch-up that was not finished, a segment can have its last block, and not the ones before.
        return [Source(self._root, *((False, False) if is_moved else trust)), Source(earlier, *trust)]

    # ------------------------------------------------------------------ a catch-up

    def set_aside(self) -> None:
        """Move the earlier content out of the shared part of the folder, unless it is; `is_incomplete`.

        A write-ahead log is moved, too: it has what a leader, which this folder was before, had not synced, and a
        start would bring it back.
        """
        if (self._root / _BEFORE).exists():
            return
        moving = self._root / _MOVING
        self._files.make_folder(moving)
        for name in self._files.names(self._root):
            if is_shared(os.fsencode(name)) or name.startswith(_WRITE_AHEAD):
                self._files.rename(self._root / name, moving / name)
        self._files.sync_folder(moving)
        self._files.sync_folder(self._root)
        self._files.rename(moving, self._root / _BEFORE)
        self._files.sync_folder(self._root)

    def take(self, changed: ChangedFiles, path: bytes) -> None:
        """Move a file of the earlier content to its place, in which there is nothing."""
        before = joined(_BEFORE.encode(), path)
        if stat.S_ISREG(changed.mode(before)):
            changed.rename(before, path)
        else:
            raise FileNotFoundError(ENOENT, "it was in the inventory, and is missing", path)

    def end(self, epoch: int) -> None:
        """Record durably that the folder is complete, and keep what has diverged from the leader of this epoch."""
        marker = self._marker()
        if self.is_incomplete:
            self._files.unlink(self._root / _INCOMPLETE)
            self._files.sync_folder(self._root)
        before = self._root / _BEFORE
        if not before.exists():
            return
        if marker.epoch == epoch:
            self._files.remove_folder(before)  # all of it was the leader's, which has removed or changed it
        else:
            self._remove_what_is_not_kept(before)
        if before.exists():
            self._keep(before, epoch)
        self._files.sync_folder(self._root)

    def _remove_what_is_not_kept(self, before: Path) -> None:
        """Remove what the leader has in another version, unless it is beside a segment, and empty folders."""
        for at, _, names in os.walk(before, topdown=False):
            folder = Path(at)
            here = self._root / folder.relative_to(before)
            has_segment = any(name.endswith(SEGMENT_SUFFIX.decode()) for name in names)
            for name in names:
                if _REMAINS.search(name) or (not has_segment and (here / name).is_file()):
                    self._files.unlink(folder / name)
            if _REMAINS.search(folder.name) or not self._files.names(folder):
                self._files.remove_folder(folder)

    def _keep(self, before: Path, epoch: int) -> None:
        kept = next(path for path in self._places(epoch) if not path.exists())
        count, size = _extent(before)
        self._files.rename(before, kept)
        logger.warning(
            "%s has %d files, %d bytes, that the leader has not. Nothing removes them: if messages are missing, print "
            "them with 'qcli log dump'; otherwise remove the folder",
            *(kept, count, size),
        )

    def _places(self, epoch: int) -> Iterator[Path]:
        place = self._root / f"{_DIVERGED}{epoch}"
        yield place
        number = 1
        while True:
            number += 1
            yield place.with_name(f"{place.name}-{number}")
