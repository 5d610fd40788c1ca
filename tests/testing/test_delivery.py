"""Handlers without a broker get, and do, what they would with one."""

import logging
import threading
from typing import Any

import pytest
import trio

from client.support.loops import Loop, on_both, run
from trio_nsq import JSON, DeadLetter, DecodeFailed, Finish, Message, Retry, Topic
from trio_nsq.client import Answer
from trio_nsq.event_loop import runtime
from trio_nsq.testing import Delivery, deliver, deliver_sync


async def handle(message: Message) -> None:
    """A handler with every kind of end, as the body says."""
    match message.body.decode().split():
        case ["fail"]:
            raise ValueError("bad message")
        case ["fail", "until", attempts] if message.attempts < int(attempts):
            raise ValueError("not yet")
        case ["finish"]:
            message.finish()
        case ["requeue", delay_ms]:
            message.requeue(delay_s=int(delay_ms) / 1000)
        case ["touch"]:
            message.touch()
        case ["abandon"]:
            message.abandon()


@on_both
def test_outcomes(loop: Loop) -> None:
    async def main() -> None:
        bodies = b"ok", b"fail", b"finish", b"requeue 1500", b"touch", b"abandon"
        found = await deliver(handle, *bodies)
        assert [each.body for each in found] == list(bodies)
        outcomes = ["finished", "requeued", "finished", "requeued", "finished", "unanswered"]
        assert [each.outcome for each in found] == outcomes
        assert [each.delay_s for each in found] == [None, 90.0, None, 1.5, None, None]
        assert [each.touched for each in found] == [0, 0, 0, 0, 1, 0]
        assert [repr(each.errors) for each in found if each.errors] == ["[ValueError('bad message')]"]
        assert {each.attempts for each in found} == {1}
        assert await deliver(handle) == []

    run(loop, main)


@on_both
@pytest.mark.parametrize("concurrency", [1, 3])
def test_redelivery_and_dead_letters(loop: Loop, concurrency: int) -> None:
    async def main() -> None:
        options: dict[str, Any] = {
            "max_attempts": 3,
            "dead_letter_topic": "failed",
            "concurrency": concurrency,
        }
        good, late, bad = await deliver(handle, b"ok", b"fail until 3", b"fail", **options)
        assert good == Delivery(b"ok", "finished", 1)
        assert (late.outcome, late.attempts, len(late.errors), late.delay_s) == ("finished", 3, 2, 180.0)
        assert (bad.outcome, bad.attempts, len(bad.errors)) == ("dead-lettered", 3, 3)
        assert (late.dead_letter_topic, bad.dead_letter_topic) == (None, "failed")

    run(loop, main)


@on_both
def test_given_up_and_limits_of_deliveries(loop: Loop) -> None:
    async def main() -> None:
        given_up: list[bytes] = []

        async def keep(message: Message, error: Exception) -> None:
            given_up.append(message.body)

        [bad] = await deliver(handle, b"fail", max_attempts=2, given_up=keep)
        assert (bad.outcome, given_up) == ("finished", [b"fail"])
        [bad] = await deliver(handle, b"fail", max_attempts=5, deliveries=2)
        assert (bad.outcome, bad.attempts) == ("requeued", 2)
        [late] = await deliver(handle, b"fail until 7", attempts=7)
        assert late.outcome == "finished"

    run(loop, main)


@on_both
def test_answers_and_decoding(loop: Loop) -> None:
    numbers = Topic("numbers", JSON())
    answers: dict[int, Answer] = {1: Finish(), 2: Retry(2.5), 3: DeadLetter("third")}

    async def main() -> None:
        async def answer(message: Message, number: int) -> Answer | None:
            return answers.get(number)

        def on_failure(message: Message, error: Exception) -> DeadLetter:
            return DeadLetter("broken", str(error))

        bodies = b"1", b"2", b"3", b"4", b"{"
        found = await deliver(answer, *bodies, decode=numbers.decode, on_failure=on_failure)
        outcomes = ["finished", "requeued", "dead-lettered", "finished", "dead-lettered"]
        assert [each.outcome for each in found] == outcomes
        assert [each.dead_letter_topic for each in found] == [None, None, "third", None, "broken"]
        assert found[1].delay_s == 2.5
        assert [type(error) for each in found for error in each.errors] == [DecodeFailed]
        with pytest.raises(TypeError, match="decode"):
            await deliver(answer, b"1", decode="json")

    run(loop, main)


@on_both
def test_auto_touch(loop: Loop) -> None:
    async def main() -> None:
        async def wait(message: Message) -> None:
            assert message.timeout_s == 0.2
            for _ in range(25):  # so that a machine that stands still for a while does not end it first
                await runtime.sleep(0.01)

        [slow] = await deliver(wait, b"x", msg_timeout_s=0.2, auto_touch=True)
        assert slow.touched >= 1

    run(loop, main)


@on_both
def test_what_run_refuses(loop: Loop) -> None:
    async def main() -> None:
        def plain(message: Message) -> None:
            pass

        with pytest.raises(TypeError, match="handler must be an async function"):
            await deliver(plain, b"x")  # type: ignore[arg-type]  # what is refused
        with pytest.raises(TypeError, match="handler must be an async function"):
            await deliver(lambda _: None, b"x")  # type: ignore[arg-type, return-value]  # what is refused
        with pytest.raises(ValueError, match="dead_letter_topic is the topic itself"):
            await deliver(handle, b"x", max_attempts=1, dead_letter_topic="topic")
        with pytest.raises(TypeError, match="a message must be bytes"):
            await deliver(handle, "text")  # type: ignore[arg-type]  # what is refused

        async def leave(message: Message) -> None:
            raise SystemExit(3)

        with pytest.raises(SystemExit):
            await deliver(leave, b"x")

    run(loop, main)


def test_failures_are_logged_as_by_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "trio_nsq.client"):
        trio.run(deliver, handle, b"fail")
    assert "topic/channel: <Message 0000000000000000 from test:4150> failed, attempt 1" in caplog.text


def test_handler_without_async_code() -> None:
    threads: set[int] = set()
    letters: list[bytes] = []

    def plain(message: Message) -> None:
        threads.add(threading.get_ident())
        if message.body == b"bad":
            raise ValueError("bad message")

    def keep(message: Message, error: Exception) -> None:
        letters.append(message.body)

    good, bad = deliver_sync(plain, b"good", b"bad")
    assert (good.outcome, bad.outcome) == ("finished", "requeued")
    [bad] = deliver_sync(plain, b"bad", max_attempts=2, given_up=keep)
    assert (bad.outcome, bad.attempts, letters) == ("finished", 2, [b"bad"])
    [bad] = deliver_sync(plain, b"bad", max_attempts=2, dead_letter_topic="failed")
    assert bad.outcome == "dead-lettered"
    assert threads == {threading.get_ident()}
    with pytest.raises(TypeError, match="handler must be a plain function"):
        deliver_sync(handle, b"x")
