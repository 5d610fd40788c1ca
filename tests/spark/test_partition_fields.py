"""Tests for partition folders by fields of JSON bodies, and by their own time.

Kafka Connect's documented partitioners (Confluent's storage connectors: field, time-based, daily, hourly, with the
timestamp extractors Record and RecordField) are taken as tables of input and layout.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.support import Cli
from interop.peers import Broker
from soak import examples
from spark.support import (
    HOUR_NS,
    NOON_NS,
    ToParquet,
    column,
    export,
    leftovers,
    parquet_files,
    rows,
    run_in_process,
    until,
    write_log,
)
from trio_nsq.spark.export.partitions import values_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
NULL = "__HIVE_DEFAULT_PARTITION__"


def lines(*objects: object) -> list[bytes]:
    """Return objects as JSON bodies."""
    return [json.dumps(each).encode() for each in objects]


def folders(place: Path) -> dict[str, int]:
    """Return the number of rows in each partition folder."""
    found = Counter[str]()
    for name in parquet_files(place):
        found[name.rpartition("/")[0]] += pq.read_metadata(place / name).num_rows
    return dict(found)


def from_segments(data: Path, topic: str, place: Path, *args: str) -> dict[str, Any]:
    """Export a topic that `write_log` has written."""
    return export(Cli("", ""), topic, place, "--from-segments", f"b={data}", *args)


# ---------------------------------------------------------------------- Kafka Connect's partitioners

RECORD_NS = 1_411_661_535 * 10**9  # 2014-09-25T16:12:15Z, Kafka Connect's example of a record's time
EVENTS = [
    {"region": "us", "store": 1, "created": "2014-02-01T09:00:00Z"},
    {"region": "eu", "store": 2, "created": "2014-02-01T09:59:59.999999Z"},
    {"region": "us", "store": 2, "created": "2014-02-01T10:00:00+01:00"},
    {"region": None, "store": 1, "created": "2014-12-31T23:30:00-01:00"},
    {"store": 1, "created": "no time"},
]
TIMES = "region,store,created:timestamp"
PARTITIONERS: dict[str, tuple[list[str], dict[str, int]]] = {
    "DefaultPartitioner: no folder but the topic's": ([], {"": 5}),
    "FieldPartitioner, partition.field.name=region": (
        ["--partition-by", "region"],
        {"region=us": 2, "region=eu": 1, f"region={NULL}": 2},
    ),
    "FieldPartitioner, partition.field.name=region,store": (
        ["--partition-by", "region,store"],
        {
            "region=us/store=1": 1,
            "region=eu/store=2": 1,
            "region=us/store=2": 1,
            f"region={NULL}/store=1": 2,
        },
    ),
    "DailyPartitioner, timestamp.extractor=Record": (["--partition-by", "date"], {"date=2014-09-25": 5}),
    "HourlyPartitioner, timestamp.extractor=Record": (
        ["--partition-by", "hour"],
        {"date=2014-09-25/hour=16": 5},
    ),
    "DailyPartitioner, timestamp.extractor=RecordField, timestamp.field=created": (
        ["--partition-by", "date", "--event-time", "created"],
        {"date=2014-02-01": 3, "date=2015-01-01": 1, f"date={NULL}": 1},
    ),
    "HourlyPartitioner, timestamp.extractor=RecordField, timestamp.field=created": (
        ["--partition-by", "hour", "--event-time", "created"],
        {
            "date=2014-02-01/hour=09": 3,
            "date=2015-01-01/hour=00": 1,
            f"date={NULL}/hour={NULL}": 1,
        },
    ),
    "TimeBasedPartitioner, path.format='year'=YYYY/'month'=MM/'day'=dd, timestamp.field=created": (
        ["--partition-by", "year(created),month(created),day(created)", "--columns", TIMES],
        {
            "created_year=2014/created_month=2014-02/created_day=2014-02-01": 3,
            "created_year=2015/created_month=2015-01/created_day=2015-01-01": 1,
            f"created_year={NULL}/created_month={NULL}/created_day={NULL}": 1,
        },
    ),
    "TimeBasedPartitioner, path.format='month'=YYYY-MM, partition.duration.ms=2592000000": (
        ["--partition-by", "month(created)", "--columns", TIMES],
        {"created_month=2014-02": 3, "created_month=2015-01": 1, f"created_month={NULL}": 1},
    ),
    "TimeBasedPartitioner, path.format='day'=YYYY-MM-dd/'hour'=YYYY-MM-dd-HH": (
        ["--partition-by", "day(created),hour(created)", "--columns", TIMES],
        {
            "created_day=2014-02-01/created_hour=2014-02-01-09": 3,
            "created_day=2015-01-01/created_hour=2015-01-01-00": 1,
            f"created_day={NULL}/created_hour={NULL}": 1,
        },
    ),
    "FieldAndTimeBasedPartitioner, path.format='year'=YYYY": (
        ["--partition-by", "region,year(created)", "--columns", TIMES],
        {
            "region=us/created_year=2014": 2,
            "region=eu/created_year=2014": 1,
            f"region={NULL}/created_year=2015": 1,
            f"region={NULL}/created_year={NULL}": 1,
        },
    ),
    "FieldAndTimeBasedPartitioner": (
        ["--partition-by", "region,date", "--event-time", "created"],
        {
            "region=us/date=2014-02-01": 2,
            "region=eu/date=2014-02-01": 1,
            f"region={NULL}/date=2015-01-01": 1,
            f"region={NULL}/date={NULL}": 1,
        },
    ),
    "time before the field, as in a path.format": (
        ["--partition-by", "date,region"],
        {"date=2014-09-25/region=us": 2, "date=2014-09-25/region=eu": 1, f"date=2014-09-25/region={NULL}": 2},
    ),
}


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_partitioners_of_kafka_connect(tmp_path: Path, partitioner: str) -> None:
    arguments, wanted = PARTITIONERS[partitioner]
    write_log(tmp_path / "data", "clicks", [(RECORD_NS, lines(*EVENTS))])
    from_segments(
        tmp_path / "data",
        "clicks",
        tmp_path / "out",
        "--json",
        *(() if "--columns" in arguments else ("--columns", "region,store,created")),
        *arguments,
    )
    assert folders(tmp_path / "out") == wanted
    assert column(tmp_path / "out", "seq") == list(range(5))


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        ("timestamp", [1391245200, "2014-02-01T09:00:00"], {"date=2014-02-01/hour=09": 2}),
        ("timestamp(ms)", [1391245200000, 1391248799999], {"date=2014-02-01/hour=09": 2}),
        (
            "timestamp(ns)",
            [1391245200 * 10**9 - 1, 1391245200 * 10**9],
            {"date=2014-02-01/hour=08": 1, "date=2014-02-01/hour=09": 1},
        ),
        (
            'timestamp(s,"%Y%m%d %H")',
            ["20140201 09", "20140201 23"],
            {"date=2014-02-01/hour=09": 1, "date=2014-02-01/hour=23": 1},
        ),
        ("timestamp", [-1, "0001-01-01"], {"date=1969-12-31/hour=23": 1, "date=0001-01-01/hour=00": 1}),
    ],
)
def test_kinds_of_event_times(
    tmp_path: Path, kind: str, values: Sequence[object], wanted: dict[str, int]
) -> None:
    """Wallclock, long in milliseconds, ISO text: as the extractor RecordField reads them."""
    write_log(tmp_path / "data", "clicks", [(NOON_NS, lines(*({"at": each} for each in values)))])
    from_segments(
        tmp_path / "data",
        "clicks",
        tmp_path / "out",
        "--json",
        "--partition-by",
        "hour",
        "--event-time",
        f"at:{kind}",
    )
    assert folders(tmp_path / "out") == wanted


# ---------------------------------------------------------------------- values, readers


def test_values_that_name_folders(tmp_path: Path, spark: "SparkSession") -> None:
    """All readers see the values of the folders, whatever characters they have; others do not fit."""
    values = ["a/b", "50%", "a=b c", "grün", "x:y?z*", "{[^]}\\'\"#", "\x01\t", "..", "äöü/%41"]
    bad = ["", "x" * 101, NULL, "\x00"]
    write_log(
        tmp_path / "data", "clicks", [(NOON_NS, lines(*({"v": each} for each in [*values, *bad, None])))]
    )
    said = from_segments(tmp_path / "data", "clicks", tmp_path / "out", "--json", "--partition-by", "v")
    assert (said["unparsed"], said["misfits"]) == (4, {"v": 4})
    assert column(tmp_path / "out", "unparsed") == [*[None] * 9, *lines(*({"v": each} for each in bad)), None]
    place = str(tmp_path / "out")
    wanted = [*values, *[None] * 5]
    assert column(tmp_path / "out", "v") == wanted
    found = duckdb.execute(
        f"SELECT v FROM read_parquet('{place}/*/*.parquet', hive_partitioning=true) ORDER BY seq"
    ).fetchall()
    assert [NULL if value is None else value for (value,) in found] == [value or NULL for value in wanted]
    with_spark = [row["v"] for row in spark.read.parquet(place).orderBy("seq").collect()]
    assert with_spark == wanted


@pytest.mark.parametrize(
    ("field", "fitting", "others"),
    [("v", ["x" * 100, "/" * 84], ["/" * 85, "/" * 100]), ("v" * 200, ["x" * 54], ["x" * 55, "/" * 19])],
)
def test_values_whose_folders_have_no_name(
    tmp_path: Path, field: str, fitting: list[str], others: list[str]
) -> None:
    """Whatever producers publish, a range can be written: a folder's name has at most 255 bytes."""
    bodies = lines(*({field: each} for each in [*fitting, *others]))
    write_log(tmp_path / "data", "t", [(NOON_NS, bodies)])
    said = from_segments(tmp_path / "data", "t", tmp_path / "out", "--json", "--partition-by", field)
    assert (said["messages"], said["misfits"]) == (len(bodies), {field: len(others)})
    found = [values_in(name)[field] for name in parquet_files(tmp_path / "out")]
    assert sorted(each for each in found if each is not None) == sorted(fitting)


