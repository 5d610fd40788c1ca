"""Tests for requeues that count as no attempt, which a client asks for in IDENTIFY."""

import json
from pathlib import Path

import pytest

from broker.state import Fixture
from broker.support import RawClient, Received, connected, identify, running_broker
from trio_nsq.log import MemoryLog

WANTED = {"feature_negotiation": True, "uncounted_requeues": True}


async def consumer(client: RawClient, **fields: object) -> None:
    """Negotiate, and subscribe to `t/c`."""
    await client.send(identify(**fields))
    await client.frame()
    await client.subscribe("t", "c", 1)


async def requeue(
    client: RawClient, message: Received, more: bytes = b" uncounted", delay_ms: int = 0
) -> None:
    await client.send(b"REQ %s %d%s\n" % (message.id, delay_ms, more))


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("delay_ms", [0, 10])
def test_attempts_stay_the_same(delay_ms: int) -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    counts: list[int] = []
    for counts_attempt in (False, False, True, False, False):
        (message,) = subscriber.receive()
        counts.append(message.attempts)
        assert subscriber.requeue(message, delay_ms, counts_attempt=counts_attempt) is None
        fixture.pass_ms(delay_ms)
    (message,) = subscriber.receive()
    assert [*counts, message.attempts] == [1, 1, 1, 2, 2, 2]
    assert fixture.channel().requeue_count == 5


@pytest.mark.parametrize("delay_ms", [0, 10])
@pytest.mark.parametrize("dead_letter_topic", ["dead", ""])
def test_message_does_not_come_closer_to_max_attempts(delay_ms: int, dead_letter_topic: str) -> None:
    fixture = Fixture()
    channel = fixture.channel()
    channel.configure({"max_attempts": 1, "dead_letter_topic": dead_letter_topic})
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    for _ in range(5):
        (message,) = subscriber.receive()
        subscriber.requeue(message, delay_ms, counts_attempt=False)
        fixture.pass_ms(delay_ms)
    (message,) = subscriber.receive()
    assert (message.attempts, channel.given_up_count, channel.messages.withdrawn.waiting) == (1, 0, 0)
    subscriber.requeue(message)
    assert channel.given_up_count + channel.messages.withdrawn.waiting == 1


@pytest.mark.parametrize("delay_ms", [0, 10_000])
def test_attempts_are_saved(delay_ms: int) -> None:
    log = MemoryLog(max_messages=100)
    fixture = Fixture(log)
    subscriber = fixture.subscriber(ready=2)
    fixture.publish(b"a", b"b")
    first, second = subscriber.receive()
    subscriber.requeue(first, delay_ms)
    subscriber.requeue(second, delay_ms, counts_attempt=False)
    restarted = Fixture(log)
    restarted.topic.restore(json.loads(json.dumps(fixture.topic.snapshot())))
    restarted.pass_ms(delay_ms)
    again = restarted.subscriber(ready=2).receive()
    assert {message.body: message.attempts for message in again} == {b"a": 2, b"b": 1}


# ---------------------------------------------------------------------- on the wire


async def test_only_clients_that_ask_for_it(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as bound, connected(bound.tcp_address) as producer:
        await producer.publish("t", b"a")
        for fields, attempts in [
            (WANTED, [1, 1, 2]),
            ({"feature_negotiation": True}, [3, 4, 5]),
            ({"uncounted_requeues": True}, [7, 8, 9]),  # it has not seen that the broker confirms it
        ]:
            async with connected(bound.tcp_address) as client:
                await consumer(client, **fields)
                found = []
                for more in (b" uncounted", b" x", b" uncounted"):
                    message = await client.message()
                    found.append(message.attempts)
                    await requeue(client, message, more)
                assert found == attempts
                message = await client.message()
                await client.send(b"CLS\n")
                assert await client.frame() == (0, b"CLOSE_WAIT")
                await requeue(client, message, b"")
                await client.nothing_more()


async def test_errors_are_those_of_other_requeues(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as bound, connected(bound.tcp_address) as client:
        await consumer(client, **WANTED)
        await client.send(b"REQ 0123456789abcdef 0 uncounted\n")
        assert await client.error() == "E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight"
