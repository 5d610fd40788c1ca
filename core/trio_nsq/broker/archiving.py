"""A broker's archive, and the OKs that wait for it."""

import logging
from collections.abc import Callable
from errno import ENAMETOOLONG
from functools import partial
from math import inf
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Final

import trio

from ..archive.manifest import CHECKPOINTS, read_manifest
from ..archive.reading import ArchiveReader
from ..archive.segment_names import segment_object
from ..archive.writer import PATIENCE, ArchiveStatus, ArchiveWriter
from ..event_loop.reactor import Poller
from ..log import DiskLog, Files
from ..log.segment.format import segment_path
from ..protocol.errors import NSQError, StartupError
from ..replication.barrier import ReplicationBarrier
from ..storage import Storage, StorageError, local_path, storage_at
from .errors import NotArchived
from .options import BrokerOptions
from .replication import Replication
from .state.broker import Broker

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_GRACE_S: Final = 1.0
_BEFORE_OK_S: Final = 0.1
_LOOK_S: Final = 0.5
_SEGMENTS_INTERVALS: Final = 10
"""Segments are archived at this many intervals: each look lists the folders of all topics."""
_SEGMENTS_MOST_S: Final = 60.0
"""But at least so often: retention waits for it."""
_NEXT_LEADER_S: Final = 1.0
"""A leader that stops archives for this time: the next one has all operations, and archives them."""


def archive_of(options: BrokerOptions) -> Storage:
    """Return the place of a broker's archive; nothing is written. Raises StartupError: it cannot be used."""
    try:
        local = local_path(options.archive)
        if local is not None:
            _check_folder(local, options)
        return storage_at(options.archive, patience=PATIENCE)
    except (StorageError, OSError) as exc:
        raise StartupError(f"--archive: {exc}") from exc


def _check_folder(archive: Path, options: BrokerOptions) -> None:
    """Raise StartupError if a folder cannot be an archive; OSError: its name cannot be one."""
    shown = options.archive
    if not shown.strip() or not shown.isprintable():
        raise StartupError(f"--archive: {shown!r} is no name of a folder: give a path or a URL")
    there, data = archive.resolve(), options.data_path.resolve()
    if there.is_relative_to(data):
        raise StartupError(
            f"--archive: {shown} is in the data folder, which it would archive: give another one"
        )
    if data.is_relative_to(there):
        raise StartupError(f"--archive: {shown} has the data folder in it: give another one")
    while True:
        try:
            is_folder = S_ISDIR(there.stat().st_mode)
            break
        except (FileNotFoundError, NotADirectoryError):
            there = there.parent
        except OSError as exc:
            if exc.errno == ENAMETOOLONG:
                raise
            return  # it is away: the broker starts, and waits for it
    if not is_folder:
        raise StartupError(f"--archive: {shown} cannot be a folder: {there} is none")


def check_archive(options: BrokerOptions) -> None:
    """Check that an archive can be read. Raises StartupError."""
    storage = archive_of(options)
    try:
        read_manifest(storage)
        storage.names(
            CHECKPOINTS
        )  # stores answer the same for an object that is missing and for a bucket that is
    except (NSQError, OSError) as exc:
        raise StartupError(f"--archive: {exc}") from exc


class _Segments:
    """The archive of the broker's logs, a `SegmentArchive`."""

    def __init__(self, writer: ArchiveWriter, reader: ArchiveReader) -> None:
        self.has = writer.has
        self.still_has = writer.still_has
        self.open = reader.open
        self.close = reader.close


def _names_in_use(broker: Broker) -> set[str] | None:
    """Return the names of segments that only the archive has; None if a topic cannot be opened. Any thread may ask."""
    names = set[str]()
    for topic in list(broker.topics.values()):
        if isinstance(log := topic.log, DiskLog) and log.incarnation is not None:
            for file in log.archived_files:
                path = segment_path(log.folder, file.base_sequence)
                names.add(segment_object(path, log.incarnation, file.next_sequence))
    return None if broker.unavailable else names


