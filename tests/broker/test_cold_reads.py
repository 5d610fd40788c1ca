"""Tests for messages that are only on disk: only the consumers that need them wait for the disk."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.state import SECOND, TIMESTAMP, Fixture, decode, next_record
from broker.support import PATIENCE_S, RawClient, Received, connected, pub, running_broker, settle, until
from faults.scenario import http
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.state.dispatcher import Dispatcher
from trio_nsq.broker.state.message_store import MessageStore
from trio_nsq.broker.state.read_ahead import ReadAhead
from trio_nsq.log import DiskLog, Files, ReadWouldWaitError
from trio_nsq.protocol import pack_messages


class ColdFiles(Files):
    """Nothing is in the page cache. While `held`, reads of segments wait for the disk."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails = 0
        self.is_defective = False
        self._go_on = threading.Event()
        self._go_on.set()

    def read_cached(self, fd: int, size: int, offset: int) -> bytes | None:
        return None

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".log":
            assert threading.current_thread() is not threading.main_thread() or self._go_on.is_set()
            self.reads += 1
            assert self._go_on.wait(PATIENCE_S)
            if self.is_defective:
                self.is_defective = False
                raise ZeroDivisionError("a defect")
            if self.fails:
                self.fails -= 1
                raise OSError(5, "Input/output error")
        return super().read(fd, size, offset)

    def release(self) -> None:
        """Let reads continue."""
        self._go_on.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold reads until the end of this block."""
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()


@pytest.fixture
def files() -> Iterator[ColdFiles]:
    made = ColdFiles()
    yield made
    made.release()


async def store(path: Path, topic: str = "a", count: int = 100, size: int = 0) -> None:
    """Store a topic with a channel and messages that are not in the broker's memory."""
    async with running_broker(path) as bound, connected(bound.tcp_address) as client:
        await client.subscribe(topic, "c")
        for start in range(0, count, 10):
            await client.publish(
                topic, *[b"%d" % n + b"." * size for n in range(start, min(start + 10, count))]
            )


async def ask(bound: BoundAddresses, method: str, path: str, body: bytes = b"", **query: str) -> None:
    status, told = await http(bound.http_address or "", method, path, body, **query)
    assert status == 200, told


async def receive(client: RawClient, count: int) -> list[int]:
    messages = [await client.message() for _ in range(count)]
    return [int(message.body.rstrip(b".")) for message in messages]


async def test_slow_disk_delays_only_its_consumer(tmp_path: Path, files: ColdFiles) -> None:
    await store(tmp_path)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        async with connected(bound.tcp_address) as other:
            await other.subscribe("b", "c", 10)
            with files.held():
                before = files.reads
                await consumer.subscribe("a", "c", 100)
                await until(lambda: files.reads > before)
                for n in range(10):
                    await other.publish("b", b"%d" % n)
                    assert (await other.message()).body == b"%d" % n
                await other.publish("a", b"100")
        assert await receive(consumer, 100) == list(range(100))


async def test_requeued_messages_are_read_in_a_thread_too(tmp_path: Path, files: ColdFiles) -> None:
    await store(tmp_path, size=10_000)
    async with (
        running_broker(tmp_path, files=files, cache_bytes=0) as bound,
        connected(bound.tcp_address) as consumer,
        connected(bound.tcp_address) as other,
    ):
        await consumer.subscribe("a", "c", 100)
        messages = [await consumer.message() for _ in range(100)]
        with files.held():
            before = files.reads
            for message in messages[::7]:
                await consumer.send(b"REQ %s 0\n" % message.id)
            await until(lambda: files.reads > before)
            await other.publish("b", b"in between")
        again = await receive(consumer, len(messages[::7]))
        assert sorted(again) == list(range(0, 100, 7))
        await consumer.nothing_more()


async def test_endless_requeues_do_not_starve_messages_that_must_be_read(
    tmp_path: Path, files: ColdFiles
) -> None:
    await store(tmp_path, count=200, size=10_000)
    seen: set[int] = set()

    async def requeue_until(condition: Callable[[], bool]) -> None:
        """Requeue the first message each time, and finish the others."""
        with trio.fail_after(PATIENCE_S):
            while not condition():
                message = await consumer.message()
                seen.add(number := int(message.body.rstrip(b".")))
                await consumer.send((b"FIN %s\n" if number else b"REQ %s 0\n") % message.id)

    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        await consumer.subscribe("a", "c", 1)
        await requeue_until(lambda: len(seen) == 2)
        with files.held():
            before = files.reads
            await requeue_until(lambda: files.reads > before)
            for _ in range(10):  # and that read delays no other client
                await requeue_until(iter([False, True]).__next__)
            assert files.reads == before + 1
        await requeue_until(lambda: len(seen) == 200)


