"""Tests for `Consumer.run`, which calls a handler for each message."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from client.support.consumers import accept_and_subscribe, consumer_entered, consumer_of, opened, see_off
from client.support.fake_broker import FakeBroker, Peer, bounded, fins, message, message_id, reqs
from client.support.lookupds import until
from trio_nsq.client import Consumer, ConsumerStats, Message
from trio_nsq.client.consuming.message import MessageBatch
from trio_nsq.protocol.encode import encode_pub
from trio_nsq.protocol.frames import CLOSE_WAIT_FRAME, OK_FRAME, encode_response


async def handle(one: Message, *_: Exception) -> None:
    """Do nothing."""


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
    names = ("backoff_after", "default_requeue_delay_s", "max_backoff_duration_s", "msg_timeout_s")
    own = {name: options.pop(name) for name in names if name in options}
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
    assert (
        text == f"topic/channel: <Message {message_id(2).decode()} from {broker.address}> failed, attempt 2"
    )
    assert "ValueError: b'body 2'" in caplog.text


@bounded
async def test_several_failures_in_a_row_cause_a_pause(broker: FakeBroker) -> None:
    works = Works()
    works.go_on.set()
    works.fails = {b"body %d" % number for number in range(1, 12)}
    async with running(broker, works, backoff_after=3) as (_, peer):
        # A success in between: the failures are not in a row.
        await peer.send(message(1), message(2), message(20), message(3), message(4))
        await peer.expect(reqs(1, 2, delay_ms=90_000), fins(20), reqs(3, 4, delay_ms=90_000))
        await peer.expect_nothing()
        await peer.send(message(5))
        await peer.expect(reqs(5, delay_ms=90_000), b"RDY 0\n")


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
            one.requeue(delay_s=0.005, backoff=False)
        else:
            one.finish()
            raise ValueError

    async with running(broker, handler) as (_, peer):
        await peer.send(message(1), message(2))
        await peer.expect(reqs(1, delay_ms=5), fins(2))
        await peer.expect_nothing()


# ------------------------------------------------------------------------------------------------ attempts limit


@bounded
async def test_no_message_is_discarded_by_default(broker: FakeBroker) -> None:
    """However often it was delivered, and however often it fails."""
    works = Works()
    works.go_on.set()
    works.fails = {b"body 1"}
    async with running(broker, works, max_backoff_duration_s=0, default_requeue_delay_s=0) as (_, peer):
        for attempts in range(1, 20):
            await peer.send(message(1, attempts=attempts))
            await peer.expect(reqs(1))
        await peer.send(message(2, attempts=65535))
        await peer.expect(fins(2))
    assert works.ended == [b"body 2"]


@bounded
async def test_message_is_given_up_at_its_last_failure(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Only failures of the handler count: the first delivery here is the ninth."""
    works = Works()
    works.go_on.set()
    works.fails = {b"body 1"}
    given_up: list[tuple[bytes, str]] = []

    async def bury(one: Message, error: Exception) -> None:
        given_up.append((one.body, str(error)))

    async with running(
        broker, works, max_attempts=3, given_up=bury, max_backoff_duration_s=0, default_requeue_delay_s=0
    ) as (_, peer):
        for attempts in (9, 10):
            await peer.send(message(1, attempts=attempts), message(2, attempts=attempts))
            await peer.expect(reqs(1), fins(2))
        assert given_up == []
        await peer.send(message(1, attempts=11))
        await peer.expect(fins(1))
        assert given_up == [(b"body 1", "b'body 1'")]
        # It was forgotten: published again under the same id, it has all its attempts.
        await peer.send(message(1))
        await peer.expect(reqs(1))
    assert (
        f"topic/channel: <Message {message_id(1).decode()} from {broker.address}> is given up" in caplog.text
    )


@bounded
async def test_message_that_the_handler_requeued_is_given_up_at_the_next_delivery(broker: FakeBroker) -> None:
    handled: list[int] = []
    given_up: list[str] = []

    async def requeue(one: Message) -> None:
        handled.append(one.attempts)
        one.requeue(0, backoff=False)
        raise ValueError(f"attempt {one.attempts}")

    async def bury(_: Message, error: Exception) -> None:
        given_up.append(str(error))
        if len(given_up) == 1:
            raise OSError("disk full")

    async with running(
        broker, requeue, max_attempts=2, given_up=bury, max_backoff_duration_s=0, default_requeue_delay_s=0
    ) as (_, peer):
        for attempts in (1, 2, 3):  # the third one cannot be given up
            await peer.send(message(1, attempts=attempts))
            await peer.expect(reqs(1))
        await peer.send(message(1, attempts=4))
        await peer.expect(fins(1))
        assert (handled, given_up) == ([1, 2], ["attempt 2", "attempt 2"])
        # It was forgotten: published again under the same id, it has all its attempts.
        await peer.send(message(1))
        await peer.expect(reqs(1))
    assert handled == [1, 2, 1]


