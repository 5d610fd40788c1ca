"""`to-parquet --key` and `--op`: one row per key in Delta and Iceberg tables."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli
from interop.peers import Broker, free_address, qcli_serve
from spark.support import bodies_in, cli_of, export, run_in_process, until
from spark.table_support import (
    DELTA,
    ICEBERG,
    catalog_environment,
    delete_delta_rows,
    duckdb_counts,
    table_rows,
    use_catalog,
)
from storage.stores import Store
from trio_nsq.spark.places import storage_at
from trio_nsq.spark.tables.catalogs import load
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
    rounds = 9 if target == DELTA else 4
    for number in range(rounds):
        more = {"late": number} if number else {}
        publish(
            qcli,
            topic,
            {"country": "de", "user": "a", "n": number},
            {"country": "fr", "user": f"b{number}"} | more,
        )
        export(qcli, topic, folder, *arguments)
    rows = by_key(target, folder, "country", "user", "n")
    assert rows == {("de", "a"): rounds - 1} | {("fr", f"b{number}"): None for number in range(rounds)}
    assert by_key(target, folder, "country", "user", "late")["fr", f"b{rounds - 1}"] == rounds - 1


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
        (
            ["--delta", "--json", "--op", "opp"],
            "--op needs the field opp, which neither the schema nor a message of",
        ),
        (["--delta", "--json", "--sort-by", "n"], "--key and --sort-by exclude each other"),
        (["--delta", "--json", "--consume", "--channel", "c"], "--key needs the order of a log"),
    ],
)
def test_refused_options(arguments: list[str], text: str, qcli: Cli, topic: str, tmp_path: Path) -> None:
    publish(qcli, topic, {"user": "a", "n": 1})
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "t"), "--key", "user", *arguments)
    assert result.code in (1, 2)
    assert text in result.err
    assert not (tmp_path / "t").exists() or not list((tmp_path / "t").rglob("*.parquet"))


def test_key_that_no_message_has(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """With a wrong name, each message would be a row of its own."""
    publish(qcli, topic, {"user": "a", "n": 1})
    arguments = ["to-parquet", topic, str(tmp_path / "t"), "--delta", "--key", "usr"]
    result = run_in_process(qcli, *arguments, "--json")
    assert (result.code, "has; there are user, n. Correct the name" in result.err) == (1, True), result.err
    schema = {"type": "record", "name": "R", "fields": [{"name": "user", "type": "string"}]}
    (tmp_path / "r.avsc").write_text(json.dumps(schema))
    result = run_in_process(qcli, *arguments, "--body-format", "avro", "--schema", str(tmp_path / "r.avsc"))
    assert (result.code, "which the schema lacks; its fields are user" in result.err) == (1, True), result.err
    result = run_in_process(qcli, *arguments, "--json", "--columns", "usr:string,n")
    assert result.code == 0


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


def test_hash_as_key(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Equal keys have equal hashes."""
    publish(qcli, topic, {"user": "a", "n": 1}, {"user": "b", "n": 2}, {"user": "a", "n": 3})
    export(qcli, topic, tmp_path / "t", "--delta", "--json", "--key", "user", "--mask", "user=sha256")
    hashes = by_key(DELTA, tmp_path / "t", "user", "n")
    assert (sorted(hashes.values()), {len(each) for each in hashes}) == ([2, 3], {64})


