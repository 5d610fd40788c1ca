"""Tests for saved state: changes are saved in time, whatever happens to those who wait for it."""

import errno
import json
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.api import DONE, OK, address, running_api
from broker.letters import another
from broker.support import HeldFiles, connected, settle, threads_done, until
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.server import Server
from trio_nsq.broker.state.broker import Broker, MessageIds
from trio_nsq.broker.state.checkpoint import additions_of
from trio_nsq.broker.state.topic import Topic
from trio_nsq.broker.storage.checkpointer import Checkpointer
from trio_nsq.broker.storage.data_folder import ID_RESERVE, DataFolder, decode_state
from trio_nsq.log import Files, Log, MemoryLog


def saved_channels(data_path: Path) -> list[str]:
    state = decode_state((data_path / "topics" / "t.topic" / "state.json").read_bytes())
    created = [name for each in additions_of(state) for name in each.names]
    return [*[channel["name"] for channel in state["channels"]], *created]


async def test_cancelled_save_is_repeated(tmp_path: Path) -> None:
    """Cancelled in the turn in which it would run: nothing is written, and that is not forgotten."""
    files = HeldFiles()
    folder = DataFolder(tmp_path / "d", files)
    async with trio.open_nursery() as nursery:
        server = Server(BrokerOptions(data_path=tmp_path / "d"), folder, nursery)
        topic = server.broker.topic("t")
        server.broker.topic("t").add_channel("first")
        files.hold("replace")
        cut_off = trio.CancelScope()

        async def first() -> None:
            await server.checkpointer.save(topic)
            cut_off.cancel()

        async def second() -> None:
            with cut_off:
                await server.topics.create("t", "second")

        async with trio.open_nursery() as saving:
            saving.start_soon(first)
            await files.reached()
            saving.start_soon(second)
            await settle()
            files.release()
        assert cut_off.cancelled_caught
        assert saved_channels(tmp_path / "d") == ["first"]
        await server.topics.create("t", "second")
        assert saved_channels(tmp_path / "d") == ["first", "second"]
    folder.close()


async def test_concurrent_saves_of_a_topic_share_one_write(tmp_path: Path) -> None:
    writes: list[bytes] = []

    class Recording(HeldFiles):
        def replace(self, path: Path, content: bytes) -> None:
            writes.append(content)
            super().replace(path, content)

    files = Recording()
    folder = DataFolder(tmp_path / "d", files)
    async with trio.open_nursery() as nursery:
        server = Server(BrokerOptions(data_path=tmp_path / "d"), folder, nursery)
        server.broker.topic("t")
        files.hold("replace")
        writes.clear()
        for number in range(20):
            nursery.start_soon(server.topics.create, "t", f"c{number}")
        await files.reached()
        await settle()
        files.release()
    assert len(writes) <= 2
    assert len(saved_channels(tmp_path / "d")) == 20
    folder.close()


