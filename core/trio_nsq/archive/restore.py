"""Brings a data folder back from an archive."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ..log.files import Files
from ..log.segment.format import base_in_name, decode_file_header
from ..replication.catch_up import Block, FileBegin
from ..replication.fuzzy_copy import FuzzyCopy
from ..storage import Storage
from .content import Progress
from .manifest import (
    ArchiveDamaged,
    ArchiveError,
    Checkpoint,
    Stream,
    StreamObject,
    begun_manifest,
    later_in_chain,
    list_stream,
    stream_folder,
)
from .replay import ArchiveReplay, WantedTopics
from .segments import ArchivedSegment, fetch_segment, read_segments


class OperationsDamaged(ArchiveDamaged):
    """Operations that a state needs are missing or damaged. The state before them, of this time, can be restored."""

    def __init__(self, what: str, before_ms: int) -> None:
        super().__init__(
            f"{what}. The state before is that of {shown_time(before_ms)}: "
            "'qcli archive restore --before-damage' restores it"
        )


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A state of the data folder that an archive has.

    Attributes:
        checkpoint: It begins with this one.
        segments: Its archived segments, by path.
        stream: The objects with the operations behind it, in order.
        time_ms: When the folder was in this state, Unix milliseconds; at most one interval of archiving earlier.
    """

    checkpoint: Checkpoint
    segments: Mapping[bytes, ArchivedSegment]
    stream: tuple[StreamObject, ...]

    @property
    def time_ms(self) -> int:
        return self.stream[-1].about.time_ms if self.stream else self.checkpoint.time_ms

    @property
    def number(self) -> int:
        """The number of the last operation."""
        return self.stream[-1].about.last if self.stream else self.checkpoint.number

    @property
    def size_bytes(self) -> int:
        """About how many bytes a restore reads: those of the operations are not known."""
        return self.checkpoint.size_bytes + sum(each.size for each in self.segments.values())


class RestorePlan:
    """The ways to restore a state: with the checkpoint before it, and if that is damaged, with an earlier one.

    An earlier one of the same run gives the same state with all operations since.

    Args:
        storage: The archive.
        until_ms: The newest state not after this time, Unix milliseconds; None: no limit.
        before_damage: If objects that the state needs are damaged, restore the newest state before.

    Attributes:
        point: The state, with the checkpoint to use.
        damage: Sentences about what was found damaged.

    Raises:
        ArchiveError: There is no such state. ArchiveDamaged: Objects that it needs are missing or damaged.
        StorageError, OSError: The archive cannot be read.
    """

    def __init__(self, storage: Storage, until_ms: int | None = None, *, before_damage: bool = False) -> None:
        found = begun_manifest(storage)
        checkpoints = found.manifest.checkpoints
        usable = [each for each in checkpoints if until_ms is None or each.time_ms <= until_ms]
        if not usable:
            raise ArchiveError(
                f"the archive {storage.shown} begins later, at {shown_time(checkpoints[0].time_ms)}"
            )
        if not (found.is_whole or before_damage):
            newest = RestorePoint(checkpoints[-1], {}, list_stream(storage, checkpoints[-1]).objects)
            raise OperationsDamaged(found.damage, newest.time_ms)
        self.damage: list[str] = [found.damage] if found.damage else []
        self.before_damage = before_damage
        self._storage = storage
        self._until_ms = until_ms
        self._left = usable
        # The operations of the next one are listed, too: without a gap, the listing of those before it was complete.
        self._listed = checkpoints[: len(usable) + 1]
        self.point: RestorePoint = self._first()

    def _first(self) -> RestorePoint:
        checkpoint = self._left.pop()
        stream = self._stream(checkpoint)
        bare = RestorePoint(checkpoint, {}, stream.objects)
        if stream.gap is not None:
            folder = self._storage.url_of(stream_folder(checkpoint.id))
            what = f"{folder}: the object with operation {stream.gap} is missing, and later ones are there"
            if not self.before_damage:
                raise OperationsDamaged(what, bare.time_ms)
            self.damage.append(f"{what}: later changes are not restored")
        try:
            return self._with_segments(bare)
        except ArchiveDamaged as exc:
            return self._earlier(bare, exc)

    def _stream(self, checkpoint: Checkpoint) -> Stream:
        return list_stream(
            self._storage, checkpoint, self._until_ms, later_in_chain(self._listed, checkpoint)
        )

    def _with_segments(self, point: RestorePoint) -> RestorePoint:
        return replace(point, segments=read_segments(self._storage, point.checkpoint))

    def use_earlier(self, because: ArchiveDamaged) -> None:
        """Use an earlier checkpoint, because the present one is damaged. Raises ArchiveDamaged: there is none."""
        self.point = self._earlier(self.point, because)

    def _earlier(self, former: RestorePoint, because: ArchiveDamaged) -> RestorePoint:
        while self._left:
            checkpoint = self._left.pop()
            point = RestorePoint(checkpoint, {}, self._stream(checkpoint).objects)
            is_same = checkpoint.run == former.checkpoint.run and point.number >= former.number
            if not is_same and not self.before_damage:
                raise OperationsDamaged(str(because), point.time_ms) from because
            try:
                found = self._with_segments(point)
            except ArchiveDamaged as exc:
                self.damage.append(str(exc))
                continue
            loss = "nothing is lost by that" if is_same else "later changes are not restored"
            self.damage.append(f"{because}: checkpoint {checkpoint.id} was used instead, and {loss}")
            return found
        raise because


