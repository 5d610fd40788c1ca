"""Tests for PUBs that are read together: the results must equal those one by one."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.support import LIMITS, int32, messages, read_all, reader_in, single_bytes, split_at
from soak import examples
from trio_nsq.protocol.commands import NoOperation, Publish
from trio_nsq.protocol.encode import encode_dpub, encode_mpub, encode_pub
from trio_nsq.protocol.errors import CommandError
from trio_nsq.protocol.states import State

BODIES = [b"1", b"PUB t\n", b"x" * 300, b"\0\0\0\1"]


def run_of(count: int) -> tuple[bytes, Publish]:
    """Return the bytes of so many PUBs, and the command that they are."""
    bodies = [BODIES[number % len(BODIES)] for number in range(count)]
    wire = b"".join(encode_pub("t", body) for body in bodies)
    return wire, Publish("PUB", "t", messages(*bodies), commands=count)


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_a_run_is_one_command(count: int) -> None:
    wire, command = run_of(count)
    reader = reader_in(State.INIT)
    reader.receive_data(wire)
    assert reader.next_command() == command
    assert reader.next_command() is None
    assert reader.take_buffered() == b""


@pytest.mark.parametrize(
    ("behind", "command"),
    [
        (b"NOP\n", NoOperation()),
        (encode_pub("other", b"1"), Publish("PUB", "other", messages(b"1"))),
        (encode_mpub("t", messages(b"1", b"2")), Publish("MPUB", "t", messages(b"1", b"2"))),
        (encode_dpub("t", 5, b"1"), Publish("DPUB", "t", messages(b"1"), 5)),
        (b"PUB t\r\n" + int32(1) + b"1", Publish("PUB", "t", messages(b"1"))),
    ],
    ids=lambda value: "",
)
@pytest.mark.parametrize("count", [1, 2, 40])
def test_run_ends_at_another_command(count: int, behind: bytes, command: object) -> None:
    wire, run = run_of(count)
    reader = reader_in(State.INIT)
    reader.receive_data(wire + behind + wire)
    assert reader.next_command() == run
    assert reader.next_command() == command
    assert reader.next_command() == run
    assert reader.next_command() is None


@pytest.mark.parametrize("size", [0, -1, -(2**31), LIMITS.max_msg_size + 1, 2**31 - 1])
def test_run_ends_before_a_wrong_size(size: int) -> None:
    """The PUBs before it are executed and answered."""
    wire, run = run_of(2)
    reader = reader_in(State.INIT)
    reader.receive_data(wire + b"PUB t\n" + int32(size) + b"x")
    assert reader.next_command() == run
    with pytest.raises(CommandError, match="E_BAD_MESSAGE"):
        reader.next_command()


def test_refused_without_auth() -> None:
    reader = reader_in(State.INIT)
    reader.auth_required = True
    reader.receive_data(run_of(2)[0])
    with pytest.raises(CommandError):
        reader.next_command()


@pytest.mark.parametrize("missing", range(1, 12))
def test_incomplete_end_of_a_run_waits(missing: int) -> None:
    wire, run = run_of(2)
    reader = reader_in(State.INIT)
    reader.receive_data(wire + encode_pub("t", b"1")[:-missing])
    assert reader.next_command() == run
    assert reader.next_command() is None
    reader.receive_data(encode_pub("t", b"1")[-missing:] + wire)
    assert read_all(reader, [b""]) == [
        Publish("PUB", "t", messages(body)) for body in [b"1", *run.messages.bodies()]
    ]


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from(["a", "ab", "b"]), st.binary(min_size=1, max_size=20)), max_size=30),
    st.lists(st.integers(0, 900), max_size=8),
)
def test_same_in_any_pieces(published: Sequence[tuple[str, bytes]], cuts: Sequence[int]) -> None:
    wire = b"".join(encode_pub(topic, body) for topic, body in published)
    expected = [Publish("PUB", topic, messages(body)) for topic, body in published]
    assert read_all(reader_in(State.INIT), [wire]) == expected
    assert read_all(reader_in(State.INIT), split_at(wire, cuts)) == expected
    assert read_all(reader_in(State.INIT), single_bytes(wire)) == expected
