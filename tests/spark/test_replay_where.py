"""Tests for the condition of `replay --where`: DuckDB and Spark select the same rows, and nothing else happens."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from cli.support import Cli
from spark.support import (
    HOUR_NS,
    NOON_NS,
    PLAIN_PLANS,
    as_export,
    bodies_in,
    export,
    jobs_of,
    replay,
    replayed,
    until,
    write_parquet,
)
from trio_nsq.spark.replay.files import open_files
from trio_nsq.spark.replay.filter import select_rows
from trio_nsq.spark.replay.spark_filter import select_rows_with_spark
from trio_nsq.spark.runtime.spark_engine import SparkEngine
from trio_nsq.spark.sql_conditions import FilterError


def chosen(engine: SparkEngine | None, place: Path, condition: str) -> dict[str, list[int]]:
    """Return the rows of each file that Spark selects; without an engine, those that DuckDB selects."""
    files = open_files(str(place))
    if engine is None:
        found = select_rows(files, condition)
    else:
        found = select_rows_with_spark(engine, files, condition, PLAIN_PLANS)
    return {
        name: [n for n in range(8 * len(bits)) if bits[n // 8] >> n % 8 & 1] for name, bits in found.items()
    }


@pytest.fixture(params=["duckdb", pytest.param("spark", marks=pytest.mark.slow)])
def evaluator(request: pytest.FixtureRequest) -> SparkEngine | None:
    """Spark, or None for DuckDB."""
    found: SparkEngine | None = None if request.param == "duckdb" else request.getfixturevalue("engine")
    return found


def test_condition_selects_rows(evaluator: SparkEngine | None, tmp_path: Path) -> None:
    """File names with special characters, more rows than a bitmap of Spark has, nanoseconds, and columns of folders."""
    odd = "a b{x}%20[1].parquet"
    count = 70_000
    times = pa.array(range(count), pa.timestamp("ns"))
    bodies = pa.array([b"error %d" % n if n % 10_000 == 7 else b"ok" for n in range(count)], pa.binary())
    write_parquet(tmp_path / "date=2026-11-21" / odd, {"body": bodies, "created": times}, row_group_size=9000)
    write_parquet(tmp_path / "date=2026-11-22" / "b.parquet", {"body": bodies[:20], "created": times[:20]})
    first, second = f"date=2026-11-21/{odd}", "date=2026-11-22/b.parquet"
    assert chosen(evaluator, tmp_path, "body LIKE '%error%'") == {
        first: list(range(7, count, 10_000)),
        second: [7],
    }
    assert chosen(evaluator, tmp_path, "date = '2026-11-22' AND created < '1970-01-01 00:00:01'") == {
        second: list(range(20))
    }
    assert chosen(evaluator, tmp_path, "date > DATE '2026-11-22' OR created > '2026-01-01'") == {}


def test_common_conditions(evaluator: SparkEngine | None, tmp_path: Path) -> None:
    texts = ["caf\xe9", "error 7", "", None, '{"user": "u3", "n": 5}', '{"user": "u4"}', "Error"]
    bodies = [None if text is None else text.encode() for text in texts] + [b"\xff error"]
    times = [NOON_NS + n * HOUR_NS for n in range(len(bodies))]
    amounts = pa.array([None, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5])
    columns = as_export(bodies, times) | {"amount": amounts, "kind": ["a", "b"] * 4}  # type: ignore[arg-type]
    expected = {
        "body LIKE '%error%'": [1, 7],
        "lower(body) LIKE 'error%'": [1, 6],
        "body IS NULL OR body = ''": [2, 3],
        "length(body) = 4": [0],
        "body NOT LIKE '%r%'": [0, 2],
        "body = concat('\ufffd', ' error')": [7],
        "regexp_like(body, '^[eE]rror')": [1, 6],
        "get_json_object(body, '$.user') = 'u3'": [4],
        "CAST(get_json_object(body, '$.n') AS INT) > 4": [4],
        "ts >= '2026-11-21 14:00:00' AND ts < TIMESTAMP '2026-11-21 16:00:00'": [2, 3],
        "hour(ts) = 13 AND hour = 7": [1],
        "ts_ns = 1795262400000000000": [0],
        "seq BETWEEN 2 AND 3 OR seq IN (5, 6)": [2, 3, 5, 6],
        "seq % 3 = 0 AND kind = 'b'": [3],
        "amount > 4.4 AND amount <= 5.5": [4, 5],
        "coalesce(amount, 0) < 2": [0, 1],
        "seq = (SELECT 3) -- not 4": [3],
        "CASE WHEN kind = 'a' THEN seq > 3 ELSE false END": [4, 6],
        "upper(kind) = 'A' AND NOT (seq > 2)": [0, 2],
        "rand() < 2 AND now() > TIMESTAMP '2026-01-01 00:00:00' AND seq = 1": [1],
        "`seq` = 1" if evaluator is not None else '"seq" = 1': [1],
    }
    # All are one query, which Spark plans once: each has its own copy of the rows.
    table, count = pa.table(columns), len(bodies)
    copies = pa.concat_tables(
        table.append_column("copy", pa.array([number] * count)) for number in range(len(expected))
    )
    write_parquet(
        tmp_path / "hour=07" / "a.parquet", dict(zip(copies.column_names, copies.columns, strict=True)), 3
    )
    cases = (f"WHEN {number} THEN ({condition}\n)" for number, condition in enumerate(expected))
    rows = chosen(evaluator, tmp_path, f"CASE copy {' '.join(cases)} END")["hour=07/a.parquet"]
    assert {
        condition: [row % count for row in rows if row // count == number]
        for number, condition in enumerate(expected)
    } == expected


@pytest.mark.parametrize(
    "condition", ["nope = 1", "body LIKE 'x", "", "true; SELECT 1", "max(seq) = 1", "1 2"]
)
def test_invalid_conditions(evaluator: SparkEngine | None, tmp_path: Path, condition: str) -> None:
    write_parquet(tmp_path / "a.parquet", {"body": ["a"], "seq": [1]})
    with pytest.raises(FilterError, match=r"^--where cannot be used: ") as caught:
        chosen(evaluator, tmp_path, condition)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- DuckDB


def test_columns_that_differ_between_files(tmp_path: Path) -> None:
    """A column that a file does not have is null there; types and spellings may differ."""
    write_parquet(tmp_path / "a.parquet", {"body": ["a", "b"], "n": [1, 2]})
    write_parquet(tmp_path / "b.parquet", {"body": [b"a", b"b"], "n": [1.5, 2.5], "User": ["x", "y"]})
    write_parquet(tmp_path / "c.parquet", {"body": pa.array(["a", "b"]).dictionary_encode()})
    assert chosen(None, tmp_path, "n > 1") == {"a.parquet": [1], "b.parquet": [0, 1]}
    assert chosen(None, tmp_path, "user = 'y' OR BODY = 'a' AND n IS NULL") == {
        "b.parquet": [1],
        "c.parquet": [0],
    }
    assert chosen(None, tmp_path, "COLUMNS(*) IS NOT NULL") == {"b.parquet": [0, 1]}
    with pytest.raises(FilterError, match=r'Referenced column "nope" not found .*; there are User, body, n$'):
        chosen(None, tmp_path, "nope = 1")
    assert chosen(None, tmp_path, "random() < 2") == {
        name: [0, 1] for name in ("a.parquet", "b.parquet", "c.parquet")
    }


def test_columns_that_differ_only_in_case(tmp_path: Path) -> None:
    """DuckDB would take the first."""
    write_parquet(tmp_path / "a.parquet", {"body": ["a"], "User": ["x"], "user": ["y"]})
    write_parquet(tmp_path / "b.parquet", {"body": ["b"], "USER": ["y"]})
    assert chosen(None, tmp_path, "body > 'a'") == {"b.parquet": [0]}
    with pytest.raises(FilterError, match=r"columns User and user of a\.parquet differ only in case"):
        chosen(None, tmp_path, "user = 'y'")
    (tmp_path / "a.parquet").unlink()
    write_parquet(tmp_path / "a.parquet", {"body": ["a"], "user": ["y"]})
    assert chosen(None, tmp_path, "User = 'y'") == {"a.parquet": [0], "b.parquet": [0]}


ATTACKS = [
    "body IN (SELECT content FROM read_text('{file}'))",
    "EXISTS (FROM read_csv('{file}'))",
    "EXISTS (FROM '{file}')",
    "EXISTS (FROM glob('{folder}/*'))",
    "EXISTS (FROM read_parquet('{folder}/a.parquet'))",
    "EXISTS (FROM read_parquet('http://127.0.0.1:1/a.parquet'))",
    "EXISTS (FROM read_json('{file}'))",
    "EXISTS (FROM sniff_csv('{file}'))",
    "EXISTS (FROM parquet_metadata('{folder}/a.parquet'))",
    "EXISTS (FROM read_blob('/proc/self/environ'))",
    "EXISTS (FROM query('SELECT * FROM glob(''{folder}/*'')'))",
    "EXISTS (FROM secret)",
    "read_text('{file}') IS NULL",
    "getenv('HOME') IS NOT NULL",
    "true); COPY (SELECT 1) TO '{folder}/made'; SELECT (true",
    "true); ATTACH '{folder}/made'; SELECT (true",
    "true); SET enable_external_access = true; SELECT (true",
    "true); EXPORT DATABASE '{folder}/made'; SELECT (true",
    "true); INSTALL httpfs; LOAD httpfs; SELECT (true",
    "true) FROM read_text('{file}') WHERE (true",
    "true) UNION ALL SELECT (SELECT count(*) > 0 FROM read_text('{file}')) WHERE (true",
    "ATTACH '{folder}/made'",
    "CALL enable_logging()",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_condition_has_no_access_to_anything_else(tmp_path: Path, attack: str) -> None:
    """Files, the network, settings, and variables of this process: `secret` is one of them."""
    secret = pa.table({"body": ["secret"]})
    write_parquet(tmp_path / "a.parquet", {"body": ["secret"]})
    file = tmp_path / "secret.txt"
    file.write_text(secret["body"][0].as_py())
    with pytest.raises(FilterError) as caught:
        chosen(None, tmp_path, attack.format(file=file, folder=tmp_path))
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"a.parquet", "secret.txt"}


def test_replay_without_spark(qcli: Cli, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay with a condition starts no JVM and does not need Spark."""
    qcli.publish(topic, [b'{"user": "u%d", "n": %d}' % (n % 3, n) for n in range(99)])
    export(qcli, topic, tmp_path / "a", "--partition-by", "hour")
    monkeypatch.setitem(__import__("sys").modules, "pyspark", None)
    where = "get_json_object(body, '$.user') = 'u2'"
    said = replayed(qcli, tmp_path, str(tmp_path / "a"), f"{topic}.again", "--where", where)
    assert (said["published"], said["left_out"], said["engine"]) == (33, 66, "inline")
    expected = [b'{"user": "u2", "n": %d}' % n for n in range(2, 99, 3)]
    assert bodies_in(qcli.http_address, f"{topic}.again") == expected


