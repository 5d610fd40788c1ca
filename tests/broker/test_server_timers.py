"""Tests for the broker's timers, with a clock that the tests move: no deadline is missed, and none is early."""

from pathlib import Path

import pytest
import trio
import trio.testing

from broker.api import running_api
from broker.support import connected, dpub, identify, running_broker, settle


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def test_deferred_messages_that_wait_for_the_first_channel(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(dpub("t", 5000, b"later"))
        await client.ok()
        await client.subscribe("t", "c", ready_count=1)
        await client.nothing_more()
        await settle()
        clock.jump(5)
        assert (await client.message()).body == b"later"


async def test_deferred_messages_behind_a_paused_topic(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=1)
        await api.post("/topic/pause", topic="t")
        await api.tcp.send(dpub("t", 5000, b"later"))
        await api.tcp.ok()
        await api.post("/topic/unpause", topic="t")
        await api.tcp.nothing_more()
        await settle()
        clock.jump(5)
        assert (await api.tcp.message()).body == b"later"


async def test_deferred_messages_of_a_broker_that_was_restarted(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.send(dpub("t", 3_600_000, b"later"))
        await api.tcp.ok()
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=1)
        await api.tcp.nothing_more()
        assert (await api.channel("t", "c"))["deferred_count"] == 1
        await settle()
        clock.jump(3600)
        await settle()
        channel = await api.channel("t", "c")
        assert (channel["deferred_count"], channel["in_flight_count"]) == (0, 1)


async def test_each_connection_has_its_own_message_timeout(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """The shorter timeout counts, whichever was set first."""
    async with running_broker(tmp_path / "d") as bound:
        async with connected(bound.tcp_address) as patient, connected(bound.tcp_address) as hasty:
            for client, timeout_ms in ((patient, 50_000), (hasty, 2000)):
                await client.send(identify(msg_timeout=timeout_ms, heartbeat_interval=60_000))
                await client.ok()
                await client.subscribe("t", "c")
            await patient.publish("t", b"1", b"2")
            await patient.send(b"RDY 1\n")
            first = await patient.message()
            await hasty.send(b"RDY 1\n")
            second = await hasty.message()
            await settle()
            clock.jump(2)
            again = await hasty.message()
            assert (again.id, again.attempts) == (second.id, 2)
            await hasty.send(b"RDY 2\nFIN " + again.id + b"\n")
            await hasty.nothing_more()
            await settle()
            clock.jump(48)
            again = await hasty.message()
            assert (again.id, again.attempts) == (first.id, 2)


async def test_earlier_deadline_moves_the_alarm(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        for delay_ms in (9000, 3000, 6000):
            await client.send(dpub("t", delay_ms, b"%d" % delay_ms))
            await client.ok()
        for delay_ms in (3000, 6000, 9000):
            await settle()
            clock.jump(3)
            assert (await client.message()).body == b"%d" % delay_ms
            await client.nothing_more()
