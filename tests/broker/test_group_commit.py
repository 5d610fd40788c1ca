"""Group commit: publishes of several clients share writes, syncs and threads."""

import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.api import running_api
from broker.support import HeldFiles, TopicsFiles, connected, pub, running_broker, settle, threads_done, until
from broker.write_path import Counted
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.log import DiskLog


class HeldAndCounted(Counted, HeldFiles):
    """Counts, and holds operations."""


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


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_publishers_are_answered_before_the_message_is_distributed(tmp_path: Path, sync: str) -> None:
    async with running_broker(tmp_path / "d", sync=sync) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=10)
            await client.send(pub("t", b"body"))
            assert await client.frame() == (0, b"OK")
            assert (await client.message()).body == b"body"


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


async def test_cache_of_many_topics_is_limited(tmp_path: Path) -> None:
    """Small messages are cached together: the entry that one is added to grows."""
    async with running_api(tmp_path / "d", sync="interval", cache_bytes=64_000) as api:
        topics = [f"t{n}" for n in range(20)]
        for topic in topics * 3:
            await api.tcp.publish(topic, bytes(1000))
        cache = (await api.get("/debug/memory")).json()["cache"]
        assert 60_000 < cache["bytes"] <= 64_000
        assert cache["bytes"] == sum(topic["bytes"] for topic in cache["topics"].values())


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
