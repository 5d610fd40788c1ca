"""Tests for message frames, which are made once for a whole batch."""

from dataclasses import replace
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.state import FIRST_ID, TIMESTAMP, decode, records
from trio_nsq.broker.state.batch import (
    MAX_KEPT_HEADERS_BYTES,
    MERGE_BYTES,
    MERGE_MESSAGES,
    Batch,
    make_batches,
)
from trio_nsq.log import RecordBatch
from trio_nsq.log.record_metadata import metadata_with_headers
from trio_nsq.protocol.encode import encode_finish


def frame_of(body: bytes, number: int, attempts: int) -> bytes:
    """Build a message frame field by field, from the protocol's table."""
    return b"".join(
        [
            pack(">i", 4 + 8 + 2 + 16 + len(body)),
            pack(">i", 2),
            pack(">q", TIMESTAMP),
            pack(">H", attempts),
            f"{number:016x}".encode(),
            body,
        ]
    )


def message_ids(first_id: int, count: int) -> list[bytes]:
    """Return the ids of consecutive messages of a record, as a client sees them."""
    return [f"{number:016x}".encode() for number in range(first_id, first_id + count)]


def ids_of(batch: Batch) -> list[bytes]:
    """Return the ids of all messages of a batch."""
    return [batch.id(index) for index in range(len(batch))]


@pytest.mark.parametrize("first_id", [0x0FFF_FFFF_FFFF_FFFE, 1023 << 54, 0])
@pytest.mark.parametrize("count", [1, 2, 3, 256, 257, 700])
def test_ids_are_ascending_lower_case_hex(first_id: int, count: int) -> None:
    batch = Batch([records([b"x"] * count, first_id=first_id)])
    assert ids_of(batch) == message_ids(first_id, count)


def test_first_delivery_frames_are_byte_exact() -> None:
    batch = Batch([records([b"one", b"", b"three"])])
    lines, frames = batch.take(0, 3, 1 << 20)
    assert lines == encode_finish(message_ids(FIRST_ID, 3))
    assert bytes(frames) == b"".join(
        frame_of(body, FIRST_ID + index, 1) for index, body in enumerate([b"one", b"", b"three"])
    )


@pytest.mark.parametrize(
    ("attempts", "shown"), [(2, 2), (65_535, 65_535), (65_536, 65_535), (1 << 40, 65_535)]
)
def test_redelivery_frame_is_byte_exact_and_attempts_are_limited_to_65535(attempts: int, shown: int) -> None:
    batch = Batch([records([b"one", b"two", b"three"])])
    for index, body in enumerate([b"one", b"two", b"three"]):
        number = FIRST_ID + index
        assert batch.frame(index, attempts) == (f"{number:016x}".encode(), frame_of(body, number, shown))
    # The shared frames are unchanged.
    assert [message.attempts for message in decode(batch.take(0, 3, 1 << 20)[1])] == [1, 1, 1]


def test_frame_can_be_read_before_any_was_taken() -> None:
    assert Batch([records([b"one", b"two"])]).frame(1, 2)[1] == frame_of(b"two", FIRST_ID + 1, 2)
    assert Batch([records([b"one", b"two"])]).id(1) == message_ids(FIRST_ID, 2)[1]
    assert Batch([records([b"one", b"two"])]).body(1) == b"two"


def test_merged_records_keep_their_ids_and_timestamps() -> None:
    first = records([b"a", b"b"], base=10)
    second = records([b"c"], base=12, first_id=FIRST_ID + 50)
    (batch,) = make_batches([first, second])
    assert (batch.base_sequence, batch.next_sequence, len(batch)) == (10, 13, 3)
    lines, frames = batch.take(0, 3, 1 << 20)
    ids = [*message_ids(FIRST_ID, 2), *message_ids(FIRST_ID + 50, 1)]
    assert lines == encode_finish(ids)
    assert [(m.id, m.body, m.timestamp_ns) for m in decode(frames)] == [
        (ids[0], b"a", TIMESTAMP),
        (ids[1], b"b", TIMESTAMP),
        (ids[2], b"c", TIMESTAMP),
    ]


def test_take_shares_frames_without_copying() -> None:
    batch = Batch([records([b"x" * 100] * 10)])
    (_, one), (_, other) = batch.take(2, 5, 1 << 20), batch.take(0, 10, 1 << 20)
    assert isinstance(one, memoryview)
    assert isinstance(other, memoryview)
    assert one.obj is other.obj


