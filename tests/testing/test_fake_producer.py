"""The producer without a broker behaves as the real one, with the failures that a test orders."""

import math

import anyio.lowlevel
import pytest

from client.support.loops import Loop, on_both, run
from trio_nsq import BrokerError, ConnectionFailed, ConnectionLost, Producer, PublishFailed, sync
from trio_nsq.client import ProducerClosed
from trio_nsq.protocol import pack_messages
from trio_nsq.testing import FakeMessage, FakeProducer, FakeSyncProducer


@on_both
def test_every_way_to_publish(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            assert isinstance(producer, Producer)
            await producer.publish("a", b"1")
            await producer.publish("b", b"2", defer_s=1.5)
            await producer.publish_many("a", [b"3", b"4"])
            await producer.publish_many("b", [b"5", b"6"], defer_s=0.001)
            await producer.publish_set("a", pack_messages([b"7", b"8"]))
            receipt = producer.submit("a", b"9")
            states = [receipt.state]
            await receipt.wait()
            assert [*states, receipt.state] == ["waiting", "stored"]
            withdrawn = producer.submit("a", b"10")
            assert withdrawn.withdraw()
        assert producer.published("a") == [b"1", b"3", b"4", b"7", b"8", b"9"]
        assert producer.published("b") == [b"2", b"5", b"6"]
        assert producer.published("c") == []
        assert producer.messages[:2] == [FakeMessage("a", b"1", 0), FakeMessage("b", b"2", 1.5)]

    run(loop, main)


@on_both
def test_producer_with_a_name(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer(name="writer") as producer:
            assert await producer.last_number("t") is None
            await producer.publish_many("t", [b"0", b"1"])
            assert [await producer.last_number(topic) for topic in "tu"] == [1, None]
            acks = [await producer.publish(topic, b"2") for topic in "tut"]
            assert [each.number for each in acks] == [2, 0, 3]
        assert producer.published("t") == [b"0", b"1", b"2", b"2"]

    run(loop, main)


@on_both
def test_failures_come_in_their_order(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            producer.accept(2)
            producer.refuse()
            producer.lose_answer()
            producer.lose_answer(stored=False)
            producer.refuse(2, error=ConnectionFailed("10.0.0.1:4150", "it is down"))
            outcomes: list[tuple[object, ...]] = []
            for number in range(8):
                try:
                    await producer.publish("t", b"%d" % number)
                except PublishFailed as failed:
                    outcomes.append((failed.maybe_stored, type(failed.__cause__)))
                else:
                    outcomes.append(())
        assert outcomes == [
            (),
            (),
            (False, BrokerError),
            (True, ConnectionLost),
            (True, ConnectionLost),
            (False, ConnectionFailed),
            (False, ConnectionFailed),
            (),
        ]
        assert producer.published("t") == [b"0", b"1", b"3", b"7"]

    run(loop, main)


@on_both
def test_delay_holds_up_later_publishes(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer(close_timeout_s=0) as producer:
            producer.delay(0.01)
            first, second = producer.submit("t", b"1"), producer.submit("t", b"2")
            await second.wait()
            assert first.state == "stored"

            producer.delay(math.inf)
            stuck = producer.submit("t", b"3")
            while stuck.state == "waiting":
                await anyio.lowlevel.checkpoint()
            behind = producer.submit("t", b"4")
            assert not stuck.withdraw()
            assert [stuck.state, behind.state] == ["sent", "waiting"]
        for receipt in (stuck, behind):
            with pytest.raises(PublishFailed) as failed:
                await receipt.wait()
            assert failed.value.maybe_stored == (receipt is stuck)
        assert producer.published("t") == [b"1", b"2"]

    run(loop, main)


@on_both
def test_list_that_fails_in_its_middle(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            producer.accept()
            producer.refuse()
            with pytest.raises(PublishFailed) as failed:
                await producer.publish_many("t", [b"1", b"2", b"3"], defer_s=0.001)
            assert (failed.value.acknowledged, failed.value.maybe_stored) == (1, False)
        assert producer.published("t") == [b"1"]

    run(loop, main)


@on_both
def test_ordered_producer_fails_what_is_behind(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer(ordered=True) as producer:
            producer.refuse()
            receipts = [producer.submit("t", b"%d" % number) for number in range(3)]
            for receipt in receipts:
                with pytest.raises(PublishFailed):
                    await receipt.wait()
            await producer.publish("t", b"later")
        assert producer.published("t") == [b"later"]

    run(loop, main)


@on_both
def test_checks_are_those_of_the_producer(loop: Loop) -> None:
    async def main() -> None:
        producer = FakeProducer(max_msg_size=4)
        with pytest.raises(ProducerClosed):
            await producer.publish("t", b"x")
        async with producer:
            for topic, body in (("no topic!", b"x"), ("t", b""), ("t", b"12345")):
                with pytest.raises(ValueError):
                    await producer.publish(topic, body)
        with pytest.raises(ProducerClosed):
            await producer.publish("t", b"x")
        assert producer.messages == []

    run(loop, main)


def test_without_async_code() -> None:
    producer = FakeSyncProducer()
    assert isinstance(producer, sync.Producer)
    with pytest.raises(ProducerClosed):
        producer.publish("t", b"x")
    with producer:
        producer.accept()
        producer.refuse()
        producer.lose_answer()
        producer.delay(0.01)
        producer.publish("t", b"1")
        for maybe_stored in (False, True):
            with pytest.raises(PublishFailed) as failed:
                producer.publish("t", b"2")
            assert failed.value.maybe_stored == maybe_stored
        receipt = producer.submit("t", b"3")
        receipt.wait()
        producer.publish_many("t", [b"4", b"5"])
        producer.publish_set("t", pack_messages([b"6"]))
        with pytest.raises(ValueError, match="the message is empty"):
            producer.publish("t", b"")
    with pytest.raises(ProducerClosed):
        producer.publish("t", b"x")
    assert producer.published("t") == [b"%d" % number for number in range(1, 7)]


def test_sync_producer_that_gets_no_answer() -> None:
    with FakeSyncProducer(close_timeout_s=0) as producer:
        producer.delay(math.inf)
        receipt = producer.submit("t", b"x")
    with pytest.raises(PublishFailed):
        receipt.wait()


def test_wrong_orders() -> None:
    producer = FakeProducer()
    with pytest.raises(ValueError, match="count is 0"):
        producer.accept(0)
    with pytest.raises(TypeError, match="error"):
        producer.refuse(error="down")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="delay_s is -1"):
        producer.delay(-1)
