"""Syncs that fail: which publishes are refused, and what is removed before the next message."""

import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.support import PATIENCE_S, TopicsFiles, is_idle, settle, until
from broker.write_path import running_write_path
from trio_nsq.broker.errors import PublishRefused
from trio_nsq.broker.ingest.publication import Publication
from trio_nsq.log import DiskLog
from trio_nsq.protocol import pack_messages


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
