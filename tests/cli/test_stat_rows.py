"""Tests for the rows of `qcli stat`: rates, sums, filters, order, and layout; without a broker."""

from collections.abc import Iterable
from typing import Any

import click
import pytest

from qcli.commands.stat.columns import AGE, COLUMNS, COUNTS, column_named
from qcli.commands.stat.layout import lay_out, plain, with_topics
from qcli.commands.stat.rows import Report, Row, Sample, Sampler, combine, total
from qcli.commands.stat.selection import (
    Order,
    Selection,
    condition,
    pattern,
    typed_tests,
    with_parts,
)


def channel(name: str, messages: int = 0, **counts: Any) -> dict[str, Any]:
    zeros = {column.key: 0 for column in COUNTS} | {"depth": 0}
    return {"channel_name": name, "paused": False} | zeros | {"message_count": messages} | counts


def topic_stats(name: str, *channels: dict[str, Any], messages: int = 0) -> dict[str, Any]:
    counts = {"depth": 0, "backend_depth": 0, "message_count": messages}
    return {"topic_name": name, "paused": False, "channels": list(channels)} | counts


def report(*topics: dict[str, Any]) -> Report:
    """Return a report of one broker, `a`."""
    return combine({"a": Sampler().rows(topics, 1.0)})


def names(rows: Iterable[Row]) -> list[str]:
    return [row.name for row in rows]


# ---------------------------------------------------------------------- rates


def test_rows_are_sorted() -> None:
    topics = [topic_stats("b", channel("y"), channel("x")), topic_stats("a")]
    assert names(Sampler().rows(topics, 1.0)) == ["a", "b", "b/x", "b/y"]


def test_rates_use_the_real_time() -> None:
    sampler = Sampler()
    _, first = sampler.rows([topic_stats("t", channel("c", 100, depth=100))], 10.0)
    assert (first.values["ingress_rate"], first.values["egress_rate"]) == (None, None)
    topic, second = sampler.rows([topic_stats("t", channel("c", 200, depth=50), messages=300)], 14.0)
    assert (second.values["ingress_rate"], second.values["egress_rate"]) == (25.0, 37.5)
    assert (topic.values["ingress_rate"], topic.values["egress_rate"]) == (75.0, None)


def test_requeued_message_does_not_count_as_consumed() -> None:
    sampler = Sampler()
    sampler.rows([topic_stats("t", channel("c", 10, in_flight_count=10))], 0.5)
    _, row = sampler.rows([topic_stats("t", channel("c", 10, depth=4, deferred_count=5))], 1.5)
    assert row.values["egress_rate"] == 1.0


def test_decreasing_counts_give_no_rate() -> None:
    sampler = Sampler()
    sampler.rows([topic_stats("t", messages=10)], 1.0)
    (row,) = sampler.rows([topic_stats("t", messages=3)], 2.0)
    assert row.values["ingress_rate"] is None


# ---------------------------------------------------------------------- several brokers


def test_broker_that_comes_back_does_not_distort_the_rate() -> None:
    """Rates are of each broker, so that a sum over more brokers than before is no burst of messages."""
    here, there = Sampler(), Sampler()
    there.rows([topic_stats("t", messages=1_000_000)], 0.0)
    here.rows([topic_stats("t", messages=0)], 0.0)
    alone = combine({"here": here.rows([topic_stats("t", messages=10)], 1.0)})
    both = combine(
        {
            "here": here.rows([topic_stats("t", messages=20)], 2.0),
            "there": there.rows([topic_stats("t", messages=1_000_040)], 2.0),
        }
    )
    assert [each.sums[0].values["ingress_rate"] for each in (alone, both)] == [10.0, 30.0]


