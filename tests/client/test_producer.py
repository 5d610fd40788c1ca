"""A producer: exact sequences, outcomes, and connections cut at every step."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from client.fake_broker import FakeBroker, Peer, bounded, error, identify_reply, message, mpub, pub
from trio_nsq.client import (
    BrokerError,
    ConnectionFailed,
    ConnectionLost,
    Producer,
    ProducerClosed,
    PublishFailed,
)
from trio_nsq.protocol import HEARTBEAT_FRAME, OK_FRAME, MessageSet, pack_messages


@asynccontextmanager
async def opened(broker: FakeBroker, **options: Any) -> AsyncIterator[tuple[Producer, Peer, trio.Nursery]]:
    """A producer, the broker's end of its connection, and a nursery."""
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []
        greeted = trio.Event()

        async def greet() -> None:
            peers.append(await accept(broker))
            greeted.set()

        nursery.start_soon(greet)
        async with Producer(broker.address, **options) as producer:
            await greeted.wait()
            yield producer, peers[0], nursery


async def accept(broker: FakeBroker) -> Peer:
    peer = await broker.accept()
    await peer.greet()
    return peer


class Outcome:
    """Runs a publish as a task and keeps what became of it."""

    def __init__(self, nursery: trio.Nursery, publish: Callable[..., Awaitable[None]], *args: object) -> None:
        self.error: Exception | None = None
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        nursery.start_soon(self._run, publish, args)

    async def _run(self, publish: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
        try:
            with self.scope:
                await publish(*args)
        except (PublishFailed, ProducerClosed) as failure:
            self.error = failure
        finally:
            self.ended.set()

    async def failure(self) -> PublishFailed:
        """Wait for it to fail."""
        await self.ended.wait()
        assert isinstance(self.error, PublishFailed)
        return self.error

    async def success(self) -> None:
        """Wait for it to be acknowledged."""
        await self.ended.wait()
        assert self.error is None


# ------------------------------------------------------------------------------------------------ publishing


@bounded
async def test_a_lone_message_goes_out_as_pub(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"body")
        await peer.expect(pub("topic", b"body"))
        await peer.expect_nothing()
        assert not publish.ended.is_set()
        await peer.send(OK_FRAME)
        await publish.success()
    await peer.expect_end()


@bounded
async def test_a_deferred_message_goes_out_as_dpub(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        nursery.start_soon(lambda: producer.publish("topic", b"body", defer_ms=1500))
        await peer.expect(b"DPUB topic 1500\n\0\0\0\x04body")
        await peer.send(OK_FRAME)


@bounded
async def test_concurrent_messages_leave_together(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):

        async def several() -> None:  # of one task, so that their order is known
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
async def test_messages_that_wait_for_room_leave_together(broker: FakeBroker) -> None:
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
        await peer.expect(mpub("topic", b"second!!", b"3rd"))  # as many as fit into the window
        await peer.send(OK_FRAME)
        await peer.expect(pub("topic", b"4th"))
        await peer.send(HEARTBEAT_FRAME, OK_FRAME)
        for publish in rest:
            await publish.success()


@bounded
async def test_a_set_is_one_mpub(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_set, "topic", pack_messages([b"a", b"bc"]))
        await peer.expect(mpub("topic", b"a", b"bc"))
        await peer.send(OK_FRAME)
        await publish.success()


@bounded
async def test_a_list_is_split_and_pipelined_within_the_window(broker: FakeBroker) -> None:
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
async def test_a_message_as_large_as_a_part_is_a_part(broker: FakeBroker) -> None:
    bodies = [b"1", b"x" * 17, b"2", b"3"]
    async with opened(broker, max_body_size=25) as (producer, peer, nursery):
        nursery.start_soon(producer.publish_many, "topic", bodies)
        await peer.expect(mpub("topic", b"1"), mpub("topic", b"x" * 17), mpub("topic", b"2", b"3"))
        await peer.send(OK_FRAME * 3)


@bounded
async def test_nothing_to_publish_sends_nothing(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, _):
        await producer.publish_many("topic", [])
        await producer.publish_set("topic", pack_messages([]))
        await peer.expect_nothing()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda p: p.publish("a b", b"x"), "not a valid topic name"),
        (lambda p: p.publish("t", b""), "empty message"),
        (lambda p: p.publish("t", b"x" * 101), "a message of 101 bytes; the limit is 100"),
        (lambda p: p.publish("t", b"x", defer_ms=-1), "defer_ms is -1"),
        (lambda p: p.publish("t", b"x", defer_ms=1001), r"within 0\.\.1000"),
        (lambda p: p.publish_many("t", [b"x", b""]), "empty message"),
        (lambda p: p.publish_many("t", [b"x", b"x" * 101]), "a message of 101 bytes"),
        (lambda p: p.publish_many("", [b"x"]), "not a valid topic name"),
        (lambda p: p.publish_set("t", pack_messages([b"x", b""])), "empty message"),
        (lambda p: p.publish_set("t", pack_messages([b"x" * 101])), "a message of 101 bytes"),
        (
            lambda p: p.publish_set("t", pack_messages([b"x" * 60] * 4)),
            "a set of 256 bytes; the limit is 196",
        ),
        (lambda p: p.publish_set("t", MessageSet(b"\0\0\0\x01x", [2])), "do not add up"),
        (lambda p: p.publish_set("t/u", pack_messages([b"x"])), "not a valid topic name"),
    ],
)
@bounded
async def test_what_brokers_refuse_is_refused_before_it_is_sent(
    broker: FakeBroker, call: Callable[[Producer], Awaitable[None]], reason: str
) -> None:
    limits = {"max_msg_size": 100, "max_body_size": 200, "max_req_timeout_ms": 1000}
    async with opened(broker, **limits) as (producer, peer, _):
        with pytest.raises(ValueError, match=reason):
            await call(producer)
        await peer.expect_nothing()


