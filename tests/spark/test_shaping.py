"""Tests for renamed and nested fields, transforms of partitions, and the order of rows.

Iceberg's specification has the examples of its hash and of truncated values; Kafka Connect's documentation those of its
time-based partitioner's `path.format`.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyiceberg.transforms import BucketTransform, TruncateTransform
from pyiceberg.types import IntegerType, StringType

from cli.support import Cli
from spark.support import NOON_NS, export, parquet_files, rows, run_in_process, write_log
from spark.table_support import DELTA, ICEBERG, files_of, iceberg_table, table_rows, use_catalog
from trio_nsq.spark.export.levels import Level, Transform, parse_level
from trio_nsq.spark.export.partitions import transformed
from trio_nsq.spark.tables.target import TableTarget

NULL = "__HIVE_DEFAULT_PARTITION__"


def lines(*objects: object) -> list[bytes]:
    return [each if isinstance(each, bytes) else json.dumps(each).encode() for each in objects]


def exported(tmp_path: Path, bodies: Sequence[bytes], *args: str) -> dict[str, Any]:
    """Export bodies to the folder `out`."""
    if not (tmp_path / "data").exists():
        write_log(tmp_path / "data", "t", [(NOON_NS, bodies)])
    return export(
        Cli("", ""), "t", tmp_path / "out", "--from-segments", f"b={tmp_path / 'data'}", "--json", *args
    )


def refused(tmp_path: Path, bodies: Sequence[bytes], *args: str) -> str:
    write_log(tmp_path / "data", "t", [(NOON_NS, bodies)])
    arguments = ("t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "--json", *args)
    result = run_in_process(Cli("", ""), "to-parquet", *arguments)
    assert result.code in (1, 2)
    assert "Traceback" not in result.err
    return result.err


def folders(place: Path) -> dict[str, int]:
    """Return the number of rows in each partition folder."""
    found = Counter[str]()
    for name in parquet_files(place):
        found[name.rpartition("/")[0]] += pq.read_metadata(place / name).num_rows
    return dict(found)


# ---------------------------------------------------------------------- names of columns

NESTED = lines(
    {"user": {"id": 7, "name": "x"}, "user.id": 1, "a": 1, "b": "two"},
    {"user": {"id": 8}, "a": 2, "b": "three"},
    {"user": "none", "b": None},
    {},
)


def test_renamed_and_nested_fields(tmp_path: Path) -> None:
    """The field whose own name has the dot comes first, and two names can be exchanged."""
    said = exported(
        tmp_path, NESTED, "--columns", "user.id AS user_id:long,user.name as name,a AS b:long,b AS a"
    )
    found = rows(tmp_path / "out", "user_id", "name", "b", "a").to_pylist()
    assert found == [
        {"user_id": 1, "name": "x", "b": 1, "a": "two"},
        {"user_id": 8, "name": None, "b": 2, "a": "three"},
        {"user_id": None, "name": None, "b": None, "a": None},
        {"user_id": None, "name": None, "b": None, "a": None},
    ]
    assert (said["messages"], said["unparsed"]) == (4, 0)


def test_everything_sees_the_new_names(tmp_path: Path) -> None:
    bodies = lines(
        *({"user": {"id": n, "mail": f"user{n}@example.org"}} for n in range(6)), {"user": {"id": "x"}}
    )
    said = exported(
        tmp_path,
        bodies,
        "--columns=user.id AS uid:int,user.mail AS mail",
        "--where=uid > 1 OR uid IS NULL",
        "--mask=user.mail=last4",
        "--partition-by=uid",
    )
    assert (said["filtered"], said["misfits"], said["masked"]) == (2, {"uid": 1}, {"user.mail": 4})
    assert folders(tmp_path / "out") == {f"uid={n}": 1 for n in (2, 3, 4, 5)} | {f"uid={NULL}": 1}
    assert set(rows(tmp_path / "out", "mail")["mail"].to_pylist()) == {"***.org", None}


def test_names_belong_to_the_folder(tmp_path: Path) -> None:
    exported(tmp_path, NESTED, "--columns", "user.id AS id:long")
    arguments = ("t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "--json")
    result = run_in_process(Cli("", ""), "to-parquet", *arguments, "--columns", "id:long")
    assert (result.code, "has files with --json --columns 'user.id AS id:long'" in result.err) == (1, True)
    assert json.loads((tmp_path / "out" / "_nsq" / "t" / "manifest.json").read_bytes())["version"] == 3


@pytest.mark.parametrize(
    "options",
    [
        ("--columns", "first name:string,it's:long,a.b:decimal(9,2),$HOME:json,c d.e AS `f`:timestamp(ms)"),
        ("--columns", "first name:string", "--partition-by", "first name"),
        ("--columns", "first name:string,at:timestamp", "--event-time", "at", "--partition-by", "date"),
        ("--columns", "first name:string", "--sort-by", "first name DESC", "--mask", "pass word=sha256"),
    ],
)
def test_options_of_the_folder_can_be_pasted(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The options that the error names are those of the folder, in the form that a shell takes."""
    exported(tmp_path, NESTED, *options)
    arguments = ("to-parquet", "t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "-q")
    result = run_in_process(Cli("", ""), *arguments)
    advice = re.search("has files with (.*), and all files need", result.err)
    assert advice is not None, result.err
    assert run_in_process(Cli("", ""), *arguments, *shlex.split(advice[1])).code == 0


def test_names_of_folders_differ_in_more_than_case(tmp_path: Path) -> None:
    bodies = lines({"User": "a", "user_bucket": 7})
    exported(tmp_path, bodies, "--columns", "User:string,user_bucket:int", "--partition-by", "bucket(4,User)")
    assert rows(tmp_path / "out", "body_user_bucket").to_pylist() == [{"body_user_bucket": 7}]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--columns", "a AS b,b"), "'b' is given twice"),
        (("--columns", "a AS "), "'a AS' has no name after AS"),
        (("--columns", ".a AS b"), "'.a' is not a field such as user.name"),
        (
            ("--columns", "user.id AS id:long", "--mask", "user.id=sha256"),
            "field user.id has the type long",
        ),
        (
            ("--columns", "user.id AS id", "--mask", "user.id", "--partition-by", "id"),
            "hides the field user.id, which names the folders",
        ),
        (
            ("--partition-by", "bucket(id)"),
            "'bucket(id)' is not bucket(NUMBER,FIELD), such as bucket(16,user_id)",
        ),
        (("--partition-by", "bucket(0,id)"), "is not bucket(NUMBER,FIELD)"),
        (("--partition-by", "bucks(2,id)"), "'bucks' is not one of bucket, truncate, year"),
        (("--partition-by", "day()"), "'day()' has no field"),
        (
            ("--columns", "a:double", "--partition-by", "bucket(4,a)"),
            "type double, and --partition-by bucket(4,a)",
        ),
        (("--columns", "a:boolean", "--partition-by", "truncate(4,a)"), "has the type boolean"),
        (("--columns", "a:date", "--partition-by", "hour(a)"), "type date, and hour(a) takes times"),
        (("--columns", "a:int", "--partition-by", "day(a)"), "type int, and day(a) takes times"),
        (("--partition-by", "bucket(4,a),bucket(8,a)"), "two levels with the folders a_bucket="),
        (("--partition-by", "bucket(4,a),bucket(8,A)"), "two levels with the folders A_bucket="),
        (("--partition-by", "bucket(4,_a)"), "folders whose names begin with _"),
        (("--sort-by", "nothing"), "--sort-by has nothing, which is no column"),
        (("--columns", "a:array<int>", "--sort-by", "a"), "values of array<int> have no order"),
        (("--sort-by", "a,a DESC"), "'a' is given twice"),
        (("--sort-by", "a", "--delta", "--compact"), "--compact and --sort-by exclude each other"),
    ],
)
def test_shapes_that_cannot_be(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refused(tmp_path, lines({"a": 1, "id": 1, "user": {"id": 1}}), *arguments)
    assert parquet_files(tmp_path / "out") == []


# ---------------------------------------------------------------------- transforms

EVENTS = lines(
    {"n": 34, "s": "iceberg", "at": "2017-11-16T22:31:08Z"},
    {"n": -34, "s": "ice", "at": "2017-11-16T23:59:59.999999Z"},
    {"n": 10, "s": "grün", "at": "2017-12-01T00:00:00+01:00"},
    {"n": None, "s": None, "at": None},
)
LAYOUTS: dict[str, dict[str, int]] = {
    # Of the specification: bucket_hash(34L) = 2017239379, bucket_hash("iceberg") = 1210000089.
    "bucket(16,n)": {"n_bucket=3": 1, "n_bucket=13": 1, "n_bucket=12": 1, f"n_bucket={NULL}": 1},
    "bucket(100, s)": {"s_bucket=89": 1, "s_bucket=37": 1, "s_bucket=58": 1, f"s_bucket={NULL}": 1},
    "truncate(10,n)": {"n_trunc=30": 1, "n_trunc=-40": 1, "n_trunc=10": 1, f"n_trunc={NULL}": 1},
    "truncate(3,s)": {"s_trunc=ice": 2, "s_trunc=grü": 1, f"s_trunc={NULL}": 1},
    # Kafka Connect's path.format 'year'=YYYY, and so on, in UTC.
    "year(at)": {"at_year=2017": 3, f"at_year={NULL}": 1},
    "month(at)": {"at_month=2017-11": 3, f"at_month={NULL}": 1},
    "day(at)": {"at_day=2017-11-16": 2, "at_day=2017-11-30": 1, f"at_day={NULL}": 1},
    "hour(at)": {
        "at_hour=2017-11-16-22": 1,
        "at_hour=2017-11-16-23": 1,
        "at_hour=2017-11-30-23": 1,
        f"at_hour={NULL}": 1,
    },
    "truncate(1,s),month(at)": {
        "s_trunc=i/at_month=2017-11": 2,
        "s_trunc=g/at_month=2017-11": 1,
        f"s_trunc={NULL}/at_month={NULL}": 1,
    },
    "n,bucket(2,n)": {
        "n=34/n_bucket=1": 1,
        "n=-34/n_bucket=1": 1,
        "n=10/n_bucket=0": 1,
        f"n={NULL}/n_bucket={NULL}": 1,
    },
}


@pytest.mark.parametrize("levels", LAYOUTS)
def test_folders_of_transforms(tmp_path: Path, levels: str) -> None:
    """The files have the columns of the fields, and every reader sees each row once."""
    exported(tmp_path, EVENTS, "--columns", "n:long,s,at:timestamp", "--partition-by", levels)
    assert folders(tmp_path / "out") == LAYOUTS[levels]
    assert rows(tmp_path / "out", "seq", "s")["s"].to_pylist() == ["iceberg", "ice", "grün", None]
    has_n = "n" in pq.read_schema(tmp_path / "out" / parquet_files(tmp_path / "out")[0]).names
    assert has_n == (not levels.startswith("n,"))
    assert ds.dataset(tmp_path / "out", partitioning="hive", exclude_invalid_files=True).count_rows() == 4
    found = duckdb.execute(
        f"SELECT count(*), sum(seq) FROM read_parquet('{tmp_path}/out/*/**/*.parquet')"
    ).fetchall()
    assert found == [(4, 6)]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(-(2**40), 2**40)


@given(st.lists(st.none() | texts), st.lists(st.none() | numbers), st.integers(1, 1000))
@example(["iceberg"], [34], 16)
def test_transforms_are_those_of_iceberg(
    words: list[str | None], counts: list[int | None], size: int
) -> None:
    values: list[Any]
    theirs: Any
    for kind, values, iceberg in (
        (pa.string(), words, StringType()),
        (pa.int64(), counts, IntegerType()),
    ):
        array = pa.array(values, kind)
        for transform, theirs in (
            (Transform.BUCKET, BucketTransform(size).transform(iceberg)),
            (Transform.TRUNCATE, TruncateTransform(size).transform(iceberg)),
        ):
            found = transformed(array, Level(transform, "x", size)).to_pylist()
            assert found == [None if value is None else str(theirs(value)) for value in values]


@given(st.integers(-(2**63) + 1, 2**63 - 1))
@example(-1)
@example(-86_400 * 10**9 - 1)
def test_nanoseconds_are_in_the_folder_of_their_day(time_ns: int) -> None:
    """Also before 1970."""
    values = pa.array([time_ns], pa.timestamp("ns", "UTC"))
    text = (datetime(1970, 1, 1) + timedelta(microseconds=time_ns // 1000)).isoformat()
    for transform, chars in (
        (Transform.YEAR, 4),
        (Transform.MONTH, 7),
        (Transform.DAY, 10),
        (Transform.HOUR, 13),
    ):
        assert transformed(values, Level(transform, "x")).to_pylist() == [text[:chars].replace("T", "-")]


@pytest.mark.parametrize("target", [None, DELTA, ICEBERG], ids=["folder", "delta", "iceberg"])
@pytest.mark.parametrize(
    ("kind", "least", "size"), [("byte", -(2**7), 10), ("long", -(2**63), 10), ("int", -(2**31), 2**31 - 1)]
)
def test_numbers_that_cannot_be_rounded_down(
    target: TableTarget | None,
    kind: str,
    least: int,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their folder would have a number that the type has not, and a table with it cannot be read."""
    use_catalog(monkeypatch, tmp_path)
    lowest = least + -least % size
    numbers = [least, lowest - 1 if lowest > least else least, lowest, 0]
    table = [] if target is None else str(target).split()
    columns = ["--columns", f"n:{kind}", "--partition-by", f"truncate({size},n)"]
    found = exported(tmp_path, lines(*({"n": n} for n in numbers)), *columns, *table)
    assert found["misfits"] == {"n": 2}
    out = tmp_path / "out"
    written = rows(out, "seq", "n")["n"] if target is None else table_rows(target, out)["n"]
    assert sorted(written.to_pylist(), key=str) == sorted([None, None, lowest, 0], key=str)
    assert set(folders(out)) == {f"n_trunc={value}" for value in (NULL, lowest, 0)}


@given(st.sampled_from(Transform), st.text(min_size=1, max_size=5).map(str.strip), st.integers(1, 2**31 - 1))
def test_text_of_a_level_can_be_parsed_again(transform: Transform, field: str, size: int) -> None:
    level = Level(transform, field, size if transform.has_size else 0)
    if field and not (transform is Transform.IDENTITY and "(" in field):
        assert parse_level(str(level)) == level


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
def test_transforms_of_tables(target: TableTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters find the same rows as without partitions, also in merged files."""
    use_catalog(monkeypatch, tmp_path)
    first = datetime(2026, 11, 21, tzinfo=UTC)
    values: list[dict[str, Any]] = [
        {"n": n % 7, "s": f"name-{n % 3}{'-' * (n % 2)}", "at": (first + timedelta(hours=7 * n)).isoformat()}
        for n in range(40)
    ]
    values += [{"n": None, "s": "x", "at": None}, {"s": "other"}]
    batches = [values[at::9] for at in range(9)]
    write_log(tmp_path / "data", "t", [(NOON_NS + n, lines(*batch)) for n, batch in enumerate(batches)])
    levels = "bucket(4,n),truncate(6,s),day(at)"
    source = ("--from-segments", f"b={tmp_path / 'data'}", "--json", "--columns", "n:long,s,at:timestamp")
    sizes = [len(batch) for batch in batches]
    for end in [*(sum(sizes[: n + 1]) for n in range(9)), None]:
        until = ("--until", str(end)) if end is not None else ("--compact",)
        export(
            Cli("", ""), "t", tmp_path / "t", *source, "--partition-by", levels, *str(target).split(), *until
        )
    ordered = [value for batch in batches for value in batch]
    found = table_rows(target, tmp_path / "t")
    assert found["n"].to_pylist() == [value.get("n") for value in ordered]
    files = files_of(target, tmp_path / "t")
    if target == DELTA:
        assert all(f"{tmp_path}/t/n_bucket=" in name for name in files)
        delta = deltalake.DeltaTable(tmp_path / "t")
        assert delta.metadata().partition_columns == ["n_bucket", "s_trunc", "at_day"]
        day = delta.to_pyarrow_table(
            filters=[("at_day", "=", date(2026, 11, 22)), ("s_trunc", "=", "name-1")]
        )
        assert sorted(day["seq"].to_pylist()) == [
            at
            for at, value in enumerate(ordered)
            if (value.get("at") or "").startswith("2026-11-22") and value["s"].startswith("name-1")
        ]
        return
    table = iceberg_table()
    fields = [
        (table.schema().find_column_name(each.source_id), str(each.transform)) for each in table.spec().fields
    ]
    assert fields == [("n", "bucket[4]"), ("s", "truncate[6]"), ("at", "day")]
    for number in range(3):
        wanted = [at for at, value in enumerate(ordered) if value.get("n") == number]
        scan = table.scan(row_filter=f"n = {number}")
        assert sorted(scan.to_arrow()["seq"].to_pylist()) == wanted
        planned = [task.file.partition[0] for task in scan.plan_files()]
        assert set(planned) == {BucketTransform(4).transform(IntegerType())(number)}  # others are not read
    for task in table.scan().plan_files():
        rows_there = pq.read_table(task.file.file_path, partitioning=None)
        for index, (name, _) in enumerate(fields):
            transform = table.spec().fields[index].transform.transform(table.schema().find_type(name))
            column = rows_there[name].cast(pa.int64()) if name == "at" else rows_there[name]
            assert {transform(value) for value in column.to_pylist()} == {task.file.partition[index]}
    everything = table.scan().to_arrow()  # noqa: F841 (DuckDB reads the variable)
    for condition in (
        "n = 3",
        "s = 'name-1'",
        "s LIKE 'name-2%'",
        "at >= '2026-11-25T00:00:00+00:00'",
        "n IS NULL",
    ):
        quoted = condition.replace("at ", '"at" ')
        expected = duckdb.execute(f"SELECT seq FROM everything WHERE {quoted} ORDER BY seq").fetchall()
        scanned = table.scan(row_filter=condition).to_arrow()["seq"].to_pylist()
        assert [(seq,) for seq in sorted(scanned)] == expected


# ---------------------------------------------------------------------- order of rows


def sort_key(value: Any, *, is_descending: bool) -> tuple[bool, Any]:
    return value is None, 0 if value is None else -value if is_descending else value


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 3), st.none() | st.integers(-5, 5)), min_size=1, max_size=30
    )
)
def test_rows_of_each_file_are_sorted(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[Any, Any]]
) -> None:
    """Equal rows are in the order of the log, with and without partitions; no row is lost."""
    place = tmp_path_factory.mktemp("sorted")
    bodies = lines(*({"a": a, "b": b, "p": (b or 0) % 2} for a, b in values))
    for name, levels in (("none", ()), ("levels", ("--partition-by", "p"))):
        (place / name).mkdir()
        columns = ("--columns", "a:int,b:int,p:int", "--sort-by", "a, b DESC")
        exported(place / name, bodies, *columns, *levels)
        seen = []
        for file in parquet_files(place / name / "out"):
            found = (
                pq.read_table(place / name / "out" / file, partitioning=None)
                .select(["seq", "a", "b"])
                .to_pylist()
            )
            keys = [
                (
                    sort_key(each["a"], is_descending=False),
                    sort_key(each["b"], is_descending=True),
                    each["seq"],
                )
                for each in found
            ]
            assert keys == sorted(keys)
            seen += [(each["seq"], each["a"], each["b"]) for each in found]
        assert sorted(seen) == [(seq, *pair) for seq, pair in enumerate(values)]


