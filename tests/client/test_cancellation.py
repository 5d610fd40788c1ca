"""Cancel each wait of the client's calls, one after the other, under both loops, and compare with the broker's log."""

from collections.abc import Awaitable, Callable
from itertools import count, cycle

import pytest

from client.support.loops import Cancellation, Loop, cancelled, on_both, run
from interop.peers import Broker
from trio_nsq import Consumer, Message, Producer, PublishFailed, TopicReader
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages

pytestmark = pytest.mark.slow  # starts a broker

ON_ALL = pytest.mark.parametrize(
    ("loop", "is_late"),
    [("trio", False), ("asyncio", False), ("asyncio", True)],
    ids=["trio", "asyncio", "late"],
)
"""`is_late`: the wait has ended, and the task has not run since."""
MOST_WAITS = 8
MESSAGES = 40


async def stored(real_broker: Broker, topic: str) -> list[bytes]:
    """Return all messages of a topic, as the broker has them."""
    bodies: list[bytes] = []
    async with TopicReader(real_broker.http_address, topic) as reader:
        while found := await reader.receive():
            for each in found:
                assert isinstance(each, RecordBatch)
                bodies += each.messages.bodies()
    return bodies


def take_one(consumer: Consumer) -> Callable[[], Awaitable[list[Message]]]:
    async def take() -> list[Message]:
        return [await anext(consumer)]

    return take


def take_in_time(consumer: Consumer) -> Callable[[], Awaitable[list[Message]]]:
    """Wait for a message with timeouts, which may end together with a cancellation."""
    timeouts_s = cycle([0, 0.0005, 0.002, 60])

    async def take() -> list[Message]:
        message = await consumer.get(next(timeouts_s))
        return [] if message is None else [message]

    return take


def take_batch(consumer: Consumer) -> Callable[[], Awaitable[list[Message]]]:
    batches = consumer.batches(max_messages=3)

    async def take() -> list[Message]:
        return list(await anext(batches))

    return take


def take_combined(consumer: Consumer) -> Callable[[], Awaitable[list[Message]]]:
    batches = consumer.batches(max_messages=5, max_wait_s=0.005)

    async def take() -> list[Message]:
        return list(await anext(batches))

    return take


@ON_ALL
@pytest.mark.parametrize("taking", [take_one, take_in_time, take_batch, take_combined])
def test_a_cancelled_wait_takes_no_message(
    loop: Loop,
    is_late: bool,
    real_broker: Broker,
    topic: str,
    taking: Callable[[Consumer], Callable[[], Awaitable[list[Message]]]],
) -> None:
    received: list[bytes] = []
    cancellations = 0

    async def main() -> None:
        nonlocal cancellations
        async with (
            Producer(real_broker.tcp_address) as producer,
            Consumer(
                topic,
                "c",
                nsqd_tcp_addresses=real_broker.tcp_address,
                max_in_flight=7,
                output_buffer_size=-1,
            ) as consumer,
        ):
            take = taking(consumer)
            for number in range(MESSAGES):
                if number % 4 == 0:  # otherwise the consumer may have some already
                    await producer.publish_many(topic, [b"%d" % (number + more) for more in range(4)])
                while len(received) <= number:
                    outcome = await cancelled(take(), Cancellation(1 + cancellations % 3, is_late=is_late))
                    cancellations += outcome.was_cancelled
                    for message in outcome.result or ():
                        message.finish()
                        received.append(message.body)
            stats = consumer.stats()
            assert (stats.received, stats.finished, stats.requeued) == (MESSAGES, MESSAGES, 0)

    run(loop, main)
    assert cancellations
    assert received == [b"%d" % number for number in range(MESSAGES)]
    assert real_broker.is_drained(topic, "c")
    assert real_broker.channel_stats(topic, "c")["requeue_count"] == 0


Publish = Callable[[Producer, str, list[bytes]], Awaitable[None]]


async def publish_one(producer: Producer, topic: str, bodies: list[bytes]) -> None:
    """Publish the first message."""
    await producer.publish(topic, bodies[0])
    del bodies[1:]


async def publish_many(producer: Producer, topic: str, bodies: list[bytes]) -> None:
    """Publish a list, as several commands."""
    await producer.publish_many(topic, bodies)


async def publish_set(producer: Producer, topic: str, bodies: list[bytes]) -> None:
    """Publish a list as one command."""
    await producer.publish_set(topic, pack_messages(bodies))


