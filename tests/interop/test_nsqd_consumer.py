"""Test our consumer with the real nsqd and nsqlookupd: discovery, failing messages, handlers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from interop.our_client import PATIENCE_S, consumer_of, nsqd_with_channel
from interop.peers import Broker, nsqd, nsqlookupd
from trio_nsq.client import Consumer, Message

pytestmark = [pytest.mark.interop, pytest.mark.slow]


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. It makes blocking requests."""
    while not await trio.to_thread.run_sync(condition):
        await trio.sleep(0.01)


def channel_of(broker: Broker) -> dict[str, Any]:
    return broker.channel_stats("topic", "channel")


def ready_count(broker: Broker) -> int:
    (client,) = channel_of(broker)["clients"]
    return int(client["ready_count"])


async def test_consumer_discovers_brokers_and_receives_from_each(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    async def receive(consumer: Consumer) -> None:
        async for message in consumer:
            bodies.append(message.body)
            message.finish()

    with nsqlookupd() as lookupd, trio.fail_after(PATIENCE_S):
        flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with nsqd(tmp_path / "one", flag) as one, nsqd(tmp_path / "two", flag) as two:
            for broker in (one, two):
                broker.create("topic", "channel")
                broker.post("/mpub", b"\n".join(b"%d" % number for number in range(50)), topic="topic")
            async with (
                trio.open_nursery() as nursery,
                Consumer(
                    "topic",
                    "channel",
                    lookupd_http_addresses=[lookupd.http_address],
                    lookupd_poll_interval_s=0.1,
                    low_rdy_idle_timeout_s=0.05,
                    rdy_redistribute_interval_s=0.01,
                    output_buffer_timeout_s=0.025,
                    max_in_flight=1,
                ) as consumer,
            ):
                nursery.start_soon(receive, consumer)
                await until(lambda: consumer.stats().connections == 2 and len(bodies) == 100)
                assert sorted(bodies) == sorted(2 * [b"%d" % number for number in range(50)])
                one.process.terminate()
                await until(lambda: len(producers(lookupd)) == 1)
                await until(lambda: consumer.stats().connections == 1)
                two.post("/pub", b"last", topic="topic")
                await until(lambda: b"last" in bodies)
                nursery.cancel_scope.cancel()


def producers(lookupd: Broker) -> list[Any]:
    found: list[Any] = json.loads(lookupd.http("GET", "/lookup", topic="topic"))["producers"]
    return found


async def test_failed_message_is_retried_after_a_backoff_pause(tmp_path: Path) -> None:
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempts)
        if message.attempts == 1:
            raise ValueError("not the first time")

    with nsqd_with_channel(tmp_path) as broker, trio.fail_after(PATIENCE_S):
        broker.post("/pub", b"x", topic="topic")
        options: dict[str, Any] = {
            "max_in_flight": 7,
            "backoff_after": 1,
            "backoff_multiplier_s": 0.25,
            "default_requeue_delay_s": 0.001,
        }
        async with trio.open_nursery() as nursery, consumer_of(broker, **options) as consumer:
            nursery.start_soon(consumer.run, handler)
            await until(lambda: bool(attempts) and ready_count(broker) == 0)  # during the backoff pause
            assert attempts == [1]
            await until(lambda: ready_count(broker) == 7)
            assert attempts == [1, 2]
            nursery.cancel_scope.cancel()
        stats = channel_of(broker)
        assert (stats["depth"], stats["in_flight_count"], stats["requeue_count"]) == (0, 0, 1)


async def test_slow_message_is_touched_and_failing_message_is_passed_to_the_callback(tmp_path: Path) -> None:
    handled: list[tuple[bytes, int]] = []
    buried: list[bytes] = []

    async def handler(message: Message) -> None:
        handled.append((message.body, message.attempts))
        if message.body == b"bad":
            raise ValueError
        await trio.sleep(1.5 * message.timeout_s)

    async def bury(message: Message, _: Exception) -> None:
        buried.append(message.body)

    with nsqd_with_channel(tmp_path) as broker, trio.fail_after(PATIENCE_S):
        broker.post("/mpub", b"long\nbad", topic="topic")
        options: dict[str, Any] = {
            "max_backoff_duration_s": 0,
            "default_requeue_delay_s": 0,
            "msg_timeout_s": 1,
        }
        async with trio.open_nursery() as nursery, consumer_of(broker, **options) as consumer:

            async def run() -> None:
                await consumer.run(handler, concurrency=2, max_attempts=3, given_up=bury, auto_touch=True)

            nursery.start_soon(run)
            await until(lambda: consumer.stats().finished == 2)
            nursery.cancel_scope.cancel()
        stats = channel_of(broker)
        assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (0, 0, 0)
    assert sorted(handled) == [(b"bad", 1), (b"bad", 2), (b"bad", 3), (b"long", 1)]
    assert buried == [b"bad"]
