"""Tests for private channels, which begin at the end of the topic: the first other channel still gets the
backlog.
"""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker.api import DONE, Api, running_api
from broker.state import Fixture, Subscriber, disk_log
from broker.support import RawClient, connected, dpub, identify, running_broker, settle, until
from interop.peers import qcli_serve
from trio_nsq.broker.state.checkpoint import first_needed

LOOK = "look#ephemeral"


def look(fixture: Fixture, name: str = LOOK) -> Subscriber:
    """Subscribe to a private channel."""
    return Subscriber(fixture, fixture.topic.add_channel(name, private=True), ready=100)


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("open_meanwhile", [True, False])
def test_first_other_channel_gets_all_messages(open_meanwhile: bool) -> None:
    fixture = Fixture()
    backlog = fixture.publish_many(3, prefix="before")
    viewer = look(fixture)
    assert viewer.receive_bodies() == []
    more = fixture.publish_many(2, prefix="during")
    assert viewer.receive_bodies() == more
    assert fixture.topic.depth == 5
    if not open_meanwhile:
        viewer.leave()
        fixture.topic.remove_channel(viewer.channel)
        more += fixture.publish_many(1, prefix="after")
    assert fixture.drain("first") == backlog + more
    assert fixture.topic.depth == 0


def test_private_channel_beside_others() -> None:
    fixture = Fixture()
    fixture.channel("first")
    before = fixture.publish_many(2, prefix="before")
    viewer = look(fixture)
    new = fixture.publish_many(2, prefix="new")
    assert viewer.receive_bodies() == new
    assert fixture.drain("first") == before + new
    assert look(fixture, "again#ephemeral").receive_bodies() == []


def test_deleted_channel_gets_no_more_messages() -> None:
    fixture = Fixture()
    viewer = look(fixture)
    fixture.topic.remove_channel(viewer.channel)
    fixture.publish(b"now")
    fixture.publish(b"deferred", defer_ms=100)
    assert (viewer.channel.message_count, viewer.channel.deferred_count) == (0, 0)


def test_deferred_messages() -> None:
    fixture = Fixture()
    fixture.publish(b"deferred before", defer_ms=100)
    viewer = look(fixture)
    fixture.publish(b"deferred", defer_ms=100)
    fixture.publish(b"for another", only="first")
    fixture.publish(b"now")
    assert viewer.receive_bodies() == [b"now"]
    assert fixture.topic.depth == 1
    assert fixture.counts(LOOK) == (0, 1, 1)
    fixture.channel("first")
    assert fixture.counts("first") == (1, 0, 3)
    fixture.pass_ms(100)
    assert viewer.receive_bodies() == [b"deferred"]
    assert sorted(fixture.drain("first")) == [b"deferred", b"deferred before", b"for another", b"now"]


def test_pause_affects_the_others_only() -> None:
    fixture = Fixture()
    fixture.channel("first")
    fixture.topic.pause()
    fixture.publish(b"waits")
    viewer = look(fixture)
    fixture.publish(b"a", b"b")
    fixture.publish(b"deferred", defer_ms=10)
    fixture.pass_ms(10)
    assert sorted(viewer.receive_bodies()) == [b"a", b"b", b"deferred"]
    assert (fixture.topic.depth, fixture.drain("first")) == (3, [])
    fixture.topic.unpause()
    assert viewer.receive_bodies() == []
    fixture.pass_ms(10)
    assert sorted(fixture.drain("first")) == [b"a", b"b", b"deferred", b"waits"]


def test_emptying_the_topic_does_not_affect_a_private_channel() -> None:
    fixture = Fixture()
    fixture.publish(b"gone")
    viewer = look(fixture)
    fixture.publish(b"seen")
    fixture.topic.empty()
    assert fixture.topic.depth == 0
    assert viewer.receive_bodies() == [b"seen"]
    assert fixture.drain("first") == []


def test_private_channel_can_seek_and_be_emptied() -> None:
    fixture = Fixture()
    old = fixture.publish_many(2, prefix="old")
    fixture.publish(b"deferred", defer_ms=50)
    viewer = look(fixture)
    fixture.seek(0, viewer.channel.name)
    assert viewer.receive_bodies() == old
    fixture.pass_ms(50)
    assert viewer.receive_bodies() == [b"deferred"]
    fixture.publish(b"dropped")
    viewer.channel.empty()
    assert viewer.receive_bodies() == []
    fixture.channel("first")
    fixture.pass_ms(0)
    assert sorted(fixture.drain("first")) == [b"deferred", b"dropped", *old]


