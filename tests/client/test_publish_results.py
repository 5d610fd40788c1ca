"""Check what a producer tells of its messages: where they are stored, timeouts, `flush` and `stats`."""

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import anyio
import pytest

import trio_nsq.sync
from client.support.fake_broker import PATIENCE_S
from client.support.loops import Loop, on_both, run
from interop.peers import Broker, qcli_serve
from trio_nsq import ConnectionLost, Producer, ProducerClosed, ProducerStats, PublishAck, PublishFailed
from trio_nsq.client.publishing.queue import Command, PublishFuture, PublishQueue
from trio_nsq.client.publishing.receipt import timed_out
from trio_nsq.protocol import pack_messages
from trio_nsq.testing import FakeProducer

_topics = map("topic{}".format, count())
SHORT_S = 0.02
"""A timeout that passes; what must not pass in it waits forever."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker for all tests; each uses a topic of its own."""
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as broker:
        yield broker


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# ------------------------------------------------------------------ where it is stored


@pytest.mark.slow
@on_both
def test_publishes_tell_the_broker(loop: Loop, broker: Broker) -> None:
    topic, ack = next(_topics), PublishAck(broker.tcp_address, None)

    async def main() -> None:
        async with Producer(broker.tcp_address) as producer:
            assert await producer.publish(topic, b"1") == ack
            assert await producer.publish(topic, b"2", defer_s=0.005, timeout_s=PATIENCE_S) == ack
            assert await producer.publish_set(topic, pack_messages([b"3", b"4"]), timeout_s=PATIENCE_S) == ack
            assert await producer.publish_set(topic, pack_messages([])) is None
            await producer.publish_many(topic, [b"5", b"6"], timeout_s=PATIENCE_S)
            receipts = [producer.submit(topic, b"%d" % number) for number in range(7, 10)]
            assert [await receipt.wait() for receipt in receipts] == [ack] * 3
            assert producer.stats() == ProducerStats(0, 0, stored=9, failed=0, connections=1)

    run(loop, main)


@pytest.mark.slow
@on_both
def test_a_list_of_a_cancelled_task_is_not_sent(loop: Loop, broker: Broker) -> None:
    async def main() -> None:
        async with Producer(broker.tcp_address) as producer:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await producer.publish_many("cancelled", [b"1", b"2"])
            assert scope.cancelled_caught
            await producer.flush()
            assert producer.stats().stored == 0

    run(loop, main)


@pytest.mark.slow
def test_a_list_of_a_task_that_asyncio_has_cancelled_is_not_sent(broker: Broker) -> None:
    async def publish(producer: Producer) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await producer.publish_many("cancelled", [b"1", b"2"])

    async def main() -> None:
        async with Producer(broker.tcp_address) as producer:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(publish(producer))
            await producer.flush()
            assert producer.stats().stored == 0

    asyncio.run(main())


@pytest.mark.slow
@on_both
def test_producers_with_a_name_tell_the_number(loop: Loop, broker: Broker) -> None:
    topic = next(_topics)

    async def main() -> None:
        async with Producer(broker.tcp_address, name="numbers") as producer:
            assert await producer.publish(topic, b"0") == (broker.tcp_address, 0)
            receipts = [producer.submit(topic, b"x") for _ in range(3)]  # they leave as one command
            assert [(await receipt.wait()).number for receipt in receipts] == [1, 2, 3]
            ack = await producer.publish_set(topic, pack_messages([b"4", b"5"]))
            assert ack is not None
            assert ack.number == 4
            assert (await producer.publish(topic, b"6")).number == 6
            assert producer.stats().stored == 7

    run(loop, main)