def test_types_of_folders(tmp_path: Path) -> None:
    """The files do not have the columns: readers that infer types of folders would not fit them together."""
    objects = [
        {"n": 7, "flag": True, "day": "2026-11-21", "x": 1},
        {"n": -1, "flag": False, "day": "2026-11-22", "x": 2},
    ]
    write_log(tmp_path / "data", "clicks", [(NOON_NS, lines(*objects))])
    columns = "n:int,flag:boolean,day:date,x:long"
    from_segments(
        tmp_path / "data",
        "clicks",
        tmp_path / "out",
        "--json",
        "--columns",
        columns,
        "--partition-by",
        "n,flag,day",
    )
    assert folders(tmp_path / "out") == {
        "n=7/flag=true/day=2026-11-21": 1,
        "n=-1/flag=false/day=2026-11-22": 1,
    }
    (name, _) = parquet_files(tmp_path / "out")
    assert not {"n", "flag", "day"} & set(pq.read_schema(tmp_path / "out" / name).names)
    found = pq.read_table(tmp_path / "out").sort_by("seq")
    assert found["n"].cast("int64").to_pylist() == [7, -1]
    found = duckdb.execute(
        f"SELECT x FROM '{tmp_path}/out/*/*/*/*.parquet' WHERE day = DATE '2026-11-22' AND NOT flag"
    )
    assert found.fetchall() == [(2,)]