@bounded
async def test_success_forgets_earlier_failures(broker: FakeBroker) -> None:
    works = Works()
    works.go_on.set()
    async with running(
        broker, works, max_attempts=2, max_backoff_duration_s=0, default_requeue_delay_s=0
    ) as (_, peer):
        for _ in range(3):
            works.fails = {b"body 1"}
            await peer.send(message(1))
            await peer.expect(reqs(1))
            works.fails = set()
            await peer.send(message(1))
            await peer.expect(fins(1))


@bounded
async def test_discarded_message_is_logged(broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    works = Works()
    works.go_on.set()
    works.fails = {b"body 1"}
    async with running(broker, works, max_attempts=1) as (_, peer):
        await peer.send(message(1))
        await peer.expect(fins(1))
    assert logged(caplog)[-1] == (
        logging.ERROR,
        f"topic/channel: <Message {message_id(1).decode()} from {broker.address}> is discarded: it failed 1 times",
    )


@bounded
async def test_message_is_finished_after_it_was_given_up(broker: FakeBroker) -> None:
    works, buries = Works(), Works()
    works.go_on.set()
    works.fails = {b"body 1"}

    async def bury(one: Message, _: Exception) -> None:
        await buries(one)

    async with running(broker, works, max_attempts=1, given_up=bury) as (_, peer):
        await peer.send(message(1))
        await trio.testing.wait_all_tasks_blocked()
        assert buries.begun == [b"body 1"]
        await peer.expect_nothing()
        buries.go_on.set()
        await peer.expect(fins(1))


@bounded
async def test_message_that_cannot_be_given_up_is_requeued(broker: FakeBroker) -> None:
    works = Works()
    works.go_on.set()
    works.fails = {b"body 1"}

    async def bury(one: Message, error: Exception) -> None:
        raise OSError("disk full") from error

    async with running(broker, works, max_attempts=1, given_up=bury) as (_, peer):
        await peer.send(message(1, attempts=2))
        await peer.expect(reqs(1, delay_ms=180_000))


@bounded
async def test_dead_letter_is_published_before_its_message_is_finished(broker: FakeBroker) -> None:
    works = Works()
    works.go_on.set()
    works.fails = {b"body 1"}
    async with running(broker, works, max_attempts=1, dead_letter_topic="dead") as (_, peer):
        await peer.send(message(1))
        publisher = await broker.accept()
        await publisher.greet()
        await publisher.expect(encode_pub("dead", b"body 1"))
        await peer.expect_nothing()
        await publisher.send(OK_FRAME)
        await peer.expect(fins(1))
        publisher.hang_up()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"given_up": Works()}, "max_attempts is 0"),
        (
            {"dead_letter_topic": "dead"},
            "max_attempts is 0, no limit; with given_up or dead_letter_topic it must",
        ),
        ({"max_attempts": 1, "dead_letter_topic": "topic"}, "the topic itself"),
        ({"max_attempts": 1, "dead_letter_topic": "a b"}, "not a valid topic name"),
        ({"max_attempts": 1, "dead_letter_topic": "dead", "given_up": Works()}, "both given"),
        ({"concurrency": 6}, "concurrency is 6, but only 5 may be in flight"),
    ],
)
async def test_contradicting_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    consumer = Consumer("topic", "channel", max_in_flight=5)
    with pytest.raises(ValueError, match=text):
        await consumer.run(Works(), **options)
    await consumer.aclose()


@bounded
async def test_concurrency_raises_the_default_limit_in_flight(broker: FakeBroker) -> None:
    works = Works()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_and_see_off, broker)
        consumer = Consumer("topic", "channel", nsqd_tcp_addresses=[broker.address])
        async with consumer:
            assert consumer.max_in_flight == 1
            nursery.start_soon(partial(consumer.run, works, concurrency=3))
            await until(lambda: len(works.begun) == 3)
            works.go_on.set()
            await until(lambda: len(works.ended) == 3)


async def accept_and_see_off(broker: FakeBroker) -> None:
    peer = await accept_and_subscribe(broker, ready=1)
    await peer.expect(b"RDY 3\n")
    await peer.send(message(1), message(2), message(3))
    answers = [await peer.receive_line() for _ in range(3)]
    assert sorted(answers) == [fins(number) for number in (1, 2, 3)]
    await see_off(peer)


# ------------------------------------------------------------------------------------------------ touching


def of_message(touched: int) -> bytes:
    return b"TOUCH %s\n" % message_id(touched)


