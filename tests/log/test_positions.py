"""Tests for positions in a log, as in HTTP requests."""

from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.support import batch
from trio_nsq.log import MemoryLog
from trio_nsq.log.positions import (
    EARLIEST,
    LATEST,
    Position,
    parse_position,
    parse_typed_position,
    sequence_of,
)
from trio_nsq.text.durations import parse_duration_ns

SECOND = 10**9
NOW = 1_700_000_000 * SECOND


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("0", Position("sequence", 0)),
        ("12345678901234567890", Position("sequence", 12345678901234567890)),
        ("earliest", EARLIEST),
        ("latest", LATEST),
        ("-1h", Position("time", NOW - 3600 * SECOND)),
        ("-1m1.5s", Position("time", NOW - 61 * SECOND - SECOND // 2)),
        ("-0", Position("time", NOW)),
        ("-500000h", Position("time", 0)),
        ("@0", Position("time", 0)),
        ("@1700000000", Position("time", NOW)),
        ("@1700000000.000000001", Position("time", NOW + 1)),
        ("@1700000000.5", Position("time", NOW + SECOND // 2)),
        ("@2023-11-14T22:13:20Z", Position("time", NOW)),
        ("@2023-11-14T22:13:20.000001Z", Position("time", NOW + 1000)),
        ("@2023-11-15T00:13:20+02:00", Position("time", NOW)),
        ("@2023-11-15T00:13:20 02:00", Position("time", NOW)),  # a plus sign that was not encoded
        ("@1969-01-01T00:00:00Z", Position("time", 0)),
    ],
)
def test_valid_positions(text: str, position: Position) -> None:
    assert parse_position(text, NOW) == position
    assert sequence_of(text) == (position.value if position.kind == "sequence" else None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "'' is not a sequence"),
        ("-", "'' is not a duration"),
        ("@", "'' is neither Unix seconds"),
        ("-1", "'1' is not a duration"),
        ("-1d", "'1d' is not a duration"),
        ("1h", "'1h' is not a sequence"),
        ("Earliest", "is not a sequence"),
        ("٣", "is not a sequence"),
        ("1" * 21, "is not a sequence"),
        ("@1e3", "is neither Unix seconds"),
        ("@1.", "is neither Unix seconds"),
        ("@1.1234567890", "is neither Unix seconds"),
        ("@-5", "is neither Unix seconds"),
        ("@2023-11-14T22:13:20", "has no UTC offset"),
        ("@noon", "is neither Unix seconds"),
    ],
)
def test_invalid_positions(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_position(text, NOW)
    assert sequence_of(text) is None


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("0s", 0),
        ("1ns", 1),
        ("500ms", SECOND // 2),
        ("1h2m3s4ms5us6ns", 3_723_004_005_006),
        (".5s", SECOND // 2),
        ("1.s", SECOND),
        ("1.5µs", 1500),
        ("2m2m", 240 * SECOND),
    ],
)
def test_durations_are_parsed_as_in_go(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize("text", ["", "1", "s", ".s", "1 s", "-1s", "1S", "1s ", "1d"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_ns(text)


@given(st.text())
def test_no_other_exception_is_raised(text: str) -> None:
    for start in ("", "-", "@"):
        try:
            parse_position(start + text, NOW)
        except ValueError:
            pass


@pytest.mark.parametrize(
    ("text", "sequence"),
    [
        ("0", 5),
        ("5", 5),
        ("6", 6),
        ("9", 9),
        ("100", 9),
        ("earliest", 5),
        ("latest", 9),
        ("@0", 5),
        ("-0", 9),
    ],
)
def test_position_in_a_log(text: str, sequence: int) -> None:
    log = MemoryLog(first_sequence=5)
    for number in range(5, 9):
        log.append([batch(number, b"x")], sync=False)
    assert parse_position(text, 1_800_000_000 * SECOND).sequence_in(log) == sequence


def test_time_in_a_log() -> None:
    log = MemoryLog()
    for number in range(4):
        log.append([batch(number, b"x")], sync=False)  # message times are sequences, in nanoseconds after NOW
    assert [Position("time", NOW + offset).sequence_in(log) for offset in range(-1, 5)] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", Position("sequence", 7)),
        ("now", LATEST),
        ("earliest", EARLIEST),
        ("15m", Position("ago", 900 * SECOND)),
        ("-7d", Position("ago", 7 * 86_400 * SECOND)),
        ("@1.5", Position("time", 3 * SECOND // 2)),
        ("1970-01-01T00:00:01.123456789", Position("time", SECOND + 123_456_789)),
        ("1970-01-01T01:00:01+01:00", Position("time", SECOND)),
        ("1969-01-01", Position("time", 0)),
    ],
)
def test_typed_positions(text: str, expected: Position) -> None:
    found = parse_typed_position(text, UTC)
    assert found == expected
    assert parse_position(str(found), NOW) == found.at(NOW)


def test_typed_nonsense() -> None:
    for text in ("", "-", "@", "x", "1.5", "2026-13-01", "9" * 21):
        with pytest.raises(ValueError, match=r"not a duration|no unit"):
            parse_typed_position(text)
