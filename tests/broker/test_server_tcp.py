"""Tests for conversations with the broker over real sockets."""

import os
from contextlib import AsyncExitStack
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import trio
import trio.testing

from broker.support import (
    PATIENCE_S,
    RawClient,
    connected,
    dpub,
    identify,
    mpub,
    pub,
    running_broker,
    settle,
)
from trio_nsq import __version__


async def test_identify_reply_has_nsqds_keys_in_nsqds_order(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(feature_negotiation=True, tls_v1=True, msg_timeout=5000))
        frame = await client.frame()
        assert frame is not None
        expected = (
            '{"max_rdy_count":2500,"version":"%s","max_msg_timeout":900000,"msg_timeout":5000,"tls_v1":false,'
            '"deflate":false,"deflate_level":6,"max_deflate_level":6,"snappy":false,"sample_rate":0,'
            '"auth_required":false,"output_buffer_size":16384,"output_buffer_timeout":250}' % __version__
        )
        assert frame == (0, expected.encode())


async def test_publish_consume_finish(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        await client.publish("t", b"one", b"two")
        one, two = await client.message(), await client.message()
        assert [one.body, two.body, one.attempts] == [b"one", b"two", 1]
        assert int(two.id, 16) == int(one.id, 16) + 1
        await client.send(b"FIN " + one.id + b"\nFIN " + two.id + b"\n")
        await client.send(b"FIN " + one.id + b"\n")
        assert await client.error() == f"E_FIN_FAILED FIN {one.id.decode()} failed ID not in flight"
        await client.nothing_more()  # the connection continues


async def test_invalid_id_is_returned_unchanged(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c")
        await client.send(b"FIN \xff\xfe0123456789abcd\n")
        assert await client.frame() == (1, b"E_FIN_FAILED FIN \xff\xfe0123456789abcd failed ID not in flight")


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_pipelined_publishes_are_answered_in_order(tmp_path: Path, sync: str) -> None:
    async with running_broker(tmp_path / "d", sync=sync) as bound, connected(bound.tcp_address) as client:
        await client.send(pub("a", b"1") + mpub("b", b"2", b"3") + pub("a", b"4") + b"SUB a c\nRDY 5\n")
        for _ in range(4):
            await client.ok()
        assert [(await client.message()).body for _ in range(2)] == [b"1", b"4"]


async def test_error_after_pipelined_publishes_follows_their_answers(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(pub("a", b"1") + b"PUB bad|name\n" + pack(">i", 1) + b"x" + pub("a", b"2"))
        await client.ok()
        assert await client.error() == 'E_BAD_TOPIC PUB topic name "bad|name" is not valid'
        assert await client.frame() is None


FATAL = {
    b"  V1": "E_BAD_PROTOCOL",
    b"  V2NOPE\n": "E_INVALID invalid command NOPE",
    b"  V2FIN 0123456789abcdef\n": "E_INVALID cannot FIN in current state",
    b"  V2SUB t\n": "E_INVALID SUB insufficient number of parameters",
    b"  V2SUB t bad|name\n": 'E_BAD_CHANNEL SUB channel name "bad|name" is not valid',
    b"  V2PUB t\n\xff\xff\xff\xff": "E_BAD_MESSAGE PUB invalid message body size -1",
    b"  V2PUB t\n\x7f\xff\xff\xff": "E_BAD_MESSAGE PUB message too big 2147483647 > 1048576",
    b"  V2MPUB t\n\x7f\xff\xff\xff": "E_BAD_BODY MPUB body too big 2147483647 > 5242880",
    b"  V2DPUB t 31536000001\n": "E_INVALID DPUB timeout 31536000001 out of range 0-31536000000",
    b"  V2AUTH\n\x00\x00\x00\x01x": "E_AUTH_DISABLED AUTH disabled",
    b"  V2" + identify(heartbeat_interval=-1) + b"SUB t c\n": "E_INVALID cannot SUB with heartbeats disabled",
    b"  V2" + identify(msg_timeout=1): "E_BAD_BODY IDENTIFY msg timeout (1) is invalid",
}


@pytest.mark.parametrize("sent", list(FATAL), ids=lambda sent: sent[4:30].decode("latin-1").strip())
async def test_invalid_input_gets_its_error_and_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address, sent) as client:
        if b"IDENTIFY" in sent and b"SUB" in sent:
            await client.ok()
        assert await client.error() == FATAL[sent]
        assert await client.frame() is None


async def test_error_frame_arrives_even_if_the_client_keeps_sending(tmp_path: Path) -> None:
    """nsqd closes at once, and its reset may overtake the frame."""
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(b"NOPE\n" + bytes(2_000_000))
        assert await client.error() == "E_INVALID invalid command NOPE"


async def test_too_long_line_ends_the_connection_without_a_frame(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(b"x" * 20_000)
        assert await client.frame() is None


async def test_truncated_body_gets_an_error(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(b"PUB t\n" + pack(">i", 10) + b"half")
        await client.stream.send_eof()
        assert await client.error() == "E_BAD_MESSAGE PUB failed to read message body"


async def test_failure_of_one_client_does_not_affect_others(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as good:
        await good.subscribe("t", "c", ready_count=1)
        async with connected(bound.tcp_address, b"junk") as bad:
            assert await bad.error() == "E_BAD_PROTOCOL"
        await good.nothing_more()


async def test_consumers_share_a_channel_and_channels_get_a_copy_each(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        bound = await stack.enter_async_context(running_broker(tmp_path / "d"))
        clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(3)]
        for client, channel in zip(clients, ["shared", "shared", "own"], strict=True):
            await client.subscribe("t", channel, ready_count=100)
        for client in clients:
            await client.nothing_more()
        publisher = await stack.enter_async_context(connected(bound.tcp_address))
        await publisher.publish("t", *[b"%d" % n for n in range(10)])
        first = [(await clients[0].message()).body for _ in range(5)]
        second = [(await clients[1].message()).body for _ in range(5)]
        own = [(await clients[2].message()).body for _ in range(10)]
        assert sorted(first + second) == sorted(own) == [b"%d" % n for n in range(10)]


async def test_disconnect_redelivers_at_once_and_keeps_attempts(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as second:
        async with connected(bound.tcp_address) as first:
            await first.subscribe("t", "c", ready_count=10)
            await first.publish("t", b"x")
            assert (await first.message()).attempts == 1
            await second.subscribe("t", "c", ready_count=10)
            await second.nothing_more()
        again = await second.message()
        assert (again.body, again.attempts) == (b"x", 2)


async def test_cls_stops_delivery_and_messages_in_flight_can_be_finished(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=1)
        await client.publish("t", b"1", b"2")
        message = await client.message()
        await client.send(b"CLS\n")
        assert await client.frame() == (0, b"CLOSE_WAIT")
        await client.send(b"FIN " + message.id + b"\nRDY 5\n")
        await client.nothing_more()
        await client.send(b"CLS\n")
        assert await client.error() == "E_INVALID cannot CLS in current state"


async def test_closing_client_gets_no_more_messages(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=5)
        await client.send(b"CLS\n")
        assert await client.frame() == (0, b"CLOSE_WAIT")
        await client.publish("t", b"for somebody else")
        await client.nothing_more()


async def test_sample_rate_is_the_share_of_delivered_messages(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(sample_rate=99))
        await client.ok()
        await client.subscribe("t", "c", ready_count=1000)
        async with connected(bound.tcp_address) as publisher:
            await publisher.publish("t", *[b"%d" % number for number in range(300)])
        for _ in range(200):
            await client.message()


async def test_ephemeral_channel_and_topic_are_deleted_with_their_last_user(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c#ephemeral", ready_count=1)
            await client.publish("t", b"for c")
            await client.message()
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c#ephemeral", ready_count=1)
            await client.nothing_more()  # a new channel: it begins after the old message
        async with connected(bound.tcp_address) as client:
            await client.subscribe("e#ephemeral", "c#ephemeral", ready_count=1)
            await client.publish("e#ephemeral", b"in memory")
            assert (await client.message()).body == b"in memory"
        assert not [name for name in os.listdir(tmp_path / "d" / "topics") if name.startswith("e#")]


async def test_max_channel_consumers(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", max_channel_consumers=1) as bound:
        async with connected(bound.tcp_address) as first, connected(bound.tcp_address) as second:
            await first.subscribe("t", "c")
            await second.send(b"SUB t c\n")
            assert await second.error() == "E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 1"


async def test_slow_consumer_affects_neither_the_broker_nor_its_memory(tmp_path: Path) -> None:
    body = bytes(100_000)
    async with running_broker(tmp_path / "d", sync="interval", cache_bytes=1_000_000) as bound:
        async with connected(bound.tcp_address) as slow, connected(bound.tcp_address) as client:
            await slow.subscribe("t", "slow", ready_count=2500)
            await client.subscribe("t", "quick", ready_count=2500)
            for _ in range(40):
                await client.publish("t", *[body] * 10)
                for _ in range(10):
                    message = await client.message()
                    await client.send(b"FIN " + message.id + b"\n")
            received = [await slow.message() for _ in range(400)]
            assert len({message.id for message in received}) == 400


# ---------------------------------------------------------------------- time


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def test_heartbeats_and_disconnect_of_a_silent_client(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(heartbeat_interval=1000))
        await client.ok()
        await settle()
        clock.jump(1)
        assert await client.frame() == (0, b"_heartbeat_")
        await client.send(b"NOP\n")
        await settle()
        clock.jump(1)
        assert await client.frame() == (0, b"_heartbeat_")
        clock.jump(1)
        assert await client.frame() is None  # two intervals without data


async def test_client_without_magic_is_disconnected(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address, b"") as client:
        await settle()
        clock.jump(30)
        await settle()
        clock.jump(30)
        assert await client.frame() is None


async def test_unanswered_message_times_out_and_touch_extends_the_timeout(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(msg_timeout=10_000, heartbeat_interval=60_000))
        await client.ok()
        await client.subscribe("t", "c", ready_count=1)
        await client.publish("t", b"x")
        message = await client.message()
        await settle()
        clock.jump(9.999)
        await client.send(b"TOUCH " + message.id + b"\n")
        await client.nothing_more()
        clock.jump(9.999)
        await client.nothing_more()
        clock.jump(0.001)
        again = await client.message()
        assert (again.id, again.attempts) == (message.id, 2)


async def test_requeue_with_a_delay_and_deferred_publish(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        await client.send(dpub("t", 5000, b"later"))
        await client.ok()
        await client.publish("t", b"now")
        now = await client.message()
        assert now.body == b"now"
        await client.send(b"REQ " + now.id + b" 2000\n")
        await client.nothing_more()
        clock.jump(2)
        again = await client.message()
        assert (again.body, again.attempts) == (b"now", 2)
        await client.nothing_more()
        clock.jump(3)
        later = await client.message()
        assert (later.body, later.attempts) == (b"later", 1)


async def test_stop_does_not_wait_for_silent_clients(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with trio.fail_after(PATIENCE_S):
            async with running_broker(tmp_path / "d") as bound:
                silent = await stack.enter_async_context(connected(bound.tcp_address, b""))
                consumer = await stack.enter_async_context(connected(bound.tcp_address))
                await consumer.subscribe("t", "c", ready_count=1)
                started = trio.current_time()
        assert trio.current_time() - started < 1
        assert await silent.frame() is None
        assert await consumer.frame() is None


# ---------------------------------------------------------------------- restarts


async def test_unfinished_messages_survive_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=3)
        await client.publish("t", b"finished", b"in flight", b"requeued", b"fresh")
        first, _, third = [await client.message() for _ in range(3)]
        await client.send(b"REQ " + third.id + b" 3600000\n")
        await client.send(b"FIN " + first.id + b"\n")
        assert (await client.message()).body == b"fresh"
        await client.send(dpub("t", 3_600_000, b"deferred"))
        await client.ok()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        again = [await client.message() for _ in range(2)]
        assert sorted((m.body, m.attempts) for m in again) == [(b"fresh", 2), (b"in flight", 2)]
        await client.nothing_more()  # the requeued and the deferred one wait until due


async def test_first_channel_gets_messages_published_before_the_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"before")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"after")
        await client.subscribe("t", "c", ready_count=10)
        first, second = await client.message(), await client.message()
        assert [first.body, second.body] == [b"before", b"after"]
        assert int(second.id, 16) > int(first.id, 16)


async def test_ids_differ_between_topics_and_over_restarts(tmp_path: Path) -> None:
    seen: set[bytes] = set()
    for _ in range(3):
        async with running_broker(tmp_path / "d") as bound:
            for topic in ("a", "b"):
                async with connected(bound.tcp_address) as client:
                    await client.subscribe(topic, "c", ready_count=10)
                    await client.publish(topic, *[b"x"] * 5)
                    for _ in range(5):
                        message = await client.message()
                        assert message.id not in seen
                        seen.add(message.id)
                        await client.send(b"FIN " + message.id + b"\n")
                    await client.nothing_more()


async def test_thousands_of_messages_are_delivered_once(tmp_path: Path) -> None:
    """More than memory keeps, over many segments, published and consumed at the same time, by two connections
    each.
    """
    total = 5_000
    options: dict[str, Any] = {
        "mem_queue_size": 100,
        "cache_bytes": 5_000,
        "max_bytes_per_file": 25_000,
        "sync": "interval",
    }
    async with running_broker(tmp_path / "d", **options) as bound:
        got: list[bytes] = []

        async def publish(offset: int) -> None:
            async with connected(bound.tcp_address) as client:
                for start in range(offset, total, 200):
                    await client.publish("t", *[b"%d" % n for n in range(start, start + 100)])

        async def consume(client: RawClient, done: trio.Event) -> None:
            while len(got) < total:
                message = await client.message()
                got.append(message.body)
                await client.send(b"FIN " + message.id + b"\n")
            done.set()

        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            done = trio.Event()
            for _ in range(2):
                client = await stack.enter_async_context(connected(bound.tcp_address))
                await client.subscribe("t", "c", ready_count=50)
                nursery.start_soon(consume, client, done)
            nursery.start_soon(publish, 0)
            nursery.start_soon(publish, 100)
            await done.wait()
            nursery.cancel_scope.cancel()
    assert sorted(map(int, got)) == list(range(total))
