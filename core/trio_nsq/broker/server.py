"""Builds the parts of a broker, and wires them."""

import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ..access.audit_writer import AuditWriter
from ..access.authentication import Authentication
from ..event_loop.reactor import Poller
from ..log import ALL_STABLE, DiskLog, Log, LogError, LogWriteError, MemoryLog, is_disk_full, reasonable_limit
from ..log.write_ahead.file import WriteAheadFile
from ..log.write_ahead.replay import Replay
from ..platform.checksum import crc32
from ..protocol import is_ephemeral
from ..server.admission import Admission
from .admin import Admin
from .clock import BrokerClock
from .dead_letters import DeadLetterMover
from .delivery import Deliverer
from .drain import DrainMode
from .errors import NotLeading, StartupError
from .idle_expiry import IdleExpiry
from .ingest.idempotent import IdempotentPublisher
from .ingest.write_ahead import MOST_BYTES_IN_FILES, WriteAhead
from .ingest.write_path import WritePath
from .monitoring.process import ProcessFigures
from .moves import MovedMessages, Moves
from .options import BrokerOptions
from .reader_pool import ReaderPool
from .recovery import TopicLoader
from .scheduler import Scheduler
from .session.deps import SessionDeps
from .session.members import MemberConnections
from .session.sessions import Sessions
from .state.broker import Broker, MessageIds
from .state.moved_letters import MovedLetters
from .state.reported_jobs import ReportedJobs
from .storage.checkpointer import Checkpointer
from .storage.data_folder import BROKER_FILE, ID_RESERVE, MISSING_WRITE_AHEAD, DataFolder
from .storage.disk_reserve import StorageFailure
from .topic_registry import TopicRegistry

if TYPE_CHECKING:
    from ..tls.session import ServerContext
    from .archiving import Archiving
    from .replication import Replication

logger: logging.Logger = logging.getLogger("trio_nsq.broker")


