"""The option `pushFilters`: a query reads only the part of the logs that its filters can leave."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict

from broker.state import damage
from interop.peers import Broker, qcli_serve
from soak import examples
from spark.support import HOUR_NS, NOON_NS, write_log
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.versions import HAS_FILTERS

pytestmark = pytest.mark.skipif(not HAS_FILTERS, reason="Spark 4.0 passes no filters to data sources")

COUNT = 30
NOON = datetime.fromtimestamp(NOON_NS // 10**9, UTC)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker whose topic t has a message each hour; message 7 is damaged."""
    folder = tmp_path_factory.mktemp("broker") / "data"
    write_log(folder, "t", [(NOON_NS + n * HOUR_NS, [b"body%03d" % n]) for n in range(COUNT)])
    damage(folder / "topics" / "t.topic", b"body007")
    with qcli_serve(folder) as running:
        yield running


def spans_read(broker: Broker, *filters: Any, **options: str) -> list[tuple[int, int]]:
    given = {"topic": "t", "nsqdHttpAddress": broker.http_address, "pushFilters": "true", **options}
    source = NsqDataSource(CaseInsensitiveDict(given))
    reader = source.reader(source.schema())
    assert list(reader.pushFilters(list(filters))) == list(filters)  # Spark filters the rows again
    return [(each.span.first, each.span.end) for each in reader.partitions()]


@pytest.mark.parametrize("year", [2262, 2263, 5138, 5139, 9998, 9999])
def test_times_that_no_message_has(broker: Broker, year: int) -> None:
    """Queries use them for no end; the broker takes times until November 5138."""
    from pyspark.sql.datasource import GreaterThan, LessThan  # Spark 4.1

    moment = datetime(year, 12, 31, tzinfo=UTC)
    assert spans_read(broker, LessThan(("ts",), moment)) == spans_read(broker)
    assert spans_read(broker, GreaterThan(("ts",), moment)) == []


def hour(number: float) -> datetime:
    return NOON + timedelta(hours=number)


def test_what_each_filter_leaves(broker: Broker) -> None:
    from pyspark.sql.datasource import (
        EqualNullSafe,
        EqualTo,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        IsNotNull,
        LessThan,
        LessThanOrEqual,
        Not,
    )

    seq, ts, ts_ns, where = ("seq",), ("ts",), ("ts_ns",), ("broker",)
    for filters, expected in (
        ([], [(0, 30)]),
        ([IsNotNull(seq), GreaterThan(seq, 9)], [(10, 30)]),
        ([GreaterThanOrEqual(seq, 10), LessThan(seq, 20)], [(10, 20)]),
        ([LessThanOrEqual(seq, 20), LessThan(seq, 25)], [(0, 21)]),
        ([EqualTo(seq, 12)], [(12, 13)]),
        ([EqualNullSafe(("SEQ",), 12)], [(12, 13)]),
        ([In(seq, (5, 12, 9))], [(5, 13)]),
        ([EqualTo(seq, 5), EqualTo(seq, 6)], []),
        ([GreaterThan(seq, 10**18)], []),
        ([GreaterThanOrEqual(seq, -5), LessThan(seq, -1)], []),
        # An hour more on each side: the clock may have been set back.
        ([GreaterThanOrEqual(ts, hour(10))], [(9, 30)]),
        ([GreaterThan(ts, hour(10))], [(10, 30)]),
        ([LessThan(ts, hour(20))], [(0, 21)]),
        ([LessThanOrEqual(ts, hour(20))], [(0, 22)]),
        ([EqualTo(ts, hour(15))], [(14, 17)]),
        ([GreaterThan(ts_ns, NOON_NS + 10 * HOUR_NS - 1)], [(9, 30)]),
        ([LessThan(ts, datetime(1969, 1, 1, tzinfo=UTC))], []),
        ([GreaterThan(ts, hour(1000))], []),
        ([EqualTo(where, broker.http_address)], [(0, 30)]),
        ([EqualTo(where, "elsewhere:4151")], []),
        ([In(("topic",), ("t", "u"))], [(0, 30)]),
        ([EqualTo(("topic",), "u")], []),
        # These restrict nothing.
        ([Not(EqualTo(seq, 5)), EqualTo(seq, None), In(seq, (1, None)), EqualTo(ts, 5)], [(0, 30)]),
        ([GreaterThan(where, "elsewhere"), EqualTo(("body",), b"x"), EqualTo(("a", "seq"), 5)], [(0, 30)]),
    ):
        assert spans_read(broker, *filters) == expected, filters


