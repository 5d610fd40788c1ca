"""Tests for deferred messages: their order against a plain list, their cost, and their saved form."""

import random
import tracemalloc
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.state import SECOND, records
from trio_nsq.broker.state import deferred as deferred_module
from trio_nsq.broker.state.batch import Batch
from trio_nsq.broker.state.deferred import Block, DeferredMessages
from trio_nsq.broker.state.waiting_messages import PendingRange, WaitingMessages

NOW = 1_800_000_000 * SECOND


def taken(messages: DeferredMessages, now_ns: int, at_most: int = 10**9) -> list[tuple[int, int]]:
    return [each[:2] for each in messages.release(now_ns, at_most)]


def saved(messages: DeferredMessages) -> list[str]:
    return [block.text() for block in messages.copy()]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 30), st.integers(1, 9)),
        st.tuples(st.just("release"), st.integers(0, 30), st.integers(1, 12)),
        st.tuples(st.just("withdraw"), st.integers(0, 60), st.integers(1, 9)),
        st.tuples(st.just("restore"), st.integers(0, 80), st.just(0)),
    ),
    max_size=40,
)


@given(steps=steps)
def test_random_history_against_a_sorted_list(steps: list[tuple[str, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_module, "BLOCK_MESSAGES", 4)
        real = DeferredMessages()
        naive: list[tuple[int, int, int]] = []  # (due_ns, sequence, attempts)
        copies: list[tuple[DeferredMessages, list[Block], list[tuple[int, int, int]]]] = []
        sequence = 0
        for what, number, count in steps:
            copies.append((real.clone(), real.copy(), naive))
            if what == "add":
                new = range(sequence, sequence + count)
                sequence += count
                real.add(number, new, count, None)
                naive = naive + [(number, each, count) for each in new]
                naive.sort(key=lambda row: row[0])  # keeps the order of messages with the same due time
            elif what == "release":
                due = [row for row in naive if row[0] <= number][:count]
                assert taken(real, number, count) == [row[1:] for row in due]
                naive = naive[len(due) :]
            elif what == "withdraw":
                wanted = range(number, number + count)
                found = sorted(each[:2] for each in real.withdraw(wanted))
                assert found == sorted(row[1:] for row in naive if row[1] in wanted)
                naive = [row for row in naive if row[1] not in wanted]
            else:
                log_end = min(number, sequence)
                real = DeferredMessages.restore(saved(real), log_end)
                naive = [row for row in naive if row[1] < log_end]
            assert (list(real), len(real)) == (naive, len(naive))
            assert sorted(real.sequences()) == sorted(row[1] for row in naive)
            assert real.first_due_ns == (naive[0][0] if naive else None)
            assert real.last_due_ns == (naive[-1][0] if naive else None)
            assert real.counts_before(range(32)) == [sum(row[0] < t for row in naive) for t in range(32)]
            assert all(0 < len(block) <= 8 for block in real.copy())
        for clone, blocks, expected in copies:
            assert list(clone) == expected
            assert [each for block in blocks for each in block.sequence] == [row[1] for row in expected]
            clone.add(0, range(1000, 1001), 0, None)
            clone.withdraw([row[1] for row in expected[::2]])
        assert list(real) == naive


def test_many_messages_with_one_due_time_are_kept_in_order() -> None:
    messages = DeferredMessages()
    messages.add(5, range(10_000), 0, None)
    messages.add(5, range(10_000, 10_003), 0, None)
    messages.add(4, range(20_000, 20_001), 0, None)
    assert taken(messages, 4) == [(20_000, 0)]
    assert [sequence for sequence, _ in taken(messages, 5)] == [*range(10_003)]
    assert (len(messages), messages.first_due_ns) == (0, None)


def test_attempts_are_limited_to_the_maximum_of_a_frame() -> None:
    messages = DeferredMessages()
    messages.add(1, range(1), 70_000, None)
    assert taken(messages, 1) == [(0, 65535)]


def test_message_of_a_memory_log_is_held_until_it_is_released() -> None:
    batch = Batch([records([b"a", b"b", b"c"])])
    messages = DeferredMessages()
    messages.add(1, range(2), 0, batch)
    messages.add(2, range(2, 3), 0, None)
    assert (messages.held(1), messages.held(2)) == (batch, None)
    assert [held for *_, held in messages.release(2, 10)] == [batch, batch, None]
    assert messages.held(1) is None
    messages.add(1, range(2), 0, batch)
    assert [held for *_, held in messages.withdraw([1])] == [batch]
    messages.clear()
    assert (len(messages), messages.held(0), list(messages)) == (0, None, [])


def test_copy_does_not_change_with_its_original() -> None:
    messages = DeferredMessages()
    messages.add(1, range(5), 0, None)
    copy = messages.copy()
    messages.add(0, range(5, 6), 0, None)
    messages.withdraw([2])
    assert [list(block.sequence) for block in copy] == [[0, 1, 2, 3, 4]]


def test_saved_form_is_little_endian_on_any_machine() -> None:
    block = Block(array("Q", [1]), array("Q", [2]), array("H", [3]))
    assert block.text() == "AQAAAAAAAAACAAAAAAAAAAMA"
    restored = Block.from_text(block.text())
    assert (list(restored.due_ns), list(restored.sequence), list(restored.attempts)) == ([1], [2], [3])


@pytest.mark.parametrize("order", ["ascending", "descending", "any"])
def test_deferred_message_takes_less_than_100_bytes(order: str) -> None:
    count, chance = 30_000, random.Random(7)
    kinds: dict[str, Callable[[int], int]] = {
        "ascending": lambda n: NOW + n * SECOND,
        "descending": lambda n: NOW - n * SECOND,
        "any": lambda n: NOW + chance.randrange(30 * 24 * 3600 * SECOND),
    }
    due_ns = kinds[order]
    tracemalloc.start()
    try:
        messages = DeferredMessages()
        for n in range(count):
            messages.add(due_ns(n), range(n, n + 1), 0, None)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(messages) == count
    assert used / count < 30  # 18 are needed; 100 may be used


# ---------------------------------------------------------------------- messages that wait in a topic


def test_messages_that_wait_in_a_topic() -> None:
    batch = Batch([records([b"a"])])
    rows = [
        PendingRange(range(3, 5), NOW),
        PendingRange(range(5, 6), NOW + 1, "c"),
        PendingRange(range(9, 10), NOW + 2, None, batch),
    ]
    waiting = WaitingMessages()
    for row in rows:
        waiting.add(row)
    assert (list(waiting), len(waiting)) == (rows, 3)
    assert [waiting.messages_from(n) for n in (0, 3, 4, 5, 9, 10)] == [4, 4, 2, 2, 1, 0]
    copy = waiting.copy()
    waiting.add(PendingRange(range(10, 11), NOW))
    assert [each.sequences.start for each in copy] == [3, 5, 9]
    assert [each.channel for each in copy] == [None, "c", None]


def test_each_new_earliest_due_time_is_reported() -> None:
    reported: list[int] = []
    messages = DeferredMessages(watch=reported.append)
    for due_ns in (50, 70, 40, 40, 60):
        messages.add(due_ns, range(due_ns, due_ns + 1), 0, None)
    assert reported == [50, 40]
    others = DeferredMessages()
    for due_ns in range(30, 40):
        others.add(due_ns, range(due_ns, due_ns + 1), 0, None)
    messages.merge(others)
    assert min(reported) == 30
