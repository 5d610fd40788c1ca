"""The contract `evolve`: new columns and wider types, in folders of files and in tables."""

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.support import Cli
from trio_nsq.spark.export.json_columns import JsonParser
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout
from trio_nsq.spark.export.rest_columns import columns_from_rest
from trio_nsq.spark.schemas.column_types import DecimalType, JsonStruct, JsonType, parse_type
from trio_nsq.spark.schemas.promotions import Promotion, can_widen, common_type

from .support import NOON_NS, ToParquet, export, parquet_files, rows, write_log
from .table_support import DELTA, ICEBERG, iceberg_table, table_rows, use_catalog

EVOLVE = ("--schema-contract", "evolve")


def bodies(*values: Any) -> list[bytes]:
    return [each if isinstance(each, bytes) else json.dumps(each).encode() for each in values]


def schema_file(folder: Path, **fields: str) -> str:
    path = folder / "schema.json"
    path.write_text(json.dumps({"fields": [{"name": name, "type": kind} for name, kind in fields.items()]}))
    return str(path)


def types_in(folder: Path, name: str) -> list[str]:
    """Return the type of a column in each file; empty if a file lacks it."""
    schemas = [pq.read_schema(folder / file) for file in parquet_files(folder)]
    return [str(each.field(name).type) if name in each.names else "" for each in schemas]


# ---------------------------------------------------------------------- folders of files