# ---------------------------------------------------------------------- the log is in the files, once


def test_many_partitions_in_little_memory(tmp_path: Path) -> None:
    """Rows beyond the size of a row group wait in a temporary file; each partition is one file, in order."""
    count = 10_000
    bodies = lines(
        *({"user": f"u{number * 7919 % 50}", "n": number, "text": "x" * 50} for number in range(count))
    )
    write_log(
        tmp_path / "data",
        "clicks",
        [(NOON_NS, bodies[start : start + 2000]) for start in range(0, count, 2000)],
    )
    said = from_segments(
        tmp_path / "data",
        "clicks",
        tmp_path / "out",
        "--json",
        "--partition-by",
        "user",
        "--row-group-size",
        "64KiB",
    )
    assert (said["messages"], said["files"], said["ranges"]) == (count, 50, 1)
    found = ds.dataset(tmp_path / "out", format="parquet", partitioning="hive").to_table()
    assert sorted(found["seq"].to_pylist()) == list(range(count))
    for user, part in ((f"u{number}", rows(tmp_path / "out" / f"user=u{number}")) for number in (0, 17, 49)):
        numbers = part["n"].to_pylist()
        assert numbers == [n for n in range(count) if n * 7919 % 50 == int(user[1:])]
        (name,) = parquet_files(tmp_path / "out" / f"user={user}")
        in_file = pq.read_table(tmp_path / "out" / f"user={user}" / name, partitioning=None)[
            "seq"
        ].to_pylist()
        assert in_file == sorted(in_file)
    assert leftovers(tmp_path / "out") == []