def test_existing_channel_does_not_change_its_kind() -> None:
    fixture = Fixture()
    real = fixture.channel("real#ephemeral")
    private = fixture.topic.add_channel(LOOK, private=True)
    assert fixture.topic.add_channel("real#ephemeral", private=True) is real
    assert fixture.channel(LOOK) is private
    assert (real.private, private.private) == (False, True)


def test_backlog_and_messages_of_a_private_channel_are_kept(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"))
    fixture.publish_many(5)
    viewer = look(fixture)
    assert first_needed(fixture.topic.snapshot()) == fixture.topic.oldest_waiting == 0
    fixture.channel("first")
    fixture.drain("first")
    fixture.publish_many(3)
    fixture.drain("first")
    assert first_needed(fixture.topic.snapshot()) == fixture.topic.oldest_waiting == 5
    viewer.finish(viewer.receive())
    assert first_needed(fixture.topic.snapshot()) == fixture.topic.oldest_waiting == 8


def test_private_channel_does_not_survive_a_restart() -> None:
    fixture = Fixture()
    bodies = fixture.publish_many(2)
    fixture.publish(b"deferred", defer_ms=1000)
    viewer = look(fixture)
    state = fixture.topic.snapshot()
    bodies += fixture.publish_many(2, prefix="n")
    viewer.receive()
    for saved in (state, fixture.topic.snapshot()):
        after = fixture.restarted(saved)
        assert list(after.topic.channels) == []
        assert after.topic.depth == 4
        assert after.drain("first") == bodies
        after.pass_ms(1000)
        assert after.drain("first") == [b"deferred"]


@pytest.mark.parametrize("limit", [{"max_messages": 3}, {"max_bytes": 400}])
@pytest.mark.parametrize("on_disk", [True, False])
def test_private_channel_never_makes_a_topic_full(
    tmp_path: Path, limit: dict[str, int], on_disk: bool
) -> None:
    fixture = Fixture(disk_log(tmp_path / "log")) if on_disk else Fixture()
    topic = fixture.topic
    topic.configure(limit)
    channel = fixture.channel("first")
    viewer = look(fixture)
    bodies = []
    for number in range(20):
        bodies.append(b"%d" % number)
        assert topic.limits.why_full(1, 100) == ""
        fixture.publish(bodies[-1])
        topic.limits.make_room()
        fixture.drain("first")
    shown = viewer.receive_bodies()
    assert shown == bodies[-len(shown) :]
    assert 0 < len(shown) < 20
    assert viewer.channel.messages.dropped_count == 20 - len(shown)
    assert (channel.messages.dropped_count, topic.limits.dropped_count) == (0, 0)


def test_backlog_makes_a_topic_full_in_spite_of_a_private_channel() -> None:
    fixture = Fixture()
    fixture.topic.configure({"max_messages": 3})
    viewer = look(fixture)
    fixture.publish_many(3)
    assert "3 messages wait" in fixture.topic.limits.why_full(1, 10)
    fixture.topic.limits.make_room()
    assert len(viewer.receive_bodies()) == fixture.topic.depth == 3


def test_dropping_the_oldest() -> None:
    fixture = Fixture()
    fixture.topic.configure({"max_messages": 2, "when_full": "drop-oldest"})
    viewer = look(fixture)
    fixture.publish_many(5)
    fixture.topic.limits.make_room()
    assert (viewer.channel.messages.dropped_count, fixture.topic.limits.dropped_count) == (3, 3)
    assert viewer.receive_bodies() == fixture.drain("first") == [b"m3", b"m4"]


# ---------------------------------------------------------------------- over TCP and HTTP


async def private_client(stack: AsyncExitStack, address: str, topic: str = "t") -> RawClient:
    """A client that has subscribed to a private channel."""
    client = await stack.enter_async_context(connected(address))
    await client.send(identify(private_channel=True, feature_negotiation=True))
    frame = await client.frame()
    assert frame is not None
    assert frame[1].endswith(b',"private_channel":true}')
    await client.subscribe(topic, LOOK, ready_count=100)
    return client


def address(api: Api) -> str:
    """Return the broker's address."""
    return "%s:%d" % api.tcp.stream.socket.getpeername()[:2]


async def test_subscribers_of_a_topic_with_a_backlog(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, AsyncExitStack() as stack:
        await api.tcp.publish("t", b"backlog")
        async with AsyncExitStack() as while_open:
            client = await private_client(while_open, address(api))
            await api.tcp.publish("t", b"new")
            assert (await client.message()).body == b"new"
            await client.nothing_more()
            assert await api.depth("t") == 2
        await settle()
        assert (await api.stats(topic="t"))["topics"][0]["channels"] == []
        assert await api.depth("t") == 2
        await private_client(stack, address(api))
        await api.tcp.subscribe("t", "c", ready_count=10)
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"backlog", b"new"]


async def test_deferred_messages_arrive_when_due(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, AsyncExitStack() as stack:
        client = await private_client(stack, address(api))
        await api.tcp.send(dpub("t", 50, b"deferred"))
        await api.tcp.ok()
        assert (await client.message()).body == b"deferred"
        await api.tcp.subscribe("t", "c", ready_count=10)
        assert (await api.tcp.message()).body == b"deferred"


async def test_private_channel_must_be_ephemeral(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.send(identify(private_channel=True) + b"SUB t c\n")
        await api.tcp.ok()
        assert await api.tcp.error() == (
            "E_BAD_CHANNEL SUB channel name c: a private channel's name must end in #ephemeral"
        )
        assert (await api.stats(topic="t"))["topics"] is None


@pytest.mark.parametrize("backlog", [True, False])
async def test_ephemeral_topic_with_messages_outlives_its_private_channel(
    tmp_path: Path, backlog: bool
) -> None:
    async with running_api(tmp_path / "d") as api:
        async with AsyncExitStack() as while_open:
            await private_client(while_open, address(api), "e#ephemeral")
            if backlog:
                await api.tcp.publish("e#ephemeral", b"waits")
        await settle()
        assert ((await api.stats(topic="e#ephemeral"))["topics"] is not None) == backlog
        if backlog:
            await api.tcp.subscribe("e#ephemeral", "c", ready_count=10)
            assert (await api.tcp.message()).body == b"waits"
            assert await api.post("/channel/delete", topic="e#ephemeral", channel="c") == DONE
            assert (await api.stats(topic="e#ephemeral"))["topics"] is None


@pytest.mark.slow
async def test_backlog_survives_a_kill(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "d", "--checkpoint-interval=50ms") as broker:
        broker.create("t")
        async with connected(broker.tcp_address) as publisher, AsyncExitStack() as stack:
            await publisher.publish("t", b"backlog")
            client = await private_client(stack, broker.tcp_address)
            await publisher.publish("t", b"new")
            message = await client.message()
            await client.send(b"FIN " + message.id + b"\n")
            broker.http("POST", "/topic/pause", topic="t")  # saves the topic
            broker.http("POST", "/topic/unpause", topic="t")
            broker.process.kill()
            broker.process.wait()
    async with AsyncExitStack() as stack:
        broker = stack.enter_context(qcli_serve(tmp_path / "d"))
        client = await stack.enter_async_context(connected(broker.tcp_address))
        await client.subscribe("t", "c", ready_count=10)
        assert [(await client.message()).body for _ in range(2)] == [b"backlog", b"new"]


async def test_messages_needed_only_by_a_private_channel_are_deleted_after_it_got_them(
    tmp_path: Path,
) -> None:
    """Without any other change of the topic."""

    def files() -> int:
        return len(list((tmp_path / "d" / "topics" / "t.topic").glob("*.log")))

    running = running_broker(tmp_path / "d", checkpoint_interval_ms=1, max_bytes_per_file=2000)
    async with running as bound:
        async with connected(bound.tcp_address) as client, connected(bound.tcp_address) as private:
            await client.subscribe("t", "c", 100)
            await private.send(identify(feature_negotiation=True, private_channel=True))
            await private.frame()
            await private.subscribe("t", "p#ephemeral")
            for _ in range(20):
                await client.publish("t", b"x" * 500)
                await client.send(b"FIN %s\n" % (await client.message()).id)
            await client.nothing_more()
            before = files()
            assert before > 2
            await private.send(b"RDY 100\n")
            for _ in range(20):
                await private.send(b"FIN %s\n" % (await private.message()).id)
            await until(lambda: files() < before)
