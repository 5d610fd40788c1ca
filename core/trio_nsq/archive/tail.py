"""The newest messages of a broker's archive: what it has of segments that are not archived under names of their own.

They are read from the newest checkpoint and the operations behind it. After that, only new operations are read.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ..log.errors import NotASegmentError
from ..log.files.scratch import ScratchFiles, ScratchSnapshot
from ..log.segment.format import SUFFIX, base_in_name
from ..log.segment.identity import FILE_NAME as INCARNATION_FILE
from ..log.segment.identity import Identity
from ..replication.catch_up import FileBegin
from ..replication.fuzzy_copy import FuzzyCopy
from ..replication.inventory import absolute
from ..storage import Storage
from .manifest import ArchiveDamaged, Checkpoint, list_operations, read_manifest
from .replay import TOPICS, ArchiveReplay, WantedTopics
from .segments import ArchivedSegment, read_segments

logger: logging.Logger = logging.getLogger("trio_nsq.archive")

_ROOT: Final = Path("/archive")
"""Nothing is there: paths of files that are followed are below it."""
_TOPIC_SUFFIX: Final = ".topic"
_TRIES: Final = 3


class TailLog(NamedTuple):
    """The newest segments of a topic.

    Attributes:
        incarnation: That of the log, 32 hex digits.
        files: The segments, and the file `incarnation`, as they were at one moment, by name.
    """

    incarnation: str
    files: Mapping[str, ScratchSnapshot]


class _Wanted:
    """Whether what has a path is followed: segments, and what tells whose they are.

    Args:
        topic: Only of this topic; None: of all.
    """

    def __init__(self, topic: str | None) -> None:
        self._topics = WantedTopics(None if topic is None else lambda name: name == topic)

    def __call__(self, path: bytes) -> bool:
        names = path.split(b"/")
        if names[0] != TOPICS or not self._topics(path):
            return path == b""
        is_file = len(names) == 3 and (SUFFIX.encode() in names[2] or INCARNATION_FILE.encode() in names[2])
        return len(names) < 3 or is_file


class _State:
    """The files of a checkpoint, with the operations behind it."""

    def __init__(self, storage: Storage, topic: str | None, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.files = files = ScratchFiles(_ROOT)

        def fetch(copy: FuzzyCopy, path: bytes) -> None:
            """Make a file without content of a segment that is archived."""
            copy.add(FileBegin(path, is_whole=True))
            files.drop(absolute(_ROOT, path))

        # No reference leads back to this object: its temporary file goes with the last reference to it.
        self.replay = ArchiveReplay(storage, files, _ROOT, wants=_Wanted(topic), fetch=fetch)

    def drop(self, segments: Iterable[ArchivedSegment]) -> None:
        """Drop the content of segments that are archived."""
        for segment in segments:
            path = absolute(_ROOT, segment.path)
            # The topic may have been deleted and recreated since, or the segment deleted.
            if self.incarnation(path.parent) == segment.name.split("/")[-2]:
                with suppress(FileNotFoundError):
                    self.files.drop(path)

    def incarnation(self, folder: Path) -> str | None:
        """Return the incarnation of a topic's folder, 32 hex digits; None: unknown."""
        identity = Identity.read(self.files, folder)
        return identity.incarnation.hex() if identity is not None else None


