"""Tests for group commit: which thread syncs which log, when, and the number of threads."""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from broker.state import FIRST_ID, TIMESTAMP
from broker.support import TopicsFiles, settle, until
from trio_nsq.broker.ingest.group_commit import GroupCommitter, Synced
from trio_nsq.broker.state.cache import BatchCache
from trio_nsq.broker.state.topic import Topic
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.pacing import Pacing
from trio_nsq.protocol import pack_messages
from trio_nsq.reactor import Poller


class Committing:
    """A committer, and the logs that it syncs.

    Attributes:
        committer: The committer.
        files: The files of the logs: the sync of a topic can be held.
        now_s: The committer's clock.
        synced: How many syncs of each topic the committer has reported.
    """

    def __init__(self, folder: Path, nursery: trio.Nursery, pacing: Pacing) -> None:
        self.files = TopicsFiles()
        self.now_s = 1000.0
        self.synced: Counter[str] = Counter()
        self._folder = folder
        self._nursery = nursery
        self._poller = Poller(pacing)
        self._topics: dict[str, Topic] = {}
        self.committer = GroupCommitter(nursery, self._poller, self._count, pacing, lambda: self.now_s)

    def _count(self, results: Sequence[Synced]) -> None:
        for result in results:
            assert result.error is None
            self.synced[result.topic.name] += 1

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
            log.begin_file()
            self._topics[name] = Topic(name, log, BatchCache(10**7), 10)
        return self._topics[name]

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


def threads(least: int, most: int | None = None) -> dict[str, int]:
    """Set the number of threads; above the minimum only if syncs take longer than `commit_s`."""
    return {"min_commit_threads": least, "max_commit_threads": most or least}


async def test_syncs_are_reported_while_the_thread_continues_with_other_topics(tmp_path: Path) -> None:
    async with committing(tmp_path, tell_s=-1, **threads(1)) as running:
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
    async with committing(tmp_path, commit_s=1, **threads(1, 4)) as running:
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


async def test_later_requests_do_not_delay_a_commit(tmp_path: Path) -> None:
    async with committing(tmp_path, gather_s=0.001) as running:
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
    async with committing(tmp_path, commit_s=1, tell_s=10**9, **threads(1, 2)) as running:
        first, slow = running.hold("t1", "slow")
        running.write("t1")
        await until(lambda: running.files.syncing == ["t1"])
        running.write("pausing", "slow")
        first.set()  # now the thread has all three
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
