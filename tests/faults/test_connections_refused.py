"""Brokers that refuse or soon close connections: the client's retries, log lines and open resources."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
import trio
import trio.testing

from faults.conversations import (
    AT_A_TIME,
    CHANNEL,
    COMPLETE,
    FIRST_ANSWER_S,
    FORMS,
    HANDSHAKE_S,
    HEARTBEAT_S,
    PATIENCE_S,
    SILENCE_S,
    STEPS,
    TOPIC,
    Footprint,
    Receiver,
    bodies_of,
    faults,
    patience,
    stage,
    watched,
)
from faults.proxy import CUTS, STALLS, Fault, Kind, Proxy, Towards, proxy_before
from trio_nsq.client import ConnectionFailed, Consumer, Producer, PublishFailed
from trio_nsq.event_loop.retries import MAX_DELAY_S

pytestmark = pytest.mark.slow

MINUTES = 3
FEWEST_ATTEMPTS = int(MINUTES * 60 / (HANDSHAKE_S + SILENCE_S + MAX_DELAY_S))
MOST_ATTEMPTS = 10 + int(MINUTES * 60 / (MAX_DELAY_S / 2))
"""Delays double up to the maximum, and are then reduced by half at most."""

OUTAGES = {
    "at once": Fault(Kind.RESET, Towards.BROKER, 0),
    "at IDENTIFY": Fault(Kind.HANG_UP, Towards.BROKER, 100),
    "no answer": Fault(Kind.BLACK_HOLE, Towards.BROKER, 0),
    "with the first message": Fault(Kind.HANG_UP, Towards.CLIENT, 290),
}


@pytest.mark.parametrize("outage", OUTAGES)
async def test_outage_costs_few_attempts_and_the_client_reconnects_after_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, outage: str
) -> None:
    async with stage(tmp_path, "plain") as at, trio.open_nursery() as nursery, watched(nursery) as steps:
        proxy = at.proxy
        async with Producer(at.tcp_address, **at.options) as producer:
            steps.allow(10 * STEPS)
            receiver = Receiver(at, reconnect_max_s=MAX_DELAY_S)
            receiver.expect(bodies_of(0))
            await producer.publish_many(TOPIC, bodies_of(0))
            await nursery.start(receiver.run)
            await receiver.has(bodies_of(0))
            footprint = Footprint.now()
            proxy.always = OUTAGES[outage]
            receiver.expect(bodies_of(1))
            await producer.publish_many(TOPIC, bodies_of(1))
            proxy.passages[-1].cut()
            await trio.sleep(MINUTES * 60)
            attempts = len(proxy.passages)
            assert FEWEST_ATTEMPTS <= attempts <= MOST_ATTEMPTS
            proxy.always = None
            async with patience("it does not reconnect", HANDSHAKE_S + SILENCE_S + HEARTBEAT_S + MAX_DELAY_S):
                await receiver.has(bodies_of(1))
            await footprint.returns(PATIENCE_S)
        nursery.cancel_scope.cancel()


async def test_producer_connects_only_to_publish(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, "plain") as at, trio.open_nursery() as nursery, watched(nursery) as steps:
        proxy = at.proxy
        async with Producer(proxy.address, **at.options) as producer:
            steps.allow(STEPS)
            proxy.always = OUTAGES["at IDENTIFY"]
            proxy.passages[-1].cut()
            await trio.sleep(MINUTES * 60)
            assert len(proxy.passages) == 1, proxy.accepted_at
            for number in range(10):
                with pytest.raises(PublishFailed) as failure:
                    await producer.publish(TOPIC, b"x")
                assert not failure.value.maybe_stored
                assert len(proxy.passages) == 2 + number
            proxy.always = None
            await producer.publish(TOPIC, b"x")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("form", FORMS if COMPLETE else ["plain", "tls-snappy", "auth"])
async def test_failed_first_connection_is_an_error_without_leaks(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, form: str
) -> None:
    refused = 0
    for start in count(0, AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        total, of_part = await first_connections(tmp_path / str(start), form, part)
        refused += of_part
        if part.stop >= total:
            break
    assert refused >= total // 3  # how many depends on how the first handshake was cut into packets


async def first_connections(folder: Path, form: str, part: slice) -> tuple[int, int]:
    """Open consumers whose connection has a fault; return how many faults there are, and how often opening
    failed.
    """
    refused = 0
    async with stage(folder, form) as at, trio.open_nursery() as nursery, watched(nursery) as steps:
        proxy = at.proxy

        @asynccontextmanager
        async def consumer() -> AsyncIterator[None]:
            addresses = [proxy.address]
            async with Consumer(
                TOPIC, CHANNEL, nsqd_tcp_addresses=addresses, close_timeout_s=0, **at.options
            ):
                yield

        steps.allow(STEPS)
        async with consumer():
            await trio.sleep(0.1)
        await trio.sleep(SILENCE_S)
        footprint = Footprint.now()
        planned = faults(proxy.passages[0], [*CUTS, *STALLS], in_the_clear=form == "plain")
        for fault in planned[part]:
            steps.allow(STEPS)
            proxy.plan(fault)
            began_at = trio.current_time()
            try:
                async with consumer():
                    pass
            except ConnectionFailed:
                refused += 1
                assert trio.current_time() - began_at <= FIRST_ANSWER_S + HANDSHAKE_S
            await footprint.returns(PATIENCE_S)
        nursery.cancel_scope.cancel()
    return len(planned), refused


async def test_slow_broker_does_not_delay_others(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Connections are accepted in reverse order."""
    async with stage(tmp_path, "plain") as at, trio.open_nursery() as nursery, watched(nursery) as steps:
        steps.allow(STEPS)
        async with (
            Producer(at.tcp_address) as producer,
            proxy_before(at.tcp_address) as second,
            proxy_before(at.tcp_address) as third,
        ):
            proxies = [at.proxy, second, third]
            for proxy in proxies:
                proxy.held = []
            receiver = Receiver(at, nsqd_tcp_addresses=[proxy.address for proxy in proxies], max_in_flight=3)
            nursery.start_soon(release, third)
            consumer: Consumer = await nursery.start(receiver.run)
            assert consumer.stats().connections == 1
            receiver.expect(bodies_of(1))
            await producer.publish_many(TOPIC, bodies_of(1))
            async with patience("it waits for the others", SILENCE_S):
                await receiver.has(bodies_of(1))
            await release(second)
            await release(at.proxy)
            async with patience("not all are connected", SILENCE_S):
                while consumer.stats().connections < 3:
                    await trio.sleep(HEARTBEAT_S / 10)
        nursery.cancel_scope.cancel()


async def release(proxy: Proxy) -> None:
    """Pass on waiting connections, a second later."""
    await trio.sleep(1)
    assert proxy.held is not None
    for waiting in proxy.held:
        waiting.set()
    proxy.held = None