@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_restriction_never_leaves_out_a_row(broker: Broker, data: st.DataObject) -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

    compare: dict[Any, Callable[[Any, Any], bool]] = {
        GreaterThan: lambda value, bound: value > bound,
        GreaterThanOrEqual: lambda value, bound: value >= bound,
        LessThan: lambda value, bound: value < bound,
        LessThanOrEqual: lambda value, bound: value <= bound,
        EqualTo: lambda value, bound: value == bound,
    }
    rows = [{"seq": n, "ts": hour(n), "ts_ns": NOON_NS + n * HOUR_NS} for n in range(COUNT)]
    bounds = {
        "seq": st.integers(-2, COUNT + 2),
        "ts": st.integers(-2 * 3600 * 10**6, 33 * 3600 * 10**6).map(
            lambda us: NOON + timedelta(microseconds=us)
        ),
        "ts_ns": st.integers(-HOUR_NS, 31 * HOUR_NS).map(lambda ns: NOON_NS + ns),
    }
    filters: list[Any] = []
    for column in data.draw(st.lists(st.sampled_from(sorted(bounds)), max_size=4)):
        if data.draw(st.integers(0, 5)) == 0:
            values = tuple(data.draw(st.lists(bounds[column], min_size=1, max_size=3)))
            filters.append(In((column,), values))
            rows = [row for row in rows if row[column] in values]
        else:
            kind, bound = data.draw(st.sampled_from(list(compare))), data.draw(bounds[column])
            filters.append(kind((column,), bound))
            rows = [row for row in rows if compare[kind](row[column], bound)]
    read = {n for first, end in spans_read(broker, *filters) for n in range(first, end)}
    assert {row["seq"] for row in rows} <= read


def test_positions_still_hold(broker: Broker) -> None:
    from pyspark.sql.datasource import GreaterThanOrEqual

    late = {"startingOffsets": "10", "endingOffsets": "20"}
    assert spans_read(broker, GreaterThanOrEqual(("seq",), 5), **late) == [(10, 20)]
    assert spans_read(broker, GreaterThanOrEqual(("seq",), 15), **late) == [(15, 20)]


def test_is_for_batches(broker: Broker) -> None:
    source = NsqDataSource(CaseInsensitiveDict({"topic": "t", "pushFilters": "true"}))
    with pytest.raises(OptionError, match=r"pushFilters is for spark\.read only"):
        source.streamReader(source.schema())


def test_a_query_reads_only_what_its_filter_leaves(spark: SparkSession, broker: Broker) -> None:
    """Message 7 is damaged: what reads it fails."""
    source = spark.read.format("nsq").options(topic="t", nsqdHttpAddress=broker.http_address)
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        frame = source.option("pushFilters", "true").load()
        found = frame.where("seq >= 10 AND seq % 2 = 0").select("seq").orderBy("seq").collect()
        assert [row.seq for row in found] == list(range(10, COUNT, 2))
        assert frame.where(frame.ts >= hour(12)).count() == COUNT - 12
        with pytest.raises(Exception, match="messages 7 to 7"):
            frame.where("seq >= 5").count()
    finally:
        spark.conf.unset(setting)
    with pytest.raises(Exception, match="filterPushdown"):
        source.option("pushFilters", "true").load().where("seq >= 10").count()