def test_take_respects_the_byte_limit() -> None:
    batch = Batch([records([b"x" * 66] * 10)])  # 100 bytes a frame
    assert len(batch.take(0, 10, 1000)[0]) == 10 * 21
    assert len(batch.take(0, 10, 999)[0]) == 9 * 21
    assert len(batch.take(0, 10, 300)[0]) == 3 * 21
    assert len(batch.take(0, 10, 301)[0]) == 3 * 21
    assert len(batch.take(0, 10, 299)[0]) == 2 * 21
    assert len(batch.take(0, 2, 300)[0]) == 2 * 21
    assert len(batch.take(8, 10, 1000)[0]) == 2 * 21


@pytest.mark.parametrize("room", [0, 1, 99])
def test_take_returns_one_message_of_any_size(room: int) -> None:
    batch = Batch([records([b"x" * 66] * 3)])
    for index in range(3):
        lines, frames = batch.take(index, 3, room)
        assert lines == encode_finish([batch.id(index)])
        assert len(frames) == 100


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    start=st.integers(0, 29),
    count=st.integers(1, 40),
    room=st.integers(0, 4000),
)
def test_take_returns_the_longest_run_that_fits(sizes: list[int], start: int, count: int, room: int) -> None:
    start %= len(sizes)
    bodies = [bytes([index]) * size for index, size in enumerate(sizes)]
    lines, frames = Batch([records(bodies)]).take(start, count, room)
    expected = frame_of(bodies[start], FIRST_ID + start, 1)
    taken = 1
    for index in range(start + 1, min(start + count, len(sizes))):
        more = frame_of(bodies[index], FIRST_ID + index, 1)
        if len(expected) + len(more) > room:
            break
        expected += more
        taken += 1
    assert bytes(frames) == expected
    assert lines == encode_finish(message_ids(FIRST_ID + start, taken))


@pytest.mark.parametrize("count", [2, 255, 256, 257, 512, 700])
@pytest.mark.parametrize("sizes", [[7], [0], [7, 8]])
def test_frames_do_not_depend_on_equal_sizes(count: int, sizes: list[int]) -> None:
    bodies = [index.to_bytes(2, "big") * sizes[index % len(sizes)] for index in range(count)]
    _, frames = Batch([records(bodies)]).take(0, count, 1 << 20)
    assert bytes(frames) == b"".join(frame_of(body, FIRST_ID + index, 1) for index, body in enumerate(bodies))


def one(base: int, count: int = 1, *, size: int = 10, first_id: int = 0, due_ns: int = 0) -> RecordBatch:
    return records([b"x" * size] * count, base=base, first_id=first_id or FIRST_ID + base, due_ns=due_ns)


def test_batch_absorbs_following_records_until_it_is_delivered() -> None:
    batch = Batch([one(0, 2)])
    before = batch.size_bytes
    grown = batch.absorb(one(2, 3), 10, 10_000)
    assert grown == batch.size_bytes - before == Batch([one(2, 3)]).size_bytes
    assert (len(batch), batch.next_sequence) == (5, 5)
    whole = Batch([one(0, 5)])
    assert batch.take(1, 4, 10_000) == whole.take(1, 4, 10_000)
    assert batch.absorb(one(5), 10, 10_000) == 0
    assert (len(batch), batch.size_bytes) == (5, whole.size_bytes)


@pytest.mark.parametrize(
    ("record", "most"),
    [
        (one(2, 3), (4, 10_000)),
        (one(2, 3), (10, Batch([one(0, 5)]).size_bytes - 1)),
        (one(3), (10, 10_000)),
        (one(2, due_ns=1), (10, 10_000)),
        (one(2, first_id=FIRST_ID + 1), (10, 10_000)),
    ],
    ids=["too many", "too large", "not the next", "deferred", "ids that do not ascend"],
)
def test_records_that_a_batch_does_not_absorb(record: RecordBatch, most: tuple[int, int]) -> None:
    batch = Batch([one(0, 2)])
    before = batch.size_bytes
    assert batch.absorb(record, *most) == 0
    assert (len(batch), batch.next_sequence, batch.size_bytes) == (2, 2, before)


def test_deferred_batch_absorbs_nothing() -> None:
    assert Batch([one(0, due_ns=1)]).absorb(one(1), 10, 10_000) == 0


