"""Tests for `Consumer.run`, which calls a handler for each message."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from client.support.consumers import consumer_entered, consumer_of, opened, see_off
from client.support.fake_broker import FakeBroker, Peer, bounded, fins, message, message_id, reqs
from client.support.lookupds import until
from trio_nsq.client import Consumer, ConsumerStats, Message
from trio_nsq.client.consuming.message import MessageBatch
from trio_nsq.protocol.frames import CLOSE_WAIT_FRAME, OK_FRAME, encode_response


class Works:
    """A handler that records its messages.

    Attributes:
        begun, ended: Bodies, oldest first.
        go_on: Messages wait for this event.
        fails: Bodies for which it raises ValueError.
    """

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.ended: list[bytes] = []
        self.go_on = trio.Event()
        self.fails: set[bytes] = set()

    async def __call__(self, message: Message) -> None:
        self.begun.append(message.body)
        await self.go_on.wait()
        if message.body in self.fails:
            raise ValueError(message.body)
        self.ended.append(message.body)


@asynccontextmanager
async def running(
    broker: FakeBroker, handler: Any, *, returned: tuple[int, ...] = (), **options: Any
) -> AsyncIterator[tuple[Consumer, Peer]]:
    """Open a consumer that runs a handler; yield it and the broker's end of its connection."""
    own = {
        name: options.pop(name) for name in ("max_backoff_duration_s", "msg_timeout_ms") if name in options
    }
    async with opened(broker, returned=returned, **own) as (consumer, peer), trio.open_nursery() as nursery:

        async def run() -> None:
            await consumer.run(handler, **options)

        nursery.start_soon(run)
        yield consumer, peer
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(each.levelno, each.message) for each in caplog.records if each.name == "trio_nsq.client"]


