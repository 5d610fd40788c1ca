"""Tests for the local sync: which thread syncs which log, when, and the number of threads."""

import errno
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.state import FIRST_ID, TIMESTAMP
from broker.support import TopicsFiles, settle, until
from trio_nsq.broker.ingest.local_sync import LocalSync, SyncJob
from trio_nsq.broker.ingest.write_ahead import WriteAhead
from trio_nsq.broker.state.cache import BatchCache
from trio_nsq.broker.state.topic import Topic
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.log import DiskLog, Files, LogWriteError, RecordBatch
from trio_nsq.log.write_ahead.file import WriteAheadFile
from trio_nsq.protocol import pack_messages


class Committing:
    """A local sync, and the logs that it syncs.

    Attributes:
        committer: The local sync.
        files: The files of the logs: the sync of a topic can be held.
        now_s: Its clock.
        synced: How many syncs of each topic it has reported.
    """

    def __init__(
        self, folder: Path, nursery: trio.Nursery, pacing: Pacing, write_ahead: WriteAhead | None = None
    ) -> None:
        self.files = TopicsFiles()
        self._write_ahead = write_ahead
        self.now_s = 1000.0
        self.synced: Counter[str] = Counter()
        self._folder = folder
        self._nursery = nursery
        self._poller = Poller(pacing)
        self._topics: dict[str, Topic] = {}
        self.committer = LocalSync(
            nursery, self._poller, self._count, pacing, lambda: self.now_s, write_ahead
        )

    def _count(self, job: SyncJob) -> None:
        assert job.error is None
        for topic in job.serves:
            self.synced[topic.name] += 1

    def write(self, *names: str) -> None:
        """Write a message to each of these topics, and request a sync."""
        for name in names:
            topic = self._topic(name)
            topic.log.write(
                [RecordBatch(topic.log.written_sequence, FIRST_ID, TIMESTAMP, 0, pack_messages([b"x"]))]
            )
            self.committer.request(topic)

    def _topic(self, name: str) -> Topic:
        if name not in self._topics:
            log = DiskLog(self._folder / f"{name}.topic", files=self.files)
            log.rotate()
            self._topics[name] = Topic(name, log, BatchCache(10**7), 10)
        return self._topics[name]

    def rotate(self, name: str) -> None:
        """Begin a new file of a topic's log, for which the last one is synced. Raises LogWriteError."""
        log = self._topic(name).log
        assert isinstance(log, DiskLog)
        log.commit(log.written_sequence)
        log.rotate()

    async def sync_alone(self, name: str) -> None:
        """Sync a topic's own log."""
        assert await self.committer.sync(self._topic(name), alone=True) is None

    def delete(self, name: str) -> None:
        """Have the write-ahead log forget a topic."""
        assert self._write_ahead is not None
        self._write_ahead.forget(self._topic(name))

    @contextmanager
    def a_round(self) -> Iterator[None]:
        """Run a poller round: requests of clients are collected, and start at its end."""
        self._poller.in_round = True
        yield
        self._poller.in_round = False

    def hold(self, *names: str) -> list[threading.Event]:
        """Hold syncs of these topics that start from now on, until the events are set."""
        for name in names:
            self._topic(name)  # first, because creating its file takes a sync, too
            self.files.gates[name] = threading.Event()
        return [self.files.gates[name] for name in names]

    async def idle(self) -> None:
        """Wait until everything is synced."""
        await self.committer.until_all_idle()
        await settle()

    @property
    def wal_file(self) -> str:
        """The name of the write-ahead file that is written to. It exists before it is in use."""
        file = self._write_ahead.current if self._write_ahead is not None else None
        return file.path.name if file is not None else ""

    @property
    def wal_unsynced_bytes(self) -> int:
        """What the write-ahead file has that no sync has covered."""
        assert self._write_ahead is not None
        assert self._write_ahead.current is not None
        return self._write_ahead.current.unsynced_bytes

    @property
    def threads(self) -> int:
        """Return the number of threads: each has a task that waits for it."""
        return len(self._nursery.child_tasks)

    def close(self) -> None:
        """Close the logs."""
        for topic in self._topics.values():
            topic.log.close()


