"""Test our client with the real nsqd."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from interop.our_client import PATIENCE_S, consumer_of, nsqd_with_channel, warnings
from interop.peers import Broker, nsqd
from trio_nsq.client import BrokerError, ConnectionFailed, Message, MessageBatch, Producer, PublishFailed
from trio_nsq.protocol import pack_messages

pytestmark = pytest.mark.interop


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with nsqd_with_channel(tmp_path / "data") as running:
        yield running


def bodies_of_many_sizes(count: int) -> list[bytes]:
    """Return distinct bodies of 6 bytes to 3 KB; one in a thousand has 200 KB."""
    return [
        b"%06d" % number + bytes(number % 256 for _ in range(number % 3000)) for number in range(count - 3)
    ] + [bytes([number]) * 200_000 for number in range(3)]


async def test_thousands_of_messages_round_trip_in_batches(broker: Broker) -> None:
    bodies = bodies_of_many_sizes(5000)
    received: list[bytes] = []
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer, consumer_of(broker) as consumer:
            await producer.publish_many("topic", bodies)
            async for batch in consumer.batches():
                received += batch.bodies
                batch.finish()
                if len(received) >= len(bodies):
                    break
    assert sorted(received) == sorted(bodies)
    stats = broker.channel_stats("topic", "channel")
    assert (stats["depth"], stats["in_flight_count"], stats["message_count"]) == (0, 0, len(bodies))


async def test_thousands_of_messages_round_trip_one_by_one(broker: Broker) -> None:
    bodies = [b"%d" % number for number in range(3000)]
    received: list[bytes] = []
    started_ns = time.time_ns()
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer, consumer_of(broker) as consumer:
            async with trio.open_nursery() as nursery:
                for body in bodies:
                    nursery.start_soon(producer.publish, "topic", body)
            async for message in consumer:
                assert message.attempts == 1
                assert started_ns <= message.timestamp_ns <= time.time_ns()
                assert message.nsqd_address == broker.tcp_address
                received.append(message.body)
                message.finish()
                if len(received) == len(bodies):
                    break
    assert sorted(received) == sorted(bodies)
    assert broker.channel_stats("topic", "channel")["in_flight_count"] == 0


async def test_stats_show_the_identify_options_of_the_client(broker: Broker) -> None:
    options = {
        "client_id": "me",
        "hostname": "here",
        "user_agent": "test/1",
        "sample_rate": 42,
    }
    with trio.fail_after(PATIENCE_S):
        async with consumer_of(broker, max_in_flight=7, **options):
            while (
                not (clients := broker.channel_stats("topic", "channel")["clients"])
                or not clients[0]["ready_count"]
            ):
                await trio.lowlevel.checkpoint()  # RDY has no reply
    (client,) = clients
    told = ("client_id", "hostname", "user_agent", "sample_rate", "ready_count")
    assert [client[name] for name in told] == ["me", "here", "test/1", 42, 7]


async def test_requeued_message_is_redelivered_with_more_attempts(broker: Broker) -> None:
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer, consumer_of(broker) as consumer:
            await producer.publish("topic", b"again")
            first = await anext(consumer)
            first.requeue(0, backoff=False)
            second = await anext(consumer)
            started_at = trio.current_time()
            second.requeue(delay_s=0.3, backoff=False)
            third = await anext(consumer)
            assert trio.current_time() - started_at > 0.25
            third.finish()
    assert [m.attempts for m in (first, second, third)] == [1, 2, 3]
    assert first.id == second.id == third.id
    assert broker.channel_stats("topic", "channel")["requeue_count"] == 2


async def test_nsqd_counts_all_attempts(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer, consumer_of(broker) as consumer:
            await producer.publish("topic", b"again")
            for attempts in (1, 2):
                message = await anext(consumer)
                assert message.attempts == attempts
                message.requeue(delay_s=0, backoff=False, count_attempt=False)
            last = await anext(consumer)
            last.finish()
    assert last.attempts == 3
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{broker.tcp_address} counts the attempts of messages requeued with")


async def test_requeued_batch_is_redelivered(broker: Broker) -> None:
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer, consumer_of(broker) as consumer:
            await producer.publish_set("topic", pack_messages([b"%d" % number for number in range(100)]))
            again: list[int] = []
            async for batch in consumer.batches(max_messages=30):
                assert len(batch) <= 30
                again += (attempts for attempts in batch.attempts if attempts > 1)
                for message in batch:
                    if message.attempts > 1:
                        message.finish()
                if not all(message.answered for message in batch):
                    batch.requeue(0, backoff=False)
                if len(again) == 100:
                    break
    assert again == [2] * 100


@pytest.mark.slow
async def test_touch_extends_the_message_timeout(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    with trio.fail_after(PATIENCE_S):
        async with (
            Producer(broker.tcp_address) as producer,
            consumer_of(broker, msg_timeout_s=2) as consumer,
        ):
            await producer.publish("topic", b"touched")
            await producer.publish("topic", b"left alone")
            held = {message.body: message for message in [await anext(consumer) for _ in range(2)]}
            await producer.publish("topic", b"a second is over", defer_s=1)
            (await anext(consumer)).finish()
            held[b"touched"].touch()
            late = await anext(consumer)
            assert (late.body, late.attempts) == (b"left alone", 2)
            late.finish()
            held[b"touched"].finish()
    assert warnings(caplog) == []
    assert broker.channel_stats("topic", "channel")["timeout_count"] == 1


async def test_finish_after_the_timeout_is_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    with trio.fail_after(PATIENCE_S):
        async with (
            Producer(broker.tcp_address) as producer,
            consumer_of(broker, msg_timeout_s=1) as consumer,
        ):
            await producer.publish("topic", b"slow")
            first = await anext(consumer)
            second = await anext(consumer)
            second.finish()
            first.finish()
            await producer.publish("topic", b"next")
            (await anext(consumer)).finish()
    assert [second.body, second.attempts] == [b"slow", 2]
    (warning,) = warnings(caplog)
    assert f"E_FIN_FAILED FIN {first.id.decode()} failed ID not in flight" in warning


async def test_deferred_message_is_delivered_later(broker: Broker) -> None:
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer, consumer_of(broker) as consumer:
            started_at = trio.current_time()
            await producer.publish("topic", b"later", defer_s=0.3)
            await producer.publish("topic", b"now")
            now, later = await anext(consumer), await anext(consumer)
            assert trio.current_time() - started_at > 0.25
            now.finish()
            later.finish()
    assert [now.body, later.body] == [b"now", b"later"]


async def test_consumers_of_one_channel_share_its_messages(broker: Broker) -> None:
    with trio.fail_after(PATIENCE_S):
        async with (
            Producer(broker.tcp_address) as producer,
            consumer_of(broker, max_in_flight=1) as one,
            consumer_of(broker, max_in_flight=1) as other,
        ):
            await producer.publish_many("topic", [b"1", b"2"])
            # Each consumer holds its message until the other consumer has received one.
            messages = [await anext(one), await anext(other)]
            for message in messages:
                message.finish()
    assert sorted(message.body for message in messages) == [b"1", b"2"]


@pytest.mark.slow
async def test_heartbeats_keep_an_idle_connection_open(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with (
            Producer(broker.tcp_address, heartbeat_interval_s=1) as producer,
            consumer_of(broker, heartbeat_interval_s=1) as consumer,
        ):
            await producer.publish("topic", b"three and a half intervals", defer_s=3.5)
            (await anext(consumer)).finish()
            await producer.publish("topic", b"still there")
            (await anext(consumer)).finish()
    assert warnings(caplog) == []


@pytest.mark.parametrize("attempt", range(5))
async def test_nothing_stays_in_flight_after_closing_a_busy_consumer(
    broker: Broker, caplog: pytest.LogCaptureFixture, attempt: int
) -> None:
    total = 20_000
    finished = 0
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer:
            await producer.publish_many("topic", [b"x" * 200] * total)
        while broker.channel_stats("topic", "channel")["message_count"] < total:
            await trio.lowlevel.checkpoint()  # nsqd fills the channel asynchronously
        async with consumer_of(broker, max_in_flight=2500) as consumer:
            kept: list[MessageBatch | Message] = []
            async for batch in consumer.batches(max_messages=100):
                # Of every three batches, finish one, finish one message of another, and leave the third.
                match len(kept) % 3:
                    case 0:
                        batch.finish()
                        finished += len(batch)
                    case 1:
                        next(iter(batch)).finish()
                        finished += 1
                kept.append(batch)
                if finished > 300 + 150 * attempt:
                    break
    stats = broker.channel_stats("topic", "channel")
    assert stats["in_flight_count"] == 0
    assert stats["depth"] == total - finished
    assert stats["timeout_count"] == stats["deferred_count"] == 0
    assert warnings(caplog) == []


@pytest.mark.slow
async def test_nothing_stays_in_flight_after_closing_in_full_flow(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    # While messages flow, nsqd often sends one more message after its CLOSE_WAIT.
    total = 40_000
    finished = 0
    with trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer:
            await producer.publish_many("topic", [b"x" * 200] * total)
        for number in range(25):
            async with consumer_of(broker, max_in_flight=2500) as consumer:
                batches = consumer.batches(max_messages=200)
                for _ in range(1 + number % 8):
                    batch = await anext(batches)
                    batch.finish()
                    finished += len(batch)
            assert broker.channel_stats("topic", "channel")["in_flight_count"] == 0
        while (stats := broker.channel_stats("topic", "channel"))["message_count"] < total:
            await trio.lowlevel.checkpoint()
    assert stats["depth"] == total - finished
    assert stats["timeout_count"] == 0
    assert warnings(caplog) == []


async def test_rejected_message_fails_only_its_own_publish(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data", "--max-msg-size=100") as broker, trio.fail_after(PATIENCE_S):
        async with Producer(broker.tcp_address) as producer, consumer_of(broker) as consumer:
            with pytest.raises(PublishFailed) as caught:
                await producer.publish("topic", b"x" * 101)
            assert not caught.value.maybe_stored
            assert isinstance(caught.value.__cause__, BrokerError)
            assert caught.value.__cause__.code == "E_BAD_MESSAGE"
            assert "PUB message too big 101 > 100" in str(caught.value)
            await producer.publish("topic", b"x" * 100)
            message = await anext(consumer)
            message.finish()
            assert message.body == b"x" * 100


async def test_error_of_consumer_limit_contains_the_broker_message(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data", "--max-channel-consumers=1") as broker, trio.fail_after(PATIENCE_S):
        async with consumer_of(broker):
            with pytest.raises(ConnectionFailed, match="E_SUB_FAILED SUB failed consumers for topic:channel"):
                await consumer_of(broker).__aenter__()


async def test_error_names_the_http_port_as_the_cause(broker: Broker) -> None:
    with (
        trio.fail_after(PATIENCE_S),
        pytest.raises(ConnectionFailed, match="it answers in HTTP: use the port of the TCP protocol"),
    ):
        await Producer(broker.http_address).__aenter__()