def test_numbers_are_added_up_and_the_highest_age_counts() -> None:
    here = topic_stats("t", channel("c", 5, depth=2, oldest_message_age_ms=900))
    there = topic_stats("t", channel("c", 7, depth=3, oldest_message_age_ms=None) | {"paused": True})
    third = topic_stats("t", channel("c", 1, oldest_message_age_ms=1500, expired_count=4))
    found = combine(
        {name: Sampler().rows([each], 1.0) for name, each in zip("abc", (here, there, third), strict=True)}
    )
    topic, row = found.sums
    values = row.values
    assert (values["depth"], values["message_count"], values[AGE.key], values["expired_count"]) == (
        5,
        13,
        1500,
        4,
    )
    assert (topic.paused, row.paused, row.broker) == (False, True, None)
    assert [(part.broker, part.values["depth"]) for part in found.parts["t/c"]] == [
        ("a", 2),
        ("b", 3),
        ("c", 0),
    ]
    assert [row.broker for row in with_parts([row], found)] == [None, "a", "b", "c"]


def test_total_counts_published_messages_once() -> None:
    topics = [
        topic_stats("t", channel("a", 10, depth=4, client_count=1), channel("b", 10, depth=6), messages=12),
        topic_stats("u", messages=3) | {"depth": 3},
    ]
    rows = report(*topics).sums
    values = total(rows).values
    assert (values["depth"], values["message_count"], values["client_count"]) == (13, 15, 1)
    assert values["total_depth"] == 13
    channels = [row for row in rows if row.channel is not None]
    assert (total(channels).values["message_count"], total(channels).values["total_depth"]) == (10, 10)
    assert total([]).values["depth"] is None


def test_depth_of_a_topic_includes_that_of_its_channels() -> None:
    here = topic_stats("t", channel("a", depth=4), channel("b", depth=6)) | {"depth": 2}
    there = topic_stats("t", channel("a", depth=1))
    found = combine({name: Sampler().rows([each], 1.0) for name, each in (("a", here), ("b", there))})
    assert [(row.name, row.values["depth"], row.values["total_depth"]) for row in found.sums] == [
        ("t", 2, 13),
        ("t/a", 5, 5),
        ("t/b", 6, 6),
    ]
    assert [part.values["total_depth"] for part in found.parts["t"]] == [12, 1]
    assert [line.split()[1] for line in table_of(list(found.sums[:1]), 100)[1:]] == ["13"]


# ---------------------------------------------------------------------- selection


CLICKS = (
    topic_stats("clicks", channel("archive", depth=5), channel("mail", client_count=2)),
    topic_stats("clicks.old", channel("archive", depth=9)),
    topic_stats("orders", channel("archive") | {"paused": True}, channel("arch-2")),
)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["clicks"], "clicks clicks/archive clicks/mail"),
        (["clicks/mail"], "clicks/mail"),
        (["click*/archive"], "clicks/archive clicks.old/archive"),
        (["*/arch?2", "clicks/mail"], "clicks/mail orders/arch-2"),
        (["[co]*/mail"], "clicks/mail"),
        (["orders/arch*"], "orders/arch-2 orders/archive"),
    ],
)
def test_patterns(patterns: list[str], found: str) -> None:
    selection = Selection(tuple(map(pattern, patterns)))
    assert names(selection.rows(report(*CLICKS))) == found.split()


@pytest.mark.parametrize("text", ["", "/a", "a/", "*/", "/*", "a*/b/c", "a b", "clicks/a/b"])
def test_invalid_patterns(text: str) -> None:
    with pytest.raises(click.BadParameter):
        pattern(text)


