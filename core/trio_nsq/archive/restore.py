"""Brings a data folder back from an archive."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..log.files import Files
from ..replication.catch_up import Block, FileBegin
from ..storage import Storage
from .content import Progress
from .manifest import (
    ArchiveDamaged,
    ArchiveError,
    Checkpoint,
    StreamObject,
    complete_checkpoints,
    list_stream,
    stream_folder,
)
from .replay import ArchiveReplay, WantedTopics
from .segments import ArchivedSegment, fetch_segment, read_segments


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A state of the data folder that an archive has.

    Attributes:
        checkpoint: It begins with this one.
        stream: The objects with the operations behind it, in order.
        time_ms: When the folder was in this state, Unix milliseconds; at most one interval of archiving earlier.
    """

    checkpoint: Checkpoint
    stream: tuple[StreamObject, ...]

    @property
    def time_ms(self) -> int:
        return self.stream[-1].about.time_ms if self.stream else self.checkpoint.time_ms


def find_restore_point(storage: Storage, until_ms: int | None = None) -> RestorePoint:
    """Return the newest state that an archive has, or the newest one not after a time.

    Args:
        until_ms: Unix milliseconds; None: no limit.

    Raises:
        ArchiveError: There is none. ArchiveDamaged: operations before it are missing.
        StorageError, OSError: The archive cannot be read.
    """
    checkpoints = complete_checkpoints(storage)
    usable = [each for each in checkpoints if until_ms is None or each.time_ms <= until_ms]
    if not usable:
        raise ArchiveError(
            f"the archive {storage.shown} begins later, at {shown_time(checkpoints[0].time_ms)}"
        )
    stream = list_stream(storage, usable[-1], until_ms)
    point = RestorePoint(usable[-1], stream.objects)
    if stream.gap is not None:
        raise ArchiveDamaged(
            f"{storage.url_of(stream_folder(usable[-1].id))}: the object with operation {stream.gap} is missing, and "
            f"later ones are there. The state before it is that of {shown_time(point.time_ms)}"
        )
    return point


def shown_time(time_ms: int) -> str:
    """Return a time for messages, RFC 3339; what parses it finds the same millisecond."""
    return (
        datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


class Restorer:
    """Writes a state of an archive into a data folder.

    Args:
        folder: Exists, and has nothing that the broker uses.
        is_wanted: Whether the topic of this name is restored; None: all are.
        on_read: See `Progress`.

    Attributes:
        damage: Sentences about archived segments that are missing or damaged. Their messages are missing, or only those
            that the broker cannot read; everything else is restored.
    """

    def __init__(
        self,
        storage: Storage,
        folder: Path,
        *,
        is_wanted: Callable[[str], bool] | None = None,
        on_read: Progress = lambda size: None,
    ) -> None:
        self.damage: list[str] = []
        self._storage = storage
        self._on_read = on_read
        self._segments: dict[bytes, ArchivedSegment] = {}
        self._replay = ArchiveReplay(
            storage, Files(), folder, wants=WantedTopics(is_wanted), fetch=self._fetch, on_read=on_read
        )

    def restore(self, point: RestorePoint) -> None:
        """Write all files, durably.

        Raises:
            ArchiveDamaged: An object other than a segment is missing or damaged.
            StorageError, OSError: The archive cannot be read, or the folder cannot be written.
        """
        replay = self._replay
        try:
            self._segments = read_segments(self._storage, point.checkpoint)
            replay.do_checkpoint(point.checkpoint)
            for found in point.stream:
                replay.do_operations(found)
            replay.changed.sync()
        finally:
            replay.changed.close()

    def _fetch(self, path: bytes) -> None:
        """Write an archived segment."""
        segment = self._segments.get(path)
        if segment is None:
            raise ArchiveDamaged(f"the checkpoint has no segment {path!r}")
        is_begun = False
        try:
            for offset, data in fetch_segment(self._storage, segment):
                if not is_begun:
                    self._replay.copy.add(FileBegin(path, is_whole=True))
                    is_begun = True
                self._on_read(len(data))
                self._replay.copy.add(Block(path, offset, data))
        except ArchiveDamaged as exc:
            self.damage.append(str(exc))
        if not is_begun:
            self._replay.missing.add(path)
