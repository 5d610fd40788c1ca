"""Flipped bits on the way to the client: it reconnects or continues, without hanging, crashing or growing.

TCP detects such errors except one in thousands. Only TLS and snappy detect a changed body or id; the client always
checks a frame's size and type. By default, the tests flip one bit of every byte of size and type, and some other bits;
with `FAULT_COMPLETE=1`, every bit, or one of every byte.
"""

import logging
import math
import random
import resource
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from struct import unpack_from

import pytest
import trio
import trio.testing

from faults.conversations import (
    AT_A_TIME,
    COMPLETE,
    FORMS,
    HANDSHAKE_S,
    HEARTBEAT_S,
    JUMP_S,
    PATIENCE_S,
    QUIET_S,
    RECONNECT_MAX_S,
    SEED,
    SILENCE_S,
    STEPS,
    TOPIC,
    Footprint,
    Receiver,
    bodies_of,
    patience,
    stage,
    watched,
)
from faults.proxy import Fault, Kind, Passage, Towards
from trio_nsq.client import Producer, PublishFailed

pytestmark = pytest.mark.slow

FEW = 12
PUBLISHES = 30
"""One per second, so that the broker regularly gets data from the client."""
UNCHECKED = ("plain", "deflate")
"""Forms without checksums: a changed message is not detected."""
MOST_FRAME_BYTES = 64 * 1024 * 1024
"""The client refuses a larger frame at once."""
MOST_KIB = 150 * 1024
"""The process may grow by this much: a frame of 64 MiB, which brokers may send, is held twice at most."""
LONGEST_ABSENCE_S = HANDSHAKE_S + 2 * SILENCE_S + HEARTBEAT_S + RECONNECT_MAX_S + JUMP_S
"""The client reads following data, also heartbeats, as a part of the frame, until the broker misses its
answers.
"""


def heads(data: bytes) -> Iterator[int]:
    """Return the positions of the bytes of sizes and types of frames."""
    start = 0
    while start + 8 <= len(data):
        yield from range(start, start + 8)
        start += 4 + unpack_from(">i", data, start)[0]


def flips(passage: Passage, form: str) -> list[Fault]:
    """Return the bits to flip in a conversation like this one."""
    data = bytes(passage.passed[Towards.CLIENT])
    chance = random.Random(SEED)
    if COMPLETE:
        bits = range(8) if form == "plain" else [0]
        chosen = [(place, (place + bit) % 8) for place in range(len(data)) for bit in bits]
    elif form == "plain":
        chosen = [(place, chance.randrange(8)) for place in heads(data)]
        message = [*heads(data)][2 * 8 :]  # after the answers to IDENTIFY and SUB
        chosen += [(message[7], bit) for bit in range(8)]
    else:
        chosen = [(chance.randrange(len(data)), chance.randrange(8)) for _ in range(FEW)]
    return [Fault(Kind.FLIP, Towards.CLIENT, place, bit) for place, bit in chosen]


def longest_absence_s(passage: Passage, flip: Fault) -> float:
    """Return when the client must have reconnected after a flip in a size or type; infinity for other bytes.

    Redelivered messages may have moved other data to this position, so the data that was sent decides.
    """
    sent = bytearray(passage.passed[Towards.CLIENT])
    sent[flip.at] ^= 1 << flip.bit
    for start in list(heads(bytes(sent)))[::8]:
        if start <= flip.at < start + 8:
            size, frame_type = unpack_from(">ii", passage.passed[Towards.CLIENT], start)
            is_nonsense = not 4 <= size <= MOST_FRAME_BYTES or frame_type not in (0, 1, 2)
            return RECONNECT_MAX_S + JUMP_S if is_nonsense else LONGEST_ABSENCE_S
    return math.inf


