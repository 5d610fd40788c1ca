"""Tests for a producer: commands, limits, closing."""

import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.support import dpub, running_broker
from client.support.fake_broker import FakeBroker, bounded, mpub, pub
from client.support.producers import Outcome, opened
from trio_nsq.client import ConnectionFailed, Producer, ProducerClosed, PublishFailed
from trio_nsq.protocol import MessageSet, pack_messages
from trio_nsq.protocol.frames import HEARTBEAT_FRAME, OK_FRAME

# ------------------------------------------------------------------------------------------------ publishing


@bounded
async def test_single_message_is_a_pub(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"body")
        await peer.expect(pub("topic", b"body"))
        await peer.expect_nothing()
        assert not publish.ended.is_set()
        await peer.send(OK_FRAME)
        await publish.success()
    await peer.expect_end()


@bounded
async def test_deferred_message_is_a_dpub(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        nursery.start_soon(lambda: producer.publish("topic", b"body", defer_s=1.5))
        await peer.expect(b"DPUB topic 1500\n\0\0\0\x04body")
        await peer.send(OK_FRAME)


async def publish_deferred(defer_s: Any, producer: Producer) -> None:
    await producer.publish("t", b"x", defer_s=defer_s)


@bounded
async def test_deferrals_in_milliseconds_are_deprecated(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        old: Any = producer  # its types do not have it

        async def publish() -> None:
            with pytest.warns(
                DeprecationWarning, match="defer_ms is deprecated: use defer_s=1.5, in seconds"
            ) as warned:
                await old.publish("topic", b"1", defer_ms=1500)
            assert warned[0].filename == __file__
            with pytest.warns(DeprecationWarning, match="use defer_s=0.07"):
                await old.publish_many("topic", [b"2"], defer_ms=70)
            await old.publish("topic", b"3", defer_ms=0)

        nursery.start_soon(publish)
        for command in (b"DPUB topic 1500\n\0\0\0\x011", b"DPUB topic 70\n\0\0\0\x012", pub("topic", b"3")):
            await peer.expect(command)
            await peer.send(OK_FRAME)
        with pytest.raises(TypeError, match="defer_s and defer_ms are both given"):
            await old.publish("topic", b"x", defer_ms=1, defer_s=1)


@bounded
async def test_short_deferrals_are_deferrals(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        nursery.start_soon(lambda: producer.publish("topic", b"1", defer_s=0.0001))
        await peer.expect(b"DPUB topic 1\n\0\0\0\x011")
        await peer.send(OK_FRAME)


@bounded
async def test_argument_of_the_wrong_type_is_named(broker: FakeBroker) -> None:
    wrong: list[tuple[str, Callable[[Any], Awaitable[object]]]] = [
        ("the messages must be a list, .* not bytes", lambda each: each.publish_many("t", b"abc")),
        ("the messages must be a list, .* not str", lambda each: each.publish_many("t", "abc")),
        ("the messages must be a list, .* not int", lambda each: each.publish_many("t", 5)),
        ("a message must be bytes, not str; encode it", lambda each: each.publish_many("t", ["s"])),
        ("a message must be bytes, not int", lambda each: each.publish_many("t", [b"x", 5])),
        ("a message must be bytes, not str", lambda each: each.publish_many("t", ["s"], defer_s=0.001)),
        ("the name of a topic must be a string, not bytes", lambda each: each.publish(b"t", b"x")),
        ("the name of a topic must be a string, not None", lambda each: each.publish_many(None, [b"x"])),
        ("defer_ms is '5'; it must be an integer", lambda each: each.publish("t", b"x", defer_ms="5")),
        ("defer_s is '5'; it must be a number", lambda each: each.publish("t", b"x", defer_s="5")),
        ("defer_s is '5'; it must be a number", lambda each: each.publish_many("t", [b"x"], defer_s="5")),
        ("defer_s is True; it must be a number", partial(publish_deferred, True)),
        ("the result of pack_messages, not list", lambda each: each.publish_set("t", [b"x"])),
    ]
    async with opened(broker) as (producer, peer, _):
        for text, publish in wrong:
            with pytest.raises(TypeError, match=text):
                await publish(producer)
        await peer.expect_nothing()


@bounded
async def test_iterator_of_messages_is_published(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        nursery.start_soon(producer.publish_many, "topic", (each for each in (b"1", b"2")))
        await peer.expect(mpub("topic", b"1", b"2"))
        await peer.send(OK_FRAME)


@bounded
async def test_concurrent_messages_are_one_mpub(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):

        async def several() -> None:  # in one task, so that the order is defined
            async with trio.open_nursery() as group:
                for body in (b"1", b"2", b"3"):
                    group.start_soon(producer.publish, "topic", body)

        publish = Outcome(nursery, several)
        await trio.testing.wait_all_tasks_blocked()
        await peer.expect(b"MPUB topic\n\0\0\0\x13\0\0\0\x03")
        rest = await peer.receive()
        assert sorted(rest[4::5]) == [*b"123"]
        await peer.send(OK_FRAME)
        await publish.success()


@bounded
async def test_waiting_messages_are_sent_together(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=20) as (producer, peer, nursery):
        first = Outcome(nursery, producer.publish, "topic", b"first")
        await peer.expect(pub("topic", b"first"))
        rest = []
        for body in (b"second!!", b"3rd", b"4th"):
            rest.append(Outcome(nursery, producer.publish, "topic", body))
            await trio.testing.wait_all_tasks_blocked()
        await peer.expect_nothing()
        await peer.send(HEARTBEAT_FRAME)
        await peer.expect(b"NOP\n")
        await peer.send(OK_FRAME)
        await first.success()
        await peer.expect(mpub("topic", b"second!!", b"3rd"))  # all that fit into the window
        await peer.send(OK_FRAME)
        await peer.expect(pub("topic", b"4th"))
        await peer.send(HEARTBEAT_FRAME, OK_FRAME)
        for publish in rest:
            await publish.success()


@bounded
async def test_set_is_one_mpub(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_set, "topic", pack_messages([b"a", b"bc"]))
        await peer.expect(mpub("topic", b"a", b"bc"))
        await peer.send(OK_FRAME)
        await publish.success()


@bounded
async def test_list_is_split_and_pipelined_within_the_window(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened(broker, max_body_size=25, max_in_flight_bytes=50) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        await peer.expect(mpub("topic", *bodies[:3]), mpub("topic", *bodies[3:6]))
        await peer.expect_nothing()
        await peer.send(OK_FRAME)
        await peer.expect(mpub("topic", *bodies[6:]))
        await peer.send(OK_FRAME)
        await trio.testing.wait_all_tasks_blocked()
        assert not publish.ended.is_set()
        await peer.send(OK_FRAME)
        await publish.success()


@bounded
async def test_deferred_list_is_sent_one_by_one_in_order(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=15) as (producer, peer, nursery):
        publish = Outcome(nursery, lambda: producer.publish_many("topic", [b"1", b"22", b"3"], defer_s=0.07))
        await peer.expect(dpub("topic", 70, b"1"), dpub("topic", 70, b"22"))
        await peer.expect_nothing()
        await peer.send(OK_FRAME * 2)
        await peer.expect(dpub("topic", 70, b"3"))
        await peer.send(OK_FRAME)
        await publish.success()
        with pytest.raises(TypeError, match="must be bytes, not str"):
            await producer.publish_many("topic", [b"4", "5"], defer_s=0.07)  # type: ignore[list-item]
        await peer.expect_nothing()


@bounded
async def test_message_of_the_size_of_a_part_is_a_part(broker: FakeBroker) -> None:
    bodies = [b"1", b"x" * 17, b"2", b"3"]
    async with opened(broker, max_body_size=25) as (producer, peer, nursery):
        nursery.start_soon(producer.publish_many, "topic", bodies)
        await peer.expect(mpub("topic", b"1"), mpub("topic", b"x" * 17), mpub("topic", b"2", b"3"))
        await peer.send(OK_FRAME * 3)


@bounded
async def test_empty_publish_sends_nothing(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, _):
        await producer.publish_many("topic", [])
        await producer.publish_set("topic", pack_messages([]))
        await peer.expect_nothing()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda p: p.publish("a b", b"x"), "'a b' is not a valid topic name: 1 to 64 of the characters "),
        (lambda p: p.publish("t", b""), "empty message"),
        (lambda p: p.publish("t", b"x" * 101), "a message of 101 bytes; the limit is 100, see max_msg_size"),
        (lambda p: p.publish("t", b"x", defer_s=-0.001), r"defer_s is -0\.001; it must be at least 0"),
        (lambda p: p.publish("t", b"x", defer_s=math.nan), "defer_s is nan"),
        (lambda p: p.publish("t", b"x", defer_s=math.inf), "defer_s is inf"),
        (lambda p: p.publish("t", b"x", defer_s=1.001), r"defer_s is 1\.001; it must be within 0\.\.1"),
        (lambda p: p.publish_many("t", [b"x", b""]), "empty message"),
        (lambda p: p.publish_many("t", [b"x", b"x" * 101]), "a message of 101 bytes"),
        (lambda p: p.publish_many("", [b"x"]), "not a valid topic name"),
        (lambda p: p.publish_set("t", pack_messages([b"x", b""])), "empty message"),
        (lambda p: p.publish_set("t", pack_messages([b"x" * 101])), "a message of 101 bytes"),
        (
            lambda p: p.publish_set("t", pack_messages([b"x" * 60] * 4)),
            "a message set of 256 bytes; the limit is 196",
        ),
        (lambda p: p.publish_set("t", MessageSet(b"\0\0\0\x01x", [2])), "do not add up"),
        (lambda p: p.publish_set("t/u", pack_messages([b"x"])), "not a valid topic name"),
    ],
)
@bounded
async def test_message_that_brokers_refuse_is_not_sent(
    broker: FakeBroker, call: Callable[[Producer], Awaitable[object]], reason: str
) -> None:
    limits: dict[str, Any] = {"max_msg_size": 100, "max_body_size": 200, "max_req_timeout_s": 1}
    async with opened(broker, **limits) as (producer, peer, _):
        with pytest.raises(ValueError, match=reason):
            await call(producer)
        await peer.expect_nothing()


@bounded
async def test_message_that_is_not_bytes_fails_only_its_caller(broker: FakeBroker) -> None:
    text: Any = "text"
    async with opened(broker) as (producer, peer, _):
        with pytest.raises(TypeError, match="bytes, not str"):
            await producer.publish("topic", text)
        with pytest.raises(TypeError):
            await producer.publish_many("topic", [text])
        await peer.expect_nothing()


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_in_flight_bytes": 0},
        {"max_msg_size": 0},
        {"max_body_size": 8},
        {"nsqd_tcp_addresses": "localhost"},
        {"sample_rate": 100},
        {"reconnect_min_s": 0},
        {"close_timeout_s": -1},
    ],
)
def test_invalid_options_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Producer(**arguments)


