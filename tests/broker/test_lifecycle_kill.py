"""Tests that acknowledged changes by an operator survive a kill directly after the answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from broker.support import RawClient, connected, dpub
from interop.peers import Broker, qcli_serve

pytestmark = pytest.mark.slow
FLAGS = ("--checkpoint-interval=1h",)  # only saves that a client waits for


def kill(broker: Broker) -> None:
    broker.process.kill()
    broker.process.wait()


def topics(broker: Broker) -> dict[str, dict[str, Any]]:
    """Return the entry of each topic in /stats, with its channels by name."""
    found = json.loads(broker.http("GET", "/stats", format="json"))["topics"]
    for topic in found:
        topic["channels"] = {channel["channel_name"]: channel for channel in topic["channels"]}
    return {topic["topic_name"]: topic for topic in found}


async def receives(broker: Broker, topic: str, *bodies: bytes, channel: str = "c") -> None:
    """Check that a new consumer gets exactly these messages."""
    async with connected(broker.tcp_address) as client:
        await client.subscribe(topic, channel, ready_count=100)
        assert [(await client.message()).body for _ in bodies] == list(bodies)
        await client.nothing_more()


async def publish(broker: Broker, topic: str, *bodies: bytes, defer_ms: int = 0) -> None:
    async with connected(broker.tcp_address) as client:
        for body in bodies:
            if defer_ms:
                await client.send(dpub(topic, defer_ms, body))
                await client.ok()
            else:
                await client.publish(topic, body)


async def in_flight(broker: Broker, topic: str, client: RawClient) -> None:
    await client.subscribe(topic, "c", ready_count=1)
    await client.message()


async def test_pauses_creations_and_deletions_survive_a_kill(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "d", *FLAGS) as broker:
        for name in ("paused", "unpaused", "deleted", "anew", "created"):
            broker.create(name, "c", "other")
        await publish(broker, "deleted", b"gone")
        await publish(broker, "anew", b"gone")
        broker.http("POST", "/topic/pause", topic="paused")
        broker.http("POST", "/channel/pause", topic="paused", channel="c")
        for path in ("pause", "unpause"):
            broker.http("POST", f"/channel/{path}", topic="unpaused", channel="c")
        for path in ("pause", "unpause"):
            broker.http("POST", f"/topic/{path}", topic="unpaused")
        broker.http("POST", "/topic/delete", topic="anew")
        await publish(broker, "anew", b"kept")
        broker.http("POST", "/channel/delete", topic="created", channel="other")
        await publish(broker, "created", b"after its channel was made")
        broker.http("POST", "/topic/delete", topic="deleted")
        kill(broker)
    with qcli_serve(tmp_path / "d", *FLAGS) as broker:
        found = topics(broker)
        assert sorted(found) == ["anew", "created", "paused", "unpaused"]
        assert [found[name]["paused"] for name in ("paused", "unpaused")] == [True, False]
        assert [found[name]["channels"]["c"]["paused"] for name in ("paused", "unpaused")] == [True, False]
        assert not found["paused"]["channels"]["other"]["paused"]
        assert list(found["created"]["channels"]) == ["c"]
        await receives(broker, "created", b"after its channel was made")
        assert found["anew"]["channels"] == {}
        await receives(broker, "anew", b"kept")


async def test_emptying_survives_a_kill(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "d", *FLAGS) as broker:
        for name in ("channel", "topic"):
            broker.create(name, "c", "other")
        broker.create("alone")
        await publish(broker, "channel", b"in flight", b"ready")
        await publish(broker, "channel", b"deferred", defer_ms=1)
        await publish(broker, "alone", b"gone")
        await publish(broker, "alone", b"gone, too", defer_ms=1)
        await publish(broker, "topic", b"1")
        broker.http("POST", "/topic/pause", topic="topic")
        await publish(broker, "topic", b"gone")
        await publish(broker, "topic", b"gone, too", defer_ms=1)
        broker.http("POST", "/topic/empty", topic="alone")
        broker.http("POST", "/topic/empty", topic="topic")
        async with connected(broker.tcp_address) as client:
            await in_flight(broker, "channel", client)
            broker.http("POST", "/channel/empty", topic="channel", channel="c")
            kill(broker)
    with qcli_serve(tmp_path / "d", *FLAGS) as broker:
        await publish(broker, "channel", b"new")
        await receives(broker, "channel", b"new")
        other = topics(broker)["channel"]["channels"]["other"]
        assert other["depth"] + other["deferred_count"] == 4
        await publish(broker, "topic", b"2")
        broker.http("POST", "/topic/unpause", topic="topic")
        await receives(broker, "topic", b"1", b"2")
        await receives(broker, "topic", b"1", b"2", channel="other")
        await publish(broker, "alone", b"new")
        await receives(broker, "alone", b"new")


async def test_subscription_survives_a_kill(tmp_path: Path) -> None:
    """The channel created by a SUB existed before the message, so it gets the message after the restart."""
    with qcli_serve(tmp_path / "d", *FLAGS) as broker:
        async with connected(broker.tcp_address) as client:
            await client.publish("t", b"before any channel")
            await client.subscribe("t", "first")
            await client.publish("t", b"for the first")
            async with connected(broker.tcp_address) as second:
                await second.subscribe("t", "second")
                await second.publish("t", b"for both")
                kill(broker)
    with qcli_serve(tmp_path / "d", *FLAGS) as broker:
        await receives(broker, "t", b"for both", channel="second")
        await receives(broker, "t", b"before any channel", b"for the first", b"for both", channel="first")
