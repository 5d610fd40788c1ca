"""Tests for an MPUB of very many small messages: its records, the cost of delivering a part, and delays of
others.
"""

import gc
import time
from pathlib import Path
from struct import pack

import pytest
import trio

from broker.api import raw_answer, raw_post_with_length
from broker.state import Fixture
from broker.support import connected, running_broker
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.log.record_metadata import batch_number
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.bulk import COMPILED

OK = (200, b"OK")
MOST = 2048
"""Messages per record."""
MOST_BYTES = 256 * 1024


def binary(*bodies: bytes) -> bytes:
    return pack(">i", len(bodies)) + pack_messages(bodies).data


def stored(folder: Path, topic: str = "t") -> list[RecordBatch]:
    """Return all records of a topic of a stopped broker."""
    log = DiskLog(folder / "topics" / f"{topic}.topic")
    found: list[RecordBatch] = []
    while records := log.read(found[-1].next_sequence if found else 0):
        found += records
    log.close()
    return found


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_records_are_limited_and_linked(tmp_path: Path, sync: str) -> None:
    small = [b"%d" % n for n in range(2 * MOST + 5)]
    large = [b"x" * 100_000] * 5
    async with running_broker(tmp_path, sync=sync) as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"first")
        await client.publish("t", *small)
        await client.publish("t", *large)
        await client.publish("t", b"x" * (MOST_BYTES + 1), b"last")
    records = stored(tmp_path)
    assert [body for record in records for body in record.messages.bodies()] == [
        b"first",
        *small,
        *large,
        b"x" * (MOST_BYTES + 1),
        b"last",
    ]
    assert [record.count for record in records] == [1, MOST, MOST, 5, 2, 2, 1, 1, 1]
    assert [record.has_next for record in records] == [False, *[True, True, False] * 2, True, False]
    assert [record.has_previous for record in records] == [False, *[False, True, True] * 2, False, True]
    firsts = [record.first_id for record in records]
    assert [firsts[0] + record.base_sequence for record in records] == firsts


async def test_batch_number_is_in_the_first_record_only(tmp_path: Path) -> None:
    body = binary(*[b"x"] * (MOST + 1))
    path = b"/mpub?topic=t&binary=true&producer=p&number=7"
    async with running_broker(tmp_path) as bound, connected(bound.http_address or "", b"") as client:
        for _ in range(2):
            await client.send(raw_post_with_length(path, body))
            assert await raw_answer(client) == OK
    assert [batch_number(record.metadata) for record in stored(tmp_path)] == [("p", 7), None]
    async with running_broker(tmp_path) as bound, connected(bound.http_address or "", b"") as client:
        await client.send(raw_post_with_length(path, body))
        assert await raw_answer(client) == OK
    assert [record.count for record in stored(tmp_path)] == [MOST, 1]


def test_record_of_an_earlier_version_is_delivered_in_parts(tmp_path: Path) -> None:
    """It may have a million messages."""
    fixture = Fixture(DiskLog(tmp_path), mem_queue_size=0, cache_bytes=0)
    fixture.store(*[b"%d" % n for n in range(10 * MOST)])
    fixture = fixture.restarted(None)
    channel = fixture.channel()
    channel.messages.cursor.move_to(5 * MOST)
    subscriber = fixture.subscriber(ready=2)
    assert subscriber.receive_bodies() == [b"%d" % n for n in range(5 * MOST, 5 * MOST + 2)]
    assert [len(batch) for batch in fixture.topic.store.fetch(0)] == [MOST] * 10
    held = fixture.topic.store.batch_holding(3 * MOST + 7)
    assert held is not None
    assert (held.base_sequence, len(held), held.body(7)) == (3 * MOST, MOST, b"%d" % (3 * MOST + 7))


class _Steps(trio.abc.Instrument):
    """Measures the processor time of the longest step of any task, and of all steps together."""

    def __init__(self) -> None:
        self.longest_s = self.total_s = 0.0
        self._began_s = time.thread_time()

    def before_task_step(self, task: object) -> None:
        self._began_s = time.thread_time()

    def after_task_step(self, task: object) -> None:
        took_s = time.thread_time() - self._began_s
        self.longest_s = max(self.longest_s, took_s)
        self.total_s += took_s


@pytest.mark.parametrize("form", ["lines", "binary"])
async def test_clients_are_served_while_a_large_mpub_is_read(tmp_path: Path, form: str) -> None:
    if form == "binary" and not COMPILED:
        pytest.skip("reading sizes is worth a step of its own only where it is compiled")
    body = b"ab\n" * 1_600_000 if form == "lines" else pack(">i", 10**6) + b"\0\0\0\1x" * 10**6
    path = b"/mpub?topic=t" + (b"&binary=true" if form == "binary" else b"")
    gc.collect()
    gc.freeze()  # a garbage collection of earlier tests' objects may take longer than any step
    try:
        async with running_broker(tmp_path) as bound, connected(bound.http_address or "", b"") as client:
            await client.send(
                raw_post_with_length(b"/topic/create?topic=t", b"")
            )  # small ones need no task then
            assert (await raw_answer(client))[0] == 200
            for _ in range(3):  # a step may be slow by chance, but a too long one is slow each time
                steps = _Steps()
                trio.lowlevel.add_instrument(steps)
                await client.send(raw_post_with_length(path, body))
                assert await raw_answer(client) == OK
                trio.lowlevel.remove_instrument(steps)
                if steps.longest_s < max(0.05, steps.total_s / 8):
                    return
    finally:
        gc.unfreeze()
    raise AssertionError(f"a step takes {steps.longest_s:.3f} s of {steps.total_s:.3f} s")


async def test_large_mpub_with_an_error_at_its_end_is_not_stored(tmp_path: Path) -> None:
    bodies = [b"x"] * 50_000
    async with running_broker(tmp_path) as bound, connected(bound.http_address or "", b"") as client:
        for wrong in (
            binary(*bodies) + b"x",
            binary(*bodies)[:-1],
            binary(*bodies, b""),
            pack(">i", len(bodies) + 1) + binary(*bodies)[4:],
        ):
            await client.send(raw_post_with_length(b"/mpub?topic=t&binary=true", wrong))
            assert await raw_answer(client) == (413, b'{"message":"BAD_MESSAGE"}')
        await client.send(raw_post_with_length(b"/mpub?topic=t", b"ab\n" * 50_000 + b"x" * (1024 * 1024 + 1)))
        assert await raw_answer(client) == (413, b'{"message":"MSG_TOO_BIG"}')
    assert stored(tmp_path) == []


async def test_lines_of_a_large_http_mpub(tmp_path: Path) -> None:
    lines = [b"%d" % n * (n % 7) for n in range(50_000)]
    async with running_broker(tmp_path) as bound, connected(bound.http_address or "", b"") as client:
        await client.send(raw_post_with_length(b"/mpub?topic=t", b"\n".join(lines)))
        assert await raw_answer(client) == OK
    found = [body for record in stored(tmp_path) for body in record.messages.bodies()]
    assert found == [line for line in lines if line]
