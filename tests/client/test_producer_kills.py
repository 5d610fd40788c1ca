"""Kill and restart brokers under a producer: acknowledged messages are stored, messages reported as not
stored are not.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from interop.peers import Broker, qcli_serve
from trio_nsq.client import Producer, PublishFailed
from trio_nsq.protocol import pack_messages

pytestmark = pytest.mark.slow

BROKERS = 3
PATIENCE_S = 60
PUBLISHERS = 2


@dataclass
class Ledger:
    """The reported outcome of each message."""

    acknowledged: set[str] = field(default_factory=set)
    maybe_stored: set[str] = field(default_factory=set)
    not_stored: set[str] = field(default_factory=set)


class Cluster:
    """Brokers in processes that can be killed and restarted at their addresses."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._brokers: list[Broker] = [
            stack.enter_context(qcli_serve(path / str(number))) for number in range(BROKERS)
        ]
        self.addresses = [broker.tcp_address for broker in self._brokers]

    def kill(self, number: int) -> None:
        self._brokers[number].process.kill()
        self._brokers[number].process.wait()

    async def start(self, number: int) -> None:
        address = f"--tcp-address={self.addresses[number]}"
        opening = qcli_serve(self._path / str(number), address)
        broker = await trio.to_thread.run_sync(opening.__enter__)
        self._stack.push(opening.__exit__)
        self._brokers[number] = broker

    async def stored(self, topic: str) -> Counter[str]:
        """Return how often each message is stored, on all brokers together."""
        found: Counter[str] = Counter()
        async with httpx.AsyncClient() as http:
            for broker in self._brokers:
                reply = await http.get(f"http://{broker.http_address}/topic/read?topic={topic}")
                if reply.status_code != 404:
                    found.update(
                        json.loads(line)["body"] for line in reply.raise_for_status().text.splitlines()
                    )
        return found


class Load:
    """Tasks that publish all the time in every way, and record the outcomes."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self.ledger = Ledger()
        self.failures: list[PublishFailed] = []
        self._producer = producer
        self._topic = topic
        self._numbers = count()
        self._progress = trio.Event()

    async def run(self) -> None:
        """Publish until cancelled."""
        async with trio.open_nursery() as nursery:
            for way in (self._one, self._set, self._many) * PUBLISHERS:
                nursery.start_soon(self._repeat, way)

    async def _repeat(self, publish: Callable[[list[str]], Awaitable[None]]) -> None:
        while True:
            names = [f"message-{next(self._numbers)}" for _ in range(20)]
            ledger = self.ledger
            ledger.maybe_stored.update(names)  # the default, also if cancelled
            try:
                await publish(names)
                done, failed = len(names), set[str]()
            except PublishFailed as failure:
                self.failures.append(failure)
                done = failure.acknowledged
                failed = set() if failure.maybe_stored else set(names[done:])
            ledger.acknowledged.update(names[:done])
            ledger.not_stored |= failed
            ledger.maybe_stored -= failed
            ledger.maybe_stored.difference_update(names[:done])
            self._progress.set()
            await trio.lowlevel.checkpoint()

    async def _one(self, names: list[str]) -> None:
        await self._producer.publish(self._topic, names[0].encode())
        for name in names[1:]:
            self.ledger.maybe_stored.discard(name)
        del names[1:]

    async def _set(self, names: list[str]) -> None:
        await self._producer.publish_set(self._topic, pack_messages([name.encode() for name in names]))

    async def _many(self, names: list[str]) -> None:
        await self._producer.publish_many(self._topic, [name.encode() for name in names])

    async def goes_on(self) -> None:
        """Wait until this many more messages are acknowledged."""
        enough = len(self.ledger.acknowledged) + 60
        while len(self.ledger.acknowledged) < enough:
            await self._progress.wait()
            self._progress = trio.Event()


async def test_acknowledged_messages_are_stored_and_failed_ones_are_not(tmp_path: Path) -> None:
    loads = {}
    with ExitStack() as stack:
        brokers = Cluster(tmp_path, stack)
        options: dict[str, Any] = {"max_in_flight_bytes": 150, "reconnect_max_s": 0.2}
        stack.enter_context(trio.fail_after(PATIENCE_S))
        async with (
            Producer(brokers.addresses, **options) as once,
            Producer(brokers.addresses, retry=True, **options) as insisting,
            trio.open_nursery() as nursery,
        ):
            loads = {"once": Load(once, "once"), "retry": Load(insisting, "retry")}
            for load in loads.values():
                nursery.start_soon(load.run)

            async def all_go_on() -> None:
                for load in loads.values():
                    await load.goes_on()

            await all_go_on()
            brokers.kill(0)
            await all_go_on()
            brokers.kill(1)
            await all_go_on()
            await brokers.start(0)
            await all_go_on()
            brokers.kill(2)
            await all_go_on()
            async with trio.open_nursery() as starting:
                starting.start_soon(brokers.start, 1)
                starting.start_soon(brokers.start, 2)
            await all_go_on()
            nursery.cancel_scope.cancel()
        for topic, load in loads.items():
            ledger, stored = load.ledger, await brokers.stored(topic)
            assert ledger.acknowledged <= stored.keys()
            assert not ledger.not_stored & stored.keys()
            assert stored.keys() <= ledger.acknowledged | ledger.maybe_stored
            if topic == "once":
                assert set(stored.values()) == {1}
                assert load.failures
            else:
                assert load.failures == []
