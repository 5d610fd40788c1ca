"""Tests for bodies that arrive in several reads: the same commands and errors as in one, and few copies."""

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.support import LIMITS, drain, int32, messages, mpub_body, read_all, reader_in
from soak import examples
from trio_nsq.protocol import MessageSet
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.commands import Command, NoOperation, Publish
from trio_nsq.protocol.limits import MAX_RECORD_BYTES, MAX_RECORD_MESSAGES
from trio_nsq.protocol.states import State

READ_BYTES = 64 * 1024
"""What a broker reads while no large body is being received."""
POOL = Random(1).randbytes(400_000)
SIZES = st.lists(
    st.one_of(st.integers(1, 400), st.integers(4000, 20_000), st.integers(90_000, 300_000)),
    min_size=1,
    max_size=14,
)
PARTS = st.lists(st.integers(1, 100), min_size=1, max_size=6)
"""How much of each read the socket has, in percent, in turn."""


def bodies_of(sizes: Sequence[int]) -> list[bytes]:
    return [POOL[n : n + size] for n, size in enumerate(sizes)]


def receive(reader: CommandReader, wire: bytes, parts: Sequence[int]) -> Iterator[Command | Exception]:
    """Read as a broker does from a socket, and yield the commands and the error."""
    at = 0
    for part in cycle(parts):
        wanted = reader.next_bytes or READ_BYTES
        data = wire[at : at + max(1, wanted * part // 100)]
        if not data:
            return
        at += len(data)
        reader.receive_data(data)
        for found in drain(reader):
            yield found
            if isinstance(found, Exception):
                return


def whole(command: object) -> object:
    """Return a publish with its messages in one set."""
    if isinstance(command, Publish):
        return replace(command, messages=MessageSet.join(command.sets), rest=())
    return command


@settings(max_examples=examples(60), deadline=None)
@given(SIZES, PARTS)
@example([262_144] * 5, [100])
@example([16_384] * 40, [100])
@example([16_384] * 40, [100, 7, 1])
@example([300_000], [30])
@example([4096] * 100, [100])  # the first read ends in a size field
@example([65_520, 200_000], [100])
def test_messages_of_an_mpub_arrive_in_any_reads(sizes: list[int], parts: list[int]) -> None:
    bodies = bodies_of(sizes)
    reader = reader_in(State.INIT)
    publish = Publish("MPUB", "t", messages(*bodies))
    wire = b"MPUB t\n" + mpub_body(*bodies)
    found = list(receive(reader, wire * 2 + b"NOP\n", parts))
    assert [whole(each) for each in found] == [publish, publish, NoOperation()]
    for command in found[:2]:
        assert isinstance(command, Publish)
        assert command.count == len(sizes)
        for each in command.rest:
            assert len(each) == 1 or len(each.data) <= MAX_RECORD_BYTES
            assert len(each) <= MAX_RECORD_MESSAGES


@settings(max_examples=examples(40), deadline=None)
@given(SIZES, st.integers(1, 200_000))
@example([262_144] * 3, 16_384)  # as records of TLS arrive
@example([100_000], 100_011)
def test_reads_that_go_beyond_a_body(sizes: list[int], step: int) -> None:
    bodies = bodies_of(sizes)
    wire = (b"MPUB t 7\n" + mpub_body(*bodies)) * 2 + b"NOP\n"
    pieces = [wire[at : at + max(step, 500)] for at in range(0, len(wire), max(step, 500))]
    publish = Publish("MPUB", "t", messages(*bodies), first=7)
    found = read_all(reader_in(State.INIT), pieces)
    assert [whole(each) for each in found] == [publish, publish, NoOperation()]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(4000, 120_000), min_size=3, max_size=8),
    st.integers(0, 7),
    st.sampled_from([0, -1, 1, 5000, LIMITS.max_msg_size, LIMITS.max_msg_size + 1, 2**31 - 1]),
    PARTS,
)
def test_errors_are_those_of_a_body_in_one_read(
    sizes: list[int], index: int, wrong: int, parts: list[int]
) -> None:
    bodies = bodies_of(sizes)
    wire = bytearray(b"MPUB t\n" + mpub_body(*bodies) + b"NOP\n")
    at = 15 + sum(4 + size for size in sizes[: index % len(sizes)])
    wire[at : at + 4] = int32(wrong)
    expected = read_all(reader_in(State.INIT), [bytes(wire)], eof=True)
    reader = reader_in(State.INIT)
    found = list(receive(reader, bytes(wire), parts))
    if not (found and isinstance(found[-1], Exception)):
        reader.receive_eof()
        found += drain(reader)
    wires = [each.wire if hasattr(each, "wire") else whole(each) for each in found]
    assert wires == [whole(each) for each in expected]


@pytest.mark.parametrize("within", [0, 1, 2, 3, 4, 5])
def test_large_messages_are_cut_not_joined_if_a_read_ends_in_a_size(within: int) -> None:
    sizes = [16_384, 5000, 20_000, 16_384] * 20
    wire = b"MPUB t\n" + mpub_body(*bodies_of(sizes))
    at = 15 + sum(4 + size for size in sizes[:17]) + within
    (command,) = read_all(reader_in(State.INIT), [wire[:READ_BYTES], wire[READ_BYTES:at], wire[at:]])
    assert isinstance(command, Publish)
    assert [each for some in command.sets for each in some.sizes] == sizes
    assert len(command.sets) > 1


@pytest.mark.parametrize(("size", "count"), [(262_144, 19), (16_384, 300), (100_000, 50)])
def test_messages_of_one_size_are_not_copied(size: int, count: int) -> None:
    wire = b"MPUB t\n" + mpub_body(*bodies_of([size] * count))
    reader = reader_in(State.INIT)
    tracemalloc.start()
    try:
        (command,) = receive(reader, wire, [100])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(command, Publish)
    assert command.count == count
    assert peak < len(wire) + 3 * MAX_RECORD_BYTES, "more than the first record is copied"
