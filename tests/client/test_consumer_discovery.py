"""Tests for brokers from discovery services: single cases with scripted peers, and one test with real
servers.
"""

import gc
import logging
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.support import connected, running_broker
from client.support.consumers import accept_and_subscribe
from client.support.fake_broker import FakeBroker, bounded, fake_broker, message
from client.support.lookupds import FakeLookupd, fake_lookupd, until
from lookup.support import ours
from trio_nsq.client import ConnectionFailed, Consumer
from trio_nsq.client.connection.addresses import lookupd_address
from trio_nsq.http.messages import HTTPError


def consumer_of(*lookupds: FakeLookupd, **options: Any) -> Consumer:
    """Return a consumer that reconnects at once, and closes without waiting."""
    defaults: Any = {
        "reconnect_min_s": 0.001,
        "reconnect_max_s": 0.001,
        "close_timeout_s": 0,
        "max_in_flight": 5,
    }
    addresses = [lookupd.address for lookupd in lookupds]
    return Consumer("topic", "channel", lookupd_http_addresses=addresses, **defaults | options)


def subscribing(nursery: trio.Nursery, broker: FakeBroker) -> trio.Event:
    """Start a task that accepts a consumer's connection, its SUB and its RDY; return an event for its end."""
    subscribed = trio.Event()

    async def accept() -> None:
        await accept_and_subscribe(broker)
        subscribed.set()

    nursery.start_soon(accept)
    return subscribed


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(each.levelno, each.message) for each in caplog.records if each.name == "trio_nsq.client"]


# ------------------------------------------------------------------------------------------------ with real servers


@bounded
async def test_brokers_of_several_services_come_and_go(tmp_path: Path) -> None:
    async with ours() as one, ours() as two, trio.open_nursery() as nursery:
        ends = {}
        bodies: set[bytes] = set()

        async def run_broker(name: str, *known: Any, task_status: trio.TaskStatus[str]) -> None:
            options: Any = {"nsqlookupd_tcp_addresses": tuple(lookupd.tcp_address for lookupd in known)}
            async with running_broker(tmp_path / name, broadcast_address="127.0.0.1", **options) as bound:
                async with connected(bound.tcp_address) as client:
                    await client.publish("topic", name.encode())
                ends[name] = trio.Event()
                task_status.started(bound.tcp_address)
                await ends[name].wait()

        async def receive(consumer: Consumer) -> None:
            async for received in consumer:
                bodies.add(received.body)
                received.finish()

        await nursery.start(run_broker, "a", one)
        await nursery.start(run_broker, "b", two)
        await nursery.start(run_broker, "both", one, two)
        async with Consumer(
            "topic",
            "channel",
            lookupd_http_addresses=[one.http_address, f"http://{two.http_address}/"],
            lookupd_poll_interval_s=0.05,
            max_in_flight=5,
        ) as consumer:
            nursery.start_soon(receive, consumer)
            await until(lambda: bodies == {b"a", b"b", b"both"})
            assert consumer.stats().connections == 3
            await nursery.start(run_broker, "late", two)
            await until(lambda: b"late" in bodies)
            assert consumer.stats().connections == 4
            ends["both"].set()
            await until(lambda: consumer.stats().connections == 3)
        for end in ends.values():
            end.set()


# ------------------------------------------------------------------------------------------------ when it queries


