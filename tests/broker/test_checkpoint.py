"""Tests that checkpoints are made in small steps, so that a broker with much state keeps serving its clients."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.state import SECOND, Fixture
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.ingest.publication import Publication
from trio_nsq.broker.server import Server
from trio_nsq.broker.state.checkpoint import Checkpoint, without_messages
from trio_nsq.broker.storage.data_folder import DataFolder, decode_state
from trio_nsq.protocol import pack_messages


def encoded(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the encoded checkpoint when it is complete."""
    for _ in checkpoint.encode():
        pass
    content: dict[str, Any] = json.loads(checkpoint.content)
    return content


def busy_channel(fixture: Fixture, kind: str, count: int) -> None:
    """Return a channel with this many messages in flight, deferred, requeued, and deferred without being
    distributed.
    """
    channel = fixture.channel()
    if kind == "waiting":
        fixture.topic.pause()
    fixture.publish_many(count, each=1 if kind == "waiting" else 500, prefix=kind)
    if kind in ("in flight", "requeued"):
        subscriber = fixture.subscriber(ready=count)
        received = fixture.pump(channel)
        assert sum(len(messages) for _, messages in received) == count
        if kind == "requeued":
            subscriber.leave()


@pytest.mark.parametrize("kind", ["in flight", "requeued"])
def test_concurrent_changes_are_not_included(kind: str) -> None:
    fixture = Fixture()
    busy_channel(fixture, kind, 5000)
    checkpoint = fixture.topic.checkpoint()
    steps = checkpoint.encode()
    assert [next(steps), next(steps)] == [1000, 1000]
    fixture.topic.empty()
    fixture.channel().empty()
    fixture.publish(b"later", defer_ms=1000)
    for _ in steps:
        pass
    (channel,) = json.loads(checkpoint.content)["channels"]
    assert sorted(channel["unfinished"]) == [[n, 1] for n in range(5000)]
    assert channel["deferred"] == []
    assert checkpoint.first_needed == 0
    (channel,) = encoded(fixture.topic.checkpoint())["channels"]
    assert channel["unfinished"] == []
    assert len(channel["deferred"]) == 1


def test_steps_are_small() -> None:
    fixture = Fixture()
    for number in range(300):
        fixture.channel(f"c{number}")
    for _ in range(20):
        fixture.publish(*[b"x"] * 100, defer_ms=1000)
    checkpoint = fixture.topic.checkpoint()
    steps = list(checkpoint.encode())
    assert len(steps) >= 20
    assert max(steps) <= 2000
    assert len(json.loads(checkpoint.content)["channels"]) == 300


def test_undistributed_deferred_messages_take_steps_too() -> None:
    fixture = Fixture()
    for _ in range(5000):
        fixture.publish(b"x", defer_ms=1000)
    checkpoint = fixture.topic.checkpoint()
    assert len(list(checkpoint.encode())) >= 5
    assert len(json.loads(checkpoint.content)["waiting_deferred"]) == 5000


def test_unchanged_parts_are_not_encoded_again() -> None:
    fixture = Fixture()
    channels = [fixture.channel(f"c{number}") for number in range(100)]
    fixture.publish(*[b"x"] * 100, defer_ms=1000)
    encoded(fixture.topic.checkpoint())
    before = [channel.state() for channel in channels]
    fixture.publish(b"changes no channel")
    subscriber = fixture.subscriber("c7", ready=10)
    assert subscriber.receive_bodies() == [b"changes no channel"]
    checkpoint = fixture.topic.checkpoint()
    assert sum(checkpoint.encode()) < 1000
    after = [channel.state() for channel in channels]
    assert [number for number in range(100) if before[number] is not after[number]] == [7]
    assert json.loads(checkpoint.content)["channels"][7]["unfinished"] == [[100, 1]]


def test_restored_topic_is_the_same() -> None:
    fixture = Fixture()
    busy_channel(fixture, "in flight", 1500)
    fixture.publish(*[b"x"] * 700, defer_ms=1000)
    fixture.publish_many(10)
    state = encoded(fixture.topic.checkpoint())
    assert state == fixture.topic.snapshot()
    restarted = fixture.restarted(state)
    assert restarted.counts() == (1510, 0, 700)
    restarted.now_ns += 2 * SECOND
    assert sorted(json.loads(json.dumps(restarted.topic.snapshot()))) == sorted(state)


async def test_clients_are_served_while_a_large_channel_is_saved(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "d")
    async with trio.open_nursery() as nursery:
        server = Server(BrokerOptions(data_path=tmp_path / "d"), folder, nursery)
        topic = server.broker.topic("t")
        server.broker.topic("t").add_channel("c")
        later_ns = server.clock.now_ns() + 3600 * SECOND
        for _ in range(50):
            await server.topics.publish("t", [Publication([pack_messages([b"x"] * 1000)], later_ns)])
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        nursery.start_soon(count_turns)
        await server.checkpointer.save(topic)
        nursery.cancel_scope.cancel()
    assert turns >= 50
    assert (
        len(decode_state((tmp_path / "d" / "topics" / "t.topic" / "state.json").read_bytes())["channels"])
        == 1
    )
    folder.close()


def test_a_state_from_before_there_were_settings_gives_one_without_messages() -> None:
    channels = [{"name": "c", "paused": True}, {"name": "d", "paused": False}]
    made = json.loads(without_messages([{"name": "t", "paused": False, "channels": channels}]))
    assert (made["name"], made["paused"], made["settings"]) == ("t", False, {})
    assert [(each["name"], each["paused"], each["settings"]) for each in made["channels"]] == [
        ("c", True, {}),
        ("d", False, {}),
    ]
