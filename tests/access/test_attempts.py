"""Failed logins: delayed by address, counted, and forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.access.attempts import (
    FIRST_DELAY_S,
    FORGET_S,
    MAX_ADDRESSES,
    MAX_DELAY_S,
    MAX_DELAYED,
    FailedAttempts,
)


def test_each_failure_doubles_the_delay_up_to_a_limit() -> None:
    attempts = FailedAttempts()
    delays = [attempts.record_failure("10.0.0.1", 0.0) for _ in range(100)]
    assert delays[:4] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, 8 * FIRST_DELAY_S]
    assert delays[-1] == max(delays) == MAX_DELAY_S
    assert attempts.total == 100


def test_other_addresses_are_not_delayed() -> None:
    attempts = FailedAttempts()
    for _ in range(10):
        attempts.record_failure("10.0.0.1", 0.0)
    assert attempts.record_failure("10.0.0.2", 0.0) == FIRST_DELAY_S


def test_a_minute_without_a_failure_is_enough() -> None:
    attempts = FailedAttempts()
    for _ in range(10):
        attempts.record_failure("a", 0.0)
    assert attempts.record_failure("a", FORGET_S) == MAX_DELAY_S
    assert attempts.record_failure("a", 2 * FORGET_S + 0.001) == FIRST_DELAY_S


def test_an_ipv6_client_has_one_network() -> None:
    attempts = FailedAttempts()
    delays = [attempts.record_failure(f"2001:db8::{number:x}", 0.0) for number in range(3)]
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert attempts.record_failure("2001:db8:0:1::1", 0.0) == FIRST_DELAY_S
    assert attempts.record_failure("::ffff:10.0.0.1", 0.0) == FIRST_DELAY_S
    assert attempts.record_failure("10.0.0.1", 0.0) == 2 * FIRST_DELAY_S
    assert attempts.record_failure("::ffff:10.0.0.2", 0.0) == FIRST_DELAY_S


def test_memory_is_bounded() -> None:
    attempts = FailedAttempts()
    for number in range(MAX_ADDRESSES + 100):
        attempts.record_failure(str(number), 0.0)
    assert len(attempts) == MAX_ADDRESSES
    # Ten seconds later no answer is delayed any more.
    assert attempts.record_failure(str(MAX_ADDRESSES + 99), 10.0) == 2 * FIRST_DELAY_S  # the last are kept
    assert attempts.record_failure("0", 10.0) == FIRST_DELAY_S


@given(st.text(max_size=20), st.floats(0, 1e9), st.sampled_from(["tcp", "http"]))
def test_any_address_is_counted(host: str, now_s: float, protocol: str) -> None:
    attempts = FailedAttempts()
    assert attempts.record_failure(host, now_s, protocol) == FIRST_DELAY_S  # type: ignore[arg-type]
    assert attempts.record_failure(host, now_s, protocol) == 2 * FIRST_DELAY_S  # type: ignore[arg-type]
    assert attempts.totals[protocol, "token"] == attempts.total == 2  # type: ignore[index]


def test_the_number_of_delayed_answers_is_bounded() -> None:
    failures = FailedAttempts()
    delays = [
        failures.record_failure(f"10.0.{number >> 8}.{number & 255}", 0.0)
        for number in range(MAX_DELAYED + 5)
    ]
    assert all(delays[:MAX_DELAYED])
    assert not any(delays[MAX_DELAYED:])
    assert failures.record_failure("10.9.9.9", 0.2) > 0  # the first ones are answered by then