@asynccontextmanager
async def committing(folder: Path, **pacing: Any) -> AsyncIterator[Committing]:
    """Run a committer, whose threads exit at the end."""
    async with trio.open_nursery() as nursery:
        made = Committing(folder, nursery, Pacing(**pacing))
        yield made
        await made.committer.until_all_idle()
        made.committer.end()
    made.close()


@asynccontextmanager
async def committing_ahead(folder: Path, **pacing: Any) -> AsyncIterator[tuple[Committing, list[Path]]]:
    """As `committing`, with a write-ahead log; also return the paths of the files that are synced from then on."""
    synced: list[Path] = []

    class NotedFiles(TopicsFiles):
        def sync(self, fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            synced.append(path)
            super().sync(fd)
            if path.name in self.failing:
                raise OSError(errno.EIO, "broken")

    files = NotedFiles()
    numbers = count(1)
    async with trio.open_nursery() as nursery:
        write_ahead = WriteAhead(
            lambda: WriteAheadFile.create(files, folder, next(numbers)),
            lambda: None,
            100,
            nursery,
            Pacing(**pacing),
        )
        made = Committing(folder, nursery, Pacing(**pacing), write_ahead)
        made.files = files
        with made.a_round():
            made.write("t1", "t2", "t3")
        made.committer.begin()  # the write-ahead log does not exist yet
        await made.idle()
        await until(lambda: made.wal_file == "write-ahead.1")
        synced.clear()
        yield made, synced
        await write_ahead.close()
        await made.committer.until_all_idle()
        made.committer.end()
        nursery.cancel_scope.cancel()
    made.close()


async def test_many_topics_of_a_round_share_one_sync(tmp_path: Path) -> None:
    async with committing_ahead(tmp_path, wal_topics=3) as (running, synced):
        with running.a_round():
            running.write("t1", "t2", "t3")
        running.committer.begin()
        await running.idle()
        assert [path.name for path in synced] == ["write-ahead.1"]
        assert set(running.synced.values()) == {2}


async def test_few_topics_of_a_round_are_synced_by_themselves(tmp_path: Path) -> None:
    async with committing_ahead(tmp_path, wal_topics=3) as (running, synced):
        with running.a_round():
            running.write("t1", "t2")
        running.committer.begin()
        await running.idle()
        assert sorted(path.parent.name for path in synced) == ["t1.topic", "t2.topic"]


async def test_writes_too_large_for_the_write_ahead_log_are_synced_although_smaller_ones_follow(
    tmp_path: Path,
) -> None:
    async with committing_ahead(tmp_path, wal_topics=2, small_sync_bytes=100, **threads(1)) as (
        running,
        synced,
    ):
        (gate,) = running.hold("busy")
        running.write("busy")
        await until(lambda: running.files.syncing == ["busy"])
        synced.clear()
        with running.a_round():
            running.write("t1", "t1", "t2")  # a message takes 61 bytes
        running.committer.begin()
        with running.a_round():
            running.write("t1", "t3")
        running.committer.begin()
        gate.set()
        await running.idle()
        assert "t1.topic" in [path.parent.name for path in synced]


async def test_topics_share_the_next_sync_of_a_write_ahead_log_that_is_being_synced(tmp_path: Path) -> None:
    async with committing_ahead(tmp_path, wal_topics=2, **threads(2)) as (running, synced):
        gate = running.files.gates[tmp_path.stem] = threading.Event()
        with running.a_round():
            running.write("t1", "t2")
        running.committer.begin()
        await until(lambda: running.files.syncing == [tmp_path.stem])
        running.write("t3")
        await settle()
        gate.set()
        await running.idle()
        assert [path.name for path in synced] == ["write-ahead.1"] * 2
        assert set(running.synced.values()) == {2}


async def test_topics_that_join_a_waiting_sync_of_the_write_ahead_log_are_covered_by_it(
    tmp_path: Path,
) -> None:
    """What it has not covered would be cut off after an error."""
    async with committing_ahead(tmp_path, wal_topics=2, **threads(2)) as (running, synced):
        running.write("t4")
        await running.idle()
        synced.clear()
        gate = running.files.gates[tmp_path.stem] = threading.Event()
        with running.a_round():
            running.write("t1", "t2")
        running.committer.begin()
        await until(lambda: running.files.syncing == [tmp_path.stem])
        for name in ("t3", "t4"):
            running.write(name)
            await settle()
        gate.set()
        await running.idle()
        assert [path.name for path in synced] == ["write-ahead.1"] * 2
        assert running.wal_unsynced_bytes == 0


def threads(least: int, most: int | None = None) -> dict[str, int]:
    """Set the number of threads; above the minimum only if syncs take longer than `fast_sync_s`."""
    return {"min_commit_threads": least, "max_commit_threads": most or least}


async def test_syncs_are_reported_while_the_thread_continues_with_other_topics(tmp_path: Path) -> None:
    async with committing(tmp_path, **threads(1)) as running:
        running.write("t1", "t2", "t3")
        await running.idle()
        first, third = running.hold("t1", "t3")
        running.write("t1")
        await until(lambda: running.files.syncing == ["t1"])
        running.write("t2", "t3")  # the thread takes both next
        first.set()
        await until(lambda: running.synced["t2"] == 2)
        assert running.synced["t3"] == 1
        third.set()
    assert running.synced == {"t1": 2, "t2": 2, "t3": 2}


async def test_threads_stay_until_the_end(tmp_path: Path) -> None:
    async with committing(tmp_path, **threads(1)) as running:
        for count in range(1, 4):
            running.write("t")
            await running.idle()
            assert (running.synced["t"], running.threads) == (count, 1)


async def test_slower_disks_get_more_threads_up_to_a_limit(tmp_path: Path) -> None:
    async with committing(tmp_path, fast_sync_s=1, **threads(1, 4)) as running:
        names = [f"t{number}" for number in range(5)]

        async def all_at_once(expected: int) -> tuple[int, list[threading.Event]]:
            """Return how many threads sync at once, at least `expected`, if every topic needs it."""
            gates = running.hold(*names)
            with running.a_round():
                running.write(*names)
            running.committer.begin()
            await until(lambda: len(running.files.syncing) >= expected)
            await settle()
            return len(running.files.syncing), gates

        syncing, gates = await all_at_once(1)
        assert (syncing, running.threads) == (1, 1)
        running.now_s += 100
        for gate in gates:
            gate.set()
        await running.idle()

        syncing, gates = await all_at_once(4)
        assert (syncing, running.threads) == (4, 4)
        for gate in gates:
            gate.set()
        await running.idle()

        running.files.gates.clear()
        for _ in range(50):
            running.write("t0")  # that takes no time
            await running.idle()
        syncing, gates = await all_at_once(1)
        assert (syncing, running.threads) == (1, 1)
        for gate in gates:
            gate.set()


async def test_report_is_near_while_a_fast_disk_is_synced(tmp_path: Path) -> None:
    async with committing(tmp_path, nap_s=1) as running:
        assert not running.committer.is_call_near
        for takes_s, is_near_next in ((0, True), (100, False)):
            [gate] = running.hold("t1")
            running.write("t1")
            await until(lambda: bool(running.files.syncing))
            assert running.committer.is_call_near
            running.now_s += takes_s
            gate.set()
            await running.idle()
            assert not running.committer.is_call_near
            [gate] = running.hold("t1")
            running.write("t1")
            await until(lambda: bool(running.files.syncing))
            assert running.committer.is_call_near == is_near_next
            gate.set()
            await running.idle()


async def test_later_requests_do_not_delay_a_commit(tmp_path: Path) -> None:
    async with committing(tmp_path, coalesce_s=0.001) as running:
        for name in ("t1", "t2", "t3"):
            with running.a_round():
                running.write(name)
            assert (running.committer.is_late, running.threads) == (False, 0)
            running.now_s += 0.000_4
        assert running.committer.is_late
        running.committer.begin()
        await running.idle()
        assert not running.committer.is_late
    assert running.synced == {"t1": 1, "t2": 1, "t3": 1}


async def test_enough_threads_start_for_the_requests(tmp_path: Path) -> None:
    async with committing(tmp_path, **threads(4)) as running:
        names = [f"t{number}" for number in range(5)]
        gates = running.hold(*names)
        with running.a_round():
            running.write(*names[:2])
        running.committer.begin()
        await settle()
        assert running.threads == 2
        with running.a_round():
            running.write(*names[2:])
        running.committer.begin()
        await settle()
        assert running.threads == 4
        for gate in gates:
            gate.set()
    assert running.synced == dict.fromkeys(names, 1)


async def test_idle_thread_takes_waiting_topics(tmp_path: Path) -> None:
    async with committing(tmp_path, **threads(2)) as running:
        gates = running.hold("t1", "t2")
        running.write("t1")
        running.write("t2")
        await until(lambda: len(running.files.syncing) == 2)  # so there are two threads
        for gate in gates:
            gate.set()
        await running.idle()
        (gate,) = running.hold("t1")
        with running.a_round():
            running.write("t1", "t2")
        running.committer.begin()
        await until(lambda: running.synced["t2"] == 2)
        assert running.synced["t1"] == 1
        gate.set()


async def test_idle_topic_is_left_to_other_threads(tmp_path: Path) -> None:
    async with committing(tmp_path, fast_sync_s=1, **threads(1, 2)) as running:
        first, slow = running.hold("t1", "slow")
        running.write("t1")
        await until(lambda: running.files.syncing == ["t1"])
        running.write("pausing", "slow")
        first.set()  # the thread continues with both
        await until(lambda: running.files.syncing == ["slow"])
        running.now_s += 100  # so another thread may start
        running.write("slow")
        (slower,) = running.hold("slow")
        slow.set()
        await until(lambda: running.synced["slow"] == 1 and running.files.syncing == ["slow"])
        running.write("pausing")
        await until(lambda: running.synced["pausing"] == 2)
        assert running.synced["slow"] == 1
        slower.set()


async def test_two_files_wait_for_the_same_topic(tmp_path: Path) -> None:
    """The first file is full, and its topics are being synced, when the second one fails."""

    async def in_a_round(*names: str) -> None:
        with running.a_round():
            running.write(*names)
        running.committer.begin()
        await settle()

    async with committing_ahead(tmp_path, wal_topics=2, wal_file_bytes=500, **threads(3)) as (running, _):
        await in_a_round("t1", "t2", "t3")
        gate_1, gate_2 = running.hold("t1", "t2")
        await in_a_round("t2", "t3")  # the file is full, so the next one begins
        await until(lambda: "t1" in running.files.syncing and running.wal_file == "write-ahead.2")
        await in_a_round("t2", "t3")
        running.files.failing.add("write-ahead.2")
        await in_a_round("t2", "t3")  # synced by themselves
        await until(lambda: "t2" in running.files.syncing)
        await in_a_round("t4", "t5")  # notices that the file failed
        gate_1.set()
        await settle()
        gate_2.set()
        await running.idle()
    assert not list(tmp_path.glob("write-ahead.*"))


async def test_the_event_loop_syncs_while_syncs_are_short(tmp_path: Path) -> None:
    """The average begins with 5 ms, and two syncs that take no time make it less than 4.5 ms."""
    async with committing(tmp_path, turn_s=1, fast_sync_s=0.0045, loop_pause=100, **threads(1)) as running:

        async def in_loop(*names: str) -> bool:
            """Sync these topics; return whether the event loop did it."""
            expected = running.synced + Counter(names)
            with running.a_round():
                running.write(*names)
            if not (done := running.committer.sync_in_loop()):
                running.committer.begin()
            await running.idle()
            assert running.synced == expected
            return done

        assert not running.committer.sync_in_loop()  # there is nothing to do
        assert [await in_loop("t1") for _ in range(4)] == [False, False, True, True]
        assert not await in_loop("t1", "t2")
        assert await in_loop("t2")

        (gate,) = running.hold("t1")
        running.write("t1")
        await until(lambda: running.files.syncing == ["t1"])
        assert not syncs_beside_a_thread(running)
        running.now_s += 2  # longer than the loop may be stopped
        gate.set()
        await running.idle()
        running.files.gates.clear()
        assert [await in_loop("t1") for _ in range(4)] == [False] * 4
        running.now_s += 199
        assert not any([await in_loop("t1") for _ in range(100)])  # which makes the average short
        running.now_s += 1
        assert await in_loop("t1")


def syncs_beside_a_thread(running: Committing) -> bool:
    """Request a sync while a thread works, which also serves it; return whether the event loop did it."""
    with running.a_round():
        running.write("t2")
    done = running.committer.sync_in_loop()
    running.committer.begin()
    return done


async def test_the_event_loop_does_not_sync_many_bytes(tmp_path: Path) -> None:
    async with committing(tmp_path, fast_sync_s=inf, small_sync_bytes=100) as running:
        for count, in_loop in ((1, True), (2, False), (1, True)):
            with running.a_round():
                running.write(*["t"] * count)  # a message takes 61 bytes
            assert running.committer.sync_in_loop() == in_loop
            running.committer.begin()
            await running.idle()


async def test_the_event_loop_does_not_sync_many_bytes_of_the_write_ahead_log(tmp_path: Path) -> None:
    options = {"wal_topics": 2, "fast_sync_s": inf, "small_sync_bytes": 500}
    async with committing_ahead(tmp_path, **options) as (running, _):
        for names, in_loop in ((("t1", "t2"), True), (("t1", "t2", "t3", "t4", "t5"), False)):
            with running.a_round():
                running.write(*names)
            assert running.committer.sync_in_loop() == in_loop
            running.committer.begin()
            await running.idle()


async def test_the_event_loop_syncs_the_write_ahead_log_of_many_topics(tmp_path: Path) -> None:
    async with committing_ahead(tmp_path, wal_topics=3, fast_sync_s=inf) as (running, synced):
        with running.a_round():
            running.write("t1", "t2", "t3")
        assert running.committer.sync_in_loop()
        assert [path.name for path in synced] == ["write-ahead.1"]
        await running.idle()
        assert set(running.synced.values()) == {2}


async def test_the_event_loop_leaves_failed_syncs_of_the_write_ahead_log_to_threads(tmp_path: Path) -> None:
    async with committing_ahead(tmp_path, wal_topics=3, fast_sync_s=inf) as (running, synced):
        running.files.failing.add("write-ahead.1")
        with running.a_round():
            running.write("t1", "t2", "t3")
        assert running.committer.sync_in_loop()
        assert set(running.synced.values()) == {1}
        await running.idle()
        assert min(running.synced.values()) >= 2  # the file's end may sync a topic again
        assert {"t1.topic", "t2.topic", "t3.topic"} <= {path.parent.name for path in synced}


async def test_write_ahead_file_is_cut_back_after_the_sync_that_runs(tmp_path: Path) -> None:
    """What a sync is about to report as stored must not be discarded."""
    async with committing_ahead(tmp_path, wal_topics=2, **threads(2)) as (running, _):
        gate = running.files.gates[tmp_path.stem] = threading.Event()
        with running.a_round():
            running.write("t1", "t2")
        running.committer.begin()
        await until(lambda: running.files.syncing == [tmp_path.stem])
        running.files.refusing.add("write-ahead.1")
        with running.a_round():
            running.write("t3", "t4")
        running.committer.begin()
        await until(lambda: running.synced["t4"] == 1)
        for _ in range(10):  # a thread that began earlier has probably ended
            await trio.to_thread.run_sync(bool)
            await settle()
        truncated = running.files.truncated.copy()
        gate.set()
        assert truncated == []
        await running.idle()
        assert running.files.truncated[0] == "write-ahead.1"
        assert min(running.synced["t1"], running.synced["t2"]) >= 2


async def test_topic_in_the_write_ahead_log_is_not_synced_by_itself_meanwhile(tmp_path: Path) -> None:
    """If that failed, the message would be refused, and the write-ahead log would bring it back."""
    async with committing_ahead(tmp_path, wal_topics=2, **threads(3)) as (running, synced):
        gate = running.files.gates[tmp_path.stem] = threading.Event()
        with running.a_round():
            running.write("t1", "t2")
        running.committer.begin()
        await until(lambda: running.files.syncing == [tmp_path.stem])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.sync_alone, "t1")
            await settle()
            own = running.files.gates["t1"] = threading.Event()
            await running.sync_alone("t3")
            for _ in range(10):  # its thread has probably looked for another job
                await trio.to_thread.run_sync(bool)
                await settle()
            syncing = running.files.syncing.copy()
            gate.set()
            own.set()
        assert syncing == [tmp_path.stem]
        assert [path.parent.name for path in synced] == [tmp_path.name, "t3.topic", "t1.topic"]