@bounded
async def test_a_message_that_is_not_bytes_fails_its_caller_only(broker: FakeBroker) -> None:
    text: Any = "text"
    async with opened(broker) as (producer, peer, _):
        with pytest.raises(TypeError, match="bytes, not str"):
            await producer.publish("topic", text)
        with pytest.raises(TypeError):
            await producer.publish_many("topic", [text])
        await peer.expect_nothing()


@pytest.mark.parametrize(
    "arguments", [{"max_in_flight_bytes": 0}, {"nsqd_tcp_address": "localhost"}, {"sample_rate": 100}]
)
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Producer(**arguments)


# ------------------------------------------------------------------------------------------------ refusals


@bounded
async def test_a_refusal_is_told_in_the_brokers_words_and_fails_those_behind(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=25) as (producer, peer, nursery):
        publishes = []
        for topic in "tuvw":
            publishes.append(Outcome(nursery, producer.publish, topic, b"123456"))
            await trio.testing.wait_all_tasks_blocked()
        await peer.expect(pub("t", b"123456"), pub("u", b"123456"))
        await peer.send(OK_FRAME)
        await peer.expect(pub("v", b"123456"))
        await peer.send(error("E_UNAUTHORIZED AUTH failed for PUB"))
        await peer.expect_end()
        await publishes[0].success()
        failures = [await publish.failure() for publish in publishes[1:]]
        for failure in failures:
            assert not failure.maybe_stored
            assert "E_UNAUTHORIZED AUTH failed for PUB" in str(failure)
            assert isinstance(failure.__cause__, BrokerError)
            assert failure.__cause__.code == "E_UNAUTHORIZED"
        await peer.expect_end()
        again = Outcome(nursery, producer.publish, "t", b"again")
        peer = await accept(broker)
        await peer.expect(pub("t", b"again"))
        await peer.send(OK_FRAME)
        await again.success()


@bounded
async def test_an_mpub_that_failed_half_way_may_be_stored(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_set, "topic", pack_messages([b"1", b"2"]))
        await peer.expect(mpub("topic", b"1", b"2"))
        await peer.send(error("E_MPUB_FAILED MPUB failed no space left on device"))
        assert (await publish.failure()).maybe_stored


