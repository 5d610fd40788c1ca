"""Measure how fast clients leave a broker process that dies, stops, hangs or drains, as documented."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from interop.peers import Broker, nsqd, qcli_serve
from soak import in_soak
from trio_nsq.client import Consumer, Producer, PublishFailed

pytestmark = pytest.mark.slow

PROMISED_S = 1.0
PROMPT_S = 0.3
"""A slower publish was held up, except for the time that publishes to the other brokers take on a busy machine."""
HELD_UP_S = 3.0
"""The time limit of a publish."""
PATIENCE_S = 60


def kill(broker: Broker) -> None:
    broker.process.kill()


def stop(broker: Broker) -> None:
    broker.process.terminate()


def hang(broker: Broker) -> None:
    os.kill(broker.process.pid, signal.SIGSTOP)


def drain(broker: Broker) -> None:
    broker.put("/config/draining", b"true")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[list[Broker]]:
    """Two brokers of ours and an nsqd; the first one is lost."""
    with ExitStack() as stack:
        running = [stack.enter_context(qcli_serve(tmp_path / str(n), "--sync=interval")) for n in range(2)]
        running.append(stack.enter_context(nsqd(tmp_path / "nsqd")))
        yield running
        running[0].process.kill()


def addresses(brokers: list[Broker]) -> list[str]:
    return [broker.tcp_address for broker in brokers]


async def publish_to_others(producer: Producer, usual: list[float]) -> None:
    """Publish to the brokers that are not lost, and collect the times: a busy machine delays these, too."""
    while True:
        started_at = trio.current_time()
        await producer.publish("t", b"x")
        usual.append(trio.current_time() - started_at)
        await trio.sleep(0.01)


@pytest.mark.parametrize("lose", [kill, hang, drain, *in_soak(stop)])
async def test_new_publishes_are_not_held_up(brokers: list[Broker], lose: Callable[[Broker], None]) -> None:
    took: dict[float, float] = {}  # by the time of the start
    usual: list[float] = []
    failed: list[float] = []

    async def publish(producer: Producer) -> None:
        started_at = trio.current_time()
        try:
            with trio.move_on_after(HELD_UP_S):
                await producer.publish("t", b"x")
        except PublishFailed:
            failed.append(started_at)
        took[started_at] = trio.current_time() - started_at

    with trio.fail_after(PATIENCE_S):
        async with (
            Producer(addresses(brokers)) as producer,
            Producer(addresses(brokers[1:])) as others,
            trio.open_nursery() as nursery,
        ):
            for _ in range(20):
                await producer.publish("t", b"x")
            nursery.start_soon(publish_to_others, others, usual)
            async with trio.open_nursery() as publishing:
                lost_at = trio.current_time()
                lose(brokers[0])
                while trio.current_time() < lost_at + 2:
                    publishing.start_soon(publish, producer)
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    prompt_s = PROMPT_S + max(usual)
    held_up = failed + [started_at for started_at, took_s in took.items() if took_s > prompt_s]
    took_s = max([0.0, *(started_at - lost_at for started_at in held_up)])
    print(f"{lose.__name__}: publishes were held up for {took_s:.3f} s, {len(failed)} of them failed")
    assert took_s < PROMISED_S
    if lose is drain:
        assert not held_up


@pytest.mark.parametrize("lose", [hang, stop, *in_soak(kill, drain)])
async def test_tasks_that_wait_for_their_publishes_go_on(
    brokers: list[Broker], lose: Callable[[Broker], None]
) -> None:
    acknowledged_at: list[float] = []
    usual: list[float] = []

    async def publish(producer: Producer) -> None:
        while True:
            await producer.publish("t", b"x")
            acknowledged_at.append(trio.current_time())
            await trio.sleep(0.01)  # leave processor time for the brokers

    options: dict[str, Any] = {"retry": True, "publish_timeout_s": 0.7}
    with trio.fail_after(PATIENCE_S):
        async with (
            Producer(addresses(brokers), **options) as producer,
            Producer(addresses(brokers[1:])) as others,
            trio.open_nursery() as nursery,
        ):
            for _ in range(5):
                nursery.start_soon(publish, producer)
            nursery.start_soon(publish_to_others, others, usual)
            await trio.sleep(0.2)
            lost_at = trio.current_time()
            lose(brokers[0])
            await trio.sleep_until(lost_at + 2)
            nursery.cancel_scope.cancel()
    times = [lost_at, *(at for at in acknowledged_at if at > lost_at), lost_at + 2]
    gap_s = max(after - before for before, after in pairwise(times))
    print(f"{lose.__name__}: no acknowledgement for {gap_s:.3f} s")
    assert gap_s < PROMISED_S + max(usual)


@pytest.mark.parametrize(("lose", "limit_s"), [(kill, PROMISED_S), (hang, 3.5), *in_soak((stop, PROMISED_S))])
async def test_max_in_flight_of_a_lost_broker_goes_to_the_others(
    brokers: list[Broker], lose: Callable[[Broker], None], limit_s: float
) -> None:
    """A broker that hangs is lost after twice the interval of heartbeats."""

    def ready(broker: Broker) -> int:
        stats = json.loads(broker.http("GET", "/stats", format="json", topic="t", channel="c"))
        clients = [
            client for topic in stats["topics"] for each in topic["channels"] for client in each["clients"]
        ]
        return sum(client["ready_count"] for client in clients)

    async def shared(counts: list[int]) -> float:
        """Wait until these are the ready counts of the last brokers; return when the last question was asked that was
        answered otherwise.
        """
        asked = brokers[-len(counts) :]
        not_yet_at = asked_at = trio.current_time()
        while await trio.to_thread.run_sync(lambda: [ready(broker) for broker in asked]) != counts:
            not_yet_at = asked_at
            await trio.sleep(0.01)
            asked_at = trio.current_time()
        return not_yet_at

    for broker in brokers:
        broker.create("t", "c")
    options: dict[str, Any] = {"max_in_flight": 30, "heartbeat_interval_s": 1, "close_timeout_s": 0}
    with trio.fail_after(PATIENCE_S):
        async with Consumer("t", "c", nsqd_tcp_addresses=addresses(brokers), **options) as consumer:
            await shared([10, 10, 10])
            lost_at = trio.current_time()
            lose(brokers[0])
            took_s = await shared([15, 15]) - lost_at
            print(f"{lose.__name__}: the others have its share after {took_s:.3f} s")
            assert took_s < limit_s
            brokers[1].post("/pub", b"go on", topic="t")
            assert (await anext(consumer)).body == b"go on"
