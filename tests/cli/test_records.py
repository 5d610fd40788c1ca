"""Tests for splitting bytes into messages, and messages into batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcli.commands.pub.input import FrameSplitter, Splitter
from trio_nsq.protocol.batcher import MAX_BATCH_BYTES, Batcher

DELIMITERS = [b"\n", b"\0", b"\r\n", b"aa", b"aba", b"abab"]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut the data into pieces."""
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    data=st.lists(st.sampled_from([b"a", b"b", b"\n", b"\r", b"\0", b"xyz", b"aa", b"ab"])).map(b"".join),
    places=st.lists(st.integers(0, 200)),
    delimiter=st.sampled_from(DELIMITERS),
)
def test_pieces_of_input_do_not_matter(data: bytes, places: list[int], delimiter: bytes) -> None:
    splitter = Splitter(delimiter, 1000)
    messages = [message for piece in cut(data, places) for message in splitter.feed(piece)]
    messages += splitter.end()
    whole = data.split(delimiter)
    if not whole[-1]:
        whole.pop()  # a delimiter at the very end does not start another message
    assert (messages, splitter.seen) == (whole, len(whole))
    assert splitter.too_long is None


@given(
    sizes=st.lists(st.integers(0, 9), max_size=30),
    places=st.lists(st.integers(0, 400)),
    delimiter=st.sampled_from([b"\n", b"\r\n"]),
    end=st.booleans(),
)
def test_first_too_long_message_is_named(
    sizes: list[int], places: list[int], delimiter: bytes, end: bool
) -> None:
    data = delimiter.join(b"x" * size for size in sizes) + (delimiter if end and sizes else b"")
    splitter = Splitter(delimiter, 6)
    messages = [message for piece in cut(data, places) for message in splitter.feed(piece)] + splitter.end()
    first = next((place for place, size in enumerate(sizes, 1) if size > 6), None)
    assert splitter.too_long == first
    before = sizes[: first and first - 1]
    if first is None and not end and sizes and not sizes[-1]:
        before = before[:-1]  # after the last delimiter there is nothing
    assert [len(message) for message in messages] == before


def test_endless_message_is_not_buffered() -> None:
    splitter = Splitter(b"\r\n", 10)
    splitter.feed(b"x" * 10 + b"\r")
    assert splitter.too_long is None
    splitter.feed(b"x")
    assert splitter.too_long == 1
    assert splitter.feed(b"y\r\nz\r\n") == []


@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\0", b"b\r\r\n"])).map(b"".join),
    places=st.lists(st.integers(0, 200)),
)
def test_one_carriage_return_is_stripped_before_line_feeds_and_at_the_end(
    data: bytes, places: list[int]
) -> None:
    splitter = Splitter(b"\n", 1000, strip_cr=True)
    messages = [message for piece in cut(data, places) for message in splitter.feed(piece)]
    messages += splitter.end()
    stripped = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    if not stripped[-1]:
        stripped.pop()
    assert messages == stripped
    assert splitter.unfinished_bytes == 0


def test_limit_does_not_count_a_stripped_carriage_return() -> None:
    for pieces in ([b"x" * 10 + b"\r\n"], [b"x" * 10 + b"\r", b"\n"], [b"x" * 10, b"\r"]):
        splitter = Splitter(b"\n", 10, strip_cr=True)
        messages = [message for piece in pieces for message in splitter.feed(piece)] + splitter.end()
        assert (messages, splitter.too_long) == ([b"x" * 10], None)
    splitter = Splitter(b"\n", 10, strip_cr=True)
    splitter.feed(b"x" * 10 + b"\r\r\n")
    assert splitter.too_long == 1


@given(
    sizes=st.lists(st.integers(0, 9), max_size=30),
    places=st.lists(st.integers(0, 400)),
    cut_bytes=st.integers(0, 3),
)
def test_messages_after_their_lengths(sizes: list[int], places: list[int], cut_bytes: int) -> None:
    data = b"".join(size.to_bytes(4, "big") + b"x" * size for size in sizes)
    splitter = FrameSplitter(6)
    data = data[: max(0, len(data) - cut_bytes)]
    messages = [message for piece in cut(data, places) for message in splitter.feed(piece)]
    first = next((place for place, size in enumerate(sizes, 1) if size > 6), None)
    is_cut = bool(cut_bytes and sizes)
    complete = sizes[: len(sizes) - is_cut] if first is None else sizes[: first - 1]
    assert [len(message) for message in messages] == complete
    if first is None:
        assert splitter.seen == len(complete)
        assert bool(splitter.unfinished_bytes) == is_cut
        assert splitter.end() == []
        assert splitter.is_cut == is_cut
    elif first < len(sizes):
        assert splitter.too_long == first


def test_each_input_ends_its_last_message() -> None:
    splitter = Splitter(b"\n", 10)
    assert splitter.feed(b"a\nb") == [b"a"]
    assert splitter.unfinished_bytes == 1
    assert splitter.end() == [b"b"]
    assert splitter.unfinished_bytes == 0
    assert splitter.end() == []
    assert splitter.feed(b"c\n") == [b"c"]


@given(
    chunks=st.lists(st.lists(st.sampled_from([1, 10, 400_000, 700_000, 2_000_000]), max_size=8), max_size=5),
    most=st.sampled_from([1, 2, 3, 1000]),
)
def test_batches_respect_limits_and_lose_nothing(chunks: list[list[int]], most: int) -> None:
    batcher = Batcher(most)
    all_messages: list[bytes] = []
    batches: list[list[bytes]] = []
    for chunk in chunks:
        messages = [bytes(size) for size in chunk]
        all_messages += messages
        batches += batcher.add(messages)
    waiting = len(batcher)
    rest = batcher.rest()
    assert len(rest) == waiting
    assert len(batcher) == 0
    assert [message for batch in [*batches, rest] for message in batch] == all_messages
    for batch in [*batches, rest]:
        assert len(batch) <= most
        assert len(batch) <= 1 or sum(map(len, batch)) <= MAX_BATCH_BYTES
    assert all(batches)


def test_full_batch_is_returned_at_once() -> None:
    batcher = Batcher(3)
    assert list(batcher.add([b"1", b"2"])) == []
    assert list(batcher.add([b"3", b"4"])) == [[b"1", b"2", b"3"]]
    assert batcher.rest() == [b"4"]


def test_messages_of_no_full_batch_wait() -> None:
    batcher = Batcher(1)
    batches = batcher.add([b"1", b"2", b"3"])
    assert next(batches) == [b"1"]
    batches.close()  # type: ignore[attr-defined]
    assert batcher.rest() == [b"2", b"3"]


@pytest.mark.parametrize("delimiter", DELIMITERS)
def test_empty_input_has_no_messages(delimiter: bytes) -> None:
    splitter = Splitter(delimiter, 10)
    assert splitter.feed(b"") == []
    assert splitter.end() == []
    assert splitter.seen == 0
