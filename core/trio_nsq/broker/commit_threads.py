"""The threads that commit: what gathers for a topic's log is written and synced in one go, outside the event loop.

A few threads do so for all topics, each for several at a time, and stay: to begin one takes as long as a sync. They
take what has gathered by themselves, and so never wait for the event loop. But they are told of it only when nobody has
anything more to send.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Condition, Lock
from time import perf_counter

import trio

from ..log import RecordBatch
from .errors import PublishRefused
from .publication import Group, Publication
from .state.topic import Topic

_MIN_THREADS = 2
_MAX_THREADS = 16
_COMMIT_S = 0.000_5
"""Each thread that is at work keeps the event loop waiting for Python's lock: where a commit takes no longer than this,
two are best, each with several topics. (With 100 topics, each synced for itself, a thread for every topic delivered
47,000 messages a second, four threads 63,000, and two 60,000 to 76,000.) Where the disk is slower, there are more:
syncs of several files at once take little longer than one."""
_SMOOTHING = 1 / 16
"""How much one commit counts in the average of what they take."""

_ROUNDS_AT_A_TIME = 16
"""After so many rounds of commits a thread lets go of its topics: others may want them for themselves."""

_GATHER_S = 0.001
"""So long a commit may be put off because there is always somebody who has something to send."""

_TELL_S = 0.005
"""What is stored is told after so much time at the latest: nobody has to wait for all the other topics."""


@dataclass(slots=True)
class Commit:
    """What is done with a group.

    Attributes:
        sync: It is synced, too.
        records: What was stored; if there is an `error`, nothing was.
        took_s: How long that took.
    """

    topic: Topic
    group: Group
    sync: bool
    records: Sequence[RecordBatch] = ()
    took_s: float = 0.0
    error: Exception | None = None


class CommitThreads:
    """What gathers for topics' logs, who is at which log, and the threads that store it.

    Args:
        nursery: Hosts the threads. When it is cancelled, what has gathered is stored all the same.
        sync: Whether what is stored is to be synced, too.
        store: Called in a thread with a commit: stores it, and notes in it what came of that.
        committed: Called in the event loop with commits that `store` is done with, in their order; each is to be noted
            by `note_done`.
        call_soon: Called in a thread, with a function and its arguments: calls it in the event loop.

    Attributes:
        lock: Held by whoever looks at or adds to what gathers: threads take that at any time.
        waits: What is started waits for `begin`.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        sync: bool,
        store: Callable[[Commit], None],
        committed: Callable[[Sequence[Commit]], None],
        call_soon: Callable[..., None],
    ) -> None:
        self.lock = Lock()  # of what has gathered, and of the queue
        self.waits = False
        self._nursery = nursery
        self._sync = sync
        self._store = store
        self._committed = committed
        self._call_soon = call_soon
        self._gathering: dict[Topic, Group] = {}
        self._queue: dict[Topic, None] = {}  # what gathers there waits for a thread
        self._queue_grew = Condition(self.lock)  # threads wait for it while the queue is empty
        self._queued_s = 0.0  # since when something does
        self._threads = self._idle_threads = 0  # how many there are, and how many of them have nothing to do
        self._limiter = trio.CapacityLimiter(_MAX_THREADS)
        self._commit_s = 0.0  # what a commit takes, on average
        self._ending = False
        # A thread may be at the topic's log, or will be; the event is set when it no longer is.
        self._busy: dict[Topic, trio.Event] = {}
        self._in_line: dict[Topic, deque[trio.Event]] = {}  # who has the log next, before any commit
        # Those of them where it appends, and what: until the event loop knows that it is stored.
        self._committing: dict[Topic, list[Group]] = {}

    # ------------------------------------------------------------------ what gathers

    def gather(
        self,
        topic: Topic,
        publications: Sequence[Publication],
        size: int,
        then: Callable[[PublishRefused | None], None],
    ) -> None:
        """Add publications, whose records have so many bytes, to what gathers for a topic; with `lock` held."""
        group = self._gathering.get(topic)
        if group is None:
            group = self._gathering[topic] = Group()
        group.publications += publications
        group.size += size
        group.then.append(then)

    def not_stored(self, topic: Topic) -> list[Group]:
        """What of a topic is not known to be stored yet; with `lock` held."""
        groups = self._committing.get(topic, []).copy()
        if topic in self._gathering:
            groups.append(self._gathering[topic])
        return groups

    def waiting(self, topic: Topic) -> Group | None:
        """What has gathered for a topic, and no thread will take; None if there is nothing of that."""
        return None if topic in self._committing else self._gathering.get(topic)

    def take(self, topic: Topic) -> Group:
        """Have what is `waiting`, to store it elsewhere."""
        return self._gathering.pop(topic)

    # ------------------------------------------------------------------ in the event loop

    def start(self, topic: Topic) -> None:
        """Have a thread store what has gathered for a topic, and what will meanwhile, if none does so already."""
        if topic in self._busy:
            return
        self._busy[topic] = trio.Event()
        self._committing[topic] = []
        if not self._queue:
            self._queued_s = perf_counter()
        with self.lock:
            self._queue[topic] = None
        if not self.waits:
            self.begin()

    @property
    def is_late(self) -> bool:
        """Something waits for `begin` for too long."""
        return bool(self._queue) and perf_counter() > self._queued_s + _GATHER_S

    def begin(self) -> None:
        """Let threads take what was started."""
        if not self._queue:
            return
        with self.lock:
            self._queue_grew.notify(len(self._queue))
            lacking = min(len(self._queue) - self._idle_threads, self._wanted_threads - self._threads)
            self._threads += max(0, lacking)
        for _ in range(lacking):
            self._nursery.start_soon(self._host_thread)

    @property
    def _wanted_threads(self) -> int:
        return max(_MIN_THREADS, min(int(self._commit_s / _COMMIT_S), _MAX_THREADS))

    async def _host_thread(self) -> None:
        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_if_cancelled, ended)
            with trio.CancelScope(shield=True):  # it begins, too: what has gathered is stored
                await trio.to_thread.run_sync(self._work, limiter=self._limiter)
            ended.set()

    async def _end_if_cancelled(self, ended: trio.Event) -> None:
        """Threads cannot be."""
        try:
            await ended.wait()
        except trio.Cancelled:
            self.end()
            raise

    def end(self) -> None:
        """Let the threads come to their end, when they have stored what was started."""
        with self.lock:
            self._ending = True
            self._queue_grew.notify_all()

    def note_done(self, commit: Commit) -> None:
        """To be called in the event loop with each commit that is told of, before its publishers hear of it."""
        self._commit_s += _SMOOTHING * (commit.took_s - self._commit_s)
        self._committing[commit.topic].remove(commit.group)

    # ------------------------------------------------------------------ who is at a log

    @property
    def is_busy(self) -> bool:
        """A thread is at some topic's log."""
        return bool(self._busy)

    async def take_over(self, topic: Topic, *, alone: bool) -> None:
        """Have a topic's log when nobody else does, before any commit; `release` it then.

        With `alone`, what gathers meanwhile is for a thread, not `waiting` for somebody else.
        """
        if topic in self._busy:
            await self._stand_in_line(topic)
        else:
            self._busy[topic] = trio.Event()
        if alone:
            self._committing[topic] = []

    async def _stand_in_line(self, topic: Topic) -> None:
        turn = trio.Event()
        line = self._in_line.setdefault(topic, deque())
        line.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self.release(topic)
            else:
                line.remove(turn)
            raise
        finally:
            if not line:
                self._in_line.pop(topic, None)

    def release(self, topic: Topic) -> None:
        """Let whoever is in line have a topic's log, or, if nobody is, a commit if one is due."""
        self._committing.pop(topic, None)
        if line := self._in_line.get(topic):
            line.popleft().set()
            return
        self._busy.pop(topic).set()
        if topic in self._gathering:
            self.start(topic)

    async def idle(self, topic: Topic) -> None:
        """Wait until no thread is at the topic's log; none is until the caller's next checkpoint."""
        while (busy := self._busy.get(topic)) is not None:
            await busy.wait()

    async def all_idle(self) -> None:
        """Wait until no thread is at the log of any topic of now."""
        for topic in list(self._busy):
            await self.idle(topic)

    # ------------------------------------------------------------------ in a thread

    def _work(self) -> None:
        """Wait for topics in the queue, and store what gathers there, until the end."""
        while self._wait_for_queue():
            self._commit_queue()

    def _wait_for_queue(self) -> bool:
        """False: the thread is not needed any more."""
        with self.lock:
            while not self._queue:
                if self._ending or self._threads > self._wanted_threads:
                    self._threads -= 1
                    return False
                self._idle_threads += 1
                self._queue_grew.wait()
                self._idle_threads -= 1
            return True

    def _commit_queue(self) -> None:
        """Store groups of some topics until none is left, or others are to have these topics."""
        topics: list[Topic] = []  # those from the queue come in, those where nothing gathers go out
        for _ in range(_ROUNDS_AT_A_TIME):
            commits = self._take_groups(topics)
            if not commits:
                break
            done: list[Commit] = []
            began_s = perf_counter()
            for commit in commits:
                self._store(commit)
                done.append(commit)
                if perf_counter() > began_s + _TELL_S:
                    self._call_soon(self._committed, done)
                    done, began_s = [], perf_counter()
            if done:
                self._call_soon(self._committed, done)
        if topics:
            self._call_soon(self._let_go, topics)

    def _take_groups(self, topics: list[Topic]) -> list[Commit]:
        """What has gathered in these topics, and in some of the queue. It lets go of the others."""
        commits: list[Commit] = []
        with self.lock:
            # The other threads come for theirs.
            for topic in list(islice(self._queue, -(-len(self._queue) // self._wanted_threads))):
                del self._queue[topic]
                topics.append(topic)
            for topic in topics:
                if topic not in self._in_line and (group := self._gathering.pop(topic, None)) is not None:
                    self._committing[topic].append(group)
                    commits.append(Commit(topic, group, self._sync))
            if commits and len(commits) < len(topics):
                active = {commit.topic: None for commit in commits}
                self._call_soon(self._let_go, [topic for topic in topics if topic not in active])
                topics[:] = active
        return commits

    def _let_go(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            self.release(topic)
