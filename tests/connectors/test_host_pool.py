"""The choice of hosts, with given times and random numbers."""

import random
from collections import Counter

import pytest

from trio_nsq.connectors.host_pool import HostPool, Mode, make_pool


def _pool(mode: Mode, hosts: int = 3, seed: int = 1) -> HostPool:
    return make_pool(mode, hosts, random.Random(seed).random)


def _picks(pool: HostPool, count: int, now_s: float = 0.0) -> list[int]:
    return [pool.pick(now_s) for _ in range(count)]


@pytest.mark.parametrize("mode", [Mode.HOSTPOOL, Mode.ROUND_ROBIN])
def test_each_host_in_turn(mode: Mode) -> None:
    assert _picks(_pool(mode), 6) == [0, 1, 2, 0, 1, 2]


def test_round_robin_uses_a_failed_host() -> None:
    pool = _pool(Mode.ROUND_ROBIN)
    pool.failed(1, 0)
    assert _picks(pool, 3) == [0, 1, 2]


def test_a_failed_host_is_left_out_until_a_request_succeeds() -> None:
    pool = _pool(Mode.HOSTPOOL)
    pool.failed(1, 0)
    assert _picks(pool, 4, 29.9) == [0, 2, 0, 2]
    assert _picks(pool, 3, 30) == [0, 1, 2]  # one retry
    assert _picks(pool, 2, 89.9) == [0, 2]
    pool.succeeded(1, 0.1, 90)
    assert _picks(pool, 3, 90) == [0, 1, 2]


def test_the_delay_before_a_retry_doubles_up_to_15_minutes() -> None:
    pool = _pool(Mode.HOSTPOOL, 2)
    now_s = 0.0
    pool.failed(1, now_s)
    delays = []
    for _ in range(8):
        start_s = now_s
        while 1 not in _picks(pool, 2, now_s):
            now_s += 10
        delays.append(now_s - start_s)
        pool.failed(1, now_s)
    assert delays == [30, 60, 120, 240, 480, 900, 900, 900]


def test_all_hosts_are_used_again_if_all_failed() -> None:
    pool = _pool(Mode.HOSTPOOL)
    for host in range(3):
        pool.failed(host, 0)
    assert _picks(pool, 4, 1) == [0, 1, 2, 0]


def test_epsilon_greedy_prefers_the_fast_host_and_tries_the_others() -> None:
    pool = _pool(Mode.EPSILON_GREEDY)
    seconds = {0: 0.1, 1: 0.01, 2: 0.1}
    picks: Counter[int] = Counter()
    for turn in range(3000):
        host = pool.pick(turn / 100)
        picks[host] += 1
        pool.succeeded(host, seconds[host], turn / 100)
    assert picks[1] > 3 * (picks[0] + picks[2])
    assert min(picks.values()) > 50


def test_epsilon_greedy_forgets_response_times() -> None:
    pool = _pool(Mode.EPSILON_GREEDY, 2)
    for now_s in range(100):
        pool.succeeded(0, 0.001, now_s)
        pool.succeeded(1, 1.0, now_s)
    assert Counter(_picks(pool, 300, 100))[0] > 250
    for now_s in range(100, 500):
        pool.succeeded(0, 1.0, now_s)
        pool.succeeded(1, 0.001, now_s)
    assert Counter(_picks(pool, 300, 500))[1] > 250


def test_epsilon_greedy_leaves_failed_hosts_out() -> None:
    pool = _pool(Mode.EPSILON_GREEDY, 2)
    pool.succeeded(0, 0.001, 0)
    pool.succeeded(1, 0.001, 0)
    pool.failed(0, 0)
    assert set(_picks(pool, 100, 1)) == {1}


def test_epsilon_greedy_with_times_too_short_to_measure() -> None:
    pool = _pool(Mode.EPSILON_GREEDY)
    for host in range(3):
        pool.succeeded(host, 0.0, 0)
    assert set(_picks(pool, 200)) == {0, 1, 2}


def test_a_pool_without_hosts() -> None:
    with pytest.raises(ValueError, match="needs a host"):
        make_pool(Mode.HOSTPOOL, 0, random.random)