# ------------------------------------------------------------------------------------------------ closing


@bounded
async def test_close_waits_for_acknowledgements(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=5) as (producer, peer, nursery):
        publishes = []
        for body in (b"1", b"2"):
            publishes.append(Outcome(nursery, producer.publish, "topic", body))
            await trio.testing.wait_all_tasks_blocked()
        closing = Outcome(nursery, producer.aclose)
        again = Outcome(nursery, producer.aclose)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ProducerClosed):
            await producer.publish("topic", b"too late")
        for body in (b"1", b"2"):
            await peer.expect(pub("topic", body))
            assert not closing.ended.is_set()
            await peer.send(OK_FRAME)
        for publish in publishes:
            await publish.success()
        await closing.ended.wait()
        await again.ended.wait()
        await peer.expect_end()


@bounded
async def test_close_does_not_wait_for_withdrawn_messages(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=5, close_timeout_s=1000) as (producer, peer, nursery):
        first = Outcome(nursery, producer.publish, "topic", b"1")
        await peer.expect(pub("topic", b"1"))
        second = Outcome(nursery, producer.publish, "topic", b"2")
        await trio.testing.wait_all_tasks_blocked()
        second.scope.cancel()
        nursery.start_soon(peer.send, OK_FRAME)
        await producer.aclose()
        await first.success()


