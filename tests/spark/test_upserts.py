"""`to-parquet --key` and `--op`: one row per key in Delta and Iceberg tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli
from spark.support import bodies_in, export, run_in_process
from spark.table_support import DELTA, ICEBERG, table_rows, use_catalog
from trio_nsq.spark.tables.target import TableTarget

KINDS = pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_catalog(monkeypatch, tmp_path)


def publish(qcli: Cli, topic: str, *bodies: object) -> None:
    qcli.publish(topic, [json.dumps(body).encode() for body in bodies])


def by_key(target: TableTarget, folder: Path, *fields: str) -> dict[Any, Any]:
    """Return the rows of a table with a key: the last of these fields by the others."""
    found = table_rows(target, folder).select(list(fields)).to_pylist()
    rows = {tuple(row[field] for field in fields[:-1]): row[fields[-1]] for row in found}
    assert len(rows) == len(found), "a key has several rows"
    return {key[0] if len(key) == 1 else key: value for key, value in rows.items()}


@KINDS
def test_newest_message_of_a_key(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    arguments = [*str(target).split(), "--json", "--key", "user", "--op", "op"]
    publish(qcli, topic, *({"user": f"k{n % 3}", "n": n, "op": "c"} for n in range(10)))
    report = export(qcli, topic, folder, *arguments)
    assert (report["messages"], report["upserted"], report["outdated"], report["deleted"]) == (10, 3, 7, 0)
    assert by_key(target, folder, "user", "n") == {"k0": 9, "k1": 7, "k2": 8}
    publish(
        qcli,
        topic,
        {"user": "k0", "op": "D"},
        {"user": "k1", "n": 20, "op": "update"},
        {"user": "k3", "n": 21, "op": "r"},
    )
    report = export(qcli, topic, folder, *arguments)
    assert (report["messages"], report["upserted"], report["outdated"], report["deleted"]) == (3, 2, 0, 1)
    assert by_key(target, folder, "user", "n") == {"k1": 20, "k2": 8, "k3": 21}
    assert export(qcli, topic, folder, *arguments)["messages"] == 0
    publish(qcli, topic, {"user": "k0", "n": 30, "op": "i"}, {"user": "never", "op": "delete"})
    export(qcli, topic, folder, *arguments)
    assert by_key(target, folder, "user", "n") == {"k0": 30, "k1": 20, "k2": 8, "k3": 21}


@KINDS
def test_messages_without_a_key(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A key is a value of its column's type: `"1"` is not 1, and messages without a key are rows of their own."""
    folder = tmp_path / "t"
    arguments = [
        *str(target).split(),
        "--json",
        "--columns",
        "user:long,n:long,op:string",
        "--key",
        "user",
        "--op",
        "op",
    ]
    bad: list[object] = [
        {"user": "1", "n": 3},
        {"n": 4, "op": "u"},
        {"user": None, "n": 5},
        {"user": 1.5},
        [1],
        {},
    ]
    bad += [{"user": 1, "n": 6, "op": op} for op in ("x", None, 1, "truncate")]
    bad += [{"user": 1.0, "n": 7, "op": "u"}, {"user": "1", "op": "d"}]
    good = [{"user": 1, "n": 1, "op": "c"}, {"user": 1, "n": 2, "op": "u"}]
    for _ in range(2):
        publish(qcli, topic, *good, *bad)
        report = export(qcli, topic, folder, *arguments)
        assert (report["upserted"], report["unparsed"]) == (1, len(bad))
        assert report["misfits"] == {"user": 7, "op": 4}
    rows = table_rows(target, folder).to_pylist()
    assert [(row["user"], row["n"], row["unparsed"]) for row in rows if row["user"] is not None] == [
        (1, 2, None)
    ]
    others = [row for row in rows if row["user"] is None]
    assert [(row["n"], row["op"], json.loads(row["unparsed"])) for row in others] == [
        (None, None, each) for each in bad
    ] * 2


def test_messages_without_a_key_can_be_dead_letters(qcli: Cli, topic: str, tmp_path: Path) -> None:
    publish(qcli, topic, {"user": "a", "n": 1}, {"n": 2}, {"user": "", "n": 3})
    arguments = ["--delta", "--json", "--key", "user", "--dead-letter-topic", "{topic}.dead"]
    report = export(qcli, topic, tmp_path / "t", *arguments)
    assert (report["upserted"], report["dead_letters"]) == (2, 1)
    assert bodies_in(qcli.http_address, f"{topic}.dead") == [b'{"n": 2}']
    assert by_key(DELTA, tmp_path / "t", "user", "n") == {"a": 1, "": 3}