async def test_topic_is_synced_by_itself_after_a_failed_sync_of_the_write_ahead_log(tmp_path: Path) -> None:
    """Its own sync was requested meanwhile, and could not begin."""
    async with committing_ahead(tmp_path, wal_topics=1, **threads(3)) as (running, _):
        gate = running.files.gates[tmp_path.stem] = threading.Event()
        with running.a_round():
            running.write("t1")
        running.committer.begin()
        await until(lambda: running.files.syncing == [tmp_path.stem])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.sync_alone, "t1")
            await settle()
            running.files.failing.add("write-ahead.1")
            gate.set()


async def test_topic_that_is_to_be_synced_alone_is_not_left_to_the_write_ahead_log(tmp_path: Path) -> None:
    """A caller waits for a sync of the topic's own file: it is full, or the write-ahead log has failed."""
    async with committing_ahead(tmp_path, wal_topics=3) as (running, synced):
        async with trio.open_nursery() as nursery:
            with running.a_round():
                running.write("t1", "t2", "t3", "t4")
                nursery.start_soon(running.sync_alone, "t1")
                await settle()
            synced.clear()
            running.committer.begin()
            await running.idle()
            assert sorted(path.parent.name for path in synced) == sorted([tmp_path.name, "t1.topic"])


class OwnSyncs:
    """Syncs topics by themselves at once, for a write-ahead log.

    Attributes:
        topics: The names of the topics that were synced.
    """

    def __init__(self, write_ahead: WriteAhead) -> None:
        self.topics: list[str] = []
        self._write_ahead = write_ahead

    async def sync(self, topic: Topic, *, alone: bool = False) -> Exception | None:
        self.topics.append(topic.name)
        self._write_ahead.record_sync(topic, topic.log.writes, None)
        return None

    async def until_idle(self, of: object) -> None: ...


