"""Many consumers on one broker, and one consumer on many brokers: their cost while idle.

Hundreds, for a moment, by default; a thousand, and fifty, for three minutes with `FAULT_COMPLETE=1`.
"""

import gc
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from faults.conversations import COMPLETE, Footprint
from interop.peers import Broker, nsqd, qcli_serve
from trio_nsq.client import Consumer, Producer

pytestmark = pytest.mark.slow

CONSUMERS = 1000 if COMPLETE else 200
BROKERS = 50 if COMPLETE else 20
HOLD_S = 180.0 if COMPLETE else 0.5
PATIENCE_S = 60.0
MOST_TASKS = 6
"""The tasks of one consumer with one broker: connecting, sharing the ready count, reading, writing and
querying.
"""
MOST_TASKS_FOR_A_BROKER = 3
MOST_CPU_SHARE = 0.1


@asynccontextmanager
async def hardly_any_work() -> AsyncIterator[None]:
    """Fail if the block uses much CPU time of this process."""
    began_at, before_s = time.monotonic(), time.process_time()
    yield
    share = (time.process_time() - before_s) / (time.monotonic() - began_at)
    print(f"{100 * share:.1f} % of a processor")
    assert share < MOST_CPU_SHARE


@pytest.fixture
def _many_files() -> None:
    """Raise the limit of open files to the maximum; a started broker inherits it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@pytest.mark.usefixtures("_many_files")
async def test_many_consumers_of_one_broker(tmp_path: Path) -> None:
    came = Counter[bytes]()
    all_came = trio.Event()
    bodies = [b"message %d" % number for number in range(5 * CONSUMERS)]

    with qcli_serve(tmp_path / "d") as broker:

        async def consume(*, task_status: trio.TaskStatus[None]) -> None:
            # On a busy machine many of them connect slowly and at the same time.
            consumer = Consumer(
                "topic",
                "channel",
                nsqd_tcp_addresses=[broker.tcp_address],
                dial_timeout_s=PATIENCE_S,
                close_timeout_s=0,
            )
            async with consumer:
                task_status.started()
                async for message in consumer:
                    came[message.body] += 1
                    message.finish()
                    if len(came) == len(bodies):
                        all_came.set()

        async with Producer(broker.tcp_address) as producer, trio.open_nursery() as nursery:
            gc.collect()  # what earlier tests have left open must not be closed meanwhile
            before = Footprint.now()
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as starting:
                    for _ in range(CONSUMERS):
                        starting.start_soon(nursery.start, consume)
            after = Footprint.now()
            tasks = (after.tasks - before.tasks) / CONSUMERS - 1  # the one that iterates
            print(f"{CONSUMERS} consumers, each with {tasks:g} tasks")
            # What earlier tests have left open may be closed meanwhile.
            assert after.fds - before.fds <= CONSUMERS
            assert tasks <= MOST_TASKS
            async with hardly_any_work():
                await trio.sleep(HOLD_S)
            now = Footprint.now()
            assert (now.fds <= after.fds, now.tasks) == (True, after.tasks)
            with trio.fail_after(PATIENCE_S):
                await producer.publish_many("topic", bodies)
                await all_came.wait()
            assert came == Counter(bodies)
            nursery.cancel_scope.cancel()
        assert Footprint.now().tasks <= before.tasks


@pytest.mark.interop
async def test_one_consumer_of_many_brokers(tmp_path: Path) -> None:
    """It may have fewer messages in flight than there are brokers, so they take turns."""
    with ExitStack() as stack:
        brokers = [stack.enter_context(nsqd(tmp_path / str(number))) for number in range(BROKERS)]
        addresses = [broker.tcp_address for broker in brokers]
        before = Footprint.now()
        async with Consumer(
            "topic",
            "channel",
            nsqd_tcp_addresses=addresses,
            max_in_flight=BROKERS // 4,
            low_rdy_idle_timeout_s=0.2,
            rdy_redistribute_interval_s=0.1,
        ) as consumer:
            with trio.fail_after(PATIENCE_S):
                while consumer.stats().connections < BROKERS:
                    await trio.sleep(0.01)
            after = Footprint.now()
            print(f"{BROKERS} brokers: {after.tasks - before.tasks} tasks, {after.fds - before.fds} files")
            assert after.fds - before.fds == BROKERS
            assert after.tasks - before.tasks <= MOST_TASKS + MOST_TASKS_FOR_A_BROKER * BROKERS
            async with hardly_any_work():
                await trio.sleep(HOLD_S)
            assert Footprint.now() == after
            for broker in brokers:
                await trio.to_thread.run_sync(post_its_address, broker)
            came = set()
            with trio.fail_after(PATIENCE_S):
                async for message in consumer:
                    assert message.body.decode() == message.nsqd_address
                    came.add(message.nsqd_address)
                    message.finish()
                    if len(came) == BROKERS:
                        break


def post_its_address(broker: Broker) -> None:
    """Publish a broker's address to the broker."""
    broker.post("/pub", broker.tcp_address.encode(), topic="topic")
