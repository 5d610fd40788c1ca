"""Tests for a producer with several brokers: turns, failed brokers and retries."""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from broker.support import connected, running_broker
from client.support.fake_broker import FakeBroker, Peer, bounded, error, mpub, pub
from client.support.producers import Outcome, accept, opened, opened_on, take
from interop.peers import nsqd
from trio_nsq.client import BrokerError, ConnectionFailed, Producer, PublishFailed
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.frames import OK_FRAME

# ------------------------------------------------------------------------------------------------ choosing


@bounded
async def test_brokers_take_turns(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with opened_on(broker, other_broker) as (producer, peers, nursery):
        for body in (b"1", b"2", b"3", b"4"):
            nursery.start_soon(producer.publish, "t", body)
            await trio.testing.wait_all_tasks_blocked()
        for peer in peers:
            await peer.send(OK_FRAME)
        sent = [peer.receive_nowait() for peer in peers]
        assert sorted(sent) == sorted(
            [pub("t", b"1") + pub("t", b"3"), pub("t", b"2") + pub("t", b"4")], reverse=sent[0] > sent[1]
        )
        for peer in peers:
            await peer.send(OK_FRAME)


@bounded
async def test_list_goes_to_one_broker(broker: FakeBroker, other_broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened_on(broker, other_broker, max_body_size=25) as (producer, peers, nursery):
        nursery.start_soon(producer.publish_many, "topic", bodies)
        place, data = await take(*peers)
        assert data == b"".join(mpub("topic", *bodies[start : start + 3]) for start in (0, 3, 6))
        await peers[place].send(OK_FRAME * 3)


@bounded
async def test_one_reachable_broker_is_enough_and_the_other_joins_later(
    broker: FakeBroker,
    other_broker: FakeBroker,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "trio_nsq.client")
    other_broker.stop()
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def greet() -> None:
            peers.append(await accept(broker))

        nursery.start_soon(greet)
        addresses = [other_broker.address, broker.address]
        async with Producer(addresses, reconnect_min_s=10, random=lambda: 0.0) as producer:
            await trio.testing.wait_all_tasks_blocked(0.01)
            await other_broker.start()
            for body in (b"1", b"2"):  # both go to the reachable broker
                publish = Outcome(nursery, producer.publish, "t", body)
                await peers[0].expect(pub("t", body))
                await peers[0].send(OK_FRAME)
                await publish.success()
            await other_broker.expect_no_connection()
            clock.jump(10)
            publish = Outcome(
                nursery, producer.publish, "t", b"3"
            )  # also starts a connection to the other broker, without waiting for it
            await peers[0].expect(pub("t", b"3"))
            peers.append(await accept(other_broker))
            await peers[0].send(OK_FRAME)
            await publish.success()
            await trio.testing.wait_all_tasks_blocked(0.01)
            seen = set()
            for body in (b"4", b"5"):
                publish = Outcome(nursery, producer.publish, "t", body)
                place, data = await take(*peers)
                assert data == pub("t", body)
                seen.add(place)
                await peers[place].send(OK_FRAME)
                await publish.success()
            assert seen == {0, 1}


@bounded
async def test_all_unreachable_brokers_are_named(broker: FakeBroker, other_broker: FakeBroker) -> None:
    broker.stop()
    other_broker.stop()
    with pytest.raises(ConnectionFailed) as caught:
        await Producer([broker.address, other_broker.address]).__aenter__()
    for each in (broker, other_broker):
        assert f"{each.address}: Connection refused" in caught.value.reason


@bounded
async def test_all_unreachable_brokers_are_tried_before_a_publish_fails(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with opened_on(broker, other_broker, retry=True) as (producer, peers, nursery):
        for each, peer in zip((broker, other_broker), peers, strict=True):
            each.stop()
            peer.hang_up()
        await trio.testing.wait_all_tasks_blocked(0.01)
        for _ in range(2):
            with pytest.raises(PublishFailed) as caught:
                await producer.publish("t", b"x")
            assert not caught.value.maybe_stored
            assert all(each.address in str(caught.value) for each in (broker, other_broker))
        await broker.start()
        publish = Outcome(nursery, producer.publish, "t", b"y")
        peer = await accept(broker)
        await peer.expect(pub("t", b"y"))
        await peer.send(OK_FRAME)
        await publish.success()


# ------------------------------------------------------------------------------------------------ connection losses


@pytest.mark.parametrize("retry", [False, True])
@bounded
async def test_sent_messages_are_retried_only_if_allowed(
    broker: FakeBroker, other_broker: FakeBroker, retry: bool
) -> None:
    options: Any = {"retry": retry, "max_in_flight_bytes": 5}
    async with opened_on(broker, other_broker, **options) as (producer, peers, nursery):
        publishes = []
        for body in (b"1", b"2", b"3", b"4"):  # the last two wait for the window
            publishes.append(Outcome(nursery, producer.publish, "t", body))
            await trio.testing.wait_all_tasks_blocked()
        sent = [peer.receive_nowait() for peer in peers]
        lost = sent.index(pub("t", b"1"))
        peers[lost].hang_up()
        peer = peers[1 - lost]
        await trio.testing.wait_all_tasks_blocked(0.01)
        expected = [b"4", b"1", b"3"] if retry else [b"4", b"3"]
        await peer.send(OK_FRAME)
        got = b""
        while not got.endswith(pub("t", b"3")) and b"3" not in got[-8:]:
            got += await peer.receive()
            await peer.send(OK_FRAME)
        assert all(body in got for body in expected)
        for publish in publishes[1:]:
            await publish.success()
        if retry:
            await publishes[0].success()
        else:
            failure = await publishes[0].failure()
            assert failure.maybe_stored
            assert str(failure).count("lost the connection") == 1


@bounded
async def test_failed_retry_reports_both_failures(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with opened_on(broker, other_broker, retry=True) as (producer, peers, nursery):
        publish = Outcome(nursery, producer.publish, "t", b"x")
        place, _ = await take(*peers)
        peers[place].hang_up()
        second, _ = await take(*(peers[1 - place],))
        assert second == 0
        await peers[1 - place].send(error("E_TOPIC_FULL PUB failed topic t is full"))
        failure = await publish.failure()
        assert failure.maybe_stored  # by the first broker
        assert all(each.address in str(failure) for each in (broker, other_broker))
        assert isinstance(failure.__cause__, BrokerError)


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        ("E_TOPIC_FULL PUB failed topic t is full", True),
        ("E_PUB_FAILED PUB failed no space left on device", True),
        ("E_UNAUTHORIZED AUTH failed for PUB", False),
    ],
)
@bounded
async def test_only_temporary_refusals_are_retried_on_another_broker(
    broker: FakeBroker, other_broker: FakeBroker, answer: str, again: bool
) -> None:
    async with opened_on(broker, other_broker, retry=True) as (producer, peers, nursery):
        publish = Outcome(nursery, producer.publish, "t", b"x")
        place, _ = await take(*peers)
        await peers[place].send(error(answer))
        if again:
            await peers[1 - place].expect(pub("t", b"x"))
            await peers[1 - place].send(OK_FRAME)
            await publish.success()
        else:
            assert not (await publish.failure()).maybe_stored


# ------------------------------------------------------------------------------------------------ lists, order


@bounded
async def test_refused_part_of_a_list_tells_whether_later_parts_may_be_stored(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened(broker, survive_refusals=True, max_body_size=25) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        await peer.expect(*(mpub("topic", *bodies[start : start + 3]) for start in (0, 3, 6)))
        await peer.send(OK_FRAME, error("E_TOPIC_FULL MPUB failed topic t is full"))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not publish.ended.is_set()
        await peer.send(OK_FRAME)
        failure = await publish.failure()
        assert (failure.acknowledged, failure.maybe_stored) == (3, True)


def test_order_needs_a_single_broker() -> None:
    with pytest.raises(ValueError, match="one broker only"):
        Producer(["127.0.0.1:1", "127.0.0.1:2"], ordered=True)
    Producer(["127.0.0.1:1", "127.0.0.1:1"], ordered=True)


# ------------------------------------------------------------------------------------------------ real brokers


@bounded
async def test_full_topic_affects_neither_the_connection_nor_others(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound:
        async with (
            httpx.AsyncClient(base_url=f"http://{bound.http_address}") as http,
            Producer(bound.tcp_address) as producer,
            trio.open_nursery() as nursery,
        ):
            await http.post("/topic/create?topic=full")
            await http.put("/topic/settings?topic=full", json={"max_messages": 2})
            await producer.publish("full", b"1")
            refused = Outcome(nursery, producer.publish_set, "full", pack_messages([b"2", b"3"]))
            others = [Outcome(nursery, producer.publish, f"t{n}", b"x") for n in range(3)]
            failure = await refused.failure()
            assert not failure.maybe_stored
            assert isinstance(failure.__cause__, BrokerError)
            assert failure.__cause__.code == "E_TOPIC_FULL"
            for other in others:
                await other.success()
            await producer.publish("full", b"2")
            (client,) = (await http.get("/stats?format=json")).json()["producers"]
            assert {count["topic"] for count in client["pub_counts"]} == {"full", "t0", "t1", "t2"}
        async with connected(bound.tcp_address) as reader:
            await reader.subscribe("full", "c", 10)
            assert [(await reader.message()).body for _ in range(2)] == [b"1", b"2"]
            await reader.nothing_more()


@bounded
async def test_refusal_by_nsqd_affects_no_other_publish(tmp_path: Path) -> None:
    with nsqd(tmp_path / "d") as broker:
        async with Producer(broker.tcp_address) as producer, trio.open_nursery() as nursery:
            too_long = Outcome(nursery, lambda: producer.publish("t", b"x", defer_s=10000))
            others = [Outcome(nursery, producer.publish, f"t{n}", b"x") for n in range(20)]
            failure = await too_long.failure()
            assert "DPUB timeout 10000000 out of range 0-3600000" in str(failure)
            assert not failure.maybe_stored
            for other in others:
                await other.success()
        counts = {n: broker.http("GET", "/stats", format="json", topic=f"t{n}") for n in range(20)}
        assert all(b'"message_count":1' in found for found in counts.values())
