"""Tests for brokers and discovery services, ours and nsq's; and a comparison of what nsqd and our broker send
to one.
"""

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.certificates import Certificates
from broker.support import connected, running_broker
from interop.peers import CLIENTS, Broker, Delivery, nsqd, qcli_serve
from lookup.fake_lookupd import FakeLookupd, fake_lookupd
from lookup.support import Lookupd, Runs, ours, real, until
from trio_nsq.broker import BoundAddresses

pytestmark = pytest.mark.interop

with_either = pytest.mark.parametrize("lookupds", [real, ours], ids=["nsqlookupd", "ours"])
"""Parametrizes `lookupds`."""


def around(*lookupds: Lookupd) -> dict[str, Any]:
    addresses = tuple(lookupd.tcp_address for lookupd in lookupds)
    return {"nsqlookupd_tcp_addresses": addresses, "broadcast_address": "127.0.0.1"}


async def get(address: str | None, path: str) -> Any:
    async with httpx.AsyncClient() as client:
        response = await client.get(f"http://{address}{path}")
    return response.json()


async def post(broker: BoundAddresses | Lookupd, path: str) -> None:
    async with httpx.AsyncClient() as client:
        (await client.post(f"http://{broker.http_address}{path}")).raise_for_status()


async def started(stack: ExitStack, broker: AbstractContextManager[Broker]) -> Broker:
    """Start a broker in a thread: it would give up on a service in this thread, which could not answer for a
    second.
    """
    return await trio.to_thread.run_sync(lambda: stack.enter_context(broker))


async def registered(lookupd: Lookupd) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """Return the producers of each (topic, channel); the channel of a topic itself is empty."""
    found = {}
    for key, producers in (await get(lookupd.http_address, "/debug")).items():
        category, topic, channel = key.split(":")
        if category in ("topic", "channel"):
            found[topic, channel] = [(one["broadcast_address"], one["tcp_port"]) for one in producers]
    return found


async def becomes(lookupd: Lookupd, expected: dict[tuple[str, str], list[tuple[str, int]]]) -> None:
    """Wait until nsqlookupd has exactly these registrations."""
    last: Any = None

    async def is_so() -> bool:
        nonlocal last
        last = await registered(lookupd)
        return bool(last == expected)

    try:
        await until(is_so)
    except trio.TooSlowError:
        assert last == expected


@with_either
async def test_registrations_follow_topics_and_channels(tmp_path: Path, lookupds: Runs) -> None:
    async with lookupds() as one, lookupds() as two:
        async with running_broker(tmp_path, **around(one, two)) as broker:
            me = [("127.0.0.1", int(broker.tcp_address.rpartition(":")[2]))]
            async with connected(broker.tcp_address) as client:
                await client.publish("t", b"1")
                await client.subscribe("t", "c#ephemeral")
                for lookupd in (one, two):
                    await becomes(lookupd, {("t", ""): me, ("t", "c#ephemeral"): me})
                answer = await get(one.http_address, "/lookup?topic=t")
                (producer,) = answer["producers"]
                assert producer["tcp_port"] == me[0][1]
                assert f"127.0.0.1:{producer['http_port']}" == broker.http_address
                assert producer["version"]
            await becomes(one, {("t", ""): me})  # with its last consumer
            await post(broker, "/channel/create?topic=t&channel=d")
            await becomes(one, {("t", ""): me, ("t", "d"): me})
            await post(broker, "/topic/delete?topic=t")
            await becomes(one, {})
            assert not [line for line in one.log() if "unexpected UNREGISTER" in line]
            await post(broker, "/topic/create?topic=u")
            await becomes(two, {("u", ""): me})
        await becomes(two, {})


@with_either
async def test_recreated_topic_is_found_in_spite_of_a_tombstone(tmp_path: Path, lookupds: Runs) -> None:
    async with lookupds() as lookupd:
        async with running_broker(tmp_path, **around(lookupd)) as broker:
            await post(broker, "/topic/create?topic=t")

            async def producers(count: int) -> bool:
                answer = await get(lookupd.http_address, "/lookup?topic=t")
                return "producers" in answer and len(answer["producers"]) == count

            await until(partial(producers, 1))
            await post(lookupd, f"/topic/tombstone?topic=t&node={broker.http_address}")
            await until(partial(producers, 0))
            await post(broker, "/topic/delete?topic=t")
            await post(broker, "/topic/create?topic=t")
            await until(partial(producers, 1))


