"""Tests for the write-ahead log of a broker: one sync for many topics, its files, its errors, and the next start."""

import errno
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.support import RawClient, connected, mpub, refusal, running_broker, settle, until
from faults.disk import RecordingFiles, disk_at, read_image, write_image
from log.support import HastyFiles
from trio_nsq.broker.storage.verify import verify_broker_file
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.log import DiskLog
from trio_nsq.log.files import Space

TOPICS = [f"t{n}" for n in range(6)]
ALWAYS = Pacing(wal_topics=1, wal_retry_s=0.0)
SMALL_FILES = Pacing(wal_topics=1, wal_file_bytes=3000, wal_retry_s=0.0)


class CountingFiles(HastyFiles):
    """Counts syncs and written bytes by file; chosen operations on some files fail.

    Attributes:
        syncs, written: By the name of the file, or of the topic for its segments. Zeros written ahead do not count.
        synced: The size of each file when it was synced.
        failing: The error number by operation (`create`, `write`, `sync`, `truncate`, `unlink`) and part of a path.
    """

    def __init__(self) -> None:
        self.syncs: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.synced: dict[Path, int] = {}
        self.failing: dict[tuple[str, str], int] = {}
        self._paths: dict[int, Path] = {}

    def _pass(self, operation: str, path: Path) -> None:
        for (failing, part), code in self.failing.items():
            if failing == operation and part in str(path):
                raise OSError(code, os.strerror(code))

    def _name(self, fd: int) -> str:
        path = self._paths[fd]
        return path.parent.name.removesuffix(".topic") if path.suffix == ".log" else path.name

    def create(self, path: Path) -> int:
        self._pass("create", path)
        fd = super().create(path)
        self._paths[fd] = path
        return fd

    def create_or_empty(self, path: Path) -> int:
        fd = super().create_or_empty(path)
        self._paths[fd] = path
        return fd

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self._paths[fd] = path
        return fd

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._pass("write", self._paths[fd])
        except OSError:
            data = b"".join(parts)
            super().write(fd, offset, [data[: len(data) // 2]])
            raise
        super().write(fd, offset, parts)
        if any(bytes(part).strip(b"\0") for part in parts):
            self.written[self._name(fd)] += sum(map(len, parts))

    def truncate(self, fd: int, size: int) -> None:
        self._pass("truncate", self._paths[fd])
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._pass("sync", self._paths[fd])
        super().sync(fd)
        self.syncs[self._name(fd)] += 1
        self.synced[self._paths[fd]] = self.size(fd)

    def unlink(self, path: Path) -> None:
        self._pass("unlink", path)
        super().unlink(path)

    def syncs_ahead(self) -> int:
        """Return how many syncs write-ahead files got."""
        return sum(count for name, count in self.syncs.items() if name.startswith("write-ahead"))


class Publishers:
    """A client for each topic. All publish at the same time.

    Attributes:
        acknowledged, refused: The bodies, by topic.
    """

    def __init__(self, address: str, stack: AsyncExitStack) -> None:
        self._address = address
        self._stack = stack
        self._clients: dict[str, RawClient] = {}
        self.acknowledged: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
        self.refused: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
        self._count = 0

    async def publish(self, *, size: int = 20, count: int = 2) -> None:
        """Publish an MPUB to each of the topics, and note the answers."""
        bodies: dict[str, list[bytes]] = {}
        for topic in TOPICS:
            if topic not in self._clients:
                self._clients[topic] = await self._stack.enter_async_context(connected(self._address))
            bodies[topic] = [
                b"%s-%d-%d " % (topic.encode(), self._count, n) + bytes(size) for n in range(count)
            ]
        self._count += 1
        for topic, some in bodies.items():
            await self._clients[topic].send(mpub(topic, *some))
        for topic, some in bodies.items():
            frame = await self._clients[topic].frame()
            assert frame is not None
            if frame == (0, b"OK"):
                self.acknowledged[topic] += some
            else:
                self.refused[topic] += some
                del self._clients[topic]  # the broker closes the connection


@asynccontextmanager
async def publishing(data_path: Path, files: Any, **options: Any) -> AsyncIterator[Publishers]:
    """Run a broker whose topics have their first segment, and whose write-ahead log is in use."""
    async with (
        running_broker(data_path, files=files, **({"pacing": ALWAYS} | options)) as bound,
        AsyncExitStack() as stack,
    ):
        publishers = Publishers(bound.tcp_address, stack)
        for _ in range(50):
            await publishers.publish()
            if any(path.stat().st_size > 32 for path in data_path.glob("write-ahead.*")):
                break
            await settle()
        await publishers.publish()
        yield publishers


def stored(data_path: Path) -> dict[str, list[bytes]]:
    """Return the bodies in the log of each topic."""
    found: dict[str, list[bytes]] = {}
    for topic in TOPICS:
        found[topic] = bodies = []
        folder = data_path / "topics" / f"{topic}.topic"
        log = DiskLog(folder, files=HastyFiles())
        sequence = log.first_sequence
        while records := log.read(sequence):
            for record in records:
                bodies += record.messages.bodies()
            sequence = records[-1].next_sequence
        log.close()
    return found


async def restarted(data_path: Path) -> dict[str, list[bytes]]:
    """Start a broker on a data folder, stop it, and return what the logs have."""
    async with running_broker(data_path, files=HastyFiles()):
        pass
    assert not list(data_path.glob("write-ahead*"))
    assert json.loads((data_path / "broker.json").read_bytes())["format"] == 1
    return stored(data_path)


def copied(data_path: Path, to: Path) -> Path:
    """Copy the data folder of a running broker, in whose threads files may vanish meanwhile."""
    while True:
        try:
            return shutil.copytree(data_path, to)
        except (shutil.Error, OSError):
            shutil.rmtree(to)


def after_power_cut(data_path: Path, to: Path, files: CountingFiles) -> Path:
    """Copy a data folder; the segments have lost what was not synced."""
    copied(data_path, to)
    for path in to.glob("topics/*/*.log"):
        path.write_bytes(path.read_bytes()[: files.synced[data_path / path.relative_to(to)]])
    return to


async def test_topics_are_seldom_synced_by_themselves(tmp_path: Path) -> None:
    files = CountingFiles()
    async with publishing(tmp_path / "d", files) as publishers:
        await settle()
        files.syncs.clear()
        for _ in range(20):
            await publishers.publish()
        assert 20 <= files.syncs_ahead() <= 20 * len(TOPICS)
        # A thread that ends a sync also takes topics that the event loop has not yet written ahead.
        assert sum(files.syncs[topic] for topic in TOPICS) < 10
        after = after_power_cut(tmp_path / "d", tmp_path / "after", files)
        killed = copied(tmp_path / "d", tmp_path / "killed")
    assert not list((tmp_path / "d").glob("write-ahead*"))
    assert stored(tmp_path / "d") == publishers.acknowledged
    assert await restarted(after) == publishers.acknowledged
    assert await restarted(killed) == publishers.acknowledged


async def test_one_or_two_topics_are_synced_by_themselves(tmp_path: Path) -> None:
    files = CountingFiles()
    async with running_broker(tmp_path / "d", files=files) as bound, connected(bound.tcp_address) as client:
        for topic in TOPICS:
            await client.publish(topic, b"alone")
            await client.publish(topic, b"alone again")
    assert not [name for name in files.written if name.startswith("write-ahead")]


async def test_large_writes_are_synced_by_themselves(tmp_path: Path) -> None:
    files = CountingFiles()
    async with publishing(tmp_path / "d", files) as publishers:
        await settle()
        files.written.clear()
        await publishers.publish(size=100_000, count=1)
        assert sum(size for name, size in files.written.items() if name.startswith("write-ahead")) == 0


async def test_interval_mode_has_no_write_ahead_log(tmp_path: Path) -> None:
    async with publishing(tmp_path / "d", HastyFiles(), sync="interval") as publishers:
        await publishers.publish()
        assert not list((tmp_path / "d").glob("write-ahead*"))


class LittleRoom(HastyFiles):
    """A disk with little free space."""

    def space(self, path: Path) -> Space:
        return Space(95 * 1024 * 1024, 1024**4)


async def test_without_room_there_is_no_write_ahead_log(tmp_path: Path) -> None:
    async with publishing(tmp_path / "d", LittleRoom()) as publishers:
        await publishers.publish()
        assert not list((tmp_path / "d").glob("write-ahead*"))
    assert stored(tmp_path / "d") == publishers.acknowledged


async def test_files_are_few_and_end_when_the_topics_are_synced(tmp_path: Path) -> None:
    files = CountingFiles()
    async with publishing(tmp_path / "d", files, pacing=SMALL_FILES) as publishers:
        for _ in range(60):
            await publishers.publish()
            assert len(list((tmp_path / "d").glob("write-ahead.*"))) <= 3
        after = after_power_cut(tmp_path / "d", tmp_path / "after", files)
    sizes = [size for name, size in files.written.items() if name.startswith("write-ahead")]
    assert len(sizes) > 3
    assert max(sizes) < 10_000
    assert await restarted(after) == publishers.acknowledged


async def test_old_file_ends_without_further_publishes(tmp_path: Path) -> None:
    files = CountingFiles()
    pacing = Pacing(wal_topics=1, wal_file_s=0.3)
    async with publishing(tmp_path / "d", files, pacing=pacing):
        first = tmp_path / "d" / "write-ahead.1"
        await until(lambda: not first.exists())
        assert not [topic for topic in TOPICS if not files.syncs[topic]]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("operation", ["write", "sync", "create"])
async def test_error_of_the_write_ahead_log_refuses_nothing(
    tmp_path: Path, operation: str, code: int
) -> None:
    files = CountingFiles()
    async with publishing(tmp_path / "d", files, pacing=SMALL_FILES) as publishers:
        for _ in range(10):
            await publishers.publish()
        files.failing = {(operation, "write-ahead"): code}
        for _ in range(20):
            await publishers.publish()
        after = after_power_cut(tmp_path / "d", tmp_path / "after", files)
        files.failing = {}
        files.written.clear()
        for _ in range(20):
            await publishers.publish()
            await settle()  # the next file is begun in a thread
        assert [name for name in files.written if name.startswith("write-ahead")], "it is used again"
    assert publishers.refused == {topic: [] for topic in TOPICS}
    assert stored(tmp_path / "d") == publishers.acknowledged
    found = await restarted(after)
    assert all(found[topic] == publishers.acknowledged[topic][: len(found[topic])] for topic in TOPICS)
    assert all(len(found[topic]) >= 60 for topic in TOPICS)


@pytest.mark.parametrize("truncates", [True, False])
async def test_refused_messages_do_not_come_back(tmp_path: Path, truncates: bool) -> None:
    """The syncs of the write-ahead log and of two topics fail, and then work again."""
    files = CountingFiles()
    async with publishing(tmp_path / "d", files) as publishers:
        await publishers.publish()
        files.failing = {("sync", part): errno.EIO for part in ("write-ahead", "t1.topic", "t4.topic")}
        if not truncates:
            files.failing["truncate", "write-ahead"] = errno.EIO
        await publishers.publish()
        await settle()
        if truncates:
            refused = copied(tmp_path / "d", tmp_path / "refused")
            at = {topic: len(some) for topic, some in publishers.acknowledged.items()}
        files.failing = {}
        for _ in range(5):
            await publishers.publish()
            await settle()
        killed = copied(tmp_path / "d", tmp_path / "killed")
    assert {topic for topic, some in publishers.refused.items() if some} == {"t1", "t4"}
    assert await restarted(killed) == publishers.acknowledged
    assert await restarted(tmp_path / "d") == publishers.acknowledged
    if truncates:
        found = await restarted(refused)
        assert found == {topic: some[: at[topic]] for topic, some in publishers.acknowledged.items()}


async def test_segments_that_cannot_be_synced_keep_the_file(tmp_path: Path) -> None:
    """What was acknowledged from the write-ahead log survives when the disk later refuses to sync a segment."""
    files = CountingFiles()
    segments = tmp_path / "d" / "topics" / "t2.topic"
    async with publishing(tmp_path / "d", files) as publishers:
        for _ in range(50):  # a topic that waits alone gets its own sync
            files.failing = {}
            await publishers.publish()
            files.failing = {("sync", "t2.topic"): errno.EIO}
            if any(path.stat().st_size > files.synced[path] for path in segments.glob("*.log")):
                break
    assert list((tmp_path / "d").glob("write-ahead.*"))
    assert json.loads((tmp_path / "d" / "broker.json").read_bytes())["format"] == 2
    for path in segments.glob("*.log"):
        path.write_bytes(path.read_bytes()[: files.synced[path]])
    assert await restarted(tmp_path / "d") == publishers.acknowledged


async def test_older_versions_do_not_ignore_the_log(tmp_path: Path) -> None:
    async with publishing(tmp_path / "d", HastyFiles()):
        for name in ("broker.json", "broker.json.copy"):
            assert json.loads((tmp_path / "d" / name).read_bytes())["format"] == 2
    for name in ("broker.json", "broker.json.copy"):
        assert json.loads((tmp_path / "d" / name).read_bytes())["format"] == 1


async def test_deleted_topics_stay_deleted(tmp_path: Path) -> None:
    async with publishing(tmp_path / "d", HastyFiles()) as publishers:
        copied(tmp_path / "d", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "topics" / "t3.topic")
    found = await restarted(tmp_path / "killed")
    assert found["t3"] == []
    assert found["t2"] == publishers.acknowledged["t2"]


async def test_unavailable_topic_gets_its_messages_later(tmp_path: Path) -> None:
    files = CountingFiles()
    async with publishing(tmp_path / "d", files) as publishers:
        after = after_power_cut(tmp_path / "d", tmp_path / "after", files)
    segment = next((after / "topics" / "t0.topic").glob("*.log"))
    segment.rename(tmp_path / "segment")
    segment.mkdir()
    for _ in range(2):
        async with (
            running_broker(after, files=HastyFiles(), pacing=ALWAYS) as bound,
            connected(bound.tcp_address) as client,
        ):
            for number in range(5):
                await client.publish("t1", b"later %d" % number)
                publishers.acknowledged["t1"].append(b"later %d" % number)
        assert list(after.glob("write-ahead.*")), "the topic is still unavailable"
        assert json.loads((after / "broker.json").read_bytes())["format"] == 2
    segment.rmdir()
    (tmp_path / "segment").rename(segment)
    assert await restarted(after) == publishers.acknowledged


async def test_missing_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as in a copy of a running broker's folder that left it out."""
    async with publishing(tmp_path / "d", HastyFiles()):
        killed = copied(tmp_path / "d", tmp_path / "killed")
    whole = copied(killed, tmp_path / "whole")
    for path in killed.glob("write-ahead.*"):
        path.unlink()
    (finding,) = verify_broker_file(killed)
    assert "broker.json says that there may be a write-ahead log" in finding.what
    assert not verify_broker_file(whole)
    text = f"{killed}/write-ahead.*: missing: broker.json says"
    for start in range(3):
        caplog.clear()
        await restarted(killed if start < 2 else whole)
        assert (text in caplog.text) == (not start)


async def test_without_a_file_none_is_missing(tmp_path: Path) -> None:
    """After an error of the write-ahead log, there is none until the next is begun."""
    files = CountingFiles()
    pacing = Pacing(wal_topics=1, wal_retry_s=1000)
    async with publishing(tmp_path / "d", files, pacing=pacing) as publishers:
        files.failing = {("sync", "write-ahead"): errno.EIO}
        await publishers.publish()
        await until(lambda: not list((tmp_path / "d").glob("write-ahead.*")))
        await settle()
        await until(lambda: json.loads((tmp_path / "d" / "broker.json").read_bytes())["format"] == 1)
        await publishers.publish()
    assert stored(tmp_path / "d") == publishers.acknowledged


async def test_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    async with publishing(tmp_path / "d", HastyFiles()):
        copied(tmp_path / "d", tmp_path / "killed")
    path = next((tmp_path / "killed").glob("write-ahead.*"))
    data = bytearray(path.read_bytes())
    data[11] = 9
    path.write_bytes(data[:32] + b"entries of a later format")
    assert f"{path} is of format 9" in await refusal(tmp_path / "killed")


@pytest.mark.slow
async def test_power_cuts_at_every_operation(tmp_path: Path) -> None:
    """Topics publish together into small files; after each cut, a broker has all that was acknowledged by then."""
    root = tmp_path / "before"
    root.mkdir()
    files = RecordingFiles(root, sync_takes_s=0.0005)
    ledger: list[tuple[int, dict[str, int]]] = []
    async with publishing(root / "d", files, pacing=SMALL_FILES, max_bytes_per_file=1500) as publishers:
        for _ in range(12):
            ledger.append(
                (files.position, {topic: len(some) for topic, some in publishers.acknowledged.items()})
            )
            await publishers.publish()
    everything = publishers.acknowledged
    chance = random.Random(5)
    complete = os.environ.get("FAULT_COMPLETE") == "1"
    moments = range(ledger[0][0], len(files.journal) + 1)
    chosen = moments if complete else sorted(chance.sample(moments, 12))
    for now, disk in disk_at(files.journal, chosen):
        cuts = list(disk.power_cuts(chance))
        for what, image in cuts if complete else chance.sample(cuts, 2):
            after = tmp_path / "after"
            shutil.rmtree(after, ignore_errors=True)
            write_image(image, after)
            found = await restarted(after / "d")
            sure = [counts for at, counts in ledger if at <= now][-1]
            for topic, bodies in found.items():
                assert len(bodies) >= sure[topic], (now, what, topic)
                assert bodies == everything[topic][: len(bodies)], (now, what, topic)
    assert read_image(root)
