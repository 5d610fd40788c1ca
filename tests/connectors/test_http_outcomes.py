"""Verdicts, Retry-After and delays."""

import pytest

from trio_nsq.connectors.to_http.outcomes import RetryDelays, StatusRules, Verdict, retry_after_s


@pytest.mark.parametrize(
    ("verdict", "statuses"),
    [
        (Verdict.DONE, (200, 201, 202, 204, 299)),
        (Verdict.FINAL, (199, 300, 302, 304, 400, 401, 404, 409, 410, 413, 422, 501, 505)),
        (Verdict.FAILED, (408, 425, 500, 502, 504, 507, 599)),
        (Verdict.UNAVAILABLE, (429, 503)),
    ],
)
def test_default_verdicts(verdict: Verdict, statuses: tuple[int, ...]) -> None:
    assert {status: StatusRules().verdict(status) for status in statuses} == dict.fromkeys(statuses, verdict)


def test_other_rules() -> None:
    rules = StatusRules(retried={401, 501}, final={503, 500})
    assert rules.verdict(401) is rules.verdict(501) is Verdict.FAILED
    assert rules.verdict(503) is rules.verdict(500) is Verdict.FINAL
    assert rules.verdict(200) is Verdict.DONE


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("0", 0),
        (" 120 ", 120),
        ("Mon, 23 Nov 2026 00:00:30 GMT", 30),
        ("Sun, 22 Nov 2026 23:00:00 GMT", 0),
        ("Mon Nov 23 00:00:30 2026", 30),
        ("soon", None),
        ("-1", None),
        ("1.5", None),
        ("", None),
        ("99999999999999999999", None),
        ("Mon, 99 Nov 2026 00:00:30 GMT", None),
    ],
)
def test_retry_after(value: str, wait_s: float | None) -> None:
    assert retry_after_s(value, 1795392000.0) == wait_s


def test_delays_double_up_to_the_longest_one() -> None:
    delays = RetryDelays(first_s=1, max_s=300)
    assert [delays.delay_ms(attempts, lambda: 0.0) for attempts in (1, 2, 3, 9, 10, 65535)] == [
        1000, 2000, 4000, 256_000, 300_000, 300_000,
    ]  # fmt: skip
    assert delays.delay_ms(3, lambda: 1.0) == 2000
    assert RetryDelays(first_s=0.001, max_s=0.001).delay_ms(1, lambda: 0.99) == 1