@with_either
async def test_draining_broker_stays_registered(tmp_path: Path, lookupds: Runs) -> None:
    """Consumers must find it. Our service shows the mode; nsq's ignores the field."""
    told = {"draining": True} if lookupds is ours else {}
    async with lookupds() as lookupd:
        async with running_broker(tmp_path, **around(lookupd)) as broker:

            async def drain(value: bytes) -> None:
                async with httpx.AsyncClient() as client:
                    url = f"http://{broker.http_address}/config/draining"
                    (await client.put(url, content=value)).raise_for_status()

            async def shows(before: list[str], told: dict[str, bool]) -> bool:
                """Whether the broker has registered by another connection, with these fields."""
                answers = [
                    await get(lookupd.http_address, f"/{path}") for path in ("lookup?topic=t", "nodes")
                ]
                producers = [each for answer in answers for each in answer.get("producers", ())]
                shown = [each.get("draining") for each in producers]
                connections = {each["remote_address"] for each in producers}
                return shown == [told.get("draining")] * 2 and not connections & {*before}

            async def connections() -> list[str]:
                nodes = await get(lookupd.http_address, "/nodes")
                return [each["remote_address"] for each in nodes["producers"]]

            await post(broker, "/topic/create?topic=t")
            await post(broker, "/channel/create?topic=t&channel=c")
            me = [("127.0.0.1", int(broker.tcp_address.rpartition(":")[2]))]
            expected = {("t", ""): me, ("t", "c"): me}
            await becomes(lookupd, expected)
            for value, fields in ((b"true", told), (b"false", {})):
                before = await connections()
                await drain(value)
                await until(partial(shows, before, fields))
                await becomes(lookupd, expected)


@with_either
async def test_service_is_killed_and_restarted(tmp_path: Path, lookupds: Runs) -> None:
    async with lookupds() as lookupd:
        async with running_broker(tmp_path, **around(lookupd)) as broker:
            me = [("127.0.0.1", int(broker.tcp_address.rpartition(":")[2]))]
            await post(broker, "/topic/create?topic=t")
            await becomes(lookupd, {("t", ""): me})
            lookupd.end()
            await post(broker, "/channel/create?topic=t&channel=c")
            async with lookupds(lookupd.tcp_address, lookupd.http_address) as again:
                await becomes(again, {("t", ""): me, ("t", "c"): me})


@with_either
async def test_new_topic_gets_the_channels_of_other_brokers(tmp_path: Path, lookupds: Runs) -> None:
    """Two brokers that share only an nsqlookupd; one of them is nsqd."""
    async with lookupds() as one, lookupds() as two:
        flag = f"--lookupd-tcp-address={one.tcp_address}"
        with ExitStack() as stack:
            other = await started(stack, nsqd(tmp_path / "nsqd", flag))
            await trio.to_thread.run_sync(other.create, "t", "c", "d")
            port = int(other.tcp_address.rpartition(":")[2])
            known = {("t", name): [("127.0.0.1", port)] for name in ("", "c", "d")}
            await becomes(one, known)
            async with running_broker(tmp_path / "ours", **around(one, two)) as broker:
                async with connected(broker.tcp_address) as client:
                    await client.publish("t", b"1")
                    stats = await get(broker.http_address, "/stats?format=json&topic=t")
                    channels = stats["topics"][0]["channels"]
                    assert {channel["channel_name"]: channel["depth"] for channel in channels} == {
                        "c": 1,
                        "d": 1,
                    }
                # And nsqd gets the channels of our broker.
                await post(broker, "/topic/create?topic=u")
                await post(broker, "/channel/create?topic=u&channel=e")

                async def knows() -> bool:
                    return ("u", "e") in await registered(one)

                await until(knows)
                await trio.to_thread.run_sync(partial(other.http, "POST", "/topic/create", topic="u"))
                assert other.channel_stats("u", "e")["depth"] == 0


@with_either
async def test_nsqd_registers_again_after_a_restart_of_the_service(tmp_path: Path, lookupds: Runs) -> None:
    async with lookupds() as lookupd:
        with ExitStack() as stack:
            flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
            broker = await started(stack, nsqd(tmp_path / "nsqd", flag))
            me = [("127.0.0.1", int(broker.tcp_address.rpartition(":")[2]))]
            await trio.to_thread.run_sync(broker.create, "t", "c", "d#ephemeral")
            known = {("t", name): me for name in ("", "c", "d#ephemeral")}
            await becomes(lookupd, known)
            lookupd.end()
            async with lookupds(lookupd.tcp_address, lookupd.http_address) as again:
                # Otherwise nsqd would notice with its next ping. The first command fails.
                await trio.to_thread.run_sync(broker.create, "u")
                await trio.to_thread.run_sync(broker.create, "v")
                await becomes(again, known | {("u", ""): me, ("v", ""): me})


