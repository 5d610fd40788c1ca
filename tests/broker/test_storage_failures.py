"""Failures of the disk, and bugs, while messages are stored or read: who is affected, and what is tried again."""

import errno
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.api import OK, running_api
from broker.support import FailingFiles, connected, identify, pub, running_broker, settle, threads_done
from broker.write_path import Counted
from trio_nsq.broker.state.dispatcher import Dispatcher, Grant
from trio_nsq.log import Files


class FailingAndCounted(Counted, FailingFiles):
    """Counts, and fails operations."""


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
