"""Tests for short figures and bars."""

import pytest

from qcli.terminal import figures


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (999, "999"), (9999, "9999"), (10_000, "10k"), (999_999, "999k"), (1_000_000, "1.0M"),
        (1_290_000, "1.2M"), (99_999_999, "99M"), (5_000_000_000, "5.0G"), (7 * 10**13, "70T"),
    ],
)  # fmt: skip
def test_short_counts(number: int, text: str) -> None:
    assert figures.short_count(number) == text


@pytest.mark.parametrize(
    ("per_second", "text"), [(0, "0"), (0.5, "0.5"), (9.9, "9.9"), (10.4, "10"), (12_345.6, "12k")]
)
def test_short_rates(per_second: float, text: str) -> None:
    assert figures.short_rate(per_second) == text


@pytest.mark.parametrize(
    ("age_ms", "short", "long"),
    [
        (0, "0", "0"),
        (40, "0.0s", "0.0s"),
        (999, "0.9s", "0.9s"),
        (59_999, "59s", "59s"),
        (192_000, "3m", "3m12s"),
        (14_700_000, "4h", "4h05m"),
        (90_000_000, "1d", "1d01h"),
        (400 * 86_400_000, "400d", "400d00h"),
        (4000 * 86_400_000, "10y", "4000d00h"),
    ],
)
def test_ages(age_ms: int, short: str, long: str) -> None:
    assert figures.short_age(age_ms) == short
    assert figures.age(age_ms) == long


@pytest.mark.parametrize(
    "number", [10**power * digit for power in range(17) for digit in (1, 5, 9.994, 9.999)]
)
def test_nothing_short_is_longer_than_four_characters(number: float) -> None:
    assert len(figures.short_count(number)) <= 4
    assert len(figures.short_rate(number / 1000)) <= 4
    if number < 10**13:
        assert len(figures.short_age(number)) <= 4


def test_bars() -> None:
    assert figures.sparkline([0, 1, 4, 8, 16], 5) == "▁▂▃▄▇"
    assert figures.sparkline([None, 0, 0], 5) == "   ▁▁"
    assert figures.sparkline([9, 1, 2], 2) == "▄▇"
    assert figures.sparkline([1, 2], 0) == ""
    assert figures.sparkline([0, 4, 8], 3, unicode=False).isascii()


def test_names_are_cut_in_the_middle() -> None:
    assert figures.shortened("orders.created.v2", 9) == "orde…d.v2"
    assert figures.shortened("orders.created.v2", 9, unicode=False) == "orde~d.v2"
    assert [figures.shortened("abc", width) for width in range(5)] == ["", "…", "a…", "abc", "abc"]


@pytest.mark.parametrize(
    ("env", "is_unicode"),
    [
        ({}, False),
        ({"LANG": "C.UTF-8"}, True),
        ({"LANG": "de_DE.utf8"}, True),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, True),
        ({"LANG": "de_DE.ISO-8859-1"}, False),
        ({"LANG": "en_US.UTF-8", "LC_ALL": ""}, True),
    ],
)
def test_locale_says_whether_a_terminal_shows_unicode(
    env: dict[str, str], is_unicode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert figures.speaks_unicode() is is_unicode
