"""Tests for delivery to the nearest consumers: in the broker's zone first, then in its region, then all others."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.api import Api, address, running_api
from broker.state import BUFFERED, Fixture, Subscriber
from broker.support import PATIENCE_S, RawClient, connected, identify
from interop.peers import qcli_serve
from trio_nsq import Consumer, Producer
from trio_nsq.broker.state.consumer import ELSEWHERE, REGION, ZONE

HERE = {"topology_region": "eu", "topology_zone": "eu-1"}
"""The broker's place, as its options."""
PLACES: dict[str, dict[str, str]] = {
    "zone": HERE,
    "region": {"topology_region": "eu", "topology_zone": "eu-2"},
    "elsewhere": {"topology_region": "us", "topology_zone": "us-1"},
    "unknown": {},
    "zone without a region": {"topology_zone": "eu-1"},
    "empty": {"topology_region": "", "topology_zone": ""},
}


@asynccontextmanager
async def consumers(api: Api, *places: str) -> AsyncIterator[list[RawClient]]:
    """Connect consumers of `t/c` from these places."""
    async with AsyncExitStack() as stack:
        clients = []
        for place in places:
            client = await stack.enter_async_context(connected(address(api)))
            await client.send(identify(feature_negotiation=True, **PLACES[place]))
            await client.frame()
            await client.subscribe("t", "c")
            clients.append(client)
        yield clients


async def bodies(client: RawClient, count: int) -> set[bytes]:
    return {(await client.message()).body for _ in range(count)}


def far(fixture: Fixture, nearness: int, ready: int) -> Subscriber:
    return Subscriber(fixture, fixture.channel(), ready=ready, nearness=nearness)


# ---------------------------------------------------------------------- state


def test_far_consumers_do_not_make_a_near_one_wait() -> None:
    """Messages that fill the RDY of the near one do not wait for others, whatever room far ones have."""
    fixture = Fixture()
    for _ in range(20):
        fixture.subscriber(ready=100, buffer=BUFFERED)
    near = fixture.subscriber(ready=1, buffer=BUFFERED, nearness=ZONE)
    for _ in range(2):
        fixture.publish(b"x")
        assert not fixture.channel().dispatcher.can_wait
        near.finish(near.receive())


def test_nearest_first_while_they_are_ready() -> None:
    fixture = Fixture()
    order = [far(fixture, nearness, 3) for nearness in (ELSEWHERE, REGION, ZONE, ZONE)]
    fixture.publish_many(12)
    counts: Counter[int] = Counter()
    while grants := fixture.channel().dispatcher.dispatch(fixture.now_ns):
        (nearness,) = {consumer.nearness for consumer, _ in grants}
        assert all(counts[nearer] == 3 * (1 + (nearer == ZONE)) for nearer in range(nearness))
        counts = Counter()
        for each in order:
            counts[each.consumer.nearness] += each.consumer.message_count
    assert counts == {ZONE: 6, REGION: 3, ELSEWHERE: 3}
    assert fixture.channel().sent_by_nearness() == [6, 3, 3]


def test_nearer_one_that_becomes_ready_goes_first() -> None:
    fixture = Fixture()
    elsewhere, zone = far(fixture, ELSEWHERE, 100), far(fixture, ZONE, 1)
    fixture.publish(b"1")
    (message,) = zone.receive()
    fixture.publish(b"2")
    assert elsewhere.receive_bodies() == [b"2"]
    zone.finish([message])
    fixture.publish(b"3")
    assert zone.receive_bodies() == [b"3"]
    zone.block(True)
    zone.ready(10)
    fixture.publish(b"4")
    assert elsewhere.receive_bodies() == [b"4"]
    zone.block(False)
    fixture.publish(b"5")
    assert zone.receive_bodies() == [b"5"]
    zone.leave()
    assert sorted(elsewhere.receive_bodies()) == [b"1", b"3", b"5"][1:]
    assert fixture.channel().sent_by_nearness() == [3, 0, 4]


# ---------------------------------------------------------------------- over TCP


