"""The local sync: brings writes to stable storage on this machine. One sync serves one log, or many.

The event loop writes, and requests a sync for each log that it wrote to. There is one queue, of `SyncJob`: a job has
the point that the sync must reach, and the topics that it serves. The event loop writes more during a sync, and the
next job of that log serves all of this at once. Threads take jobs, and change no log: the event loop applies the
results.

If several topics wait, the event loop copies their writes into the write-ahead log, see `WriteAhead`: one job of its
file replaces theirs.

Threads are kept, because starting one takes as long as a sync. If the event loop has nothing else to do and syncs have
been short, it does a job by itself: waking a thread, and being woken by it, takes as long as a short sync.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Lock, current_thread
from time import perf_counter
from typing import Final, Protocol

import trio

from ...event_loop.pacing import Pacing
from ...event_loop.reactor import Poller
from ...log.interface import SyncPoint
from ...log.write_ahead.file import WriteAheadFile
from ..state.topic import Topic
from .write_ahead import WriteAhead

_SMOOTHING: Final = 1 / 16
"""Weight of one sync in the moving average of sync durations."""
_FIRST_SYNC_S: Final = 0.005
"""Where that average begins: a disk counts as slow until some dozen syncs were short."""
_IDLE_NAME: Final = "trio_nsq local sync, idle"


class Syncable(Protocol):
    """A topic's log, or a write-ahead file."""

    @property
    def unsynced_bytes(self) -> int: ...

    def sync_point(self) -> SyncPoint: ...

    def end_sync(self, point: SyncPoint, error: Exception | None) -> Exception | None: ...


class SyncJob:
    """One sync. Only its thread uses it, until that reports it.

    Attributes:
        log: What is synced.
        point: What the sync must reach.
        serves: For each topic that waits for it: the number of the last request, and of the last write, as `Log.writes`
            counts.
        took_s: How long it took.
        error: Why it failed.
    """

    __slots__ = ("error", "log", "point", "serves", "took_s")

    def __init__(self, log: Syncable, point: SyncPoint) -> None:
        self.log: Syncable = log
        self.point: SyncPoint = point
        self.serves: dict[Topic, tuple[int, int]] = {}
        self.took_s: float = 0.0
        self.error: Exception | None = None


@dataclass(slots=True)
class _Wait:
    """A caller of `sync` that waits for a job that serves its request.

    Attributes:
        alone: A sync of the write-ahead log does not serve it.
        error: Why the sync failed.
    """

    request: int
    alone: bool
    done: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