class Server:
    """A running broker, created by `serve`.

    Args:
        folder: The locked data folder. The caller closes it.
        nursery: Runs sessions, syncs and timers; cancel it only after `stop`.

    Raises:
        StartupError: The contents of the data folder cannot be used.

    Attributes:
        instance: A random name of this run, by which clients recognize the broker at another address.
        start_time_s: Start time, Unix seconds.
        start_time_ns: Start time by `BrokerClock.now_ns`, to measure the uptime.
        node_id: The first ten bits of every message id.
        admissions: Connection limits, by the kind of listener.
        authentication: Identifies clients; without one, every client may do everything.
        audit: Writes the audit log.
        replication: The followers, if the broker is the leader of a cluster.
        archiving: The archive, if there is one.
        members: The connections of other members of the cluster.
        process: Resource usage of the process.
        reported_jobs: The jobs of clients, as they report them.
    """

    def __init__(
        self,
        options: BrokerOptions,
        folder: DataFolder,
        nursery: trio.Nursery,
        *,
        tls_context: "ServerContext | None" = None,
        authentication: Authentication | None = None,
        audit: AuditWriter | None = None,
        replication: "Replication | None" = None,
        archiving: "Archiving | None" = None,
    ) -> None:
        self.options = options
        self.start_time_s: int = int(time.time())
        self.authentication: Authentication = authentication or Authentication(None, verifies_clients=False)
        self.audit: AuditWriter = audit or AuditWriter("")
        self.admissions: dict[str, Admission] = {}
        self.replication = replication
        self.archiving = archiving
        self._folder = folder
        folder.disk_reserve.start()
        self.node_id: int = options.node_id if options.node_id is not None else default_node_id()
        ids = self._first_ids()
        replay = self._replay()
        self._write_ahead_number = replay.next_number
        self._write_ahead = WriteAhead(
            self._make_write_ahead, folder.end_write_ahead, reasonable_limit() // 2, nursery, options.pacing
        )

        broker = Broker(options, self._make_log)
        self.broker: Broker = broker
        broker.waits_for_disk = False
        clock = BrokerClock()
        self.clock: BrokerClock = clock
        self.start_time_ns: int = clock.now_ns()
        self.instance: str = os.urandom(8).hex()
        poller = Poller(options.pacing)
        self.poller: Poller = poller
        self.readers: ReaderPool = ReaderPool(broker)
        delivery = Deliverer(broker, options, clock, poller, self.readers, nursery)
        self.delivery: Deliverer = delivery
        write_path = WritePath(
            options, ids, nursery, folder.disk_reserve, poller, delivery, self._write_ahead,
            next((each.members for each in (replication, archiving) if each is not None), None), clock.ahead_ns,
        )  # fmt: skip
        self.write_path: WritePath = write_path
        self.checkpointer: Checkpointer = Checkpointer(
            broker, folder, ids, time.time_ns, write_path.rotate, write_path.sync, write_path.until_replicated,
            write_path.refuse_changes, options.archive_retention_ms if options.archive else 0, clock.ahead_ns,
        )  # fmt: skip
        moved_letters = MovedLetters(broker)
        self._loader = TopicLoader(
            broker,
            folder,
            self._make_log,
            delivery,
            moved_letters,
            self.checkpointer.retention,
            clock,
            replay,
        )
        self.scheduler: Scheduler = Scheduler(
            poller, write_path, delivery, options.pacing, syncs_first=options.sync == "always"
        )
        self.topics: TopicRegistry = TopicRegistry(
            broker, options, folder, clock, write_path, delivery, self.checkpointer, self._loader, self.readers,
            nursery,
        )  # fmt: skip
        write_path.on_refused = self.topics.forget_new_soon
        self._idle_expiry = IdleExpiry(
            broker, self.topics, write_path, clock, self.audit.log, self.start_time_ns
        )
        self.idempotent: IdempotentPublisher = IdempotentPublisher(broker, self.topics)
        self.drain_mode: DrainMode = DrainMode(broker, self.topics, write_path)
        self.admin: Admin = Admin(broker, clock, delivery, self.checkpointer, self.readers)
        self.moves: Moves = Moves(broker, clock, write_path, delivery, self.checkpointer, self.readers)
        self.moved_messages: MovedMessages = MovedMessages(broker, self.topics, self.checkpointer)
        self._dead_letters = DeadLetterMover(broker, self.topics, delivery, self.readers, moved_letters)
        self.session_deps: SessionDeps = SessionDeps(
            options, broker, clock, poller, write_path, delivery, self.topics, self.idempotent, nursery, tls_context,
            self.authentication.access,
        )  # fmt: skip
        self.sessions: Sessions = Sessions(self.session_deps)
        self.members: MemberConnections = MemberConnections(self.authentication.access)
        self._loader.load_all()
        self.process: ProcessFigures = ProcessFigures()
        self.reported_jobs: ReportedJobs = ReportedJobs()
        self.jobs: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
            self.scheduler.run,
            self.session_deps.heartbeats.run,
            self._dead_letters.run,
            partial(self.checkpointer.save_on_schedule, options.checkpoint_interval_ms / 1000),
            self._loader.open_again_on_schedule,
            self._idle_expiry.run,
            write_path.syncs.run,
            partial(self.authentication.watch_expiry, self),
            self.audit.run,
            *((replication.run,) if replication is not None else ()),
        )
        if replication is not None:
            replication.begin(poller, self._end_leading, self.storage_failure)
        if archiving is not None:
            archiving.begin(broker, poller, self.checkpointer.retention.check_waiting, self._end_leading)

    def _first_ids(self) -> MessageIds:
        """Reserve the first message ids. If the disk is full, start without any: consumers can free space."""
        ids = MessageIds(self.node_id, first_id := self._folder.first_id(), first_id)
        try:
            self._folder.reserve_ids(first_id + ID_RESERVE)
            ids.reserved = first_id + ID_RESERVE
        except OSError as exc:
            if not is_disk_full(exc):
                path = self._folder.path
                raise StartupError(f"--data-path: cannot write to {path}: {exc.strerror}") from exc
        return ids

    def _replay(self) -> Replay:
        try:
            replay = Replay(self._folder.files, self._folder.path)
        except (LogError, ValueError) as exc:
            advice = "if you move it away, messages of all topics that only it has are lost"
            raise StartupError(f"--data-path: {exc}; {advice}") from exc
        for path, what in replay.damage:
            logger.error("%s: %s", path, what)
        if self._folder.lacks_write_ahead:
            logger.error("%s: %s", self._folder.path / "write-ahead.*", MISSING_WRITE_AHEAD)
            replay.lacks_entries = True
        return replay

    def _make_write_ahead(self) -> WriteAheadFile | None:
        """Create the next write-ahead file, in a thread; one at a time. Raises LogWriteError.

        Returns None if the disk has too little room: messages would be refused earlier because of it.
        """
        folder = self._folder
        try:
            if (
                folder.files.space(folder.path).free_bytes
                < MOST_BYTES_IN_FILES * self.options.pacing.wal_file_bytes
            ):
                return None
            folder.begin_write_ahead()
        except OSError as exc:
            raise LogWriteError(folder.path / BROKER_FILE, exc) from exc
        number, self._write_ahead_number = self._write_ahead_number, self._write_ahead_number + 1
        return WriteAheadFile.create(folder.files, folder.path, number)

    def _make_log(self, name: str, stable_end: int = ALL_STABLE) -> Log:
        if is_ephemeral(name):
            return MemoryLog(max_messages=self.options.mem_queue_size)
        folder = self._folder.topic_folder(name)
        return DiskLog(
            folder,
            segment_bytes=self.options.max_bytes_per_file,
            open_files=self._folder.open_files,
            stable_end=stable_end,
            archive=self.archiving.segments if self.archiving is not None else None,
        )

    def renew_identities(self) -> int:
        """Close the connections whose token or certificate was revoked or has expired. Returns their number."""
        return self.sessions.renew_identities() + self.members.renew_identities()

    # ------------------------------------------------------------------ health and stop

    @property
    def health(self) -> str:
        """`OK`, or `NOK - ` and the error of the last write, why publishes are refused, or an unavailable topic."""
        room = self._folder.disk_reserve
        error = self.write_path.error or room.failed_with or room.shortage or self.checkpointer.error
        error = error or self.refuses_because
        error = error or self.broker.why_unavailable
        return f"NOK - {error}" if error else "OK"

    def _end_leading(self, error: NotLeading) -> None:
        """Acknowledge, commit, change and deliver nothing from now on; `serve` is about to be cancelled."""
        self.broker.stopping = True
        self.sessions.abandon_all()
        self.write_path.abandon(error)
        if self.archiving is not None:
            self.archiving.abandon()

    @property
    def refuses_because(self) -> str:
        """Why publishes are refused: a full disk, too few members in sync, a late archive; empty: they are not."""
        replication, full = self.replication, self._why_full
        if replication is None:
            return (self.archiving.refuses_because if self.archiving is not None else "") or full
        kept = replication.keeps_leading_because if full else ""
        return replication.refuses_because or (f"{full}; {kept}" if kept else full)

    def storage_failure(self) -> StorageFailure | None:
        """Return why the last message could not be stored; None: it was."""
        if full := self._why_full:
            return StorageFailure(full, is_full=True)
        return StorageFailure(error, is_full=False) if (error := self.write_path.error) else None

    @property
    def _why_full(self) -> str:
        """Why messages are refused for lack of disk space; after an append that failed, small ones may succeed."""
        room = self._folder.disk_reserve
        return room.closed_because or room.failed_with

    async def stop(self) -> None:
        """Store pending publishes, close every client, save every state. Waits for the disk, never for a client.

        In a cluster, it waits for the followers, too, for a limited time. A broker that does not lead any longer closes
        its clients and its files, and leaves the rest.
        """
        self.process.close()
        async with trio.open_nursery() as nursery:
            if self.replication is not None:
                nursery.start_soon(self.replication.limit_waiting)
            if self.archiving is not None:
                nursery.start_soon(self.archiving.limit_waiting)
            await self._stop()
            nursery.cancel_scope.cancel()

    async def _stop(self) -> None:
        await self.write_path.close()
        await trio.lowlevel.checkpoint()  # lets sessions send the OKs of the publishes just stored
        self.broker.stopping = True
        await self.sessions.close_all()
        await self.topics.deletions_done()
        if not self.write_path.is_fenced:
            await self.checkpointer.save_all()
        for topic in list(self.broker.topics.values()):
            # The request of an HTTP client may be saving the topic.
            async with self.checkpointer.locked(topic):
                topic.log.close()
        if self.replication is not None:
            if not self.replication.refuses_because:
                with suppress(NotLeading):
                    await self.write_path.until_replicated()
            self.replication.end()


def default_node_id() -> int:
    """Derive the node id (0..1023) from the host name, as nsqd does."""
    from hashlib import md5

    return crc32(md5(socket.gethostname().encode(), usedforsecurity=False).digest()) % 1024
