"""Exports with a schema, and its contracts."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli
from trio_nsq.spark.schemas.documents import schema_columns

from .support import ToParquet, export, parquet_files, rows

SCHEMA = {
    "properties": {
        "user": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer", "format": "int32"}},
        },
        "price": {"type": "number", "format": "decimal", "precision": 6, "scale": 2},
        "day": {"type": "string", "format": "date"},
        "at": {"type": "integer", "format": "timestamp(ms)"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
}
GOOD = {
    "user": {"name": "ann", "age": 7},
    "price": 1.10,
    "day": "2026-11-28",
    "at": 1_795_262_400_123,
    "tags": ["x", None],
    "counts": {"a": 1},
}
FIELDS = list(GOOD)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def bodies(*values: Any) -> list[bytes]:
    return [json.dumps(each).encode() for each in values]


def test_schema(qcli: Cli, topic: str, tmp_path: Path, schema: Path) -> None:
    folder = tmp_path / "out"
    more = GOOD | {"user": {"name": "bob", "age": "8", "nick": "b"}, "more": 1}
    qcli.publish(topic, bodies(GOOD, more, {}))
    said = export(qcli, topic, folder, "--schema", str(schema))
    assert said["misfits"] == {"user.age": 1}
    first, second, third = rows(folder, *FIELDS, "rest", "unparsed").to_pylist()
    assert first == {
        "user": {"name": "ann", "age": 7},
        "price": Decimal("1.10"),
        "day": date(2026, 11, 28),
        "at": datetime(2026, 11, 21, 12, 0, 0, 123_000, UTC),
        "tags": ["x", None],
        "counts": [("a", 1)],
        "rest": None,
        "unparsed": None,
    }
    assert second == first | {
        "user": {"name": "bob", "age": None},
        "rest": json.dumps({"more": 1, "user": more["user"]}, separators=(",", ":")),
        "unparsed": bodies(more)[0],
    }
    assert set(third.values()) == {None}
    qcli.publish(topic, bodies(GOOD))
    assert export(qcli, topic, folder, "--schema", str(schema))["messages"] == 1
    assert export(qcli, topic, folder, "--json")["messages"] == 0


def test_schema_of_another_folder(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, schema: Path
) -> None:
    qcli.publish(topic, bodies({"price": 1}))
    export(qcli, topic, tmp_path / "out", "--json")
    result = to_parquet(topic, tmp_path / "out", "--schema", str(schema))
    assert (result.code, result.err) == (
        1,
        f"Error: The folder {tmp_path}/out has no column for the field user: give --schema-contract evolve, which "
        "adds it, or choose another folder.\n",
    )
    schema.write_text('{"fields": [{"name": "price", "type": "decimal(6,2)"}]}')
    result = to_parquet(topic, tmp_path / "out", "--schema", str(schema))
    assert (result.code, result.err) == (
        1,
        f"Error: The field price is decimal(6,2) in the schema, and long in the folder {tmp_path}/out: use the type of "
        "the folder, which --print-schema prints, or choose another folder.\n",
    )


@pytest.mark.parametrize("contract", ["", "freeze", "discard-row", "discard-value", "evolve"])
def test_a_schema_needs_the_column_rest(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, schema: Path, contract: str
) -> None:
    """Without it, fields that the schema lacks would be lost."""
    qcli.publish(topic, bodies({"n": 1}))
    export(qcli, topic, tmp_path / "out", "--json", "--columns", "n:long")
    qcli.publish(topic, bodies({"n": 2, "vip": 1}))
    schema.write_text('{"fields": [{"name": "n", "type": "long"}]}')
    options = ("--schema-contract", contract) if contract else ()
    result = to_parquet(topic, tmp_path / "out", "--schema", str(schema), *options)
    assert (result.code, result.err) == (
        1,
        f"Error: The folder {tmp_path}/out has files with --json --columns n:long, without the column rest, which has "
        "the fields that a schema lacks: use these options, or choose another folder.\n",
    )


def test_printed_schema(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, schema: Path) -> None:
    """Of the messages, then edited and given back, then of the folder."""
    folder = tmp_path / "out"
    qcli.publish(topic, bodies({"n": 1, "user": {"age": 2}}, {"n": 1.5, "s": "x"}))
    printed = to_parquet(topic, folder, "--print-schema").out.decode()
    assert printed == (
        '{"fields": [\n'
        '  {"name": "n", "type": "double"},\n'
        '  {"name": "user", "type": "json"},\n'
        '  {"name": "s", "type": "string"}\n'
        "]}\n"
    )
    assert not folder.exists()
    schema.write_text(printed.replace('"json"', '"struct", "children": [{"name": "age", "type": "int"}]'))
    export(qcli, topic, folder, "--schema", str(schema))
    assert rows(folder, "n", "user", "s", "rest").to_pylist() == [
        {"n": 1.0, "user": {"age": 2}, "s": None, "rest": None},
        {"n": 1.5, "user": None, "s": "x", "rest": None},
    ]
    again = to_parquet(topic, folder, "--print-schema").out.decode()
    assert schema_columns(again) == schema_columns(schema.read_text())


def test_printed_schema_of_a_folder_without_columns(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    qcli.publish(topic, [b"x"])
    export(qcli, topic, tmp_path)
    result = to_parquet(topic, tmp_path, "--print-schema")
    assert (result.code, result.out) == (1, b"")
    assert "has files with binary bodies and no partitions, and no schema" in result.err


BAD_VALUE = GOOD | {"user": {"name": "bob", "age": "x"}, "price": 1}
NEW_FIELD = GOOD | {"new": 1}
NEW_INSIDE = GOOD | {"user": {"name": "ann", "age": 7, "nick": "a"}}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (bodies(BAD_VALUE)[0], "has a value of user.age that is no int"),
        (bodies(NEW_FIELD)[0], "has the new field new"),
        (bodies(NEW_INSIDE)[0], "has the new field user.nick"),
        (b"[1]", "is no JSON object"),
    ],
)
def test_freeze(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, schema: Path, bad: bytes, reason: str
) -> None:
    """Nothing of the range is written; what was written before stays."""
    folder = tmp_path / "out"
    freeze = ("--schema", str(schema), "--schema-contract", "freeze")
    qcli.publish(topic, bodies(GOOD, {"price": None, "new": None}))
    assert export(qcli, topic, folder, *freeze)["messages"] == 2
    before = parquet_files(folder)
    qcli.publish(topic, [*bodies(GOOD), bad])
    result = to_parquet(topic, folder, *freeze)
    assert result.code == 1
    assert (
        f"Error: Message 3 of {topic} on {qcli.http_address} {reason}, and the schema contract is"
        in result.err
    )
    assert parquet_files(folder) == before
    assert export(qcli, topic, folder, "--schema", str(schema))["messages"] == 2


def test_discard_value(qcli: Cli, topic: str, tmp_path: Path, schema: Path) -> None:
    qcli.publish(topic, [*bodies(BAD_VALUE, NEW_FIELD, NEW_INSIDE, GOOD), b"[1]"])
    said = export(
        qcli, topic, tmp_path / "out", "--schema", str(schema), "--schema-contract", "discard-value"
    )
    assert (said["messages"], said["misfits"], said["unparsed"]) == (5, {}, 1)
    assert said["discarded"] == {"user.age": 1, "new": 1, "user.nick": 1}
    found = rows(tmp_path / "out", *FIELDS, "rest", "unparsed").to_pylist()
    assert found[1] == found[2] == found[3]
    assert found[0] == found[3] | {"user": {"name": "bob", "age": None}, "price": Decimal("1.00")}
    assert [row["rest"] for row in found] == [None] * 5
    assert [row["unparsed"] for row in found] == [None] * 4 + [b"[1]"]


def test_discard_row(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, schema: Path) -> None:
    folder = tmp_path / "out"
    drop = ("--schema", str(schema), "--schema-contract", "discard-row")
    qcli.publish(topic, [*bodies(BAD_VALUE, GOOD, NEW_FIELD, NEW_INSIDE), b"[1]"])
    said = export(qcli, topic, folder, *drop)
    assert (said["messages"], said["discarded_rows"], said["misfits"], said["unparsed"]) == (
        1,
        4,
        {"user.age": 1},
        0,
    )
    assert said["body_bytes"] == len(bodies(GOOD)[0])
    assert rows(folder, "seq", "unparsed").to_pylist() == [{"seq": 1, "unparsed": None}]
    qcli.publish(topic, [*bodies(BAD_VALUE), b"x", b"y"])
    result = to_parquet(topic, folder, *drop)
    assert (result.code, len(parquet_files(folder))) == (0, 1)
    assert "3 left out by the schema contract" in result.err
    assert "columns: user.age (1). These messages are left out.\n" in result.err
    assert export(qcli, topic, folder, *drop)["messages"] == 0


def test_new_fields_of_a_contract_are_no_columns_of_a_table(
    qcli: Cli, topic: str, tmp_path: Path, schema: Path
) -> None:
    schema.write_text('{"fields": [{"name": "a", "type": "int"}]}')
    table = ("--schema", str(schema), "--delta", "--schema-contract", "discard-value")
    qcli.publish(topic, bodies({"a": 1, "b": 2}))
    export(qcli, topic, tmp_path / "out", *table)
    qcli.publish(topic, bodies({"a": 1, "b": 2}))
    export(qcli, topic, tmp_path / "out", *table)
    assert "b" not in rows(tmp_path / "out").column_names


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--schema", "{}", "--text"], "--schema describes columns, and --text has none"),
        (["--schema", "{}", "--json", "--columns", "a"], "--schema and --columns exclude each other"),
        (["--schema-contract", "freeze"], "--schema-contract is for columns of fields"),
        (["--schema", "{}", "--print-schema"], "--print-schema infers a schema"),
        (["more", "--print-schema"], "--print-schema is for one topic"),
        (["--schema", "no-such-file"], "File 'no-such-file' does not exist."),
        (["--schema", "[]"], "it is no JSON object."),
    ],
)
def test_options_that_contradict_each_other(
    to_parquet: ToParquet, tmp_path: Path, options: list[str], reason: str
) -> None:
    files = {"{}": '{"fields": [{"name": "a", "type": "int"}]}', "[]": "[]"}
    words: list[Any] = []
    for each in options:
        if each in files:
            (path := tmp_path / "schema").write_text(files[each])
            words.append(path)
        else:
            words.append(each)
    result = (
        to_parquet("topic", *words[:1], tmp_path, *words[1:])
        if words[0] == "more"
        else to_parquet("topic", tmp_path, *words)
    )
    assert result.code == 2
    assert reason in " ".join(result.err.split())
