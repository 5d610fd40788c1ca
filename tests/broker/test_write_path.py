"""Tests for the publisher and group commit: slow threads, failures, and bugs."""

import errno
import gc
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.api import OK, running_api
from broker.support import (
    PATIENCE_S,
    FailingFiles,
    HeldFiles,
    TopicsFiles,
    connected,
    identify,
    is_idle,
    pub,
    running_broker,
    settle,
    threads_done,
    until,
)
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.errors import PublishRefused
from trio_nsq.broker.ingest.publication import Publication
from trio_nsq.broker.options import Sync
from trio_nsq.broker.server import Server
from trio_nsq.broker.state.dispatcher import Dispatcher, Grant
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.broker.state.topic import Topic
from trio_nsq.broker.storage.data_folder import DataFolder
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.log import DiskLog, Files
from trio_nsq.protocol import pack_messages


class Counted(Files):
    """A real file system that counts syncs."""

    syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)


class HeldAndCounted(Counted, HeldFiles):
    """Counts, and holds operations."""


class FailingAndCounted(Counted, FailingFiles):
    """Counts, and fails operations."""


async def test_publishes_during_a_sync_share_the_next_one(tmp_path: Path) -> None:
    files = HeldAndCounted()
    async with running_broker(tmp_path / "d", files=files) as bound, connected(bound.tcp_address) as first:
        await first.publish("t", b"makes the segment")
        files.hold("sync")
        files.syncs = 0
        await first.send(pub("t", b"first"))
        await files.reached()
        async with connected(bound.tcp_address) as second, connected(bound.tcp_address) as third:
            await second.send(pub("t", b"second"))
            await third.send(pub("t", b"third"))
            await settle()
            files.release()
            for client in (first, second, third):
                await client.ok()
        assert files.syncs == 2


async def test_publishes_waiting_behind_a_publish_become_one_write(
    tmp_path: Path,
) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound, AsyncExitStack() as stack:
        first, *others = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(4)]
        await first.publish("t", b"makes the segment")
        await first.publish("behind", b"makes the segment")
        files.hold("sync")
        await first.send(pub("t", b"held"))
        await files.reached()
        for client in others:
            await client.send(pub("t", b"stored") + pub("behind", b"a") + pub("behind", b"b"))
        await settle()
        files.release()
        for client in others:
            for _ in range(3):
                await client.ok()
    log = DiskLog(tmp_path / "d" / "topics" / "behind.topic")
    # Messages that are written together share a record.
    assert [record.count for record in log.read(0)] == [1, 6]
    log.close()