def test_new_fields_become_columns_of_all_files(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Their earlier values are moved from the column rest."""
    qcli.publish(topic, bodies({"a": 1, "b": 7, "e": "x"}))
    folder = tmp_path / "out"
    schema = schema_file(tmp_path, a="int")
    export(qcli, topic, folder, "--schema", schema)
    qcli.publish(topic, bodies({"a": 2, "b": 1, "e": 5, "f g": "x"}, {"e": 6.5}, b'{"rest":"r","z":null}'))
    said = export(qcli, topic, folder, "--schema", schema, *EVOLVE)
    assert said["new_columns"] == {"b": "long", "e": "double", "f g": "string", "rest": "string"}
    assert said["widened"] == []
    assert [pq.read_schema(folder / each).names[8:] for each in parquet_files(folder)] == [
        ["a", "b", "e", "f_g", "body_rest", "rest", "unparsed"]
    ] * 2
    found = rows(folder, "a", "b", "e", "f_g", "body_rest", "rest", "unparsed").to_pylist()
    nothing = dict.fromkeys(found[0])
    assert found == [
        nothing | {"a": 1, "b": 7, "rest": '{"e":"x"}'},
        nothing | {"a": 2, "b": 1, "e": 5.0, "f_g": "x"},
        nothing | {"e": 6.5},
        nothing | {"body_rest": "r", "rest": '{"z":null}'},
    ]
    assert str(duckdb.sql(f"SELECT sum(b) FROM '{folder}/*.parquet'")).count(" 8 ") == 1


def test_without_the_contract_new_fields_stay_in_the_rest(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, bodies({"a": 1}))
    export(qcli, topic, tmp_path, "--json")
    qcli.publish(topic, bodies({"a": 1, "b": 1}))
    said = export(qcli, topic, tmp_path, "--json")
    assert (said["new_columns"], rows(tmp_path, "rest").to_pylist()[1]) == ({}, {"rest": '{"b":1}'})


PROMOTIONS = [
    ("byte", 1, 128, "int16", 1, 128),
    ("short", 1, 2**31 - 1, "int32", 1, 2**31 - 1),
    ("int", 1, 2**31, "int64", 1, 2**31),
    ("int", 7, 0.5, "double", 7.0, 0.5),
    ("long", 7, 0.5, "double", 7.0, 0.5),
    ("float", 0.1, 16777217, "double", 0.1, 16777217.0),
    ("decimal(4,2)", 1.10, 123456.7, "decimal128(9, 2)", Decimal("1.10"), Decimal("123456.70")),
    ("decimal(4,2)", 1.10, "0.1234567", "decimal128(9, 7)", Decimal("1.10"), Decimal("0.1234567")),
    ("decimal(9,2)", 1.10, 12345678.9, "decimal128(18, 2)", Decimal("1.10"), Decimal("12345678.90")),
]


@pytest.mark.parametrize(("kind", "first", "second", "wider", "one", "two"), PROMOTIONS)
def test_types_get_wider_in_all_files(
    qcli: Cli, topic: str, tmp_path: Path, kind: str, first: Any, second: Any, wider: str, one: Any, two: Any
) -> None:
    arguments = ("--schema", schema_file(tmp_path, a=kind), *EVOLVE)
    folder = tmp_path / "out"
    qcli.publish(topic, bodies({"a": first}))
    export(qcli, topic, folder, *arguments)
    qcli.publish(topic, bodies({"a": second}, {"a": "no"}))
    said = export(qcli, topic, folder, *arguments)
    assert (said["widened"], said["misfits"]) == (["a"], {"a": 1})
    assert types_in(folder, "a") == [wider] * 2
    assert rows(folder, "a").to_pylist() == [{"a": one}, {"a": two}, {"a": None}]
    qcli.publish(topic, bodies({"a": first}))
    assert export(qcli, topic, folder, *arguments)["widened"] == []


def layouts_in(folder: Path, topic: str) -> int:
    return len(json.loads((folder / "_nsq" / topic / "manifest.json").read_bytes())["layouts"])


def test_types_that_were_given_get_wider_with_the_contract_only(
    qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Also in a folder that had it before; its own schema still fits."""
    schema, folder = schema_file(tmp_path, a="long"), tmp_path / "out"
    qcli.publish(topic, bodies({"a": 1}))
    export(qcli, topic, folder, "--schema", schema, *EVOLVE)
    qcli.publish(topic, bodies({"a": 1.5}))
    said = export(qcli, topic, folder, "--schema", schema)
    assert (said["widened"], said["misfits"], types_in(folder, "a")) == ([], {"a": 1}, ["int64"] * 2)
    qcli.publish(topic, bodies({"a": 2.5}))
    assert export(qcli, topic, folder, "--schema", schema, *EVOLVE)["widened"] == ["a"]
    assert types_in(folder, "a") == ["double"] * 3


@pytest.mark.parametrize("where", ["", "a > 0 OR a IS NULL"])
@pytest.mark.parametrize(("contract", "seqs"), [("discard-row", [0]), ("discard-value", [0, 1])])
def test_contracts_that_discard_do_not_widen_inferred_columns(
    qcli: Cli, topic: str, tmp_path: Path, contract: str, seqs: list[int], where: str
) -> None:
    arguments = ("--json", "--schema-contract", contract, *(("--where", where) if where else ()))
    qcli.publish(topic, bodies({"a": 1}))
    export(qcli, topic, tmp_path, *arguments)
    qcli.publish(topic, bodies({"a": 1.5}))
    assert export(qcli, topic, tmp_path, *arguments)["widened"] == []
    assert (types_in(tmp_path, "a")[0], rows(tmp_path, "seq")["seq"].to_pylist()) == ("int64", seqs)


def test_column_that_cannot_follow_is_tried_once(qcli: Cli, topic: str, tmp_path: Path) -> None:
    schema, wider = schema_file(tmp_path, a="long"), tmp_path / "wider"
    folder = tmp_path / "out"
    wider.mkdir()
    qcli.publish(topic, bodies({"a": 2**60 + 1}))
    export(qcli, topic, folder, "--schema", schema, *EVOLVE)
    counts = []
    for _ in range(3):
        said = export(qcli, topic, folder, "--schema", schema_file(wider, a="double"), *EVOLVE)
        assert said["widened"] == []
        counts.append(layouts_in(folder, topic))
    assert counts == [2, 2, 2]
    qcli.publish(topic, bodies({"a": 1.5}))
    said = export(qcli, topic, folder, "--schema", schema, *EVOLVE)
    assert (said["misfits"], layouts_in(folder, topic)) == ({"a": 1}, 2)
    assert rows(folder, "a").to_pylist() == [{"a": 2**60 + 1}, {"a": None}]


@pytest.mark.parametrize("contract", ["", "freeze", "discard-row", "discard-value", "evolve"])
@pytest.mark.parametrize("option", ["--schema", "--columns"])
def test_the_narrower_schema_with_another_contract(
    qcli: Cli, topic: str, tmp_path: Path, option: str, contract: str
) -> None:
    """The columns of the folder stay as wide as they are."""
    schema = schema_file(tmp_path, a="decimal(10,2)", b="int")
    columns = (option, schema) if option == "--schema" else ("--json", option, "a:decimal(10,2),b:int")
    qcli.publish(topic, bodies({"a": 123456789.99, "b": 2**40}))
    said = export(qcli, topic, tmp_path / "out", *columns, *EVOLVE)
    assert said["widened"] == ["a", "b"]
    qcli.publish(topic, bodies({"a": 987654321.09, "b": 2**41}))
    options = ("--schema-contract", contract) if contract else ()
    said = export(qcli, topic, tmp_path / "out", *columns, *options)
    assert (said["messages"], said["misfits"], said["widened"]) == (1, {}, [])
    assert rows(tmp_path / "out", "a", "b").to_pylist()[1] == {"a": Decimal("987654321.09"), "b": 2**41}


def test_a_new_column_needs_a_type(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, bodies({"a": 1, "b": 1}))
    export(qcli, topic, tmp_path / "out", "--json", "--columns", "a:long")
    qcli.publish(topic, bodies({"a": 1, "b": 1}))
    result = to_parquet(topic, tmp_path / "out", "--json", "--columns", "a:long,b", *EVOLVE)
    assert (result.code, result.err) == (
        1,
        f"Error: The folder {tmp_path}/out has no column for the field b, and its type is not inferred: give it one, "
        "as in --columns b:string.\n",
    )
    said = export(qcli, topic, tmp_path / "out", "--json", "--columns", "a:long,b:long", *EVOLVE)
    assert (said["new_columns"], rows(tmp_path / "out", "b").to_pylist()[1]) == ({"b": "long"}, {"b": 1})


def test_columns_of_a_condition_get_wider_before_it_selects(tmp_path: Path) -> None:
    """Otherwise the value would be null for the condition, and the message left out."""
    write_log(tmp_path / "data", "t", [(NOON_NS, bodies({"a": 1}, {"a": 5_000_000_000}))])
    arguments = ["--schema", schema_file(tmp_path, a="int"), *EVOLVE, "--where", "a > 1000000000"]
    said = export(Cli("", ""), "t", tmp_path / "out", "--from-segments", f"b={tmp_path / 'data'}", *arguments)
    assert (said["widened"], said["messages"], said["filtered"]) == (["a"], 1, 1)
    assert rows(tmp_path / "out", "a").to_pylist() == [{"a": 5_000_000_000}]


def test_a_long_that_no_double_has_stays_a_long(qcli: Cli, topic: str, tmp_path: Path) -> None:
    arguments = ("--schema", schema_file(tmp_path, a="long"), *EVOLVE)
    qcli.publish(topic, bodies({"a": 2**53 + 1}))
    export(qcli, topic, tmp_path / "out", *arguments)
    qcli.publish(topic, bodies({"a": 0.5}))
    said = export(qcli, topic, tmp_path / "out", *arguments)
    assert (said["widened"], said["misfits"]) == ([], {"a": 1})
    assert types_in(tmp_path / "out", "a") == ["int64"] * 2


def test_a_wider_schema(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """An edited schema that is given back: a new column, and a wider type."""
    folder = tmp_path / "out"
    qcli.publish(topic, bodies({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}}))
    export(qcli, topic, folder, "--schema", schema_file(tmp_path, a="int"))
    said = export(
        qcli, topic, folder, "--schema", schema_file(tmp_path, b="struct<c:byte>", a="long"), *EVOLVE
    )
    assert (said["messages"], said["widened"]) == (0, ["a"])
    assert types_in(folder, "a") == ["int64"]
    assert rows(folder, "a", "b", "rest").to_pylist() == [
        {"a": 1, "b": {"c": 2}, "rest": '{"b":{"c":2,"d":3}}'},
        {"a": None, "b": {"c": 4}, "rest": None},
    ]


def test_a_schema_that_the_folder_cannot_have(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    qcli.publish(topic, bodies({"a": 1}))
    export(qcli, topic, tmp_path / "out", "--schema", schema_file(tmp_path, a="int"))
    result = to_parquet(topic, tmp_path / "out", "--schema", schema_file(tmp_path, a="string"), *EVOLVE)
    assert (result.code, "the field a is string in the schema, and int" in result.err.lower()) == (1, True)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-300, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
kinds = st.sampled_from([*JsonType, DecimalType(5, 2), JsonStruct((("a", JsonType.INT),))])


@given(st.lists(st.dictionaries(st.sampled_from(["x", "y"]), values), max_size=5), kinds)
def test_values_move_from_the_rest_or_stay_there(found: list[dict[str, Any]], kind: Any) -> None:
    """A column that is made of `rest` has what it would have had from the start."""
    raw = bodies(*found)
    before = Layout(body=BodyFormat.JSON, keep_rest=True)
    after = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("x", kind, "x"),), keep_rest=True)
    rest, _ = JsonParser(before).parse(raw)
    column, rest_after, unparsed = JsonParser(after).parse(raw)
    moved = columns_from_rest(rest.to_pylist(), after.json_columns)
    assert moved["x"] == column
    for late, early, bad, each in zip(
        moved["rest"].to_pylist(), rest_after.to_pylist(), unparsed.to_pylist(), found, strict=True
    ):
        left = {name: value for name, value in json.loads(late or "{}").items() if value is not None}
        if bad is None:
            assert left == {
                name: value for name, value in json.loads(early or "{}").items() if value is not None
            }
        else:
            assert left["x"] == json.loads(json.dumps(each))["x"]


