"""Check what handlers of `Consumer.run` answer, `on_failure`, `decode` and `stop_on`, on both loops and in threads."""

import json
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import anyio
import pytest

import trio_nsq.sync
from client.support.fake_broker import PATIENCE_S
from client.support.loops import Loop, on_both, run
from interop.peers import Broker, qcli_serve
from trio_nsq import (
    Answer,
    Consumer,
    DeadLetter,
    DecodeFailed,
    Finish,
    Handler,
    Message,
    Retry,
)
from trio_nsq.testing import Delivery, deliver, deliver_sync

_topics = map("topic{}".format, count())


def delivered(loop: str, answer: object, body: bytes = b"x", **options: Any) -> Delivery:
    """Deliver a message to a handler that returns an answer or raises it; return what became of it."""
    found: list[Delivery] = []

    def handle(_: object, *value: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def handle_async(message: Message, *value: object) -> object:
        await anyio.sleep(0)
        return handle(message)

    async def main() -> None:
        found.extend(await deliver(handle_async, body, **options))

    if loop == "threads":
        return deliver_sync(handle, body, **options)[0]
    run("trio" if loop == "trio" else "asyncio", main)
    return found[0]


def handled_attempts(loop: str, answers: list[object], **options: Any) -> tuple[list[int], Delivery]:
    """Deliver a message to a handler that gives these answers in turn; return the attempts it has seen."""
    attempts: list[int] = []

    def handle(message: Any) -> object:
        attempts.append(message.attempts)
        answer = answers[len(attempts) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def handle_async(message: Message) -> object:
        return handle(message)

    found: list[Delivery] = []

    async def main() -> None:
        found.extend(await deliver(handle_async, b"x", deliveries=len(answers), **options))

    if loop == "threads":
        found.extend(deliver_sync(handle, b"x", deliveries=len(answers), **options))
    else:
        run("trio" if loop == "trio" else "asyncio", main)
    return attempts, found[0]


on_all = pytest.mark.parametrize("loop", ["trio", "asyncio", "threads"])


@on_all
def test_retry_that_counts_as_no_attempt(loop: str) -> None:
    later = Retry(0, count_attempt=False)
    attempts, _ = handled_attempts(loop, [later, Retry(0), later, later, None])
    assert attempts == [1, 1, 2, 2, 2]


@on_all
def test_failure_that_counts_as_no_attempt(loop: str) -> None:
    def on_failure(_: object, failure: Exception) -> Answer | None:
        return Retry(0, count_attempt=False) if isinstance(failure, OSError) else None

    failures: list[object] = [OSError(), OSError(), KeyError(), OSError(), None]
    attempts, found = handled_attempts(loop, failures, max_attempts=2, on_failure=on_failure)
    assert attempts == [1, 1, 1, 2, 2]
    assert found.outcome == "finished"
    failures = [OSError(), KeyError(), OSError(), KeyError(), None]
    attempts, found = handled_attempts(loop, failures, max_attempts=2, on_failure=on_failure)
    assert attempts == [1, 1, 2, 2]  # given up after two failures that count


@on_all
@pytest.mark.parametrize(
    ("answer", "outcome", "delay_s"),
    [
        (None, "finished", None),
        (Finish(), "finished", None),
        ("anything else", "finished", None),
        (Retry(), "requeued", 90),
        (Retry(0), "requeued", 0),
        (Retry(2.5), "requeued", 2.5),
        (Retry(float("inf")), "requeued", (2**63 - 1) / 1000),
        (DeadLetter("dead"), "dead-lettered", None),
    ],
)
def test_answers(loop: str, answer: object, outcome: str, delay_s: float | None) -> None:
    found = delivered(loop, answer)
    assert (found.outcome, found.delay_s) == (outcome, delay_s)
    assert found.dead_letter_topic == ("dead" if outcome == "dead-lettered" else None)
    failed = (
        delivered(loop, KeyError("x"), on_failure=lambda *_: answer) if answer != "anything else" else None
    )
    if failed is not None and answer is not None:  # the same decides about a failure
        assert (failed.outcome, failed.delay_s) == (outcome, delay_s)


async def _decode_async(body: bytes) -> bytes:
    return body


@on_all
def test_a_class_is_no_answer(loop: str) -> None:
    with pytest.raises(TypeError, match=r"returned the class Retry, not Retry\(...\)"):
        delivered(loop, Retry)
    with pytest.raises(TypeError, match=r"on_failure .+ returned the class Finish"):
        delivered(loop, KeyError(), on_failure=lambda *_: Finish)
    with pytest.raises(TypeError, match="on_failure must return Finish, Retry, DeadLetter or None, not 5"):
        delivered(loop, KeyError(), on_failure=lambda *_: 5)
    with pytest.raises(TypeError, match=r"on_failure (must be a function, not|is) 5"):
        delivered(loop, None, on_failure=5)
    with pytest.raises(TypeError, match="decode"):
        delivered(loop, None, decode=5)
    with pytest.raises(TypeError, match="decode must be a plain function"):
        delivered(loop, None, decode=_decode_async)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Retry(-1), ValueError),
        (lambda: Retry("1"), TypeError),  # type: ignore[arg-type]  # this is refused
        (lambda: Retry(float("nan")), ValueError),
        (lambda: Retry(backoff=1), TypeError),  # type: ignore[arg-type]  # this is refused
        (lambda: DeadLetter("a b"), ValueError),
        (lambda: DeadLetter("a", 5), TypeError),  # type: ignore[arg-type]  # this is refused
    ],
)
def test_invalid_answers(make: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@on_both
def test_on_failure_may_be_async_and_sees_the_error(loop: Loop) -> None:
    seen: list[tuple[bytes, Exception]] = []
    error = KeyError("x")

    async def decide(message: Message, failure: Exception) -> Answer:
        await anyio.sleep(0)
        seen.append((message.body, failure))
        return DeadLetter("dead", "it is bad")

    assert delivered(loop, error, on_failure=decide).outcome == "dead-lettered"
    assert seen == [(b"x", error)]


@on_all
def test_on_failure_that_raises_leaves_the_message_to_a_retry(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    def decide(*_: object) -> Answer:
        raise ZeroDivisionError

    assert delivered(loop, KeyError("first"), on_failure=decide).outcome == "requeued"
    assert "on_failure failed for <Message" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@on_all
def test_attempts_are_limited_although_on_failure_retries(loop: str) -> None:
    limited: dict[str, Any] = {"max_attempts": 3, "dead_letter_topic": "dead", "deliveries": 9}
    found = delivered(loop, KeyError(), on_failure=lambda *_: Retry(1), **limited)
    assert (found.attempts, found.outcome, found.delay_s) == (3, "dead-lettered", 1)
    found = delivered(loop, KeyError(), on_failure=lambda *_: Finish(), **limited)
    assert (found.attempts, found.outcome) == (1, "finished")
    found = delivered(loop, Retry(1), **limited)  # it has not failed
    assert (found.attempts, found.outcome) == (9, "requeued")


@on_all
def test_dead_letters_of_the_topic_itself_are_refused(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    assert delivered(loop, DeadLetter("topic", "bad")).outcome == "requeued"
    assert "could not be published to topic: bad" in caplog.text


@on_all
def test_reasons_of_dead_letters_are_logged(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    delivered(loop, DeadLetter("dead", "no such user"))
    (record,) = [each for each in caplog.records if each.name == "trio_nsq.client"]
    assert record.levelno == logging.WARNING
    assert record.message.startswith("topic/channel: <Message ")
    assert record.message.endswith(" is published to dead: no such user")


# ------------------------------------------------------------------ decode


@on_all
def test_decode(loop: str) -> None:
    seen: list[tuple[bytes, object]] = []

    def handle(message: Any, value: object) -> None:
        seen.append((message.body, value))

    async def handle_async(message: Message, value: object) -> None:
        handle(message, value)

    async def main() -> None:
        await deliver(handle_async, b'{"a": 1}', b"[]", decode=json.loads)

    if loop == "threads":
        deliver_sync(handle, b'{"a": 1}', b"[]", decode=json.loads)
    else:
        run("trio" if loop == "trio" else "asyncio", main)
    assert seen == [(b'{"a": 1}', {"a": 1}), (b"[]", [])]


@on_all
def test_a_body_that_cannot_be_decoded_has_failed(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Exception] = []

    def decide(_: object, error: Exception) -> Answer:
        seen.append(error)
        return DeadLetter("bad", str(error))

    found = delivered(loop, None, b"{", decode=json.loads)
    assert (found.outcome, found.delay_s) == ("requeued", 90)
    found = delivered(loop, None, b"{", decode=json.loads, on_failure=decide)
    assert (found.outcome, found.dead_letter_topic) == ("dead-lettered", "bad")
    (error,) = seen
    assert isinstance(error, DecodeFailed)
    assert isinstance(error.__cause__, json.JSONDecodeError)
    assert error.topic == "topic"
    assert "a message of topic 'topic' cannot be decoded: JSONDecodeError" in caplog.text


# ------------------------------------------------------------------ with a broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker for all tests; each uses a topic of its own."""
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as broker:
        yield broker


@pytest.fixture
def topic(broker: Broker) -> str:
    """A new topic with the channel `c` and the messages 0 to 9, and the topic of its dead letters."""
    broker.create(name := next(_topics), "c")
    broker.create(f"{name}.dead", "look")
    broker.post("/mpub", b"\n".join(b"%d" % number for number in range(10)), topic=name)
    return name


def options(broker: Broker) -> dict[str, Any]:
    # With a short timeout, a failed close would look like a clean one.
    return {
        "nsqd_tcp_addresses": broker.tcp_address,
        "max_in_flight": 5,
        "max_backoff_duration_s": 0,
        "close_timeout_s": 2 * PATIENCE_S,
    }


def run_consumer(
    loop: str, broker: Broker, topic: str, handle: Callable[[Any, Any], object], **more: Any
) -> None:
    """Run a consumer with a handler that gets the consumer and each message, until it is closed."""
    if loop == "threads":
        with trio_nsq.sync.Consumer(topic, "c", **options(broker)) as threaded:
            threaded.run(lambda message: handle(threaded, message), **more)
        return

    async def main() -> None:
        async with Consumer(topic, "c", **options(broker)) as consumer:

            async def handle_async(message: Message) -> object:
                return handle(consumer, message)

            await consumer.run(handle_async, **more)

    run("trio" if loop == "trio" else "asyncio", main)


@pytest.mark.slow
@on_all
def test_dead_letters_and_retries_with_a_broker(loop: str, broker: Broker, topic: str) -> None:
    seen: list[tuple[bytes, int]] = []

    def handle(consumer: Any, message: Any) -> object:
        seen.append((message.body, message.attempts))
        if len(seen) == 12:
            consumer.close_soon()
        if message.body == b"3":
            return DeadLetter(f"{topic}.dead", "three")
        if message.body in (b"5", b"6") and message.attempts == 1:
            return Retry(0)
        return None

    run_consumer(loop, broker, topic, handle)
    assert sorted(seen) == sorted([(b"%d" % number, 1) for number in range(10)] + [(b"5", 2), (b"6", 2)])
    about = broker.channel_stats(topic, "c")
    assert (about["depth"], about["in_flight_count"], about["requeue_count"]) == (0, 0, 2)
    assert broker.channel_stats(f"{topic}.dead", "look")["depth"] == 1


# ------------------------------------------------------------------ stop_on


@pytest.mark.slow
@on_all
def test_signals_stop_all_consumers(loop: str, broker: Broker, topic: str) -> None:
    own: list[int] = []
    previous = signal.signal(signal.SIGUSR2, lambda number, _: own.append(number))
    usr2 = signal.getsignal(signal.SIGUSR2)
    handled: list[bytes] = []

    def handle(_: object, message: Any) -> None:
        handled.append(message.body)
        if len(handled) == 1:
            os.kill(os.getpid(), signal.SIGUSR2)

    try:
        if loop == "threads":
            run_consumer(loop, broker, topic, handle, stop_on=[signal.SIGUSR2])
        else:

            async def wait(message: Message) -> None:
                await anyio.sleep_forever()

            async def main() -> None:
                async with (
                    Consumer(topic, "c", **options(broker)) as first,
                    Consumer(f"{topic}.dead", "look", **options(broker)) as second,
                    anyio.create_task_group() as tasks,
                ):

                    async def handle_async(message: Message) -> None:
                        handle(first, message)

                    stop_on = signal.SIGUSR2, signal.SIGUSR2
                    tasks.start_soon(lambda: second.run(wait, stop_on=stop_on))
                    await first.run(handle_async, stop_on=stop_on)

            run("trio" if loop == "trio" else "asyncio", main)
        assert handled
        assert own == []
        assert signal.getsignal(signal.SIGUSR2) is usr2
        signal.raise_signal(signal.SIGUSR2)
        assert own == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert broker.channel_stats(topic, "c")["in_flight_count"] == 0


@pytest.mark.slow
@on_both
def test_a_second_signal_has_its_own_effect(loop: Loop, broker: Broker, topic: str) -> None:
    own: list[int] = []
    previous = signal.signal(signal.SIGUSR2, lambda number, _: own.append(number))

    async def main() -> None:
        async with Consumer(topic, "c", **options(broker)) as consumer:

            async def handle(message: Message) -> None:
                if not own:
                    signal.raise_signal(signal.SIGUSR2)
                    signal.raise_signal(signal.SIGUSR2)

            await consumer.run(handle, stop_on=[signal.SIGUSR2])

    try:
        run(loop, main)
        assert own == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, previous)


@pytest.mark.slow
def test_signals_that_cannot_be_handled(broker: Broker, topic: str) -> None:
    with trio_nsq.sync.Consumer(topic, "c", **options(broker)) as consumer:
        usr2 = signal.getsignal(signal.SIGUSR2)
        with pytest.raises(ValueError, match="stop_on: signal 9 cannot be handled"):
            consumer.run(lambda _: None, stop_on=[signal.SIGUSR2, signal.SIGKILL])
        assert signal.getsignal(signal.SIGUSR2) == usr2
        errors: list[Exception] = []

        def run_in_thread() -> None:
            try:
                consumer.run(lambda _: None, stop_on=[signal.SIGTERM])
            except ValueError as error:
                errors.append(error)

        thread = threading.Thread(target=run_in_thread)
        thread.start()
        thread.join()
        assert "main thread" in str(errors[0])


@pytest.mark.slow
@on_all
def test_requeues_that_count_as_no_attempt(loop: str, broker: Broker, topic: str) -> None:
    attempts: dict[bytes, list[int]] = {}

    def handle(consumer: Any, message: Any) -> Answer | None:
        seen = attempts.setdefault(message.body, [])
        seen.append(message.attempts)
        if sum(map(len, attempts.values())) == 40:
            consumer.close_soon()
        return Retry(0, backoff=False, count_attempt=len(seen) == 2) if len(seen) < 4 else None

    run_consumer(loop, broker, topic, handle)
    assert attempts == {b"%d" % number: [1, 1, 2, 2] for number in range(10)}


# ------------------------------------------------------------------ types


async def check_types(
    consumer: Consumer, plain: Handler, of_value: Callable[[Message, int], Awaitable[None]]
) -> None:
    """For mypy: the handler fits to `decode`."""
    await consumer.run(plain)
    await consumer.run(of_value, decode=int, stop_on=[signal.SIGTERM])
    await consumer.run(of_value, decode=repr)  # type: ignore[misc]  # a handler of another type
    await consumer.run(of_value)  # type: ignore[arg-type]  # a value that nothing decodes
