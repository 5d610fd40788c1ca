"""Tests for ranges of sequences."""

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
