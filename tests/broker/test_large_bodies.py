"""Tests for large bodies: each byte is stored and delivered, whatever reads they arrive in, and whatever others do."""

from pathlib import Path
from random import Random

import pytest
import trio

from broker.certificates import Certificates
from broker.support import connected, mpub, pub, running_broker
from broker.upgrading import upgrade
from trio_nsq.broker.session.transport import LARGE_RECEIVE_BYTES
from trio_nsq.log import DiskLog
from trio_nsq.protocol.limits import MAX_RECORD_BYTES

RANDOM = Random(1)
BODIES = [
    RANDOM.randbytes(size) for size in (*[262_144] * 4, *[16_384] * 30, 1, 100_000, 300_000, 5, 250_000)
]


def stored(folder: Path) -> list[bytes]:
    """Return the messages of topic t of a stopped broker."""
    log = DiskLog(folder / "topics" / "t.topic")
    bodies: list[bytes] = []
    sequence = 0
    while records := log.read(sequence):
        bodies += [body for record in records for body in record.messages.bodies()]
        sequence = records[-1].next_sequence
    log.close()
    return bodies


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize(
    ("tls", "kind"), [(False, None), (True, None), (False, "snappy"), (True, "deflate")], ids=str
)
async def test_large_mpub_on_any_connection(
    tmp_path: Path, certificates: Certificates, tls: bool, kind: str | None
) -> None:
    context = certificates.client_context() if tls else None
    async with (
        running_broker(tmp_path / "d", **certificates.options) as bound,
        connected(bound.tcp_address) as consumer,
        connected(bound.tcp_address) as client,
    ):
        await upgrade(consumer, context, kind)
        await consumer.subscribe("t", "c", ready_count=2500)
        await upgrade(client, context, kind)
        for _ in range(2):
            await client.send(mpub("t", *BODIES))
            await client.ok()
        await client.send(pub("t", BODIES[0]))
        await client.ok()
        received = [(await consumer.message()).body for _ in range(2 * len(BODIES) + 1)]
        assert received == [*BODIES, *BODIES, BODIES[0]]
    assert stored(tmp_path / "d") == received


def test_a_read_can_have_a_message_of_256_kib() -> None:
    """So it is not copied: `tests/protocol/test_large_bodies.py`."""
    assert LARGE_RECEIVE_BYTES >= MAX_RECORD_BYTES + 4


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_bodies_that_arrive_slowly_beside_others(tmp_path: Path, sync: str) -> None:
    """What one client has sent so far is kept apart from what others send, and from what is being written."""
    rounds = 3
    async with running_broker(tmp_path / "d", sync=sync) as bound:

        async def publish(number: int, step: int) -> None:
            async with connected(bound.tcp_address) as client:
                for round_ in range(rounds):
                    wire = mpub("t", *[b"%d %d " % (number, round_) + body for body in BODIES[number:]])
                    for at in range(0, len(wire), step):
                        await client.send(wire[at : at + step])
                        await trio.lowlevel.checkpoint()
                    await client.ok()

        async with trio.open_nursery() as nursery, connected(bound.tcp_address) as leaving:
            await leaving.send(mpub("t", *BODIES)[:-1])
            for number, step in enumerate((3_000_000, 262_148, 70_001, 9_999)):
                nursery.start_soon(publish, number, step)
    expected = [
        b"%d %d " % (number, round_) + body
        for number in range(4)
        for round_ in range(rounds)
        for body in BODIES[number:]
    ]
    found = stored(tmp_path / "d")
    assert sorted(found) == sorted(expected)
    assert [body for body in found if body.startswith(b"1 ")] == [
        body for body in expected if body.startswith(b"1 ")
    ]
