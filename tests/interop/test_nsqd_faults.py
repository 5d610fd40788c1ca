"""Test our client with a real nsqd that is stopped, killed or disconnected."""

import json
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from interop.our_client import PATIENCE_S, consumer_of, nsqd_with_channel
from interop.peers import Broker, nsqd
from trio_nsq.client import Consumer, Producer, PublishFailed

pytestmark = [pytest.mark.interop, pytest.mark.slow]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with nsqd_with_channel(tmp_path / "data") as running:
        yield running


class Restartable:
    """An nsqd that the test can restart on the same port and data folder."""

    def __init__(self, data_path: Path) -> None:
        self._data_path = data_path
        self._stack = ExitStack()
        self._flags: list[str] = []
        self.broker = self._start()

    def _start(self) -> Broker:
        broker = self._stack.enter_context(nsqd(self._data_path, *self._flags))
        self._flags = [f"--tcp-address={broker.tcp_address}"]
        return broker

    async def restart(self, how: signal.Signals) -> None:
        """Stop nsqd with this signal and start it again, while the test's other tasks continue."""
        self.broker.process.send_signal(how)
        await trio.to_thread.run_sync(self.broker.process.wait, 30)
        self.broker = await trio.to_thread.run_sync(self._start)

    def close(self) -> None:
        """Stop nsqd."""
        self._stack.close()


class Ledger:
    """Publishes and receives numbers, and records the acknowledged and the received ones."""

    def __init__(self, total: int) -> None:
        self.acknowledged: set[int] = set()
        self.received: set[int] = set()
        self.failures = 0
        self.complete = trio.Event()
        self._total = total
        self._numbers = iter(range(total))
        self._waited_for: list[tuple[int, trio.Event]] = []

    async def publish(self, producer: Producer) -> None:
        """Publish until all numbers are acknowledged. Publish a number again after a failure, as a program would."""
        for number in self._numbers:
            while True:
                try:
                    await producer.publish("topic", b"%d" % number)
                except PublishFailed:
                    self.failures += 1
                else:
                    break
            self.acknowledged.add(number)
            self._progress()

    async def receive(self, consumer: Consumer) -> None:
        """Receive until every number has arrived."""
        async for message in consumer:
            self.received.add(int(message.body))
            message.finish()
            if len(self.received) == self._total:
                self.complete.set()

    async def until_acknowledged(self, count: int) -> None:
        """Wait until `count` numbers are acknowledged."""
        event = trio.Event()
        self._waited_for.append((count, event))
        await event.wait()

    def _progress(self) -> None:
        for count, event in self._waited_for:
            if len(self.acknowledged) >= count:
                event.set()


