"""Writes the archive of a running broker: its file operations, a second behind, and a checkpoint now and then."""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final, Literal

import trio

from ..event_loop.retries import Delays
from ..protocol.errors import NSQError
from ..replication.lag import OperationAges
from ..replication.link import encode_operations
from ..replication.recorder import RecordingFiles
from ..replication.stream import OperationStream, TooFarBehind
from ..storage import Lease, LeaseLost, Patience, Storage, StorageError
from .checkpoints import Checkpoints
from .content import encode_content
from .manifest import LEASE, StreamName, stream_folder
from .segments import ArchivedSegment

logger: logging.Logger = logging.getLogger("trio_nsq.archive")

OBJECT_BYTES: Final = 4 * 1024 * 1024
"""So many bytes of operations are written at once, without waiting for the interval."""
KEPT_BYTES: Final = 256 * 1024 * 1024
"""Memory for operations that are not archived yet. Beyond it, the folder is copied anew."""
CHECKPOINT_BYTES: Final = 64 * 1024 * 1024
SEGMENTS_S: Final = 10.0
_LOOKS: Final = 6
_SHRINKS: Final = 0.8
"""Segments that were closed meanwhile are archived before a copy, if they are fewer by this factor."""
_EXPIRY_S: Final = 6 * 3600.0
_EXPIRIES: Final = 16
"""Old objects are removed this many times in the time for which they are kept, and at least every `_EXPIRY_S`."""
_STOP_S: Final = 10.0
FIRST_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 5.0
_POLL_S: Final = 0.1
_IDLE_S: Final = 0.5
_SAMPLE_S: Final = 0.5
PATIENCE: Final = Patience(attempt_s=10.0, deadline_s=5.0)
"""For the storage of a writer: it repeats what failed itself, and reports it meanwhile."""


class _Stopping(Exception):
    """The broker stops."""


@dataclass(frozen=True, slots=True)
class ArchiveStatus:
    """How far an archive is, for people.

    Attributes:
        url: Without secrets.
        state: `waiting`: it is not reached, or another broker writes to it; `copying`: the data folder is copied, at
            the begin of a run or because the archive was too far behind; `archiving`.
        error: Why the last attempt failed; empty if it did not.
        lag_operations, lag_bytes, lag_s: What is not archived yet, and the age of the oldest of it.
        checkpoints: How many this run has written.
        checkpoint_time_ms: When the last one was finished, Unix milliseconds; 0: none yet.
        objects, object_bytes: The objects with operations that this run has written.
        segments: How many segments of the data folder are archived.
        owner: The id that the data folder and its archive share; empty: not known yet.
        conflicts: Under the names of so many others, the archive has other messages: the folder was restored from an
            older state. They stay on the disk.
    """

    url: str
    state: Literal["waiting", "copying", "archiving"]
    error: str = ""
    lag_operations: int = 0
    lag_bytes: int = 0
    lag_s: float = 0.0
    checkpoints: int = 0
    checkpoint_time_ms: int = 0
    objects: int = 0
    object_bytes: int = 0
    segments: int = 0
    conflicts: int = 0
    owner: str = ""