def test_too_many_partitions(tmp_path: Path) -> None:
    bodies = lines(*({"user": number} for number in range(10_001)))
    write_log(tmp_path / "data", "clicks", [(NOON_NS, bodies[:5000]), (NOON_NS, bodies[5000:])])
    arguments = ["clicks", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}"]
    result = run_in_process(Cli("", ""), "to-parquet", *arguments, "--json", "--partition-by", "user")
    assert (result.code, "more than 10,000 partitions by user" in result.err) == (1, True), result.err
    assert (parquet_files(tmp_path / "out"), leftovers(tmp_path / "out")) == ([], [])


places = st.sampled_from(["de", "fr", "a/b", None, 5, "", "x" * 120])
times = st.sampled_from([0, 3599, 3600, 86_400, -1, "2026-11-21T04:14:00Z", "no", None, True])
found_objects = st.lists(
    st.fixed_dictionaries({}, optional={"place": places, "at": times, "n": st.integers(0, 3)}),
    min_size=1,
    max_size=30,
)


@settings(max_examples=examples(15))  # each is an export
@given(
    found_objects,
    st.sampled_from(["place", "place,hour", "date,place", "n,place", "date", "n,hour"]),
    st.data(),
)
def test_union_of_all_files_is_the_log(
    tmp_path_factory: pytest.TempPathFactory,
    objects: list[dict[str, object]],
    levels: str,
    data: st.DataObject,
) -> None:
    """With a condition, too: written and counted messages are the log, and each value is in its folder."""
    folder = tmp_path_factory.mktemp("log")
    bodies = lines(*objects)
    cut = data.draw(st.integers(0, len(bodies)))
    records = [
        (NOON_NS + number * HOUR_NS, part) for number, part in enumerate((bodies[:cut], bodies[cut:])) if part
    ]
    write_log(folder / "data", "t", records)
    arguments = ["--json", "--columns", "place,at:timestamp,n:long", "--partition-by", levels]
    if levels.endswith(("date", "hour")):
        arguments += ["--event-time", "at"]
    where = data.draw(st.sampled_from([(), ("--where", "n > 0 OR place IS NULL")]))
    said = from_segments(folder / "data", "t", folder / "out", *arguments, *where)
    assert said["messages"] + said["filtered"] == len(bodies)
    seen: list[int] = []
    for name in parquet_files(folder / "out"):
        found = pq.read_table(folder / "out" / name, partitioning=None)
        seen += (sequences := found["seq"].to_pylist())
        assert sequences == sorted(sequences)
        for sequence in sequences:
            place = objects[sequence].get("place")
            in_folder = place if place in ("de", "fr") else "a%2Fb" if place == "a/b" else NULL
            assert ("place" not in levels) or f"place={in_folder}/" in name
            n = objects[sequence].get("n")
            assert ("n" not in levels.split(",")) or f"n={NULL if n is None else n}/" in name
    assert len(seen) == len(set(seen)) == said["messages"]
    if not where:
        assert sorted(seen) == list(range(len(bodies)))


