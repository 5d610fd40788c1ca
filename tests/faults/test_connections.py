"""Connections that end, stall and trickle at every step: the client reconnects by itself, and loses no message.

Client, proxy and broker share one trio run with real sockets and a mock clock, so that minutes of waiting take no
time, and measurements are exact. By default, one fault at every step; with `FAULT_COMPLETE=1`, every fault at every
step, and one at every byte. `FAULT_SEED` chooses others.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
import trio
import trio.testing

from faults.conversations import (
    AT_A_TIME,
    CHANNEL,
    CLOSE_TIMEOUT_S,
    COMPLETE,
    FIRST_ANSWER_S,
    FORMS,
    HEARTBEAT_S,
    JUMP_S,
    MESSAGES,
    PATIENCE_S,
    QUIET_S,
    SILENCE_S,
    STEPS,
    TOPIC,
    Footprint,
    Receiver,
    Stage,
    bodies_of,
    drained,
    faults,
    longest_absence_s,
    patience,
    stage,
    stage_of_nsqd,
    watched,
)
from faults.proxy import CUTS, STALLS, Kind, Towards
from faults.scenario import http
from trio_nsq.client import Consumer, Producer, PublishFailed

pytestmark = pytest.mark.slow

LONG_HEARTBEAT_S = 25.0
"""Longer than a consumer needs to close, so that no side closes the connection for silence meanwhile."""
FLUSH_BYTES = 5
"""Bytes at the end of each DEFLATE flush that carry no data."""
KINDS = [*CUTS, *STALLS, Kind.TRICKLE]

Scene = Callable[[Path, str, slice], Awaitable[tuple[int, Counter[Kind]]]]


async def play(scene: Scene, folder: Path, form: str) -> None:
    """Play a scene with all its faults, some at a time: it returns how many there are, and those that
    happened.
    """
    happened = Counter[Kind]()
    for start in count(0, AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        total, of_part = await scene(folder / str(start), form, part)
        happened += of_part
        if part.stop >= total:
            break
    # The length of TLS records differs by a few bytes.
    assert happened.total() >= 0.9 * total
    assert happened.keys() == set(KINDS)


# ------------------------------------------------------------------------------------------ consumers


async def faults_of_a_consumer(folder: Path, form: str, part: slice) -> tuple[int, Counter[Kind]]:
    """Run one consumer through all faults."""
    async with stage(folder, form) as at:
        return await live_through(at, KINDS, part, in_the_clear=form == "plain")


async def live_through(
    at: Stage, kinds: Sequence[Kind], part: slice, *, in_the_clear: bool
) -> tuple[int, Counter[Kind]]:
    """See `play`."""
    happened = Counter[Kind]()
    async with trio.open_nursery() as nursery, watched(nursery) as steps:
        proxy, receiver = at.proxy, Receiver(at)
        async with Producer(at.tcp_address, **at.options) as producer:
            receiver.expect(bodies_of(0))
            await producer.publish_many(TOPIC, bodies_of(0))
            await nursery.start(receiver.run)
            await receiver.has(bodies_of(0))
            await trio.sleep(QUIET_S)
            footprint = Footprint.now()
            planned = faults(proxy.passages[0], kinds, in_the_clear=in_the_clear)
            for number, fault in enumerate(planned[part], 1):
                steps.allow(STEPS)
                before = len(proxy.passages)
                proxy.plan(fault)
                proxy.passages[-1].cut()
                receiver.expect(bodies_of(number))
                await producer.publish_many(TOPIC, bodies_of(number))
                async with patience(f"it does not reconnect before {fault}"):
                    passage = await proxy.accepted(before + 1)
                with trio.move_on_after(QUIET_S):
                    await passage.struck.wait()
                if passage.struck.is_set():
                    happened[fault.kind] += 1
                    if fault.kind is not Kind.TRICKLE:
                        async with patience(f"it does not reconnect after {fault}"):
                            await proxy.accepted(before + 2)
                        absence_s = proxy.accepted_at[before + 1] - passage.struck_at
                        assert absence_s <= longest_absence_s(fault) + at.slack_s, (
                            f"{absence_s} s away after {fault}"
                        )
                async with patience(f"messages do not come after {fault}"):
                    await receiver.has(bodies_of(number))
                await footprint.returns(PATIENCE_S)
            steps.allow(STEPS)
            before = len(proxy.passages)
            await trio.sleep(3 * SILENCE_S)
            assert len(proxy.passages) == before, "a working connection is closed"
            await drained(at.http_address)
        nursery.cancel_scope.cancel()
    return len(planned), happened


@pytest.mark.parametrize("form", FORMS if COMPLETE else ["plain", "tls-snappy"])
async def test_consumer_reconnects_and_loses_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, form: str
) -> None:
    await play(faults_of_a_consumer, tmp_path, form)


if COMPLETE:  # it takes minutes, by the real clock

    @pytest.mark.interop
    async def test_consumer_of_nsqd_reconnects_and_loses_nothing(tmp_path: Path) -> None:
        async with stage_of_nsqd(tmp_path) as at:
            kinds = [*CUTS, Kind.TRICKLE]
            total, happened = await live_through(at, kinds, slice(None, None, 10), in_the_clear=True)
        assert happened.total() >= 0.9 * total / 10


async def faults_of_leaving(folder: Path, form: str, part: slice) -> tuple[int, Counter[Kind]]:
    """Close consumers that have unanswered messages."""
    happened = Counter[Kind]()
    async with (
        stage(folder, form, heartbeat_s=LONG_HEARTBEAT_S) as at,
        trio.open_nursery() as nursery,
        watched(nursery) as steps,
    ):
        proxy = at.proxy
        said_before: dict[Towards, int] = {}

        async def receive(number: int) -> float:
            """Return how long closing took, in seconds."""
            await producer.publish_many(TOPIC, bodies_of(number))
            options = {"max_in_flight": MESSAGES, "close_timeout_s": CLOSE_TIMEOUT_S, **at.options}
            async with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=[proxy.address], **options) as consumer:
                for _ in range(MESSAGES):
                    await anext(consumer)
                passage = proxy.passages[-1]
                if number == 0:
                    said_before.update(passage.lengths)
                else:
                    passage.plan(fault)
                began_at = trio.current_time()
            return trio.current_time() - began_at

        async def take_over(number: int) -> float:
            began_at = trio.current_time()
            left = set(bodies_of(number))
            async with Consumer(
                TOPIC, CHANNEL, nsqd_tcp_addresses=[at.tcp_address], **at.options
            ) as consumer:
                while left:
                    message = await anext(consumer)
                    left.remove(message.body)
                    message.finish()
            return trio.current_time() - began_at

        async with Producer(at.tcp_address, **at.options) as producer:
            steps.allow(STEPS)
            await receive(0)
            assert await take_over(0) <= LONG_HEARTBEAT_S
            footprint = Footprint.now()
            planned = faults(proxy.passages[0], KINDS, in_the_clear=form == "plain", start=said_before)
            for number, fault in enumerate(planned[part], 1):
                steps.allow(STEPS)
                async with patience(f"leaving does not end after {fault}"):
                    took_s = await receive(number)
                # Rounded: 5 s after a time that is not a round number may be 5.000000000000014 s after it.
                assert round(took_s, 6) <= CLOSE_TIMEOUT_S, f"leaving takes {took_s} s after {fault}"
                happened[fault.kind] += proxy.passages[-1].struck.is_set()
                async with patience(f"messages do not come after {fault}"):
                    await take_over(number)
                await footprint.returns(PATIENCE_S)
            steps.allow(STEPS)
            await drained(at.http_address)
        nursery.cancel_scope.cancel()
    return len(planned), happened


@pytest.mark.parametrize("form", FORMS if COMPLETE else ["plain", "tls-snappy"])
async def test_closing_ends_in_time_and_requeues_unanswered_messages(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, form: str
) -> None:
    await play(faults_of_leaving, tmp_path, form)


# ------------------------------------------------------------------------------------------ producers


class Publisher:
    """Publishes until OK, a new message each time, and records the answer to each."""

    def __init__(self, producer: Producer) -> None:
        self.acknowledged: set[bytes] = set()
        self.maybe_stored: set[bytes] = set()
        self.not_stored: set[bytes] = set()
        self.failures: list[PublishFailed] = []
        self._producer = producer
        self._numbers = count()

    def _new(self, number: int) -> list[bytes]:
        return [b"message %06d" % next(self._numbers) for _ in range(number)]

    async def say_everything(self) -> None:
        """Send PUB, DPUB, MPUB, and several at the same time."""
        await self._insist(lambda bodies: self._producer.publish(TOPIC, *bodies), 1)
        await self._insist(lambda bodies: self._producer.publish(TOPIC, *bodies, defer_s=0.001), 1)
        await self._insist(lambda bodies: self._producer.publish_many(TOPIC, bodies), 5)
        async with trio.open_nursery() as nursery:
            for size in (1, 3, 1):
                nursery.start_soon(
                    self._insist, lambda bodies: self._producer.publish_many(TOPIC, bodies), size
                )

    async def _insist(self, publish: Callable[[list[bytes]], Awaitable[object]], size: int) -> None:
        for _ in range(MESSAGES):  # one connection fails, but others may be waiting for it
            bodies = self._new(size)
            began_at = trio.current_time()
            try:
                await publish(bodies)
            except PublishFailed as failure:
                self.failures.append(failure)
                (self.maybe_stored if failure.maybe_stored else self.not_stored).update(bodies)
            else:
                self.acknowledged.update(bodies)
                return
            finally:
                took_s = trio.current_time() - began_at
                assert took_s <= FIRST_ANSWER_S + SILENCE_S + HEARTBEAT_S + JUMP_S, (
                    f"a publish took {took_s} s"
                )
        raise AssertionError(f"publishing fails again and again: {self.failures}")

    def judge(self, stored: Counter[bytes]) -> None:
        """Compare with the messages of a broker."""
        assert self.acknowledged <= stored.keys(), "acknowledged, and lost"
        assert not self.not_stored & stored.keys(), '"not stored", and stored'
        assert stored.keys() <= self.acknowledged | self.maybe_stored
        assert set(stored.values()) == {1}, "stored twice"


async def stored(address: str) -> Counter[bytes]:
    """Return how often each message is in the topic."""
    status, content = await http(address, "GET", "/topic/read", topic=TOPIC)
    assert status == 200
    # The answer is chunked; chunk sizes are separate lines.
    lines = [line for line in content.replace(b"\r\n", b"\n").splitlines() if line.startswith(b"{")]
    return Counter(json.loads(line)["body"].encode() for line in lines)


async def faults_of_a_producer(folder: Path, form: str, part: slice) -> tuple[int, Counter[Kind]]:
    """Run one producer through all faults."""
    happened = Counter[Kind]()
    async with stage(folder, form) as at, trio.open_nursery() as nursery, watched(nursery) as steps:
        proxy = at.proxy
        async with Producer(proxy.address, close_timeout_s=CLOSE_TIMEOUT_S, **at.options) as producer:
            steps.allow(STEPS)
            publisher = Publisher(producer)
            introduced = proxy.passages[0].lengths[Towards.CLIENT]
            if "deflate" in at.options:
                introduced -= FLUSH_BYTES  # without these bytes everything can be decoded already
            await publisher.say_everything()
            assert publisher.failures == []
            await trio.sleep(QUIET_S)
            footprint = Footprint.now()
            planned = faults(proxy.passages[0], KINDS, in_the_clear=form == "plain")
            for fault in planned[part]:
                steps.allow(STEPS)
                before = len(proxy.passages)
                proxy.plan(fault)
                proxy.passages[-1].cut()
                await trio.testing.wait_all_tasks_blocked()
                publisher.failures.clear()
                await publisher.say_everything()
                passage = proxy.passages[before]
                with trio.move_on_after(QUIET_S):
                    await passage.struck.wait()
                happened[fault.kind] += passage.struck.is_set()
                if "tls_v1" not in at.options and passage.lengths[Towards.CLIENT] < introduced:
                    doubts = [failure for failure in publisher.failures if failure.maybe_stored]
                    assert not doubts, f"may be stored, before anything was sent, after {fault}: {doubts}"
                await publisher.say_everything()
                await footprint.returns(PATIENCE_S)
            steps.allow(10 * STEPS)
            before = len(proxy.passages)
            await trio.sleep(3 * SILENCE_S)
            assert len(proxy.passages) == before, "a working connection is closed"
            publisher.judge(await stored(at.http_address))
        nursery.cancel_scope.cancel()
    return len(planned), happened


@pytest.mark.parametrize("form", FORMS if COMPLETE else ["plain", "deflate", "auth"])
async def test_producer_reconnects_and_reports_what_is_stored(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, form: str
) -> None:
    await play(faults_of_a_producer, tmp_path, form)