# ---------------------------------------------------------------------- the types

KINDS = [
    *(JsonType.BYTE, JsonType.SHORT, JsonType.INT, JsonType.LONG, JsonType.FLOAT, JsonType.DOUBLE),
    *(JsonType.STRING, DecimalType(5, 2), DecimalType(9, 2), DecimalType(9, 4)),
]


@pytest.mark.parametrize("by", Promotion)
@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_common_types(one: Any, other: Any, by: Promotion) -> None:
    common = common_type(one, other, by)
    if common is not None and common != one:
        assert can_widen(one, common, by)
        assert common == other or can_widen(other, common, Promotion.FILES)
        assert not can_widen(common, one, by)


@pytest.mark.parametrize(
    ("one", "other", "in_iceberg", "in_files"),
    [
        # https://iceberg.apache.org/spec/#schema-evolution
        ("int", "long", True, True),
        ("float", "double", True, True),
        ("decimal(5,2)", "decimal(9,2)", True, True),
        ("decimal(5,2)", "decimal(9,3)", False, True),
        ("long", "double", False, True),
        ("int", "double", False, True),
        ("long", "int", False, False),
        ("double", "float", False, False),
        ("decimal(9,2)", "decimal(5,2)", False, False),
        ("string", "json", False, False),
        ("date", "timestamp", False, False),
    ],
)
def test_public_rules(one: str, other: str, in_iceberg: bool, in_files: bool) -> None:
    types = parse_type(one), parse_type(other)
    assert can_widen(*types, Promotion.ICEBERG) == in_iceberg
    assert can_widen(*types, Promotion.FILES) == in_files


