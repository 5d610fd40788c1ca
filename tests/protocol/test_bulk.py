"""Tests for the loops of `bulk.py`, compiled and as Python, against simple implementations."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from struct import pack, unpack_from
from types import ModuleType
from zlib import crc32

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import trio_nsq
from protocol.support import int32, messages, read_all, reader_in
from soak import examples
from trio_nsq.log import RecordBatch, RecordHeader
from trio_nsq.log.records import decode_payload
from trio_nsq.protocol import Limits, MessageSet, bulk
from trio_nsq.protocol.frames import unpack_frames
from trio_nsq.protocol.messages import SizePrefixes, unpack_sizes
from trio_nsq.protocol.states import State

PACKAGE = Path(trio_nsq.__path__[0])
SOURCE = PACKAGE / "protocol" / "bulk.py"
HEAD_BYTES = 30


def _uncompiled() -> ModuleType:
    spec = spec_from_file_location("uncompiled_bulk", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMS = {"source": _uncompiled()} | ({"compiled": bulk} if bulk.COMPILED else {})
WALKS: dict[str, Callable[..., int]] = {
    "unpacking": unpack_sizes,
    **{name: form.walk_sizes for name, form in FORMS.items()},
}


def test_source_form_is_not_compiled() -> None:
    assert not FORMS["source"].COMPILED
    assert FORMS["source"].COMPILED_FROM == ""


# ------------------------------------------------------------------------------------------------ sizes

SIZES = st.one_of(
    st.integers(-2, 12), st.sampled_from([2**31 - 1, -(2**31), -(2**31) + 1, 0x01020304, 256, 65536, 2**24])
)
SETS = st.lists(
    st.one_of(st.binary(max_size=9).map(lambda body: int32(len(body)) + body), SIZES.map(int32), st.binary(max_size=5)),
    max_size=8,
).map(b"".join)  # fmt: skip


def naive_walk(
    data: bytes, start: int, end: int, count: int, smallest: int, biggest: int, sizes: Sequence[int]
) -> tuple[int, list[int]]:
    """Return where the walk ends, and the sizes."""
    found = list(sizes)
    while len(found) < count and start + 4 <= end:
        size = int.from_bytes(data[start : start + 4], "big", signed=True)
        if not smallest <= size <= biggest:
            break
        found.append(size)
        start += 4 + size
    return start, found


def check_walk(
    data: bytes, start: int, end: int, count: int, smallest: int, biggest: int, sizes: Sequence[int] = ()
) -> tuple[int, list[int]]:
    """Return the result, after checking that all forms agree."""
    expected = naive_walk(data, start, end, count, smallest, biggest, sizes)
    for name, walk in WALKS.items():
        found = list(sizes)
        at = walk(data, start, end, count, smallest, biggest, found)
        assert (at, found) == expected, name
    return expected


THREE = messages(b"a", b"", b"cde").data


@pytest.mark.parametrize(
    ("data", "start", "count", "sizes", "at", "found"),
    [
        (THREE, 0, 3, [], 16, [1, 0, 3]),
        (THREE, 0, 2, [], 9, [1, 0]),  # not more than the count
        (THREE, 0, 0, [], 0, []),
        (THREE, 0, -1, [], 0, []),
        (THREE, 5, 3, [1], 16, [1, 0, 3]),  # continues
        (THREE, 0, 3, [7, 7, 7], 0, [7, 7, 7]),  # complete already
        (THREE, 0, 3, [7, 7, 7, 7], 0, [7, 7, 7, 7]),
        (THREE, 16, 3, [], 16, []),
        (THREE, 99, 3, [], 99, []),
        (THREE, 2**62, 3, [], 2**62, []),
        (THREE + int32(5), 0, 9, [], 25, [1, 0, 3, 5]),  # past the end
        (THREE + b"\0\0\0", 0, 9, [], 16, [1, 0, 3]),  # an incomplete size
        (b"", 0, 1, [], 0, []),
        (int32(0), 0, 1, [], 4, [0]),
        (int32(0) * 3, 0, 2**31, [], 12, [0, 0, 0]),
        (b"\x7f\xff\xff\xff", 0, 1, [], 4 + 2**31 - 1, [2**31 - 1]),
        (b"\x80\0\0\0", 0, 1, [], 0, []),  # negative, or 2**31
        (b"\xff\xff\xff\xff", 0, 1, [], 0, []),
        (b"\0\0\1\2" + bytes(258), 0, 2, [], 262, [258]),
        (b"\0\1\0\0" + bytes(65536), 0, 2, [], 65540, [65536]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_walk_collects_sizes(
    data: bytes, start: int, count: int, sizes: list[int], at: int, found: list[int]
) -> None:
    assert check_walk(data, start, len(data), count, 0, 2**31 - 1, sizes) == (at, found)


def test_sizes_out_of_range_end_the_walk() -> None:
    data = messages(b"a", b"bc", b"").data
    assert check_walk(data, 0, len(data), 3, 1, 2) == (11, [1, 2])
    assert check_walk(data, 0, len(data), 3, 1, 1) == (5, [1])
    assert check_walk(data, 0, len(data), 3, 2, 2) == (0, [])
    assert check_walk(data, 0, len(data), 3, 0, 2) == (15, [1, 2, 0])
    assert check_walk(data, 0, len(data), 3, 0, -1) == (0, [])


@settings(max_examples=examples(200))
@given(
    SETS, st.integers(0, 30), st.integers(-8, 90), st.integers(-1, 9), st.integers(0, 2),
    st.one_of(st.integers(-8, 12), st.just(2**31 - 1)), st.lists(st.integers(0, 9), max_size=3),
)  # fmt: skip
def test_all_forms_walk_alike(
    data: bytes, start: int, end: int, count: int, smallest: int, biggest: int, sizes: list[int]
) -> None:
    check_walk(data, start, min(end, len(data)), count, smallest, biggest, sizes)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_end_after_the_data_is_an_error(form: ModuleType) -> None:
    for size in range(len(THREE) + 1):
        with pytest.raises(IndexError):
            form.walk_sizes(THREE[:size], 0, 2**40, 4, 0, 2**31 - 1, [])


# ------------------------------------------------------------------------------------------------ frames that come

SPLITS: dict[str, Callable[..., int]] = {
    "unpacking": unpack_frames,
    **{name: form.split_frames for name, form in FORMS.items()},
}
INT64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 255, 2**32, -(2**63), 2**63 - 1]))
FRAMES = st.lists(
    st.builds(
        lambda size, kind, timestamp_ns, attempts, body: (
            pack(">iiqH", len(body) + 30 + size, kind, timestamp_ns, attempts) + b"0123456789abcdef" + body
        ),
        st.sampled_from([0, 0, 0, 0, 1, -1, -31, 2**31 - 100]),
        st.sampled_from([2, 2, 2, 2, 0, 1, 3, -2, 2**24 + 2]),
        INT64,
        st.integers(0, 65535),
        st.binary(max_size=9),
    ),
    max_size=6,
).map(b"".join)
Split = tuple[list[bytes], list[bytes], list[int], list[int]]


def naive_split(data: bytes, start: int, biggest: int) -> tuple[int, Split]:
    found: Split = ([], [], [], [])
    while start + 34 <= len(data):
        size, kind, timestamp_ns, attempts = unpack_from(">iiqH", data, start)
        if kind != 2 or not 30 <= size <= biggest or start + 4 + size > len(data):
            break
        found[0].append(data[start + 18 : start + 34])
        found[1].append(data[start + 34 : start + 4 + size])
        found[2].append(timestamp_ns)
        found[3].append(attempts)
        start += 4 + size
    return start, found


@given(FRAMES, st.integers(0, 8), st.integers(0, 3), st.sampled_from([0, 30, 34, 1000, 2**31 - 1]))
@example(b"", 0, 0, 1000)
@example(bytes(33), 0, 0, 1000)
def test_frames_are_split(data: bytes, cut: int, skipped: int, biggest: int) -> None:
    data = data[: len(data) - cut]
    starts = [0]
    while (at := naive_split(data, starts[-1], 2**31 - 1)[0]) != starts[-1]:
        starts.append(at)
    start = starts[min(skipped, len(starts) - 1)]
    expected = naive_split(data, start, biggest)
    for name, split in SPLITS.items():
        found: Split = ([], [], [], [])
        assert (split(data, start, biggest, *found), found) == expected, name


@pytest.mark.parametrize("name", FORMS)
def test_only_bytes_are_split(name: str) -> None:
    if name == "compiled":
        for data in (bytearray(40), memoryview(bytes(40)), "x" * 40):
            with pytest.raises(TypeError):
                FORMS[name].split_frames(data, 0, 1000, [], [], [], [])


# ------------------------------------------------------------------------------------------------ bodies and frames

ANY_SIZES = st.lists(
    st.one_of(st.integers(0, 12), st.sampled_from([2**31 - 1, 2**31, 2**32])), max_size=8
)  # including sizes that exceed the data


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bodies(form: ModuleType) -> None:
    assert form.split_bodies(b"", []) == []
    assert form.split_bodies(THREE, [1, 0, 3]) == [b"a", b"", b"cde"]
    assert form.split_bodies(THREE, [1]) == [b"a"]
    assert form.split_bodies(THREE, [1, 0, 4, 5]) == [b"a", b"", b"cde", b""]  # missing bytes are left out
    assert form.split_bodies(b"", [1, 2**31]) == [b"", b""]


@settings(max_examples=examples(100))
@given(st.binary(max_size=60), ANY_SIZES)
def test_all_forms_split_the_same_bodies(data: bytes, sizes: list[int]) -> None:
    expected, start = [], 4
    for size in sizes:
        expected.append(data[start : start + size])
        start += size + 4
    for name, form in FORMS.items():
        assert form.split_bodies(data, sizes) == expected, name


def naive_frames(
    data: bytes, sizes: Sequence[int], heads: bytes, prefixes: Mapping[int, bytes], first: int
) -> tuple[bytes, list[int]]:
    """Return the frames, and where each of them ends."""
    frames, ends, start = b"", [], 4
    for index, size in enumerate(sizes):
        head = heads[index * HEAD_BYTES : (index + 1) * HEAD_BYTES]
        frames += prefixes[size] + head + data[start : start + size]
        start += 4 + size
        first += 4 + HEAD_BYTES + size
        ends.append(first)
    return frames, ends


@settings(max_examples=examples(100))
@given(st.binary(max_size=60), ANY_SIZES, st.binary(max_size=250), st.integers(0, 2**40))
def test_all_forms_make_the_same_frames(data: bytes, sizes: list[int], heads: bytes, first: int) -> None:
    prefixes = {size: int32(size % 2**31) for size in sizes}
    frames, ends = naive_frames(data, sizes, heads, prefixes, first)
    for name, form in FORMS.items():
        parts, offsets = [b"before"], [-1, first]
        form.add_frames(data, sizes, heads, prefixes, parts, offsets)
        assert b"".join(parts) == b"before" + frames, name
        assert offsets == [-1, first, *ends], name


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_missing_size_prefixes_are_made(form: ModuleType) -> None:
    prefixes = SizePrefixes(30)
    for body in (b"abc", b"x" * 70_000):  # one prefix is cached, the other size is too large
        parts: list[bytes] = []
        offsets = [0]
        form.add_frames(
            int32(len(body)) + body + THREE[:4], [len(body), 0], b"h" * 60, prefixes, parts, offsets
        )
        head = b"h" * HEAD_BYTES
        assert b"".join(parts) == int32(30 + len(body)) + head + body + int32(30) + head
        assert offsets == [0, 34 + len(body), 68 + len(body)]
    assert set(prefixes) == {3, 0}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_invalid_frames(form: ModuleType) -> None:
    with pytest.raises(KeyError):
        form.add_frames(THREE, [1], b"h" * HEAD_BYTES, {}, [], [0])
    with pytest.raises(IndexError):
        form.add_frames(THREE, [1], b"h" * HEAD_BYTES, {1: b"1"}, [], [])


def test_compiled_function_refuses_wrong_types() -> None:
    if not bulk.COMPILED:
        pytest.skip("the compiled form of bulk.py is not in use")
    compiled = FORMS["compiled"]
    for data in (bytearray(THREE), memoryview(THREE), THREE.decode(), None):
        with pytest.raises(TypeError):
            compiled.walk_sizes(data, 0, len(THREE), 3, 0, 9, [])
        with pytest.raises(TypeError):
            compiled.split_bodies(data, [1, 0, 3])
        with pytest.raises(TypeError):
            compiled.add_frames(data, [1], b"h" * 30, {1: b"1"}, [], [0])
        with pytest.raises(TypeError):
            compiled.add_frames(THREE, [1], data, {1: b"1"}, [], [0])
        with pytest.raises(TypeError):
            compiled.add_frames(THREE, [1], b"h" * 30, {1: data}, [], [0])
    for sizes in ((1, 0, 3), ["1"], [None], [1.0]):
        with pytest.raises(TypeError):
            compiled.split_bodies(THREE, sizes)
        with pytest.raises(TypeError):
            compiled.add_frames(THREE, sizes, b"h" * 90, {}, [], [0])
    with pytest.raises(TypeError):
        compiled.walk_sizes(THREE, 0, len(THREE), 3, 0, 9, ())
    with pytest.raises(TypeError):
        compiled.walk_sizes(THREE, 2**63, len(THREE), 3, 0, 9, [])
    with pytest.raises(ValueError, match="too large"):
        compiled.split_bodies(THREE, [2**63])


# ------------------------------------------------------------------------------------------------ users of the loops


def naive_decode(payload: bytes, count: int, metadata_bytes: int) -> RecordBatch | None:
    """Decode a record of sequence 0 in a simple way; None if its payload is not `count` messages and
    metadata.
    """
    end = len(payload) - metadata_bytes
    at, sizes = naive_walk(payload, 0, end, count, 0, 2**31 - 1, [])
    if at != end or len(sizes) != count:
        return None
    return RecordBatch(0, 0, 0, 0, MessageSet(payload[:end], sizes), payload[end:])


@settings(max_examples=examples(150))
@given(SETS, st.integers(1, 9), st.one_of(st.integers(0, 9), st.just(2**32 - 1)))
@example(THREE, 3, 0)
@example(THREE, 2, 7)  # the third is the metadata
@example(THREE, 3, 1)
@example(THREE + b"\0\0\0\0", 3, 4)  # metadata that looks like a message
@example(THREE + b"\0\0\0\0", 4, 0)
@example(THREE + b"\0\0\0\0", 4, 4)
@example(b"", 1, 0)
@example(THREE, 3, 16)
@example(THREE, 3, 17)
@example(b"\x80\0\0\0", 1, 0)
def test_payloads_are_decoded_alike(payload: bytes, count: int, metadata_bytes: int) -> None:
    header = RecordHeader(0, count, len(payload), 0, 0, 0, crc32(payload), metadata_bytes)
    expected = naive_decode(payload, count, metadata_bytes)
    for name, walk in WALKS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trio_nsq.log.records.read_sizes", walk)
            assert decode_payload(header, payload) == expected, name


@settings(max_examples=examples(60))
@given(SETS, st.integers(0, 5), st.integers(-2, 2))
@example(THREE[:5] + THREE[9:], 2, 0)
@example(THREE[:5] + THREE[9:], 2, -1)
@example(THREE[:5] + THREE[9:], 3, 0)
@example(THREE, 3, 0)
def test_error_of_an_mpub_in_two_pieces_equals_that_of_a_whole_one(
    data: bytes, count: int, more: int
) -> None:
    """A partial body and a complete body are checked by different code."""
    limits = Limits(max_msg_size=8, max_body_size=120)
    wire = b"MPUB t\n" + int32(4 + len(data) + more) + int32(count) + data
    whole = read_all(reader_in(State.INIT, limits), [wire], eof=True)
    for cut in range(1, len(wire)):
        assert read_all(reader_in(State.INIT, limits), [wire[:cut], wire[cut:]], eof=True) == whole
