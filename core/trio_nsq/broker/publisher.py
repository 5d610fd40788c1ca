"""From publishes to the log: group commit, and the sync modes.

With `--sync=always` a topic's publishes gather while one write and sync of that topic runs in a thread; then all
of them go into the next: the more publishers wait, the more messages a sync carries. A few threads do so for all
topics, each for several at a time, and stay: to begin one takes as long as a sync. They take what has gathered by
themselves, and so never wait for the event loop. But they are told of it only when nobody has anything more to send.

With `--sync=interval`, and for ephemeral topics, a publish is written in the caller's turn, and syncs follow on a
schedule; what many clients publish in one round of the poller is one write. But what begins a new file waits for the
disk, and so goes the other way, and with it what comes meanwhile.

Publishers are told that something is stored before it is sent on: they can prepare the next meanwhile.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Condition
from time import perf_counter

import trio

from ..log import LogError, RecordBatch
from ..log.records import HEADER_BYTES
from ..protocol import MessageSet
from .errors import PublishRefused, TopicFull
from .figures.histogram import Histogram
from .options import BrokerOptions
from .state.broker import MessageIds
from .state.topic import Topic

logger = logging.getLogger("trio_nsq.broker")

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

_SYNC_BYTES = 16 * 1024 * 1024
"""With `--sync=interval` so much is synced, however few messages that are: a file is synced before the next is begun,
and all publishers of its topic wait for that."""

_GATHER_S = 0.001
"""So long a commit may be put off because there is always somebody who has something to send."""

_TURN_S = 0.005
"""Clients that publish again as soon as something is written let other tasks have their turn after so much time."""

_MAX_RECORD_BYTES = 256 * 1024
"""Publishes that are stored together share a record up to this size: few records are cheap to write, read and
deliver, but damage costs a whole record."""


@dataclass(slots=True)
class Publication:
    """What one command publishes.

    Attributes:
        messages: A set of messages.
        due_ns: When it may be delivered, Unix nanoseconds; 0: at once.
        note: What the broker has to know of it besides, see `note.py`; empty: nothing.
    """

    messages: MessageSet
    due_ns: int = 0
    note: bytes = b""

    @property
    def record_bytes(self) -> int:
        """What it takes in the log if it shares its record with none."""
        return HEADER_BYTES + len(self.messages.data) + len(self.note)


class _Group:
    """Publications of one topic that will be stored by one write.

    Attributes:
        publications: What to store, in order.
        size: Bytes of their records, if none shares its own.
        then: Whom to tell, in order.
    """

    __slots__ = ("publications", "size", "then")

    def __init__(self) -> None:
        self.publications: list[Publication] = []
        self.size = 0
        self.then: list[Callable[[PublishRefused | None], None]] = []

    @property
    def messages(self) -> int:
        """How many they are."""
        return sum([len(publication.messages) for publication in self.publications])

    def finish(self, error: PublishRefused | None) -> None:
        """Tell all who published that it is stored, or why not."""
        for then in self.then:
            then(error)


@dataclass(slots=True)
class _Commit:
    """What is done with a group.

    Attributes:
        sync: It is synced, too.
        records: What was stored; if there is an `error`, nothing was.
        took_s: How long that took.
    """

    topic: Topic
    group: _Group
    sync: bool
    records: Sequence[RecordBatch] = ()
    took_s: float = 0.0
    error: Exception | None = None


@dataclass(slots=True)
class _Unsynced:
    """What was written to a log since its last sync: messages, and bytes of their records."""

    messages: int = 0
    size: int = 0


class Publisher:
    """Stores what is published. One for a broker.

    Args:
        options: The sync mode and its numbers.
        ids: Where message ids come from.
        nursery: Runs the commits. When it is cancelled, what was submitted is stored all the same.
        published: Called with a topic whenever messages were added to it. Their publishers have been told before,
            unless the topic may refuse messages.
        call_soon: Called in a thread, with a function and its arguments: calls it in the event loop, best in a round.
            None: trio does.

    Attributes:
        health: Empty, or what the last write of any log failed with.
        append_duration: What writing to a log took each time, its sync included with `--sync=always`.
        sync_duration: What syncing a log took each time, where that is done by itself.
        sync_count: How often a log was brought to stable storage.
        in_round: What is submitted gathers for now.
    """

    def __init__(
        self,
        options: BrokerOptions,
        ids: MessageIds,
        nursery: trio.Nursery,
        published: Callable[[Topic], None],
        call_soon: Callable[..., None] | None = None,
    ) -> None:
        self.health = ""
        self.append_duration = Histogram()
        self.sync_duration = Histogram()
        self.sync_count = 0
        self.in_round = False
        self._options = options
        self._ids = ids
        self._nursery = nursery
        self._published = published
        self._call_soon = call_soon or trio.lowlevel.current_trio_token().run_sync_soon
        self._gathering: dict[Topic, _Group] = {}
        self._threads = self._idle_threads = 0  # those that append, and how many of them wait for the queue
        self._limiter = trio.CapacityLimiter(_MAX_THREADS)
        self._commit_s = 0.0  # what a commit takes, on average
        self._queue: dict[Topic, None] = {}  # what gathers there waits for one of them
        self._queued_s = 0.0  # since when something does
        # A thread may be at the topic's log, or will be; the event is set when it no longer is.
        self._busy: dict[Topic, trio.Event] = {}
        self._in_line: dict[Topic, deque[trio.Event]] = {}  # who has the log next, before any commit
        # Those of them where it appends, and what: until the event loop knows that it is stored.
        self._committing: dict[Topic, list[_Group]] = {}
        # Of what has gathered, of topics in the queue, and of ids; threads wait for it while the queue is empty.
        self._taking = Condition()
        self._in_turn: dict[Topic, None] = {}  # what gathers there may be written in the caller's turn
        self._writing = self._writes_rest = False
        self._unsynced: dict[Topic, _Unsynced] = {}
        self._sync_soon = trio.Event()
        self._closed = self._ending = False

    async def publish(
        self, topic: Topic, publications: Sequence[Publication], *, gather: bool = False
    ) -> None:
        """Store publications; when this returns, they are as safe as the sync mode says.

        Not a checkpoint when nothing has to be waited for, unless `gather`. Cancelling it does not take back what is
        being stored.

        Args:
            topic: Where to.
            publications: At least one.
            gather: Let one write store them and what other tasks publish in the same turn of the event loop.

        Raises:
            PublishRefused: Nothing of them was stored. TopicFull, if a limit of the topic's is the reason.
        """
        done = trio.Event()
        error: PublishRefused | None = None

        def then(reason: PublishRefused | None) -> None:
            nonlocal error
            error = reason
            done.set()

        self.submit(topic, publications, then, gather=gather)
        if gather and not done.is_set():
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._write_gathered()
        if not done.is_set():
            await done.wait()
        if error is not None:
            raise error

    def submit(
        self,
        topic: Topic,
        publications: Sequence[Publication],
        then: Callable[[PublishRefused | None], None],
        *,
        gather: bool = False,
    ) -> None:
        """Have publications stored, and `then` called with None when they are, or with the reason why not.

        That may be before this returns. `then` must not raise. With `gather`, as in a round, the caller sees to it that
        what has gathered is written.

        Raises:
            PublishRefused: Nothing of them will be stored, nor `then` called. TopicFull, if a limit of the topic's
                is the reason.
        """
        if self._closed:
            raise PublishRefused("exiting")
        with self._taking:
            size = sum([publication.record_bytes for publication in publications])
            if topic.may_refuse:
                self._find_room(topic, publications, size)
            group = self._gathering.get(topic)
            if group is None:
                group = self._gathering[topic] = _Group()
            group.publications += publications
            group.size += size
            group.then.append(then)
        if topic.ephemeral or self._options.sync == "interval":
            self._in_turn[topic] = None
            if not (self.in_round or gather):
                self._write_gathered()
        elif topic not in self._busy:
            self._start_commit(topic)

    def begin_round(self) -> None:
        """Let what is submitted gather: until `end_round`, or where it needs a thread until `start_commits`."""
        self.in_round = True

    def end_round(self) -> None:
        """Write what has gathered and needs no thread, and let every submit do so from now on."""
        self._write_gathered()
        self.in_round = False
        if self._queue and perf_counter() > self._queued_s + _GATHER_S:
            self.start_commits()

    def start_commits(self) -> None:
        """Have threads store what has gathered for them. To be called when nobody has anything more to send."""
        if not self._queue:
            return
        with self._taking:
            self._taking.notify(len(self._queue))
            lacking = min(len(self._queue) - self._idle_threads, self._wanted_threads - self._threads)
            self._threads += max(0, lacking)
        for _ in range(lacking):
            self._nursery.start_soon(self._host_thread)

    @property
    def is_busy(self) -> bool:
        """A thread is at some topic's log."""
        return bool(self._busy)

    def _find_room(self, topic: Topic, publications: Sequence[Publication], size: int) -> None:
        """Raise TopicFull if there is no room for these, whose records have so many bytes."""
        messages = sum(len(publication.messages) for publication in publications)
        waiting = self._committing.get(topic, []).copy()
        if topic in self._gathering:
            waiting.append(self._gathering[topic])
        coming = sum(g.messages for g in waiting), sum(g.size for g in waiting)
        if reason := topic.why_full(messages, size, *coming):
            raise TopicFull(f"{reason}; nothing of it was stored")

    async def roll(self, topic: Topic) -> bool:
        """Let a topic's log begin a new file; False if that failed."""
        return await self.in_thread(topic, topic.log.roll, alone=True)

    # ------------------------------------------------------------------ in a thread

    def _start_commit(self, topic: Topic) -> None:
        self._busy[topic] = trio.Event()
        self._committing[topic] = []
        if not self._queue:
            self._queued_s = perf_counter()
        with self._taking:
            self._queue[topic] = None
        if not self.in_round:
            self.start_commits()

    @property
    def _wanted_threads(self) -> int:
        return max(_MIN_THREADS, min(int(self._commit_s / _COMMIT_S), _MAX_THREADS))

    async def _host_thread(self) -> None:
        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_threads_if_cancelled, ended)
            with trio.CancelScope(shield=True):  # it begins, too: what has gathered is stored
                await trio.to_thread.run_sync(self._commit_all, limiter=self._limiter)
            ended.set()

    async def _end_threads_if_cancelled(self, ended: trio.Event) -> None:
        """They cannot be."""
        try:
            await ended.wait()
        except trio.Cancelled:
            self._end_threads()
            raise

    def _end_threads(self) -> None:
        """Let the threads come to their end, when they have stored what has gathered."""
        with self._taking:
            self._ending = True
            self._taking.notify_all()

    def _commit_all(self) -> None:
        """In a thread: wait for topics in the queue, and store what gathers there, until the end."""
        while self._wait_for_queue():
            self._commit_queue()

    def _wait_for_queue(self) -> bool:
        """In a thread. False: it is not needed any more."""
        with self._taking:
            while not self._queue:
                if self._ending or self._threads > self._wanted_threads:
                    self._threads -= 1
                    return False
                self._idle_threads += 1
                self._taking.wait()
                self._idle_threads -= 1
            return True

    def _let_go(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            del self._committing[topic]
            self._release(topic)

    def _release(self, topic: Topic) -> None:
        """Let whoever is in line have a topic's log, or, if nobody is, a commit if one is due."""
        if line := self._in_line.get(topic):
            line.popleft().set()
            return
        self._busy.pop(topic).set()
        if topic in self._gathering:
            self._start_commit(topic)

    def _commit_queue(self) -> None:
        """In a thread: store groups of some topics until none is left, or others are to have these topics."""
        topics: list[Topic] = []  # those from the queue come in, those where nothing gathers go out
        for _ in range(_ROUNDS_AT_A_TIME):
            commits = self._take(topics)
            if not commits:
                break
            done: list[_Commit] = []
            began_s = perf_counter()
            for commit in commits:
                self._store(commit)
                done.append(commit)
                if perf_counter() > began_s + _TURN_S:  # nobody has to wait for all the others
                    self._call_soon(self._note_committed, done)
                    done, began_s = [], perf_counter()
            if done:
                self._call_soon(self._note_committed, done)
        if topics:
            self._call_soon(self._let_go, topics)

    def _take(self, topics: list[Topic]) -> list[_Commit]:
        """In a thread: what has gathered in these topics, and in some of the queue. It lets go of the others."""
        commits: list[_Commit] = []
        sync = self._options.sync == "always"
        with self._taking:
            # The other threads come for theirs.
            for topic in list(islice(self._queue, -(-len(self._queue) // self._wanted_threads))):
                del self._queue[topic]
                topics.append(topic)
            for topic in topics:
                if topic not in self._in_line and (group := self._gathering.pop(topic, None)) is not None:
                    self._committing[topic].append(group)
                    commits.append(_Commit(topic, group, sync))
            if commits and len(commits) < len(topics):
                active = {commit.topic: None for commit in commits}
                self._call_soon(self._let_go, [topic for topic in topics if topic not in active])
                topics[:] = active
        return commits

    def _note_committed(self, commits: Sequence[_Commit]) -> None:
        stored: list[Topic] = []
        for commit in commits:
            self._commit_s += _SMOOTHING * (commit.took_s - self._commit_s)
            self._committing[commit.topic].remove(commit.group)
            if self._note_stored(commit):
                stored.append(commit.topic)
        for topic in stored:
            self._deliver(topic)

    # ------------------------------------------------------------------ in the caller's turn

    def _write_gathered(self) -> None:
        """Write what has gathered where that waits for nothing.

        Whoever published it may publish the next meanwhile: that is written, too, or, when the turn is over, soon.
        """
        if self._writing:
            return  # called by one of those who published: what it published comes next, below
        self._writing = True
        turn_over_s = perf_counter() + _TURN_S
        try:
            while self._in_turn:
                topics, self._in_turn = self._in_turn, {}
                # Those who wait for an OK can send the next while there is more to do here.
                for topic in [topic for topic in topics if self._write_group(topic)]:
                    self._deliver(topic)
                if self._in_turn and perf_counter() > turn_over_s:
                    if not self._writes_rest:
                        self._writes_rest = True
                        self._nursery.start_soon(self._write_rest)
                    break
        finally:
            self._writing = False

    async def _write_rest(self) -> None:
        self._writes_rest = False
        self._write_gathered()

    def _write_group(self, topic: Topic) -> bool:
        """Write what has gathered for a topic, unless a thread does; whether there is something to deliver now."""
        if topic in self._committing or topic not in self._gathering:
            return False  # a thread writes it next, or has
        group = self._gathering[topic]
        if not topic.ephemeral and topic.log.begins_file(group.size):
            if topic not in self._busy:
                self._start_commit(topic)
            return False
        commit = _Commit(topic, self._gathering.pop(topic), sync=False)
        self._store(commit)
        return self._note_stored(commit)

    async def sync_on_schedule(self) -> None:
        """Sync what was written, after every so many messages or so much time; runs until cancelled."""
        while True:
            with trio.move_on_after(self._options.sync_timeout_ms / 1000):
                await self._sync_soon.wait()
            self._sync_soon = trio.Event()
            await self._sync_all()

    async def _sync_all(self) -> None:
        for topic in list(self._unsynced):
            await self._sync(topic)

    async def _sync(self, topic: Topic) -> bool:
        if (unsynced := self._unsynced.pop(topic, None)) is None:
            return True
        began_s, synced = perf_counter(), False
        try:
            synced = await self.in_thread(topic, topic.log.sync)
        finally:
            if not synced:  # also when it was cancelled
                self._add_unsynced(topic, unsynced.messages, unsynced.size)  # for the next time
        if synced:
            self.sync_duration.observe(perf_counter() - began_s)
            self.sync_count += 1
            self.health = ""
        return synced

    async def sync(self, topic: Topic) -> bool:
        """Return when what a topic has accepted is on stable storage; False if that failed, which is noted."""
        if self._options.sync == "always":
            return True
        await self.idle(topic)  # it may just be synced
        return await self._sync(topic)

    # ------------------------------------------------------------------ common

    def _records(self, topic: Topic, publications: Sequence[Publication]) -> list[RecordBatch]:
        """Records for these publications, from the end of the log on; neighbours share one while it is small."""
        records: list[RecordBatch] = []
        timestamp_ns = time.time_ns()
        sequence = topic.log.next_sequence
        for together in _sharing_records(publications):
            first = together[0]
            messages = MessageSet.join([publication.messages for publication in together])
            with self._taking:
                first_id = self._ids.take(len(messages.sizes))
            records.append(RecordBatch(sequence, first_id, timestamp_ns, first.due_ns, messages, first.note))
            sequence += len(messages.sizes)
        return records

    def _store(self, commit: _Commit) -> None:
        try:
            records = self._records(commit.topic, commit.group.publications)
            began_s = perf_counter()
            commit.topic.log.append(records, sync=commit.sync)
            commit.took_s = perf_counter() - began_s
            commit.records = records
        except Exception as exc:
            commit.error = exc

    def _note_stored(self, commit: _Commit) -> bool:
        """Tell those who published; whether what they did is still to be sent on."""
        topic, error = commit.topic, None
        if commit.error is None:
            try:
                self._accept(commit)
            except Exception as exc:
                commit.error = exc
        if commit.error is not None:
            error = self._refusal(topic, commit.error)
        # Where there may be no room for what they publish next, consumers come first: they make some.
        first = error is None and topic.may_refuse
        if first:
            self._deliver(topic)
        commit.group.finish(error)
        return error is None and not first

    def _accept(self, commit: _Commit) -> None:
        topic, records = commit.topic, commit.records
        if not topic.ephemeral:
            self.health = ""
            self.append_duration.observe(commit.took_s)
            if commit.sync:
                self.sync_count += 1
            else:
                messages = records[-1].next_sequence - records[0].base_sequence
                self._note_unsynced(topic, messages, sum([record.record_bytes for record in records]))
        topic.accept(records)

    def _deliver(self, topic: Topic) -> None:
        """Have what was stored sent on: it is stored, whatever comes of this."""
        try:
            self._published(topic)
        except Exception:
            logger.exception("%s: what was published could not be sent on", topic.name)

    def _note_unsynced(self, topic: Topic, messages: int, size: int) -> None:
        unsynced = self._add_unsynced(topic, messages, size)
        if unsynced.messages >= self._options.sync_every or unsynced.size >= _SYNC_BYTES:
            self._sync_soon.set()

    def _add_unsynced(self, topic: Topic, messages: int, size: int) -> _Unsynced:
        unsynced = self._unsynced.get(topic)
        if unsynced is None:
            unsynced = self._unsynced[topic] = _Unsynced()
        unsynced.messages += messages
        unsynced.size += size
        return unsynced

    def _refusal(self, topic: Topic, error: Exception) -> PublishRefused:
        if isinstance(error, LogError):
            return self._failed(error)
        # A mistake of ours: it ends neither the broker nor what comes next, and the publishers hear of it.
        logger.error("%s: a publish failed", topic.name, exc_info=error)
        return PublishRefused("internal error")

    def _failed(self, error: LogError) -> PublishRefused:
        if self.health != str(error):
            logger.error("%s", error)
        self.health = str(error)
        return PublishRefused(str(error))

    async def in_thread(self, topic: Topic, work: Callable[[], None], *, alone: bool = False) -> bool:
        """Do something to a topic's log in a thread, with no commit beside it.

        Args:
            topic: Whose log.
            work: What to do.
            alone: What is published meanwhile waits, with any sync mode.

        Returns:
            False if that failed; the error is noted in `health`.
        """
        await self._take_over(topic)
        if alone:
            self._committing[topic] = []
        try:
            await trio.to_thread.run_sync(work)
        except LogError as exc:
            self._failed(exc)
            return False
        finally:
            self._committing.pop(topic, None)  # before the next commit begins
            self._release(topic)
        return True

    async def _take_over(self, topic: Topic) -> None:
        """Have a topic's log when nobody else does; `_release` it then."""
        self._write_gathered()
        if topic not in self._busy:
            self._busy[topic] = trio.Event()
            return
        turn = trio.Event()
        line = self._in_line.setdefault(topic, deque())
        line.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._release(topic)
            else:
                line.remove(turn)
            raise
        finally:
            if not line:
                self._in_line.pop(topic, None)

    async def idle(self, topic: Topic) -> None:
        """Wait until no thread is at the topic's log; none is until the caller's next checkpoint."""
        self._write_gathered()
        while (busy := self._busy.get(topic)) is not None:
            await busy.wait()

    def forget(self, topic: Topic) -> None:
        """Let go of a topic that is being deleted."""
        self._unsynced.pop(topic, None)

    async def close(self) -> None:
        """Refuse further publishes, and wait for those under way and for a last sync."""
        self._closed = True
        self._write_gathered()
        self.start_commits()
        for topic in list(self._busy):
            await self.idle(topic)
        await self._sync_all()
        self._end_threads()


def _sharing_records(publications: Sequence[Publication]) -> Sequence[Sequence[Publication]]:
    """Neighbours that share a record: while it is small, and nothing is to be said of them that is not said of all."""
    if len(publications) == 1:
        return [publications]
    shares: list[list[Publication]] = []
    size = 0
    open_for_more = False
    for publication in publications:
        plain = not (publication.due_ns or publication.note)
        size += len(publication.messages.data)
        if open_for_more and plain and size <= _MAX_RECORD_BYTES:
            shares[-1].append(publication)
        else:
            shares.append([publication])
            size = len(publication.messages.data)
            open_for_more = plain
    return shares
