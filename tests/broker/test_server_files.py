"""Tests that creating and deleting files delays only those who need them."""

from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.api import running_api
from broker.support import HeldFiles, RawClient, connected, mpub, pub, running_broker, settle, until

BODY = b"x" * 600


class HeldUnlink(HeldFiles):
    """`unlink` can be held, too."""

    def unlink(self, path: Path) -> None:
        self._pass("unlink")
        super().unlink(path)


async def finish(client: RawClient, count: int) -> list[bytes]:
    """Receive this many messages and finish them."""
    bodies = []
    for _ in range(count):
        message = await client.message()
        await client.send(b"FIN " + message.id + b"\n")
        bodies.append(message.body)
    return bodies


async def test_new_file_with_sync_interval_delays_only_its_topic(tmp_path: Path) -> None:
    files = HeldFiles()
    options: dict[str, Any] = {"files": files, "sync": "interval", "max_bytes_per_file": 1000}
    async with running_api(tmp_path / "d", **options) as api:
        await api.tcp.publish("t", BODY)
        await api.tcp.publish("other", b"makes the topic")
        files.hold("sync")
        await api.tcp.send(pub("t", BODY) + pub("t", b"1"))
        await files.reached()
        address = "%s:%d" % api.tcp.stream.socket.getpeername()[:2]
        async with connected(address) as second:
            await second.send(pub("t", b"2") + mpub("t", b"3", b"4"))
            await settle()
            async with connected(address) as third:
                await third.publish("other", b"is not held up")
            assert await api.depth("t") == 1
            files.release()
            await api.tcp.ok()
            await api.tcp.ok()
            await second.ok()
            await second.ok()
            assert len(list((tmp_path / "d" / "topics" / "t.topic").glob("*.log"))) == 2
            await second.subscribe("t", "c", ready_count=10)
            assert await finish(second, 6) == [BODY, BODY, b"1", b"2", b"3", b"4"]
            await second.publish("t", b"5")
            assert await finish(second, 1) == [b"5"]


async def test_publishes_for_a_file_that_cannot_be_created_are_refused(tmp_path: Path) -> None:
    class Failing(HeldFiles):
        fails = False

        def create(self, path: Path) -> int:
            if self.fails:
                raise OSError(28, "No space left on device")
            return super().create(path)

    files = Failing()
    options: dict[str, Any] = {"files": files, "sync": "interval", "max_bytes_per_file": 1000}
    async with running_broker(tmp_path / "d", **options) as bound, connected(bound.tcp_address) as client:
        await client.publish("t", BODY)
        files.fails = True
        async with connected(bound.tcp_address) as refused:
            await refused.send(pub("t", BODY))
            assert (await refused.error()).endswith("No space left on device")
        files.fails = False
        await client.publish("t", b"after")
        await client.subscribe("t", "c", ready_count=10)
        assert await finish(client, 2) == [BODY, b"after"]


async def test_deleting_old_files_delays_nobody(tmp_path: Path) -> None:
    files = HeldUnlink()
    options: dict[str, Any] = {"files": files, "max_bytes_per_file": 1000, "checkpoint_interval_ms": 10}
    async with running_broker(tmp_path / "d", **options) as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        for _ in range(3):
            await client.publish("t", BODY)
        files.hold("unlink")
        await finish(client, 3)
        await files.reached()
        await client.publish("t", b"goes on")
        assert await finish(client, 1) == [b"goes on"]
        files.release()
        folder = tmp_path / "d" / "topics" / "t.topic"
        await until(lambda: len(list(folder.glob("*.log"))) == 1)


class BadSector(HeldFiles):
    """A file whose second block can be made unreadable."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        super().__init__()
        self.bad = False
        self._clock = clock

    def monotonic_s(self) -> float:
        return self._clock.current_time()

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if self.bad and offset < 8192:
            if offset >= 4096:
                raise OSError(EIO, "Input/output error")
            size = min(size, 4096 - offset)
        return super().read(fd, size, offset)

    def read_cached(self, fd: int, size: int, offset: int) -> bytes | None:
        return None if self.bad else super().read_cached(fd, size, offset)


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def test_bad_sector_delays_a_channel_for_some_time_and_then_costs_its_messages(
    tmp_path: Path,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = BadSector(clock)
    options: dict[str, Any] = {"files": files, "cache_bytes": 0, "mem_queue_size": 0}
    async with running_broker(tmp_path / "d", **options) as bound, connected(bound.tcp_address) as client:
        for number in range(60):
            await client.publish("t", b"%03d" % number * 100)
        files.bad = True
        await client.subscribe("t", "c", ready_count=100)
        # Records of 360 bytes after a header of 32: those from 11 to 22 touch the block.
        before = [int((await client.message()).body[:3]) for _ in range(11)]
        assert before == list(range(11))
        for _ in range(10):
            await client.nothing_more()
            await settle()
            clock.jump(1.001)
        after = [int((await client.message()).body[:3]) for _ in range(37)]
        assert after == list(range(23, 60))
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len([text for text in said if text.startswith("t/c: cannot read")]) == 1
    assert any("the disk cannot read bytes 4096 to 8192, skipped" in text for text in said)