def test_patterns_without_a_match_are_known() -> None:
    selection = Selection((pattern("clicks"), pattern("no*"), pattern("orders/mail")))
    missing = selection.missing(report(*CLICKS))
    assert list(map(str, missing)) == ["no*", "orders/mail"]
    assert [each.exact for each in missing] == [None, ("orders", "mail")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("depth>0", "clicks clicks/archive clicks.old clicks.old/archive"),
        ("depth>=9", "clicks.old clicks.old/archive"),
        ("depth > 5", "clicks.old clicks.old/archive"),
        ("clients=0", "clicks/archive clicks.old/archive orders/arch-2 orders/archive"),
        ("client_count!=0", "clicks/mail"),
        ("in-flight<1", "clicks/archive clicks/mail clicks.old/archive orders/arch-2 orders/archive"),
        (
            "depth<=0.5k",
            "clicks clicks/archive clicks/mail clicks.old clicks.old/archive orders orders/arch-2 orders/archive",
        ),
        ("paused", "orders/archive"),
        ("unavailable", ""),
        ("age>1s", ""),
    ],
)
def test_conditions(text: str, found: str) -> None:
    selection = Selection(tests=(condition(text),))
    assert names(selection.rows(report(*CLICKS))) == found.split()


def test_condition_on_the_age() -> None:
    topic = topic_stats(
        "t", channel("old", oldest_message_age_ms=400_000), channel("new", oldest_message_age_ms=0)
    )
    assert names(Selection(tests=(condition("age>5m"),)).rows(report(topic))) == ["t/old"]


@pytest.mark.parametrize(
    "text", ["depth", "depth>", "depth>x", "age>5", "size>1", ">1", "depth=>1", "paused=1"]
)
def test_invalid_conditions(text: str) -> None:
    with pytest.raises(click.BadParameter):
        condition(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ARCH", "clicks/archive clicks.old/archive orders/arch-2 orders/archive"),
        ("click* depth>5", "clicks.old clicks.old/archive"),
        ("old arch", "clicks.old/archive"),
        ("mail depth>", "clicks/mail"),
        ("*/mail", "clicks/mail"),
    ],
)
def test_typed_filter(text: str, found: str) -> None:
    assert names(Selection(tests=tuple(typed_tests(text))).rows(report(*CLICKS))) == found.split()


@pytest.mark.parametrize(
    ("column", "reverse", "found"),
    [
        (None, False, "c c/a c/m old old/a o o/2 o/a"),
        (None, True, "o o/a o/2 old old/a c c/m c/a"),
        ("depth", False, "old old/a c c/a c/m o o/2 o/a"),
        ("depth", True, "c c/m c/a o o/2 o/a old old/a"),
        ("clients", False, "c c/m c/a old old/a o o/2 o/a"),
        ("age", False, "c c/a c/m old old/a o o/2 o/a"),
    ],
)
def test_order(column: str | None, reverse: bool, found: str) -> None:
    order = Order(column_named(column) if column else None, reverse)
    short = {"clicks": "c", "clicks.old": "old", "orders": "o", "archive": "a", "mail": "m", "arch-2": "2"}
    rows = Selection(order=order).rows(report(*CLICKS))
    assert ["/".join(short[part] for part in row.name.split("/")) for row in rows] == found.split()


# ---------------------------------------------------------------------- layout


def table_of(rows: list[Row], width: int) -> list[str]:
    items = with_topics(rows)
    layout = lay_out(items, total(rows), width, unicode=True)
    return [layout.heading(), *map(layout.line, items)]


SHORT = {column.short_heading for column in COLUMNS}


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("name", ["t", "orders.eu-west.created", "x" * 64])
def test_numbers_stay_and_names_are_cut(name: str, paused: bool) -> None:
    """At every width the table has names and depth and only whole columns; a wider screen has more of both."""
    stats = topic_stats(
        name, channel("archive", 1_234_567, depth=12_345, in_flight_count=2500) | {"paused": paused}
    )
    rows = Sampler().rows([stats], 1.0)
    columns_before = names_before = 0
    for width in range(20, 240):
        heading, topic, text = lines = table_of(rows, width)
        assert max(map(len, lines)) <= width
        headings = heading.split()[1:]
        assert "depth" in headings
        assert (text.endswith(("P", "paused"))) is paused
        if width >= 80:
            assert [
                row for row in SHORT - {"exp", "drop", "dead", "g-up"} if row in headings
            ] or "messages" in headings
            assert len(headings) >= 11
            assert "…" not in text
        shown = len(topic.split()[0])
        assert len(headings) >= columns_before or "in flight" in heading
        columns_before, names_before = len(headings), max(names_before, shown)
    assert "12,345" in text
    assert topic.split()[0] == name