@bounded
async def test_queries_at_once_then_with_jitter_then_at_every_interval(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with fake_lookupd(broker.address) as lookupd, trio.open_nursery() as nursery:
        subscribed = subscribing(nursery, broker)
        options: Any = {"lookupd_poll_interval_s": 4, "lookupd_poll_jitter": 0.5, "random": lambda: 0.5}
        async with consumer_of(lookupd, **options):
            await subscribed.wait()
            for pause_s in (5, 4, 4):
                asked = len(lookupd.asked_at)
                await trio.testing.wait_all_tasks_blocked(0.05)
                clock.jump(pause_s - 1)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert len(lookupd.asked_at) == asked
                clock.jump(1)
                await lookupd.asked(asked + 1)


@bounded
async def test_queries_are_more_frequent_while_no_broker_has_the_topic(clock: trio.testing.MockClock) -> None:
    async with fake_lookupd() as lookupd, consumer_of(lookupd, random=lambda: 0.0):
        for times, pause_s in enumerate((1, 2, 4), start=1):
            await lookupd.asked(times)
            await trio.testing.wait_all_tasks_blocked(0.05)
            clock.jump(pause_s - 0.5)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(lookupd.asked_at) == times
            clock.jump(0.5)
        await lookupd.asked(4)


@bounded
async def test_failed_query_does_not_mean_that_no_broker_has_the_topic(
    clock: trio.testing.MockClock,
) -> None:
    async with fake_lookupd() as lookupd:
        addresses = (lookupd.address, "127.0.0.1:1")
        async with Consumer("topic", "channel", lookupd_http_addresses=addresses, random=lambda: 0.0):
            await lookupd.asked(1)
            await trio.testing.wait_all_tasks_blocked(0.05)
            clock.jump(1)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(lookupd.asked_at) == 1


@bounded
async def test_lost_connection_starts_a_query(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with fake_lookupd(broker.address) as lookupd, trio.open_nursery() as nursery:
        peers = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with consumer_of(lookupd):
            await until(lambda: peers)
            lookupd.brokers = [broker.address, other_broker.address]
            peers[0].hang_up()
            await other_broker.accept()


# ------------------------------------------------------------------------------------------------ changed answers


@bounded
async def test_broker_that_is_no_longer_registered_is_dropped_when_its_connection_ends(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with fake_lookupd(broker.address) as lookupd, trio.open_nursery() as nursery:
        peers = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with consumer_of(lookupd, lookupd_poll_interval_s=0.02, reconnect_max_s=0.5) as consumer:
            await until(lambda: peers)
            lookupd.brokers = []
            await lookupd.asked(len(lookupd.asked_at) + 2)
            assert consumer.stats().connections == 1
            await peers[0].send(message(1))
            assert (await anext(consumer)).body == b"body 1"
            peers[0].hang_up()
            await until(lambda: consumer.stats().connections == 0)
            await lookupd.asked(len(lookupd.asked_at) + 2)
            await broker.expect_no_connection()
            lookupd.brokers = [broker.address]  # registered again
            await accept_and_subscribe(broker)


@bounded
async def test_configured_address_is_never_dropped(broker: FakeBroker) -> None:
    async with fake_lookupd(broker.address) as lookupd, trio.open_nursery() as nursery:
        peers = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        options: Any = {"nsqd_tcp_addresses": [broker.address], "lookupd_poll_interval_s": 0.02}
        async with consumer_of(lookupd, **options) as consumer:
            await until(lambda: peers)
            await lookupd.asked(2)
            assert consumer.stats().connections == 1
            lookupd.brokers = []
            await lookupd.asked(len(lookupd.asked_at) + 2)
            peers[0].hang_up()
            await accept()


@bounded
async def test_failing_service_drops_no_broker(broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_lookupd(broker.address) as lookupd, trio.open_nursery() as nursery:
        peers = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with consumer_of(lookupd, lookupd_poll_interval_s=0.02):
            await until(lambda: peers)
            lookupd.brokers = HTTPError(500, "SO_IT_GOES")
            await lookupd.asked(len(lookupd.asked_at) + 2)
            peers[0].hang_up()
            await accept()
    assert (logging.WARNING, f"nsqlookupd {lookupd.address}: got response 500") in logged(caplog)


# ------------------------------------------------------------------------------------------------ entering


@bounded
async def test_no_broker_has_the_topic_yet(broker: FakeBroker) -> None:
    async with fake_lookupd() as lookupd, consumer_of(lookupd, lookupd_poll_interval_s=0.02) as consumer:
        assert consumer.stats().connections == 0
        lookupd.brokers = [broker.address]
        peer = await accept_and_subscribe(broker)
        await peer.send(message(1))
        assert (await anext(consumer)).body == b"body 1"


@bounded
async def test_registered_but_unreachable_broker_is_retried(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, log = logging.getLogger("trio_nsq.client"), StringIO()
    handler = logging.StreamHandler(log)
    monkeypatch.setattr(logger, "propagate", False)  # pytest would keep the errors
    monkeypatch.setattr(logger, "handlers", [handler])
    broker.stop()
    async with fake_lookupd(broker.address) as lookupd, consumer_of(lookupd) as consumer:
        assert consumer.stats().connections == 0
        await broker.start()
        await accept_and_subscribe(broker)
        # Errors of discovered brokers are not kept, because brokers come and go.
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, ConnectionFailed)]
    assert f"could not connect to {broker.address}: Connection refused; next attempt in 0.0" in log.getvalue()


@pytest.mark.parametrize("host", ["a b", "a\0b", "x" * 100 + ".invalid"])
@bounded
async def test_invalid_host_is_left_out(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    async with fake_lookupd(f"{host}:4150", broker.address) as lookupd, trio.open_nursery() as nursery:
        subscribed = subscribing(nursery, broker)
        async with consumer_of(lookupd) as consumer:
            await subscribed.wait()
            assert consumer.stats().connections == 1
            await until(lambda: caplog.records)
    assert "which is no host" in caplog.text or "is not a host name" in caplog.text


@bounded
async def test_one_broker_is_enough_while_a_service_has_not_answered(broker: FakeBroker) -> None:
    async with fake_lookupd(broker.address) as one, fake_lookupd() as two, trio.open_nursery() as nursery:
        two.gate = trio.Event()
        subscribed = subscribing(nursery, broker)
        async with consumer_of(two, one) as consumer:
            await subscribed.wait()
            assert consumer.stats().connections == 1


@bounded
async def test_if_all_are_unreachable_all_are_named(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.stop()
    async with fake_lookupd() as lookupd, fake_broker() as gone:
        gone.stop()
        lookupd.brokers = HTTPError(503, "LATER")
        addresses = [lookupd.address, gone.address]
        consumer = Consumer(
            "topic", "channel", lookupd_http_addresses=addresses, nsqd_tcp_addresses=[broker.address]
        )
        with pytest.raises(ConnectionFailed) as caught:
            await consumer.__aenter__()
    assert sorted(caught.value.address.split(", ")) == sorted([broker.address, *addresses])
    assert f"{broker.address}: Connection refused" in caught.value.reason
    assert f"{lookupd.address}: got response 503" in caught.value.reason
    assert not logged(caplog)  # what is raised is not logged, too


@bounded
async def test_password_of_a_service_is_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_lookupd("a b:4150", "c:0") as lookupd, fake_lookupd() as broken:
        broken.brokers = HTTPError(503, "LATER")
        addresses = [f"http://me:secret@{each.address}/" for each in (lookupd, broken)]
        async with Consumer("topic", "channel", lookupd_http_addresses=addresses):
            await until(lambda: len(logged(caplog)) == 2)
        with pytest.raises(ConnectionFailed) as caught:
            await Consumer("topic", "channel", lookupd_http_addresses=addresses[1:]).__aenter__()
    assert f"http://xxxxx@{broken.address}: got response 503" in caplog.text
    assert str(caught.value) == f"could not connect to http://xxxxx@{broken.address}: got response 503"
    assert (
        f"http://xxxxx@{lookupd.address} returned a broker address that is not a host name: 'a b'"
        in caplog.text
    )
    assert f"http://xxxxx@{lookupd.address}: no usable address in" in caplog.text
    assert "secret" not in caplog.text


@bounded
async def test_leaving_while_a_service_does_not_answer() -> None:
    async with fake_lookupd() as lookupd:
        lookupd.gate = trio.Event()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(consumer_of(lookupd).__aenter__)
                await lookupd.asked(1)
                scope.cancel()
        assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("localhost:4161", "localhost:4161"),
        ("[::1]:4161", "[::1]:4161"),
        ("http://localhost:4161/", "http://localhost:4161"),
        ("https://me:secret@localhost:4161/nsq", "https://me:secret@localhost:4161/nsq"),
        ("https://lookup.example", "https://lookup.example"),
    ],
)
def test_addresses_of_services(given: str, taken: str) -> None:
    assert lookupd_address(given) == taken


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        ("localhost", "no port"),
        (["localhost"], "no port"),
        (["ftp://localhost:4161"], "not the HTTP address of an nsqlookupd"),
        (["http://localhost:4161/?topic=x"], "not the HTTP address of an nsqlookupd"),
        (["http://:4161"], "no host"),
    ],
)
def test_invalid_addresses_are_refused(addresses: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Consumer("topic", "channel", lookupd_http_addresses=addresses)