class LocalSync:
    """Syncs logs. One per broker.

    Args:
        nursery: Hosts the threads. If it is cancelled, requested syncs still run.
        poller: Requests made in its rounds wait for `begin`. Its rounds also deliver results.
        on_synced: Called in the event loop with each job that is done. The sync of the write-ahead log has not failed:
            the topics' own logs are synced instead.
        clock_s: Returns seconds by a clock that never steps; also called in the threads.
        write_ahead: The write-ahead log; None: each log is synced by itself.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        poller: Poller,
        on_synced: Callable[[SyncJob], None],
        pacing: Pacing,
        clock_s: Callable[[], float] = perf_counter,
        write_ahead: WriteAhead | None = None,
    ) -> None:
        self._nursery = nursery
        self._poller = poller
        self._on_synced = on_synced
        self._pacing = pacing
        self._clock_s = clock_s
        self._write_ahead = write_ahead
        self._lock = Lock()  # guards the attributes up to `_ending`
        self._queue: dict[Syncable, SyncJob] = {}
        self._active: set[Syncable] = set()  # a sync of them runs, or has failed and is not applied yet
        # A job of the write-ahead log serves their topics. They are not synced meanwhile: if that failed, messages
        # would be refused that the other job makes durable.
        self._ahead: set[Syncable] = set()
        self._queue_grew = Condition(self._lock)  # threads wait for it while they have nothing to do
        self._threads = self._idle_threads = 0  # number of threads, and of those without work
        self._ending = False
        # Used only by the event loop.
        self._requests = 0
        self._gathering_from_s = 0.0  # when the first request came that waits for `begin`; 0: none does
        self._unreported: dict[object, int] = {}  # number of jobs for each topic and write-ahead file
        self._idle: dict[object, trio.Event] = {}  # set when a topic or write-ahead file has no job any more
        self._alone: set[Topic] = set()  # their next sync is of their own log
        self._waits: dict[Topic, list[_Wait]] = {}
        self._limiter = trio.CapacityLimiter(pacing.max_commit_threads)
        self._sync_s = _FIRST_SYNC_S  # average duration of a sync
        self._loop_syncs_from_s = 0.0  # not before, because a sync took long
        if write_ahead is not None:
            write_ahead.use(self)

    # ------------------------------------------------------------------ in the event loop: requests

    def request(self, topic: Topic, *, begins: bool = True) -> int:
        """Request a sync of all earlier writes to a topic's log. Returns the request's number.

        Args:
            begins: Outside of rounds, begin at once. Otherwise the caller calls `begin`, after more requests.
        """
        log = topic.log
        point = log.sync_point()
        self._requests = number = self._requests + 1
        with self._lock:
            job = self._queue.get(log)
            is_new = job is None
            if job is None:
                job = self._queue[log] = SyncJob(log, point)
            job.point = point
            job.serves[topic] = number, log.writes
        if is_new:
            self._unreported[topic] = self._unreported.get(topic, 0) + 1
            self._gathering_from_s = self._gathering_from_s or self._clock_s()
            if begins and not self._poller.in_round:
                self.begin()
        return number

    async def sync(self, topic: Topic, *, alone: bool = False) -> Exception | None:
        """Sync all earlier writes to a topic's log; returns why that failed. With `alone`, in its own file."""
        if alone:
            self._alone.add(topic)
        wait = _Wait(self.request(topic), alone)
        self._waits.setdefault(topic, []).append(wait)
        await wait.done.wait()
        return wait.error

    @property
    def is_late(self) -> bool:
        """Whether requests have waited for `begin` longer than the pacing allows."""
        from_s = self._gathering_from_s
        return from_s > 0 and self._clock_s() > from_s + self._pacing.coalesce_s

    def begin(self) -> None:
        """Begin the requested syncs."""
        if not self._gathering_from_s:
            return
        self._gathering_from_s = 0.0
        if self._write_ahead is not None:
            self._append_to_write_ahead(self._write_ahead)
        with self._lock:
            ready = len(self._queue.keys() - self._active - self._ahead)
            self._queue_grew.notify(ready)
            lacking = min(ready - self._idle_threads, self._wanted_threads - self._threads)
            self._threads += max(0, lacking)
        for _ in range(lacking):
            self._nursery.start_soon(self._host_thread)

    def sync_in_loop(self) -> bool:
        """Do the requested sync in the event loop, which must have nothing else to do. The result comes in a round.

        Returns:
            False, and nothing was synced, if there is none or more than one to do, if a thread works, or if it would
            take too long: nothing can interrupt a sync, and everything else waits for it.
        """
        pacing = self._pacing
        if (
            not self._queue
            or self._sync_s >= pacing.fast_sync_s
            or self._clock_s() < self._loop_syncs_from_s
            or self._alone
        ):
            return False
        if self._write_ahead is not None:
            self._append_to_write_ahead(self._write_ahead)
        with self._lock:
            if len(self._queue) != 1 or self._active:
                return False
            for log in self._queue:
                if log.unsynced_bytes > pacing.small_sync_bytes:
                    return False
            job = self._take()
        if job is None:
            return False
        self._gathering_from_s = 0.0
        self._do(job)
        self._poller.call_in_next_round(self._report, job)
        return True

    def _append_to_write_ahead(self, write_ahead: WriteAhead) -> None:
        """Write the waiting topics' writes to the write-ahead log, if they are many or it is to be synced anyway."""
        with self._lock:
            jobs = [
                job
                for log, job in self._queue.items()
                if not (log in self._active or log in self._ahead or isinstance(log, WriteAheadFile))
                and self._alone.isdisjoint(job.serves)
            ]
            is_few = len(jobs) < self._pacing.wal_topics and write_ahead.current not in self._unreported
            if not jobs or is_few:
                return
            for job in jobs:
                del self._queue[job.log]
        file, logged = write_ahead.append([topic for job in jobs for topic in job.serves])
        with self._lock:
            into = self._queue.get(file) if file is not None else None
            for job in jobs:
                topic, (request, _) = next(iter(job.serves.items()))  # the only one
                if file is None or topic not in logged:
                    self._queue[job.log] = job
                    continue
                if into is None:
                    into = self._queue[file] = SyncJob(file, file.sync_point())
                    self._unreported[file] = self._unreported.get(file, 0) + 1
                into.serves[topic] = request, logged[topic]
                self._ahead.add(job.log)
            if into is not None:
                into.point = into.log.sync_point()

    @property
    def _wanted_threads(self) -> int:
        pacing = self._pacing
        return max(
            pacing.min_commit_threads, min(int(self._sync_s / pacing.fast_sync_s), pacing.max_commit_threads)
        )

    async def _host_thread(self) -> None:
        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_if_cancelled, ended)
            with trio.CancelScope(shield=True):  # the thread must start even if cancelled, to serve requests
                await trio.to_thread.run_sync(self._work, limiter=self._limiter)
            ended.set()

    async def _end_if_cancelled(self, ended: trio.Event) -> None:
        """Turn a cancellation into `end`, because threads cannot be cancelled."""
        try:
            await ended.wait()
        except trio.Cancelled:
            self.end()
            raise

    def end(self) -> None:
        """Let the threads end after they have served all requests."""
        with self._lock:
            self._ending = True
            self._queue_grew.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether a sync of any log runs, or is requested."""
        return bool(self._unreported)

    @property
    def is_call_near(self) -> bool:
        """Whether a thread syncs, and will probably report within `Pacing.nap_s`."""
        return bool(self._unreported) and self._sync_s < self._pacing.nap_s

    def is_at(self, of: object) -> bool:
        """Whether a sync for a topic or of a write-ahead file runs, or is requested."""
        return of in self._unreported

    async def until_idle(self, of: object) -> None:
        """Wait until no sync for a topic or of a write-ahead file runs. None does until the next trio checkpoint."""
        while of in self._unreported:
            await self._idle.setdefault(of, trio.Event()).wait()

    async def until_all_idle(self) -> None:
        for each in list(self._unreported):
            await self.until_idle(each)

    # ------------------------------------------------------------------ in the event loop: results

    def _report(self, job: SyncJob) -> None:
        """Apply a result, and hand it on."""
        log, has_failed = job.log, job.error is not None
        self._record_duration(job.took_s)
        job.error = log.end_sync(job.point, job.error)
        if isinstance(log, WriteAheadFile) and job.error is not None:
            self._nursery.start_soon(self._sync_alone, log, job)
            return
        self._on_synced(job)
        if has_failed:
            self._allow(log)
        if isinstance(log, WriteAheadFile):
            self._release_ahead(log, job)
        for topic, (request, writes) in job.serves.items():
            if topic.log is log:
                self._alone.discard(topic)
                if self._write_ahead is not None:
                    self._write_ahead.record_sync(topic, writes, job.error)
            if topic in self._waits:
                self._wake(topic, request, job)
            self._release(topic)
        self._begin_again()

    def _begin_again(self) -> None:
        """Begin the requested syncs that could not begin before, because another sync of their logs ran."""
        if self._queue and not self._gathering_from_s:
            self._gathering_from_s = self._clock_s()
        if not self._poller.in_round:
            self.begin()

    def _allow(self, log: Syncable) -> None:
        """Allow further syncs of a log after a failed one is applied."""
        with self._lock:
            self._active.discard(log)
            if (waiting := self._queue.get(log)) is not None:
                waiting.point = log.sync_point()  # the earlier one does not count any more

    def _release_ahead(self, file: WriteAheadFile, job: SyncJob) -> None:
        """Allow syncs of the logs for which the write-ahead log was synced."""
        with self._lock:
            self._ahead.difference_update([topic.log for topic in job.serves])
        self._release(file)

    async def _sync_alone(self, file: WriteAheadFile, job: SyncJob) -> None:
        """Sync topics by themselves for which the sync of a write-ahead file failed, after that is cut back."""
        assert self._write_ahead is not None
        assert job.error is not None
        with trio.CancelScope(shield=True):  # it waits only for the disk
            await self._write_ahead.give_up(file, job.error)
        self._allow(file)
        self._release_ahead(file, job)
        for topic in job.serves:
            self._alone.add(topic)
            self.request(topic, begins=False)
            self._release(topic)
        self._begin_again()

    def _wake(self, topic: Topic, request: int, job: SyncJob) -> None:
        """Wake the callers of `sync` that a job has served."""
        waits = self._waits.pop(topic)
        for wait in waits:
            if wait.request <= request and (topic.log is job.log or not wait.alone):
                wait.error = job.error
                wait.done.set()
        if later := [wait for wait in waits if not wait.done.is_set()]:
            self._waits[topic] = later

    def _record_duration(self, took_s: float) -> None:
        self._sync_s += _SMOOTHING * (took_s - self._sync_s)
        if took_s >= self._pacing.turn_s:
            self._loop_syncs_from_s = self._clock_s() + self._pacing.loop_pause * took_s

    def _release(self, of: object) -> None:
        left = self._unreported[of] - 1
        if left:
            self._unreported[of] = left
            return
        del self._unreported[of]
        if (idle := self._idle.pop(of, None)) is not None:
            idle.set()

    # ------------------------------------------------------------------ in a thread, or in the event loop

    def _work(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do a job, waiting for one; False if the thread must end. A thread that waits keeps no topic in memory."""
        job = self._wait_for_job()
        if job is not None:
            self._do(job)
            self._poller.call_soon(self._report, job)
        return job is not None

    def _wait_for_job(self) -> SyncJob | None:
        """Take a job, waiting for one; None if the thread must end."""
        thread = current_thread()
        name = thread.name
        with self._lock:
            while (job := self._take()) is None:
                if self._ending or self._threads > self._wanted_threads:
                    self._threads -= 1
                    break
                self._idle_threads += 1
                thread.name = _IDLE_NAME
                self._queue_grew.wait()
                thread.name = name
                self._idle_threads -= 1
            return job

    def _take(self) -> SyncJob | None:
        """Take the first job whose log may be synced now; None if there is none. The caller has the lock."""
        for log in self._queue:
            if log not in self._active and log not in self._ahead:
                self._active.add(log)
                return self._queue.pop(log)
        return None

    def _do(self, job: SyncJob) -> None:
        """Sync. Then report the result. After a failure, the log is not synced again before it is applied."""
        began_s = self._clock_s()
        try:
            job.point.sync()
        except Exception as exc:
            job.error = exc
        job.took_s = self._clock_s() - began_s
        if job.error is None:
            with self._lock:
                self._active.discard(job.log)