@KINDS
def test_rows_move_between_partitions(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    arguments = [*str(target).split(), "--json", "--key", "user", "--partition-by", "country"]
    publish(
        qcli,
        topic,
        *({"user": n, "country": country, "n": 1} for n, country in enumerate(["de", "fr", None])),
    )
    export(qcli, topic, folder, *arguments)
    publish(qcli, topic, {"user": 0, "country": "fr", "n": 2}, {"user": 2, "country": "a/b", "n": 2})
    export(qcli, topic, folder, *arguments)
    assert by_key(target, folder, "user", "country") == {0: "fr", 1: "fr", 2: "a/b"}


@KINDS
def test_partition_in_the_key(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Files of Delta tables have no column of the partition. A new field becomes a column; small files are merged."""
    folder = tmp_path / "t"
    arguments = [
        *str(target).split(),
        "--json",
        "--key",
        "country,user",
        "--partition-by",
        "country",
        "--compact",
    ]
    for number in range(9):
        more = {"late": number} if number > 4 else {}
        publish(
            qcli,
            topic,
            {"country": "de", "user": "a", "n": number},
            {"country": "fr", "user": f"b{number}"} | more,
        )
        export(qcli, topic, folder, *arguments)
    rows = by_key(target, folder, "country", "user", "n")
    assert rows == {("de", "a"): 8} | {("fr", f"b{number}"): None for number in range(9)}
    assert by_key(target, folder, "country", "user", "late")["fr", "b8"] == 8


def test_several_topics(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Each topic has a table, and the report has the sums."""
    other = f"{topic}-2"
    for name in (topic, other):
        publish(qcli, name, {"user": "a", "n": 1}, {"user": "a", "n": 2})
    found = run_in_process(
        qcli,
        "to-parquet",
        topic,
        other,
        str(tmp_path),
        "--delta",
        "--json",
        "--key",
        "user",
        "--format",
        "json",
    )
    assert (found.code, [record["upserted"] for record in found.records]) == (0, [1, 1])
    assert by_key(DELTA, tmp_path / other, "user", "n") == {"a": 2}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--json"], "--key replaces and removes rows of a table"),
        (["--delta"], "--key takes fields of bodies: say --json."),
        (["--delta", "--json", "--schema-contract", "discard-value"], "Choose discard-row."),
        (
            ["--delta", "--json", "--columns", "n"],
            "--key needs the field user, which is not among --columns: add it",
        ),
        (
            ["--delta", "--json", "--columns", "user:double"],
            "has the type double, and --key takes boolean, byte,",
        ),
        (["--delta", "--json", "--op", "n"], "has the type long, and --op takes a string"),
        (["--delta", "--json", "--consume", "--channel", "c"], "--key needs the order of a log"),
    ],
)
def test_refused_options(arguments: list[str], text: str, qcli: Cli, topic: str, tmp_path: Path) -> None:
    publish(qcli, topic, {"user": "a", "n": 1})
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "t"), "--key", "user", *arguments)
    assert result.code in (1, 2)
    assert text in result.err
    assert not (tmp_path / "t").exists() or not list((tmp_path / "t").rglob("*.parquet"))


@KINDS
def test_key_belongs_to_the_table(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    arguments = [topic, str(folder), *str(target).split(), "--json"]
    publish(qcli, topic, {"user": "a", "n": 1})
    assert run_in_process(qcli, "to-parquet", *arguments, "--key", "user").code == 0
    result = run_in_process(qcli, "to-parquet", *arguments, "--key", "n")
    assert (result.code, "has files with --json --key user, and all files need" in result.err) == (1, True)
    publish(qcli, f"{topic}2", {"user": "a", "n": 1})
    arguments[:2] = [f"{topic}2", str(folder if target == DELTA else tmp_path / "other")]
    result = run_in_process(qcli, "to-parquet", *arguments)
    assert (result.code, "has the key user, and the export none: give --key user" in result.err) == (1, True)
