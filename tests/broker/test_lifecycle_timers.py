"""Tests that due messages move at their time and in order, however many there are, with a clock that jumps to
the next deadline.

The topics are ephemeral, so no thread works for them; the clock would jump meanwhile.
"""

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.support import RawClient, connected, dpub, identify, mpub, running_broker, settle
from trio_nsq.broker import BoundAddresses

TOPIC = "t#ephemeral"
ROUNDING_S = 1e-6


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that stands still until `jumping`."""
    return trio.testing.MockClock()


class Consumer:
    """A client that records when each message arrived."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.came: list[tuple[float, bytes]] = []
        self.ids: list[bytes] = []

    async def receive(self, count: int) -> None:
        """Receive this many messages, and finish none."""
        for _ in range(count):
            message = await self.client.message()
            self.came.append((trio.current_time(), message.body))
            self.ids.append(message.id)


@asynccontextmanager
async def broker(tmp_path: Path, **options: Any) -> AsyncIterator[BoundAddresses]:
    """A broker without other work: checkpoints are far apart."""
    options = {"mem_queue_size": 100_000, "checkpoint_interval_ms": 10**9, **options}
    async with running_broker(tmp_path / "d", **options) as bound:
        yield bound


@asynccontextmanager
async def consumer(
    bound: BoundAddresses, channel: str = "c", *, ready_count: int = 2500, msg_timeout_ms: int = 900_000
) -> AsyncIterator[Consumer]:
    async with connected(bound.tcp_address) as client:
        settings = {"heartbeat_interval": 60_000, "msg_timeout": msg_timeout_ms, "output_buffer_size": -1}
        await client.send(identify(**settings))
        await client.ok()
        await client.subscribe(TOPIC, channel, ready_count=ready_count)
        yield Consumer(client)


def jumping(clock: trio.testing.MockClock) -> float:
    """Let time pass as fast as possible from now on; return the time."""
    clock.autojump_threshold = 0
    return trio.current_time()