class ArchiveTail:
    """Follows an archive. Any thread may call its methods; they read what is new in the archive, and may wait for it.

    The files are in an unnamed temporary file of this process.

    Attributes:
        damage: Why newer messages are not read, a sentence; empty if nothing is damaged.
    """

    def __init__(self, storage: Storage) -> None:
        self.damage: str = ""
        self._storage = storage
        self._lock = threading.Lock()
        self._topic: str | None = None  # the only one that is followed; None: all
        self._is_asked = False
        self._state: _State | None = None
        self._damaged: tuple[int, str] | None = None  # the id of a checkpoint that cannot be read, and why

    def topics(self) -> list[str]:
        """Return the topics that have segments. Raises StorageError, OSError."""
        with self._lock:
            self._want(None)
            self._refresh()
            if self._state is None:
                return []
            folder = absolute(_ROOT, TOPICS)
            with suppress(FileNotFoundError):
                names = [name for name in self._state.files.names(folder) if name.endswith(_TOPIC_SUFFIX)]
                found = [name.removesuffix(_TOPIC_SUFFIX) for name in names]
                return sorted(topic for topic in found if self._find(topic) is not None)
            return []

    def log(self, topic: str) -> TailLog | None:
        """Return the newest segments of a topic; None if there are none.

        Segments that are archived when this returns may be missing, or have fewer messages.

        Raises:
            StorageError, OSError: The archive cannot be read, or there is no room for temporary files.
        """
        with self._lock:
            self._want(topic)
            self._refresh()
            return self._find(topic)

    def _find(self, topic: str) -> TailLog | None:
        if self._state is None:
            return None
        files, folder = self._state.files, absolute(_ROOT, TOPICS) / f"{topic}{_TOPIC_SUFFIX}"
        try:
            found = files.snapshots(folder, lambda name: _is_segment(name) or name == INCARNATION_FILE)
        except (FileNotFoundError, NotADirectoryError):
            return None
        paths = [folder / name for name in sorted(found) if _is_segment(name)]
        if not paths:
            return None
        incarnation = self._state.incarnation(folder) or Identity.derive(files, paths).incarnation.hex()
        return TailLog(incarnation, found)

    def _want(self, topic: str | None) -> None:
        """Follow a topic: the first one alone, and all of them as soon as there is another one."""
        if not self._is_asked:
            self._is_asked, self._topic = True, topic
        elif self._topic not in (None, topic):
            self._topic = self._state = None

    # ------------------------------------------------------------------ reading the archive

    def _refresh(self) -> None:
        """Read what is new. What is damaged is read again: `prune` may have removed it, or a listing may be old."""
        for _ in range(_TRIES):
            damage = ""
            try:
                self._read_new()
                break
            except ArchiveDamaged as exc:
                damage = str(exc)
            except OSError:
                self._state = None  # an operation may be half done
                raise
        if damage and damage != self.damage:
            logger.warning(
                "%s. Messages behind it are read when the broker has written another checkpoint", damage
            )
        self.damage = damage

    def _read_new(self) -> None:
        """Raises ArchiveDamaged, StorageError, OSError."""
        checkpoints = read_manifest(self._storage).manifest.checkpoints
        if not checkpoints:
            self._state = None
            return
        newest, state = checkpoints[-1], self._state
        if state is not None and (chain := _chain(state.checkpoint, checkpoints)):
            try:
                self._follow(state, chain)
            except ArchiveDamaged:
                if newest.number <= state.replay.number:
                    raise
            else:
                if newest.number <= state.replay.number:
                    self._drop_archived(state, newest)
                    return
        if self._damaged is not None and self._damaged[0] == newest.id:
            raise ArchiveDamaged(self._damaged[1])
        self._begin(checkpoints)

    def _begin(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Read the newest checkpoint, or an earlier one of its chain, and what is behind it.

        If all are damaged, the former state is kept.
        """
        damage = ""
        for checkpoint in reversed(checkpoints):
            if not (chain := _chain(checkpoint, checkpoints)):
                break
            state = _State(self._storage, self._topic, checkpoint)
            try:
                state.replay.do_checkpoint(checkpoint)
            except ArchiveDamaged as exc:
                damage = damage or str(exc)
                continue
            self._state, self._damaged = state, None
            self._follow(state, chain)
            return
        newest = checkpoints[-1].id
        if any(each.id == newest for each in read_manifest(self._storage).manifest.checkpoints):
            self._damaged = newest, damage
        raise ArchiveDamaged(damage)

    def _follow(self, state: _State, folders: Sequence[int]) -> None:
        """Do the operations in these folders that are new."""
        stream = list_operations(self._storage, folders, state.replay.number)
        for _ in state.replay.do_stream(stream.objects):
            pass  # each is done when it is yielded
        if stream.gap is not None:
            raise ArchiveDamaged(f"{self._storage.shown}: the object with operation {stream.gap} is missing")

    def _drop_archived(self, state: _State, newest: Checkpoint) -> None:
        if state.checkpoint != newest:
            state.drop(read_segments(self._storage, newest).values())
            state.checkpoint = newest


def _chain(checkpoint: Checkpoint, checkpoints: Sequence[Checkpoint]) -> list[int]:
    """Return the checkpoints while which what follows one was written; empty: they are removed, or of another run.

    The first one is that before it: an object that was being written when that ended has its folder.
    """
    by_id, chain = {each.id: each for each in checkpoints}, [checkpoints[-1].id]
    while chain[0] != checkpoint.id:
        previous = by_id[chain[0]].previous if chain[0] in by_id else None
        if previous is None:
            return []
        chain.insert(0, previous)
    before = checkpoint.previous
    return chain if before is None else [before, *chain]


def _is_segment(name: str) -> bool:
    try:
        base_in_name(Path(name))
    except NotASegmentError:
        return False
    return name.endswith(SUFFIX)