def test_forty_topics_fit_on_80_columns() -> None:
    names = [f"payments.authorization-attempts.region-{number}.created" for number in range(40)]
    busy = channel("metrics-aggregation", 123_456_789, depth=9_999_999, backend_depth=987_654, in_flight_count=2500,
                   deferred_count=77_000, requeue_count=1_000_000, timeout_count=12_345, client_count=120,
                   oldest_message_age_ms=86_400_000 * 9)  # fmt: skip
    rows = Sampler().rows([topic_stats(name, busy, messages=123_456_789) for name in names], 1.0)
    heading, *lines = table_of(rows, 80)
    assert heading.split() == [
        "topic/channel",
        "depth",
        "be",
        "inflt",
        "def",
        "req",
        "t-o",
        "msgs",
        "cl",
        "in/s",
        "out/s",
        "age",
    ]
    assert len({line for line in lines if not line.startswith(" ")}) == 40  # the ends, which differ, stay
    assert lines[1].split() == [
        "metrics-aggregation",
        "9.9M",
        "987k",
        "2500",
        "77k",
        "1.0M",
        "12k",
        "123M",
        "120",
        "9d",
    ]
    assert max(map(len, [heading, *lines])) <= 80


def test_columns_are_left_out_by_importance() -> None:
    rows = Sampler().rows([topic_stats("t", channel("c"))], 1.0)
    assert table_of(rows, 60)[0].split()[1:] == [
        "depth",
        "inflt",
        "def",
        "req",
        "msgs",
        "cl",
        "in/s",
        "out/s",
        "age",
    ]
    assert table_of(rows, 40)[0].split()[1:] == ["depth", "inflt", "in/s", "out/s", "age"]
    assert table_of(rows, 20)[0].split()[1:] == ["depth"]


def test_channel_without_its_topic_is_below_its_name() -> None:
    rows = [row for row in report(*CLICKS[:2]).sums if row.channel == "archive"]
    starts = [line.split("  ") for line in table_of(rows, 100)[1:]]
    assert [line[0] or line[1].strip() for line in starts] == ["clicks", "archive", "clicks.old", "archive"]


def test_plain_table_has_topic_and_channel_in_each_line() -> None:
    found = report(*CLICKS[:1])
    heading, *lines = plain(found.sums, total(found.sums)).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["clicks", "5"],
        ["clicks", "archive"],
        ["clicks", "mail"],
        ["total", "5"],
    ]
    heading, *lines = plain(with_parts(found.sums, found), None).splitlines()
    assert heading.split()[:4] == ["topic", "channel", "broker", "depth"]
    assert lines[3].split()[:4] == ["clicks", "archive", "a", "5"]


def test_topic_named_total_is_not_the_total() -> None:
    found = report(topic_stats("total", messages=7))
    assert [row.name for row in (*found.sums, total(found.sums))] == ["total", "total"]
    assert found.sums[0].record(1.0)["topic"] == "total"


@pytest.mark.parametrize(
    ("archive", "note"),
    [
        ({"state": "archiving", "error": "", "lag_s": 0.8}, "archived"),
        ({"state": "archiving", "error": "", "lag_s": 65.0}, "archive 1m behind"),
        ({"state": "archiving", "error": "no route", "lag_s": 7.0}, "archive not written, 7.0s behind"),
        ({"state": "copying", "error": "", "lag_s": 7.0}, "archive: the data folder is copied"),
        ({"state": "waiting", "error": "", "lag_s": 0.0}, "archive: waiting"),
    ],
)
def test_the_note_of_an_archive(archive: Any, note: str) -> None:
    assert Sample.of([], {"archive": archive}).note == note
