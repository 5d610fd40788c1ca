"""Tests for pausing, emptying and deleting topics and channels while clients use them."""

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.api import DONE, OK, Api, address, running_api
from broker.support import HeldFiles, RawClient, Received, bodies, connected, dpub, identify, pub, settle


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def fin(client: RawClient, message: Received) -> None:
    await client.send(b"FIN " + message.id + b"\n")


async def counts(api: Api, topic: str = "t", channel: str = "c") -> tuple[int, int, int]:
    """Return the depth, in-flight and deferred counts."""
    described = await api.channel(topic, channel)
    return described["depth"], described["in_flight_count"], described["deferred_count"]


# ---------------------------------------------------------------------- pause


async def test_paused_channel_does_everything_but_send(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    """Messages arrive, are finished, requeued and touched, become due and time out; nothing is sent until
    unpaused.
    """
    async with running_api(tmp_path / "d", sync="interval") as api, connected(address(api)) as client:
        await client.send(identify(msg_timeout=5000, heartbeat_interval=60_000, output_buffer_size=-1))
        await client.ok()
        await client.subscribe("t", "c", ready_count=4)
        await client.publish("t", b"finished", b"requeued", b"touched", b"timed out")
        finished, requeued, touched, timed_out = [await client.message() for _ in range(4)]
        assert await api.post("/channel/pause", topic="t", channel="c") == DONE
        await fin(client, finished)
        await client.send(b"REQ " + requeued.id + b" 0\n")
        await client.publish("t", b"arrived")
        await client.send(dpub("t", 1000, b"came due"))
        await client.ok()
        await client.nothing_more()
        assert await counts(api) == (2, 2, 1)
        await settle()
        clock.jump(4)
        await client.send(b"TOUCH " + touched.id + b"\n")
        await client.nothing_more()
        assert await counts(api) == (3, 2, 0)
        await settle()
        clock.jump(1)
        await client.nothing_more()
        assert await counts(api) == (4, 1, 0)
        await client.send(b"FIN " + timed_out.id + b"\n")
        assert "ID not in flight" in await client.error()
        await client.send(b"RDY 10\n")
        assert await api.post("/channel/unpause", topic="t", channel="c") == DONE
        got = [await client.message() for _ in range(4)]
        assert sorted((each.body, each.attempts) for each in got) == [
            (b"arrived", 1), (b"came due", 1), (b"requeued", 2), (b"timed out", 2),
        ]  # fmt: skip
        await fin(client, touched)
        await client.nothing_more()


async def test_paused_channel_does_not_affect_others(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, connected(address(api)) as other:
        await api.tcp.subscribe("t", "paused", ready_count=10)
        await other.subscribe("t", "other", ready_count=10)
        await api.post("/channel/pause", topic="t", channel="paused")
        await other.publish("t", b"1", b"2")
        assert await bodies(other, 2) == [b"1", b"2"]
        await api.tcp.nothing_more()


async def test_client_that_subscribes_to_a_paused_channel_waits(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, connected(address(api)) as client:
        await api.tcp.publish("t", b"before")
        await api.post("/channel/create", topic="t", channel="c")
        await api.post("/channel/pause", topic="t", channel="c")
        await client.subscribe("t", "c", ready_count=1)
        await client.nothing_more()
        await api.post("/channel/unpause", topic="t", channel="c")
        assert await bodies(client, 1) == [b"before"]


@pytest.mark.parametrize("level", ["topic", "channel"])
async def test_pause_while_a_new_subscription_is_saved(tmp_path: Path, level: str) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.publish("t", b"waiting")
        files.hold("replace")
        await api.tcp.send(b"SUB t c\nRDY 1\n")
        await files.reached()
        answers: list[tuple[int, str]] = []

        async def pause() -> None:
            query: dict[str, Any] = {"topic": "t"} | ({"channel": "c"} if level == "channel" else {})
            answers.append(await api.post(f"/{level}/pause", **query))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pause)
            await settle()
            files.release()
        # The channel does not exist before it is saved.
        assert answers == [DONE if level == "topic" else (404, "CHANNEL_NOT_FOUND")]
        await api.tcp.ok()
        assert await bodies(api.tcp, 1) == [b"waiting"]  # the channel got it before the pause of the topic


async def test_paused_topic_lets_consumers_finish(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, connected(address(api)) as client:
        await client.subscribe("t", "c", ready_count=1)
        await client.publish("t", b"1", b"2")
        first = await client.message()
        await api.post("/topic/pause", topic="t")
        await client.publish("t", b"held")
        await fin(client, first)
        second = await client.message()  # the channel has it already
        await fin(client, second)
        await client.nothing_more()
        assert (await api.depth("t"), await counts(api)) == (1, (0, 0, 0))
        await api.post("/topic/unpause", topic="t")
        assert await bodies(client, 1) == [b"held"]


# ---------------------------------------------------------------------- emptying


async def test_emptied_channel_serves_all_its_consumers_again(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, connected(address(api)) as first:
        async with connected(address(api)) as second:
            for client in (first, second):
                await client.subscribe("t", "c", ready_count=2)
            await api.tcp.publish("t", *[b"%d" % n for n in range(10)])
            held = [await first.message(), await second.message()]
            await bodies(first, 1)
            await bodies(second, 1)
            assert await counts(api) == (6, 4, 0)
            assert await api.post("/channel/empty", topic="t", channel="c") == DONE
            assert await counts(api) == (0, 0, 0)
            described = await api.channel("t", "c")
            assert [client["in_flight_count"] for client in described["clients"]] == [0, 0]
            assert described["message_count"] == 10
            for client, message in zip((first, second), held, strict=True):
                for verb in (b"FIN %s", b"TOUCH %s", b"REQ %s 0"):
                    await client.send(verb % message.id + b"\n")
                    assert "ID not in flight" in await client.error()
            await api.tcp.publish("t", b"a", b"b", b"c", b"d")
            assert sorted(await bodies(first, 2) + await bodies(second, 2)) == [b"a", b"b", b"c", b"d"]


async def test_emptied_topic_does_not_affect_its_channels(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, connected(address(api)) as client:
        await client.subscribe("t", "c", ready_count=1)
        await client.publish("t", b"in flight", b"ready")
        message = await client.message()
        await api.post("/topic/pause", topic="t")
        await client.publish("t", b"dropped", b"dropped")
        await client.send(dpub("t", 1, b"dropped"))
        await client.ok()
        assert await api.post("/topic/empty", topic="t") == DONE
        await api.post("/topic/unpause", topic="t")
        await fin(client, message)
        assert await bodies(client, 1) == [b"ready"]
        await client.send(b"RDY 10\n")
        await client.publish("t", b"new")
        assert await bodies(client, 1) == [b"new"]
        await client.nothing_more()


# ---------------------------------------------------------------------- deleting


async def test_deleted_channel_disconnects_only_its_clients(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, connected(address(api)) as doomed:
        async with connected(address(api)) as too, connected(address(api)) as kept:
            for client, channel in ((doomed, "doomed"), (too, "doomed"), (kept, "kept")):
                await client.subscribe("t", channel, ready_count=10)
            await api.tcp.publish("t", b"1", b"2")
            await settle()
            assert await api.post("/channel/delete", topic="t", channel="doomed") == DONE
            for client in (doomed, too):
                while (frame := await client.frame()) is not None:
                    assert frame[0] == 2  # a message that was sent before; no error
            assert await bodies(kept, 2) == [b"1", b"2"]
            await api.tcp.subscribe("t", "doomed", ready_count=10)
            await kept.publish("t", b"3")
            assert await bodies(api.tcp, 1) == [b"3"]


async def test_client_of_a_deleted_channel_does_not_affect_a_new_one(tmp_path: Path) -> None:
    """Its commands during the deletion do not apply to a later channel with this name."""
    async with running_api(tmp_path / "d") as api, connected(address(api)) as client:
        await client.subscribe("t", "c", ready_count=10)
        await client.publish("t", b"x")
        message = await client.message()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: api.post("/channel/delete", topic="t", channel="c"))
            for _ in range(20):
                try:
                    await client.send(b"FIN " + message.id + b"\nRDY 5\nREQ " + message.id + b" 10\n")
                except trio.BrokenResourceError:
                    break
        await api.tcp.subscribe("t", "c", ready_count=1)
        await api.tcp.publish("t", b"new")
        assert await bodies(api.tcp, 1) == [b"new"]
        assert (await api.channel("t", "c"))["client_count"] == 1


@pytest.mark.parametrize("what", ["SUB t c\n", "PUB", "MPUB", "DPUB", "create", "channel", "pub"])
async def test_requests_during_the_deletion_of_a_topic_are_refused(tmp_path: Path, what: str) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api, connected(address(api)) as client:
        await client.publish("t", b"old")
        files.hold("sync")
        await client.send(pub("t", b"under way"))
        await files.reached()
        async with trio.open_nursery() as nursery, connected(address(api)) as late:
            nursery.start_soon(lambda: api.post("/topic/delete", topic="t"))
            await settle()
            if what == "create":
                assert await api.post("/topic/create", topic="t") == (503, "EXITING")
            elif what == "channel":
                assert await api.post("/channel/create", topic="t", channel="c") == (503, "EXITING")
            elif what == "pub":
                assert await api.post("/pub", b"x", topic="t") == (503, "EXITING")
            elif what.startswith("SUB"):
                await late.send(what.encode())
                assert await late.error() == "E_SUB_FAILED SUB failed exiting"
            else:
                body = {"PUB": pub("t", b"x"), "DPUB": dpub("t", 5, b"x")}.get(what)
                await late.send(body or b"MPUB t\n\0\0\0\x09\0\0\0\x01\0\0\0\x01x")
                assert await late.error() == f"E_{what}_FAILED {what} failed exiting"
            files.release()
        await client.ok()
        assert await api.post("/pub", b"new", topic="t") == OK
        await api.tcp.subscribe("t", "c", ready_count=5)
        assert await bodies(api.tcp, 1) == [b"new"]


async def test_changes_during_a_deletion_affect_nothing_else(tmp_path: Path) -> None:
    """They are refused, and a recreated topic is neither paused nor has their channels."""
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api, connected(address(api)) as client:
        await client.publish("t", b"old")
        await api.post("/channel/create", topic="t", channel="c")
        files.hold("sync")
        await client.send(pub("t", b"under way"))
        await files.reached()
        answers: list[tuple[int, str]] = []

        async def change(path: str, **query: Any) -> None:
            answers.append(await api.post(path, topic="t", **query))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: change("/topic/delete"))
            await settle()
            for path in ("/topic/pause", "/topic/empty"):
                nursery.start_soon(change, path)
            for path in ("/channel/pause", "/channel/empty"):
                nursery.start_soon(lambda path=path: change(path, channel="c"))  # type: ignore[misc]
            await settle()
            files.release()
        gone = [(404, f"{what}_NOT_FOUND") for what in ("TOPIC", "TOPIC", "CHANNEL", "CHANNEL")]
        assert sorted(answers) == sorted([DONE, *gone])
        await api.tcp.publish("t", b"new")
        (topic,) = (await api.stats(topic="t"))["topics"]
        assert (topic["paused"], topic["channels"], topic["depth"]) == (False, [], 1)