async def flips_for_a_consumer(folder: Path, form: str, part: slice) -> int:
    """Run one consumer through all flips; return how many there are."""
    async with stage(folder, form) as at, trio.open_nursery() as nursery, watched(nursery) as steps:
        proxy, receiver = at.proxy, Receiver(at)
        receiver.strict = False
        async with Producer(at.tcp_address, **at.options) as producer:
            receiver.expect(bodies_of(0))
            await producer.publish_many(TOPIC, bodies_of(0))
            await nursery.start(receiver.run)
            await receiver.has(bodies_of(0))
            await trio.sleep(QUIET_S)
            footprint = Footprint.now()
            planned = flips(proxy.passages[0], form)
            for number, fault in enumerate(planned[part], 1):
                steps.allow(STEPS)
                before = len(proxy.passages)
                proxy.plan(fault)
                proxy.passages[-1].cut()
                receiver.expect(bodies_of(number))
                await producer.publish_many(TOPIC, bodies_of(number))
                passage = await proxy.accepted(before + 1)
                with trio.move_on_after(QUIET_S):
                    await passage.struck.wait()
                await trio.testing.wait_all_tasks_blocked()
                longest_s = math.inf
                if form == "plain" and passage.struck.is_set():
                    longest_s = longest_absence_s(passage, fault)
                if longest_s < math.inf:
                    async with patience(f"it goes on after {fault}"):
                        await proxy.accepted(before + 2)
                    absence_s = proxy.accepted_at[before + 1] - passage.struck_at
                    assert absence_s <= longest_s, f"{absence_s} s away after {fault}"
                elif form in UNCHECKED:
                    proxy.passages[-1].cut()
                marker = [bodies_of(number)[0].replace(b"0", b"9", 1)]  # of the same size, too
                receiver.expect(marker)
                await producer.publish_many(TOPIC, marker)
                async with patience(f"messages do not come after {fault}"):
                    await receiver.has(marker if form in UNCHECKED else bodies_of(number) + marker)
                await footprint.returns(PATIENCE_S)
        nursery.cancel_scope.cancel()
    return len(planned)


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form != "auth"] if COMPLETE else ["plain", "snappy", "tls"]
)
async def test_consumer_with_flipped_bits(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    caplog.set_level(
        logging.CRITICAL, "trio_nsq"
    )  # captured log lines must be text, which flipped bits may not be
    size_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for start in count(0, AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        if part.stop >= await flips_for_a_consumer(tmp_path / str(start), form, part):
            break
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size_kib < MOST_KIB


async def flips_for_a_producer(folder: Path, part: slice) -> int:
    """Run one producer, which publishes all the time, through flips in the sizes and types of its answers."""
    async with stage(folder, "plain") as at, trio.open_nursery() as nursery, watched(nursery) as steps:
        proxy = at.proxy
        async with Producer(proxy.address, **at.options) as producer:
            steps.allow(STEPS)
            assert await publish_each_second(producer) <= JUMP_S
            footprint = Footprint.now()
            data = bytes(proxy.passages[0].passed[Towards.CLIENT])
            bytes_apart = 1 if COMPLETE else 3
            bits = range(8) if COMPLETE else [random.Random(SEED).randrange(8)]
            planned = [
                Fault(Kind.FLIP, Towards.CLIENT, place, (place + bit) % 8)
                for place in list(heads(data))[:24:bytes_apart]
                for bit in bits
            ]
            for fault in planned[part]:
                steps.allow(10 * STEPS)
                before = len(proxy.passages)
                proxy.plan(fault)
                proxy.passages[-1].cut()
                await trio.testing.wait_all_tasks_blocked()
                longest_s = await publish_each_second(producer)
                assert longest_s <= LONGEST_ABSENCE_S, f"a publish takes {longest_s} s after {fault}"
                assert proxy.passages[before].struck.is_set()
                assert len(proxy.passages) > before + 1, f"it goes on after {fault}"
                await footprint.returns(PATIENCE_S)
        nursery.cancel_scope.cancel()
    return len(planned)


async def publish_each_second(producer: Producer) -> float:
    """Publish, whatever the results of earlier publishes; return the longest duration of one, acknowledged or
    not.
    """
    took_s = []

    async def publish() -> None:
        began_at = trio.current_time()
        try:
            await producer.publish(TOPIC, b"x")
        except PublishFailed:
            pass
        took_s.append(trio.current_time() - began_at)

    async with trio.open_nursery() as nursery:
        for _ in range(PUBLISHES):
            nursery.start_soon(publish)
            await trio.sleep(1)
    return max(took_s)


async def test_producer_with_flipped_bits(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "trio_nsq")
    for start in count(0, AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        if part.stop >= await flips_for_a_producer(tmp_path / str(start), part):
            break