@pytest.mark.parametrize(("writes", "needs_sync"), [(1, True), (2, False)])
async def test_sync_reported_after_a_later_write_does_not_make_the_file_needless(
    tmp_path: Path, writes: int, needs_sync: bool
) -> None:
    """A sync of the topic's own file that began before the last write does not serve it."""
    log = DiskLog(tmp_path / "t.topic")
    log.rotate()
    topic = Topic("t", log, BatchCache(0), 0)
    async with trio.open_nursery() as nursery:
        write_ahead = WriteAhead(
            lambda: WriteAheadFile.create(Files(), tmp_path, 1), lambda: None, 100, nursery, Pacing()
        )
        syncs = OwnSyncs(write_ahead)
        write_ahead.use(syncs)
        write_ahead.append([])  # there is no file yet
        await until(lambda: write_ahead.current is not None)
        for sequence in range(2):
            log.write([RecordBatch(sequence, FIRST_ID, TIMESTAMP, 0, pack_messages([b"x"]))])
            assert write_ahead.append([topic])[1] == {topic: sequence + 1}
        write_ahead.record_sync(topic, writes, None)
        await write_ahead.close()
        assert syncs.topics == ["t"] * needs_sync
        assert not (tmp_path / "write-ahead.1").exists()
        nursery.cancel_scope.cancel()
    log.close()