def test_sorted_rows_by_publish_time_and_in_hours(tmp_path: Path) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS + n * 1800 * 10**9, [b"{}"]) for n in range(5)])
    exported(tmp_path, [], "--columns", "a", "--sort-by", "ts DESC", "--partition-by", "hour")
    found = {
        name.rpartition("/")[0]: pq.read_table(tmp_path / "out" / name, partitioning=None)["seq"].to_pylist()
        for name in parquet_files(tmp_path / "out")
    }
    assert found == {
        "date=2026-11-21/hour=12": [1, 0],
        "date=2026-11-21/hour=13": [3, 2],
        "date=2026-11-21/hour=14": [4],
    }


def test_order_of_an_iceberg_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_catalog(monkeypatch, tmp_path)
    options = ("--columns", "a:int,b", "--sort-by", "a,b DESC", *str(ICEBERG).split())
    exported(tmp_path, lines({"a": 2}, {"a": 1, "b": "x"}, {"a": 1, "b": "y"}), *options)
    table = iceberg_table()
    names = [table.schema().find_column_name(each.source_id) for each in table.sort_order().fields]
    assert names == ["a", "b"]
    assert [str(each.direction) for each in table.sort_order().fields] == ["ASC", "DESC"]
    assert table.scan().to_arrow()["seq"].to_pylist() == [2, 1, 0]
