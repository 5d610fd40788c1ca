"""Merging of several brokers' messages into pages, cursors, positions, and parameters."""

import itertools
import random

import pytest

from trio_nsq.console.messages.cursor import Cursor, parse_cursor
from trio_nsq.console.messages.merging import Part, merge
from trio_nsq.console.messages.message import Message, MissingMessages, Row
from trio_nsq.console.messages.query import MessageQuery, parse_query, position_of

NOW_NS = 1_700_000_000 * 10**9


def a_message(broker: str, sequence: int, time_ns: int) -> Message:
    """Return a message."""
    return Message(broker, sequence, f"{sequence:016x}", time_ns, None, b"x", 1, (sequence, sequence + 1))


Logs = dict[str, list[Message]]


def random_logs(generator: random.Random) -> Logs:
    """Return logs of some brokers; times grow, and are often equal."""
    logs: Logs = {}
    for name in "abc"[: generator.randrange(1, 4)]:
        times = sorted(generator.randrange(30) for _ in range(generator.randrange(25)))
        logs[name] = [a_message(name, 100 + number, time_ns) for number, time_ns in enumerate(times)]
    return logs


def parts_at(logs: Logs, cursor: Cursor | None, count: int, *, backwards: bool) -> dict[str, Part]:
    """Return what each broker has for a page, as reading does; sometimes less than `count`."""
    parts = {}
    for name, log in logs.items():
        first, end = 100, 100 + len(log)
        at = cursor.sequences[name] if cursor is not None else end if backwards else first
        low, high = (max(first, at - count), at) if backwards else (at, min(end, at + count))
        rows: list[Row] = [*log[low - 100 : high - 100]]
        parts[name] = Part(rows, low, high, first, end)
    return parts


@pytest.mark.parametrize("backwards", [True, False])
def test_pages_one_after_the_other_have_every_message_once_in_order_of_time(backwards: bool) -> None:
    generator = random.Random(3)
    for _ in range(300):
        logs = random_logs(generator)
        count = generator.randrange(1, 8)
        found: list[Row] = []
        cursor: Cursor | None = None
        for _ in range(100):
            parts = parts_at(logs, cursor, count, backwards=backwards)
            page = merge(parts, count, backwards=backwards, before=cursor)
            found += page.rows
            cursor = page.older if backwards else page.newer
            if not page.rows or cursor is None:
                break
        everything = list(itertools.chain.from_iterable(logs.values()))
        assert len(found) == len(everything)
        assert {(row.broker, row.first_sequence) for row in found} == {
            (m.broker, m.sequence) for m in everything
        }
        times = [row.timestamp_ns for row in found if isinstance(row, Message)]
        assert times == sorted(times, reverse=backwards)


def test_the_page_back_has_the_messages_before() -> None:
    logs = {
        "a": [a_message("a", 100 + n, n * 2) for n in range(20)],
        "b": [a_message("b", 100 + n, n) for n in range(40)],
    }
    first = merge(parts_at(logs, None, 10, backwards=True), 10, backwards=True, before=None)
    assert first.newer is None
    second = merge(parts_at(logs, first.older, 10, backwards=True), 10, backwards=True, before=first.older)
    assert second.newer is not None
    back = merge(parts_at(logs, second.newer, 10, backwards=False), 10, backwards=False, before=second.newer)
    assert back.rows == first.rows[::-1]


def test_a_page_ends_where_the_next_message_of_a_broker_is_unknown() -> None:
    rows: list[Row] = [a_message("a", 9, 90)]
    parts = {
        "a": Part(rows, 9, 10, 0, 10),  # large messages: it has read one only
        "b": Part([a_message("b", n, n) for n in range(5)], 0, 5, 0, 5),
    }
    page = merge(parts, 10, backwards=True, before=None)
    assert [(row.broker, row.first_sequence) for row in page.rows] == [("a", 9)]
    assert page.older is not None
    assert page.older.sequences == {"a": 9, "b": 5}


def test_missing_messages_keep_their_place_and_do_not_count() -> None:
    rows: list[Row] = [a_message("a", 0, 0), MissingMessages("a", 1, 5, "damaged"), a_message("a", 5, 5)]
    page = merge({"a": Part(rows, 0, 6, 0, 6)}, 2, backwards=True, before=None)
    assert [row.first_sequence for row in page.rows] == [5, 1, 0]
    assert page.older is None


