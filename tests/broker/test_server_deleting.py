"""Tests for deleting and creating topics and channels while others use them, and while the disk is slow or
fails.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.api import DONE, OK, Api, running_api
from broker.letters import another, client_of, take
from broker.support import HeldFiles, connected, pub, running_broker, settle
from trio_nsq.log import Files


def topic_folders(data_path: Path) -> list[str]:
    return sorted(os.listdir(data_path / "topics"))


async def test_topic_whose_name_looks_like_a_deletion(tmp_path: Path) -> None:
    names = ["deleted-1", "deleted-", "a.topic-deleted-1", "t.topic"]
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        for name in names:
            await client.publish(name, b"kept")
    async with running_broker(tmp_path / "d") as bound:
        for name in names:
            async with connected(bound.tcp_address) as client:
                await client.subscribe(name, "c", ready_count=1)
                assert (await client.message()).body == b"kept"


async def test_unfinished_deletion_is_completed_at_the_next_start(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"kept")
    left = tmp_path / "d" / "topics" / "gone.topic-deleted-1"
    left.mkdir()
    (left / "00000000000000000000.log").write_bytes(b"whatever")
    async with running_broker(tmp_path / "d"):
        pass
    assert topic_folders(tmp_path / "d") == ["t.topic"]


async def test_delete_waits_for_a_running_publish_and_refuses_the_next(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.publish("t", b"makes the topic")
        files.hold("sync")
        await api.tcp.send(pub("t", b"under way"))
        await files.reached()
        answers: list[tuple[int, str]] = []

        async def post(path: str, **query: str) -> None:
            answers.append(await api.post(path, b"x", **query))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: post("/topic/delete", topic="t"))
            await settle()
            nursery.start_soon(lambda: post("/topic/delete", topic="t"))  # waits for the first
            await settle()
            assert not answers
            assert await api.post("/pub", b"x", topic="t") == (503, "EXITING")
            assert await api.post("/topic/create", topic="t") == (503, "EXITING")
            assert await api.post("/channel/create", topic="t", channel="c") == (503, "EXITING")
            files.release()
        assert answers == [DONE, DONE]
        await api.tcp.ok()
        assert topic_folders(tmp_path / "d") == []
        await api.tcp.publish("t", b"a new one")
        await api.tcp.subscribe("t", "c", ready_count=5)
        assert (await api.tcp.message()).body == b"a new one"
        await api.tcp.nothing_more()


class LockedFolder(Files):
    """Folders cannot be synced anymore."""

    fails = False

    def sync_folder(self, path: Path) -> None:
        if self.fails:
            raise OSError(5, "Input/output error")
        super().sync_folder(path)


async def test_topic_that_cannot_be_deleted_is_unchanged(tmp_path: Path) -> None:
    files = LockedFolder()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.subscribe("t", "c", ready_count=5)
        await api.tcp.publish("t", b"1")
        files.fails = True
        status, text = await api.post("/topic/delete", topic="t")
        assert (status, text) == (503, "cannot delete the files of topic t: Input/output error")
        files.fails = False
        await api.tcp.publish("t", b"2")
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"1", b"2"]
    async with running_api(tmp_path / "d") as api:
        assert (await api.channel("t", "c"))["depth"] == 2


async def test_channel_cannot_be_deleted_before_it_is_saved(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.publish("t", b"makes the topic")
        files.hold("replace")
        await api.tcp.send(b"SUB t c\n")
        await files.reached()
        assert await api.post("/channel/delete", topic="t", channel="c") == (404, "CHANNEL_NOT_FOUND")
        files.release()
        await api.tcp.ok()
        assert await api.post("/channel/delete", topic="t", channel="c") == DONE
        assert await api.tcp.frame() is None
    async with running_api(tmp_path / "d") as api:
        assert (await api.stats(topic="t"))["topics"][0]["channels"] == []


async def test_topic_deleted_while_its_first_sub_is_saved(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.publish("t", b"makes the topic")
        files.hold("replace")
        await api.tcp.send(b"SUB t c\n")
        await files.reached()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: api.post("/topic/delete", topic="t"))
            await settle()
            files.release()
        assert await api.tcp.error() == "E_SUB_FAILED SUB failed exiting"
        assert await api.tcp.frame() is None
    async with running_api(tmp_path / "d") as api:
        assert (await api.stats())["topics"] == []
    assert topic_folders(tmp_path / "d") == []


async def test_channel_of_a_disconnected_client_affects_no_other(tmp_path: Path) -> None:
    """The client disconnects while its SUB waits to be saved."""
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=3_600_000) as api:
        await api.tcp.publish("t", b"x")
        assert await api.post("/channel/create", topic="t", channel="first") == DONE
        files.hold("replace")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: api.post("/channel/create", topic="t", channel="second"))
            await files.reached()
            await api.tcp.send(b"SUB t first\n")
            await api.tcp.ok()
            host = api.tcp.stream.socket.getpeername()
            async with connected(f"{host[0]}:{host[1]}") as gone:
                await gone.send(b"SUB t third\n")
                await settle()
            files.release()
    async with running_api(tmp_path / "d") as api:
        channels = (await api.stats(topic="t"))["topics"][0]["channels"]
        names = [channel["channel_name"] for channel in channels]
        assert names[:2] == ["first", "second"]


async def test_scheduled_sync_during_a_deletion(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, sync="interval", sync_every=2) as api:
        assert await api.post("/pub", b"1", topic="t") == OK
        files.hold("sync")
        assert await api.post("/pub", b"2", topic="t") == OK
        await files.reached()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: api.post("/topic/delete", topic="t"))
            await settle()
            assert topic_folders(tmp_path / "d") == ["t.topic"]
            files.release()
        assert topic_folders(tmp_path / "d") == []
        assert (await api.get("/ping")).text == "OK"


async def test_states_are_saved_while_the_files_of_a_deleted_topic_are_removed(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """A checkpoint that waits until the topic is deleted does not wait for its files, which may be many."""
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=1000) as api:
        for topic in ("t", "other"):
            await api.post("/topic/create", topic=topic)
            await api.post("/channel/create", topic=topic, channel="c")
        await api.tcp.publish("other", b"finished")
        await api.tcp.subscribe("other", "c", 1)
        message = await api.tcp.message()
        mock_clock.jump(1)
        await settle()
        async with connected(api.tcp_address) as producer:
            await producer.publish("t", b"to be saved")
        files.hold("rename")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(api.post, "/topic/delete", topic="t"))
            await files.reached()
            mock_clock.jump(1)
            await settle()
            files.release()
            files.hold("remove_folder")
            await files.reached()
            await api.tcp.send(b"FIN %s\n" % message.id)
            for _ in range(3):
                await settle()
                mock_clock.jump(1)
            await settle()
            shutil.copytree(tmp_path / "d", tmp_path / "killed")
            files.release()
        assert topic_folders(tmp_path / "d") == ["other.topic"]
    async with running_api(tmp_path / "killed") as api:
        assert (await api.channel("other", "c"))["depth"] == 0


async def test_ephemeral_channel_stays_if_another_consumer_arrives_in_time(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with connected(bound.tcp_address) as last, connected(bound.tcp_address) as next_one:
            await last.subscribe("t", "c#ephemeral")
            await last.publish("t", b"kept")
            files.hold("replace")
            await next_one.send(b"SUB t c#ephemeral\n")
            await settle()
            await last.send(b"NOPE\n")
            await last.error()
            files.release()
            await next_one.ok()
            await next_one.send(b"RDY 1\n")
            assert (await next_one.message()).body == b"kept"


@pytest.mark.parametrize("topic", ["t", "t#ephemeral"])
async def test_deleted_topic_disconnects_its_consumers_and_can_be_recreated(
    tmp_path: Path, topic: str
) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe(topic, "c", ready_count=5)
        await api.tcp.publish(topic, b"old")
        await api.tcp.message()
        assert await api.post("/topic/delete", topic=topic) == DONE
        assert await api.tcp.frame() is None
        assert await api.post("/pub", b"new", topic=topic) == OK
        assert await api.depth(topic) == 1


async def test_ids_of_a_recreated_topic_are_new(tmp_path: Path) -> None:
    """Also over restarts of any kind in between, and with other publishes."""
    seen: set[bytes] = set()

    async def publish_and_delete(api: Api) -> None:
        for topic in ("t", f"stays-{len(seen)}", "t#ephemeral"):
            async with client_of(api) as client:
                await client.subscribe(topic, "c", ready_count=10)
                await client.publish(topic, b"1", b"2", b"3")
                ids = {message.id for message in await take(client, 3)}
                await client.nothing_more()
            assert len(ids) == 3
            assert not ids & seen
            seen.update(ids)
            if topic.startswith("t"):
                assert await api.post("/topic/delete", topic=topic) == DONE

    for _ in range(2):
        async with running_api(tmp_path / "d") as api:
            for _ in range(3):
                await publish_and_delete(api)
            async with another(api, tmp_path / "d") as after_a_crash:
                await publish_and_delete(after_a_crash)
        shutil.rmtree(tmp_path / "d-copy")
    assert len(seen) == 2 * 4 * 9


async def test_channel_being_deleted_cannot_be_changed(tmp_path: Path) -> None:
    """The change waits for the deletion; it neither succeeds nor restores the channel."""
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=10**9) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        files.hold("replace")
        answers: dict[str, tuple[int, str]] = {}

        async def post(action: str) -> None:
            answers[action] = await api.post(f"/channel/{action}", topic="t", channel="c")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, "delete")
            await files.reached()
            nursery.start_soon(post, "pause")
            await settle()
            files.release()
        assert answers == {"delete": DONE, "pause": (404, "CHANNEL_NOT_FOUND")}
        state = (tmp_path / "d" / "topics" / "t.topic" / "state.json").read_bytes()
        assert json.loads(state)["channels"] == []


async def test_topic_being_deleted_cannot_be_changed(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=10**9) as api:
        await api.post("/topic/create", topic="t")
        files.hold("rename")
        answers: dict[str, tuple[int, str]] = {}

        async def post(action: str) -> None:
            answers[action] = await api.post(f"/topic/{action}", topic="t")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, "delete")
            await files.reached()
            nursery.start_soon(post, "pause")
            await settle()
            files.release()
        assert answers == {"delete": DONE, "pause": (404, "TOPIC_NOT_FOUND")}