def run_of(*counts: int, size: int = 10, due_ns: int = 0) -> list[int]:
    """Return the lengths of the batches made of consecutive records with these numbers of messages."""
    base, made = 0, []
    for count in counts:
        made.append(records([b"x" * size] * count, base=base, first_id=FIRST_ID + base, due_ns=due_ns))
        base += count
    return [len(batch) for batch in make_batches(made)]


def test_small_consecutive_records_are_merged_up_to_a_size() -> None:
    assert run_of(1, 2, 3) == [6]
    assert run_of(MERGE_MESSAGES - 1, 1, 1) == [MERGE_MESSAGES, 1]
    assert run_of(1000, 1, 1) == [1000, 2]
    assert run_of(*[1] * (MERGE_MESSAGES * 2 + 1)) == [MERGE_MESSAGES, MERGE_MESSAGES, 1]
    half = MERGE_BYTES // 2 - 4
    assert run_of(1, 1, 1, size=half) == [2, 1]
    assert run_of(1, 1, size=half + 1) == [1, 1]
    assert make_batches([]) == []


def test_deferred_records_are_not_merged() -> None:
    assert run_of(1, 1, 1, due_ns=5) == [1, 1, 1]
    dues = [0, 9, 0, 0]
    made = [records([b"x"], base=n, first_id=FIRST_ID + n, due_ns=due_ns) for n, due_ns in enumerate(dues)]
    assert [(len(batch), batch.due_ns) for batch in make_batches(made)] == [(1, 0), (1, 9), (2, 0)]


def test_records_with_a_gap_are_not_merged() -> None:
    made = make_batches([records([b"a"]), records([b"b"], base=2, first_id=FIRST_ID + 2)])
    assert [(batch.base_sequence, batch.next_sequence) for batch in made] == [(0, 1), (2, 3)]


def test_descending_ids_are_not_merged() -> None:
    """After a restart with another node id, whose bits come first, ids may descend. Ids are searched by
    bisection.
    """
    made = make_batches([records([b"a"], first_id=900 << 54), records([b"b"], base=1, first_id=3 << 54)])
    assert [len(batch) for batch in made] == [1, 1]
    for batch in made:
        assert ids_of(batch) == sorted(ids_of(batch))


def test_size_bytes_includes_everything() -> None:
    batch = Batch([records([b"x" * 1000] * 20)])
    before = batch.size_bytes
    _, frames = batch.take(0, 20, 1 << 20)
    assert before == batch.size_bytes >= len(frames)


def test_messages_are_the_same_single_and_together() -> None:
    some = [
        records([b"one", b"", b"three"]),
        records([b"4", b"fifth"], base=3, first_id=FIRST_ID + 3),
    ]
    alone, whole = Batch(some), Batch(some)
    whole.take(0, 5, 1 << 20)
    for _ in range(10):  # more than are needed for building all frames at once
        for index in range(5):
            assert alone.frame(index, 7) == whole.frame(index, 7)
            assert alone.id(index) == whole.id(index)
            assert alone.body(index) == whole.body(index)
            assert alone.timestamp_ns(index) == whole.timestamp_ns(index)


@pytest.mark.parametrize("size", [10, 100, 1000, 16_000])
def test_size_of_a_batch_counts_the_frames_that_it_keeps(size: int) -> None:
    text = f"a:{'x' * size}\n"
    bodies = [b"body"] * 1000
    batch = Batch([replace(records(bodies), metadata=metadata_with_headers(b"", [text]))])
    kept = 0
    at = 0
    while at < len(bodies):
        lines, frames = batch.take(at, 64, 64 * 1024, with_headers=True)
        first, expected = batch.frame(at, 1, with_headers=True)
        assert lines.startswith(encode_finish([first]))
        assert bytes(frames).startswith(expected)
        assert len(frames) <= 64 * 1024
        kept = max(kept, memoryview(frames.obj).nbytes)
        at += len(lines) // len(encode_finish([first]))
    assert len(batch.take(0, 64, 1, with_headers=True)[0]) == len(encode_finish([first]))
    assert kept + 1000 * len(frame_of(b"body", FIRST_ID, 1)) <= batch.size_bytes
    if len(text) * 1000 > MAX_KEPT_HEADERS_BYTES:
        assert kept <= 64 * 1024
