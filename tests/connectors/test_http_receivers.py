"""The choice of receivers, with given times."""

import math

from trio_nsq.connectors.host_pool import Mode
from trio_nsq.connectors.to_http.outcomes import Outcome, Verdict
from trio_nsq.connectors.to_http.receivers import (
    FAILURES_IN_A_ROW,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    Change,
    Lease,
    ReceiverPool,
)

DONE, FAILED = Outcome(Verdict.DONE), Outcome(Verdict.FAILED, "500")
UNAVAILABLE = Outcome(Verdict.UNAVAILABLE, "connection refused")


def _pool(count: int = 1, mode: Mode | None = Mode.HOSTPOOL, max_retry_after_s: float = 600) -> ReceiverPool:
    return ReceiverPool(count, mode, lambda: 0.0, max_retry_after_s)


def _lease(pool: ReceiverPool, now: float) -> Lease:
    lease = pool.lease(now)
    assert lease is not None
    return lease


def test_each_receiver_in_turn() -> None:
    pool = _pool(3)
    assert [_lease(pool, 0).receiver.index for _ in range(5)] == [0, 1, 2, 0, 1]


def test_an_unavailable_receiver_pauses_and_gets_one_request() -> None:
    pool = _pool()
    lease = _lease(pool, 10)
    assert pool.settle(lease, UNAVAILABLE, 11) is Change.LEFT_OUT
    assert pool.lease(11) is None
    assert (pool.next_deadline(11), pool.room(11)) == (11 + FIRST_PAUSE_S, 0)
    trial = _lease(pool, 12)
    assert trial.is_trial
    assert pool.lease(12) is None
    assert (pool.next_deadline(12), pool.room(12)) == (math.inf, 1)
    assert pool.settle(trial, DONE, 13) is Change.BACK
    assert (pool.room(13), _lease(pool, 13).is_trial) == (None, False)


def test_pauses_double_up_to_the_longest_one() -> None:
    pool, now, pauses = _pool(), 0.0, []
    for _ in range(9):
        pool.settle(_lease(pool, now), UNAVAILABLE, now)
        pauses.append(pool.next_deadline(now) - now)
        now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]


def test_a_trial_that_fails_for_its_message_pauses_again() -> None:
    pool = _pool()
    pool.settle(_lease(pool, 0), UNAVAILABLE, 0)
    pool.settle(_lease(pool, 1), FAILED, 1)
    assert pool.lease(2.9) is None
    assert pool.lease(3) is not None


def test_a_trial_that_is_given_back_may_be_repeated() -> None:
    pool = _pool()
    pool.settle(_lease(pool, 0), UNAVAILABLE, 0)
    pool.cancel(_lease(pool, 1))
    assert _lease(pool, 1).is_trial


def test_single_failures_do_not_pause() -> None:
    pool = _pool()
    for _ in range(3):
        for _ in range(FAILURES_IN_A_ROW - 1):
            assert pool.settle(_lease(pool, 0), FAILED, 0) is Change.NONE
        pool.settle(_lease(pool, 0), Outcome(Verdict.FINAL, "404"), 0)  # an answer
    assert pool.room(0) is None


def test_failures_in_a_row_pause() -> None:
    pool = _pool()
    changes = [pool.settle(_lease(pool, 0), FAILED, 0) for _ in range(FAILURES_IN_A_ROW)]
    assert changes[-1] is Change.LEFT_OUT
    assert pool.lease(0) is None


def test_results_of_requests_before_the_pause_do_not_change_it() -> None:
    pool = _pool()
    leases = [_lease(pool, 0) for _ in range(10)]
    for lease in leases:
        pool.settle(lease, UNAVAILABLE, 5)
    assert pool.next_deadline(5) == 5 + FIRST_PAUSE_S
    late = _pool()
    first, second = _lease(late, 0), _lease(late, 0)
    late.settle(first, UNAVAILABLE, 5)
    assert late.settle(second, DONE, 5.5) is Change.NONE
    assert late.lease(5.5) is None


def test_retry_after_is_honoured_and_bounded() -> None:
    pool = _pool(max_retry_after_s=100)
    pool.settle(_lease(pool, 0), Outcome(Verdict.UNAVAILABLE, "429", 429, 40.0), 0)
    assert pool.next_deadline(0) == 40
    pool.settle(_lease(pool, 40), Outcome(Verdict.UNAVAILABLE, "429", 429, 1e9), 40)
    assert pool.next_deadline(40) == 140
    pool.settle(_lease(pool, 140), Outcome(Verdict.UNAVAILABLE, "429", 429, 0.0), 140)
    assert pool.next_deadline(140) == 140 + FIRST_PAUSE_S


def test_others_go_on_while_one_waits() -> None:
    pool = _pool(2)
    pool.settle(_lease(pool, 0), Outcome(Verdict.UNAVAILABLE, "429", 429, 300.0), 0)
    assert [_lease(pool, 1).receiver.index for _ in range(4)] == [1, 1, 1, 1]
    assert pool.room(1) is None


def test_hostpool_leaves_out_a_receiver_after_one_failure() -> None:
    pool = _pool(2)
    pool.settle(_lease(pool, 0), FAILED, 0)
    assert [_lease(pool, 29).receiver.index for _ in range(3)] == [1, 1, 1]
    assert 0 in [_lease(pool, 30).receiver.index for _ in range(2)]


def test_round_robin_keeps_a_receiver_that_failed_once() -> None:
    pool = _pool(2, Mode.ROUND_ROBIN)
    pool.settle(_lease(pool, 0), FAILED, 0)
    assert [_lease(pool, 1).receiver.index for _ in range(4)] == [1, 0, 1, 0]


def test_a_lease_of_certain_receivers() -> None:
    pool = _pool(3, None)
    lease = pool.lease(0, {2})
    assert lease is not None
    assert lease.receiver.index == 2
    pool.settle(lease, UNAVAILABLE, 0)
    assert pool.lease(0, {2}) is None
    assert pool.next_deadline(0, {2}) == FIRST_PAUSE_S
    assert pool.lease(0, {0}) is not None
    assert pool.room(0) == 0  # a message needs all of them