@bounded
async def test_long_handler_keeps_its_message(broker: FakeBroker, clock: trio.testing.MockClock) -> None:
    works = Works()
    async with running(broker, works, auto_touch=True, msg_timeout_s=6) as (_, peer):
        await peer.send(message(1), message(2))
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            clock.jump(1)
            await peer.expect_nothing()
            clock.jump(1)
            await peer.expect(of_message(1))
        for_first, works.go_on = works.go_on, trio.Event()
        for_first.set()
        # The second message has waited for all of its 6 seconds: it is touched late.
        await trio.testing.wait_all_tasks_blocked()
        assert peer.receive_nowait() == fins(1) + of_message(2)
        works.go_on.set()
        await peer.expect(fins(2))
        clock.jump(4)
        await peer.expect_nothing()


@bounded
async def test_nothing_is_touched_by_default(broker: FakeBroker, clock: trio.testing.MockClock) -> None:
    works = Works()
    async with running(broker, works, msg_timeout_s=4) as (_, peer):
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


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("child", [False, True])
@bounded
async def test_handler_that_closes_the_consumer_finishes_its_message(
    broker: FakeBroker, concurrency: int, child: bool
) -> None:
    """On the mock clock a wait for its own end would take half of `close_timeout_s`."""
    consumers: list[Consumer] = []
    others = trio.Event()

    async def handler(one: Message) -> None:
        if one.body == b"body 1":
            await trio.testing.wait_all_tasks_blocked()
            if child:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(consumers[0].aclose)
            else:
                await consumers[0].aclose()
                await consumers[0].aclose()
        else:
            await others.wait()

    async with (
        trio.open_nursery() as nursery,
        consumer_entered(nursery, broker) as (consumer, peer),
    ):
        consumers.append(consumer)
        running = trio.Event()

        async def run() -> None:
            await consumer.run(handler, concurrency=concurrency)
            running.set()

        nursery.start_soon(run)
        await peer.send(*map(message, range(1, 5)))
        assert sorted([await peer.receive_line() for _ in range(2)]) == [b"CLS\n", fins(1)]
        await peer.send(CLOSE_WAIT_FRAME)
        others.set()
        answers = [await peer.receive_line() for _ in range(3)]
        assert sorted(answers[: concurrency - 1]) == [fins(number) for number in range(2, concurrency + 1)]
        assert answers[concurrency - 1 :] == [reqs(number) for number in range(concurrency + 1, 5)]
        await peer.expect_end()
        peer.hang_up()
        await consumer.aclose()
        await running.wait()
    assert consumer.stats() == ConsumerStats(4, finished=concurrency, requeued=4 - concurrency, connections=0)


@bounded
async def test_block_that_is_cancelled_while_a_handler_closes_still_returns_all_messages(
    broker: FakeBroker,
) -> None:
    async with (
        trio.open_nursery() as nursery,
        consumer_entered(nursery, broker) as (consumer, peer),
        trio.open_nursery() as block,
    ):

        async def handler(one: Message) -> None:
            await consumer.aclose()
            block.cancel_scope.cancel()
            await trio.sleep_forever()

        block.start_soon(consumer.run, handler)
        await peer.send(message(1), message(2))
        nursery.start_soon(see_off, peer, 1, 2)


@pytest.mark.parametrize("concurrency", [1, 2, 3])
@bounded
async def test_next_run_receives_the_messages_of_a_cancelled_one(
    broker: FakeBroker, concurrency: int
) -> None:
    """All that the broker may send is in flight: nothing else would arrive before the message timeout."""
    works = Works()
    async with opened(broker) as (consumer, peer):
        await peer.send(*map(message, range(1, 6)))
        for _ in range(2):
            async with trio.open_nursery() as nursery:

                async def run() -> None:
                    await consumer.run(works, concurrency=concurrency)

                nursery.start_soon(run)
                await until(lambda: len(works.begun) == concurrency)
                nursery.cancel_scope.cancel()
            assert sorted(works.begun) == [b"body %d" % number for number in range(1, concurrency + 1)]
            works.begun.clear()
        await peer.expect_nothing()
        works.go_on.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consumer.run, works)
            await until(lambda: len(works.ended) == 5)
            nursery.cancel_scope.cancel()
        assert sorted([await peer.receive_line() for _ in range(5)]) == [fins(each) for each in range(1, 6)]
        assert consumer.stats() == ConsumerStats(received=5, finished=5, requeued=0, connections=1)


@bounded
async def test_message_that_a_cancelled_handler_answered_is_not_received_again(broker: FakeBroker) -> None:
    async def handler(one: Message) -> None:
        one.finish()
        await trio.sleep_forever()

    async with running(broker, handler) as (consumer, peer):
        await peer.send(message(1))
        await peer.expect(fins(1))
    assert consumer.stats().finished == 1


