"""Tests for ranges of sequences."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.log.gaps import Span
from trio_nsq.spark.ranges import covered_up_to, split, subtract

spans = st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: Span(pair[0], sum(pair)))


@given(spans, st.lists(spans, max_size=6))
def test_subtract(wanted: Span, taken: list[Span]) -> None:
    left = subtract(wanted, taken)
    found = [number for span in left for number in range(*span)]
    assert found == [n for n in range(*wanted) if not any(n in range(*span) for span in taken)]
    assert all(span.length > 0 for span in left)


@given(spans, st.integers(1, 25))
def test_split_into_adjacent_parts_of_similar_length(span: Span, at_most: int) -> None:
    pieces = split(span, at_most)
    assert [number for piece in pieces for number in range(*piece)] == list(range(*span))
    lengths = {piece.length for piece in pieces}
    assert max(lengths) <= at_most
    assert max(lengths) - min(lengths) <= 1
    assert len(pieces) == -(-span.length // at_most)


@given(spans, st.integers(1, 25), st.lists(st.integers(0, 80), max_size=8).map(sorted))
def test_parts_begin_at_the_files_of_a_log(span: Span, at_most: int, starts: list[int]) -> None:
    parts = split(span, at_most, starts)
    assert [number for part in parts for number in range(*part)] == list(range(*span))
    assert max(part.length for part in parts) <= at_most
    files = [Span(first, end) for first, end in pairwise([*{0: 0} | dict.fromkeys(starts), 10**6])]
    for part in parts:
        (file,) = [file for file in files if file.first <= part.first < file.end]
        if part.end > file.end:  # joined with the next files, because it is small
            assert part.first == max(file.first, span.first)
            assert part.end in {*starts, span.end}


def test_small_files_are_joined_and_large_ones_are_split() -> None:
    starts = [0, 100, 110, 120, 130, 230, 530]
    assert split(Span(0, 600), 100, starts) == [
        *(Span(0, 100), Span(100, 130), Span(130, 230), Span(230, 330), Span(330, 430), Span(430, 530)),
        Span(530, 600),
    ]


@given(st.integers(0, 60), st.lists(spans, max_size=6))
def test_covered_up_to_the_first_missing_sequence(first: int, done: list[Span]) -> None:
    found = covered_up_to(first, done)
    assert not any(found in range(*span) for span in done)
    assert all(any(number in range(*span) for span in done) for number in range(first, found))


@pytest.mark.parametrize(
    ("one", "other", "common"), [((0, 5), (5, 9), 0), ((0, 5), (4, 9), 1), ((0, 9), (2, 4), 2)]
)
def test_overlap_of_spans(one: tuple[int, int], other: tuple[int, int], common: int) -> None:
    assert Span(*one).common(Span(*other)) == Span(*other).common(Span(*one)) == common
    assert Span(*one).overlaps(Span(*other)) == bool(common)