# ---------------------------------------------------------------------- tables

NESTED = {
    "u": "struct<x:int,l:array<string>>",
    "m": "map<string,struct<y:double>>",
    "d": "decimal(6,2)",
    "t": "timestamp(ms)",
}
NESTED_ROW = {"u": {"x": 1, "l": ["q", None]}, "m": {"k": {"y": 0.5}}, "d": 1.5, "t": 1}


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_catalog(monkeypatch, tmp_path)


def table_options(target: Any) -> Sequence[str]:
    return ["--delta"] if target is DELTA else ["--iceberg", f"{ICEBERG.catalog}/{ICEBERG.name}"]


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
def test_nested_columns_of_a_table(qcli: Cli, topic: str, tmp_path: Path, target: Any) -> None:
    arguments = ("--schema", schema_file(tmp_path, **NESTED), *table_options(target))
    folder = tmp_path / "out"
    for _ in range(2):
        qcli.publish(topic, bodies(NESTED_ROW, {}))
        export(qcli, topic, folder, *arguments)
    found = table_rows(target, folder).select([*NESTED]).to_pylist()
    assert found[::2] == [found[0]] * 2
    assert found[0]["u"] == {"x": 1, "l": ["q", None]}
    assert (found[0]["m"], found[0]["d"]) == ([("k", {"y": 0.5})], Decimal("1.50"))
    assert not any(found[1].values())  # pyiceberg reads an empty map for null


