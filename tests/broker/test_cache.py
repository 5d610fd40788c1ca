"""Tests for the cache, whose budget all topics share."""

import pytest

from broker.state import records
from trio_nsq.broker.state.batch import Batch
from trio_nsq.broker.state.cache import BatchCache


def batch(base: int = 0, size: int = 100) -> Batch:
    return Batch([records([b"x" * size], base=base)])


ONE = batch().size_bytes


def test_batches_are_found_by_topic_and_first_sequence() -> None:
    cache = BatchCache(10 * ONE)
    first, second = batch(0), batch(0)
    cache.put("a", first)
    cache.put("b", second)
    assert cache.get(("a", 0)) is first
    assert cache.get(("b", 0)) is second
    assert cache.get(("a", 1)) is None
    assert cache.get(("c", 0)) is None
    assert (len(cache), cache.size_bytes) == (2, 2 * ONE)


def test_least_recently_used_batch_is_dropped_first() -> None:
    cache = BatchCache(3 * ONE)
    for base in range(3):
        cache.put("t", batch(base))
    assert cache.get(("t", 0)) is not None
    assert ("t", 1) in cache  # this query does not count as a use
    cache.put("t", batch(3))
    assert [("t", base) in cache for base in range(4)] == [True, False, True, True]
    assert cache.size_bytes == 3 * ONE


@pytest.mark.parametrize("limit", [0, ONE // 2, ONE])
def test_newest_batch_stays_even_if_it_is_too_large(limit: int) -> None:
    cache = BatchCache(limit)
    for base in range(3):
        cache.put("t", batch(base))
        assert ("t", base) in cache
        assert (len(cache), cache.size_bytes) == (1, ONE)


def test_second_put_replaces_the_first() -> None:
    cache = BatchCache(100 * ONE)
    cache.put("t", batch(0))
    larger = batch(0, 5000)
    cache.put("t", larger)
    assert cache.get(("t", 0)) is larger
    assert (len(cache), cache.size_bytes) == (1, larger.size_bytes)


def test_forget() -> None:
    cache = BatchCache(100 * ONE)
    for topic in ("a", "ab", "b"):
        for base in range(3):
            cache.put(topic, batch(base))
    cache.discard(("b", 1))
    cache.discard(("b", 1))
    cache.discard(("nothing", 0))
    cache.forget_topic("a")
    cache.forget_topic("nothing")
    assert [("ab", base) in cache for base in range(3)] == [True, True, True]
    assert [("b", base) in cache for base in range(3)] == [True, False, True]
    assert (len(cache), cache.size_bytes) == (5, 5 * ONE)
    cache.forget_topic("ab")
    cache.forget_topic("b")
    assert (len(cache), cache.size_bytes) == (0, 0)