async def test_deferred_publishes_arrive_by_due_time(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    delays_ms = random.Random(1).sample(range(1, 50_000), 500)
    async with broker(tmp_path) as bound, consumer(bound) as one:
        began_s = trio.current_time()
        for delay_ms in delays_ms:
            await one.client.send(dpub(TOPIC, delay_ms, b"%d" % delay_ms))
            await one.client.ok()
        assert jumping(clock) == began_s
        await one.receive(500)
        assert [int(body) for _, body in one.came] == sorted(delays_ms)
        for at_s, body in one.came:
            assert abs(at_s - began_s - int(body) / 1000) < ROUNDING_S


async def test_requeued_messages_arrive_by_due_time(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    delays_ms = random.Random(2).sample(range(1, 50_000), 300)
    async with broker(tmp_path) as bound, consumer(bound) as one:
        await one.client.publish(TOPIC, *[b"%d" % delay_ms for delay_ms in delays_ms])
        await one.receive(300)
        began_s = trio.current_time()
        requeue = b"".join(b"REQ %s %d\n" % pair for pair in zip(one.ids, delays_ms, strict=True))
        await one.client.send(requeue)
        await settle()
        assert jumping(clock) == began_s
        await one.receive(300)
        again = one.came[300:]
        assert [int(body) for _, body in again] == sorted(delays_ms)
        for at_s, body in again:
            assert abs(at_s - began_s - int(body) / 1000) < ROUNDING_S


async def test_each_consumer_has_its_own_timeout(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    timeouts_ms = random.Random(3).sample(range(1000, 15_000), 50)
    async with AsyncExitStack() as stack:
        bound = await stack.enter_async_context(broker(tmp_path))
        consumers = []
        for number, timeout_ms in enumerate(timeouts_ms):
            one = consumer(bound, f"c{number}", ready_count=5, msg_timeout_ms=timeout_ms)
            consumers.append(await stack.enter_async_context(one))
        publisher = await stack.enter_async_context(connected(bound.tcp_address))
        await publisher.publish(TOPIC, *[b"%d" % n for n in range(5)])
        for each in consumers:
            await each.receive(5)
        began_s = trio.current_time()
        touched = consumers[0]
        for message_id in touched.ids[3:]:  # they time out with the others, because no time has passed
            await touched.client.send(b"TOUCH " + message_id + b"\n")
        await settle()
        assert jumping(clock) == began_s
        async with trio.open_nursery() as nursery:
            for each in consumers:
                nursery.start_soon(each.receive, 5)
        for timeout_ms, each in zip(timeouts_ms, consumers, strict=True):
            assert sorted(body for _, body in each.came[5:]) == [b"%d" % n for n in range(5)]
            for at_s, _ in each.came[5:]:
                assert abs(at_s - began_s - timeout_ms / 1000) < ROUNDING_S


async def test_touched_messages_time_out_later_than_others(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with broker(tmp_path) as bound, consumer(bound, ready_count=3, msg_timeout_ms=10_000) as one:
        await one.client.publish(TOPIC, b"never", b"at 3", b"at 7")
        await one.receive(3)
        began_s = trio.current_time()
        for at_s, message_id in ((3, one.ids[1]), (7, one.ids[2])):
            await settle()
            clock.jump(began_s + at_s - trio.current_time())
            await one.client.send(b"TOUCH " + message_id + b"\n")
        await settle()
        jumping(clock)
        await one.receive(3)
        assert [body for _, body in one.came[3:]] == [b"never", b"at 3", b"at 7"]
        late_s = [at_s - began_s - due_s for (at_s, _), due_s in zip(one.came[3:], (10, 13, 17), strict=True)]
        assert all(abs(each) < ROUNDING_S for each in late_s)


async def test_thousands_of_messages_due_at_once(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    """In many channels, and many in each: all are delivered at that time, although they are processed in
    steps.
    """
    async with AsyncExitStack() as stack:
        bound = await stack.enter_async_context(broker(tmp_path))
        consumers = [await stack.enter_async_context(consumer(bound, f"c{n}")) for n in range(300)]
        publisher = await stack.enter_async_context(connected(bound.tcp_address))
        for number in range(10):
            await publisher.send(dpub(TOPIC, 5000, b"%d" % number))
            await publisher.ok()
        due_s = jumping(clock) + 5
        async with trio.open_nursery() as nursery:
            for each in consumers:
                nursery.start_soon(each.receive, 10)
        for each in consumers:
            assert [body for _, body in each.came] == [b"%d" % n for n in range(10)]
            assert all(abs(at_s - due_s) < ROUNDING_S for at_s, _ in each.came)


async def test_thousands_of_messages_that_time_out_at_once(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with broker(tmp_path) as bound, consumer(bound, msg_timeout_ms=5000) as one:
        await one.client.send(mpub(TOPIC, *[b"%d" % n for n in range(2500)]))
        await one.client.ok()
        await one.receive(2500)
        due_s = jumping(clock) + 5
        await one.receive(2500)
        assert all(abs(at_s - due_s) < ROUNDING_S for at_s, _ in one.came[-2500:])
        assert sorted(int(body) for _, body in one.came[-2500:]) == list(range(2500))


async def test_delay_of_the_machine_moves_no_timer_of_a_clock_of_trio(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """Nor does a jump of that clock: only what both clocks missed is added to the timeouts."""
    async with broker(tmp_path) as bound, consumer(bound, msg_timeout_ms=5000) as one:
        await one.client.send(mpub(TOPIC, b"0", b"1"))
        await one.client.ok()
        await one.receive(2)
        due_s = trio.current_time() + 5
        time.sleep(0.6)
        await settle()
        clock.jump(4)
        await settle()
        jumping(clock)
        await one.receive(2)
        assert all(abs(at_s - due_s) < ROUNDING_S for at_s, _ in one.came[2:])