def test_an_iceberg_table_gets_wider_types(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Its files stay as they are. Another export, with the narrower types, goes on."""
    columns = {"a": "int", "f": "float", "d": "decimal(4,2)", "b": "int"}
    target = table_options(ICEBERG)
    arguments = ("--schema", schema_file(tmp_path, **columns), *target)
    qcli.publish(topic, bodies({"a": 1, "f": 0.5, "d": 1.5, "b": 1}))
    export(qcli, topic, tmp_path / "out", *arguments)
    export(qcli, topic, tmp_path / "other", *arguments)
    qcli.publish(topic, bodies({"a": 2**40, "f": 16777217, "d": 12345.5, "b": 0.5, "new": 1}))
    said = export(qcli, topic, tmp_path / "out", *arguments, *EVOLVE)
    assert (said["widened"], said["misfits"]) == (["a", "d", "f"], {"b": 1})
    assert said["new_columns"] == {"new": "long"}
    assert types_in(tmp_path / "out", "a") == ["int32", "int64"]
    kinds = {each.name: str(each.field_type) for each in iceberg_table().schema().fields}
    assert [kinds[name] for name in columns] == ["long", "double", "decimal(9, 2)", "int"]
    assert export(qcli, topic, tmp_path / "other", *arguments)["misfits"] == {"a": 1, "f": 1, "d": 1, "b": 1}
    found = table_rows(ICEBERG, tmp_path).select([*columns]).to_pylist()
    old = {"a": 1, "f": 0.5, "d": Decimal("1.50"), "b": 1}
    new = {"a": 2**40, "f": 16777217.0, "d": Decimal("12345.50"), "b": None}
    assert sorted(map(str, found)) == sorted(map(str, [old, old, new, dict.fromkeys(old)]))


def test_an_iceberg_table_keeps_its_types_without_the_contract(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Its columns may be those of other exports."""
    qcli.publish(topic, bodies({"a": 1}))
    target = ("--json", *table_options(ICEBERG))
    export(qcli, topic, tmp_path / "int", "--columns", "a:int", *target)
    arguments = ("--columns", "a:long", *target)
    result = to_parquet(topic, tmp_path / "long", *arguments)
    assert (
        result.code,
        "give --schema-contract evolve, which widens it, or choose another table" in result.err,
    ) == (
        1,
        True,
    )
    assert str(iceberg_table().schema().find_type("a")) == "int"
    export(qcli, topic, tmp_path / "long", *arguments, *EVOLVE)
    assert str(iceberg_table().schema().find_type("a")) == "long"
    qcli.publish(topic, bodies({"a": 2}))
    for folder in ("int", "long"):
        export(qcli, topic, tmp_path / folder, "--columns", f"a:{folder}", *target)
    assert sorted(table_rows(ICEBERG, tmp_path)["a"].to_pylist()) == [1, 1, 2, 2]


def test_a_delta_table_keeps_its_types(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """deltalake has no type widening. New columns it has."""
    arguments = ("--schema", schema_file(tmp_path, a="int"), "--delta", *EVOLVE)
    for value in (1, 2**40):
        qcli.publish(topic, bodies({"a": value, "b": value}))
        said = export(qcli, topic, tmp_path / "out", *arguments)
    assert (said["widened"], said["misfits"]) == ([], {"a": 1})
    found = table_rows(DELTA, tmp_path / "out").select(["a", "b", "rest"]).to_pylist()
    assert found == [{"a": 1, "b": None, "rest": '{"b":1}'}, {"a": None, "b": 2**40, "rest": None}]


@pytest.mark.parametrize(
    ("kind", "target"), [("time", DELTA), ("timestamp(ns)", DELTA), ("timestamp(ns)", ICEBERG)]
)
def test_types_that_a_table_does_not_have(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, kind: str, target: Any
) -> None:
    qcli.publish(topic, bodies({"a": "x"}))
    arguments = ("--schema", schema_file(tmp_path, a=f"struct<b:{kind}>"), *table_options(target))
    result = to_parquet(topic, tmp_path / "out", *arguments)
    assert result.code == 1
    assert "table has no type" in result.err
    assert "that of the column a: choose another type" in result.err
    export(qcli, topic, tmp_path / "files", *arguments[:2])


def test_new_column_of_a_file_with_many_rows(tmp_path: Path) -> None:
    """Its values are decoded some rows at a time."""
    count = 40_001
    values = [{"a": 1, "b": n} for n in range(count)] + [{"a": 1, "b": -1}]
    write_log(tmp_path / "data", "t", [(NOON_NS, bodies(*values))])
    source = ("--from-segments", f"b={tmp_path / 'data'}", "--schema", schema_file(tmp_path, a="int"))
    export(Cli("", ""), "t", tmp_path / "out", *source, "--until", str(count))
    said = export(Cli("", ""), "t", tmp_path / "out", *source, *EVOLVE)
    assert said["new_columns"] == {"b": "long"}
    found = rows(tmp_path / "out", "seq", "b", "rest")
    assert found["b"].to_pylist() == [*range(count), -1]
    assert found["rest"].null_count == count + 1
