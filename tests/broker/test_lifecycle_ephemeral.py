"""Tests for ephemeral channels, deleted with their last client, and ephemeral topics, deleted with their last
channel.
"""

import os
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from broker.api import DONE, OK, address, running_api
from broker.support import bodies, connected, dpub, pub, running_broker, settle


async def test_race_of_the_last_client_with_a_new_one(tmp_path: Path) -> None:
    """Repeatedly: each new client is served by the old channel or a new one, and there is only one."""
    async with running_api(tmp_path / "d", sync="interval") as api, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(address(api))) for _ in range(50)]
        await clients[0].subscribe("t", "c#ephemeral", ready_count=1)
        for leaving, coming in pairwise(clients):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leaving.stream.aclose)
                nursery.start_soon(coming.send, b"SUB t c#ephemeral\nRDY 1\n")
            await coming.ok()
            body = str(id(coming)).encode()
            await api.tcp.publish("t", body)
            # The previous client did not finish its message.
            while (message := await coming.message()).body != body:
                await coming.send(b"FIN " + message.id + b"\n")
            await settle()
            assert (await api.channel("t", "c#ephemeral"))["client_count"] == 1


async def test_many_concurrent_clients(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", sync="interval") as api:

        async def come_and_go() -> None:
            for _ in range(10):
                async with connected(address(api)) as client:
                    await client.subscribe("e#ephemeral", "c#ephemeral", ready_count=1)

        async def publish() -> None:
            async with connected(address(api)) as client:
                for _ in range(100):
                    await client.publish("e#ephemeral", b"x")

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(come_and_go)
            nursery.start_soon(publish)
        await settle()
        for topic in (await api.stats())["topics"]:
            assert topic["channels"] == []  # a publish may have recreated the topic


async def test_publish_to_a_deleted_ephemeral_topic_recreates_it(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        async with connected(address(api)) as client:
            await client.subscribe("e#ephemeral", "c", ready_count=1)
            await client.publish("e#ephemeral", b"old", b"older")
            await client.message()
            assert await api.post("/channel/delete", topic="e#ephemeral", channel="c") == DONE
            assert (await api.stats(topic="e#ephemeral"))["topics"] is None
            await api.tcp.publish("e#ephemeral", b"new")
            assert await client.frame() is None
        assert await api.depth("e#ephemeral") == 1
        await api.tcp.subscribe("e#ephemeral", "c", ready_count=5)
        assert await bodies(api.tcp, 1) == [b"new"]
        await api.tcp.nothing_more()


async def test_ephemeral_topic_exists_as_long_as_a_channel(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("e#ephemeral", b"waits for its first channel")
        async with connected(address(api)) as client:
            await client.subscribe("e#ephemeral", "durable", ready_count=1)
            assert await bodies(client, 1) == [b"waits for its first channel"]
            async with connected(address(api)) as other:
                await other.subscribe("e#ephemeral", "c#ephemeral")
        await settle()
        (topic,) = (await api.stats(topic="e#ephemeral"))["topics"]
        assert [channel["channel_name"] for channel in topic["channels"]] == ["durable"]
        async with connected(address(api)) as client:
            await client.subscribe("e#ephemeral", "durable", ready_count=1)
            assert (await client.message()).attempts == 2
        assert await api.post("/channel/delete", topic="e#ephemeral", channel="durable") == DONE
        assert (await api.stats(topic="e#ephemeral"))["topics"] is None
    assert not [name for name in os.listdir(tmp_path / "d" / "topics") if name.startswith("e#")]


async def test_nothing_ephemeral_survives_a_restart(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with running_api(tmp_path / "d") as api:
            clients = [await stack.enter_async_context(connected(address(api))) for _ in range(3)]
            await clients[0].subscribe("e#ephemeral", "durable")
            await clients[1].subscribe("t", "c#ephemeral")
            await clients[2].subscribe("t", "durable")
    async with running_api(tmp_path / "d") as api:
        (topic,) = (await api.stats())["topics"]
        assert topic["topic_name"] == "t"
        assert [channel["channel_name"] for channel in topic["channels"]] == ["durable"]


async def test_messages_wait_in_a_durable_topic_that_lost_its_only_ephemeral_channel(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        async with connected(address(api)) as client:
            await client.subscribe("t", "c#ephemeral", ready_count=1)
            await client.publish("t", b"gone with its channel")
            await client.message()
        await settle()
        await api.tcp.publish("t", b"waits")
        assert await api.depth("t") == 1
        await api.tcp.subscribe("t", "c#ephemeral", ready_count=5)
        assert await bodies(api.tcp, 1) == [b"waits"]
        await api.tcp.nothing_more()


@pytest.mark.parametrize("topic", ["t", "e#ephemeral"])
async def test_deadlines_of_a_deleted_channel_are_ignored(tmp_path: Path, topic: str) -> None:
    async with running_api(tmp_path / "d") as api:
        async with connected(address(api)) as client:
            await client.subscribe(topic, "c#ephemeral", ready_count=1)
            await client.send(dpub(topic, 30, b"deferred") + pub(topic, b"in flight"))
            await client.ok()
            await client.ok()
            await client.send(b"REQ " + (await client.message()).id + b" 20\n")
        await api.tcp.subscribe("other", "c", ready_count=1)
        await api.tcp.send(dpub("other", 40, b"later than those"))
        await api.tcp.ok()
        assert await bodies(api.tcp, 1) == [b"later than those"]
        assert await api.post("/pub", b"x", topic=topic) == OK


async def test_consumer_limit_of_an_ephemeral_channel(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", max_channel_consumers=2) as bound:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(5)]
            for client in clients[:2]:
                await client.subscribe("t", "c#ephemeral")
            await clients[2].send(b"SUB t c#ephemeral\n")
            assert await clients[2].error() == (
                "E_SUB_FAILED SUB failed consumers for t:c#ephemeral exceeds limit of 2"
            )
            assert await clients[2].frame() is None
            await clients[3].subscribe("t", "another")  # the limit is per channel
            await clients[0].stream.aclose()
            await settle()
            await clients[4].subscribe("t", "c#ephemeral", ready_count=1)
            await clients[3].publish("t", b"x")
            assert await bodies(clients[4], 1) == [b"x"]
