"""Tests for a full disk: refused and permitted operations, and the recovery."""

import errno
import gc
import os
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.api import OK, Api, address, running_api
from broker.support import PATIENCE_S, FailingFiles, RawClient, connected, identify, pub, running_broker
from faults.small_disk import SmallFiles
from trio_nsq.broker.storage.disk_reserve import RESERVE_BYTES, DiskReserve
from trio_nsq.log import Files

FULL = "No space left on device"
_REFUSALS = 20
"""One may be temporary, while a state is saved in the disk reserve."""
FAST: dict[str, Any] = {"checkpoint_interval_ms": 10}


def small_files(tmp_path: Path, size: int = 4 * 1024 * 1024) -> SmallFiles:
    return SmallFiles(tmp_path, size)


def logs(tmp_path: Path, topic: str = "t") -> list[str]:
    return sorted(path.name for path in (tmp_path / "d" / "topics" / f"{topic}.topic").glob("*.log"))


async def fill(api: Api) -> list[bytes]:
    """Publish until a small message does not fit; return the accepted messages."""
    accepted: list[bytes] = []
    for size in (100_000, 10_000, 1000):
        refusals = 0
        while refusals < _REFUSALS:
            body = b"%d " % len(accepted) + bytes(size)
            status, text = await api.post("/pub", body=body, topic="t")
            if status == 200:
                accepted.append(body)
            else:
                assert (status, text[-23:]) == (503, FULL)
                refusals += 1
    return accepted


async def finish(client: RawClient, bodies: list[bytes]) -> None:
    for body in bodies:
        message = await client.message()
        assert message.body == body
        await client.send(b"FIN %s\n" % message.id)


async def until_well(api: Api) -> None:
    """Wait, without publishing, until the broker reports that it is healthy."""
    with trio.fail_after(PATIENCE_S):
        while True:
            answer = await api.get("/ping")
            if (answer.status_code, answer.text) == OK:
                return
            await trio.lowlevel.checkpoint()


# ---------------------------------------------------------------------- disk reserve


class FullFiles(Files):
    """Real files; if the disk is full, nothing can be allocated."""

    full = False

    def allocate(self, fd: int, size: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, size)


class UnwritableFiles(FullFiles):
    """Nothing can be written either."""

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, offset, parts)


async def test_ephemeral_topics_accept_messages_on_a_full_disk(tmp_path: Path) -> None:
    files = UnwritableFiles()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=10**9) as api:
        await api.tcp.publish("t", b"makes the segment")
        files.full = True
        assert (await api.post("/channel/create", topic="t", channel="c"))[0] == 503
        status, text = await api.post("/pub", b"x", topic="t")
        assert (status, "messages are refused until" in text) == (503, True)
        assert await api.post("/pub", b"over HTTP", topic="t#ephemeral") == OK
        await api.tcp.publish("t#ephemeral", b"over TCP")
        await api.tcp.subscribe("t#ephemeral", "c#ephemeral", ready_count=2)
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"over HTTP", b"over TCP"]
        files.full = False


def no_room_once(path: Path) -> Any:
    """Return a job that fails once, before the disk reserve is released."""

    def work() -> str:
        if path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "done"

    return work


def test_nothing_is_appended_while_the_room_is_incomplete(tmp_path: Path) -> None:
    files, path = FullFiles(), tmp_path / "spare-room"
    room = DiskReserve(path, files)
    room.start()
    assert path.stat().st_size == RESERVE_BYTES
    assert room.begin_append() == ""
    room.end_append()
    files.full = True
    assert room.use(no_room_once(path)) == "done"
    reason = f"cannot write to {tmp_path}: messages are refused until 1048576 bytes are free: No space left on device"
    assert room.begin_append() == room.shortage == reason
    assert not path.exists()
    room.reclaim()
    assert room.begin_append() == reason
    files.full = False
    room.reclaim()
    assert room.begin_append() == room.shortage == ""
    assert path.stat().st_size == RESERVE_BYTES


def test_room_is_used_only_without_a_running_append(tmp_path: Path) -> None:
    path = tmp_path / "spare-room"
    room = DiskReserve(path, Files())
    room.start()
    assert room.begin_append() == ""
    thread = threading.Thread(target=room.use, args=[no_room_once(path)])
    thread.start()
    while not room.closed_because:
        pass
    assert path.exists()
    assert room.begin_append().endswith("No space left on device")  # a second one must wait
    assert not room.shortage  # but that takes a moment only
    room.end_append()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert room.begin_append() == ""