@bounded
async def test_return_finishes_and_exception_requeues(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    works = Works()
    works.go_on.set()
    works.fails = {b"body 2"}
    async with running(broker, works, max_backoff_duration_s=0) as (consumer, peer):
        await peer.send(message(1), message(2, attempts=2), message(3))
        await peer.expect(fins(1), reqs(2, delay_ms=180_000), fins(3))
        assert consumer.stats() == ConsumerStats(received=3, finished=2, requeued=1, connections=1)
    assert works.begun == [b"body 1", b"body 2", b"body 3"]
    ((level, text),) = logged(caplog)
    assert level == logging.ERROR
    assert text == f"<Message {message_id(2).decode()} from {broker.address}> failed, attempt 2"
    assert "ValueError: b'body 2'" in caplog.text


@bounded
async def test_failing_handler_causes_a_pause(broker: FakeBroker) -> None:
    works = Works()
    works.go_on.set()
    works.fails = {b"body 1"}
    async with running(broker, works) as (_, peer):
        await peer.send(message(1))
        await peer.expect(reqs(1, delay_ms=90_000), b"RDY 0\n")


@bounded
async def test_concurrency_is_limited(broker: FakeBroker) -> None:
    works = Works()
    async with running(broker, works, concurrency=2) as (_, peer):
        await peer.send(message(1), message(2), message(3))
        await trio.testing.wait_all_tasks_blocked()
        assert works.begun == [b"body 1", b"body 2"]
        await peer.expect_nothing()
        works.go_on.set()
        answers = [await peer.receive_line() for _ in range(3)]
        assert sorted(answers) == [fins(number) for number in (1, 2, 3)]


@bounded
async def test_message_answered_by_the_handler_is_not_answered_again(broker: FakeBroker) -> None:
    async def handler(one: Message) -> None:
        if one.body == b"body 1":
            one.requeue(5, backoff=False)
        else:
            one.finish()
            raise ValueError

    async with running(broker, handler) as (_, peer):
        await peer.send(message(1), message(2))
        await peer.expect(reqs(1, delay_ms=5), fins(2))
        await peer.expect_nothing()


# ------------------------------------------------------------------------------------------------ attempts limit


@bounded
async def test_message_is_dropped_after_the_last_attempt(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    works = Works()
    works.go_on.set()
    async with running(broker, works) as (_, peer):
        await peer.send(message(1, attempts=5), message(2, attempts=6))
        await peer.expect(fins(1, 2))
    assert works.begun == [b"body 1"]
    assert [level for level, _ in logged(caplog)] == [logging.WARNING]
    assert (
        f"{message_id(2).decode()} from {broker.address}> is not handled: it exceeds 5 attempts"
        in caplog.text
    )


@bounded
async def test_callback_is_called_before_the_message_is_finished(broker: FakeBroker) -> None:
    works, buries = Works(), Works()
    async with running(broker, works, max_attempts=1, given_up=buries) as (_, peer):
        await peer.send(message(1, attempts=2))
        await trio.testing.wait_all_tasks_blocked()
        assert (works.begun, buries.begun) == ([], [b"body 1"])
        await peer.expect_nothing()
        buries.go_on.set()
        await peer.expect(fins(1))


@bounded
async def test_failing_callback_requeues_the_message(broker: FakeBroker) -> None:
    buries = Works()
    buries.go_on.set()
    buries.fails = {b"body 1"}
    async with running(broker, Works(), max_attempts=1, given_up=buries) as (_, peer):
        await peer.send(message(1, attempts=2))
        await peer.expect(reqs(1, delay_ms=180_000), b"RDY 0\n")


@bounded
async def test_without_a_limit_nothing_is_dropped(broker: FakeBroker) -> None:
    works = Works()
    works.go_on.set()
    async with running(broker, works, max_attempts=0) as (_, peer):
        await peer.send(message(1, attempts=65535))
        await peer.expect(fins(1))
    assert works.begun == [b"body 1"]


# ------------------------------------------------------------------------------------------------ touching


def of_message(touched: int) -> bytes:
    return b"TOUCH %s\n" % message_id(touched)


@bounded
async def test_long_handler_keeps_its_message(broker: FakeBroker, clock: trio.testing.MockClock) -> None:
    works = Works()
    async with running(broker, works, auto_touch=True, msg_timeout_ms=4000) as (_, peer):
        await peer.send(message(1), message(2))
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            clock.jump(1)
            await peer.expect_nothing()
            clock.jump(1)
            await peer.expect(of_message(1))
        for_first, works.go_on = works.go_on, trio.Event()
        for_first.set()
        # The second message has waited 6 of its 4 seconds: it is touched late.
        await trio.testing.wait_all_tasks_blocked()
        assert peer.receive_nowait() == fins(1) + of_message(2)
        works.go_on.set()
        await peer.expect(fins(2))
        clock.jump(4)
        await peer.expect_nothing()


@bounded
async def test_nothing_is_touched_by_default(broker: FakeBroker, clock: trio.testing.MockClock) -> None:
    works = Works()
    async with running(broker, works, msg_timeout_ms=4000) as (_, peer):
        await peer.send(message(1))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(3)
        await peer.expect_nothing()
        works.go_on.set()
        await peer.expect(fins(1))


@bounded
async def test_message_has_its_time_of_arrival_and_its_deadline(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    peers = []

    async def accept() -> None:
        peer = await broker.accept()
        await peer.expect_identify()
        await peer.send(encode_response(b'{"max_rdy_count":2500,"msg_timeout":7000}'))
        await peer.expect(b"SUB topic channel\n")
        await peer.send(OK_FRAME)
        await peer.expect(b"RDY 5\n")
        peers.append(peer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        async with consumer_of(broker, close_timeout_s=0) as consumer:
            await until(lambda: peers)
            await peers[0].send(message(1), message(2))
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(5)
            await peers[0].send(message(3))
            await trio.testing.wait_all_tasks_blocked()
            (first,) = await anext(consumer.batches(max_messages=1))
            second, third = [await anext(consumer) for _ in range(2)]
    assert first.received_at == second.received_at <= third.received_at - 5
    assert first.timeout_s == 7


@bounded
async def test_batch_can_be_touched(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1), message(2), message(3))
        batch: MessageBatch = await anext(consumer.batches())
        _, second, _ = batch
        second.finish()
        batch.touch()
        await peer.expect(fins(2), of_message(1), of_message(3))
        batch.finish()
        batch.touch()
        await peer.expect(fins(1, 3))
        await peer.expect_nothing()


# ------------------------------------------------------------------------------------------------ ending


@bounded
async def test_close_waits_for_handlers_and_requeues_waiting_messages(broker: FakeBroker) -> None:
    works = Works()
    ended = []

    async def run(consumer: Consumer) -> None:
        await consumer.run(works)
        ended.append("run")

    async with trio.open_nursery() as nursery, consumer_entered(nursery, broker) as (consumer, peer):
        nursery.start_soon(run, consumer)
        await peer.send(message(1), message(2))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(consumer.aclose)
        await peer.expect(b"CLS\n")
        await peer.send(CLOSE_WAIT_FRAME)
        await peer.expect_nothing()
        works.go_on.set()
        await peer.expect(fins(1), reqs(2))
        await peer.expect_end()
        peer.hang_up()
    assert ended == ["run"]
    assert works.ended == [b"body 1"]
    assert consumer.stats() == ConsumerStats(received=2, finished=1, requeued=1, connections=0)


@bounded
async def test_too_slow_handler_loses_its_message(broker: FakeBroker, clock: trio.testing.MockClock) -> None:
    works = Works()
    async with (
        trio.open_nursery() as nursery,
        consumer_entered(nursery, broker, close_timeout_s=8) as (consumer, peer),
    ):
        nursery.start_soon(consumer.run, works)
        await peer.send(message(1))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(see_off, peer, 1)
        nursery.start_soon(consumer.aclose)
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(4)
        await consumer.aclose()
        works.go_on.set()
    assert works.ended == [b"body 1"]  # and its message is not finished
    assert consumer.stats().finished == 0


@bounded
async def test_cancellation_requeues_messages_of_handlers(broker: FakeBroker) -> None:
    works = Works()
    async with running(broker, works, returned=(1, 2)) as (_, peer):
        await peer.send(message(1), message(2))
        await trio.testing.wait_all_tasks_blocked()
        assert works.begun == [b"body 1"]


@bounded
async def test_invalid_arguments_are_refused() -> None:
    consumer = Consumer("topic", "channel")
    with pytest.raises(ValueError, match="concurrency is 0"):
        await consumer.run(Works(), concurrency=0)
    with pytest.raises(ValueError, match="max_attempts is -1"):
        await consumer.run(Works(), max_attempts=-1)
    await consumer.aclose()


@bounded
async def test_handler_that_is_not_async_is_an_error(broker: FakeBroker) -> None:
    """Requeueing would repeat its effects."""
    calls: list[bytes] = []
    async with opened(broker, returned=(1,)) as (consumer, peer):
        await peer.send(message(1))
        with pytest.RaisesGroup(
            pytest.RaisesExc(TypeError, match=r"must be an async function; .* returned None"),
            flatten_subgroups=True,
        ):
            await consumer.run(lambda each: calls.append(each.body))  # type: ignore[arg-type,return-value]
        assert calls == [b"body 1"]
        assert consumer.stats() == ConsumerStats(received=1, finished=0, requeued=0, connections=1)