async def test_change_of_an_ephemeral_channel_is_not_saved(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", checkpoint_interval_ms=10**9) as api:
        await api.tcp.subscribe("t", "kept")
        async with connected(address(api)) as consumer:
            await consumer.subscribe("t", "c#ephemeral")
            assert await api.post("/channel/pause", topic="t", channel="c#ephemeral") == DONE
            assert await api.post("/channel/pause", topic="t", channel="kept") == DONE
            assert await api.post("/channel/pause", topic="t", channel="c#ephemeral") == DONE
            assert saved_channels(tmp_path / "d") == ["kept"]


async def test_ids_are_reserved_long_before_the_reserved_ones_are_used(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "d")
    ids = MessageIds(1, 1000, 1000 + ID_RESERVE // 4)

    async def never(topic: Topic) -> bool:
        raise AssertionError(topic.name)

    async def nothing() -> None:
        raise AssertionError("nothing is saved")

    def memory_log(name: str) -> Log:
        return MemoryLog()

    options = BrokerOptions(data_path=tmp_path / "d")
    broker = Broker(options, memory_log)
    checkpointer = Checkpointer(broker, folder, ids, lambda: 0, never, never, nothing, lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(checkpointer.save_on_schedule, 0)
        await until(lambda: ids.reserved >= 1000 + ID_RESERVE)
        nursery.cancel_scope.cancel()
    assert json.loads((tmp_path / "d" / "broker.json").read_bytes())["next_id"] == 1000 + ID_RESERVE
    folder.close()


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


class RefusedStates(Files):
    """A real file system where states of topics cannot be saved while `fails`.

    Attributes:
        refused: The number of failed saves.
    """

    def __init__(self) -> None:
        self.fails = True
        self.refused = 0

    def replace(self, path: Path, content: bytes) -> None:
        if self.fails and path.name == "state.json":
            self.refused += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().replace(path, content)


async def test_failed_save_is_repeated_at_the_next_checkpoint_and_reported_once(
    tmp_path: Path, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    files = RefusedStates()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=1000) as api:
        await api.tcp.publish("t", b"x")

        async def fail_to_save() -> None:
            before = files.refused
            clock.jump(1)
            await until(lambda: files.refused > before)
            await threads_done()

        await threads_done()
        for _ in range(3):
            await fail_to_save()
        complaint = "cannot save the state of topic t: Input/output error"
        assert caplog.messages.count(complaint) == 1
        assert (await api.get("/ping")).text == f"NOK - {complaint}"
        files.fails = False
        clock.jump(1)
        await until((tmp_path / "d" / "topics" / "t.topic" / "state.json").exists)
        await threads_done()
        assert (await api.get("/ping")).text == "OK"


async def test_change_during_a_save_is_saved_by_a_later_checkpoint(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    files = HeldFiles()
    state = tmp_path / "d" / "topics" / "t.topic" / "state.json"
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=1000) as api:
        await api.tcp.publish("t", b"before")
        await threads_done()
        files.hold("replace")
        clock.jump(1)
        await files.reached()
        await api.tcp.publish("t", b"meanwhile")
        files.release()
        await until(state.exists)
        await threads_done()
        for _ in range(3):
            clock.jump(1)
            await threads_done()
        assert json.loads(state.read_bytes())["end"] == 2


class UnsyncedLogs(Files):
    """A real file system where logs cannot be synced while `fails`, and other files can."""

    fails = False

    def sync(self, fd: int) -> None:
        if self.fails and Path(f"/proc/self/fd/{fd}").readlink().suffix == ".log":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


async def test_state_is_not_saved_ahead_of_a_log_that_cannot_be_synced(tmp_path: Path) -> None:
    """After a power cut it would refer to messages that are in no log."""
    files = UnsyncedLogs()
    never = {"sync_timeout_ms": 10**9, "checkpoint_interval_ms": 10**9}
    async with running_api(tmp_path / "d", files=files, sync="interval", **never) as api:
        await api.post("/topic/create", topic="t")
        assert await api.post("/channel/create", topic="t", channel="c") == DONE
        assert await api.post("/pub", b"x", topic="t", producer="p", number=1) == OK
        files.fails = True
        reason = "cannot save the state of topic t: its log cannot be synced"
        assert await api.post("/channel/pause", topic="t", channel="c") == (503, reason)
        state = tmp_path / "d" / "topics" / "t.topic" / "state.json"
        assert "producers" not in decode_state(state.read_bytes())
        files.fails = False
        assert await api.post("/channel/pause", topic="t", channel="c") == DONE
        assert json.loads(state.read_bytes())["producers"] == [["p", 1, 0]]
        assert saved_channels(tmp_path / "d") == ["c"]


async def test_emptied_channel_survives_a_kill_with_its_pause_and_settings(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", checkpoint_interval_ms=10**9) as api:
        await api.tcp.publish("t", b"dropped")
        assert await api.post("/channel/create", topic="t", channel="c") == DONE
        await api.send("PUT", "/channel/settings?topic=t&channel=c", body=b'{"max_attempts": 7}')
        assert await api.post("/channel/pause", topic="t", channel="c") == DONE
        assert await api.post("/channel/empty", topic="t", channel="c") == DONE
        async with another(api, tmp_path / "d") as api_after:
            channel = await api_after.channel("t", "c")
            assert (channel["depth"], channel["paused"], channel["max_attempts"]) == (0, True, 7)
