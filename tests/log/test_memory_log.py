"""Tests for the log in memory and its limits."""

import tracemalloc

from log.support import append_each, batch, contents, numbered
from trio_nsq.log import MemoryLog


def test_at_least_this_many_messages_are_kept() -> None:
    log = MemoryLog(max_messages=10)
    batches = numbered(0, 100)
    for n, one in enumerate(batches):
        log.append([one], sync=False)
        kept = contents(log)
        assert kept == batches[n + 1 - len(kept) : n + 1]
        messages = log.next_sequence - log.first_sequence
        assert messages == sum(b.count for b in kept)
        assert messages >= min(10, log.next_sequence)
        assert messages - kept[0].count < 10
        assert log.size_bytes == sum(b.record_bytes for b in kept)


def test_exact_limit() -> None:
    log = MemoryLog(max_messages=3)
    append_each(log, [batch(n, b"x") for n in range(10)])
    assert [b.base_sequence for b in contents(log)] == [7, 8, 9]


def test_limit_of_zero_keeps_the_newest_batch() -> None:
    log = MemoryLog(max_messages=0)
    for one in numbered(0, 10):
        log.append([one], sync=True)
        assert contents(log) == [one]
        assert log.first_sequence == one.base_sequence


def test_batch_larger_than_the_limit_is_kept() -> None:
    log = MemoryLog(max_messages=2, max_bytes=100)
    log.append([batch(0, b"a")], sync=False)
    big = batch(1, *[b"x" * 100] * 10)
    log.append([big], sync=False)
    assert contents(log) == [big]
    log.append([batch(11, b"b")], sync=False)
    assert contents(log) == [batch(11, b"b")]


def test_bytes_are_limited_too() -> None:
    record_bytes = batch(0, b"x" * 100).record_bytes
    log = MemoryLog(max_messages=1000, max_bytes=5 * record_bytes)
    for n in range(20):
        log.append([batch(n, b"x" * 100)], sync=False)
        assert log.size_bytes <= 5 * record_bytes
    assert [b.base_sequence for b in contents(log)] == [15, 16, 17, 18, 19]


def test_batches_of_one_append_may_drop_each_other() -> None:
    log = MemoryLog(max_messages=2)
    log.append([batch(n, b"x") for n in range(10)], sync=False)
    assert [b.base_sequence for b in contents(log)] == [8, 9]


def test_first_sequence_can_be_given() -> None:
    log = MemoryLog(first_sequence=1000)
    assert log.first_sequence == log.next_sequence == 1000
    assert log.read(0) == []
    log.append([batch(1000, b"a")], sync=False)
    assert log.read(0) == [batch(1000, b"a")]
    log.discard_before(1001)
    assert log.first_sequence == log.next_sequence == 1001
    assert log.size_bytes == 0


def test_discarding_removes_whole_batches() -> None:
    log = MemoryLog()
    append_each(log, [batch(0, b"a", b"b"), batch(2, b"c", b"d"), batch(4, b"e")])
    log.discard_before(3)
    assert log.first_sequence == 2
    log.discard_before(4)
    assert log.first_sequence == 4
    assert log.size_bytes == batch(4, b"e").record_bytes


def test_discarded_batches_are_released() -> None:
    log = MemoryLog(max_messages=100)
    tracemalloc.start()
    try:
        for n in range(1099):  # not a round number: discarded batches are cleared by the hundred
            log.append([batch(n, b"%d" % n * 5000)], sync=False)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * log.size_bytes


def test_positions_of_discarded_batches_are_released() -> None:
    log = MemoryLog(max_messages=10)
    tracemalloc.start()
    try:
        for n in range(20_000):
            log.append([batch(n, b"x")], sync=False)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 50_000


def test_append_during_the_close_is_not_an_error() -> None:
    """A topic may be deleted with its last channel before a concurrent publish is stored."""
    log = MemoryLog(max_messages=5)
    append_each(log, [batch(n, b"x") for n in range(8)])
    log.close()
    log.append([batch(8, b"x")], sync=False)
    assert (log.first_sequence, log.next_sequence) == (8, 9)
