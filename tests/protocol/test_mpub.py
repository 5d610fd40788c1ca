"""Tests for the body of MPUB: its size, its count, its messages, and inconsistent ones."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.support import int32, messages, mpub_body, read_all, reader_in, single_bytes
from soak import examples
from trio_nsq.protocol import CommandError, Limits, MessageSet, pack_messages
from trio_nsq.protocol.commands import NoOperation, Publish
from trio_nsq.protocol.encode import encode_mpub
from trio_nsq.protocol.messages import SizePrefixes, walk_messages
from trio_nsq.protocol.states import State

LINE = b"MPUB t\n"
SMALL = Limits(max_msg_size=10, max_body_size=54)  # (54 - 4) // 5 = 10 messages


def read(wire: bytes, limits: Limits = SMALL, *, eof: bool = False) -> list[object]:
    """Read it whole; the result must be the same byte by byte."""
    whole = read_all(reader_in(State.INIT, limits), [LINE + wire], eof=eof)
    assert read_all(reader_in(State.INIT, limits), single_bytes(LINE + wire), eof=eof) == whole
    return whole


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (int32(0), b"E_BAD_BODY MPUB invalid body size 0"),
        (int32(-1), b"E_BAD_BODY MPUB invalid body size -1"),
        (b"\x80\0\0\0", b"E_BAD_BODY MPUB invalid body size -2147483648"),
        (int32(55), b"E_BAD_BODY MPUB body too big 55 > 54"),
        (int32(2**31 - 1), b"E_BAD_BODY MPUB body too big 2147483647 > 54"),
        (int32(54) + int32(0), b"E_BAD_BODY MPUB invalid message count 0"),
        (int32(54) + int32(-1), b"E_BAD_BODY MPUB invalid message count -1"),
        (int32(54) + int32(11), b"E_BAD_BODY MPUB invalid message count 11"),
        (int32(54) + int32(2**31 - 1), b"E_BAD_BODY MPUB invalid message count 2147483647"),
        (int32(54) + int32(1) + int32(0), b"E_BAD_MESSAGE MPUB invalid message(0) body size 0"),
        (int32(54) + int32(1) + int32(-7), b"E_BAD_MESSAGE MPUB invalid message(0) body size -7"),
        (int32(54) + int32(1) + int32(11), b"E_BAD_MESSAGE MPUB message too big 11 > 10"),
        (int32(54) + int32(3) + int32(1) + b"x" + int32(0), b"E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
        (int32(54) + int32(2) + int32(1) + b"x" + int32(12), b"E_BAD_MESSAGE MPUB message too big 12 > 10"),
        (int32(5) + int32(6) + messages(*[b"x" * 10] * 5).data + int32(5), b"E_BAD_BODY MPUB body too big 55 > 54"),
    ],
)  # fmt: skip
def test_invalid_body_is_refused_as_early_as_possible(wire: bytes, error: bytes) -> None:
    assert read(wire) == [error]
    assert read(wire + b"\0" * 60) == [error]


@pytest.mark.parametrize("bodies", [(b"x",), (b"a", b"bc", b"def"), (b"x" * 10,) * 4, (b"x",) * 10])
def test_sizes_of_the_messages_count_if_they_contradict_the_size_of_the_body(
    bodies: tuple[bytes, ...],
) -> None:
    """As in nsqd. segmentio/nsq-go sends the size of all bodies, without the count and the sizes."""
    rest, expected = mpub_body(*bodies)[4:], Publish("MPUB", "t", messages(*bodies))
    for size in (1, sum(map(len, bodies)), len(rest) - 1, len(rest), len(rest) + 1, 54):
        if size > 54:
            continue
        assert read(int32(size) + rest) == [expected]
        assert read(int32(size) + rest + LINE + mpub_body(b"a")) == [
            expected,
            Publish("MPUB", "t", messages(b"a")),
        ]
        assert read(int32(size) + rest[:-1]) == []
        assert read(int32(size) + rest[:-1], eof=True) == [b"E_BAD_MESSAGE MPUB failed to read message body"]


@pytest.mark.parametrize("count", [1000, 40_000])
@pytest.mark.parametrize("piece_bytes", [10**9, 65_536, 5000])
def test_large_body_that_is_longer_than_it_says(count: int, piece_bytes: int) -> None:
    bodies = [b"x" * (n % 200 + 1) for n in range(count)]
    wire = LINE + int32(sum(map(len, bodies))) + mpub_body(*bodies)[4:] + b"NOP\n"
    pieces = [wire[at : at + piece_bytes] for at in range(0, len(wire), piece_bytes)]
    found = read_all(reader_in(State.INIT), pieces)
    assert found == [Publish("MPUB", "t", messages(*bodies)), NoOperation()]


def test_defaults_are_nsqds() -> None:
    head = int32(5242880) + int32(1048576)
    assert read(head, Limits()) == [b"E_BAD_BODY MPUB invalid message count 1048576"]
    assert read(int32(5242880) + int32(1048575), Limits()) == []
    assert read(int32(5242881), Limits()) == [b"E_BAD_BODY MPUB body too big 5242881 > 5242880"]


def test_maximum_count_and_maximum_body() -> None:
    ten = [b"x"] * 10
    assert read(mpub_body(*ten)) == [Publish("MPUB", "t", messages(*ten))]
    assert int32(54) == mpub_body(*ten)[:4]
    assert read(mpub_body(b"x" * 10)) == [Publish("MPUB", "t", messages(b"x" * 10))]


@pytest.mark.parametrize("bodies", [(b"x",), (b"a", b"bc"), (b"abc", b"d", b"ef"), (b"\0\0\0\1",)])
def test_truncated_body_waits_and_then_names_the_missing_part(bodies: tuple[bytes, ...]) -> None:
    wire = mpub_body(*bodies)
    missing = dict.fromkeys(range(4), b"E_BAD_BODY MPUB failed to read body size")
    missing |= dict.fromkeys(range(4, 8), b"E_BAD_BODY MPUB failed to read message count")
    for index, body in enumerate(bodies):
        for _ in range(4):
            missing[len(missing)] = b"E_BAD_MESSAGE MPUB failed to read message(%d) body size" % index
        for _ in range(len(body)):
            missing[len(missing)] = b"E_BAD_MESSAGE MPUB failed to read message body"
    assert len(missing) == len(wire)
    for size, error in missing.items():
        assert read(wire[:size]) == []
        assert read(wire[:size], eof=True) == [error]


def test_two_bodies_and_more_data() -> None:
    wire = LINE + mpub_body(b"a", b"bc") + LINE + mpub_body(b"d")
    expected = [
        Publish("MPUB", "t", messages(b"a", b"bc")),
        Publish("MPUB", "t", messages(b"d")),
        NoOperation(),
    ]
    for cut in range(len(wire)):
        reader = reader_in(State.INIT, SMALL)
        assert read_all(reader, [wire[:cut], wire[cut:] + b"NOP\n"]) == expected


# ---------------------------------------------------------------------- sets


def test_pack_and_unpack() -> None:
    bodies = [b"a", b"", b"xy" * 40_000, bytes(range(256)), b"b" * 65535, b"c" * 65536]
    packed = pack_messages(bodies)
    assert packed == messages(*bodies)
    assert packed.bodies() == bodies
    assert len(packed) == 6
    assert packed.body_bytes == sum(map(len, bodies))
    assert pack_messages(bodies) == packed  # cached sizes
    assert pack_messages([]) == MessageSet(b"", [])
    assert pack_messages([]).bodies() == []


@pytest.mark.parametrize(
    ("bodies", "text"),
    [
        (b"abc", "the messages must be a list, or another iterable, not bytes"),
        ([b"a", "b"], "a message must be bytes, not str"),
        ([memoryview(b"abcd").cast("i")], "a message must be bytes, not memoryview"),
    ],
)
def test_packing_what_is_no_messages(bodies: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        pack_messages(bodies)


def test_packing_takes_any_iterable() -> None:
    assert pack_messages(body for body in (b"a", b"bc")) == pack_messages((b"a", b"bc"))  # type: ignore[arg-type]  # as untyped callers do


def test_packing_a_message_that_is_too_long() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 2**31

    with pytest.raises(
        ValueError, match="a message of 2147483648 bytes is longer than the protocol can have"
    ):
        pack_messages([Long()])


def test_cache_of_sizes_is_limited() -> None:
    prefixes = SizePrefixes()
    for size in (0, 1, 65535, *range(65536, 65600), 2**31 - 1):
        assert prefixes[size] == int32(size)
    assert list(prefixes) == [0, 1, 65535]


def test_joining_sets() -> None:
    one, two = messages(b"a", b"bc"), messages(b"d")
    assert MessageSet.join([one, two]) == messages(b"a", b"bc", b"d")
    assert MessageSet.join([one]) is one
    assert MessageSet.join([]) == MessageSet(b"", [])
    assert one.sizes == [1, 2]  # `join` makes new lists


def test_message_larger_than_the_limit_is_not_copied() -> None:
    large = messages(b"abc")
    assert large.split(1, 2)[0] is large


def test_walk_continues_where_it_stopped() -> None:
    data = messages(b"a", b"bcd", b"ef").data
    limits = Limits(max_msg_size=3)
    for end in range(len(data) + 1):
        sizes: list[int] = []
        at = walk_messages(data, 0, end, 3, limits, sizes)
        # It stops at the first incomplete size field.
        assert (at, sizes) == next(
            state
            for seen, state in [(4, (0, [])), (9, (5, [1])), (16, (12, [1, 3])), (99, (18, [1, 3, 2]))]
            if end < seen
        )
        assert walk_messages(data, at, len(data), 3, limits, sizes) == len(data)
        assert sizes == [1, 3, 2]


def test_walk_stops_at_the_count() -> None:
    sizes: list[int] = []
    assert walk_messages(messages(b"a", b"b").data, 0, 10, 1, Limits(), sizes) == 5
    assert sizes == [1]


@pytest.mark.parametrize("size", [0, -1, 4, 2**31 - 1])
def test_walk_refuses_sizes_out_of_range(size: int) -> None:
    data = messages(b"abc").data + int32(size)
    with pytest.raises(CommandError) as caught:
        walk_messages(data, 0, len(data), 2, Limits(max_msg_size=3), [])
    expected = f"message too big {size} > 3" if size > 0 else f"invalid message(1) body size {size}"
    assert str(caught.value) == f"E_BAD_MESSAGE MPUB {expected}"


def test_encoder_enforces_the_limits_of_the_decoder() -> None:
    packed = pack_messages([b"a", b"bc"])
    assert encode_mpub("t", packed) == LINE + mpub_body(b"a", b"bc")


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 12), st.integers(1, 200))
@example([3] * 20, 5, 14)  # five messages are a window of sizes, two fit
@example([3] * 20, 4, 28)  # the bytes of exactly so many
def test_set_is_split_into_the_fewest_sets(sizes: list[int], most: int, size: int) -> None:
    bodies = [b"x" * each for each in sizes]
    sets = pack_messages(bodies).split(most, size)
    assert [body for some in sets for body in some.bodies()] == bodies
    for some in sets:
        assert some.sizes
        assert len(some.data) == sum(some.sizes) + 4 * len(some.sizes)
        assert len(some) <= most
        assert len(some) == 1 or len(some.data) <= size
    for some, following in pairwise(sets):
        assert len(some) == most or len(some.data) + 4 + following.sizes[0] > size, "it has room for one more"