async def test_clean_restart_loses_no_acknowledged_message(tmp_path: Path) -> None:
    ledger = Ledger(6000)
    peer = Restartable(tmp_path / "data")
    try:
        with trio.fail_after(PATIENCE_S):
            async with (
                Producer(peer.broker.tcp_address) as producer,
                consumer_of(
                    peer.broker, max_in_flight=50, reconnect_min_s=0.01, reconnect_max_s=0.1
                ) as consumer,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(ledger.receive, consumer)
                for _ in range(8):
                    nursery.start_soon(ledger.publish, producer)
                for count in (1500, 3000, 4500):
                    await ledger.until_acknowledged(count)
                    await peer.restart(signal.SIGTERM)
                await ledger.until_acknowledged(6000)
                await ledger.complete.wait()
                assert consumer.stats().connections == 1
                # A number that was published again, because its answer was lost, may arrive twice.
                while not peer.broker.is_drained("topic", "channel"):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        assert ledger.acknowledged <= ledger.received
        assert ledger.failures > 0
        stats = peer.broker.channel_stats("topic", "channel")
        assert (stats["in_flight_count"], stats["depth"]) == (0, 0)
    finally:
        peer.close()


async def test_producer_and_consumer_reconnect_after_a_kill(tmp_path: Path) -> None:
    peer = Restartable(tmp_path / "data")
    try:
        with trio.fail_after(PATIENCE_S):
            async with (
                Producer(peer.broker.tcp_address) as producer,
                consumer_of(peer.broker, reconnect_min_s=0.01, reconnect_max_s=0.1) as consumer,
            ):
                await producer.publish("topic", b"before")
                (await anext(consumer)).finish()
                await peer.restart(signal.SIGKILL)
                await producer.publish("topic", b"after")
                async for message in consumer:
                    message.finish()
                    if message.body == b"after":
                        break
    finally:
        peer.close()


class CuttingProxy:
    """A proxy for a broker. It cuts every connection after a random number of bytes, counted over both directions."""

    def __init__(self, upstream: str, random: Random, mean_bytes: int) -> None:
        self._upstream = upstream.rpartition(":")
        self._random = random
        self._mean_bytes = mean_bytes
        self.cuts = 0
        self.cutting = True

    async def serve(self, task_status: trio.TaskStatus[str]) -> None:
        """Serve on a free port; report the address as the start value."""
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_tcp, self._relay, 0, host="127.0.0.1")
            (listener,) = await nursery.start(serve)
            task_status.started(f"127.0.0.1:{listener.socket.getsockname()[1]}")

    async def _relay(self, client: trio.SocketStream) -> None:
        host, _, port = self._upstream
        broker = await trio.open_tcp_stream(host, int(port))
        budget = [int(self._random.expovariate(1 / self._mean_bytes))]
        async with broker, trio.open_nursery() as nursery:
            for source, target in ((client, broker), (broker, client)):
                nursery.start_soon(self._pump, source, target, budget, nursery.cancel_scope)

    async def _pump(
        self, source: trio.SocketStream, target: trio.SocketStream, budget: list[int], over: trio.CancelScope
    ) -> None:
        try:
            async for data in source:
                allowed = data[: budget[0]] if self.cutting else data
                budget[0] -= len(allowed)
                await target.send_all(allowed)
                if len(allowed) < len(data):
                    self.cuts += 1
                    over.cancel()
                    return
            await target.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            over.cancel()


def topic_message_count(broker: Broker) -> int:
    """Return the number of messages that nsqd has stored in the topic."""
    count: int = json.loads(broker.http("GET", "/stats", format="json", topic="topic"))["topics"][0][
        "message_count"
    ]
    return count


@pytest.mark.parametrize("seed", range(3))
async def test_random_disconnects_lose_nothing_and_maybe_stored_is_correct(broker: Broker, seed: int) -> None:
    total = 4000
    proxy = CuttingProxy(broker.tcp_address, Random(seed), mean_bytes=2000)
    numbers = iter(range(total))
    doubts: Counter[int] = Counter()  # failures with `maybe_stored` set
    copies: dict[int, set[bytes]] = defaultdict(set)
    arrived = trio.Event()

    async def publish(producer: Producer) -> None:
        for number in numbers:
            while True:
                try:
                    await producer.publish("topic", b"%d" % number)
                    break
                except PublishFailed as failure:
                    doubts[number] += failure.maybe_stored

    async def receive(consumer: Consumer) -> None:
        async for message in consumer:
            copies[int(message.body)].add(message.id)
            message.finish()
            arrived.set()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            address: str = await nursery.start(proxy.serve)
            proxy.cutting = False  # the first connections are not cut: entering would raise
            async with (
                Producer(address) as producer,
                Consumer(
                    "topic",
                    "channel",
                    nsqd_tcp_addresses=[address],
                    max_in_flight=20,
                    msg_timeout_s=1,
                    reconnect_min_s=0.001,
                    reconnect_max_s=0.01,
                ) as consumer,
            ):
                proxy.cutting = True
                nursery.start_soon(receive, consumer)
                async with trio.open_nursery() as publishers:
                    for _ in range(5):
                        publishers.start_soon(publish, producer)
                proxy.cutting = False
                # nsqd redelivers the messages in flight on a cut connection after a second.
                while sum(map(len, copies.values())) < topic_message_count(broker):
                    arrived = trio.Event()
                    await arrived.wait()
            nursery.cancel_scope.cancel()
    assert proxy.cuts > 30
    assert sorted(copies) == list(range(total))
    for number, ids in copies.items():
        assert len(ids) <= 1 + doubts[number]
    assert doubts.total() > 0
