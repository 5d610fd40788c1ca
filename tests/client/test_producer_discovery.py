"""Tests for producers that find brokers through discovery services."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from broker.support import running_broker
from client.support.fake_broker import FakeBroker, Peer, bounded, error, pub
from client.support.lookupds import FakeLookupd, fake_lookupd, until
from client.support.producers import Outcome, accept
from lookup.support import Lookupd, ours
from trio_nsq import sync
from trio_nsq.broker import BoundAddresses
from trio_nsq.client import ConnectionFailed, Producer
from trio_nsq.http.messages import HTTPError
from trio_nsq.lookup.query import lookup_nodes
from trio_nsq.protocol.frames import OK_FRAME

POLL_S = 0.02


def producer_of(*lookupds: FakeLookupd, **options: Any) -> Producer:
    """Return a producer of these discovery services, which asks often."""
    defaults: Any = {"lookupd_poll_interval_s": POLL_S, "random": lambda: 0.0}
    addresses = [lookupd.address for lookupd in lookupds]
    return Producer(lookupd_http_addresses=addresses, **defaults | options)


class Peers:
    """The connections of a producer to scripted brokers, accepted in the background."""

    def __init__(self, nursery: trio.Nursery, *brokers: FakeBroker) -> None:
        self._peers: dict[FakeBroker, Peer] = {}
        for broker in brokers:
            nursery.start_soon(self._accept, broker)

    async def _accept(self, broker: FakeBroker) -> None:
        with suppress(trio.ClosedResourceError):  # the broker was stopped
            while True:
                self._peers[broker] = await accept(broker, survive_refusals=True)

    async def of(self, broker: FakeBroker) -> Peer:
        """Wait for the connection to a broker."""
        await until(lambda: broker in self._peers)
        await trio.testing.wait_all_tasks_blocked(0.01)
        return self._peers[broker]

    async def ended(self, broker: FakeBroker) -> None:
        """Wait until the producer has closed its connection to a broker."""
        await self._peers.pop(broker).expect_end()

    async def used(self, producer: Producer, topic: str = "t") -> set[FakeBroker]:
        """Publish some messages, and return the brokers that got them."""
        got = set()
        async with trio.open_nursery() as nursery:
            for _ in range(2 * len(self._peers)):
                publish = Outcome(nursery, producer.publish, topic, b"x")
                await trio.testing.wait_all_tasks_blocked(0.01)
                for broker, peer in self._peers.items():
                    if peer.receive_nowait():
                        got.add(broker)
                        await peer.send(OK_FRAME)
                await publish.success()
        return got


@asynccontextmanager
async def opened(
    brokers: list[FakeBroker], *lookupds: FakeLookupd, **options: Any
) -> AsyncIterator[tuple[Producer, Peers, trio.Nursery]]:
    """Open a producer that is connected to all these brokers; yield it, its peers and a nursery."""
    async with trio.open_nursery() as nursery:
        peers = Peers(nursery, *brokers)
        async with producer_of(*lookupds, **options) as producer:
            for broker in brokers:
                await peers.of(broker)
            yield producer, peers, nursery
        nursery.cancel_scope.cancel()


async def polled(lookupd: FakeLookupd) -> None:
    """Wait until the producer has an answer that was sent after now."""
    await lookupd.asked(len(lookupd.asked_at) + 2)
    await trio.testing.wait_all_tasks_blocked(0.01)


# ------------------------------------------------------------------------------------------------ with real servers


async def registered(lookupd: Lookupd, count: int) -> None:
    """Wait until this many brokers are registered."""
    while len(await lookup_nodes(lookupd.http_address, timeout_s=5)) < count:
        await trio.sleep(0.01)


async def message_count(broker: BoundAddresses) -> int:
    async with httpx.AsyncClient(base_url=f"http://{broker.http_address}") as http:
        topics = (await http.get("/stats?format=json&topic=t")).json()["topics"] or []
    return sum(topic["message_count"] for topic in topics)


@bounded
async def test_brokers_of_several_services_come_and_go(tmp_path: Path) -> None:
    async with ours() as one, ours() as two, trio.open_nursery() as nursery:
        ends = {}

        async def run(name: str, *known: Lookupd, task_status: trio.TaskStatus[BoundAddresses]) -> None:
            lookupds = tuple(lookupd.tcp_address for lookupd in known)
            options: Any = {"nsqlookupd_tcp_addresses": lookupds, "broadcast_address": "127.0.0.1"}
            async with running_broker(tmp_path / name, **options) as bound:
                ends[name] = trio.Event()
                task_status.started(bound)
                await ends[name].wait()

        async def is_used(broker: BoundAddresses) -> None:
            """Publish until this broker gets a message."""
            while not await message_count(broker):
                await producer.publish("t", b"x")

        first = await nursery.start(run, "first", one)
        await registered(one, 1)
        addresses = [one.http_address, f"http://{two.http_address}/"]
        options: Any = {"lookupd_poll_interval_s": POLL_S, "retry": True}
        async with Producer(lookupd_http_addresses=addresses, **options) as producer:
            await is_used(first)
            await is_used(await nursery.start(run, "second", two))
            await is_used(await nursery.start(run, "third", one, two))
            ends["first"].set()
            for _ in range(20):
                await producer.publish("t", b"x")
        for end in ends.values():
            end.set()


@bounded
async def test_broker_that_begins_to_drain_is_left_without_a_failure(tmp_path: Path) -> None:
    async with ours() as lookupd:
        options: Any = {"nsqlookupd_tcp_addresses": (lookupd.tcp_address,), "broadcast_address": "127.0.0.1"}
        async with (
            running_broker(tmp_path / "1", **options) as one,
            running_broker(tmp_path / "2", **options) as two,
        ):
            await registered(lookupd, 2)
            async with (
                Producer(
                    lookupd_http_addresses=lookupd.http_address, lookupd_poll_interval_s=POLL_S
                ) as producer,
                httpx.AsyncClient(base_url=f"http://{one.http_address}") as http,
            ):
                for broker in (one, two):
                    while not await message_count(broker):
                        await producer.publish("t", b"x")
                (await http.put("/config/draining", content=b"true")).raise_for_status()
                kept, stored = await message_count(one), await message_count(two)
                for _ in range(20):
                    await producer.publish("t", b"x")
                assert (await message_count(one), await message_count(two)) == (kept, stored + 20)
                while (await http.get("/stats?format=json")).json()["producers"]:
                    await trio.sleep(0.01)
                (await http.put("/config/draining", content=b"false")).raise_for_status()
                while await message_count(one) == kept:
                    await producer.publish("t", b"x")


@bounded
async def test_synchronous_producer(tmp_path: Path) -> None:
    async with ours() as lookupd:
        options: Any = {"nsqlookupd_tcp_addresses": (lookupd.tcp_address,), "broadcast_address": "127.0.0.1"}
        async with running_broker(tmp_path / "d", **options) as broker:
            await registered(lookupd, 1)

            def publish() -> None:
                with sync.Producer(lookupd_http_addresses=lookupd.http_address) as producer:
                    producer.publish("t", b"x")

            await trio.to_thread.run_sync(publish)
            assert await message_count(broker) == 1


# ------------------------------------------------------------------------------------------------ which brokers


@bounded
async def test_brokers_of_all_services_are_used_whatever_their_topics(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with fake_lookupd(broker.address) as one, fake_lookupd(broker.address, other_broker.address) as two:
        one.fields[broker.address] = {"topics": ["other"], "tombstones": [False]}
        async with opened([broker, other_broker], one, two) as (producer, peers, _):
            assert await peers.used(producer) == {broker, other_broker}


@bounded
async def test_given_brokers_are_used_too_and_never_removed(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    options = {"nsqd_tcp_addresses": broker.address}
    async with fake_lookupd(other_broker.address) as lookupd:
        async with opened([broker, other_broker], lookupd, **options) as (producer, peers, _):
            assert await peers.used(producer) == {broker, other_broker}
            lookupd.brokers = []
            await peers.ended(other_broker)
            assert await peers.used(producer) == {broker}


@bounded
async def test_hosts_that_are_not_allowed_are_left_out(
    broker: FakeBroker, other_broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = other_broker.address.replace("127.0.0.1", "127.0.0.2")
    async with fake_lookupd(foreign, broker.address) as lookupd:
        async with opened([broker], lookupd, lookupd_allowed_hosts=["127.0.0.1"]) as (producer, peers, _):
            assert await peers.used(producer) == {broker}
    assert "not among the allowed hosts: '127.0.0.2'" in caplog.text


@bounded
async def test_topic_that_is_being_deleted_on_a_broker_goes_to_the_others(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with fake_lookupd(broker.address, other_broker.address) as lookupd:
        lookupd.fields[broker.address] = {"topics": ["t", "u"], "tombstones": [True, False]}
        async with opened([broker, other_broker], lookupd) as (producer, peers, _):
            await polled(lookupd)
            assert await peers.used(producer, "t") == {other_broker}
            assert await peers.used(producer, "u") == {broker, other_broker}
            lookupd.fields[other_broker.address] = {"topics": ["t"], "tombstones": [True]}
            await polled(lookupd)
            assert await peers.used(producer, "t") == {broker, other_broker}
            lookupd.fields.clear()
            await polled(lookupd)
            assert await peers.used(producer, "t") == {broker, other_broker}


@bounded
async def test_draining_broker_is_left_out_until_it_accepts_publishes_again(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with fake_lookupd(broker.address, other_broker.address) as lookupd:
        async with opened([broker, other_broker], lookupd) as (producer, peers, _):
            lookupd.fields[broker.address] = {"draining": True}
            await peers.ended(broker)
            assert await peers.used(producer) == {other_broker}
            lookupd.fields.clear()
            await peers.of(broker)
            assert await peers.used(producer) == {broker, other_broker}


# ------------------------------------------------------------------------------------------------ changes


@bounded
async def test_broker_that_no_service_returns_is_closed_once_its_publishes_are_settled(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with fake_lookupd(broker.address, other_broker.address) as lookupd:
        async with opened([broker, other_broker], lookupd) as (producer, peers, nursery):
            publishes = []
            for _ in range(2):
                publishes.append(Outcome(nursery, producer.publish, "t", b"x"))
                await trio.testing.wait_all_tasks_blocked()
            for each in (broker, other_broker):
                await (await peers.of(each)).expect(pub("t", b"x"))
            lookupd.brokers = [other_broker.address]
            await polled(lookupd)
            assert not any(publish.ended.is_set() for publish in publishes)
            for each in (broker, other_broker):
                await (await peers.of(each)).send(OK_FRAME)
            for publish in publishes:
                await publish.success()
            await peers.ended(broker)
            assert await peers.used(producer) == {other_broker}


@bounded
async def test_messages_that_wait_for_a_removed_broker_go_to_another(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    options = {"max_in_flight_bytes": 5, "silence_timeout_s": 1000}
    async with fake_lookupd(broker.address) as lookupd:
        async with opened([broker], lookupd, **options) as (producer, peers, nursery):
            publishes = []
            for body in (b"1", b"2"):  # the second one waits for the window
                publishes.append(Outcome(nursery, producer.publish, "t", body))
                await trio.testing.wait_all_tasks_blocked()
            peer = await peers.of(broker)
            await peer.expect(pub("t", b"1"))
            lookupd.brokers = [broker.address, other_broker.address]
            new_peer = await accept(other_broker)
            lookupd.brokers = [other_broker.address]
            await new_peer.expect(pub("t", b"2"))
            await new_peer.send(OK_FRAME)
            await peer.expect_nothing()
            await peer.send(OK_FRAME)
            for publish in publishes:
                await publish.success()
            await peers.ended(broker)


@bounded
async def test_brokers_are_kept_if_the_services_know_none(broker: FakeBroker) -> None:
    async with fake_lookupd(broker.address) as lookupd:
        async with opened([broker], lookupd) as (producer, peers, _):
            lookupd.brokers = []  # as after a restart of the service
            await polled(lookupd)
            assert await peers.used(producer) == {broker}
            lookupd.brokers = [broker.address]
            lookupd.fields[broker.address] = {"draining": True}
            await polled(lookupd)
            assert await peers.used(producer) == {broker}


@bounded
async def test_failing_service_removes_no_broker(
    broker: FakeBroker, other_broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trio_nsq.client")
    async with fake_lookupd(broker.address) as one, fake_lookupd(other_broker.address) as two:
        async with opened([broker, other_broker], one, two) as (producer, peers, _):
            one.brokers = HTTPError(500, "SO_IT_GOES")
            await polled(one)
            assert await peers.used(producer) == {broker, other_broker}
    assert f"nsqlookupd {one.address}: got response 500" in caplog.messages


@bounded
async def test_service_that_does_not_answer_does_not_delay_the_others(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with fake_lookupd(broker.address) as hung, fake_lookupd(broker.address) as working:
        async with opened([broker], hung, working):
            hung.gate = trio.Event()
            await hung.asked(len(hung.asked_at) + 1)
            working.brokers = [broker.address, other_broker.address]
            await accept(other_broker)
            asked = len(hung.asked_at)
            await polled(working)
            assert len(hung.asked_at) == asked  # not again before it has answered


@bounded
async def test_services_are_asked_at_once_when_all_brokers_fail(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with fake_lookupd(broker.address) as lookupd:
        async with opened([broker], lookupd, lookupd_poll_interval_s=1000) as (producer, peers, nursery):
            clock.jump(10)
            lookupd.brokers = [broker.address, other_broker.address]
            broker.stop()
            (await peers.of(broker)).hang_up()
            peer = await accept(other_broker)
            await trio.testing.wait_all_tasks_blocked(0.01)
            publish = Outcome(nursery, producer.publish, "t", b"x")
            await peer.expect(pub("t", b"x"))
            await peer.send(OK_FRAME)
            await publish.success()


@bounded
async def test_services_are_asked_at_once_when_all_brokers_drain(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with fake_lookupd(broker.address) as lookupd:
        async with opened([broker], lookupd, lookupd_poll_interval_s=1000) as (producer, peers, nursery):
            clock.jump(10)
            lookupd.brokers = [broker.address, other_broker.address]
            publish = Outcome(nursery, producer.publish, "t", b"x")
            peer = await peers.of(broker)
            await peer.expect(pub("t", b"x"))
            await peer.send(error("E_PUB_FAILED PUB failed DRAINING: this broker accepts no publishes"))
            assert not (await publish.failure()).maybe_stored
            await accept(other_broker)


# ------------------------------------------------------------------------------------------------ entering


@bounded
async def test_entering_fails_if_no_broker_is_registered(broker: FakeBroker) -> None:
    async with fake_lookupd() as one, fake_lookupd() as two:
        with pytest.raises(ConnectionFailed) as caught:
            await producer_of(one, two).__aenter__()
        assert str(caught.value) == (
            "could not connect to any broker: no broker is registered at nsqlookupd "
            f"{one.address}, {two.address}; start one with --lookupd-tcp-address"
        )
        one.brokers = [broker.address]
        one.fields[broker.address] = {"draining": True}
        with pytest.raises(ConnectionFailed, match=r"all brokers that are registered at nsqlookupd .* drain"):
            await producer_of(one, two).__aenter__()
        with pytest.raises(
            ConnectionFailed, match="no broker on a host of lookupd_allowed_hosts is registered"
        ):
            await producer_of(one, lookupd_allowed_hosts=["10.*"]).__aenter__()


@bounded
async def test_entering_names_services_and_brokers_that_cannot_be_reached(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.stop()
    async with fake_lookupd(broker.address) as lookupd, fake_lookupd() as broken:
        broken.brokers = HTTPError(503, "LATER")
        with pytest.raises(ConnectionFailed) as caught:
            await producer_of(lookupd, broken).__aenter__()
    assert f"{broker.address}: Connection refused" in caught.value.reason
    assert f"{broken.address}: got response 503" in caught.value.reason
    assert not [each for each in caplog.records if each.name == "trio_nsq.client"]  # it is raised


@bounded
async def test_entering_waits_for_the_first_broker_of_the_services(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with fake_lookupd() as one, trio.open_nursery() as nursery:

        async def register_later() -> None:
            await one.asked(1)
            await trio.testing.wait_all_tasks_blocked(0.01)
            one.brokers = [broker.address]
            clock.jump(1)
            await (await broker.accept()).greet()

        nursery.start_soon(register_later)
        async with producer_of(one, connect_timeout_s=60, close_timeout_s=0):
            pass


@bounded
async def test_entering_does_not_wait_for_a_service_that_does_not_answer(broker: FakeBroker) -> None:
    async with fake_lookupd(broker.address) as one, fake_lookupd() as two:
        two.gate = trio.Event()
        async with opened([broker], one, two) as (producer, peers, _):
            assert await peers.used(producer) == {broker}


def test_order_needs_a_given_broker() -> None:
    with pytest.raises(ValueError, match="ordered is True with discovery services; it works with one broker"):
        Producer(lookupd_http_addresses="127.0.0.1:4161", ordered=True)
