"""Tests for reading a topic's log while others publish to it and files are deleted."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from broker.state import Fixture, UnreadableLog, damage, disk_log
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.reader_pool import ReaderPool, Reading
from trio_nsq.broker.state.broker import Broker
from trio_nsq.broker.state.topic import Topic
from trio_nsq.http.messages import CutOff
from trio_nsq.log import Log, MemoryLog, RecordBatch
from trio_nsq.log.gaps import Gap, gaps
from trio_nsq.log.records import RawRecord


def reading(
    readers: ReaderPool,
    topic: Topic,
    start: int,
    end: int | None = None,
    *,
    wait_s: float = 0,
    max_bytes: int = 200,
) -> Reading[RecordBatch]:
    read = partial(topic.log.read, max_bytes=max_bytes)
    return Reading(readers, topic, read, start, end, wait_s, held=lambda record: 0, room=None)


def broker_of(*fixtures: Fixture) -> Broker:
    """Return a broker that serves these topics."""
    broker = Broker(BrokerOptions(data_path=Path("unused")), lambda name: MemoryLog())
    broker.topics = {fixture.topic.name: fixture.topic for fixture in fixtures}
    return broker


def readers_of(*fixtures: Fixture) -> ReaderPool:
    return ReaderPool(broker_of(*fixtures))


async def read_all(way: Reading[RecordBatch]) -> tuple[list[int], list[Gap]]:
    """Return the sequences that were read, and the missing ones."""
    sequences: list[int] = []
    missing: list[Gap] = []
    while found := await way.next():
        for each in found:
            if isinstance(each, Gap):
                missing.append(each)
            else:
                sequences += range(each.base_sequence, each.next_sequence)
    return sequences, missing


def filled(log: Log, counts: Sequence[int], *, name: str = "topic") -> Fixture:
    fixture = Fixture(log, name=name)
    for count in counts:
        fixture.publish(*(b"%d" % number for number in range(count)))
    return fixture


# ---------------------------------------------------------------------- ranges


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(0, 40), st.integers(0, 40), st.integers(0, 300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_message_is_read_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], start: int, end: int, max_bytes: int
) -> None:
    async def check(fixture: Fixture) -> None:
        total = sum(counts)
        way = reading(readers_of(fixture), fixture.topic, min(start, total), end, max_bytes=max_bytes)
        sequences, missing = await read_all(way)
        # Other messages of the first and the last record may be included.
        assert [each for each in sequences if start <= each < end] == list(range(start, min(end, total)))
        assert sequences == sorted(set(sequences))
        assert missing == []

    trio.run(check, filled(MemoryLog(), counts))
    disk = filled(disk_log(tmp_path_factory.mktemp("log"), segment_bytes=200), counts)
    trio.run(check, disk)
    disk.log.close()


async def test_raw_records(tmp_path: Path) -> None:
    fixture = filled(disk_log(tmp_path / "log", segment_bytes=200), [3, 3, 3])
    log = fixture.topic.log
    way: Reading[RawRecord] = Reading(
        readers_of(fixture), fixture.topic, log.read_raw, 4, 9, wait_s=0, held=lambda record: 0, room=None
    )
    found: list[int] = []
    while records := await way.next():
        for each in records:
            assert isinstance(each, RawRecord)
            found.append(each.base_sequence)
    assert found == [3, 6]
    fixture.log.close()


def test_gaps() -> None:
    assert gaps(3, 3, 9) == gaps(3, 2, 0) == []
    assert gaps(3, 7, 0) == gaps(3, 7, 3) == [Gap(3, 7, "damaged")]
    assert gaps(3, 7, 7) == gaps(3, 7, 70) == [Gap(3, 7, "discarded")]
    assert gaps(3, 7, 5) == [Gap(3, 5, "discarded"), Gap(5, 7, "damaged")]


# ---------------------------------------------------------------------- missing messages


def damaged(folder: Path, counts: Sequence[int], *bodies: bytes) -> Fixture:
    """Return messages on disk, whose bodies are their sequences; some of their records are damaged."""
    log = disk_log(folder, segment_bytes=4096)
    fixture = Fixture(log)
    sequence = 0
    for count in counts:
        fixture.publish(*(b"<%d>" % number for number in range(sequence, sequence + count)))
        sequence += count
    log.close()
    for body in bodies:
        damage(folder, body)
    return Fixture(disk_log(folder, segment_bytes=4096))


@pytest.mark.parametrize(
    ("bodies", "start", "end", "sequences", "missing"),
    [
        ([b"<3>"], 0, 9, [0, 1, 2, 6, 7, 8], [(3, 6)]),
        ([b"<3>"], 4, 9, [6, 7, 8], [(4, 6)]),
        ([b"<3>"], 0, 5, [0, 1, 2], [(3, 5)]),
        ([b"<3>"], 4, 5, [], [(4, 5)]),
        ([b"<0>"], 0, 9, [3, 4, 5, 6, 7, 8], [(0, 3)]),
        ([b"<6>"], 0, 9, [0, 1, 2, 3, 4, 5], [(6, 9)]),
        ([b"<0>", b"<3>", b"<6>"], 0, 9, [], [(0, 9)]),
        ([b"<0>", b"<6>"], 1, 8, [3, 4, 5], [(1, 3), (6, 8)]),
    ],
)
@pytest.mark.parametrize("max_bytes", [0, 10_000])
async def test_damage_is_reported(
    tmp_path: Path,
    bodies: list[bytes],
    start: int,
    end: int,
    sequences: list[int],
    missing: list[tuple[int, int]],
    max_bytes: int,
) -> None:
    fixture = damaged(tmp_path / "log", [3, 3, 3], *bodies)
    found = await read_all(reading(readers_of(fixture), fixture.topic, start, end, max_bytes=max_bytes))
    assert found == (sequences, [Gap(first, after, "damaged") for first, after in missing])
    fixture.log.close()


async def test_earlier_deleted_messages(tmp_path: Path) -> None:
    fixture = filled(MemoryLog(max_messages=4), [1] * 10)
    assert fixture.log.first_sequence == 6
    found = await read_all(reading(readers_of(fixture), fixture.topic, 2, 9))
    assert found == ([6, 7, 8], [Gap(2, 6, "discarded")])
    assert await read_all(reading(readers_of(fixture), fixture.topic, 2, 5)) == ([], [Gap(2, 5, "discarded")])


async def test_segments_deleted_during_a_read(tmp_path: Path) -> None:
    fixture = filled(disk_log(tmp_path / "log", segment_bytes=1), [2] * 10)
    way = reading(readers_of(fixture), fixture.topic, 0, 20, max_bytes=0)
    assert await way.next() == fixture.log.read(0, 0)
    fixture.log.discard_before(13)
    sequences, missing = await read_all(way)
    assert (sequences, missing) == (list(range(12, 20)), [Gap(2, 12, "discarded")])
    fixture.log.close()


async def test_damage_after_deleted_messages(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = disk_log(folder, segment_bytes=1)
    fixture = Fixture(log)
    for number in range(6):
        fixture.publish(b"<%d>" % number)
    log.discard_before(2)
    log.close()
    damage(folder, b"<2>")
    fixture = Fixture(disk_log(folder, segment_bytes=1))
    found = await read_all(reading(readers_of(fixture), fixture.topic, 1, 6))
    assert found == ([3, 4, 5], [Gap(1, 2, "discarded"), Gap(2, 3, "damaged")])
    fixture.log.close()


async def test_unreadable_record_ends_the_read() -> None:
    log = UnreadableLog()
    fixture = filled(log, [1, 1])
    log.fails = True
    with pytest.raises(CutOff, match="cannot read segment: Input/output error"):
        await reading(readers_of(fixture), fixture.topic, 0, 2).next()


async def test_deleted_topic_ends_the_read(tmp_path: Path) -> None:
    """Its closed log looks damaged."""
    fixture = filled(disk_log(tmp_path / "log"), [1] * 3)
    broker = broker_of(fixture)
    way = reading(ReaderPool(broker), fixture.topic, 0, 3, max_bytes=0)
    assert len(await way.next()) == 1
    broker.delete_topic(fixture.topic)
    with pytest.raises(CutOff, match="topic topic was deleted, or the broker is stopping"):
        await way.next()


# ---------------------------------------------------------------------- waiting


def in_memory(*counts: int) -> Fixture:
    """Return an ephemeral topic: no threads read it, for which an autojump clock would not wait."""
    return filled(MemoryLog(), counts, name="topic#ephemeral")


async def test_read_waits_for_more(autojump_clock: MockClock) -> None:
    fixture = in_memory(1)
    readers = readers_of(fixture)
    way = reading(readers, fixture.topic, 0, None, wait_s=10)
    got: list[tuple[float, list[int]]] = []

    async def read() -> None:
        while found := await way.next():
            got.append(
                (
                    trio.current_time() - began,
                    [each.base_sequence for each in found if isinstance(each, RecordBatch)],
                )
            )

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for pause_s in (3, 9):
            await trio.sleep(pause_s)
            fixture.publish(b"x")
            readers.wake(fixture.topic)
    assert got == [(0, [0]), (3, [1]), (12, [2])]
    assert trio.current_time() - began == 22


async def test_read_waits_for_a_sequence_and_then_ends(autojump_clock: MockClock) -> None:
    fixture = in_memory(1)
    readers = readers_of(fixture)
    way = reading(readers, fixture.topic, 0, 3, wait_s=60)
    async with trio.open_nursery() as nursery:

        async def publish() -> None:
            for _ in range(4):
                await trio.sleep(20)
                fixture.publish(b"x")
                readers.wake(fixture.topic)

        nursery.start_soon(publish)
        assert await read_all(way) == ([0, 1, 2], [])
        assert trio.current_time() == 40
        nursery.cancel_scope.cancel()


async def test_read_without_waiting_ends_at_the_end(autojump_clock: MockClock) -> None:
    fixture = in_memory(2)
    assert await read_all(reading(readers_of(fixture), fixture.topic, 0, None)) == ([0, 1], [])
    assert await read_all(reading(readers_of(fixture), fixture.topic, 2, 9)) == ([], [])
    assert trio.current_time() == 0


async def test_waiting_reader_is_notified_of_the_end_of_the_topic(autojump_clock: MockClock) -> None:
    fixture = in_memory(1)
    broker = broker_of(fixture)
    readers = ReaderPool(broker)
    way = reading(readers, fixture.topic, 1, None, wait_s=60)
    async with trio.open_nursery() as nursery:

        async def delete() -> None:
            await trio.sleep(5)
            broker.delete_topic(fixture.topic)
            readers.wake(fixture.topic)

        nursery.start_soon(delete)
        with pytest.raises(CutOff):
            await way.next()
    assert trio.current_time() == 5


async def test_no_reader_waits_for_a_deleted_topic(autojump_clock: MockClock) -> None:
    fixture = in_memory(1)
    with pytest.raises(CutOff):
        await reading(readers_of(), fixture.topic, 1, None, wait_s=60).next()
    assert trio.current_time() == 0


async def test_readers_wait_for_their_own_topic_only(autojump_clock: MockClock) -> None:
    fixture, other = in_memory(), Fixture(name="other#ephemeral")
    readers = readers_of(fixture, other)
    got: list[int] = []

    async def read(number: int) -> None:
        assert await reading(readers, fixture.topic, 0, None, wait_s=10).next()
        got.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(read, number)
        await trio.sleep(1)
        readers.wake(other.topic)
        await trio.sleep(1)
        assert got == []
        fixture.publish(b"x")
        readers.wake(fixture.topic)
    assert sorted(got) == [0, 1, 2, 3, 4]
    assert trio.current_time() == 2


async def test_damage_at_the_end_does_not_keep_a_reader_busy(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    fixture = damaged(tmp_path / "log", [1, 1], b"<1>")
    way = reading(readers_of(fixture), fixture.topic, 0, None, wait_s=5)
    assert await read_all(way) == ([0], [Gap(1, 2, "damaged")])
    assert way.position == 2
    fixture.log.close()
