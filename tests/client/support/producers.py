"""A producer that is connected to a fake broker, and publishes in the background."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from client.support.fake_broker import FakeBroker, Peer
from trio_nsq.client import Producer, ProducerClosed, PublishFailed


@asynccontextmanager
async def opened(
    broker: FakeBroker, *, survive_refusals: bool = False, **options: Any
) -> AsyncIterator[tuple[Producer, Peer, trio.Nursery]]:
    """Open a producer; yield it, the broker's end of its connection, and a nursery. With
    `survive_refusals`, refused publishes do not end the connection.
    """
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []
        greeted = trio.Event()

        async def greet() -> None:
            peers.append(await accept(broker, survive_refusals=survive_refusals))
            greeted.set()

        nursery.start_soon(greet)
        async with Producer(broker.address, **options) as producer:
            await greeted.wait()
            yield producer, peers[0], nursery


@asynccontextmanager
async def opened_on(
    *brokers: FakeBroker, survive_refusals: bool = False, **options: Any
) -> AsyncIterator[tuple[Producer, list[Peer], trio.Nursery]]:
    """Open a producer of all these brokers; yield it, each broker's end of its connection, and a nursery."""
    async with trio.open_nursery() as nursery:
        peers: dict[FakeBroker, Peer] = {}
        greeted = trio.Event()

        async def greet(broker: FakeBroker) -> None:
            peers[broker] = await accept(broker, survive_refusals=survive_refusals)
            if len(peers) == len(brokers):
                greeted.set()

        for broker in brokers:
            nursery.start_soon(greet, broker)
        options = {"random": lambda: 0.0} | options
        async with Producer([broker.address for broker in brokers], **options) as producer:
            await greeted.wait()
            await trio.testing.wait_all_tasks_blocked(0.01)
            yield producer, [peers[broker] for broker in brokers], nursery


async def take(*peers: Peer) -> tuple[int, bytes]:
    """Wait until one of these receives a command; return its index and the command."""
    await trio.testing.wait_all_tasks_blocked(0.01)
    found = [(place, data) for place, peer in enumerate(peers) if (data := peer.receive_nowait())]
    assert len(found) == 1, found
    return found[0]


async def accept(broker: FakeBroker, *, survive_refusals: bool = False) -> Peer:
    """Accept a producer's connection."""
    peer = await broker.accept()
    await peer.greet(**({"survive_refusals": True} if survive_refusals else {}))
    return peer


class Outcome:
    """Runs a publish as a task and stores its result."""

    def __init__(
        self, nursery: trio.Nursery, publish: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        self.error: Exception | None = None
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        nursery.start_soon(self._run, publish, args)

    async def _run(self, publish: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        try:
            with self.scope:
                await publish(*args)
        except (PublishFailed, ProducerClosed) as failure:
            self.error = failure
        finally:
            self.ended.set()

    async def failure(self) -> PublishFailed:
        """Wait until it fails."""
        await self.ended.wait()
        assert isinstance(self.error, PublishFailed)
        return self.error

    async def success(self) -> None:
        """Wait until it is acknowledged."""
        await self.ended.wait()
        assert self.error is None