async def test_endless_publishes_do_not_starve_messages_that_must_be_read(
    tmp_path: Path, files: ColdFiles
) -> None:
    """Here a requeued message that is no longer in memory."""
    published = 0

    async def exchange() -> Received:
        """Keep new messages in memory all the time."""
        nonlocal published
        await consumer.publish("a", b"%d" % published)
        published += 1
        message = await consumer.message()
        await consumer.send(b"FIN %s\n" % message.id)
        return message

    async with (
        running_broker(tmp_path, files=files, mem_queue_size=10) as bound,
        connected(bound.tcp_address) as consumer,
    ):
        await consumer.subscribe("a", "c", 1)
        await consumer.publish("a", b"cold")
        cold = await consumer.message()
        await consumer.send(b"RDY 2\n")
        for _ in range(50):
            await exchange()
        await consumer.send(b"RDY 1\n")
        for _ in range(3):
            await consumer.publish("a", b"ahead")
        with files.held():
            before = files.reads
            await consumer.send(b"REQ %s 0\n" % cold.id)
            with trio.fail_after(PATIENCE_S):
                while files.reads == before:
                    await exchange()
            for _ in range(10):
                await exchange()
            assert files.reads == before + 1
        with trio.fail_after(PATIENCE_S):
            while (await exchange()).id != cold.id:
                pass


async def test_dead_letters_are_read_in_a_thread_too(tmp_path: Path, files: ColdFiles) -> None:
    await store(tmp_path, size=10_000)
    async with (
        running_broker(tmp_path, files=files, cache_bytes=0) as bound,
        connected(bound.tcp_address) as consumer,
        connected(bound.tcp_address) as other,
    ):
        settings = b'{"max_attempts": 1, "dead_letter_topic": "dead"}'
        assert (
            await http(bound.http_address or "", "PUT", "/channel/settings", settings, topic="a", channel="c")
        )[0] == 200
        await consumer.subscribe("a", "c", 100)
        messages = [await consumer.message() for _ in range(100)]
        with files.held():
            before = files.reads
            for message in messages[::9]:
                await consumer.send(b"REQ %s 0\n" % message.id)
            await until(lambda: files.reads > before)
            await other.publish("b", b"in between")
        await other.subscribe("dead", "dead-letters", 100)
        assert sorted(await receive(other, len(messages[::9]))) == list(range(0, 100, 9))


async def test_channels_at_the_same_position_share_a_read(tmp_path: Path, files: ColdFiles) -> None:
    await store(tmp_path)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as first:
        async with connected(bound.tcp_address) as second:
            await second.subscribe("a", "c")
            with files.held():
                before = files.reads
                await first.subscribe("a", "c", 30)
                await second.send(b"RDY 70\n")
                await until(lambda: files.reads > before)
                await settle()
            received = await receive(first, 30) + await receive(second, 70)
        assert sorted(received) == list(range(100))


async def test_backlog_larger_than_memory_is_delivered_completely(tmp_path: Path, files: ColdFiles) -> None:
    await store(tmp_path, count=2000, size=1000)
    for cache_bytes in (0, 100_000):
        async with (
            running_broker(tmp_path, files=files, cache_bytes=cache_bytes) as bound,
            connected(bound.tcp_address) as consumer,
        ):
            await consumer.subscribe("a", "c", 2000)
            assert await receive(consumer, 2000) == list(range(2000))


async def test_channel_seeks_during_a_read(tmp_path: Path, files: ColdFiles) -> None:
    await store(tmp_path)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        with files.held():
            before = files.reads
            await consumer.subscribe("a", "c", 100)
            await until(lambda: files.reads > before)
            assert (await http(bound.http_address or "", "POST", "/channel/empty", topic="a", channel="c"))[
                0
            ] == 200
        await consumer.publish("a", b"100")
        assert await receive(consumer, 1) == [100]
        await consumer.nothing_more()


async def test_topic_is_deleted_during_a_read(tmp_path: Path, files: ColdFiles) -> None:
    await store(tmp_path)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        with files.held():
            before = files.reads
            await consumer.subscribe("a", "c", 100)
            await until(lambda: files.reads > before)
            await ask(bound, "POST", "/topic/delete", topic="a")
            assert await consumer.frame() is None
        async with connected(bound.tcp_address) as client:
            await client.publish("a", b"0")
            await client.subscribe("a", "c", 1)
            assert await receive(client, 1) == [0]


async def test_failed_read_is_retried(
    tmp_path: Path, files: ColdFiles, caplog: pytest.LogCaptureFixture
) -> None:
    await store(tmp_path)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        files.fails = 2
        await consumer.subscribe("a", "c", 100)
        assert await receive(consumer, 100) == list(range(100))
    told = [record.getMessage() for record in caplog.records if "a/c: cannot read" in record.getMessage()]
    assert len(told) == 1


async def test_second_failure_is_logged_again(
    tmp_path: Path, files: ColdFiles, caplog: pytest.LogCaptureFixture
) -> None:
    await store(tmp_path)
    async with (
        running_broker(tmp_path, files=files, cache_bytes=0, mem_queue_size=0) as bound,
        connected(bound.tcp_address) as consumer,
    ):
        files.fails = 1
        await consumer.subscribe("a", "c", 100)
        assert await receive(consumer, 100) == list(range(100))
        await consumer.send(b"RDY 0\n")
        await consumer.nothing_more()
        await ask(bound, "POST", "/channel/seek", topic="a", channel="c", to="0")
        files.fails = 1
        await consumer.send(b"RDY 100\n")
        assert await receive(consumer, 100) == list(range(100))
    told = [record.getMessage() for record in caplog.records if "a/c: cannot read" in record.getMessage()]
    assert len(told) == 2


