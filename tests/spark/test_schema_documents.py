"""Schema documents, and the types of columns that they describe."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.spark.schemas.arrow_json import print_schema
from trio_nsq.spark.schemas.arrow_types import arrow_type
from trio_nsq.spark.schemas.column_types import (
    ColumnType,
    DecimalType,
    JsonArray,
    JsonMap,
    JsonStruct,
    JsonType,
    TimeType,
    parse_column,
    parse_type,
    split_columns,
)
from trio_nsq.spark.schemas.documents import schema_columns
from trio_nsq.spark.schemas.errors import SchemaError

names = st.text(min_size=1, max_size=8) | st.sampled_from(["a", "b c", "int", "x,y", 'q"', "<", "a:long"])
units = st.sampled_from(["s", "ms", "us", "ns"])
leaves: st.SearchStrategy[ColumnType] = (
    st.sampled_from([*JsonType])
    | st.integers(1, 38).flatmap(
        lambda digits: st.builds(DecimalType, st.just(digits), st.integers(0, digits))
    )
    | st.builds(TimeType, units, st.text(max_size=5), st.booleans())
)


def with_parts(inner: st.SearchStrategy[ColumnType]) -> st.SearchStrategy[ColumnType]:
    fields = st.dictionaries(names, inner, min_size=1, max_size=3).map(lambda found: tuple(found.items()))
    return st.builds(JsonArray, inner) | st.builds(JsonMap, inner) | st.builds(JsonStruct, fields)


types = st.recursive(leaves, with_parts, max_leaves=6)


@given(types)
def test_text_of_a_type(kind: ColumnType) -> None:
    assert parse_type(kind.value) == kind
    assert parse_type(str(kind)) == kind


@given(st.dictionaries(names.filter(str.isidentifier), types, min_size=1, max_size=4))
def test_list_of_columns(columns: dict[str, ColumnType]) -> None:
    text = ",".join(f"{name}:{kind}" for name, kind in columns.items())
    assert [parse_column(each) for each in split_columns(text)] == list(columns.items())


@given(st.dictionaries(names, types, min_size=1, max_size=4))
def test_printed_schema(columns: dict[str, ColumnType]) -> None:
    assert schema_columns(print_schema(list(columns.items()))) == list(columns.items())


@given(types)
def test_type_in_arrow(kind: ColumnType) -> None:
    assert len(pa.nulls(2, arrow_type(kind))) == 2


def avro(kind: Any, **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}], **more}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("int", "int"),
        ({"type": "bytes"}, "binary"),
        (["null", "string"], "string"),
        (["double", "null"], "double"),
        ("null", "string"),
        (["int", "long", "null"], "long"),
        (["int", "double"], "double"),
        (["long", "double"], "json"),
        (["int", "string"], "json"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "string"),
        ({"type": "fixed", "name": "F", "size": 4}, "binary"),
        (
            {"type": "fixed", "name": "F", "size": 9, "logicalType": "decimal", "precision": 20},
            "decimal(20,0)",
        ),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, "decimal(4,2)"),
        ({"type": "string", "logicalType": "uuid"}, "string"),
        ({"type": "int", "logicalType": "date"}, "date"),
        ({"type": "int", "logicalType": "time-millis"}, "time"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp(ms)"),
        ({"type": "long", "logicalType": "timestamp-nanos"}, "timestamp(ns)"),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, "local-timestamp(us)"),
        ({"type": "long", "logicalType": "of-another-program"}, "long"),
        ({"type": "array", "items": ["null", "int"]}, "array<int>"),
        ({"type": "map", "values": {"type": "array", "items": "R"}}, "map<string,array<json>>"),
        (
            {"type": {"type": "record", "name": "S", "fields": [{"name": "a", "type": "long"}]}},
            "struct<a:long>",
        ),
        ({"type": "record", "name": "S", "fields": []}, "json"),
    ],
)
def test_avro(kind: Any, expected: str) -> None:
    assert schema_columns(json.dumps(avro(kind))) == [("x", parse_type(expected))]


def test_names_of_avro_types() -> None:
    inner = {"type": "record", "name": "other.T", "fields": [{"name": "a", "type": "E"}]}
    schema = {
        "type": "record",
        "name": "R",
        "namespace": "n.s",
        "fields": [
            {"name": "e", "type": {"type": "enum", "name": "E", "namespace": "other", "symbols": []}},
            {"name": "t", "type": inner},
            {"name": "u", "type": ["null", "other.T"]},
        ],
    }
    struct = parse_type("struct<a:string>")
    assert schema_columns(json.dumps(schema)) == [("e", JsonType.STRING), ("t", struct), ("u", struct)]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null"]}, "long"),
        ({"type": "integer", "format": "int32"}, "int"),
        ({"type": "number", "format": "float"}, "float"),
        ({"type": ["integer", "number"]}, "double"),
        ({"type": ["integer", "string"]}, "json"),
        ({"type": "string", "format": "date"}, "date"),
        ({"type": "string", "format": "date-time"}, "timestamp"),
        ({"type": "string", "format": "time"}, "time"),
        ({"type": "string", "format": "email"}, "string"),
        ({"type": "integer", "format": "timestamp(ms)"}, "timestamp(ms)"),
        ({"type": "string", "format": 'timestamp(us,"%d.%m.%Y")'}, 'timestamp(us,"%d.%m.%Y")'),
        ({"type": "string", "contentEncoding": "base64"}, "binary"),
        ({"type": "number", "format": "decimal", "multipleOf": 0.05}, "decimal(38,2)"),
        ({"type": "string", "format": "decimal", "precision": 12, "scale": 4}, "decimal(12,4)"),
        ({"type": "string", "format": "decimal(6,1)"}, "decimal(6,1)"),
        ({"type": "array", "items": {"type": "boolean"}}, "array<boolean>"),
        ({"type": "array"}, "array<json>"),
        ({"items": {"type": "boolean"}}, "array<boolean>"),
        ({"properties": {"a b": {"type": "null"}}}, 'struct<"a b":string>'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "map<string,long>"),
        ({"type": "object", "additionalProperties": False}, "json"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}]}, "struct<n:long,next:json>"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "double"),
        ({"enum": ["a", None]}, "string"),
        ({"const": 1}, "long"),
        ({}, "json"),
        (True, "json"),
    ],
)
def test_json_schema(schema: Any, expected: str) -> None:
    linked = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/a~1b"}}}
    document = {"properties": {"x": schema}, "required": ["x"], "$defs": {"a/b": linked}}
    assert schema_columns(json.dumps(document)) == [("x", parse_type(expected))]


@pytest.mark.parametrize(
    ("kind", "children", "expected"),
    [
        ({"name": "int", "bitWidth": 16, "isSigned": True}, [], "short"),
        ({"name": "int", "bitWidth": 32, "isSigned": False}, [], "long"),
        ({"name": "int", "bitWidth": 64, "isSigned": False}, [], "decimal(20,0)"),
        ({"name": "floatingpoint", "precision": "SINGLE"}, [], "float"),
        ({"name": "decimal", "precision": 10, "scale": 2, "bitWidth": 128}, [], "decimal(10,2)"),
        ({"name": "timestamp", "unit": "NANOSECOND", "timezone": "UTC"}, [], "timestamp(ns)"),
        ({"name": "timestamp", "unit": "SECOND"}, [], "local-timestamp(s)"),
        ({"name": "utf8"}, [], "string"),
        ({"name": "list"}, [{"name": "item", "type": {"name": "bool"}, "children": []}], "array<boolean>"),
        (
            {"name": "map", "keysSorted": False},
            [
                {
                    "name": "entries",
                    "type": {"name": "struct"},
                    "children": [
                        {"name": "key", "nullable": False, "type": {"name": "utf8"}, "children": []},
                        {"name": "value", "type": {"name": "date", "unit": "DAY"}, "children": []},
                    ],
                }
            ],
            "map<string,date>",
        ),
        ("struct", [{"name": "a", "type": "array<int>"}], "struct<a:array<int>>"),
    ],
)
def test_arrow(kind: Any, children: list[Any], expected: str) -> None:
    fields = [{"name": "x", "nullable": True, "type": kind, "children": children}]
    for document in ({"fields": fields}, {"schema": {"fields": fields}, "batches": []}):
        assert schema_columns(json.dumps(document)) == [("x", parse_type(expected))]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("nonsense", "not valid JSON"),
        ("[1]", "no JSON object"),
        ('{"a": 1}', "no JSON Schema"),
        ('{"fields": []}', "no field"),
        ('{"fields": [{"name": "a", "type": "integer"}]}', "the field a: 'integer' is not a type"),
        ('{"fields": [{"name": "a", "type": {"name": "union"}}]}', "no column can have the type"),
        ('{"fields": [{"name": "a", "type": {"name": "int"}}]}', "not complete"),
        ('{"fields": [{"name": "a", "type": "int"}, {"name": "a", "type": "int"}]}', "another field has"),
        ('{"fields": [{"name": "a", "type": "struct"}]}', "needs children"),
        ('{"properties": {"a": {"allOf": []}}}', "#/properties/a: allOf is not supported"),
        ('{"properties": {"a": {"$ref": "other.json"}}}', "is not in this file"),
        ('{"properties": {"a": {"$ref": "#/$defs/b"}}}', "does not exist"),
        ('{"properties": {"a": {"type": "int"}}}', "no type of JSON Schema"),
        ('{"properties": {"a": {"type": "string", "format": "decimal"}}}', 'needs "scale"'),
        ('{"properties": {"a": {"type": "integer", "format": "timestamp(min)"}}}', "format"),
        ('{"properties": {"a": {"type": "array", "items": [{}]}}}', "a list of items"),
        ('{"type": "string"}', "is string, and columns are"),
        ('{"type": "object"}', "is json, and columns are"),
        (json.dumps(avro("T")), "the field x: there is no type T"),
        (json.dumps(avro({"type": "enum", "symbols": []})), "a enum has no name"),
        (json.dumps(avro({"type": "bytes", "logicalType": "decimal", "precision": 50})), "beyond 38"),
        (json.dumps(avro("int", fields=[{"name": "a b", "type": "int"}])), "has no name"),
        (json.dumps({"type": "record", "name": "R"}), "no list of fields"),
        (json.dumps({"properties": {"a": {"$ref": "#anchor"}}}), "#anchor is an anchor"),
        ('{"properties":' + '{"a":{"properties":' * 60 + '{"b":{}}' + "}}" * 60 + "}", "more than 50 levels"),
        (r'{"properties":{"\ud800":{"type":"string"}}}', "half of a pair"),
        (r'{"properties":{"a":{"properties":{"\ud800":{"type":"string"}}}}}', "half of a pair"),
        ('{"properties":' + '{"a":{"items":' * 500 + "{}" + "}}" * 500 + "}", "."),
    ],
)
def test_documents_that_cannot_be_used(document: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        schema_columns(document)