async def test_client_that_disconnects_while_its_publish_is_stored(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound, connected(bound.tcp_address) as client:
        files.hold("write")
        async with connected(bound.tcp_address) as leaving:
            await leaving.send(pub("t", b"stored all the same"))
            await files.reached()
        await settle()
        files.release()
        await client.publish("t", b"next")
        await client.subscribe("t", "c", ready_count=10)
        assert [(await client.message()).body for _ in range(2)] == [b"stored all the same", b"next"]


async def test_publishes_do_not_wait_for_the_index_of_the_file_before(tmp_path: Path) -> None:
    files = HeldFiles()
    folder = tmp_path / "d" / "topics" / "t.topic"
    body = bytes(600_000)
    async with (
        running_broker(tmp_path / "d", files=files, max_bytes_per_file=1_000_000) as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.publish("t", body)
        files.hold("replace")
        await client.publish("t", body)
        await files.reached()
        await client.publish("t", b"small")
        assert (len(list(folder.glob("*.log"))), list(folder.glob("*.index"))) == (2, [])
        files.release()
    assert [path.stem for path in folder.glob("*.index")] == [f"{0:020d}"]


class MistakenFiles(Files):
    """Raises an exception that no log expects, once."""

    mistake: Exception | None = None
    mistake_in_index: Exception | None = None

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if self.mistake is not None:
            mistake, self.mistake = self.mistake, None
            raise mistake
        super().write(fd, offset, parts)

    def replace(self, path: Path, content: bytes) -> None:
        if path.suffix == ".index" and self.mistake_in_index is not None:
            mistake, self.mistake_in_index = self.mistake_in_index, None
            raise mistake
        super().replace(path, content)


async def test_unexpected_exception_in_saving_an_index_affects_no_publisher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = MistakenFiles()
    body = bytes(600_000)
    async with (
        running_broker(tmp_path / "d", files=files, max_bytes_per_file=1_000_000) as bound,
        connected(bound.tcp_address) as client,
    ):
        files.mistake_in_index = MemoryError("none left")
        for _ in range(3):
            await client.publish("t", body)
    assert "none left" in caplog.text
    folder = tmp_path / "d" / "topics" / "t.topic"
    assert [path.stem for path in folder.glob("*.index")] == [f"{1:020d}"]


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_unexpected_exception_affects_only_its_publishers(
    tmp_path: Path, sync: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = MistakenFiles()
    async with running_broker(tmp_path / "d", files=files, sync=sync) as bound:
        async with connected(bound.tcp_address) as good, connected(bound.tcp_address) as unlucky:
            await good.publish("t", b"before")
            files.mistake = MemoryError("none left")
            await unlucky.send(pub("t", b"refused"))
            assert await unlucky.error() == "E_PUB_FAILED PUB failed internal error"
            assert "none left" in caplog.text
            await good.publish("t", b"after")
            await good.subscribe("t", "c", ready_count=10)
            assert [(await good.message()).body for _ in range(2)] == [b"before", b"after"]


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def test_failed_scheduled_sync_is_retried(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files, sync="interval") as api:
        await api.tcp.publish("t", b"x")
        await settle()
        files.sync_fails = True
        clock.jump(2)
        while (await api.get("/ping")).text == "OK":
            pass  # a thread continues the sync
        files.sync_fails = False
        await settle()
        clock.jump(2)
        while (await api.get("/ping")).text != "OK":
            pass


async def test_message_in_memory_does_not_make_the_disk_healthy(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        files.full_after = 0
        assert (await api.post("/pub", b"x", topic="t"))[0] == 503
        assert await api.post("/pub", b"x", topic="t#ephemeral") == OK
        assert (await api.get("/ping")).status_code == 500
        files.full_after = None
        assert await api.post("/pub", b"x", topic="t") == OK
        assert (await api.get("/ping")).status_code == 200


class UnreadableFiles(Files):
    """Reads fail."""

    fails = False

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(fd, size, offset)

    def read_cached(self, fd: int, size: int, offset: int) -> bytes | None:
        return None if self.fails else super().read_cached(fd, size, offset)


async def test_consumer_waits_until_unreadable_messages_can_be_read(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    files = UnreadableFiles()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"kept")
    async with running_broker(tmp_path / "d", files=files) as bound, connected(bound.tcp_address) as client:
        files.fails = True
        await client.subscribe("t", "c", ready_count=10)
        await client.nothing_more()
        files.fails = False
        await settle()
        clock.jump(1)
        assert (await client.message()).body == b"kept"


async def test_read_error_within_a_delivery_keeps_sent_messages_and_the_answer_to_the_publisher(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """The consumer gets two batches at once; the second is no longer in memory, and cannot be read."""
    files = UnreadableFiles()
    body = bytes(200_000)
    async with AsyncExitStack() as stack:
        broker = running_broker(tmp_path / "d", files=files, mem_queue_size=1, cache_bytes=1)
        bound = await stack.enter_async_context(broker)
        consumer = await stack.enter_async_context(connected(bound.tcp_address))
        publisher = await stack.enter_async_context(connected(bound.tcp_address))
        await publisher.publish("t", body)
        await consumer.subscribe("t", "c")
        await publisher.publish("t", body)
        await publisher.publish("t", b"fresh")
        await consumer.send(b"RDY 1\n")
        first = await consumer.message()
        files.fails = True
        await consumer.send(b"RDY 10\n")
        await consumer.nothing_more()
        await publisher.publish("t", b"another")
        files.fails = False
        await settle()
        clock.jump(1)
        rest = [(await consumer.message()).body for _ in range(3)]
        assert (first.body, rest) == (body, [body, b"fresh", b"another"])


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_publishers_are_answered_before_the_message_is_distributed(tmp_path: Path, sync: str) -> None:
    async with running_broker(tmp_path / "d", sync=sync) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=10)
            await client.send(pub("t", b"body"))
            assert await client.frame() == (0, b"OK")
            assert (await client.message()).body == b"body"


@pytest.mark.uncompiled
@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_exception_while_distributing_does_not_affect_publishers(
    tmp_path: Path, sync: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dispatch(dispatcher: Dispatcher, now_ns: int, ahead_ns: int = 0) -> list[Grant]:
        raise ZeroDivisionError("a mistake")

    async with (
        running_broker(tmp_path / "d", sync=sync) as bound,
        connected(bound.tcp_address) as client,
        connected(bound.tcp_address) as consumer,
    ):
        await consumer.send(identify(output_buffer_size=-1))
        await consumer.ok()
        await consumer.subscribe("t", "c", ready_count=10)
        await client.publish("t", b"makes the segment")
        assert (await consumer.message()).body == b"makes the segment"
        with monkeypatch.context() as mistaken:
            mistaken.setattr(Dispatcher, "dispatch", dispatch)
            await client.publish("t", b"1")
            await settle()
        assert "t: published messages could not be delivered" in caplog.text
        await client.publish("t", b"2")
        assert [(await consumer.message()).body for _ in range(2)] == [b"1", b"2"]


async def test_few_threads_store_for_all_topics_separately(tmp_path: Path) -> None:
    files = TopicsFiles()
    pacing = Pacing(min_commit_threads=2, max_commit_threads=2, wal_topics=1000)
    topics = [f"t{n}" for n in range(20)]
    async with (
        running_broker(tmp_path / "d", files=files, pacing=pacing, checkpoint_interval_ms=3_600_000) as bound,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in topics]
        for topic, client in zip(topics, clients, strict=True):
            await client.publish(topic, b"makes the segment")
        files.most = 0
        files.failing = {"t5", "t17"}
        gate = threading.Event()
        files.gates = dict.fromkeys(topics, gate)
        for topic, client in zip(topics, clients, strict=True):
            await client.send(pub(topic, topic.encode()))
        await until(lambda: bool(files.syncing))
        await settle()
        assert len(files.syncing) <= 2
        gate.set()
        for topic, client in zip(topics, clients, strict=True):
            if topic in files.failing:
                assert (await client.error()).startswith("E_PUB_FAILED ")
            else:
                await client.ok()
        assert files.most <= 2
        files.failing = set()
        for topic in topics:  # no topic was forgotten, including those that failed
            async with connected(bound.tcp_address) as client:
                await client.publish(topic, b"next")
                await client.subscribe(topic, "c", ready_count=10)
                bodies = [(await client.message()).body for _ in range(2 + (topic not in {"t5", "t17"}))]
                stored = [b"makes the segment", *([topic.encode()] if len(bodies) == 3 else []), b"next"]
                assert bodies == stored


async def test_many_bytes_are_synced_whatever_the_number_of_messages(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    files = HeldFiles()
    options: dict[str, Any] = {"sync": "interval", "sync_every": 10**9, "sync_timeout_ms": 10**9}
    async with (
        running_broker(tmp_path / "d", files=files, **options) as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.publish("t", b"makes the segment")
        await settle()
        files.hold("sync")
        for _ in range(17):
            await client.publish("t", b"x" * 1_000_000)
        await files.reached()
        files.release()


async def test_data_written_during_a_sync_needs_the_next_one(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    files = HeldAndCounted()
    options: dict[str, Any] = {"sync": "interval", "sync_every": 3, "sync_timeout_ms": 10**9}
    async with (
        running_broker(tmp_path / "d", files=files, **options) as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.publish("t", b"makes the segment")
        files.hold("sync")
        await client.publish("t", b"2", b"3")
        await files.reached()
        await client.publish("t", b"1")
        files.release()
        await threads_done()
        files.syncs = 0
        await client.publish("t", b"2")
        await settle()
        assert files.syncs == 0
        files.hold("sync")
        await client.publish("t", b"3")
        await files.reached()
        files.release()


async def test_failed_sync_is_retried_on_schedule(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    files = FailingAndCounted()
    async with running_api(tmp_path / "d", files=files, sync="interval", sync_every=1) as api:
        await api.tcp.publish("t", b"makes the segment")
        await threads_done()
        files.sync_fails, files.syncs = True, 0
        await api.tcp.publish("t", b"x")
        while (await api.get("/ping")).text == "OK":
            pass
        for _ in range(20):
            await api.get("/ping")
        assert files.syncs == 1
        files.sync_fails = False


async def test_cache_of_many_topics_is_limited(tmp_path: Path) -> None:
    """Small messages are cached together: the entry that one is added to grows."""
    async with running_api(tmp_path / "d", sync="interval", cache_bytes=64_000) as api:
        topics = [f"t{n}" for n in range(20)]
        for topic in topics * 3:
            await api.tcp.publish(topic, bytes(1000))
        cache = (await api.get("/debug/memory")).json()["cache"]
        assert 60_000 < cache["bytes"] <= 64_000
        assert cache["bytes"] == sum(topic["bytes"] for topic in cache["topics"].values())


class Busy:
    """A topic with a publisher, which publishes again when its message is stored, if `goes_on`."""

    def __init__(self, server: Server, name: str, *, goes_on: bool) -> None:
        self.stored = 0
        self.goes_on = goes_on
        self._publisher = server.write_path
        self.topic = server.broker.topic(name)
        if isinstance(self.topic.log, DiskLog):  # not of an ephemeral topic
            self.topic.log.rotate()

    def publish(self, size: int = 1) -> None:
        """Publish a message."""
        self._publisher.submit(self.topic, [Publication([pack_messages([b"x" * size])])], self._complete)

    def _complete(self, error: PublishRefused | None) -> None:
        assert error is None
        self.stored += 1
        if self.goes_on:
            self.publish()


class Running:
    """A broker's publisher, and its clients."""

    def __init__(self, server: Server, nursery: trio.Nursery) -> None:
        self.server = server
        self.write_path = server.write_path
        self.nursery = nursery
        self.busy: list[Busy] = []

    def add(self, name: str, *, goes_on: bool = False) -> Busy:
        """Add a client that publishes to its own topic; with `goes_on` until the end."""
        self.busy.append(Busy(self.server, name, goes_on=goes_on))
        return self.busy[-1]

    @property
    def threads(self) -> int:
        """Return the number of commit threads: each has a task that waits for it."""
        return len(self.nursery.child_tasks)

    @asynccontextmanager
    async def rounds(self) -> AsyncIterator[Callable[[], int]]:
        """Run poller rounds in which clients always have data; yields the number of rounds."""
        count = 0
        poller = self.server.poller

        def again() -> None:
            nonlocal count
            count += 1
            if not polling.cancel_scope.cancel_called:
                poller.call_soon(again)

        async with trio.open_nursery() as polling:
            polling.start_soon(self.server.scheduler.run)
            again()
            await until(lambda: count > 10)
            yield lambda: count
            polling.cancel_scope.cancel()


@asynccontextmanager
async def running_write_path(
    folder: Path, sync: Sync = "always", files: Files | None = None, **pacing: Any
) -> AsyncIterator[Running]:
    """Run a publisher, which is closed at the end unless its nursery is cancelled."""
    data_folder = DataFolder(folder / "d", files)
    options = BrokerOptions(data_path=folder / "d", sync=sync, pacing=Pacing(**pacing))
    async with trio.open_nursery() as nursery:
        running = Running(Server(options, data_folder, nursery), nursery)
        try:
            yield running
        finally:
            for one in running.busy:
                one.goes_on = False
        if not nursery.cancel_scope.cancel_called:
            await running.write_path.close()
    for one in running.busy:
        one.topic.log.close()
    data_folder.close()


async def test_user_of_a_log_gets_it_in_spite_of_waiting_publishers(tmp_path: Path) -> None:
    async with running_write_path(tmp_path, wal_file_s=0.1) as running:
        busy = [running.add(f"t{n}", goes_on=True) for n in range(5)]
        for one in busy:
            one.publish()
            one.publish()
        with trio.fail_after(PATIENCE_S):
            for one in busy:
                assert await running.write_path.rotate(one.topic)
            with trio.move_on_after(0):
                await running.write_path.rotate(busy[0].topic)
        stored = [one.stored for one in busy]
        await until(lambda: all(one.stored > before for one, before in zip(busy, stored, strict=True)))


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_messages_consumed_at_once_make_room_for_the_next_publish(tmp_path: Path, sync: str) -> None:
    options: dict[str, Any] = {"sync": sync, "topic_defaults": TopicSettings(max_messages=1)}
    async with (
        running_broker(tmp_path / "d", **options) as bound,
        connected(bound.tcp_address) as client,
        connected(bound.tcp_address) as consumer,
    ):
        await consumer.subscribe("t", "c", ready_count=100)
        await client.publish("t", b"makes the segment")
        await client.send(pub("t", b"1") + b"NOP\n" + pub("t", b"2") + b"NOP\n" + pub("t", b"3"))
        for _ in range(3):
            await client.ok()


async def test_threads_exit_when_their_nursery_is_cancelled(tmp_path: Path) -> None:
    files = TopicsFiles()
    async with running_write_path(tmp_path, files=files) as running:
        idle, committing = running.add("t1"), running.add("t2")
        for one in (idle, committing):
            one.publish()
        await until(lambda: bool(idle.stored and committing.stored))
        files.gates["t2"] = threading.Event()
        committing.publish()
        await settle()
        running.nursery.cancel_scope.cancel()
        await trio.lowlevel.cancel_shielded_checkpoint()
        files.gates["t2"].set()
    assert committing.topic.log.next_sequence == 2


@pytest.mark.parametrize("coalesce_s", [-1.0, 1000.0])
async def test_commit_waits_for_a_pause_for_a_limited_time(tmp_path: Path, coalesce_s: float) -> None:
    async with running_write_path(tmp_path, coalesce_s=coalesce_s, turn_s=-1) as running:
        one = running.add("t")
        async with running.rounds() as count:
            running.server.poller.call_soon(one.publish)
            later = count() + 1000
            if coalesce_s < 0:
                await until(lambda: bool(one.stored))
            else:
                await until(lambda: count() > later)
                assert (one.stored, running.threads) == (0, 0)


async def test_publish_is_stored_if_the_nursery_is_cancelled(tmp_path: Path) -> None:
    async with running_write_path(tmp_path) as running:
        one = running.add("t")
        running.nursery.cancel_scope.cancel()
        one.publish()
        with trio.CancelScope(shield=True), trio.fail_after(PATIENCE_S):
            await running.write_path.close()
    assert one.stored == 1


class RecordedWrites(FailingFiles):
    """Records each write of messages among other events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        super().write(fd, offset, parts)
        self.events.append("written")


def _submit_three(running: Running, files: RecordedWrites, topic: Topic, size: int) -> None:
    """Submit three publications with a body of `size` bytes each, and record their results with the writes."""

    def complete(number: int, error: PublishRefused | None) -> None:
        files.events.append(f"{number} {'OK' if error is None else 'refused'}")

    files.events.clear()
    for number in range(3):
        messages = pack_messages([bytes([number]) * size])
        running.write_path.submit(topic, [Publication([messages])], partial(complete, number))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1024, ["written", "0 OK", "1 OK", "2 OK"]),
        (2**20, ["written", "0 OK", "written", "1 OK", "written", "2 OK"]),
    ],
    ids=["small", "large"],
)
async def test_large_publication_is_acknowledged_before_the_next_is_written(
    tmp_path: Path, size: int, expected: list[str]
) -> None:
    files = RecordedWrites()
    async with running_write_path(tmp_path, "interval", files, turn_s=PATIENCE_S) as running:
        topic = running.add("t").topic
        _submit_three(running, files, topic, size)
        await running.write_path.until_idle(topic)
        assert files.events == expected
        stored = [body for record in topic.log.read(0, 4 * 2**20) for body in record.messages.bodies()]
        assert stored == [bytes([number]) * size for number in range(3)]


async def test_large_publications_of_a_round_share_a_sync(tmp_path: Path) -> None:
    files = Counted()
    async with running_write_path(tmp_path, "always", files, turn_s=PATIENCE_S) as running:
        one = running.add("t")
        files.syncs = 0
        for _ in range(3):
            one.publish(2**20)
        await running.write_path.until_idle(one.topic)
        assert (one.stored, files.syncs) == (3, 1)


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_large_publications_wait_for_a_new_file(tmp_path: Path, sync: Sync) -> None:
    """All of them are refused if it cannot be created; otherwise they keep their order, also over several files."""
    files = RecordedWrites()
    async with running_write_path(tmp_path, sync, files) as running:
        topic = running.server.broker.topic("t")
        files.sync_fails = True
        _submit_three(running, files, topic, 2**20)
        await running.write_path.until_idle(topic)
        assert [each for each in files.events if each != "written"] == ["0 refused", "1 refused", "2 refused"]
        files.sync_fails = False
        _submit_three(running, files, topic, 2**20)
        await running.write_path.until_idle(topic)
        assert [each for each in files.events if each != "written"] == ["0 OK", "1 OK", "2 OK"]
        assert topic.log.next_sequence == 3
        topic.log.close()


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_deleted_topic_is_released(tmp_path: Path, sync: Sync) -> None:
    """Also by waiting threads."""

    def topics() -> int:
        gc.collect()
        return sum(isinstance(each, Topic) for each in gc.get_objects())

    before = topics()
    async with running_write_path(tmp_path, sync) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(running.busy[0].stored) and not running.write_path.is_busy)
        running.busy.clear()
        assert topics() > before
        await running.server.topics.delete_topic(one.topic)
        del one
        await until(lambda: topics() == before)


async def test_messages_collected_while_a_log_is_in_use_are_written_after_it(tmp_path: Path) -> None:
    files = TopicsFiles()
    async with running_write_path(tmp_path, files=files) as running:
        one = running.add("t")
        files.gates["t"] = threading.Event()
        one.publish()
        await until(lambda: files.syncing == ["t"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.write_path.rotate, one.topic)
            await settle()
            one.publish()
            await settle()
            files.gates["t"].set()
        await until(lambda: one.stored == 2)
        assert [file.base_sequence for file in one.topic.log.files] == [0, 1]


@pytest.mark.parametrize("is_turn", [False, True])
async def test_cancelled_user_of_a_log_does_not_block_others(tmp_path: Path, is_turn: bool) -> None:
    """Cancelled before its turn, or at its turn."""
    files = TopicsFiles()
    async with running_write_path(tmp_path, files=files) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(one.stored))
        files.gates["t"] = threading.Event()
        scope = trio.CancelScope()

        async def first() -> None:
            assert await running.write_path.rotate(one.topic)
            scope.cancel()  # the next one may continue, but has not run yet

        async def second() -> None:
            with scope:
                await running.write_path.rotate(one.topic)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await until(lambda: files.syncing == ["t"])
            nursery.start_soon(second)
            await settle()
            if not is_turn:
                scope.cancel()
                await settle()
            files.gates["t"].set()
        assert scope.cancelled_caught
        one.publish()
        await until(lambda: one.stored == 2)


@pytest.mark.parametrize("fails", ["nothing", "sync"])
async def test_publishes_after_a_failed_sync_fail_with_it(tmp_path: Path, fails: str) -> None:
    """Later publishes use their place in the log."""
    files = TopicsFiles()
    async with running_write_path(tmp_path, files=files) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(one.stored))
        errors: list[PublishRefused | None] = []

        def publish(body: bytes) -> None:
            running.write_path.submit(one.topic, [Publication([pack_messages([body])])], errors.append)

        files.gates["t"] = threading.Event()
        publish(b"synced")
        await until(lambda: files.syncing == ["t"])
        if fails == "sync":
            files.failing = {"t"}
        publish(b"written")
        publish(b"written, too")
        await settle()
        files.gates["t"].set()
        await until(lambda: len(errors) == 3)
        if fails == "sync":
            assert [error is None for error in errors] == [True, False, False]
            assert one.topic.log.written_sequence == one.topic.log.next_sequence == 2
        else:
            assert errors == [None] * 3
        files.failing = set()
        publish(b"later")
        await until(lambda: len(errors) == 4)
        assert errors[3] is None
        kept = (
            [b"x", b"synced", b"later"]
            if fails == "sync"
            else [b"x", b"synced", b"written", b"written, too", b"later"]
        )
        bodies = [body for record in one.topic.log.read(0) for body in record.messages.bodies()]
        assert bodies == kept
        assert one.topic.end == len(kept)


class FailsLater(threading.Event):
    """A gate of `TopicsFiles`: the sync that waits for it fails."""

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        raise OSError(errno.EIO, "broken")


class HeldRewrites(TopicsFiles):
    """Threads wait before they rewrite unsynced data after a failed sync."""

    def __init__(self) -> None:
        super().__init__()
        self.rewriting = threading.Event()
        self.go_on = threading.Event()
        self._event_loop = threading.get_ident()
        self.holds = False

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if self.holds and threading.get_ident() != self._event_loop:
            self.rewriting.set()
            assert self.go_on.wait(PATIENCE_S)
        super().write(fd, offset, parts)


async def test_log_is_not_rewritten_before_a_failed_sync_is_undone(
    tmp_path: Path,
) -> None:
    """A thread that continued by itself would write refused data over later messages."""
    files = HeldRewrites()
    pacing: dict[str, Any] = {"min_commit_threads": 1, "max_commit_threads": 1}
    async with running_write_path(tmp_path, files=files, **pacing) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(one.stored) and not running.write_path.is_busy)
        errors: list[PublishRefused | None] = []

        def publish(body: bytes) -> None:
            running.write_path.submit(one.topic, [Publication([pack_messages([body])])], errors.append)

        gate = files.gates["t"] = FailsLater()
        publish(b"fails")
        await until(lambda: files.syncing == ["t"])
        publish(b"comes after it")
        await settle()
        files.holds = True
        del files.gates["t"]
        gate.set()
        while not (files.rewriting.is_set() or any(map(is_idle, threading.enumerate()))):
            pass  # the event loop does not know of the failure yet
        await until(lambda: len(errors) == 2)
        assert None not in errors
        publish(b"stored")
        await until(lambda: one.topic.log.written_sequence == 2)
        files.go_on.set()
        await until(lambda: len(errors) == 3)
        assert errors[2] is None
    log = DiskLog(tmp_path / "d" / "topics" / "t.topic")
    assert [body for record in log.read(0) for body in record.messages.bodies()] == [b"x", b"stored"]
    log.close()


class NotedSyncs(TopicsFiles):
    """Notes the names of the files that are synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)


async def test_refused_messages_are_removed_durably_before_a_new_file_begins(tmp_path: Path) -> None:
    """No start recovers the file before the last one: a power cut could bring them back."""
    files = NotedSyncs()
    async with running_write_path(tmp_path, files=files, cut_retry_s=1e6, cut_retry_max_s=1e6) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(one.stored))
        errors: list[PublishRefused | None] = []
        files.failing = {"t"}
        running.write_path.submit(one.topic, [Publication([pack_messages([b"refused"])])], errors.append)
        await until(lambda: len(errors) == 1 and not running.write_path.is_busy)
        assert one.topic.log.has_unsynced_cut
        files.failing = set()
        files.synced.clear()
        assert await running.write_path.rotate(one.topic)
        first, *_ = sorted(each.name for each in (tmp_path / "d" / "topics" / "t.topic").glob("*.log"))
        assert files.synced[0] == first


async def test_file_is_synced_before_the_next_one_begins(tmp_path: Path) -> None:
    files = NotedSyncs()
    async with running_write_path(tmp_path, sync="interval", files=files) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(one.stored))
        assert one.topic.log.unsynced_bytes
        files.synced.clear()
        assert await running.write_path.rotate(one.topic)
        first, last = sorted(each.name for each in (tmp_path / "d" / "topics" / "t.topic").glob("*.log"))
        assert files.synced[:2] == [first, last]


async def test_written_messages_are_synced_at_the_close(tmp_path: Path) -> None:
    files = Counted()
    async with running_write_path(tmp_path, "interval", files) as running:
        one = running.add("t")
        one.publish()  # creates the segment
        await until(lambda: not running.write_path.is_busy)
        one.publish()
        files.syncs = 0
        await running.write_path.close()
        assert (one.stored, files.syncs) == (2, 1)


async def test_collected_messages_are_stored_at_the_close(tmp_path: Path) -> None:
    async with running_write_path(tmp_path, coalesce_s=1000, turn_s=-1) as running:
        one = running.add("t")
        async with running.rounds():
            running.server.poller.call_soon(one.publish)
            await until(lambda: running.write_path.is_busy)
            assert not running.threads
            with trio.fail_after(PATIENCE_S):
                await running.write_path.close()
        assert one.stored == 1


async def test_remaining_messages_of_a_turn_are_written_in_the_next(tmp_path: Path) -> None:
    async with running_write_path(tmp_path, "interval", turn_s=-1) as running:
        busy = running.add("busy#ephemeral", goes_on=True)
        busy.publish()  # and again, when that is written
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert 5 < busy.stored <= 20
        busy.goes_on = False
        await settle()


async def test_failed_sync_is_reported_although_the_previous_one_succeeded(tmp_path: Path) -> None:
    files = TopicsFiles()
    async with running_write_path(tmp_path, "interval", files) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: one.stored == 1)
        told: dict[str, bool] = {}

        async def sync(which: str) -> None:
            told[which] = await running.write_path.sync(one.topic)

        gate = files.gates["t"] = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync, "first")
            await until(lambda: files.syncing == ["t"])
            one.publish()
            await until(lambda: one.stored == 2)
            nursery.start_soon(sync, "second")  # needs another sync
            await settle()
            files.failing = {"t"}  # but not the running one
            gate.set()
        assert told == {"first": True, "second": False}
        assert not await running.write_path.sync(one.topic)
        files.failing = set()
        assert await running.write_path.sync(one.topic)


async def test_publisher_is_answered_only_after_its_own_sync(tmp_path: Path) -> None:
    files = TopicsFiles()
    async with running_write_path(tmp_path, "interval", files) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: one.stored == 1)
        told: list[bool] = []

        async def sync() -> None:
            told.append(await running.write_path.sync(one.topic))

        first = files.gates["t"] = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync)
            await until(lambda: files.syncing == ["t"])
            one.publish()
            await until(lambda: one.stored == 2)
            nursery.start_soon(sync)
            await settle()
            second = files.gates["t"] = threading.Event()
            first.set()
            await until(lambda: len(told) == 1 and files.syncing == ["t"])
            nursery.start_soon(sync)  # its messages are being synced
            await settle()
            before, files.gates = told.copy(), {}
            second.set()
        assert (before, told) == ([True], [True] * 3)


async def test_synced_messages_are_not_refused_because_of_a_later_failure(tmp_path: Path) -> None:
    files = TopicsFiles()
    pacing: dict[str, Any] = {"min_commit_threads": 1, "max_commit_threads": 1, "wal_file_s": 0.1}
    async with running_write_path(tmp_path, files=files, **pacing) as running:
        first, one, slow = everybody = [running.add(name) for name in ("t1", "t2", "t3")]
        for each in everybody:
            each.publish()
        await until(lambda: all(each.stored == 1 for each in everybody) and not running.write_path.is_busy)
        errors: list[PublishRefused | None] = []

        def publish() -> None:
            publication = Publication([pack_messages([b"x"])])
            running.write_path.submit(one.topic, [publication], errors.append)

        files.gates = {"t1": threading.Event(), "t3": threading.Event()}
        first.publish()
        await until(lambda: files.syncing == ["t1"])
        publish()
        slow.publish()
        await settle()
        files.gates["t1"].set()  # now the thread has both others
        await until(lambda: files.syncing == ["t3"])  # one is synced, and not reported yet
        files.failing = {"t2"}
        publish()
        await settle()
        files.gates["t3"].set()
        await until(lambda: len(errors) == 2)
        assert [error is None for error in errors] == [True, False]


async def test_sync_request_does_not_get_the_failure_of_the_previous_one(tmp_path: Path) -> None:
    files = TopicsFiles()
    async with running_write_path(tmp_path, "interval", files) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: one.stored == 1)
        told: dict[str, bool] = {}

        async def sync(which: str) -> None:
            told[which] = await running.write_path.sync(one.topic)

        gate = files.gates["t"] = FailsLater()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync, "first")
            await until(lambda: files.syncing == ["t"])
            nursery.start_soon(sync, "second")
            await settle()
            files.gates = {}
            gate.set()
        assert told == {"first": False, "second": True}


async def test_checkpoint_leaves_an_unused_new_topic_to_its_request(tmp_path: Path) -> None:
    """A saved one would not be forgotten if the request is refused."""
    files = FailingFiles()
    async with running_write_path(tmp_path, files=files) as running, trio.open_nursery() as nursery:
        server, topics = running.server, tmp_path / "d" / "topics"
        nursery.start_soon(server.checkpointer.save_on_schedule, 0.0)
        topic = await server.topics.until_publishable("t")
        for name in ("a", "b", "c"):  # each is saved by a checkpoint, one after the other
            server.broker.topic(name).add_channel("c")
            await until((topics / f"{name}.topic" / "state.json").exists)
        assert not (topics / "t.topic" / "state.json").exists()
        files.sync_fails = True
        with pytest.raises(PublishRefused):
            await server.write_path.publish(topic, [Publication([pack_messages([b"x"])])])
        await until(lambda: "t" not in server.broker.topics)
        assert not (topics / "t.topic").exists()
        nursery.cancel_scope.cancel()