@pytest.mark.slow
def test_publishes_of_threads_tell_the_broker(broker: Broker) -> None:
    topic, ack = next(_topics), PublishAck(broker.tcp_address, None)
    with trio_nsq.sync.Producer(broker.tcp_address) as producer:
        assert producer.publish(topic, b"1") == ack
        assert producer.publish(topic, b"1", timeout_s=PATIENCE_S) == ack
        assert producer.publish_set(topic, pack_messages([b"1"]), timeout_s=PATIENCE_S) == ack
        producer.publish_many(topic, [b"1"], timeout_s=PATIENCE_S)
        receipts = [producer.submit(topic, b"1") for _ in range(100)]
        producer.flush()
        assert {receipt.state for receipt in receipts} == {"stored"}
        assert receipts[-1].wait() == ack
        assert producer.stats() == ProducerStats(0, 0, stored=104, failed=0, connections=1)
    assert producer.stats() == ProducerStats(0, 0, stored=104, failed=0, connections=0)


# ------------------------------------------------------------------ timeouts


@on_both
def test_a_publish_without_an_answer_fails_after_its_timeout(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer(close_timeout_s=0) as producer:
            producer.delay(math.inf)
            with pytest.raises(PublishFailed, match=r"stored: no acknowledgement within 0\.02 s") as caught:
                await producer.publish("t", b"first", timeout_s=SHORT_S)
            assert isinstance(caught.value.__cause__, TimeoutError)
            assert caught.value.maybe_stored == bool(
                producer.stats().sent
            )  # on a slow machine, it is not sent
            producer.submit("t", b"sent")
            while not producer.stats().sent:
                await anyio.sleep(0)
            before = producer.stats()
            # Behind it, nothing is sent: so what fails is withdrawn.
            for publish in (
                partial(producer.publish, "t", b"waiting"),
                partial(producer.publish_set, "t", pack_messages([b"1", b"2"])),
                partial(producer.publish_many, "t", [b"1", b"2"]),
                partial(producer.publish_many, "t", [b"1", b"2"], defer_s=0.001),
            ):
                with pytest.raises(PublishFailed, match="was not stored: no acknowledgement") as caught:
                    await publish(timeout_s=SHORT_S)
                assert (caught.value.maybe_stored, caught.value.acknowledged) == (False, 0)
                assert producer.stats() == before
            with pytest.raises(TimeoutError, match=r"messages are not acknowledged after 0\.02 s"):
                await producer.flush(SHORT_S)
            assert producer.stats() == before

    run(loop, main)


def futures_of(queue: PublishQueue, *states: str) -> list[PublishFuture]:
    """Return publishes in these states, of two messages each."""
    futures = [queue.add(Command("t", messages=pack_messages([b"1", b"2"]))) for _ in states]
    queue.take()
    for future, state in zip(futures, states, strict=True):
        if state == "stored":
            future.command.settle()
        elif state == "failed":
            future.command.fail(ProducerClosed("closed"))
        elif state == "waiting":
            future.command.taken = False
            queue.add(future.command)
    return futures


@pytest.mark.parametrize(
    ("states", "acknowledged", "maybe_stored"),
    [
        (["sent"], 10, True),
        (["waiting"], 10, False),
        (["stored", "stored", "sent", "waiting"], 14, True),
        (["stored", "waiting", "waiting"], 12, False),
        (["stored", "failed", "waiting"], 12, False),
        (["failed", "stored"], 10, True),
        (["waiting", "stored"], 10, True),
    ],
)
def test_a_timeout_tells_what_is_known(states: list[str], acknowledged: int, maybe_stored: bool) -> None:
    queue = PublishQueue(10_000, 1)
    futures = futures_of(queue, *states)
    failure = timed_out(futures, 5, acknowledged=10)
    assert (failure.acknowledged, failure.maybe_stored) == (acknowledged, maybe_stored)
    assert len(queue) == 0  # what waited is withdrawn


@on_both
def test_a_publish_that_fails_in_time_has_its_own_reason(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            producer.lose_answer()
            with pytest.raises(PublishFailed) as caught:
                await producer.publish("t", b"1", timeout_s=PATIENCE_S)
            assert isinstance(caught.value.__cause__, ConnectionLost)
            producer.refuse()
            receipt = producer.submit("t", b"2")
            await producer.flush(PATIENCE_S)  # raises nothing
            assert receipt.state == "failed"
            assert producer.stats() == ProducerStats(0, 0, stored=0, failed=2, connections=1)

    run(loop, main)


@on_both
@pytest.mark.parametrize("timeout_s", [0, -1, math.nan])
def test_invalid_timeouts(loop: Loop, timeout_s: float) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            for publish in (
                partial(producer.publish, "t", b"1"),
                partial(producer.publish_many, "t", [b"1"]),
                partial(producer.publish_set, "t", pack_messages([b"1"])),
            ):
                with pytest.raises(ValueError, match="timeout_s is"):
                    await publish(timeout_s=timeout_s)
            if timeout_s != 0:
                with pytest.raises(ValueError, match="timeout_s is"):
                    await producer.flush(timeout_s)
            assert producer.messages == []
            assert producer.stats().stored == 0
        with pytest.raises(ProducerClosed):
            await producer.flush()

    run(loop, main)


@pytest.mark.slow
def test_timeouts_in_threads() -> None:
    """The broker accepts connections, and says nothing: opening does not wait for it."""
    with pytest.raises(ValueError, match="timeout_s is 0"):
        trio_nsq.sync.Producer("127.0.0.1:1", wait_connected=False).publish("t", b"1", timeout_s=0)
    with (
        silent_server() as address,
        trio_nsq.sync.Producer(
            address, wait_connected=False, dial_timeout_s=PATIENCE_S, close_timeout_s=0
        ) as producer,
    ):
        for publish in (partial(producer.publish, "t", b"1"), partial(producer.publish_many, "t", [b"1"])):
            with pytest.raises(PublishFailed, match=r"was not stored: .+ within 0\.02 s"):
                publish(timeout_s=SHORT_S)
        receipt = producer.submit("t", b"2")
        with pytest.raises(TimeoutError):
            producer.flush(SHORT_S)
        states = [receipt.state]
        assert producer.stats() == ProducerStats(waiting=1, sent=0, stored=0, failed=0, connections=0)
    assert [*states, receipt.state] == ["waiting", "failed"]
    assert producer.stats().failed == 1


# ------------------------------------------------------------------ flush


@on_both
def test_flush_waits_for_what_was_submitted_before(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            producer.delay(SHORT_S)
            receipts = [producer.submit("t", b"%d" % number) for number in range(10)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(producer.flush)
                await producer.flush()
            assert {receipt.state for receipt in receipts} == {"stored"}

    run(loop, main)


@on_both
def test_a_cancelled_flush_changes_nothing(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            producer.delay(SHORT_S)
            receipt = producer.submit("t", b"1")
            with anyio.CancelScope() as scope:
                scope.cancel()
                await producer.flush()
            assert scope.cancelled_caught
            await receipt.wait()
            assert producer.published("t") == [b"1"]

    run(loop, main)


# ------------------------------------------------------------------ counts


def settle_twice(end: Callable[[Command], None]) -> PublishQueue:
    queue = PublishQueue(1000, 1000, address="a:1")
    futures = [queue.add_message("t", b"1"), queue.add_message("t", b"2")]
    command = futures[0].command
    end(command)
    command.settle()
    command.fail(ProducerClosed("late"))
    return queue


def test_a_command_is_counted_once() -> None:
    stored = settle_twice(Command.settle)
    assert (stored.counts.stored, stored.counts.failed) == (2, 0)
    failed = settle_twice(lambda command: command.fail(ProducerClosed("closed")))
    assert (failed.counts.stored, failed.counts.failed) == (0, 2)


def test_withdrawn_messages_are_not_counted() -> None:
    queue = PublishQueue(1000, 1000, address="a:1")
    first, second = queue.add_message("t", b"1"), queue.add_message("t", b"2")
    assert queue.unsettled() == (2, 0)
    assert first.withdraw()
    assert queue.unsettled() == (1, 0)
    queue.take()
    assert queue.unsettled() == (0, 1)
    queue.acknowledge()
    assert second.ack == ("a:1", None)
    assert (queue.unsettled(), queue.counts.stored) == ((0, 0), 1)