@bounded
async def test_an_error_frame_is_read_also_when_writing_fails_first(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        await peer.send(error("E_BAD_TOPIC PUB topic name"))
        peer.hang_up()
        late = Outcome(nursery, producer.publish_set, "topic", pack_messages([b"y" * 1_000_000] * 4))
        assert isinstance((await publish.failure()).__cause__, BrokerError)
        late.scope.cancel()


@pytest.mark.parametrize("nonsense", [OK_FRAME, message(1), b"\xff" * 8])
@bounded
async def test_a_broker_that_says_what_it_must_not_is_left(broker: FakeBroker, nonsense: bytes) -> None:
    async with opened(broker) as (producer, peer, nursery):
        await peer.send(nonsense)
        await peer.expect_end()
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        peer = await accept(broker)
        await peer.expect(pub("topic", b"x"))
        await peer.send(message(1))
        failure = await publish.failure()
        assert isinstance(failure.__cause__, ConnectionLost)
        assert "not asked for" in str(failure)
        assert failure.maybe_stored


# ------------------------------------------------------------------------------------------------ losing it


@pytest.mark.parametrize("cut", [Peer.hang_up, Peer.reset])
@bounded
async def test_a_loss_tells_what_was_sent_from_what_was_not(
    broker: FakeBroker, cut: Callable[[Peer], None]
) -> None:
    async with opened(broker, max_in_flight_bytes=6) as (producer, peer, nursery):
        publishes = []
        for body in (b"1", b"2", b"3"):
            publishes.append(Outcome(nursery, producer.publish, "topic", body))
            await trio.testing.wait_all_tasks_blocked()
        await peer.expect(pub("topic", b"1"))
        await peer.send(OK_FRAME)
        await peer.expect(pub("topic", b"2"))
        cut(peer)
        await publishes[0].success()
        failures = [await publish.failure() for publish in publishes[1:]]
        assert [failure.maybe_stored for failure in failures] == [True, False]
        for failure in failures:
            assert isinstance(failure.__cause__, ConnectionLost)
            assert broker.address in str(failure)


@bounded
async def test_a_list_cut_short_says_how_much_was_acknowledged(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened(broker, max_body_size=25, max_in_flight_bytes=25) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        for start in (0, 3):
            await peer.expect(mpub("topic", *bodies[start : start + 3]))
            await peer.send(OK_FRAME)
        await peer.expect(mpub("topic", *bodies[6:]))
        peer.hang_up()
        failure = await publish.failure()
        assert (failure.acknowledged, failure.maybe_stored) == (6, True)


@bounded
async def test_a_list_refused_in_the_middle_is_not_stored_from_there_on(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened(broker, max_body_size=25) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        await peer.expect(*(mpub("topic", *bodies[start : start + 3]) for start in (0, 3, 6)))
        await peer.send(OK_FRAME, error("E_BAD_BODY MPUB body too big"))
        failure = await publish.failure()
        assert (failure.acknowledged, failure.maybe_stored) == (3, False)


@bounded
async def test_while_the_broker_is_away_publishes_fail_and_later_ones_get_through(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        broker.stop()
        peer.hang_up()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            with pytest.raises(PublishFailed) as caught:
                await producer.publish("topic", b"x")
            assert not caught.value.maybe_stored
            assert isinstance(caught.value.__cause__, ConnectionFailed)
        await broker.start()
        publish = Outcome(nursery, producer.publish, "topic", b"y")
        peer = await accept(broker)
        await peer.expect(pub("topic", b"y"))
        await peer.send(OK_FRAME)
        await publish.success()


async def at_once(peer: Peer) -> None:
    pass


async def after_identify(peer: Peer) -> None:
    await peer.expect_identify()


async def within_the_reply(peer: Peer) -> None:
    await peer.expect_identify()
    await peer.send(identify_reply()[:20])


@pytest.mark.parametrize("cut", [Peer.hang_up, Peer.reset])
@pytest.mark.parametrize("step", [at_once, after_identify, within_the_reply])
@bounded
async def test_a_reconnection_cut_at_any_step_fails_its_publish_and_the_next_tries_again(
    broker: FakeBroker, step: Callable[[Peer], Awaitable[None]], cut: Callable[[Peer], None]
) -> None:
    async with opened(broker) as (producer, peer, nursery):
        cut(peer)
        await trio.testing.wait_all_tasks_blocked()
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        peer = await broker.accept()
        await step(peer)
        cut(peer)
        failure = await publish.failure()
        assert not failure.maybe_stored
        assert isinstance(failure.__cause__, ConnectionFailed)
        publish = Outcome(nursery, producer.publish, "topic", b"y")
        peer = await accept(broker)
        await peer.expect(pub("topic", b"y"))
        await peer.send(OK_FRAME[:5])
        cut(peer)
        assert (await publish.failure()).maybe_stored


@bounded
async def test_a_silent_broker_is_given_up_after_two_heartbeat_intervals(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened(broker, heartbeat_interval_ms=4000) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(8)
        failure = await publish.failure()
        assert failure.maybe_stored
        assert "not even a heartbeat for 8 s" in str(failure)
        await peer.expect_end()


@bounded
async def test_without_heartbeats_silence_is_no_reason(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened(broker, heartbeat_interval_ms=-1) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        clock.jump(10)
        await trio.testing.wait_all_tasks_blocked()
        await peer.send(OK_FRAME)
        await publish.success()


@bounded
async def test_entering_raises_if_nobody_is_there(broker: FakeBroker) -> None:
    broker.stop()
    with pytest.raises(ConnectionFailed, match=broker.address):
        await Producer(broker.address).__aenter__()


# ------------------------------------------------------------------------------------------------ cancelling


@bounded
async def test_a_cancelled_message_that_was_not_sent_never_is(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=5) as (producer, peer, nursery):
        publishes = []
        for body in (b"1", b"2", b"3"):
            publishes.append(Outcome(nursery, producer.publish, "topic", body))
            await trio.testing.wait_all_tasks_blocked()
        publishes[1].scope.cancel()
        await publishes[1].ended.wait()
        await peer.expect(pub("topic", b"1"))
        await peer.send(OK_FRAME)
        await peer.expect(pub("topic", b"3"))
        await peer.send(OK_FRAME)
        await publishes[2].success()


@bounded
async def test_the_reply_to_a_cancelled_message_is_not_taken_for_the_next(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        first = Outcome(nursery, producer.publish, "topic", b"1")
        await peer.expect(pub("topic", b"1"))
        first.scope.cancel()
        await first.ended.wait()
        second = Outcome(nursery, producer.publish, "topic", b"2")
        await peer.expect(pub("topic", b"2"))
        await peer.send(OK_FRAME)
        await trio.testing.wait_all_tasks_blocked()
        assert not second.ended.is_set()
        await peer.send(OK_FRAME)
        await second.success()


@bounded
async def test_a_cancelled_list_stops_and_sends_no_more(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened(broker, max_body_size=25, max_in_flight_bytes=45) as (producer, peer, nursery):
        other = Outcome(nursery, producer.publish, "topic", b"x" * 18)
        await trio.testing.wait_all_tasks_blocked()
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        await peer.expect(pub("topic", b"x" * 18), mpub("topic", *bodies[:3]))
        await trio.testing.wait_all_tasks_blocked()  # the second part waits for room
        publish.scope.cancel()
        await publish.ended.wait()
        await peer.send(OK_FRAME * 2)
        await other.success()
        await peer.expect_nothing()


# ------------------------------------------------------------------------------------------------ closing


@bounded
async def test_closing_waits_for_acknowledgements(broker: FakeBroker) -> None:
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
async def test_closing_does_not_wait_for_ever(broker: FakeBroker) -> None:
    async with opened(broker, close_timeout_s=0.05) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"1")
        await peer.expect(pub("topic", b"1"))
    await peer.expect_end()
    failure = await publish.failure()
    assert failure.maybe_stored
    assert isinstance(failure.__cause__, ProducerClosed)


@bounded
async def test_closing_in_the_middle_of_a_list_says_how_much_was_acknowledged(broker: FakeBroker) -> None:
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
async def test_a_cancelled_close_hangs_up_at_once(broker: FakeBroker) -> None:
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
