"""Saved state: what is new is on disk when it should be, whatever happens to those who wait for it."""

import json
from pathlib import Path

import trio

from broker.api import DONE, address, running_api
from broker.support import HeldFiles, connected, settle, until
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.server import Server
from trio_nsq.broker.state.broker import Broker, MessageIds
from trio_nsq.broker.state.topic import Topic
from trio_nsq.broker.storage.checkpointer import Checkpointer
from trio_nsq.broker.storage.data_folder import ID_RESERVE, DataFolder
from trio_nsq.log import Log, MemoryLog


def saved_channels(data_path: Path) -> list[str]:
    state = json.loads((data_path / "topics" / "t.topic" / "state.json").read_bytes())
    return [channel["name"] for channel in state["channels"]]


async def test_save_that_is_cancelled_is_made_up_for(tmp_path: Path) -> None:
    """Cancelled in the very turn in which it is its turn: nothing is written, and that is not forgotten."""
    files = HeldFiles()
    folder = DataFolder(tmp_path / "d", files)
    async with trio.open_nursery() as nursery:
        server = Server(BrokerOptions(data_path=tmp_path / "d"), folder, nursery)
        topic = server.broker.topic("t")
        server.broker.channel("t", "first")
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


async def test_those_who_wait_to_save_the_same_topic_share_one_write(tmp_path: Path) -> None:
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


async def test_a_change_of_an_ephemeral_channel_is_not_saved(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", checkpoint_interval_ms=10**9) as api:
        await api.tcp.subscribe("t", "kept")
        async with connected(address(api)) as consumer:
            await consumer.subscribe("t", "c#ephemeral")
            assert await api.post("/channel/pause", topic="t", channel="c#ephemeral") == DONE
            assert await api.post("/channel/pause", topic="t", channel="kept") == DONE
            assert await api.post("/channel/pause", topic="t", channel="c#ephemeral") == DONE
            assert saved_channels(tmp_path / "d") == ["kept"]


async def test_ids_are_reserved_long_before_those_reserved_are_used_up(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "d")
    ids = MessageIds(1, 1000, 1000 + ID_RESERVE // 4)

    async def never(topic: Topic) -> bool:
        raise AssertionError(topic.name)

    def memory_log(name: str) -> Log:
        return MemoryLog()

    options = BrokerOptions(data_path=tmp_path / "d")
    checkpointer = Checkpointer(Broker(options, memory_log), folder, ids, lambda: 0, never, never)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(checkpointer.save_on_schedule, 0)
        await until(lambda: ids.reserved >= 1000 + ID_RESERVE)
        nursery.cancel_scope.cancel()
    assert json.loads((tmp_path / "d" / "broker.json").read_bytes())["next_id"] == 1000 + ID_RESERVE
    folder.close()
