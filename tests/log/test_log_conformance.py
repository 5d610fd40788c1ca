"""Tests for every kind of `Log`, on disk and in memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from log.support import LOG_KINDS, append_each, batch, contents, numbered, sync_now
from trio_nsq.log import Log, RecordBatch, RecordHeader
from trio_nsq.log.interface import READ_BYTES
from trio_nsq.log.raw import RawStreamReader, encode_raw

MakeLog = Callable[[], Log]


@pytest.fixture(params=LOG_KINDS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    log = LOG_KINDS[request.param](tmp_path)
    yield log
    log.close()


def header_of(one: RecordBatch) -> RecordHeader:
    data = one.messages.data
    return RecordHeader(
        one.base_sequence, one.count, len(data), one.first_id, one.timestamp_ns, one.due_ns, crc32(data)
    )


def holding(batches: list[RecordBatch], sequence: int) -> int:
    """Return the index of the batch with this message."""
    return next(i for i, one in enumerate(batches) if one.next_sequence > sequence)


def test_empty_log(log: Log) -> None:
    assert log.first_sequence == log.next_sequence == 0
    assert log.size_bytes == 0
    assert log.read(0) == []
    assert log.read(5) == []
    assert list(log.headers(0)) == []
    sync_now(log)
    log.discard_before(0)
    log.discard_before(7)
    assert log.first_sequence == log.next_sequence == 0
    log.append([batch(0, b"a")], sync=True)
    assert contents(log) == [batch(0, b"a")]


def test_metadata_is_kept_with_its_messages(log: Log) -> None:
    batches = [
        replace(batch(0, b"a"), metadata=b"of one"),
        batch(1, b"b"),
        replace(batch(2, b"c", b"d"), metadata=b"of two"),
    ]
    log.append(batches, sync=True)
    assert contents(log) == batches
    assert [header.metadata_bytes for header in log.headers(0)] == [6, 0, 6]
    assert [header.record_bytes for header in log.headers(0)] == [one.record_bytes for one in batches]
    assert RawStreamReader().receive_data(b"".join(encode_raw(log.read_raw(0), b""))) == batches


def test_appended_batches_are_read(log: Log) -> None:
    batches = [
        batch(0, b"a"),
        batch(1, b"b", b"cd", b"efg"),
        batch(4, bytes(range(256)), due_ns=2**64 - 1),
        batch(5, b"\n" * 10),
        RecordBatch(6, 2**64 - 2, 2**63, 0, batch(0, b"x").messages),
    ]
    for n, one in enumerate(batches):
        log.append([one], sync=n % 2 == 0)
        assert log.next_sequence == one.next_sequence
        assert log.first_sequence == 0
        assert contents(log) == batches[: n + 1]
    sync_now(log)
    assert contents(log) == batches
    assert log.size_bytes >= sum(one.record_bytes for one in batches)


def test_append_of_several_batches(log: Log) -> None:
    batches = numbered(0, 9)
    log.append(batches[:4], sync=False)
    log.append(batches[4:5], sync=True)
    log.append(batches[5:], sync=True)
    assert contents(log) == batches
    assert log.next_sequence == batches[-1].next_sequence


def test_reading_from_any_sequence_begins_with_its_batch(log: Log) -> None:
    batches = numbered(0, 20)
    append_each(log, batches)
    for sequence in range(log.next_sequence):
        found = log.read(sequence)
        index = holding(batches, sequence)
        assert found == batches[index : index + len(found)]
        assert len(found) >= 1
    assert log.read(log.next_sequence) == []
    assert log.read(log.next_sequence + 100) == []


def test_read_is_limited_but_returns_at_least_one_batch(log: Log) -> None:
    batches = numbered(0, 20)
    append_each(log, batches)
    for index, one in enumerate(batches):
        for max_bytes in (0, 1, 80, 100, 150, 250, 400, 10_000):
            found = log.read(one.base_sequence, max_bytes)
            assert found == batches[index : index + len(found)]
            assert len(found) == 1 or (len(found) > 1 and sum(one.record_bytes for one in found) <= max_bytes)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_read_returns_as_much_as_fits(tmp_path: Path, kind: str) -> None:
    log = LOG_KINDS[kind](tmp_path)
    batches = numbered(0, 20)
    append_each(log, batches)
    for index, one in enumerate(batches):
        max_bytes = 0
        for end in range(index, len(batches)):
            max_bytes += batches[end].record_bytes
            assert log.read(one.base_sequence, max_bytes) == batches[index : end + 1]
            assert log.read(one.base_sequence, max_bytes - 1) == batches[index : max(end, index + 1)]
    log.close()


@pytest.mark.parametrize("max_bytes", [0, 1, 57, 200, 1000, READ_BYTES])
def test_sequential_reads_find_everything_once(log: Log, max_bytes: int) -> None:
    batches = numbered(0, 50)
    append_each(log, batches)
    assert contents(log, max_bytes) == batches


def test_readers_do_not_disturb_each_other(log: Log) -> None:
    batches = numbered(0, 30)
    append_each(log, batches)
    places = [0, 0, 3, batches[10].base_sequence, log.next_sequence]
    found: list[list[RecordBatch]] = [[] for _ in places]
    for _ in range(len(batches)):
        for reader, place in enumerate(places):
            got = log.read(place, 150)
            found[reader] += got
            if got:
                places[reader] = got[-1].next_sequence
    assert found[0] == found[1] == batches
    assert found[2] == batches[holding(batches, 3) :]
    assert found[3] == batches[10:]
    assert found[4] == []


def test_reader_at_the_end_sees_new_batches(log: Log) -> None:
    place = 0
    for one in numbered(0, 20):
        assert log.read(place) == []
        log.append([one], sync=False)
        assert log.read(place) == [one]
        assert log.read(place) == [one]  # and again
        place = one.next_sequence


def test_large_records(log: Log) -> None:
    batches = [
        batch(0, b"a"),
        batch(1, b"x" * (READ_BYTES + 1)),
        batch(2, b"b"),
        batch(3, *[b"y" * 1000] * 1000),
        batch(1003, b"c"),
    ]
    append_each(log, batches)
    for max_bytes in (0, 1000, READ_BYTES, 10 * READ_BYTES):
        assert contents(log, max_bytes) == batches
    assert log.read(500)[0] == batches[3]
    assert list(log.headers(0)) == [header_of(one) for one in batches]


def test_headers(log: Log) -> None:
    batches = numbered(0, 20)
    append_each(log, batches)
    for sequence in range(log.next_sequence):
        expected = [header_of(one) for one in batches[holding(batches, sequence) :]]
        assert list(log.headers(sequence)) == expected
    assert list(log.headers(log.next_sequence)) == []


def test_iteration_over_headers_may_stop_early(log: Log) -> None:
    batches = numbered(0, 5)
    append_each(log, batches)
    headers = log.headers(0)
    assert next(headers) == header_of(batches[0])
    more = batch(log.next_sequence, b"more")
    log.append([more], sync=False)
    log.discard_before(log.next_sequence)
    assert next(headers) in (header_of(batches[1]), header_of(more))


def test_discarding_keeps_needed_messages(log: Log) -> None:
    batches = numbered(0, 30)
    append_each(log, batches)
    end = log.next_sequence
    for sequence in range(0, end, 3):
        size = log.size_bytes
        log.discard_before(sequence)
        assert log.next_sequence == end
        assert log.first_sequence <= sequence
        assert log.size_bytes <= size
        found = contents(log)
        assert found == batches[-len(found) :]
        assert found[0].base_sequence == log.first_sequence
        assert log.read(0)[0] == found[0]  # discarded messages are skipped
        assert next(iter(log.headers(0))) == header_of(found[0])
        assert log.read(sequence)[0] == batches[holding(batches, sequence)]
    log.discard_before(3)  # never back
    assert log.read(end - 1)[0] == batches[-1]


def test_sequences_continue_after_everything_was_discarded(log: Log) -> None:
    batches = numbered(0, 10)
    append_each(log, batches)
    end = log.next_sequence
    log.discard_before(end)
    assert log.next_sequence == end
    assert log.first_sequence <= end
    assert log.read(end) == []
    following = batch(end, b"after")
    log.append([following], sync=True)
    assert log.read(end) == [following]
    assert contents(log)[-1] == following
    log.discard_before(end + 1000)
    assert log.next_sequence == end + 1
    log.append([batch(end + 1, b"and after")], sync=True)
    assert log.read(end + 1) == [batch(end + 1, b"and after")]


@pytest.mark.parametrize("wrong", [0, 2, 4, 100])
def test_batch_with_a_wrong_sequence_is_refused(log: Log, wrong: int) -> None:
    log.append([batch(0, b"a", b"b", b"c")], sync=True)
    with pytest.raises(ValueError, match=f"begins at sequence {wrong}, not at 3"):
        log.append([batch(wrong, b"x")], sync=True)
    with pytest.raises(ValueError, match="not at 4"):
        log.append([batch(3, b"x"), batch(5, b"y")], sync=True)
    assert contents(log) == [batch(0, b"a", b"b", b"c")]
    assert log.next_sequence == 3
    log.append([batch(3, b"d")], sync=True)
    assert contents(log) == [batch(0, b"a", b"b", b"c"), batch(3, b"d")]