@ON_ALL
@pytest.mark.parametrize("publish", [publish_one, publish_many, publish_set])
def test_a_cancelled_publish_is_stored_once_or_not_at_all(
    loop: Loop, is_late: bool, real_broker: Broker, topic: str, publish: Publish
) -> None:
    acknowledged: list[bytes] = []
    found: list[bytes] = []
    numbers = count()
    cancellations = 0

    async def main() -> None:
        nonlocal cancellations
        async with Producer(real_broker.tcp_address, max_in_flight_bytes=300_000) as producer:
            for at in range(1, MOST_WAITS):
                for _ in range(2):
                    bodies = [b"%d " % next(numbers) + bytes(100_000) for _ in range(4)]
                    outcome = await cancelled(
                        publish(producer, topic, bodies), Cancellation(at, is_late=is_late)
                    )
                    cancellations += outcome.was_cancelled
                    if not outcome.was_cancelled:
                        acknowledged.extend(bodies)
            # The producer is as before: later publishes are stored behind the others.
            await producer.publish(topic, b"last")
            acknowledged.append(b"last")
        found.extend(await stored(real_broker, topic))

    run(loop, main)
    assert cancellations
    assert len(set(found)) == len(found)
    assert set(acknowledged) <= set(found)
    assert found[-1] == b"last"


@ON_ALL
def test_a_receipt_tells_what_became_of_a_message(
    loop: Loop, is_late: bool, real_broker: Broker, topic: str
) -> None:
    by_state: dict[str, set[bytes]] = {"stored": set(), "sent": set(), "withdrawn": set()}
    found: list[bytes] = []
    numbers = count()

    async def main() -> None:
        # A message may be in flight, and the next one waits.
        async with Producer(real_broker.tcp_address, max_in_flight_bytes=150_000) as producer:
            for number in range(24):
                bodies = [b"%d " % next(numbers) + bytes(140_000) for _ in range(3)]
                receipts = [producer.submit(topic, body) for body in bodies]
                waiting = receipts[number % 3]
                outcome = await cancelled(waiting.wait(), Cancellation(1 + number % 2, is_late=is_late))
                assert outcome.was_cancelled or waiting.state == "stored"
                for body, receipt in zip(bodies, receipts, strict=True):
                    assert receipt.withdraw() == (receipt.state == "withdrawn")
                    by_state[receipt.state].add(body)
                    if receipt.state == "withdrawn":
                        with pytest.raises(PublishFailed, match="it was not stored: it was withdrawn"):
                            await receipt.wait()
        found.extend(await stored(real_broker, topic))

    run(loop, main)
    assert len(set(found)) == len(found)
    assert by_state["stored"] <= set(found)
    assert by_state["sent"] <= set(found)  # the producer was left without failures
    assert by_state["withdrawn"]
    assert not by_state["withdrawn"] & set(found)


@ON_ALL
def test_entering_and_leaving_leave_nothing_behind(
    loop: Loop, is_late: bool, real_broker: Broker, topic: str
) -> None:
    cancellations = 0

    async def use() -> None:
        async with (
            Producer(real_broker.tcp_address) as producer,
            Consumer(topic, "c", nsqd_tcp_addresses=real_broker.tcp_address, max_in_flight=7) as consumer,
        ):
            await producer.publish(topic, b"x")
            await anext(consumer)

    async def main() -> None:
        nonlocal cancellations
        for at in count(1):
            outcome = await cancelled(use(), Cancellation(at, is_late=is_late))
            cancellations += outcome.was_cancelled
            about = real_broker.channel_stats(topic, "c")
            assert not about["in_flight_count"], f"after the cancellation of wait {at}"
            if not outcome.waited:
                break

    run(loop, main)
    assert cancellations >= 3


@on_both
def test_a_reader_that_is_cancelled_neither_skips_nor_repeats(
    loop: Loop, real_broker: Broker, topic: str
) -> None:
    found: list[bytes] = []
    cancellations = 0

    async def main() -> None:
        nonlocal cancellations
        async with (
            Producer(real_broker.tcp_address) as producer,
            TopicReader(real_broker.http_address, topic, follow=True) as reader,
        ):
            for number in range(MOST_WAITS):
                outcome = await cancelled(reader.receive(), Cancellation(1))
                assert outcome.was_cancelled  # there is nothing to receive
                await producer.publish_many(topic, [b"%d" % number] * 5)
                for attempt in count():
                    outcome = await cancelled(reader.receive(), Cancellation(1 + number % 6 + attempt))
                    cancellations += outcome.was_cancelled
                    if outcome.result:
                        break
                for each in outcome.result or ():
                    assert isinstance(each, RecordBatch)
                    found.extend(each.messages.bodies())

    run(loop, main)
    assert cancellations >= MOST_WAITS / 2
    assert found == [b"%d" % number for number in range(MOST_WAITS) for _ in range(5)]