def test_folder_keeps_its_partitions(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    arguments = ("--json", "--partition-by", "a,hour", "--event-time", "at:timestamp(ms)")
    qcli.publish(topic, lines({"a": "x", "at": 0}))
    export(qcli, topic, tmp_path, *arguments)
    result = to_parquet(topic, tmp_path, "--json", "--partition-by", "hour")
    assert (
        "--json --partition-by a,hour --event-time 'at:timestamp(ms)', and all files need the same"
        in result.err
    )
    qcli.publish(topic, lines({"a": "y", "at": 3_600_000}, {"a": "x", "at": 1}))
    assert export(qcli, topic, tmp_path, *arguments)["messages"] == 2
    assert folders(tmp_path) == {"a=x/date=1970-01-01/hour=00": 2, "a=y/date=1970-01-01/hour=01": 1}


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--partition-by", "a"], 2, "take fields of bodies: say --json"),
        (["--json", "--event-time", "a"], 2, "--event-time is for --partition-by date or hour"),
        (["--json", "--partition-by", "a,a"], 2, "given twice"),
        (["--json", "--partition-by", "date,hour"], 2, "leave out date"),
        (["--json", "--partition-by", "a,none"], 2, "contains none"),
        (["--json", "--partition-by", ""], 2, "an empty name"),
        (["--json", "--columns", "b", "--partition-by", "a"], 1, "not among --columns: add it"),
        (
            ["--json", "--partition-by", "price"],
            1,
            "he field price has the type double, and --partition-by takes",
        ),
        (["--json", "--partition-by", "_a"], 1, "Spark and pyarrow ignore folders whose names begin with _"),
        (["--json", "--partition-by", ".a"], 1, "Spark and pyarrow ignore folders whose names begin with ."),
        (["--json", "--partition-by", "/" * 67], 1, "its name is too long for folders"),
        (
            ["--json", "--columns", "a:long", "--partition-by", "date", "--event-time", "a"],
            1,
            "--event-time takes times",
        ),
    ],
)
def test_wrong_partitions(
    broker: Broker, tmp_path: Path, arguments: list[str], code: int, reason: str
) -> None:
    qcli = Cli(broker.tcp_address, broker.http_address)
    qcli.publish("priced", lines({"price": 1.5, "a": 1, "b": 2}))
    result = run_in_process(qcli, "to-parquet", "priced", str(tmp_path), *arguments)
    assert (result.code, reason in result.err, parquet_files(tmp_path)) == (code, True, []), result.err


def test_other_columns_change_beside_partitions(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Files are converted to wider types and new columns; those of partitions keep their types, and stay out."""
    arguments = ("--json", "--partition-by", "n,date", "--event-time", "at", "--schema-contract", "evolve")
    qcli.publish(topic, lines({"n": 1, "price": 1, "at": 0}))
    export(qcli, topic, tmp_path, *arguments)
    qcli.publish(
        topic, lines({"n": 2.5, "price": 1.5, "at": 86_400, "new": "x"}, {"n": 1, "price": 2, "at": 0.5})
    )
    said = export(qcli, topic, tmp_path, *arguments)
    assert (said["widened"], said["misfits"]) == (["price"], {"n": 1})
    assert folders(tmp_path) == {"n=1/date=1970-01-01": 2, f"n={NULL}/date=1970-01-02": 1}
    qcli.publish(topic, lines({"n": 3, "price": 3, "at": 0, "new": "y"}))
    export(qcli, topic, tmp_path, *arguments)
    assert rows(tmp_path, "price", "new").to_pylist() == [
        {"price": 1.0, "new": None},
        {"price": 1.5, "new": "x"},
        {"price": 2.0, "new": None},
        {"price": 3.0, "new": "y"},
    ]
    for name in parquet_files(tmp_path):
        assert not {"n", "date"} & set(pq.read_schema(tmp_path / name).names)


@pytest.mark.parametrize("kills", [12 if COMPLETE else 2])
def test_killed_exports(qcli: Cli, topic: str, tmp_path: Path, kills: int) -> None:
    """With `kill -9` at random times, in the middle of a range: each message is in one file."""
    chance = random.Random(int(os.environ.get("FAULT_SEED", "1")))
    count = 8000
    bodies = [{"user": number % 7, "at": number * 60, "text": "x" * 100} for number in range(count)]
    qcli.publish(topic, lines(*bodies), at_once=500)
    arguments = [
        "--json",
        "--columns",
        "user:int,at:timestamp,text",
        "--partition-by",
        "user,date",
        "--event-time",
        "at",
    ]
    arguments += ["--where", "user <> 3", "--target-file-size", "64KiB", "--compression", "none"]
    wanted = [number for number in range(count) if number % 7 != 3]
    for _ in range(kills):
        before = len(parquet_files(tmp_path))
        with qcli.running("to-parquet", topic, str(tmp_path), *arguments) as running:
            files = before + chance.randrange(1, 60)
            until(
                lambda files=files, running=running: (  # type: ignore[misc]  # called in this round only
                    len(parquet_files(tmp_path)) >= files or running.process.poll() is not None
                )
            )
            running.process.kill()
        found = ds.dataset(tmp_path, format="parquet", partitioning=None).to_table(["seq"])["seq"].to_pylist()
        assert len(set(found)) == len(found)
    export(qcli, topic, tmp_path, *arguments)
    assert column(tmp_path, "seq") == wanted
    assert leftovers(tmp_path) == []
    assert export(qcli, topic, tmp_path, *arguments)["messages"] == 0
