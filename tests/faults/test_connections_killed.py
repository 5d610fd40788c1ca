"""Brokers and their discovery service are killed (SIGKILL) and started again under one consumer and one producer.

One round of four kills by default; `FAULT_KILLS` kills with `FAULT_COMPLETE=1`.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import trio

from faults.conversations import COMPLETE, SEED, Footprint
from interop.peers import Broker, nsqd, nsqlookupd, qcli_lookupd, qcli_serve
from trio_nsq.client import Consumer, Producer, PublishFailed

ROUNDS = max(1, int(os.environ.get("FAULT_KILLS", "50")) // 4) if COMPLETE else 1
PATIENCE_S = 60.0
"""The time limit of a test for one kill."""
RECONNECT_MAX_S = 0.5
POLL_S = 0.25
"""The interval of queries to the discovery service."""
REGISTERED_WITHIN_S = {"ours": 5.0, "nsqd": 20.0}
"""The time until a restarted discovery service knows a broker again: nsqd pings it every 15 s."""
PUBLISHERS = 4
LEAK_S = 10.0
"""Resources that are open for longer after recovery count as leaked."""
MOST_IDLE_CPU_SHARE = 0.2


class Restartable:
    """A process that can be killed and restarted at its addresses.

    Args:
        start: Starts it with the given flags.
    """

    def __init__(self, start: Callable[..., AbstractContextManager[Broker]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self.broker = self._stack.enter_context(start())

    def kill(self) -> None:
        """Send SIGKILL."""
        self.broker.process.kill()
        self.broker.process.wait()

    async def restart(self) -> None:
        """Start it again, while other tasks run."""
        flags = [f"--tcp-address={self.broker.tcp_address}", f"--http-address={self.broker.http_address}"]
        self._stack.close()
        starting = self._start(*flags)
        self.broker = await trio.to_thread.run_sync(starting.__enter__)
        self._stack.push(starting)

    def close(self) -> None:
        """Stop it."""
        self._stack.close()


@contextmanager
def cluster(folder: Path, kind: str) -> Iterator[tuple[list[Restartable], Restartable]]:
    """Run two brokers and a discovery service: this project's or NSQ's."""
    start_broker = nsqd if kind == "nsqd" else qcli_serve
    with ExitStack() as stack:
        lookupd = Restartable(nsqlookupd if kind == "nsqd" else qcli_lookupd)
        stack.callback(lookupd.close)
        brokers = []
        for number in range(2):
            flag = f"--lookupd-tcp-address={lookupd.broker.tcp_address}"
            brokers.append(Restartable(partial(start_broker, folder / str(number), flag)))
            stack.callback(brokers[-1].close)
        yield brokers, lookupd


class Account:
    """The answers to producers and the messages of a consumer. Every publish attempt has a different body.

    Attributes:
        came: How often each message arrived.
    """

    def __init__(self) -> None:
        self.acknowledged: set[bytes] = set()
        self.not_stored: set[bytes] = set()
        self.maybe_stored: set[bytes] = set()
        self.came: Counter[bytes] = Counter()
        self._numbers = count()
        self._news = trio.Event()

    async def publish(self, producer: Producer) -> None:
        """Publish until cancelled."""
        while True:
            body = b"message %d" % next(self._numbers)
            self.maybe_stored.add(body)  # also if this is cancelled
            try:
                await producer.publish("topic", body)
            except PublishFailed as failure:
                if not failure.maybe_stored:
                    self.maybe_stored.remove(body)
                    self.not_stored.add(body)
            else:
                self.maybe_stored.remove(body)
                self.acknowledged.add(body)
            self._tell()
            await trio.sleep(0.002)

    async def receive(self, consumer: Consumer) -> None:
        """Finish all messages until cancelled."""
        async for batch in consumer.batches():
            self.came.update(batch.bodies)
            batch.finish()
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked after every publish and message."""
        while not condition():
            await self._news.wait()

    async def goes_on(self) -> None:
        """Wait until this many more messages were acknowledged and received."""
        acknowledged, came = len(self.acknowledged) + 50, len(self.came) + 50
        await self.until(lambda: len(self.acknowledged) >= acknowledged and len(self.came) >= came)


async def connected(consumer: Consumer, brokers: int) -> None:
    """Wait until the consumer has this many connections."""
    while consumer.stats().connections != brokers:
        await trio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", pytest.param("nsqd", marks=pytest.mark.interop)])
async def test_clients_survive_kills(tmp_path: Path, kind: str) -> None:
    chance = random.Random(SEED)
    account = Account()
    with cluster(tmp_path, kind) as (brokers, lookupd), trio.CancelScope() as patience:
        patience.deadline = trio.current_time() + PATIENCE_S
        addresses = [one.broker.tcp_address for one in brokers]
        async with (
            Producer(addresses, reconnect_max_s=RECONNECT_MAX_S) as producer,
            trio.open_nursery() as publishers,
        ):
            for _ in range(PUBLISHERS):
                publishers.start_soon(account.publish, producer)
            await account.until(lambda: len(account.acknowledged) > 50)
            async with (
                Consumer(
                    "topic",
                    "channel",
                    lookupd_http_addresses=[lookupd.broker.http_address],
                    max_in_flight=20,
                    lookupd_poll_interval_s=POLL_S,
                    lookupd_poll_timeout_s=1,
                    reconnect_max_s=RECONNECT_MAX_S,
                ) as consumer,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(account.receive, consumer)
                await connected(consumer, 2)
                await account.goes_on()
                footprint = Footprint.now()
                for _ in range(ROUNDS):
                    patience.deadline = trio.current_time() + PATIENCE_S
                    for victims in ([brokers[0]], [lookupd], [brokers[1], lookupd]):
                        for victim in chance.sample(victims, len(victims)):
                            victim.kill()
                        await account.goes_on()  # with the remaining processes
                        for victim in victims:
                            await victim.restart()
                        began_at = trio.current_time()
                        await connected(consumer, 2)
                        away_s = trio.current_time() - began_at
                        longest_s = RECONNECT_MAX_S + 2 * POLL_S + REGISTERED_WITHIN_S[kind]
                        assert away_s < longest_s, f"back after {away_s} s"
                        await account.goes_on()
                        await footprint.returns(LEAK_S)
                publishers.cancel_scope.cancel()
                if kind == "ours":  # nsqd's messages in memory are lost
                    await account.until(lambda: account.acknowledged <= account.came.keys())
                await idle_without_work()
                nursery.cancel_scope.cancel()
    assert not patience.cancelled_caught, "it does not go on"
    assert not account.not_stored & account.came.keys()
    assert account.came.keys() <= account.acknowledged | account.maybe_stored
    assert len(account.maybe_stored) <= PUBLISHERS * (3 * ROUNDS + 1)


async def idle_without_work() -> None:
    """Check that nothing polls or loops."""
    await trio.sleep(0.1)
    before_s, began_at = time.process_time(), trio.current_time()
    await trio.sleep(0.5)
    share = (time.process_time() - before_s) / (trio.current_time() - began_at)
    assert share < MOST_IDLE_CPU_SHARE, f"{100 * share:.0f} % of a processor with nothing to do"
