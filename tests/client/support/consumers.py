"""Consumers that are connected to a fake broker, and the broker's side of the conversation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from client.support.fake_broker import PATIENCE_S, FakeBroker, Peer, reqs
from trio_nsq.client import Consumer
from trio_nsq.protocol.frames import CLOSE_WAIT_FRAME


def consumer_of(*brokers: FakeBroker, max_in_flight: int = 5, **options: Any) -> Consumer:
    """Return a consumer of all these brokers."""
    addresses = [broker.address for broker in brokers]
    # With a short timeout, a failed close would look like a clean one.
    options.setdefault("close_timeout_s", 2 * PATIENCE_S)
    return Consumer("topic", "channel", nsqd_tcp_addresses=addresses, max_in_flight=max_in_flight, **options)


@asynccontextmanager
async def opened(
    broker: FakeBroker, *, returned: tuple[int, ...] = (), **options: Any
) -> AsyncIterator[tuple[Consumer, Peer]]:
    """Open a consumer; yield it and the broker's end of its connection. At the end it must requeue the
    messages `returned`.
    """
    async with (
        trio.open_nursery() as nursery,
        consumer_entered(nursery, broker, **options) as (consumer, peer),
    ):
        yield consumer, peer
        nursery.start_soon(see_off, peer, *returned)


@asynccontextmanager
async def consumer_entered(
    nursery: trio.Nursery, broker: FakeBroker, **options: Any
) -> AsyncIterator[tuple[Consumer, Peer]]:
    """Open a consumer without a clean close at the end."""
    consumer = consumer_of(broker, **options)
    peers = []
    subscribed = trio.Event()

    async def subscribe() -> None:
        peers.append(await broker.accept())
        await peers[0].subscribe(ready=options.get("max_in_flight", 5))
        subscribed.set()

    nursery.start_soon(subscribe)
    async with consumer:
        await subscribed.wait()
        yield consumer, peers[0]


async def see_off(peer: Peer, *returned: int) -> None:
    """Play the broker's side of a clean close, in which these messages must be requeued."""
    await peer.expect(b"CLS\n")
    await peer.send(CLOSE_WAIT_FRAME)
    await peer.expect(reqs(*returned))
    await peer.expect_end()
    peer.hang_up()


async def hold_open(consumer: Consumer) -> None:
    """Enter the consumer and stay inside."""
    async with consumer:
        await trio.sleep_forever()


async def accept_up_to_sub(broker: FakeBroker, max_rdy_count: int = 2500) -> Peer:
    """Accept a consumer's connection, and wait for its SUB."""
    peer = await broker.accept()
    await peer.greet(max_rdy_count)
    await peer.expect(b"SUB topic channel\n")
    return peer


def eager_consumer_of(*brokers: FakeBroker, **options: Any) -> Consumer:
    """Return a consumer that reconnects at once, and closes without waiting."""
    defaults = {"reconnect_min_s": 0.001, "reconnect_max_s": 0.001, "close_timeout_s": 0, "max_in_flight": 5}
    addresses = [broker.address for broker in brokers]
    return Consumer("topic", "channel", nsqd_tcp_addresses=addresses, **defaults | options)


async def accept_and_subscribe(broker: FakeBroker, ready: int = 5) -> Peer:
    """Accept a consumer's connection, its SUB and its RDY."""
    peer = await broker.accept()
    await peer.subscribe(ready=ready)
    return peer
