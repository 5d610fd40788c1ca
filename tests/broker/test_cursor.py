"""Tests for a cursor with holes, against a set of the sequences ahead of it."""

from bisect import bisect_left
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.broker.state.cursor import Cursor, spans

END = 40
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.integers(0, END)),
        st.tuples(st.just("skip"), st.integers(0, END), st.integers(0, 6)),
        st.tuples(st.just("among"), st.sets(st.integers(0, END - 1))),
        st.tuples(st.just("restart"), st.integers(0, END)),
    ),
    max_size=12,
)


@given(st.integers(0, END), STEPS)
def test_cursor_equals_the_model(start: int, steps: list[tuple[Any, ...]]) -> None:
    cursor, ahead, last = Cursor(start), set(range(start, END)), start
    for step in steps:
        match step:
            case ("move", to):
                cursor.move_to(to)
                ahead -= set(range(to))
            case ("skip", first, count):
                stop = min(first + count, END)
                new = range(max(first, last, cursor.position), stop)
                assert cursor.skip(first, stop) == bool(new)
                ahead -= set(new)
                last = max(last, new.stop) if new else last
            case ("among", wanted):
                found = cursor.ahead_among(sorted(wanted), END)
                assert found == sorted(wanted & ahead)
                cursor.skip_among(found)
                ahead -= set(found)
                last = max([last, *(each + 1 for each in found)])
            case ("restart", to):
                cursor.restart(to)
                ahead, last = set(range(to, END)), to
        left = sorted(ahead)
        assert cursor.position == min(ahead, default=END)
        assert cursor.position not in {each for hole in cursor.holes for each in range(*hole)}
        assert END - cursor.position - cursor.hole_messages == len(left)
        assert list(cursor.ahead(END)) == list(spans(left))
        assert cursor.run_end(END) == (next(spans(left))[1] if left else END)
        for to in range(END + 1):
            assert cursor.count_before(to) == bisect_left(left, to)
        for count in range(len(left) + 1):
            assert bisect_left(left, cursor.after(count)) == count


def test_spans() -> None:
    assert list(spans([])) == []
    assert list(spans([0])) == [(0, 1)]
    assert list(spans([3, 4, 5, 7, 9, 10])) == [(3, 6), (7, 8), (9, 11)]
