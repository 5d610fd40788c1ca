"""Group commit: threads that sync topics' logs, each thread for several topics.

The event loop writes, and requests a sync for each log that it wrote to. A sync that begins after a request serves it:
the event loop writes more during a sync, and the next sync serves all of that at once. A thread continues with new
requests by itself, without waiting for the event loop.

Threads are kept, because starting one takes as long as a sync. If the event loop has nothing else to do and syncs have
been short, it syncs by itself: waking a thread, and being woken by it, takes as long as a short sync.

If several topics wait, the event loop copies their writes into the write-ahead log, see `WriteAhead`. A thread then
syncs that in place of the topics' logs.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from threading import Condition, Lock, current_thread
from time import perf_counter
from typing import Final

import trio

from ...log.write_ahead import WriteAheadFile
from ...pacing import Pacing
from ...reactor import Poller
from ..state.topic import Topic
from .write_ahead import Logged, WriteAhead

_SMOOTHING: Final = 1 / 16
"""Weight of one sync in the moving average of sync durations."""
_ROUNDS_AT_A_TIME: Final = 16
"""A thread releases its topics after this many rounds, so that topics are balanced over the threads."""
_IDLE_NAME: Final = "trio_nsq group commit, idle"


class Synced:
    """The result of one sync of a topic's log.

    Attributes:
        request: The number of the last request that the sync served.
        writes: The number of writes, as `Log.writes` counts, that are on stable storage unless there is an `error`.
        error: Why the sync failed. The log is not synced again before `on_synced` receives this.
        continues: The thread syncs the log again at once.
        is_ahead: The write-ahead log was synced, not the topic's log.
    """

    __slots__ = ("continues", "error", "is_ahead", "request", "took_s", "topic", "writes")

    def __init__(
        self,
        topic: Topic,
        request: int,
        writes: int,
        took_s: float,
        error: Exception | None,
        *,
        is_ahead: bool = False,
    ) -> None:
        self.topic = topic
        self.request = request
        self.writes = writes
        self.took_s = took_s
        self.error = error
        self.continues = False
        self.is_ahead = is_ahead


class GroupCommitter:
    """Syncs logs in threads. One per broker.

    Args:
        nursery: Hosts the threads. If it is cancelled, requested syncs still run.
        poller: Requests made in its rounds wait for `begin`. Its rounds also deliver results.
        on_synced: Called in the event loop with the results of one or more syncs, in order.
        clock_s: Returns seconds by a clock that never steps; also called in the threads.
        write_ahead: The write-ahead log; None: each log is synced by itself.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        poller: Poller,
        on_synced: Callable[[Sequence[Synced]], None],
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
        self._requested: dict[Topic, int] = {}  # last request per topic that no sync has begun to serve
        self._requests = 0
        self._queue: dict[Topic | None, None] = {}  # what waits for a thread; None is the write-ahead log
        # What was written to the write-ahead log and no sync has begun to serve, and the last requests of its topics.
        self._logged: list[Logged] = []
        self._logged_requests: dict[Topic, int] = {}
        self._is_ahead_busy = False  # the write-ahead log is in the queue, or with a thread
        self._queue_grew = Condition(self._lock)  # threads wait for it while the queue is empty
        self._threads = self._idle_threads = 0  # number of threads, and of those without work
        self._ending = False
        # Used only by the event loop.
        self._busy: dict[Topic, None] = {}  # in the queue, with a thread, or with a result not reported yet
        self._limiter = trio.CapacityLimiter(pacing.max_commit_threads)
        self._queued_s = 0.0  # when the queue became non-empty
        self._sync_s = 0.0  # average duration of a sync
        self._short_syncs = 0  # consecutive syncs that were shorter than a turn
        self._loop_syncs_from_s = 0.0  # not before, because a sync took long
        self._idle: dict[Topic, trio.Event] = {}  # set when the topic is no longer busy
        self._alone: set[Topic] = set()  # their next sync is of their own log

    # ------------------------------------------------------------------ in the event loop

    def request(self, topic: Topic, *, begins: bool = True) -> int:
        """Request a sync of all earlier writes to a topic's log. Returns the request's number.

        Args:
            begins: Outside of rounds, begin at once. Otherwise the caller calls `begin`, after more requests.
        """
        with self._lock:
            self._requests = number = self._requests + 1
            self._requested[topic] = number
        if topic not in self._busy:
            self._start(topic)
            if begins and not self._poller.in_round:
                self.begin()
        return number

    def request_alone(self, topic: Topic) -> int:
        """As `request`, and not by the write-ahead log."""
        self._alone.add(topic)
        return self.request(topic)

    def _start(self, topic: Topic) -> None:
        self._busy[topic] = None
        with self._lock:
            if not self._queue:
                self._queued_s = self._clock_s()
            self._queue[topic] = None

    @property
    def is_late(self) -> bool:
        """Whether requests have waited for `begin` longer than the pacing allows."""
        return bool(self._queue) and self._clock_s() > self._queued_s + self._pacing.gather_s

    def begin(self) -> None:
        """Begin the requested syncs."""
        if not self._queue:
            return
        if self._write_ahead is not None:
            self._log_ahead(self._write_ahead)
        with self._lock:
            self._queue_grew.notify(len(self._queue))
            lacking = min(len(self._queue) - self._idle_threads, self._wanted_threads - self._threads)
            self._threads += max(0, lacking)
        for _ in range(lacking):
            self._nursery.start_soon(self._host_thread)

    def sync_in_loop(self) -> bool:
        """Sync what was requested, in the event loop, which must have nothing else to do. The result comes in a round.

        Returns:
            False, and nothing was synced, if there is none or more than one to sync, if a thread works, or if it would
            take too long: nothing can interrupt a sync, and everything else waits for it.
        """
        pacing = self._pacing
        if (
            not self._queue
            or self._short_syncs < pacing.loop_syncs_after
            or self._sync_s >= pacing.loop_sync_s
            or self._clock_s() < self._loop_syncs_from_s
        ):
            return False
        if self._write_ahead is not None:
            self._log_ahead(self._write_ahead)
        with self._lock:
            if len(self._queue) != 1 or self._idle_threads < self._threads or self._alone:
                return False
            topics = list(self._queue)
            if self._unsynced_bytes(topics[0]) > pacing.loop_sync_bytes:
                return False
            self._queue.clear()
        self._sync_all(topics, is_last=True)
        return True

    def _unsynced_bytes(self, topic: Topic | None) -> int:
        """Return what a sync of a topic's log stores, or one of the write-ahead log."""
        if topic is not None:
            return topic.log.unsynced_bytes
        return sum([file.size - file.synced_size for file in {logged.file for logged in self._logged}])

    def _log_ahead(self, write_ahead: WriteAhead) -> None:
        """Write the waiting topics' writes to the write-ahead log, if they are many or a sync of it runs."""
        with self._lock:
            topics = [topic for topic in self._queue if topic is not None and topic not in self._alone]
            if not topics or (len(topics) < self._pacing.ahead_topics and not self._is_ahead_busy):
                return
            for topic in topics:
                del self._queue[topic]
        logged = write_ahead.append(topics)
        with self._lock:
            for topic in topics:
                if logged is not None and topic in logged.writes:
                    self._logged_requests[topic] = self._requested.pop(topic)
                else:
                    self._queue[topic] = None
            if logged is not None:
                self._logged.append(logged)
                if not self._is_ahead_busy:
                    self._is_ahead_busy = True
                    self._queue[None] = None

    @property
    def _wanted_threads(self) -> int:
        pacing = self._pacing
        return max(
            pacing.min_commit_threads, min(int(self._sync_s / pacing.commit_s), pacing.max_commit_threads)
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
        """Whether a thread uses any topic's log, or will soon."""
        return bool(self._busy)

    @property
    def is_call_near(self) -> bool:
        """Whether a thread syncs, and will probably report within `Pacing.doze_s`."""
        return bool(self._busy) and self._sync_s < self._pacing.doze_s

    def is_at(self, topic: Topic) -> bool:
        """Whether a thread uses the topic's log, or will soon."""
        return topic in self._busy

    async def until_idle(self, topic: Topic) -> None:
        """Wait until no thread uses the topic's log. None does until the caller's next trio checkpoint."""
        while topic in self._busy:
            await self._idle.setdefault(topic, trio.Event()).wait()

    async def until_all_idle(self) -> None:
        for topic in list(self._busy):
            await self.until_idle(topic)

    def _report(self, results: Sequence[Synced]) -> None:
        took_s = [result.took_s for result in results if not result.is_ahead]
        took_s += [result.took_s for result in results if result.is_ahead][:1]  # it is the same for all
        for one_s in took_s:
            self._record_duration(one_s)
        if any(result.is_ahead and result.error is not None for result in results):
            results = self._without_failed_ahead(results)
        self._on_synced(results)
        for result in results:
            if not result.is_ahead:
                self._alone.discard(result.topic)
            if not result.continues:
                self._release(result.topic)
        if not self._poller.in_round:
            self.begin()

    def _record_duration(self, took_s: float) -> None:
        self._sync_s += _SMOOTHING * (took_s - self._sync_s)
        if took_s < self._pacing.turn_s:
            self._short_syncs += 1
        else:
            self._short_syncs = 0
            self._loop_syncs_from_s = self._clock_s() + self._pacing.loop_pause * took_s

    def _without_failed_ahead(self, results: Sequence[Synced]) -> Sequence[Synced]:
        """Let topics be synced alone for which the write-ahead log failed; returns the other results."""
        for result in results:
            if result.is_ahead and result.error is not None:
                self._alone.add(result.topic)
                with self._lock:
                    self._requested.setdefault(result.topic, result.request)  # a later request serves more
                self._start(result.topic)
        return [result for result in results if not result.is_ahead or result.error is None]

    def _release(self, topic: Topic) -> None:
        del self._busy[topic]
        if topic in self._requested:  # during the sync
            self._start(topic)
        elif (idle := self._idle.pop(topic, None)) is not None:
            idle.set()

    # ------------------------------------------------------------------ in a thread, or in the event loop

    def _work(self) -> None:
        while topics := self._wait_for_queue():
            for number in range(1, _ROUNDS_AT_A_TIME + 1):
                topics = self._sync_all(topics, is_last=number == _ROUNDS_AT_A_TIME)
                if not topics:
                    break
                with self._lock:
                    topics += self._take_locked()

    def _wait_for_queue(self) -> list[Topic | None]:
        """Take topics from the queue, waiting for some; empty if the thread must end."""
        thread = current_thread()
        name = thread.name
        with self._lock:
            while not self._queue:
                if self._ending or self._threads > self._wanted_threads:
                    self._threads -= 1
                    return []
                self._idle_threads += 1
                thread.name = _IDLE_NAME
                self._queue_grew.wait()
                thread.name = name
                self._idle_threads -= 1
            return self._take_locked()

    def _take_locked(self) -> list[Topic | None]:
        """Take this thread's share of the queue, and leave the rest to the other threads."""
        taken = list(islice(self._queue, -(-len(self._queue) // self._wanted_threads)))
        for topic in taken:
            del self._queue[topic]
        return taken

    def _sync_all(self, topics: Sequence[Topic | None], *, is_last: bool) -> list[Topic | None]:
        """Sync these topics, and report the results.

        Returns:
            The topics with new requests, which this thread syncs again; empty with `is_last`.
        """
        again: list[Topic | None] = []
        results: list[Synced] = []
        began_s = self._clock_s()
        for topic in topics:
            if topic is None:
                results += self._sync_ahead()
                if self._continues_ahead(is_last=is_last):
                    again.append(None)
                continue
            result = self._sync(topic)
            if result.error is None and not is_last and topic in self._requested:
                again.append(topic)
                result.continues = True
            results.append(result)
            if self._clock_s() > began_s + self._pacing.tell_s:
                self._poller.call_soon(self._report, results)
                results, began_s = [], self._clock_s()
        if results:
            self._poller.call_soon(self._report, results)
        return again

    def _sync(self, topic: Topic) -> Synced:
        with self._lock:
            request = self._requested.pop(topic)
        writes = topic.log.writes
        began_s = self._clock_s()
        error: Exception | None = None
        try:
            topic.log.sync()
        except Exception as exc:
            error = exc
        return Synced(topic, request, writes, self._clock_s() - began_s, error)

    def _sync_ahead(self) -> list[Synced]:
        with self._lock:
            logged, self._logged = self._logged, []
            requests, self._logged_requests = self._logged_requests, {}
        results: list[Synced] = []
        errors: dict[WriteAheadFile, Exception | None] = {}  # of each synced file; usually there is one
        began_s = self._clock_s()
        for some in logged:
            if some.file not in errors:
                errors[some.file] = None
                try:
                    WriteAhead.sync(some.file)
                except Exception as exc:
                    errors[some.file] = exc
        took_s = self._clock_s() - began_s
        for some in logged:
            for topic, writes in some.writes.items():
                results.append(
                    Synced(topic, requests[topic], writes, took_s, errors[some.file], is_ahead=True)
                )
        return results

    def _continues_ahead(self, *, is_last: bool) -> bool:
        """Whether this thread syncs the write-ahead log again. With `is_last`, another one does so if necessary."""
        with self._lock:
            if not self._logged:
                self._is_ahead_busy = False
                return False
            if is_last:
                self._queue[None] = None
                self._queue_grew.notify()
            return not is_last