def test_condition_of_the_command(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The selected rows are saved: a job that is resumed publishes the same, even if the condition is random."""
    for hour in range(4):
        times = [NOON_NS + hour * HOUR_NS + n * HOUR_NS // 500 for n in range(500)]
        columns = as_export([b"%d-%d" % (hour, n) for n in range(500)], times)
        write_parquet(tmp_path / "a" / "date=2026-11-21" / f"hour={12 + hour}" / "a.parquet", columns, 70)
    where = ["--where", "random() < 0.5 AND ts < '2026-11-21 15:00:00' AND hour >= 13"]
    wrong = replay(qcli, tmp_path, str(tmp_path / "a"), topic, "--job", "j", "--where", "nope = 1")
    assert (wrong.code, wrong.err.startswith('Error: --where cannot be used: Referenced column "nope"')) == (
        1,
        True,
    )
    words = ["replay", str(tmp_path / "a"), topic, *where, "--job", "j", "--rate", "400"]
    with Cli(qcli.tcp_address, qcli.http_address, jobs_of(tmp_path)).running(*words) as running:
        until(lambda: len(bodies_in(qcli.http_address, topic)) > 20)
        running.process.kill()
    said = replayed(qcli, tmp_path, "--job", "j")
    found = Counter(bodies_in(qcli.http_address, topic))
    assert max(found.values()) == 1
    assert {body[:2] for body in found} == {b"1-", b"2-"}
    assert said["published"] + said["before"] == len(found)
    assert 300 < len(found) == 2000 - said["left_out"] < 700