async def test_failing_disk_is_retried_after_a_pause_and_logged_once(
    tmp_path: Path, files: ColdFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while other messages are delivered all the time."""
    await store(tmp_path, size=10_000)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        await consumer.subscribe("a", "c", 1)
        files.fails = 2
        with trio.fail_after(PATIENCE_S):
            number, rounds = 0, 0
            while number < 99:
                message = await consumer.message()
                number, rounds = int(message.body.rstrip(b".")), rounds + 1
                await consumer.send((b"FIN %s\n" if number else b"REQ %s 0\n") % message.id)
    assert rounds > 110
    told = [record.getMessage() for record in caplog.records if "a/c: cannot read" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (MessageStore, "read"),
        pytest.param(MessageStore, "remember_read", marks=pytest.mark.uncompiled),
        pytest.param(ReadAhead, "take", marks=pytest.mark.uncompiled),
        pytest.param(Dispatcher, "dispatch", marks=pytest.mark.uncompiled),
    ],
)
async def test_exception_during_a_read_ends_nothing(
    tmp_path: Path,
    files: ColdFiles,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    method: str,
) -> None:
    await store(tmp_path)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        works = getattr(owner, method)
        with files.held():
            before = files.reads
            await consumer.subscribe("a", "c", 100)
            await until(lambda: files.reads > before)
            if method == "read":
                files.is_defective = True
            failures = iter([ZeroDivisionError("a defect")])

            def fail_once(*args: Any) -> Any:
                for error in failures:
                    raise error
                return works(*args)

            if method != "read":
                monkeypatch.setattr(owner, method, fail_once)
        assert await receive(consumer, 100) == list(range(100))
    assert "a defect" in caplog.text


async def test_damage_up_to_the_end_is_skipped(tmp_path: Path, files: ColdFiles) -> None:
    """Messages published during the search are kept."""
    await store(tmp_path, count=20)
    async with running_broker(tmp_path, files=files) as bound, connected(bound.tcp_address) as consumer:
        [segment] = (tmp_path / "topics" / "a.topic").glob("*.log")
        content = bytearray(segment.read_bytes())
        for at in range(100, len(content), 20):
            content[at] ^= 1
        with segment.open("r+b") as file:
            file.write(content)
        with files.held():
            before = files.reads
            await consumer.subscribe("a", "c", 100)
            await until(lambda: files.reads > before)
            await consumer.send(pub("a", b"20"))
            await consumer.ok()
        assert await receive(consumer, 1) == [20]
        await consumer.nothing_more()


def test_expired_messages_are_skipped_without_a_read(tmp_path: Path, files: ColdFiles) -> None:
    fixture = Fixture(DiskLog(tmp_path, files=files), mem_queue_size=0, cache_bytes=0)
    fixture.now_ns = TIMESTAMP + 10 * SECOND
    fixture.topic.store.waits_for_disk = False
    for _ in range(1000):
        fixture.publish(b"old" + b"." * 10_000)
    recent = next_record(fixture.topic, pack_messages([b"recent"]), fixture.ids.take(1))
    fixture.log.append([replace(recent, timestamp_ns=fixture.now_ns)], sync=False)
    fixture.topic.accept(fixture.log.read(1000))
    channel = fixture.channel()
    fixture.topic.configure({"ttl_ms": 5000})
    fixture.subscriber(ready=100)
    files.reads = 0
    received: list[bytes] = []
    for _ in range(10):
        try:
            for _, frames in channel.dispatcher.dispatch(fixture.now_ns):
                received += [message.body for message in decode(frames)]
        except ReadWouldWaitError:
            channel.read_ahead.take(fixture.topic.store.read(channel.read_ahead.wanted()))
    assert received == [b"recent"]
    assert files.reads < 40
    assert (channel.messages.expired_count, channel.depth) == (1000, 0)


def test_messages_read_for_disconnected_consumers_are_dropped(tmp_path: Path, files: ColdFiles) -> None:
    fixture = Fixture(DiskLog(tmp_path, files=files), mem_queue_size=0, cache_bytes=0)
    fixture.topic.store.waits_for_disk = False
    for _ in range(3):
        fixture.publish(b"m" * 10_000)
    channel = fixture.channel()
    subscriber = fixture.subscriber(ready=1)
    with pytest.raises(ReadWouldWaitError):
        channel.dispatcher.dispatch(fixture.now_ns)
    found = fixture.topic.store.read(channel.read_ahead.wanted())
    assert found.ahead
    subscriber.leave()
    channel.read_ahead.take(found)
    fixture.subscriber(ready=1)
    with pytest.raises(ReadWouldWaitError):
        channel.dispatcher.dispatch(fixture.now_ns)
