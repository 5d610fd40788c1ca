"""Tests for a broker with discovery services: its registrations, and the channels of new topics."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.support import PATIENCE_S, HeldFiles, connected, pub, running_broker, settle
from lookup.fake_lookupd import FakeLookupd, fake_lookupd
from trio_nsq.broker import BoundAddresses, BrokerOptions, StartupError, serve
from trio_nsq.broker.replication import Replication
from trio_nsq.broker.storage.data_folder import decode_state


async def http(broker: BoundAddresses, method: str, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        response = await client.request(method, f"http://{broker.http_address}{path}", **options)
    return response.raise_for_status()


async def depths(broker: BoundAddresses, topic: str) -> dict[str, int]:
    stats = (await http(broker, "GET", f"/stats?format=json&topic={topic}")).json()
    return {channel["channel_name"]: channel["depth"] for channel in stats["topics"][0]["channels"]}


def around(lookupd: FakeLookupd, **options: Any) -> dict[str, Any]:
    return {"nsqlookupd_tcp_addresses": (lookupd.tcp_address,), "broadcast_address": "127.0.0.1"} | options


# ------------------------------------------------------------------------------------------------ registrations


async def test_created_and_deleted_topics_and_channels_are_registered(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd:
        async with (
            running_broker(tmp_path, **around(lookupd)) as broker,
            connected(broker.tcp_address) as client,
        ):
            conversation = await lookupd.conversation(0)
            identity = conversation.identity
            assert [f"127.0.0.1:{identity[port]}" for port in ("tcp_port", "http_port")] == [
                broker.tcp_address,
                broker.http_address,
            ]
            await client.publish("t", b"1")
            await lookupd.heard(0, "REGISTER t")
            await http(broker, "POST", "/channel/create?topic=t&channel=c")
            await lookupd.heard(0, "REGISTER t c")
            await client.subscribe("e#ephemeral", "x#ephemeral")
            await lookupd.heard(0, "REGISTER e#ephemeral", "REGISTER e#ephemeral x#ephemeral")
            await client.stream.aclose()
            await lookupd.heard(0, "UNREGISTER e#ephemeral x#ephemeral", "UNREGISTER e#ephemeral")
            await http(broker, "POST", "/channel/delete?topic=t&channel=c")
            await lookupd.heard(0, "UNREGISTER t c")
            await http(broker, "POST", "/channel/create?topic=t&channel=d")
            await http(broker, "POST", "/topic/delete?topic=t")
            await lookupd.heard(0, "REGISTER t d", "UNREGISTER t d", "UNREGISTER t")
            assert conversation.registered == set()
            await http(broker, "POST", "/topic/create?topic=u")
        # A stopping broker only disconnects.
        await lookupd.until(lambda: conversation.ended)
        assert conversation.lines[-1] == "REGISTER u"


async def test_existing_topics_are_registered_at_the_start(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await http(broker, "POST", "/topic/create?topic=t")
        await http(broker, "POST", "/topic/create?topic=u")
        await http(broker, "POST", "/channel/create?topic=u&channel=c")
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd)):
        conversation = await lookupd.conversation(0)
        await lookupd.until(lambda: len(conversation.lines) == 2)
        assert set(conversation.lines) == {"REGISTER t", "REGISTER u c"}
        assert lookupd.asked == []  # the channels of existing topics are known


async def test_broadcast_ports_can_be_set(tmp_path: Path) -> None:
    ports = {"broadcast_tcp_port": 14150, "broadcast_http_port": 14151}
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd, **ports)):
        identity = (await lookupd.conversation(0)).identity
        assert (identity["tcp_port"], identity["http_port"]) == (14150, 14151)


async def test_broker_on_loopback_warns_about_its_broadcast_address(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd, broadcast_address=None)):
        assert (await lookupd.conversation(0)).identity["broadcast_address"] == "127.0.0.1"


def leading(data_path: Path, lookupd: FakeLookupd, former: tuple[str, ...] = ()) -> Any:
    """Return how to serve the leader of a cluster on free ports."""
    addresses = dict.fromkeys(("tcp_address", "http_address"), "127.0.0.1:0")
    options = BrokerOptions(data_path=data_path, **around(lookupd, **addresses))
    return partial(serve, options, replication=Replication(data_path, "prod", "f1", 7, former=former))


async def test_the_leader_of_a_cluster_has_registered_when_it_has_started(tmp_path: Path) -> None:
    """Its caller then ends the connections of clients, and they look for it."""
    async with running_broker(tmp_path) as broker:
        for topic in ("t", "u"):
            await http(broker, "POST", f"/topic/create?topic={topic}")
            await http(broker, "POST", f"/channel/create?topic={topic}&channel=c")
    async with fake_lookupd() as lookupd, trio.open_nursery() as nursery:
        await nursery.start(leading(tmp_path, lookupd))
        conversation = await lookupd.conversation(0)
        # An attempt that was too slow has ended.
        assert conversation.ended or conversation.registered == {("t",), ("u",), ("t", "c"), ("u", "c")}
        assert conversation.identity["cluster"] == {"name": "prod", "member": "f1", "epoch": 7}
        nursery.cancel_scope.cancel()


async def test_a_leader_starts_without_its_services(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd:
        pass
    async with trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_S):
            await nursery.start(leading(tmp_path, lookupd))
        nursery.cancel_scope.cancel()


async def test_a_leader_hides_those_before_it(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd, trio.open_nursery() as nursery:
        lookupd.nodes = [
            {"broadcast_address": host, "tcp_port": 1, "http_port": 4151, "topics": ["t"], "tombstones": []}
            for host in ("10.0.0.1", "fd00::1", "other")
        ]
        former = (
            "tcp://10.0.0.1:4150",
            "http://10.0.0.1:4151",
            "https://other:4151",
            "http://[fd00::1]:4151",
            "http:",
        )
        await nursery.start(leading(tmp_path, lookupd, former))
        await lookupd.until(lambda: len(lookupd.tombstones) == 2)
        assert {node for _, _, node in lookupd.tombstones} == {"10.0.0.1:4151", "fd00::1:4151"}
        nursery.cancel_scope.cancel()


async def test_services_can_be_changed_over_http(tmp_path: Path) -> None:
    async with (
        fake_lookupd() as one,
        fake_lookupd() as two,
        running_broker(tmp_path, **around(one)) as broker,
    ):
        first = await one.conversation(0)
        await http(broker, "PUT", "/config/nsqlookupd_tcp_addresses", content=json.dumps([two.tcp_address]))
        await one.until(lambda: first.ended)
        await two.conversation(0)
        two.channels["t"] = ["c"]
        async with connected(broker.tcp_address) as client:
            await client.publish("t", b"1")
        assert await depths(broker, "t") == {"c": 1}
        assert one.asked == []
        answer = await http(broker, "GET", "/config/nsqlookupd_tcp_addresses")
        assert answer.json() == [two.tcp_address]


async def test_invalid_address_is_refused_at_the_start(tmp_path: Path) -> None:
    options = BrokerOptions(tmp_path, "127.0.0.1:0", "127.0.0.1:0", nsqlookupd_tcp_addresses=("nowhere",))
    with pytest.raises(StartupError, match=r"--lookupd-tcp-address: .*'nowhere'"):
        await serve(options)


# ------------------------------------------------------------------------------------------------ new topics


async def test_first_publish_waits_for_the_channels_and_nothing_else_does(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd)) as broker:
        await lookupd.conversation(0)
        lookupd.channels["t"] = ["b", "a", "gone#ephemeral", "not valid"]
        async with (
            connected(broker.tcp_address) as one,
            connected(broker.tcp_address) as two,
            connected(broker.tcp_address) as consumer,
            connected(broker.tcp_address) as other,
        ):
            await other.publish("other", b"1")
            lookupd.gate = trio.Event()
            await one.send(pub("t", b"1"))
            await two.send(pub("t", b"2"))
            await lookupd.until(lambda: lookupd.asked == ["other", "t"])  # one query for both publishers
            await consumer.subscribe("t", "c", ready_count=10)
            await other.publish("other", b"2")
            await settle()
            assert await depths(broker, "t") == {"c": 0}
            lookupd.gate.set()
            await one.ok()
            await two.ok()
            # The channels are as durable as the messages.
            states = [decode_state(path.read_bytes()) for path in tmp_path.rglob("state.json")]
            assert any(all(f'"{name}"' in json.dumps(state) for name in "abc") for state in states)
            assert {(await consumer.message()).body for _ in range(2)} == {b"1", b"2"}
            assert await depths(broker, "t") == {"a": 2, "b": 2, "c": 0}
            await one.publish("t", b"3")
            assert lookupd.asked == ["other", "t"]


async def test_channels_from_services_count_for_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_lookupd() as lookupd:
        async with running_broker(tmp_path, **around(lookupd, max_channels=2)) as broker:
            await lookupd.conversation(0)
            lookupd.channels = {"t": ["a", "b", "c"], "u": ["a", "b", "own"], "fits": ["a", "b"]}
            async with connected(broker.tcp_address) as client, connected(broker.tcp_address) as consumer:
                await client.publish("fits", b"1")
                assert await depths(broker, "fits") == {"a": 1, "b": 1}
                assert not caplog.messages
                await client.publish("t", b"1")
                assert await depths(broker, "t") == {"a": 1, "b": 1}
                warning = "topic t: --max-channels allows only some of its channels on other brokers"
                assert caplog.messages == [warning]
                lookupd.gate = trio.Event()
                await consumer.subscribe("u", "own")
                lookupd.gate.set()
                await client.publish("u", b"1")
                assert await depths(broker, "u") == {"own": 1, "a": 1}


async def test_channels_from_services_and_clients_together_keep_the_limit(tmp_path: Path) -> None:
    """Also if some are being saved when the others arrive."""
    files = HeldFiles()
    async with fake_lookupd() as lookupd:
        async with running_broker(tmp_path, files=files, **around(lookupd, max_channels=2)) as broker:
            await lookupd.conversation(0)
            lookupd.channels = {"t": ["a", "b"], "u": ["a", "b"]}
            async with connected(broker.tcp_address) as client, connected(broker.tcp_address) as consumer:
                lookupd.gate = trio.Event()
                files.hold("replace")
                await consumer.send(b"SUB t own\n")
                await files.reached()
                lookupd.gate.set()
                await settle()
                files.release()
                await consumer.ok()
                await client.publish("t", b"1")
                assert await depths(broker, "t") == {"own": 1, "a": 1}
                files.hold("replace")
                await client.send(pub("u", b"1"))
                await files.reached()
                async with connected(broker.tcp_address) as late:
                    await late.send(b"SUB u own\n")
                    await settle()
                    files.release()
                    assert (await late.error()).endswith("as many as --max-channels allows")
                await client.ok()
                assert await depths(broker, "u") == {"a": 1, "b": 1}


@pytest.mark.parametrize("how", ["SUB", "create"])
async def test_topic_created_without_a_message_gets_its_channels(tmp_path: Path, how: str) -> None:
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd)) as broker:
        await lookupd.conversation(0)
        lookupd.channels["t"] = ["a"]
        lookupd.gate = trio.Event()
        async with connected(broker.tcp_address) as client:
            if how == "SUB":
                await client.subscribe("t", "c")
            else:
                await http(broker, "POST", "/topic/create?topic=t")
            await lookupd.until(lambda: lookupd.asked)
            await client.send(pub("t", b"1"))
            lookupd.gate.set()
            await client.ok()
            assert await depths(broker, "t") == ({"a": 1, "c": 1} if how == "SUB" else {"a": 1})


async def test_without_an_answer_the_publish_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_lookupd() as lookupd:
        pass
    async with running_broker(tmp_path, **around(lookupd)) as broker, connected(broker.tcp_address) as client:
        await client.publish("t", b"1")
    complaint = "no available nsqlookupd to query for channels to pre-create for topic t"
    assert [record.levelno for record in caplog.records if record.message == complaint] == [logging.ERROR]


async def test_service_that_stalls_delays_by_the_request_timeout_at_most(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd:
        timeouts = {"http_client_request_timeout_ms": 100}
        async with running_broker(tmp_path, **around(lookupd, **timeouts)) as broker:
            await lookupd.conversation(0)
            lookupd.gate = trio.Event()
            async with connected(broker.tcp_address) as client:
                await client.publish("t", b"1")


async def test_topic_deleted_during_the_query_is_recreated_by_the_publish(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd)) as broker:
        await lookupd.conversation(0)
        lookupd.channels["t"] = ["a"]
        lookupd.gate = trio.Event()
        async with connected(broker.tcp_address) as client:
            await client.send(pub("t", b"1"))
            await lookupd.until(lambda: lookupd.asked)
            await http(broker, "POST", "/topic/delete?topic=t")
            assert (await http(broker, "GET", "/stats?format=json")).json()["topics"] == []
            lookupd.gate.set()
            await client.ok()  # in a new topic with the same name
            assert lookupd.asked == ["t", "t"]
            assert await depths(broker, "t") == {"a": 1}


async def test_broker_stops_during_a_query(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.gate = trio.Event()
        with trio.fail_after(PATIENCE_S):
            async with running_broker(tmp_path, **around(lookupd)) as broker:
                await lookupd.conversation(0)
                async with connected(broker.tcp_address) as client:
                    await client.send(pub("t", b"1"))
                    await lookupd.until(lambda: lookupd.asked)
                    started = trio.current_time()
        assert trio.current_time() - started < 3  # it does not wait for services
    async with running_broker(tmp_path) as broker:
        assert await depths(broker, "t") == {}


async def test_publisher_that_disconnects_during_a_query(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd)) as broker:
        await lookupd.conversation(0)
        lookupd.channels["t"] = ["a"]
        lookupd.gate = trio.Event()
        async with connected(broker.tcp_address) as client:
            await client.send(pub("t", b"1"))
            await lookupd.until(lambda: lookupd.asked)
        lookupd.gate.set()
        async with connected(broker.tcp_address) as client:
            await client.publish("t", b"2")
            assert set(await depths(broker, "t")) == {"a"}


async def test_publish_that_waits_for_the_query_is_refused_if_the_broker_drains(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd)) as broker:
        await lookupd.conversation(0)
        lookupd.channels["t"] = ["a"]
        lookupd.gate = trio.Event()
        async with connected(broker.tcp_address) as client:
            await client.send(pub("t", b"1"))
            await lookupd.until(lambda: lookupd.asked)
            await http(broker, "PUT", "/config/draining", content=b"true")
            lookupd.gate.set()
            assert (await client.error()).startswith("E_PUB_FAILED PUB failed DRAINING")
            assert await depths(broker, "t") == {"a": 0}


async def test_topic_deleted_during_the_query_stays_deleted(tmp_path: Path) -> None:
    async with fake_lookupd() as lookupd, running_broker(tmp_path, **around(lookupd)) as broker:
        await lookupd.conversation(0)
        lookupd.channels["t"] = ["a"]
        lookupd.gate = trio.Event()
        await http(broker, "POST", "/topic/create?topic=t")
        await lookupd.until(lambda: lookupd.asked)
        await http(broker, "POST", "/topic/delete?topic=t")
        lookupd.gate.set()
        await settle()
        assert (await http(broker, "GET", "/stats?format=json")).json()["topics"] == []


async def test_without_services_there_is_no_query_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_broker(tmp_path) as broker, connected(broker.tcp_address) as client:
        await client.publish("t", b"1")
    assert not [line for line in caplog.messages if "lookup" in line.lower()]