@with_either
async def test_go_nsq_finds_both_brokers(tmp_path: Path, lookupds: Runs) -> None:
    go_nsq = next(client for client in CLIENTS if client.name == "go-nsq")
    async with lookupds() as lookupd, running_broker(tmp_path / "ours", **around(lookupd)) as broker:
        with ExitStack() as stack:
            flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
            other = await started(stack, nsqd(tmp_path / "nsqd", flag))
            await trio.to_thread.run_sync(partial(other.post, "/pub", b"from nsqd", topic="t"))
            async with connected(broker.tcp_address) as client:
                await client.publish("t", b"from ours")

            async def both() -> bool:
                return len((await get(lookupd.http_address, "/lookup?topic=t")).get("producers", ())) == 2

            await until(both)

            def consume() -> list[Delivery]:
                asking = [f"--lookupd={lookupd.http_address}"]
                with go_nsq.subscribe("", "t", "c", 2, connection=asking) as subscriber:
                    return subscriber.rest()

            deliveries = await trio.to_thread.run_sync(consume)
    assert {delivery.body for delivery in deliveries} == {b"from nsqd", b"from ours"}


# ------------------------------------------------------------------------------------------------ comparison with nsqd

FIRST = "REGISTER first"  # nsqd may send it twice: when it connects, and as an update
STEPS = [
    ("/topic/create", {"topic": "first"}, {FIRST}),
    ("/topic/create", {"topic": "a"}, {"REGISTER a"}),
    ("/channel/create", {"topic": "a", "channel": "c"}, {"REGISTER a c"}),
    ("/channel/create", {"topic": "a", "channel": "d#ephemeral"}, {"REGISTER a d#ephemeral"}),
    ("/topic/create", {"topic": "e#ephemeral"}, {"REGISTER e#ephemeral"}),
    ("/channel/delete", {"topic": "a", "channel": "c"}, {"UNREGISTER a c"}),
    ("/channel/create", {"topic": "a", "channel": "c"}, {"REGISTER a c"}),
    # nsqd sends these in any order.
    ("/topic/delete", {"topic": "a"}, {"UNREGISTER a c", "UNREGISTER a d#ephemeral", "UNREGISTER a"}),
]


async def said_to(lookupd: FakeLookupd, broker: Broker) -> dict[str, str]:
    """Run the steps; return what a broker sent, with types instead of values that always differ."""
    conversation = await lookupd.conversation(0)
    for path, parameters, expected in STEPS:
        del conversation.lines[:]
        await trio.to_thread.run_sync(partial(broker.http, "POST", path, **parameters))
        await lookupd.until(lambda: expected <= set(conversation.lines))  # noqa: B023
        assert set(conversation.lines) - expected <= {"PING", FIRST}
    assert conversation.identity["broadcast_address"] == "127.0.0.1"
    for port in ("tcp_port", "http_port"):
        address = getattr(broker, port.replace("port", "address"))
        assert address == f"127.0.0.1:{conversation.identity[port]}"
    return {key: str(type(value)) for key, value in conversation.identity.items()}


async def test_both_brokers_send_the_same(tmp_path: Path) -> None:
    async with fake_lookupd() as to_nsqd, fake_lookupd() as to_ours:
        with ExitStack() as stack:
            flag = f"--lookupd-tcp-address={to_nsqd.tcp_address}"
            theirs = await said_to(to_nsqd, await started(stack, nsqd(tmp_path / "nsqd", flag)))
            flags = [f"--lookupd-tcp-address={to_ours.tcp_address}", "--broadcast-address=127.0.0.1"]
            ours = await said_to(to_ours, await started(stack, qcli_serve(tmp_path / "ours", *flags)))
    assert list(ours.items()) == list(theirs.items())  # in the same order, too
    # nsqd skips its first queries if it has not yet read the service's answer to IDENTIFY.
    assert to_ours.asked == ["first", "a", "e#ephemeral"]
    assert to_nsqd.asked == to_ours.asked[-len(to_nsqd.asked) :]


async def test_nsqd_registers_with_a_service_that_offers_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    async with ours(**certificates.options) as lookupd:
        with ExitStack() as stack:
            flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
            broker = await started(stack, nsqd(tmp_path / "nsqd", flag))
            await trio.to_thread.run_sync(broker.create, "t", "c")
            me = [("127.0.0.1", int(broker.tcp_address.rpartition(":")[2]))]
            await becomes(lookupd, {("t", ""): me, ("t", "c"): me})