@pytest.mark.parametrize(
    ("options", "nearness"),
    [
        (
            HERE,
            {"zone": 0, "region": 1, "elsewhere": 2, "unknown": 2, "zone without a region": 0, "empty": 2},
        ),
        ({"topology_zone": "eu-1"}, {"zone": 0, "region": 2, "unknown": 2, "empty": 2}),
        ({"topology_region": "eu"}, {"zone": 1, "region": 1, "zone without a region": 2, "empty": 2}),
    ],
    ids=["both", "zone only", "region only"],
)
async def test_how_near_clients_are(
    tmp_path: Path, options: dict[str, str], nearness: dict[str, int]
) -> None:
    async with running_api(tmp_path, **options) as api:
        async with consumers(api, *nearness) as clients:
            for client, (place, expected) in zip(clients, nearness.items(), strict=True):
                await client.send(b"RDY 1\n")
                await api.tcp.publish("t", place.encode())
                assert (await client.message()).body == place.encode()
                await client.send(b"RDY 0\n")
                await client.nothing_more()
                counts = await sent(api)
                assert counts[expected] == sum(
                    each == expected for each in list(nearness.values())[: sum(counts)]
                )


async def sent(api: Api) -> list[int]:
    """Return how many messages `/stats` says were sent, by nearness."""
    found = await api.channel("t", "c")
    return [found[f"{name}_msg_count"] for name in ("zone_local", "region_local", "global")]


async def test_messages_go_to_the_nearest(tmp_path: Path) -> None:
    async with running_api(tmp_path, **HERE) as api, consumers(api, "unknown", "region", "zone") as clients:
        unknown, region, zone = clients
        for client in clients:
            await client.send(b"RDY 10\n")
            await client.nothing_more()
        await api.tcp.publish("t", *[b"%d" % number for number in range(25)])
        assert await bodies(zone, 10) == {b"%d" % number for number in range(10)}
        assert await bodies(region, 10) == {b"%d" % number for number in range(10, 20)}
        assert await bodies(unknown, 5) == {b"%d" % number for number in range(20, 25)}
        assert await sent(api) == [10, 10, 5]


async def test_statistics_and_answers(tmp_path: Path) -> None:
    async with running_api(tmp_path, **HERE) as api:
        async with consumers(api, "region", "unknown"), connected(address(api)) as client:
            await client.send(identify(feature_negotiation=True, topology_zone="x"))
            frame = await client.frame()
            assert frame is not None
            assert b'"topology_region":"eu","topology_zone":"eu-1"' in frame[1]
            stats = await api.channel("t", "c")
            places = [{name: each[name] for name in HERE if name in each} for each in stats["clients"]]
            assert places == [PLACES["region"], {}]
        info = (await api.get("/info")).json()
        assert {name: info[name] for name in HERE} == HERE


async def test_nothing_of_it_without_the_options(tmp_path: Path) -> None:
    async with running_api(tmp_path) as api, consumers(api, "zone", "empty") as clients:
        for client in clients:
            await client.send(b"RDY 10\n")
            await client.nothing_more()
        await api.tcp.publish("t", *[b"%d" % number for number in range(10)])
        for client in clients:
            assert len(await bodies(client, 5)) == 5
        stats = await api.channel("t", "c")
        assert "zone_local_msg_count" not in stats
        assert "topology_zone" not in (await api.get("/info")).json()


# ---------------------------------------------------------------------- our client


async def test_consumer_says_where_it_runs(tmp_path: Path) -> None:
    flags = "--topology-region=eu", "--topology-zone=eu-1"
    with qcli_serve(tmp_path / "data", *flags) as broker, trio.fail_after(PATIENCE_S):
        broker.create("t", "c")
        at: dict[str, Any] = {"nsqd_tcp_addresses": broker.tcp_address, "max_in_flight": 1000}
        async with (
            Producer(broker.tcp_address, topology_zone="eu-2") as producer,
            Consumer("t", "c", **at),
            Consumer("t", "c", topology_region="eu", topology_zone="eu-1", **at) as near,
        ):
            while sum(each["ready_count"] for each in broker.channel_stats("t", "c")["clients"]) < 2000:
                await trio.lowlevel.checkpoint()
            await producer.publish_many("t", [b"%d" % number for number in range(100)])
            received = 0
            async for message in near:
                message.finish()
                received += 1
                if received == 100:
                    break
        found = broker.channel_stats("t", "c")
        assert (found["zone_local_msg_count"], found["global_msg_count"]) == (100, 0)