@pytest.mark.parametrize("auto_touch", [False, True])
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@bounded
async def test_what_ends_the_program_is_raised_as_it_is(
    broker: FakeBroker, error: BaseException, concurrency: int, auto_touch: bool
) -> None:
    async def handler(one: Message) -> None:
        await trio.lowlevel.checkpoint()
        raise error

    async with opened(broker, returned=(1,)) as (consumer, peer):
        await peer.send(message(1))
        with pytest.raises(type(error)) as caught:
            await consumer.run(handler, concurrency=concurrency, auto_touch=auto_touch)
        assert caught.value is error


@bounded
async def test_invalid_arguments_are_refused() -> None:
    consumer = Consumer("topic", "channel")
    with pytest.raises(ValueError, match="concurrency is 0"):
        await consumer.run(Works(), concurrency=0)
    with pytest.raises(ValueError, match="max_attempts is -1"):
        await consumer.run(Works(), max_attempts=-1)
    with pytest.raises(TypeError, match="auto_touch is 'no'"):
        await consumer.run(Works(), auto_touch="no")  # type: ignore[call-overload]  # this is the mistake
    await consumer.aclose()


def plain(one: Message, *_: Exception) -> None:
    raise AssertionError("it was called")


def generator(one: Message, *_: Exception) -> Any:
    yield one


async def async_generator(one: Message, *_: Exception) -> Any:
    yield one


class GeneratorObject:
    def __call__(self, one: Message, *_: Exception) -> Any:
        yield one


@pytest.mark.parametrize(
    "wrong",
    [plain, partial(plain), generator, async_generator, partial(generator), GeneratorObject(), None, b"x"],
)
@bounded
async def test_function_of_the_wrong_kind_is_refused_at_once(wrong: Any) -> None:
    consumer = Consumer("topic", "channel")
    with pytest.raises(TypeError, match=r"^handler must be"):
        await consumer.run(wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match=r"^given_up must be"):
            await consumer.run(handle, max_attempts=3, given_up=wrong)
    await consumer.aclose()


@bounded
async def test_handler_that_returns_what_has_not_run_does_not_finish_its_message(broker: FakeBroker) -> None:
    """It forgot an `await`."""

    async def forgetful(one: Message) -> object:
        return handle(one)

    async with opened(broker, returned=(1,)) as (consumer, peer):
        await peer.send(message(1))
        with pytest.raises(TypeError, match="of which nothing has run"):
            await consumer.run(forgetful)


@pytest.mark.parametrize("what", [SystemExit(3), KeyboardInterrupt(), "handler", "given_up"], ids=repr)
@bounded
async def test_message_that_ends_run_is_handled_once(broker: FakeBroker, what: object) -> None:
    """Idle workers do not get it."""
    calls: list[bytes] = []

    async def handler(one: Message) -> None:
        calls.append(one.body)
        raise what if isinstance(what, BaseException) else ValueError

    def wrong(one: Message, *_: Exception) -> Any:
        calls.append(one.body)

    options: dict[str, Any] = {"concurrency": 4}
    if what == "given_up":
        options |= {"max_attempts": 1, "given_up": lambda *args: wrong(*args)}
    for numbers in ((1,),):
        calls.clear()
        async with opened(broker, returned=numbers) as (consumer, peer), trio.open_nursery() as nursery:
            expected = type(what) if isinstance(what, BaseException) else TypeError

            async def send_to_idle(peer: Peer = peer, numbers: tuple[int, ...] = numbers) -> None:
                await trio.testing.wait_all_tasks_blocked()
                await peer.send(*map(message, numbers))

            nursery.start_soon(send_to_idle)
            with pytest.raises(expected):
                await consumer.run((lambda one: wrong(one)) if what == "handler" else handler, **options)
        assert calls == [b"body 1"] * (2 if what == "given_up" else 1)


@pytest.mark.parametrize("auto_touch", [False, True])
@bounded
async def test_handler_that_is_not_async_is_an_error(broker: FakeBroker, auto_touch: bool) -> None:
    """Requeueing would repeat its effects."""
    calls: list[bytes] = []
    async with opened(broker, returned=(1,)) as (consumer, peer):
        await peer.send(message(1))
        with pytest.raises(TypeError, match=r"must be an async function; .* returned None"):
            await consumer.run(
                lambda each: calls.append(each.body),  # type: ignore[arg-type,return-value]
                auto_touch=auto_touch,
            )
        assert calls == [b"body 1"]
        assert consumer.stats() == ConsumerStats(received=1, finished=0, requeued=0, connections=1)
