"""Tests for the manifest of an export."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.log.gaps import Span
from trio_nsq.spark.export.layout import (
    BodyFormat,
    JsonColumn,
    Layout,
    PartitionBy,
    partition_folder,
    partition_key,
    range_name,
    safe_name,
)
from trio_nsq.spark.export.manifest import Manifest, ManifestError, RangeResult
from trio_nsq.spark.ranges import LastMessage, covered_up_to
from trio_nsq.spark.schemas.column_types import JsonType

LAYOUT = Layout(
    PartitionBy.HOUR,
    BodyFormat.JSON,
    (JsonColumn("user", JsonType.LONG, "user", widens=True), JsonColumn("ts", JsonType.LONG, "body_ts")),
    keep_rest=True,
    keep_body=True,
)


def done(first: int, end: int, last_id: str | None = "a" * 16) -> RangeResult:
    return RangeResult("b", first, end, end - first, last_id=last_id)


def test_planned_ranges_do_not_change() -> None:
    manifest = Manifest("clicks", [Layout()])
    assert manifest.plan("b", Span(0, 100), 40) == [Span(0, 33), Span(33, 66), Span(66, 100)]
    assert manifest.plan("b", Span(0, 100), 1000) == [Span(0, 33), Span(33, 66), Span(66, 100)]
    manifest.mark_done([done(33, 66)])
    assert manifest.plan("b", Span(50, 150), 1000) == [Span(66, 100), Span(100, 150)]
    assert manifest.plan("b", Span(10, 20), 1) == [Span(0, 33)]
    assert list(manifest.ranges_of("b").done) == [Span(33, 66)]
    assert covered_up_to(33, manifest.ranges_of("b").done) == 66
    assert covered_up_to(0, manifest.ranges_of("b").done) == 0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(1, 20), st.booleans()), max_size=8)
)
def test_ranges_cover_each_sequence_once(
    runs: list[tuple[int, int, int, bool]],
) -> None:
    manifest = Manifest("clicks", [Layout()])
    wanted: set[int] = set()
    for first, length, per_range, ends_well in runs:
        span = Span(first, first + length)
        wanted |= set(range(*span))
        planned = manifest.plan("b", span, per_range)[:: 1 if ends_well else 2]
        manifest.mark_done([done(*each) for each in planned])
        manifest = Manifest.from_bytes(manifest.to_bytes())
    book = manifest.ranges_of("b")
    numbers = [number for span in [*book.done, *book.pending] for number in range(*span)]
    assert sorted(numbers) == sorted(wanted)


def test_manifest_round_trip() -> None:
    manifest = Manifest("clicks", [LAYOUT])
    manifest.plan("b", Span(0, 100), 40)
    manifest.plan("c", None, 40)
    manifest.mark_done([done(0, 33), done(66, 100, None)])
    assert manifest.ranges_of("b").last == LastMessage(32, "a" * 16)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    found = RangeResult(
        "b", 1, 5, 3, 30, ["x"], 40, [(2, 3, "damaged")], 1, 2, None, 1, {"a": 3}, {"b": "long"}
    )
    manifest.layouts.append(Layout())
    manifest.commit, manifest.uncommitted = 7, [found, done(0, 33)]
    manifest.plan("b", Span(100, 140), 40)
    assert manifest.ranges_of("b").pending == {Span(33, 66): 0, Span(100, 140): 1}
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert RangeResult.from_bytes(found.to_bytes()) == found


def test_columns_of_version_1() -> None:
    """They have no names. Without a list of columns their types were inferred."""
    found = LAYOUT.to_json() | {"json_columns": [["n", "long"], ["ts", "long"]]}
    del found["keep_body"]
    (n, ts) = Layout.from_json(found).json_columns
    assert (n, ts) == (
        JsonColumn("n", JsonType.LONG, "n", widens=True),
        JsonColumn("ts", JsonType.LONG, "body_ts", widens=True),
    )
    assert not Layout.from_json(found | {"keep_rest": False}).json_columns[0].widens


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"version":1}', b'{"version":1,"topic":"t","layout":{}}']
)
def test_invalid_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data)


def test_later_version_is_refused() -> None:
    found = json.loads(Manifest("clicks", [Layout()]).to_bytes())
    with pytest.raises(ManifestError, match="versions up to 3"):
        Manifest.from_bytes(json.dumps(found | {"version": 4}).encode())


def test_earlier_programs_refuse_an_unfinished_conversion_and_read_a_plain_folder() -> None:
    manifest = Manifest("clicks", [Layout()])
    manifest.commit, manifest.uncommitted = 1, [done(0, 10)]
    found = json.loads(manifest.to_bytes())
    assert found["version"] == 2
    new = {"discarded", "discarded_rows", "filtered", "dead_letters"}
    assert not new & (found["uncommitted"][0].keys() | json.loads(done(0, 10).to_bytes()).keys())
    manifest.widen(LAYOUT)
    assert json.loads(manifest.to_bytes())["version"] == 3
    manifest.widening = False
    assert json.loads(manifest.to_bytes())["version"] == 2


def test_version_1_is_read() -> None:
    """As written by an export before 2026-12: with unmerged ranges and one layout."""
    brokers = {
        "b:1": {"done": [[0, 5, 5], [5, 9, 3], [20, 30, 10]], "pending": [[9, 20]], "last": [8, "a" * 16]}
    }
    found = {"version": 1, "topic": "clicks", "layout": LAYOUT.to_json(), "brokers": brokers}
    manifest = Manifest.from_bytes(json.dumps(found).encode())
    assert (manifest.layouts, manifest.commit, manifest.uncommitted) == ([LAYOUT], 0, [])
    ranges = manifest.ranges_of("b:1")
    assert (ranges.done, ranges.pending) == ({Span(0, 9): 8, Span(20, 30): 10}, {Span(9, 20): 0})
    assert ranges.last == LastMessage(8, "a" * 16)
    assert manifest.plan("b:1", Span(0, 40), 100) == [Span(9, 20), Span(30, 40)]
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_results_count_once() -> None:
    manifest = Manifest("clicks", [Layout()])
    manifest.plan("b", Span(0, 10), 5)
    assert manifest.mark_done([done(0, 5), done(0, 5)]) == [done(0, 5)]
    assert manifest.mark_done([done(0, 5), done(5, 10)]) == [done(5, 10)]
    assert manifest.mark_done([done(5, 10), done(50, 60)]) == []
    assert manifest.ranges_of("b").done == {Span(0, 10): 10}


def test_a_month_of_rounds_stays_small() -> None:
    """43,200 rounds, one a minute; now and then, retention is faster than the export."""
    manifest = Manifest("clicks", [Layout()])
    begun_s, end = time.process_time(), 0
    for minute in range(43_200):
        first = end + 7 * (minute % 4000 == 0)
        end = first + 60
        planned = manifest.plan("b:1", Span(first, end), 1000)
        manifest.mark_done([RangeResult("b:1", *span, span.length, last_id="a" * 16) for span in planned])
    assert sum(manifest.ranges_of("b:1").done.values()) == 43_200 * 60
    assert len(manifest.ranges_of("b:1").done) == 11
    assert len(manifest.to_bytes()) < 1000
    assert time.process_time() - begun_s < 60  # it took 0.5 s


def test_brokers_with_the_same_file_names() -> None:
    manifest = Manifest("clicks", [Layout()])
    manifest.ranges_of("a:1")
    with pytest.raises(ManifestError, match="have the same names"):
        manifest.ranges_of("a_1")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("clicks", "clicks"),
        ("a.b-c", "a.b-c"),
        ("_x", "x_x"),
        (".x", "x.x"),
        ("a#ephemeral", "a_ephemeral"),
        ("::1:5", "x__1_5"),
    ],
)
def test_file_names_are_visible_to_readers(text: str, name: str) -> None:
    assert safe_name(text) == name


def test_names_of_ranges_sort_by_sequence() -> None:
    assert range_name("t", "h:1", Span(5, 12)) == "t-h_1-00000000000000000005-00000000000000000012"


@pytest.mark.parametrize(
    ("partition", "timestamp_ns", "folder"),
    [
        (PartitionBy.NONE, 0, ""),
        (PartitionBy.DATE, 1_795_262_400 * 10**9, "date=2026-11-21/"),
        (PartitionBy.HOUR, 1_795_262_400 * 10**9, "date=2026-11-21/hour=12/"),
        (PartitionBy.HOUR, 1_795_262_400 * 10**9 - 1, "date=2026-11-21/hour=11/"),
        (PartitionBy.HOUR, -1, "date=1969-12-31/hour=23/"),
    ],
)
def test_partitions(partition: PartitionBy, timestamp_ns: int, folder: str) -> None:
    assert partition_folder(partition, partition_key(partition, timestamp_ns)) == folder