class Archiving:
    """Archives what a broker writes. For one run of `serve`.

    Args:
        options: Those of the broker, with an archive.
        replication: The broker is the leader of a cluster: its operations are archived, and OKs wait for its followers,
            too.

    Attributes:
        files: The file layer of the broker.
        segments: The archive of the logs.
        members: What OKs wait for; None: they do not wait for the archive.

    Raises:
        StartupError: The archive cannot be used.
    """

    def __init__(self, options: BrokerOptions, replication: Replication | None = None) -> None:
        storage = archive_of(options)
        self._pacing = options.pacing
        interval_s = options.archive_interval_ms / 1000
        if options.archive_before_ok:
            interval_s = min(interval_s, _BEFORE_OK_S)
        self._writer = ArchiveWriter(
            storage,
            options.data_path,
            files=replication.files if replication is not None else None,
            interval_s=interval_s,
            segments_s=min(_SEGMENTS_INTERVALS * interval_s, _SEGMENTS_MOST_S),
            retention_s=options.archive_retention_ms / 1000,
        )
        self.files: Files = self._writer.files
        self.segments: _Segments = _Segments(self._writer, ArchiveReader(storage))
        self.members: ReplicationBarrier[Any] | None = None
        if options.archive_before_ok:
            alone = ReplicationBarrier[Any](self._writer.operations, self._give_up)
            self.members = replication.members if replication is not None else alone
            self.members.archived = 0
        self._replication = replication
        if replication is not None:
            replication.archive = self.status
        self._on_given_up: Callable[[NotArchived], None] = lambda error: None
        self._ended = trio.Event()
        self._stop_by_s = inf

    def begin(
        self,
        broker: Broker,
        poller: Poller,
        on_segments: Callable[[], None],
        on_given_up: Callable[[NotArchived], None],
    ) -> None:
        """Report what is archived to what waits for it.

        Args:
            broker: Its logs read from the archive.
            poller: Calls this in the event loop.
            on_segments: Called when segments are archived, or were looked for.
            on_given_up: Called if a stop does not wait any longer.
        """
        self._on_given_up = on_given_up
        self._writer.on_segments = partial(poller.call_soon, on_segments)
        self._writer.in_use = partial(_names_in_use, broker)
        if (members := self.members) is not None:
            self._writer.on_stored = lambda number: poller.call_soon(members.archive, number)

    def _give_up(self) -> None:
        assert self.members is not None
        self._on_given_up(NotArchived(self.members.fenced_because))

    @property
    def refuses_because(self) -> str:
        """Why publishes are refused; empty if they are not."""
        return self.members.held_because if self.members is not None else ""

    def status(self) -> ArchiveStatus:
        """Return how far the archive is."""
        return self._writer.status()

    async def run(self) -> None:
        """Archive until `stop`."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._refuse_when_late)
                await self._writer.run()
                nursery.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def _refuse_when_late(self) -> None:
        """Have publishes refused that would wait for the archive for long."""
        if (members := self.members) is None:
            return
        late_s, late_since_s = self._pacing.archive_late_s, inf
        while True:
            status, now_s = self.status(), trio.current_time()
            is_late = status.state != "archiving" or status.lag_s >= late_s
            late_since_s = min(late_since_s, now_s) if is_late else inf
            reason = ""
            if now_s - late_since_s >= late_s or status.lag_s >= late_s:
                what = (
                    "the data folder is being copied to it"
                    if status.state == "copying"
                    else "it is not written"
                )
                reason = f"the archive is late: {status.error or what}"
            if members.hold("archive", reason):
                if reason:
                    logger.warning("publishes are refused: %s", reason)
                else:
                    logger.info("publishes are accepted: the archive is written")
            await trio.sleep(_LOOK_S)

    async def limit_waiting(self) -> None:
        """Let a stop wait for the archive for a limited time."""
        self._stop_by_s = min(self._stop_by_s, trio.current_time() + self._pacing.archive_stop_s)
        if self.members is not None:
            await trio.sleep_until(self._stop_by_s)
            if self.members.is_waited_for:
                self.members.fence("the broker stops")

    def abandon(self) -> None:
        """Archive nothing from now on: another member of the cluster leads, and waits to archive."""
        self._stop_by_s = -inf
        self._writer.finish(0)

    async def stop(self) -> None:
        """Archive what is recorded, for a limited time. Nothing may be recorded any more."""
        limit_s = max(0.0, self._stop_by_s - trio.current_time())
        if self._replication is not None and self._replication.in_sync:
            limit_s = min(limit_s, _NEXT_LEADER_S)
        self._writer.finish(limit_s)
        with trio.move_on_after(limit_s + _GRACE_S):
            await self._ended.wait()
        self.segments.close()
        lag = self.status()
        if lag.lag_operations:
            is_fenced = self._replication is not None and self._replication.fenced_because
            reason = "this member no longer leads" if is_fenced else lag.error or "it is slow"
            logger.warning("the archive lacks the last %d operations: %s", lag.lag_operations, reason)