class ArchiveWriter:
    """Archives a data folder. For one run of a broker.

    Args:
        storage: The archive.
        data_path: The data folder.
        files: Its file layer, if others record and keep its operations, too, as those of a leader.
        interval_s: How often operations are written.
        kept_bytes: See `KEPT_BYTES`.
        object_bytes: See `OBJECT_BYTES`.
        checkpoint_bytes: A checkpoint follows so many bytes of operations, or as many as the checkpoint before had.
        segments_s: How often it is looked for sealed segments, and whether a checkpoint is due. Each sixth time, it is
            looked whether the manifest and the newest checkpoint are still there.
        retention_s: How long states and segments are kept; 0: for ever.

    Attributes:
        files: The file layer of the broker.
        operations: What it has recorded.
        in_use: Returns the names of segments that logs read from the archive; None: not all are known.
        on_stored: Called, in another thread, with the number of the last archived operation.
        on_segments: Called, in another thread, when `has` or `still_has` answer otherwise than before.
    """

    def __init__(
        self,
        storage: Storage,
        data_path: Path,
        *,
        files: RecordingFiles | None = None,
        interval_s: float = 1.0,
        kept_bytes: int = KEPT_BYTES,
        object_bytes: int = OBJECT_BYTES,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        segments_s: float = SEGMENTS_S,
        retention_s: float = 0.0,
    ) -> None:
        self._is_shared = files is not None
        self.files: RecordingFiles = files or RecordingFiles(data_path, OperationStream(kept_bytes))
        self.operations: OperationStream = self.files.operations
        self.in_use: Callable[[], set[str] | None] = lambda: None
        self.on_segments: Callable[[], None] = lambda: None
        self.on_stored: Callable[[int], None] = lambda number: None
        self._storage = storage
        self._interval_s = interval_s
        self._object_bytes_most = object_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._segments_s = segments_s
        self._retention_s = retention_s
        self._checkpoints = Checkpoints(self.files, self.operations, self._storage, secrets.token_hex(8))
        self._stopping = threading.Event()
        self._stop_by_s = 0.0
        self._ages = OperationAges()
        self._has_more = threading.Event()
        self.operations.on_append.append(self._wake)
        # Written by the thread that archives.
        self._state: Literal["waiting", "copying", "archiving"] = "waiting"
        self._error = ""
        self._stored = self.operations.last_number
        self._objects = self._object_bytes = 0

    def status(self) -> ArchiveStatus:
        """Return how far it is. Any thread may ask."""
        newest = self._checkpoints.newest
        return ArchiveStatus(
            self._storage.shown,
            self._state,
            self._error,
            lag_operations=self.operations.last_number - self._stored,
            lag_bytes=self.operations.bytes_after(self._stored),
            lag_s=self._ages.age_s(time.monotonic(), self._stored),
            checkpoints=self._checkpoints.count,
            checkpoint_time_ms=0 if newest is None else newest.time_ms,
            objects=self._objects,
            object_bytes=self._object_bytes,
            segments=len(self._checkpoints.segments.found),
            conflicts=len(self._checkpoints.segments.conflicts),
            owner=self._checkpoints.owner,
        )

    def has(self, path: Path, incarnation: bytes, next_sequence: int) -> bool:
        """Whether this segment of the data folder is archived under its name. Any thread may ask."""
        return self._checkpoints.segments.has(path, incarnation, next_sequence)

    def still_has(self, path: Path, incarnation: bytes, next_sequence: int) -> bool:
        """See `SegmentArchive`. Any thread may ask."""
        return self._checkpoints.segments.still_has(path, incarnation, next_sequence)

    async def run(self) -> None:
        """Archive until cancelled, or until what `finish` demands is done."""
        limiter = trio.CapacityLimiter(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sample_ages)
            try:
                await trio.to_thread.run_sync(self._run, limiter=limiter, abandon_on_cancel=True)
            finally:
                self._stopping.set()
            nursery.cancel_scope.cancel()

    async def _sample_ages(self) -> None:
        while True:
            self._ages.sample(time.monotonic(), self.operations.last_number)
            await trio.sleep(_SAMPLE_S)

    def finish(self, limit_s: float = _STOP_S) -> None:
        """Have `run` archive what is recorded, for at most this time, and end. Nothing may be recorded any more."""
        self._stop_by_s = time.monotonic() + limit_s
        self._stopping.set()
        self._wake()

    def _wake(self) -> None:
        if not self._has_more.is_set():
            self._has_more.set()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        retries = Delays(FIRST_RETRY_S, MAX_RETRY_S)
        while not self._is_over:
            self._state = "waiting"
            try:
                with self._storage.hold(LEASE, self._busy) as lease:
                    retries.reset()
                    self._archive(lease)
            except _Stopping:
                return
            except TooFarBehind:
                self._report("it takes less than the broker writes: the data folder is copied again")
            except (NSQError, OSError) as exc:
                self._report(str(exc))
                self._pause(retries.next_s())
            except Exception:
                # A bug: it must not stop the broker.
                logger.exception("archiving failed")
                self._report("internal error; see the log")
                self._pause(retries.next_s())

    @property
    def _is_over(self) -> bool:
        is_done = self._stored == self.operations.last_number and self._state == "archiving"
        return self._stopping.is_set() and (is_done or time.monotonic() >= self._stop_by_s)

    def _busy(self, holder: str) -> StorageError:
        return StorageError(f"{holder} writes to it; each broker, or cluster, needs an archive of its own")

    def _pause(self, seconds: float) -> None:
        """Wait; not for long while it stops."""
        if not self._stopping.wait(seconds):
            return
        time.sleep(min(seconds, _POLL_S))

    def _report(self, reason: str) -> None:
        if reason != self._error:
            self._error = reason
            logger.warning("the archive %s is not written: %s", self._storage.shown, reason)

    def _archive(self, lease: Lease) -> None:
        """Copy the folder, and archive operations until it is over.

        Raises LeaseLost, ArchiveDamaged, TooFarBehind, StorageError, OSError, _Stopping.
        """
        self._state = "copying"
        self._checkpoints.begin()

        def check() -> None:
            if self._is_over:
                raise _Stopping
            lease.check()

        self._archive_closed_segments(check)
        self._note_stored(self._checkpoints.write(check).number)
        self._state = "archiving"
        self._recovered()
        background = _Background(self, lease)
        background.start()
        try:
            self._archive_operations(lease, background)
        finally:
            background.stop(waits=not self._stopping.is_set())

    def _archive_closed_segments(self, check: Callable[[], None]) -> None:
        """Archive segments before a copy of the data folder, until few are left: the copy has the others once more.

        If the store is slower than the broker closes segments, that ends, too.
        """
        found: dict[bytes, ArchivedSegment] = {}
        more, before = inf, inf
        while more > self._object_bytes_most and more <= before * _SHRINKS:
            self._archive_segments(lambda number: None, check)
            now = self._checkpoints.segments.found.copy()
            before, more = more, sum(each.size for path, each in now.items() if found.get(path) != each)
            found = now

    def _archive_segments(self, until_stored: Callable[[int], None], check: Callable[[], None]) -> None:
        """See `Checkpoints.archive_segments`."""
        if self._checkpoints.archive_segments(until_stored, check):
            self.on_segments()

    def _recovered(self) -> None:
        if self._error:
            self._error = ""
            logger.info("the archive %s is written again", self._storage.shown)

    def _note_stored(self, number: int) -> None:
        self._stored = number
        self.on_stored(number)
        if self._is_shared:
            return
        needs_after = self._checkpoints.needs_after
        self.operations.forget(number if needs_after is None else min(number, needs_after))

    def _archive_operations(self, lease: Lease, background: "_Background") -> None:
        """Raises LeaseLost, TooFarBehind, _Stopping; repeats what fails otherwise."""
        retries = Delays(FIRST_RETRY_S, MAX_RETRY_S)
        began_s = 0.0
        while not self._is_over:
            if background.lost is not None:
                raise background.lost
            if not self._has_object(began_s + self._interval_s):
                continue
            began_s = time.monotonic()
            try:
                lease.check()
                self._put_operations()
            except LeaseLost:
                raise
            except (StorageError, OSError) as exc:
                self._report(str(exc))
                self._pause(retries.next_s())
            else:
                retries.reset()
                self._recovered()

    def _has_object(self, due_s: float) -> bool:
        """Wait a little for operations; return whether they are to be written now.

        Args:
            due_s: When an object that is not full is written.
        """
        self._has_more.clear()
        now_s, last = time.monotonic(), self.operations.last_number
        if self._stored == last:
            if not self._stopping.is_set():
                self._has_more.wait(_IDLE_S)
            return False
        if now_s < due_s and self.operations.bytes_after(self._stored) < self._object_bytes_most:
            self._stopping.wait(min(due_s - now_s, _POLL_S))
            return self._stopping.is_set()
        return True

    def _put_operations(self) -> None:
        """Write one object with the next operations."""
        newest = self._checkpoints.newest
        assert newest is not None
        last, pieces = self.operations.after(self._stored, self._object_bytes_most)
        content = encode_content(encode_operations(last, pieces), newest.run)
        name = f"{stream_folder(newest.id)}/{StreamName(self._stored + 1, last, self._checkpoints.time_ms())}"
        if not self._storage.put_new(name, content) and not self._has(name, content):
            raise LeaseLost(f"another process has written {self._storage.url_of(name)}")
        self._objects += 1
        self._object_bytes += len(content)
        self._note_stored(last)

    def _has(self, name: str, content: bytes) -> bool:
        """Whether an object has this content: an earlier attempt, whose answer was lost, has stored it."""
        found = self._storage.read(name)
        return found is not None and found.data == content


