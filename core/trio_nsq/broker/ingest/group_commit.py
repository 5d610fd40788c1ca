"""Group commit: threads that sync topics' logs, each thread for several topics.

The event loop writes, and requests a sync for each log that it wrote to. A sync that begins after a request serves it:
the event loop writes more during a sync, and the next sync serves all of that at once. A thread continues with new
requests by itself, without waiting for the event loop.

Threads are kept, because starting one takes as long as a sync.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Condition, Lock, current_thread
from time import perf_counter

import trio

from ...pacing import Pacing
from ...reactor import Poller
from ..state.topic import Topic

_SMOOTHING = 1 / 16
"""Weight of one sync in the moving average of sync durations."""
_ROUNDS_AT_A_TIME = 16
"""A thread releases its topics after this many rounds, so that topics are balanced over the threads."""
_IDLE_NAME = "trio_nsq group commit, idle"


@dataclass(frozen=True, slots=True)
class Synced:
    """The result of one sync of a topic's log.

    Attributes:
        request: The number of the last request that the sync served.
        writes: The number of writes, as `Log.writes` counts, that are on stable storage unless there is an `error`.
        error: Why the sync failed. The log is not synced again before `on_synced` receives this.
        continues: The thread syncs the log again at once.
    """

    topic: Topic
    request: int
    writes: int
    took_s: float
    error: Exception | None
    continues: bool = False


class GroupCommitter:
    """Syncs logs in threads. One per broker.

    Args:
        nursery: Hosts the threads. If it is cancelled, requested syncs still run.
        poller: Requests made in its rounds wait for `begin`. Its rounds also deliver results.
        on_synced: Called in the event loop with the results of one or more syncs, in order.
        clock_s: Returns seconds by a clock that never steps; also called in the threads.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        poller: Poller,
        on_synced: Callable[[Sequence[Synced]], None],
        pacing: Pacing,
        clock_s: Callable[[], float] = perf_counter,
    ) -> None:
        self._nursery = nursery
        self._poller = poller
        self._on_synced = on_synced
        self._pacing = pacing
        self._clock_s = clock_s
        self._lock = Lock()  # guards the attributes up to `_ending`
        self._requested: dict[Topic, int] = {}  # last request per topic that no sync has begun to serve
        self._requests = 0
        self._queue: dict[Topic, None] = {}  # topics that wait for a thread
        self._queue_grew = Condition(self._lock)  # threads wait for it while the queue is empty
        self._threads = self._idle_threads = 0  # number of threads, and of those without work
        self._ending = False
        # Used only by the event loop.
        self._busy: dict[Topic, None] = {}  # in the queue, with a thread, or with a result not reported yet
        self._limiter = trio.CapacityLimiter(pacing.max_commit_threads)
        self._queued_s = 0.0  # when the queue became non-empty
        self._sync_s = 0.0  # average duration of a sync
        self._idle: dict[Topic, trio.Event] = {}  # set when the topic is no longer busy

    # ------------------------------------------------------------------ in the event loop

    def request(self, topic: Topic) -> int:
        """Request a sync of all earlier writes to a topic's log. Returns the request's number."""
        with self._lock:
            self._requests = number = self._requests + 1
            self._requested[topic] = number
        if topic not in self._busy:
            self._start(topic)
        return number

    def _start(self, topic: Topic) -> None:
        self._busy[topic] = None
        with self._lock:
            if not self._queue:
                self._queued_s = self._clock_s()
            self._queue[topic] = None
        if not self._poller.in_round:
            self.begin()

    @property
    def is_late(self) -> bool:
        """Whether requests have waited for `begin` longer than the pacing allows."""
        return bool(self._queue) and self._clock_s() > self._queued_s + self._pacing.gather_s

    def begin(self) -> None:
        if not self._queue:
            return
        with self._lock:
            self._queue_grew.notify(len(self._queue))
            lacking = min(len(self._queue) - self._idle_threads, self._wanted_threads - self._threads)
            self._threads += max(0, lacking)
        for _ in range(lacking):
            self._nursery.start_soon(self._host_thread)

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
        for result in results:
            self._sync_s += _SMOOTHING * (result.took_s - self._sync_s)
        self._on_synced(results)
        for result in results:
            if not result.continues:
                self._release(result.topic)

    def _release(self, topic: Topic) -> None:
        del self._busy[topic]
        if topic in self._requested:  # during the sync
            self._start(topic)
        elif (idle := self._idle.pop(topic, None)) is not None:
            idle.set()

    # ------------------------------------------------------------------ in a thread

    def _work(self) -> None:
        while topics := self._wait_for_queue():
            for number in range(1, _ROUNDS_AT_A_TIME + 1):
                topics = self._sync_all(topics, is_last=number == _ROUNDS_AT_A_TIME)
                if not topics:
                    break
                with self._lock:
                    topics += self._take_locked()

    def _wait_for_queue(self) -> list[Topic]:
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

    def _take_locked(self) -> list[Topic]:
        """Take this thread's share of the queue, and leave the rest to the other threads."""
        taken = list(islice(self._queue, -(-len(self._queue) // self._wanted_threads)))
        for topic in taken:
            del self._queue[topic]
        return taken

    def _sync_all(self, topics: Sequence[Topic], *, is_last: bool) -> list[Topic]:
        """Sync these topics, and report the results.

        Returns:
            The topics with new requests, which this thread syncs again; empty with `is_last`.
        """
        again: list[Topic] = []
        results: list[Synced] = []
        began_s = self._clock_s()
        for topic in topics:
            result = self._sync(topic)
            if result.error is None and not is_last and topic in self._requested:
                again.append(topic)
                result = replace(result, continues=True)
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
