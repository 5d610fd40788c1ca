"""Tests for publishes that are refused, cancelled, or lost with their connection at every step."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.support import running_broker
from client.support.fake_broker import (
    FakeBroker,
    Peer,
    after_identify,
    at_once,
    bounded,
    error,
    message,
    mpub,
    pub,
    within_the_reply,
)
from client.support.producers import Outcome, accept, opened
from trio_nsq.client import BrokerError, ConnectionFailed, ConnectionLost, Consumer, Producer, PublishFailed
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.frames import HEARTBEAT_FRAME, OK_FRAME, encode_error

# ------------------------------------------------------------------------------------------------ refusals


@bounded
async def test_refusal_has_the_text_of_the_broker_and_affects_no_other_publish(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=25) as (producer, peer, nursery):
        publishes = []
        for topic in "tuvw":
            publishes.append(Outcome(nursery, producer.publish, topic, b"123456"))
            await trio.testing.wait_all_tasks_blocked()
        await peer.expect(pub("t", b"123456"), pub("u", b"123456"))
        await peer.send(error("E_UNAUTHORIZED AUTH failed for PUB"))
        await peer.expect_end()
        failure = await publishes[0].failure()
        assert not failure.maybe_stored
        assert "E_UNAUTHORIZED AUTH failed for PUB" in str(failure)
        assert isinstance(failure.__cause__, BrokerError)
        assert failure.__cause__.code == "E_UNAUTHORIZED"
        peer = await accept(broker)
        await peer.expect(pub("u", b"123456"), pub("v", b"123456"))
        await peer.send(OK_FRAME)
        await peer.expect(pub("w", b"123456"))
        await peer.send(OK_FRAME * 2)
        for publish in publishes[1:]:
            await publish.success()


@bounded
async def test_refusal_without_disconnect_affects_only_its_publish(broker: FakeBroker) -> None:
    async with opened(broker, survive_refusals=True) as (producer, peer, nursery):
        publishes = []
        for body in (b"1", b"2", b"3"):
            publishes.append(Outcome(nursery, producer.publish, "t", body))
            await trio.testing.wait_all_tasks_blocked()
        await peer.expect(pub("t", b"1"), pub("t", b"2"), pub("t", b"3"))
        await peer.send(OK_FRAME, error("E_PUB_FAILED PUB failed no space left on device"), OK_FRAME)
        await publishes[0].success()
        assert not (await publishes[1].failure()).maybe_stored
        await publishes[2].success()
        publish = Outcome(nursery, producer.publish, "t", b"4")
        await peer.expect(pub("t", b"4"))
        await peer.send(OK_FRAME)
        await publish.success()


@bounded
async def test_ordered_producer_fails_all_publishes_after_a_refusal(broker: FakeBroker) -> None:
    async with opened(broker, max_in_flight_bytes=25, ordered=True) as (producer, peer, nursery):
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
async def test_mpub_that_failed_half_way_may_be_stored(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_set, "topic", pack_messages([b"1", b"2"]))
        await peer.expect(mpub("topic", b"1", b"2"))
        await peer.send(error("E_MPUB_FAILED MPUB failed no space left on device"))
        assert (await publish.failure()).maybe_stored


@bounded
async def test_errors_can_be_printed_whatever_the_broker_answers(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        await peer.send(encode_error(b"E_BAD_TOPIC PUB \xff\xed\xa0\x80"))  # and half of a surrogate pair
        failure = await publish.failure()
        for each in (failure, failure.__cause__):
            assert rb"PUB \xff\xed\xa0\x80" in str(each).encode()


@bounded
async def test_error_frame_is_read_even_if_writing_fails(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        refused = Outcome(nursery, producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        large = Outcome(nursery, producer.publish_set, "topic", pack_messages([b"y" * 1_000_000] * 4))
        await trio.testing.wait_all_tasks_blocked()  # the writer waits until the broker reads
        await peer.send(error("E_BAD_TOPIC PUB topic name"))
        peer.hang_up()  # with unread data, so the connection is reset
        failure = await refused.failure()
        assert isinstance(failure.__cause__, BrokerError)
        assert not failure.maybe_stored
        peer = await accept(broker)
        await peer.expect(b"MPUB topic\n")
        peer.reset()
        assert (await large.failure()).maybe_stored


@bounded
async def test_failed_write_leaves_the_error_to_the_reader(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        large = Outcome(nursery, producer.publish_set, "topic", pack_messages([b"y" * 1_000_000] * 4))
        await trio.testing.wait_all_tasks_blocked()
        peer.reset()
        failure = await large.failure()
        assert isinstance(failure.__cause__, ConnectionLost)
        assert failure.maybe_stored


@pytest.mark.parametrize("attempt", range(10))  # about half of them race with the ending writer
@bounded
async def test_publish_right_after_a_refusal_uses_the_next_connection(
    broker: FakeBroker, attempt: int
) -> None:
    async def insist(producer: Producer) -> None:
        with pytest.raises(PublishFailed):
            await producer.publish("topic", b"x")
        await producer.publish("topic", b"x")

    async with opened(broker) as (producer, peer, nursery):
        nursery.start_soon(insist, producer)
        await peer.expect(pub("topic", b"x"))
        await peer.send(HEARTBEAT_FRAME + error("E_BAD_TOPIC PUB topic name"))
        peer = await accept(broker)
        await peer.expect(pub("topic", b"x"))
        await peer.send(OK_FRAME)


@bounded
async def test_lost_connection_is_reopened_only_when_needed(broker: FakeBroker) -> None:
    async with opened(broker) as (producer, peer, nursery):
        nursery.start_soon(producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        await peer.send(OK_FRAME)
        await trio.testing.wait_all_tasks_blocked()
        peer.hang_up()
        await broker.expect_no_connection()


@pytest.mark.parametrize("nonsense", [OK_FRAME, message(1), b"\xff" * 8])
@bounded
async def test_protocol_error_of_the_broker_ends_the_connection(broker: FakeBroker, nonsense: bytes) -> None:
    async with opened(broker) as (producer, peer, nursery):
        await peer.send(nonsense)
        await peer.expect_end()
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        peer = await accept(broker)
        await peer.expect(pub("topic", b"x"))
        await peer.send(message(1))
        failure = await publish.failure()
        assert isinstance(failure.__cause__, ConnectionLost)
        assert "unexpected response" in str(failure)
        assert failure.maybe_stored


# ------------------------------------------------------------------------------------------------ connection losses


@pytest.mark.parametrize("cut", [Peer.hang_up, Peer.reset])
@bounded
async def test_loss_distinguishes_sent_from_unsent_messages(
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
async def test_interrupted_list_reports_the_acknowledged_count(broker: FakeBroker) -> None:
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
async def test_refused_part_of_a_list_means_later_parts_are_not_stored(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened(broker, max_body_size=25) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        await peer.expect(*(mpub("topic", *bodies[start : start + 3]) for start in (0, 3, 6)))
        await peer.send(OK_FRAME, error("E_BAD_BODY MPUB body too big"))
        failure = await publish.failure()
        assert (failure.acknowledged, failure.maybe_stored) == (3, False)


@bounded
async def test_publishes_fail_during_an_outage_and_work_after_it(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(broker) as (producer, peer, nursery):
        broker.stop()
        peer.hang_up()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            with pytest.raises(PublishFailed) as caught:
                await producer.publish("topic", b"x")
            assert not caught.value.maybe_stored
            assert isinstance(caught.value.__cause__, ConnectionFailed)
        assert caplog.text.count("could not connect") == 1  # the errors say it, too
        await broker.start()
        publish = Outcome(nursery, producer.publish, "topic", b"y")
        peer = await accept(broker)
        await peer.expect(pub("topic", b"y"))
        await peer.send(OK_FRAME)
        await publish.success()


@pytest.mark.parametrize("cut", [Peer.hang_up, Peer.reset])
@pytest.mark.parametrize("step", [at_once, after_identify, within_the_reply])
@bounded
async def test_failed_reconnection_fails_its_publish_and_the_next_retries(
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
async def test_silent_broker_is_dropped_after_two_heartbeat_intervals(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened(broker, heartbeat_interval_s=4) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(8)
        failure = await publish.failure()
        assert failure.maybe_stored
        assert "no heartbeat for 8 s" in str(failure)
        await peer.expect_end()


@bounded
async def test_without_heartbeats_silence_is_allowed(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened(broker, heartbeat_interval_s=-1) as (producer, peer, nursery):
        publish = Outcome(nursery, producer.publish, "topic", b"x")
        await peer.expect(pub("topic", b"x"))
        clock.jump(10)
        await trio.testing.wait_all_tasks_blocked()
        await peer.send(OK_FRAME)
        await publish.success()


@bounded
async def test_entering_raises_if_no_broker_is_reachable(broker: FakeBroker) -> None:
    broker.stop()
    producer = Producer(broker.address)
    with pytest.raises(ConnectionFailed, match=broker.address):
        await producer.__aenter__()
    await producer.aclose()


@bounded
async def test_entering_waits_for_a_broker_that_starts_in_time(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    broker.stop()
    async with trio.open_nursery() as nursery:

        async def start_later() -> None:
            for _ in range(3):
                await trio.testing.wait_all_tasks_blocked(0.01)
                clock.jump(0.9)
            await broker.start()
            await (await broker.accept()).greet()

        nursery.start_soon(start_later)
        async with Producer(broker.address, connect_timeout_s=60, reconnect_max_s=1, close_timeout_s=0):
            pass


@bounded
async def test_entering_gives_up_after_the_connect_timeout(
    broker: FakeBroker, other_broker: FakeBroker, autojump_clock: trio.testing.MockClock
) -> None:
    broker.stop()
    other_broker.stop()
    began = trio.current_time()
    with pytest.raises(ConnectionFailed) as caught:
        await Producer([broker.address, other_broker.address], connect_timeout_s=10).__aenter__()
    assert 10 <= trio.current_time() - began < 11  # the last attempt is at the deadline
    assert broker.address in caught.value.address
    assert other_broker.address in caught.value.address


# ------------------------------------------------------------------------------------------------ cancelling


@bounded
async def test_cancelled_unsent_message_is_never_sent(broker: FakeBroker) -> None:
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
async def test_reply_to_a_cancelled_message_is_not_used_for_the_next(broker: FakeBroker) -> None:
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
async def test_cancelled_list_sends_no_more(broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    async with opened(broker, max_body_size=25, max_in_flight_bytes=45) as (producer, peer, nursery):
        other = Outcome(nursery, producer.publish, "topic", b"x" * 18)
        await trio.testing.wait_all_tasks_blocked()
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        await peer.expect(pub("topic", b"x" * 18), mpub("topic", *bodies[:3]))
        await trio.testing.wait_all_tasks_blocked()  # the second part waits for the window
        publish.scope.cancel()
        await publish.ended.wait()
        await peer.send(OK_FRAME * 2)
        await other.success()
        await peer.expect_nothing()


async def test_limits_that_a_broker_refuses_to_exceed_are_named(tmp_path: Path) -> None:
    """Its texts, which are nsqd's, name no option."""
    async with running_broker(tmp_path / "d") as bound:
        with pytest.raises(ConnectionFailed, match="msg_timeout_s is above the broker's --max-msg-timeout"):
            async with Consumer("t", "c", nsqd_tcp_addresses=[bound.tcp_address], msg_timeout_s=100_000):
                pass
        async with Producer(bound.tcp_address) as producer:
            with pytest.raises(PublishFailed, match="the delay, in ms, is above the broker's --max-defer"):
                await producer.publish("t", b"x", defer_s=800 * 86_400)