def test_a_broker_that_stops_answering_holds_back_no_other() -> None:
    parts = {
        "a": Part([a_message("a", 9, 90)], 9, 10, 0, 10, failed=True),
        "b": Part([a_message("b", n, n) for n in range(5)], 0, 5, 0, 5),
    }
    page = merge(parts, 10, backwards=True, before=None)
    assert len(page.rows) == 6
    assert page.older is not None
    assert page.older.sequences == {"a": 9, "b": 0}


def test_a_broker_that_fails_keeps_its_place() -> None:
    before = Cursor({"a": 7, "b": 3}, 50)
    page = merge({"b": Part([a_message("b", 2, 20)], 2, 3, 0, 9)}, 1, backwards=True, before=before)
    assert page.older == Cursor({"a": 7, "b": 2}, 20)
    assert page.newer == Cursor({"a": 7, "b": 3}, 50)


def test_cursors_survive_the_address_of_a_page() -> None:
    for cursor in (
        Cursor({}),
        Cursor({"127.0.0.1:4151": 12, "[::1]:4151": 0, "/run/qcli,~@.sock": 5}, 17),
        Cursor({"https://host:4152": 2**62}),
    ):
        if str(cursor):
            assert parse_cursor(str(cursor)) == cursor
    assert Cursor({"a": 3}, 1_500_000_000).position("a") == "3"
    assert Cursor({"a": 3}, 1_500_000_000).position("b") == "@1.500000000"
    assert Cursor({"a": 3}).position("b") is None


@pytest.mark.parametrize(
    "text", ["x", "a~", "~5", "a~-5", "a~1.5", "@", "@x", "a~\u0661", "a~" + "9" * 30, "a~1," * 9000]
)
def test_broken_cursors_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="position in the page's address"):
        parse_cursor(text)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("1000", "1000"),
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("now", "latest"),
        ("@1700000000.5", "@1700000000.5"),
        ("15m", "@1699999100.000000000"),
        ("-15m", "@1699999100.000000000"),
        ("7d", "@1699395200.000000000"),
        ("2023-11-14T22:13:20", "@1700000000.000000000"),
        ("2023-11-14 22:13", "@1699999980.000000000"),
        ("2023-11-14T23:13:20.25+01:00", "@1700000000.250000000"),
    ],
)
def test_positions_as_people_type_them(text: str, position: str) -> None:
    assert position_of(text, NOW_NS) == position


@pytest.mark.parametrize("text", ["x", "-", "1.5", "@x", "9" * 25, "2023-13-01"])
def test_other_positions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is n(ot|either)"):
        position_of(text, NOW_NS)


def test_parameters_have_defaults_and_limits() -> None:
    assert parse_query({}) == MessageQuery()
    assert parse_query({}).query() == {}
    given = parse_query(
        {"q": "a&b", "kind": "regex", "order": "oldest", "count": "50", "ignore_case": "1", "after": "@5"}
    )
    assert parse_query(given.query()) == given
    assert given.query(before="@7", after="") == {
        "q": "a&b",
        "kind": "regex",
        "order": "oldest",
        "count": "50",
        "ignore_case": "1",
        "before": "@7",
    }
    for wrong in ({"count": "0"}, {"count": "101"}, {"count": "x"}, {"count": "9" * 5000}, {"kind": "x"}):
        with pytest.raises(ValueError, match="not"):
            parse_query(wrong)


def test_the_direction_of_a_page() -> None:
    assert MessageQuery().start(NOW_NS).backwards
    assert MessageQuery().start(NOW_NS).on("a") == "latest"
    oldest = MessageQuery(order="oldest").start(NOW_NS)
    assert not oldest.backwards
    assert oldest.on("a") == "earliest"
    assert not MessageQuery(after="a~5").start(NOW_NS).backwards
    assert MessageQuery(order="oldest", before="a~5").start(NOW_NS).backwards
    assert MessageQuery(before="a~5").start(NOW_NS).on("a") == "5"
    assert MessageQuery(at="7").start(NOW_NS).on("b") == "7"