class _Background:
    """Archives segments, and writes checkpoints, while operations are archived: a thread of its own.

    Attributes:
        lost: Why it has ended by itself; None: it has not.
    """

    def __init__(self, writer: ArchiveWriter, lease: Lease) -> None:
        self.lost: LeaseLost | None = None
        self._writer = writer
        self._lease = lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trio-nsq-archive", daemon=True)
        self._begin_bytes = writer._object_bytes
        self._expiry_s = time.monotonic()
        self._looks = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, waits: bool) -> None:
        """End it.

        Args:
            waits: Whether to wait for a request to the store that runs: what comes next uses the same checkpoints.
        """
        self._ended.set()
        self._thread.join(None if waits else _POLL_S)

    def _check(self) -> None:
        if self._ended.is_set() or self._writer._stopping.is_set():
            raise _Stopping
        self._lease.check()

    def _until_stored(self, number: int) -> None:
        while self._writer._stored < number:
            self._check()
            self._ended.wait(_POLL_S)

    def _expire(self) -> None:
        """Remove what is older than the retention, now and then: this lists the archive."""
        writer, now_s = self._writer, time.monotonic()
        if not writer._retention_s or now_s < self._expiry_s:
            return
        self._check()
        from_ms = writer._checkpoints.time_ms() - int(writer._retention_s * 1000)
        writer._checkpoints.expire(from_ms, writer.in_use)
        self._expiry_s = now_s + min(_EXPIRY_S, writer._retention_s / _EXPIRIES)

    def _run(self) -> None:
        checkpoints = self._writer._checkpoints
        while not self._ended.wait(self._writer._segments_s):
            try:
                self._check()
                self._writer._archive_segments(self._until_stored, self._check)
                newest = checkpoints.newest
                assert newest is not None
                least = max(self._writer._checkpoint_bytes, newest.size_bytes)
                self._looks += 1
                is_due = self._writer._object_bytes - self._begin_bytes >= least
                if is_due or self._looks % _LOOKS == 0:
                    is_due |= checkpoints.mend(self._check)
                if is_due:
                    begin_bytes = self._writer._object_bytes
                    checkpoints.write(self._check)
                    self._begin_bytes = begin_bytes
                self._expire()
            except _Stopping:
                return
            except LeaseLost as exc:
                self.lost = exc
                return
            except TooFarBehind:
                logger.warning("archive: a checkpoint took too long, and is written again")
            except (NSQError, OSError) as exc:
                logger.warning("archive: no checkpoint was written, and is tried again: %s", exc)
            except Exception:
                logger.exception("archive: no checkpoint was written, and is tried again")
