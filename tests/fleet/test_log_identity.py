"""Tests for the identity of logs: whether a log at an address is the one that was read before, or a copy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from broker.state import records
from trio_nsq.client.reading.broker_log import Bounds
from trio_nsq.client.reading.log_stream import Found
from trio_nsq.fleet.log_identity import (
    CopyDiffers,
    FoundAt,
    LogMark,
    common_span,
    known_as,
    last_common,
    last_readable,
    missing_at,
)
from trio_nsq.log.gaps import Span

ONE, OTHER = "1" * 32, "2" * 32


@dataclass
class Log:
    """A log whose messages have ids."""

    ids: str
    first: int = 0
    asked: list[int] = field(default_factory=list)

    def bounds(self, incarnation: str | None = ONE) -> Bounds:
        return Bounds(self.first, len(self.ids), 0, 0, None, incarnation)

    def id_at(self, sequence: int) -> str | None:
        self.asked.append(sequence)
        return self.ids[sequence]


def at(address: str, log: Log, incarnation: str | None = ONE) -> FoundAt:
    return FoundAt(address, log, log.bounds(incarnation))


@pytest.mark.parametrize(
    ("found", "other", "missing"),
    [
        (Log("abcd"), Log("abcd"), 0),
        (Log("abcd"), Log("abc"), 1),
        (Log("abc"), Log("abcd"), 0),
        (Log("abcd"), Log(""), 4),
        (Log("abcd", 3), Log("xyz"), 1),  # no message is in both: nothing tells that they differ
    ],
)
def test_one_log_at_two_addresses(found: Log, other: Log, missing: int) -> None:
    assert missing_at(at("there", other), at("here", found)) == missing


def test_log_of_another_incarnation_is_not_there() -> None:
    assert missing_at(at("there", Log("abc"), OTHER), at("here", Log("abcd"))) is None
    assert missing_at(at("there", Log("abc"), None), at("here", Log("abcd"))) == 1


def test_copies_that_have_got_messages_since() -> None:
    with pytest.raises(CopyDiffers, match="the log at here is a copy of the one at there"):
        missing_at(at("there", Log("abX")), at("here", Log("abc")))


class Files(Log):
    """A log in files of two messages. A message with the id `-` is damaged."""

    def starts(self) -> Sequence[int]:
        return range(self.first, len(self.ids), 2)

    def read(self, span: Span) -> Iterator[Found]:
        for at in range(*span):
            if self.ids[at] != "-":
                yield records([b"m"], base=at, first_id=ord(self.ids[at]) + at)

    def id_at(self, sequence: int) -> str | None:
        return None if self.ids[sequence] == "-" else self.ids[sequence]


@pytest.mark.parametrize(
    ("one", "other", "last"),
    [
        ("abcdef", "abcdef", (5, True)),
        ("abcdeX", "abcdef", (5, False)),
        ("abcde-", "abcdef", (4, True)),
        ("abcdX-", "abcdef", (4, False)),
        ("abcde-", "abcd-f", (3, True)),  # the last file has no message that both can read
        ("abcX--", "abcdef", (3, False)),
        ("a-----", "-bcdef", None),
    ],
)
def test_last_message_that_two_logs_can_read(one: str, other: str, last: tuple[int, bool] | None) -> None:
    for first, second in ((Files(one), Files(other)), (Files(other), Files(one))):
        span = Span(0, 6)
        assert (last_common(first, second, span) or last_readable(first, second, span)) == last


def test_messages_before_the_common_ones_are_not_compared() -> None:
    assert last_readable(Files("aX----"), Files("ab--ef"), Span(2, 6)) is None
    assert common_span(Log("abc").bounds(), Log("abcdef", 2).bounds()) == Span(2, 3)
    assert common_span(Log("abc").bounds(), Log("abcdef", 3).bounds()) is None


@pytest.mark.parametrize("address", ["x", "y", "z"])
def test_log_of_several_names_continues_with_the_one_that_has_most(address: str) -> None:
    """Older versions gave a log one name for each address."""
    log, marks = Log("abcd"), {"x": LogMark(ONE, 2), "y": LogMark(ONE, 3), "z": LogMark(OTHER, 4)}
    assert known_as(log, log.bounds(), address, marks) == "y"
    marks["x"] = LogMark(ONE, 3)
    assert known_as(log, log.bounds(), address, marks) == ("y" if address == "y" else "x")


@pytest.mark.parametrize(
    ("incarnation", "ids", "name"),
    [
        (ONE, "abc", "a:1"),  # by the incarnation, wherever it is
        (ONE, "xyz", "a:1"),
        (None, "abc", "b:2"),  # by the address
        (None, "abX", None),  # another log has the address as its name
        (OTHER, "abc", None),
    ],
)
def test_name_of_a_known_log(incarnation: str | None, ids: str, name: str | None) -> None:
    marks = {"a:1": LogMark(ONE, 3), "b:2": LogMark(None, 3, (2, "c"))}
    if incarnation == OTHER:
        marks["b:2"] = LogMark(ONE, 3, (2, "c"))
    log = Log(ids)
    assert known_as(log, log.bounds(incarnation), "b:2", marks) == name