def test_other_errors_do_not_use_the_room(tmp_path: Path) -> None:
    room = DiskReserve(tmp_path / "spare-room", Files())
    room.start()

    def work() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        room.use(work)
    assert room.begin_append() == ""


def test_room_that_cannot_be_allocated_for_another_reason_does_not_block_publishes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = DiskReserve(tmp_path / "missing" / "spare-room", Files())
    room.start()
    assert room.begin_append() == ""
    assert "a full disk may stay full" in caplog.text


def test_room_grows_with_the_saved_states(tmp_path: Path) -> None:
    room = DiskReserve(tmp_path / "spare-room", Files())
    room.start()
    room.replace(tmp_path / "state", bytes(2_000_000))
    assert (tmp_path / "spare-room").stat().st_size == 4_000_000
    room = DiskReserve(tmp_path / "spare-room", Files())
    room.start()
    assert (tmp_path / "spare-room").stat().st_size == 4_000_000  # the state still exists


# ---------------------------------------------------------------------- with a broker


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_finished_last_file_is_deleted(tmp_path: Path, sync: str) -> None:
    """The sequences continue after it, also after a restart."""
    files = small_files(tmp_path)
    async with running_api(tmp_path / "d", files=files, sync=sync, **FAST) as api:
        accepted = await fill(api)
        assert len(accepted) > 20
        assert logs(tmp_path) == [f"{0:020}.log"]
        assert (await api.get("/ping")).text.endswith("No space left on device")
        await api.tcp.subscribe("t", "c", 5)
        await finish(api.tcp, accepted)
        await until_well(api)
        assert logs(tmp_path) == [f"{len(accepted):020}.log"]
        assert (tmp_path / "d" / "spare-room").exists()
    async with running_broker(tmp_path / "d", files=files) as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"next")
        await client.subscribe("t", "c", 1)
        assert (await client.message()).body == b"next"
    assert logs(tmp_path) == [f"{len(accepted):020}.log"]


async def test_last_file_is_deleted_although_a_small_message_still_fits(tmp_path: Path) -> None:
    """The free space decides, not the last publish."""
    files = small_files(tmp_path)
    async with running_api(tmp_path / "d", files=files, **FAST) as api:
        await api.post("/channel/create", topic="t", channel="c")
        bodies: list[bytes] = []
        body = b"0" * 300_000
        while await api.post("/pub", body, topic="t") == OK:
            bodies.append(body)
            body = b"%d" % len(bodies) * 300_000
        assert await api.post("/pub", b"small", topic="u") == OK
        await api.tcp.subscribe("t", "c", 1)
        await finish(api.tcp, bodies)
        with trio.fail_after(PATIENCE_S):
            while files.free_bytes < files.disk_bytes / 2:
                await trio.lowlevel.checkpoint()
        assert await api.post("/pub", bytes(1_000_000), topic="u") == OK


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_deleted_files_free_their_space_at_once(tmp_path: Path, sync: str) -> None:
    """Without a garbage collection, which is rare in an idle broker."""
    files = small_files(tmp_path)
    gc.disable()
    try:
        async with running_api(tmp_path / "d", files=files, sync=sync, **FAST) as api:
            await api.tcp.subscribe("t", "c", 5)
            for _ in range(3):
                await finish(api.tcp, await fill(api))
                await until_well(api)
                with trio.fail_after(PATIENCE_S):  # the broker may be well before it has closed all files
                    while files.free_bytes <= files.disk_bytes / 2:
                        await trio.lowlevel.checkpoint()
    finally:
        gc.enable()