@KINDS
def test_killed_follow(target: TableTarget, broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Rows are replaced and deleted all the time, and small files are merged. The rows are those of a ledger."""
    chance, ledger, folder = random.Random(1), dict[int, int](), tmp_path / "t"
    broker.create(topic, "lake")
    arguments = [
        "to-parquet",
        topic,
        str(folder),
        *str(target).split(),
        "--channel",
        "lake",
        "--compact",
        "--json",
    ]
    arguments += [
        "--columns",
        "user:long,n:long,op:string",
        "--key",
        "user",
        "--op",
        "op",
        "--engine",
        "inline",
        "-q",
    ]
    environment = Cli(qcli.tcp_address, qcli.http_address, catalog_environment(tmp_path))
    published = 0

    def publish_some() -> None:
        nonlocal published
        bodies = []
        for published in range(published + 1, published + 31):  # noqa: B020 (goes on)
            user, op = chance.randrange(40), chance.choice("ud")
            bodies.append({"user": user, "n": published, "op": op})
            ledger.pop(user, None)
            if op == "u":
                ledger[user] = published
        publish(qcli, topic, *bodies)

    for _ in range(2 if target == DELTA else 1):
        files = {path.name for path in folder.rglob("*-merged-*")}
        with environment.running(*arguments, "--follow", "--every", "20ms") as running:

            def has_more(files: set[str] = files) -> bool:
                assert running.process.poll() is None
                publish_some()
                return len({path.name for path in folder.rglob("*-merged-*")} - files) >= 3

            until(has_more)
            time.sleep(chance.uniform(0, 0.15))
            running.process.kill()
            running.process.wait()
    assert run_in_process(qcli, *arguments).code == 0
    assert by_key(target, folder, "user", "n") == ledger
    assert duckdb_counts(target, folder)[0] == len(ledger)
    assert not list((folder / "_nsq" / topic / "changes").rglob("*.parquet"))


@KINDS
def test_late_messages_of_a_broker_that_did_not_answer(
    target: TableTarget, broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """They change nothing, neither rows nor deleted keys. Repeated messages are newer than what they repeat."""
    http, folder = free_address(), tmp_path / "t"
    names = f"--http-address={http}", f"--tcp-address={free_address()}"
    arguments = ["to-parquet", topic, str(folder), *str(target).split(), "--json"]
    arguments += ["--columns", "user,n:long,op", "--key", "user", "--op", "op", "--engine", "inline"]
    arguments += ["--nsqd-http-address", f"{qcli.http_address},{http}"]
    first = [{"user": user, "n": 1, "op": "c"} for user in ("late", "deleted", "repeated", "only")]
    with qcli_serve(tmp_path / "other", *names) as other:
        publish(cli_of(other), topic, *first)
        other.process.kill()
        other.process.wait()
    publish(qcli, topic, {"user": "late", "n": 2, "op": "u"}, {"user": "deleted", "op": "d"})
    publish(qcli, topic, {"user": "repeated", "n": 2, "op": "u"})
    assert run_in_process(qcli, *arguments).code != 0
    assert by_key(target, folder, "user", "n") == {"late": 2, "repeated": 2}
    with qcli_serve(tmp_path / "other", *names) as other:
        assert run_in_process(qcli, *arguments).code == 0
        newest = {"late": 2, "repeated": 2, "only": 1}
        assert by_key(target, folder, "user", "n") == newest
        publish(cli_of(other), topic, first[2])
        assert run_in_process(qcli, *arguments).code == 0
        assert by_key(target, folder, "user", "n") == newest | {"repeated": 1}


@KINDS
def test_table_in_a_bucket(
    target: TableTarget, moto_s3: Store, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    place = moto_s3.new_place()
    arguments = [
        "to-parquet",
        topic,
        place,
        *str(target).split(),
        "--json",
        "--key",
        "user",
        "--op",
        "op",
        "-q",
    ]
    with moto_s3.here(**catalog_environment(tmp_path)):
        for number in range(2):
            changes = [{"user": f"u{n}", "n": number, "op": "u"} for n in range(3)]
            publish(qcli, topic, *changes, {"user": f"u{number}", "op": "d"})
            assert run_in_process(qcli, *arguments).code == 0
        if target == DELTA:
            from deltalake import DeltaTable

            from trio_nsq.spark.tables.delta import delta_options

            found = DeltaTable(place, storage_options=delta_options(storage_at(place))).to_pyarrow_table()
        else:
            found = load(target.catalog, storage_at(place)).load_table(target.name).scan().to_arrow()
        assert sorted(found.select(["user", "n"]).to_pylist(), key=str) == [
            {"user": "u0", "n": 1},
            {"user": "u2", "n": 1},
        ]


@KINDS
def test_columns_that_evolve(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Rows of files with fewer columns, and narrower types, are written again."""
    folder = tmp_path / "t"
    fields = [{"name": name, "type": "int"} for name in ("user", "n")]
    (tmp_path / "users.avsc").write_text(json.dumps({"type": "record", "name": "user", "fields": fields}))
    arguments = [
        *str(target).split(),
        "--schema",
        str(tmp_path / "users.avsc"),
        "--schema-contract",
        "evolve",
    ]
    arguments += ["--key", "user"]
    wide = 2**40 if target == ICEBERG else 7
    for changes in (
        [{"user": 1, "n": 1}, {"user": 2, "n": 2}],
        [{"user": 1, "n": wide, "late": "x"}],
        [{"user": 2, "n": 3, "late": "y"}, {"user": 3, "n": 4}],
    ):
        publish(qcli, topic, *changes)
        assert export(qcli, topic, folder, *arguments)["misfits"] == {}
    assert by_key(target, folder, "user", "n") == {1: wide, 2: 3, 3: 4}
    assert by_key(target, folder, "user", "late")[2] == "y"


@KINDS
def test_renamed_fields_and_buckets(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A row stays in the bucket of its key, and its files lie where Iceberg finds them."""
    folder = tmp_path / "t"
    arguments = [
        *str(target).split(),
        "--json",
        "--columns",
        "user.id AS who,n,meta.op AS what",
        "--key",
        "who",
    ]
    arguments += ["--op", "what", "--partition-by", "bucket(4,who)"]
    for number, op in ((1, "c"), (2, "u")):
        publish(qcli, topic, *({"user": {"id": f"u{n}"}, "n": number, "meta": {"op": op}} for n in range(6)))
        publish(qcli, topic, {"user": {"id": f"u{number}"}, "meta": {"op": "d"}})
        export(qcli, topic, folder, *arguments)
    assert by_key(target, folder, "who", "n") == {f"u{n}": 2 for n in (0, 1, 3, 4, 5)}


def test_configuration_file(qcli: Cli, topic: str, tmp_path: Path) -> None:
    publish(
        qcli,
        topic,
        {"user": "a", "n": 1, "op": "c"},
        {"user": "b", "n": 2, "op": "c"},
        {"user": "a", "op": "d"},
    )
    section = f'[{topic}]\nfolder = "{tmp_path}/t"\ndelta = true\njson = true\nkey = ["user"]\nop = "op"\n'
    (tmp_path / "pipeline.toml").write_text(section)
    assert run_in_process(qcli, "to-parquet", "--config", str(tmp_path / "pipeline.toml"), "-q").code == 0
    assert by_key(DELTA, tmp_path / "t", "user", "n") == {"b": 2}


def test_rows_that_were_deleted_without_rewriting_files(qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    arguments = ["to-parquet", topic, str(folder), "--delta", "--json", "--key", "user"]
    publish(qcli, topic, *({"user": n} for n in range(10)))
    assert run_in_process(qcli, *arguments).code == 0
    delete_delta_rows(folder, [1, 2])
    publish(qcli, topic, {"user": 1})
    result = run_in_process(qcli, *arguments)
    assert result.code != 0
    assert "has 1 file that --key cannot change" in result.err
