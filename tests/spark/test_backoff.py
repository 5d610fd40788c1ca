"""When an export that fails is tried again. No IO."""

import itertools

from trio_nsq.spark.export.backoff import MAX_BACKOFF_S, Backoff


def attempts(every_s: float, rounds: int) -> list[int]:
    """Return the rounds in which a topic is tried that fails always."""
    backoff = Backoff(every_s)
    found = []
    for number in range(rounds):
        if backoff.is_due("t", number * every_s):
            found.append(number)
            backoff.failed("t", number * every_s)
    return found


def test_the_pause_doubles() -> None:
    assert attempts(10.0, 40) == [0, 1, 3, 6, 11, 20, 37]


def test_the_pause_has_a_limit() -> None:
    found = attempts(60.0, 100)
    assert max(after - before for before, after in itertools.pairwise(found)) == MAX_BACKOFF_S / 60
    assert len(attempts(3600.0, 5)) == 5


def test_success_ends_it() -> None:
    backoff = Backoff(10.0)
    for now_s in (0.0, 10.0, 30.0):
        backoff.failed("t", now_s)
    assert (backoff.is_due("t", 40.0), backoff.is_due("u", 40.0)) == (False, True)
    backoff.succeeded("t")
    assert backoff.is_due("t", 40.0)
    backoff.failed("t", 40.0)
    assert backoff.is_due("t", 50.0)