@bounded
async def test_close_has_a_timeout(broker: FakeBroker) -> None:
    async with opened(broker, close_timeout_s=0.05) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"1")
        await peer.expect(pub("topic", b"1"))
    await peer.expect_end()
    failure = await publish.failure()
    assert failure.maybe_stored
    assert isinstance(failure.__cause__, ProducerClosed)


@bounded
async def test_closing_during_a_list_reports_the_acknowledged_count(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(6)]
    async with opened(broker, max_body_size=25, max_in_flight_bytes=25) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        await peer.expect(mpub("topic", *bodies[:3]))
        nursery.start_soon(producer.aclose)
        await trio.testing.wait_all_tasks_blocked()
        await peer.send(OK_FRAME)
        failure = await publish.failure()
        assert (failure.acknowledged, failure.maybe_stored) == (3, False)
        assert isinstance(failure.__cause__, ProducerClosed)


@bounded
async def test_cancelled_close_disconnects_at_once(broker: FakeBroker) -> None:
    async with opened(broker, close_timeout_s=1000) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"1")
        await peer.expect(pub("topic", b"1"))
        with trio.move_on_after(0):
            await producer.aclose()
        await peer.expect_end()
        assert (await publish.failure()).maybe_stored


@bounded
async def test_publishing_outside_the_block_is_an_error(broker: FakeBroker) -> None:
    producer = Producer(broker.address)
    with pytest.raises(ProducerClosed, match="not open yet"):
        await producer.publish("topic", b"x")
    nothing_to_close = Producer(broker.address)
    await nothing_to_close.aclose()
    async with opened(broker) as (producer, _, _):
        with pytest.raises(RuntimeError, match="once"):
            await producer.__aenter__()
    for call in (producer.publish("t", b"x"), producer.publish_many("t", [b"x"])):
        with pytest.raises(ProducerClosed, match="is closed"):
            await call


@bounded
async def test_publishing_before_the_entry_completes_is_an_error(broker: FakeBroker) -> None:
    producer = Producer(broker.address)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(producer.__aenter__)
        await broker.accept()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ProducerClosed, match="not open yet"):
            await producer.publish("topic", b"x")
        nursery.cancel_scope.cancel()


async def test_producer_that_does_not_wait_publishes_once_a_broker_can_be_reached(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound:
        address = bound.tcp_address
    async with Producer(address, wait_connected=False) as producer:
        with pytest.raises(PublishFailed) as failed:
            await producer.publish("topic", b"early")
        assert isinstance(failed.value.__cause__, ConnectionFailed)
        async with running_broker(tmp_path / "d", tcp_address=address):
            await producer.publish("topic", b"body")


def test_producer_that_does_not_wait_needs_an_address() -> None:
    with pytest.raises(ValueError, match="wait_connected"):
        Producer(lookupd_http_addresses="127.0.0.1:4161", wait_connected=False)