def find_restore_point(storage: Storage, until_ms: int | None = None) -> RestorePoint:
    """Return the newest state that an archive has, or the newest one not after a time; see `RestorePlan`."""
    return RestorePlan(storage, until_ms).point


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
        damage: Sentences about what is missing or damaged. Of archived segments, messages are missing, or only those
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
        self._segments: Mapping[bytes, ArchivedSegment] = {}
        self._replay = ArchiveReplay(
            storage, Files(), folder, wants=WantedTopics(is_wanted), fetch=self._fetch, on_read=on_read
        )

    def restore(self, point: RestorePoint, *, before_damage: bool = False) -> RestorePoint:
        """Write all files, durably.

        Args:
            before_damage: If operations are missing or damaged, restore the state before them.

        Returns:
            The state that was restored.

        Raises:
            ArchiveDamaged: An object of the checkpoint, other than a segment, is missing or damaged.
            OperationsDamaged: An object with operations is.
            StorageError, OSError: The archive cannot be read, or the folder cannot be written.
        """
        replay = self._replay
        try:
            self._segments = point.segments
            replay.do_checkpoint(point.checkpoint)
            done = self._do_operations(point, before_damage=before_damage)
            replay.changed.sync()
            return done
        finally:
            replay.changed.close()

    def _do_operations(self, point: RestorePoint, *, before_damage: bool) -> RestorePoint:
        """Do the operations behind the checkpoint; returns the state that was reached."""
        count = 0
        try:
            for _ in self._replay.do_stream(point.stream):
                count += 1
        except ArchiveDamaged as exc:
            before = replace(point, stream=point.stream[:count])
            if not before_damage:
                raise OperationsDamaged(str(exc), before.time_ms) from exc
            self.damage.append(f"{exc}: later changes are not restored")
            return before
        return point

    def _fetch(self, copy: FuzzyCopy, path: bytes) -> None:
        """Write an archived segment."""
        segment = self._segments.get(path)
        if segment is None:
            raise ArchiveDamaged(f"the checkpoint has no segment {path!r}")
        is_begun = False
        try:
            for offset, data in fetch_segment(self._storage, segment):
                if not is_begun:
                    if _is_another(segment, data):
                        raise ArchiveDamaged(f"{self._storage.url_of(segment.name)} has another segment")
                    copy.add(FileBegin(path, is_whole=True))
                    is_begun = True
                self._on_read(len(data))
                copy.add(Block(path, offset, data))
        except ArchiveDamaged as exc:
            self.damage.append(f"{exc}: messages are missing")
        if not is_begun:
            self._replay.missing.add(path)


def _is_another(segment: ArchivedSegment, begin: bytes) -> bool:
    """Whether what an object begins with is the head of another segment: a broker would not open the topic with it."""
    header = decode_file_header(begin)
    if header is None:
        return False  # it is damaged, and the broker derives it from the records
    path = Path(os.fsdecode(segment.path))
    incarnation = None if header.incarnation is None else header.incarnation.hex()
    return header.base_sequence != base_in_name(path) or incarnation not in (
        None,
        segment.name.split("/")[-2],
    )