async def test_refused_messages_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Nor until the next garbage collection."""
    files, body = small_files(tmp_path), bytes(300_000)
    async with running_api(tmp_path / "d", files=files) as api:
        await fill(api)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(30):
                assert (await api.post("/pub", body=body, topic="t"))[0] == 503
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert kept_bytes < 10 * len(body)


async def test_emptying_a_channel_makes_room(tmp_path: Path) -> None:
    files = small_files(tmp_path)
    async with running_api(tmp_path / "d", files=files, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api)
        assert (await api.post("/channel/empty", topic="t", channel="c"))[0] == 200
        await until_well(api)
        assert (await api.post("/pub", body=bytes(100_000), topic="t"))[0] == 200


async def test_kept_messages_stay_on_a_full_disk(tmp_path: Path) -> None:
    files = small_files(tmp_path)
    async with running_api(tmp_path / "d", files=files, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.send("PUT", "/topic/settings?topic=t", body=b'{"retention_time_ms":-1}')
        accepted = await fill(api)
        await api.tcp.subscribe("t", "c", 5)
        await finish(api.tcp, accepted)
        await api.tcp.send(b"CLS\n")
        assert await api.tcp.frame() == (0, b"CLOSE_WAIT")
        assert (await api.post("/channel/pause", topic="t", channel="c"))[0] == 200  # saved
        assert logs(tmp_path) == [f"{0:020}.log"]


async def test_broker_starts_on_a_full_disk_without_its_reserve(tmp_path: Path) -> None:
    """As after a kill while the disk reserve was in use, if others then took the space: there is no free byte."""
    files = small_files(tmp_path)
    bodies = [b"%d" % number for number in range(3)]
    async with running_api(tmp_path / "d", files=files) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.publish("t", *bodies)
    size = files.disk_bytes
    files.unlink(tmp_path / "d" / "spare-room")
    files.disk_bytes -= files.free_bytes
    async with running_api(tmp_path / "d", files=files, **FAST) as api:
        status, text = await api.post("/pub", body=b"refused", topic="t")
        assert status == 503
        assert text.endswith(f": messages are refused until 1048576 bytes are free: {FULL}")
        answer = await api.get("/ping")
        assert (answer.status_code, answer.text[:6]) == (500, "NOK - ")
        assert (await api.post("/pub", body=b"x", topic="t#ephemeral"))[0] == 503  # no message id is reserved
        await api.tcp.subscribe("t", "c", 5)
        await finish(api.tcp, bodies)
        files.disk_bytes = size
        await until_well(api)
        assert (await api.post("/pub", body=b"x", topic="t#ephemeral"))[0] == 200
        await api.tcp.publish("t", b"accepted")
        await finish(api.tcp, [b"accepted"])


async def test_state_is_saved_before_lost_sequences_are_reused(tmp_path: Path) -> None:
    """After a power cut the state is ahead of the log, and the disk is too full to save another state."""
    files = small_files(tmp_path)
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.publish("t", b"lost")
        await api.tcp.subscribe("t", "c", 1)
        await finish(api.tcp, [b"lost"])
    (log,) = (tmp_path / "d" / "topics" / "t.topic").glob("*.log")
    os.truncate(log, 32)
    size = files.disk_bytes
    files.unlink(tmp_path / "d" / "spare-room")
    files.disk_bytes -= files.free_bytes
    async with running_api(tmp_path / "d", files=files, **FAST) as api:
        assert (await api.post("/pub", body=b"refused", topic="t"))[0] == 503
        files.disk_bytes = size
        await until_well(api)
        await api.tcp.publish("t", b"accepted")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", 5)
        await finish(client, [b"accepted"])
        await client.nothing_more()


async def test_new_topic_does_not_take_the_room_of_others(tmp_path: Path) -> None:
    files = small_files(tmp_path)
    async with running_api(tmp_path / "d", files=files) as api:
        await api.post("/topic/create", topic="t")
        files.unlink(tmp_path / "d" / "spare-room")
        files.disk_bytes -= files.free_bytes - RESERVE_BYTES // 2
    async with running_api(tmp_path / "d", files=files) as api:
        status, text = await api.post("/topic/create", topic="new")
        assert (status, text[-23:]) == (503, FULL)
        assert (await api.post("/channel/create", topic="t", channel="c"))[0] == 200


@pytest.mark.parametrize("way", ["tcp", "http"])
async def test_empty_topic_of_a_deleted_ephemeral_channel_is_forgotten(tmp_path: Path, way: str) -> None:
    class NoStates(FailingFiles):
        def replace(self, path: Path, content: bytes) -> None:
            if self.full_after is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().replace(path, content)

    files = NoStates()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.publish("other", b"x")
        files.full_after = 0
        async with connected(address(api)) as client:
            await client.subscribe("t", "c#ephemeral")
        with trio.fail_after(PATIENCE_S):
            while (await api.stats(topic="t"))["topics"][0]["channels"]:
                await trio.lowlevel.checkpoint()
        if way == "tcp":
            await api.tcp.send(identify(survive_refusals=True) + pub("t", b"x"))
            await api.tcp.ok()
            assert (await api.tcp.error()).startswith("E_PUB_FAILED")
        else:
            assert (await api.post("/pub", topic="t", body=b"x"))[0] == 503
        with trio.fail_after(PATIENCE_S):
            while (await api.stats(topic="t"))["topics"]:
                await trio.lowlevel.checkpoint()
        files.full_after = None