@pytest.mark.parametrize("deletes", [False, True])
async def test_file_is_kept_if_the_sync_of_a_full_segment_failed(tmp_path: Path, deletes: bool) -> None:
    """The kernel may have dropped what was acknowledged, and reports success for later syncs."""

    async def in_a_round(*names: str) -> None:
        with running.a_round():
            running.write(*names)
        running.committer.begin()
        await running.idle()

    kept = tmp_path / "write-ahead.1"
    async with committing_ahead(tmp_path, wal_topics=2, wal_file_bytes=500) as (running, synced):
        await in_a_round("t1", "t2")
        assert [path.name for path in synced] == ["write-ahead.1"]
        running.files.failing.add("t1")
        with pytest.raises(LogWriteError):
            running.rotate("t1")
        running.files.failing.clear()
        running.rotate("t1")
        await in_a_round("t1")
        assert synced[-1].parent.name == "t1.topic"
        for _ in range(3):
            await in_a_round("t2", "t3")
        await until(lambda: (tmp_path / "write-ahead.2").exists())
        await running.idle()
        assert kept.exists()
        if deletes:
            running.delete("t1")
            await until(lambda: not kept.exists())
    assert kept.exists() == (not deletes)
    assert not (tmp_path / "write-ahead.2").exists()


def test_a_limit_below_which_no_sync_is_fast_is_refused() -> None:
    with pytest.raises(ValueError, match="fast_sync_s"):
        Pacing(fast_sync_s=0)
