"""How messages of a source are cut into requests, and their numbers. No IO."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.connectors.source.batch import Position, SourceBatch
from trio_nsq.connectors.to_nsq.numbers import (
    is_of_message,
    least_number,
    number_of,
    producer_name,
    sequence_in,
)
from trio_nsq.connectors.to_nsq.parts import MAX_BATCH_BYTES, Load, Part
from trio_nsq.filters.bodies import Filter, OtherBodies
from trio_nsq.filters.conditions import parse_condition

ALL = Filter()
IDS = st.integers(0, 2**64 - 1).map(lambda number: b"%016x" % number)


def batch_of(bodies: Sequence[bytes], first: int = 0, dues_ns: Sequence[int] | None = None) -> SourceBatch:
    count = len(bodies)
    return SourceBatch(
        "t",
        "b",
        bodies,
        [b"%016x" % (1000 + first + index) for index in range(count)],
        [0] * count,
        [0] * count,
        range(first, first + count),
        dues_ns or [0] * count,
        Position(first + count, None),
    )


def load_of(batch: SourceBatch, chosen: Filter = ALL, now_ns: int = 0) -> Load:
    load = Load()
    load.add(batch, 0, len(batch.bodies), chosen, now_ns)
    load.end_batch(batch)
    return load


def shape(parts: Sequence[Part]) -> list[tuple[list[bytes], list[int], int]]:
    return [(part.bodies, part.sequences, part.due_ns) for part in parts]


# ---------------------------------------------------------------------- numbers


@given(st.integers(0, 2**45 - 1), IDS)
def test_number_has_the_sequence(sequence: int, message_id: bytes) -> None:
    number = number_of(sequence, message_id)
    assert sequence_in(number) == sequence
    assert is_of_message(number, message_id)
    assert least_number(sequence) <= number < least_number(sequence + 1) <= 2**63


def test_another_message_with_the_same_sequence_is_noticed() -> None:
    ids = [b"%016x" % number for number in range(0, 200_000, 97)]
    number = number_of(5, b"0123456789abcdef")
    assert sum(is_of_message(number, each) for each in ids) < 3


def test_name_of_the_producer() -> None:
    names = {
        producer_name(broker, topic, channel, generation)
        for broker in ("a:1", "b:1")
        for topic in ("t", "u")
        for channel in ("c", "d")
        for generation in (0, 1)
    }
    assert len(names) == 16
    assert all(len(name) <= 64 and name.isascii() for name in names)


# ---------------------------------------------------------------------- parts


def test_messages_of_several_batches_are_joined() -> None:
    load = load_of(batch_of([b"a", b"b"]))
    load.join(load_of(batch_of([b"c"], 2)))
    assert shape(load.parts) == [([b"a", b"b", b"c"], [0, 1, 2], 0)]
    assert load.parts[0].ids[-1] == b"%016x" % 1002
    assert load.position == Position(3, None)
    assert (load.received, len(load.batches)) == (3, 2)


def test_batch_without_messages_moves_the_position() -> None:
    load = load_of(batch_of([], 7))
    assert (load.parts, load.position) == ([], Position(7, None))


def test_messages_with_different_due_times_are_apart() -> None:
    load = load_of(batch_of([b"a", b"b", b"c", b"d", b"e"], 0, [0, 50, 200, 200, 1]), now_ns=100)
    assert shape(load.parts) == [([b"a", b"b"], [0, 1], 0), ([b"c", b"d"], [2, 3], 200), ([b"e"], [4], 0)]
    more = load_of(batch_of([b"f"], 5))
    load.join(more)
    assert shape(load.parts)[-1] == ([b"e", b"f"], [4, 5], 0)
    load.join(load_of(batch_of([b"g"], 6, [200]), now_ns=100))
    assert shape(load.parts)[-2:] == [([b"e", b"f"], [4, 5], 0), ([b"g"], [6], 200)]


def test_filtered_messages_keep_their_sequences() -> None:
    bodies = [b'{"a":1}', b"{}", b"x", b'{"a":2}', b"y"]
    load = load_of(batch_of(bodies, 10), Filter(conditions=[parse_condition("a")]))
    assert shape(load.parts) == [([b'{"a":1}', b'{"a":2}'], [10, 13], 0)]
    assert shape(load.others) == [([b"x", b"y"], [12, 14], 0)]
    assert (load.received, load.dropped, load.not_json) == (5, 1, 2)
    load = load_of(batch_of(bodies, 10), Filter(conditions=[parse_condition("a")], others=OtherBodies.DROP))
    assert load.others == []


@given(st.lists(st.integers(0, 3 * MAX_BATCH_BYTES), max_size=6))
def test_requests_are_limited_in_size(sizes: list[int]) -> None:
    bodies = [bytes(size) for size in sizes]
    load = load_of(batch_of(bodies))
    assert [body for part in load.parts for body in part.bodies] == bodies
    assert [each for part in load.parts for each in part.sequences] == list(range(len(bodies)))
    for part in load.parts:
        assert len(part.bodies) == 1 or part.size <= MAX_BATCH_BYTES
        assert part.ids == [b"%016x" % (1000 + each) for each in part.sequences]


def test_what_is_stored_is_left_out() -> None:
    (part,) = load_of(batch_of([b"a", b"b", b"c"], 5)).parts
    assert part.without_stored(4) is part
    rest = part.without_stored(5)
    assert (rest.bodies, rest.sequences, rest.ids) == ([b"b", b"c"], [6, 7], part.ids[1:])
    assert part.without_stored(7).bodies == []


def test_messages_of_a_channel_have_no_sequences() -> None:
    batch = SourceBatch("t", "b", [b"a", b"b"], [b"0" * 16, b"1" * 16], [0, 0], [1, 1])
    load = load_of(batch)
    assert shape(load.parts) == [([b"a", b"b"], [], 0)]
    assert load.position is None


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1025])
def test_a_batch_is_filtered_in_pieces(count: int) -> None:
    batch = batch_of([b"%d" % number for number in range(count)])
    load = Load()
    for first in range(0, count, 512):
        load.add(batch, first, min(first + 512, count), ALL, 0)
    assert [body for part in load.parts for body in part.bodies] == batch.bodies
