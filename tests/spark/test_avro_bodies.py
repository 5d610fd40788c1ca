"""Tests for Avro bodies: what Avro's and Confluent's libraries have written is decoded, and all else is refused."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import fastavro.schema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.registries import ScriptedRegistry
from trio_nsq.bodies.avro import AvroDecoder, AvroSchema
from trio_nsq.bodies.errors import BodyError, BodySchemaError
from trio_nsq.bodies.registry import RegistryAccess, SchemaRegistry
from trio_nsq.log import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.bodies.schema import AVRO, BodySchema
from trio_nsq.spark.export.columns import TableBuilder
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout
from trio_nsq.spark.schemas.avro import avro_columns
from trio_nsq.spark.schemas.errors import SchemaError


def record(*fields: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, "type": kind, **more} for name, kind in fields],
    }


def written(schema: Any, value: Mapping[str, Any], before: bytes = b"") -> bytes:
    """Return a record as fastavro writes it."""
    stream = io.BytesIO()
    stream.write(before)
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def framed(number: int, schema: Any, value: Mapping[str, Any]) -> bytes:
    return written(schema, value, b"\0" + number.to_bytes(4, "big"))


def decoder(schema: Any, *writers: Any, registry: ScriptedRegistry | None = None) -> AvroDecoder:
    found = None if registry is None else SchemaRegistry(RegistryAccess(registry.url, patience_s=0))
    writers_of = [AvroSchema(json.dumps(each)) for each in writers]
    return AvroDecoder(AvroSchema(json.dumps(schema)), writers_of, found)


def columns(schema: Any, bodies: Sequence[bytes]) -> tuple[list[dict[str, Any]], TableBuilder]:
    """Return the rows of bodies in the columns of a schema, without those about messages, and the builder."""
    text = BodySchema(AVRO, json.dumps(schema))
    fields = tuple(JsonColumn(field, kind, field) for field, kind in text.columns())
    builder = TableBuilder("t", "b", Layout(body=BodyFormat.AVRO, json_columns=fields, body_schema=text))
    builder.add(RecordBatch(0, 1, 1, 0, pack_messages(bodies)))
    names = [*(field for field, _ in text.columns()), "unparsed"]
    return builder.table().select(names).to_pylist(), builder


NOON = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
MILLIS = NOON.replace(microsecond=123000)
VALUES: list[tuple[Any, Any, Any]] = [
    ("null", None, None),
    ("boolean", True, True),
    ("int", -(2**31), -(2**31)),
    ("long", 2**63 - 1, 2**63 - 1),
    ("float", 0.5, 0.5),
    ("double", 1e300, 1e300),
    ("string", "größe", "größe"),
    ("bytes", b"\xff\0", b"\xff\0"),
    ({"type": "fixed", "name": "F", "size": 2}, b"ab", b"ab"),
    ({"type": "enum", "name": "E", "symbols": ["NEW", "PAID"]}, "PAID", "PAID"),
    ({"type": "array", "items": "long"}, [1, 2], [1, 2]),
    ({"type": "map", "values": "int"}, {"a": 1}, [("a", 1)]),
    (["null", "string"], None, None),
    (["null", "string"], "x", "x"),
    (["int", "long"], 2**40, 2**40),
    (["null", "string", "int"], 5, "5"),
    (["string", "int"], "5", '"5"'),
    ({"type": "int", "logicalType": "date"}, date(2026, 11, 29), date(2026, 11, 29)),
    ({"type": "int", "logicalType": "time-millis"}, time(1, 2, 3, 4000), time(1, 2, 3, 4000)),
    ({"type": "long", "logicalType": "time-micros"}, time(1, 2, 3, 4), time(1, 2, 3, 4)),
    ({"type": "long", "logicalType": "timestamp-millis"}, MILLIS, MILLIS),
    ({"type": "long", "logicalType": "timestamp-micros"}, NOON, NOON),
    (
        {"type": "long", "logicalType": "local-timestamp-micros"},
        NOON.replace(tzinfo=None),
        NOON.replace(tzinfo=None),
    ),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        Decimal("-1.50"),
        Decimal("-1.50"),
    ),
    ({"type": "string", "logicalType": "uuid"}, UUID(int=1), str(UUID(int=1))),
    (
        record(("x", "int"), ("y", ["null", "string"])) | {"name": "P"},
        {"x": 1, "y": None},
        {"x": 1, "y": None},
    ),
    (["null", {"type": "array", "items": record(("x", "int")) | {"name": "P"}}], [{"x": 1}], [{"x": 1}]),
]


@pytest.mark.parametrize(("kind", "value", "expected"), VALUES)
def test_values_arrive_as_they_were_written(kind: Any, value: Any, expected: Any) -> None:
    schema = record(("a", kind), ("b", "string"))
    rows, builder = columns(schema, [written(schema, {"a": value, "b": "end"})])
    assert rows == [{"a": expected, "b": "end", "unparsed": None}]
    assert (builder.unparsed, builder.misfits) == (0, {})


def test_not_a_number_stays_one() -> None:
    schema = record(("a", "double"))
    rows, _ = columns(schema, [written(schema, {"a": math.nan}), written(schema, {"a": -math.inf})])
    assert math.isnan(rows[0]["a"])
    assert rows[1]["a"] == -math.inf


def test_record_inside_of_itself_is_json() -> None:
    schema = record(("value", "int"), ("next", ["null", "R"]))
    value = {"value": 1, "next": {"value": 2, "next": None}}
    rows, _ = columns(schema, [written(schema, value)])
    assert rows == [{"value": 1, "next": '{"value":2,"next":null}', "unparsed": None}]


def test_invalid_bodies_are_kept_and_others_stay() -> None:
    schema = record(("a", "string"), ("b", "long"))
    good = written(schema, {"a": "x", "b": 1})
    bad = [b"", b"{}", good[:-1], good + b"\0", b"\xff" * 30, written(schema, {"a": "x" * 200, "b": 1})[:100]]
    rows, builder = columns(schema, [good, *bad, good])
    row = {"a": "x", "b": 1, "unparsed": None}
    assert rows == [row, *({"a": None, "b": None, "unparsed": body} for body in bad), row]
    assert builder.unparsed == len(bad)


def test_date_that_no_reader_has_leaves_the_body() -> None:
    kind = {"type": "long", "logicalType": "timestamp-millis"}
    body = written(record(("a", "long")), {"a": 2**60})
    rows, _ = columns(record(("a", kind)), [body])
    assert rows == [{"a": None, "unparsed": body}]


# ---------------------------------------------------------------------- bodies that would take too much

NODE = record(("next", ["null", "R"]))


def varint(number: int) -> bytes:
    """Return a number that is not negative as Avro writes it."""
    found, left = bytearray(), number << 1
    while left >= 0x80:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (NODE, b"\x02" * 200_000 + b"\0"),
        (record(("a", {"type": "array", "items": "null"})), varint(2**40) + b"\0"),
        (record(("a", {"type": "array", "items": record() | {"name": "E"}})), varint(2**40) + b"\0"),
        (record(("a", {"type": "array", "items": ["null", "R"]})), b"\xff" * 2**20),
        (record(("a", VALUES[23][0])), varint(2**20) + b"\x7f" * 2**20),
    ],
    ids=["nested records", "nulls", "empty records", "long number", "long decimal"],
)
def test_body_that_would_take_too_much_is_refused_and_others_stay(schema: Any, body: bytes) -> None:
    """A body may neither end the process nor take minutes."""
    rows, builder = columns(schema, [body])
    assert [row["unparsed"] for row in rows] == [body]
    assert builder.unparsed == 1


def test_schema_of_a_writer_bounds_what_is_left_out(scripted: ScriptedRegistry) -> None:
    """The reader's schema has nothing of what the writer's makes of the body."""
    fields: list[tuple[str, Any]] = [
        ("x", ["null", "R"]),
        ("n", {"type": "array", "items": "null"}),
        ("a", "int"),
    ]
    writer = record(*fields)
    scripted.add(1, json.dumps(writer))
    decode = decoder(OLD, registry=scripted).decode
    for body in b"\x02" * 200_000, b"\0" + varint(2**40) + b"\0\x0a":
        with pytest.raises(BodyError):
            decode(b"\0\0\0\0\1" + body)
    value = {"x": {"x": None, "n": [None], "a": 1}, "n": [None, None], "a": 5}
    assert decode(framed(1, writer, value)) == {"a": 5}


def test_values_without_bytes_are_bounded_by_the_size_of_the_body(scripted: ScriptedRegistry) -> None:
    """An item of a byte has 100 values of the reader's schema."""
    items = record(("flag", "boolean")) | {"name": "I"}
    more = [{"name": f"f{number}", "type": "int", "default": 0} for number in range(99)]
    wide = items | {"fields": [*items["fields"], *more]}
    scripted.add(1, json.dumps(record(("a", {"type": "array", "items": items}))))
    decode = decoder(record(("a", {"type": "array", "items": wide})), registry=scripted).decode
    frame = b"\0\0\0\0\1"
    with pytest.raises(BodyError, match="too many items"):
        decode(frame + varint(2**20) + b"\1" * 2**20 + b"\0")
    found = decode(frame + varint(3) + b"\1" * 3 + b"\0")
    assert [len(each) for each in found["a"]] == [100, 100, 100]


def test_schema_whose_types_double_with_each_level_is_refused() -> None:
    kind: Any = "null"
    for level in range(30):
        inner = kind if level == 0 else f"L{level - 1}"
        kind = record(("a", kind), ("b", inner)) | {"name": f"L{level}"}
    with pytest.raises(BodySchemaError, match="more than 10000 types"):
        AvroSchema(json.dumps(kind))
    with pytest.raises(SchemaError, match="more than 10000"):
        avro_columns(kind)


def test_decimals_have_the_scale_of_their_writer(scripted: ScriptedRegistry) -> None:
    def amount(precision: int, scale: int) -> dict[str, Any]:
        kind = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
        return record(("amount", kind))

    value = {"amount": Decimal("12345678901234567890123456789012345.67")}
    scripted.add(1, json.dumps(amount(37, 2)))
    decode = decoder(amount(38, 3), registry=scripted).decode
    assert decode(framed(1, amount(37, 2), value)) == value


@given(st.recursive(st.none(), lambda inner: st.fixed_dictionaries({"next": inner}), max_leaves=50))
def test_records_inside_of_themselves_are_decoded(value: Any) -> None:
    assert decoder(NODE).decode(written(NODE, {"next": value})) == {"next": value}


FIELDS = {
    "string": st.text(),
    "long": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "boolean": st.booleans(),
    "bytes": st.binary(),
}


@st.composite
def schemas_and_values(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a schema of nullable, repeated and plain fields, and values of it."""
    kinds = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4))
    fields: list[tuple[str, Any]] = []
    values: dict[str, st.SearchStrategy[Any]] = {}
    for number, kind in enumerate(kinds):
        form = draw(st.sampled_from(["plain", "nullable", "array"]))
        whole = {"plain": kind, "nullable": ["null", kind], "array": {"type": "array", "items": kind}}[form]
        plain = FIELDS[kind]
        values[f"f{number}"] = {
            "plain": plain,
            "nullable": st.none() | plain,
            "array": st.lists(plain, max_size=3),
        }[form]
        fields.append((f"f{number}", whole))
    return record(*fields), draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=4))


@given(schemas_and_values(), st.data())
def test_every_body_is_a_row_or_kept(
    found: tuple[dict[str, Any], list[dict[str, Any]]], data: st.DataObject
) -> None:
    schema, values = found
    bodies = [written(schema, value) for value in values]
    rows, builder = columns(schema, bodies)
    assert rows == [value | {"unparsed": None} for value in values]
    cut = data.draw(st.sampled_from(bodies))
    at = data.draw(st.integers(0, max(0, len(cut) - 1)))
    broken = cut[:at] + data.draw(st.binary(max_size=4)) + cut[at + 1 :]
    (row,), builder = columns(schema, [broken])
    assert row["unparsed"] == (broken if builder.unparsed else None)


# ---------------------------------------------------------------------- schemas of writers

OLD = record(("a", "int"))
NEW = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "b", "type": "string", "default": "none"}, {"name": "a", "type": "long"}],
}


def single_object(schema: Any, value: Mapping[str, Any]) -> bytes:
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    fingerprint = bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))
    return written(schema, value, b"\xc3\x01" + fingerprint)


def test_single_objects_are_decoded_with_the_schema_of_their_fingerprint() -> None:
    decode = decoder(NEW, OLD).decode
    assert decode(single_object(NEW, {"b": "x", "a": 2**40})) == {"b": "x", "a": 2**40}
    assert decode(single_object(OLD, {"a": 5})) == {"b": "none", "a": 5}
    with pytest.raises(BodyError):
        decode(single_object(record(("other", "int")), {"other": 5}))


def test_single_object_with_an_unknown_fingerprint_is_not_read_as_a_plain_body() -> None:
    """The bytes of the header are a valid record of the schema: -98, and a text."""
    schema = record(("a", "long"), ("b", "string"))
    body = b"\xc3\x01" + varint(7) + b"x" * 7
    assert decoder(schema).decode(body) == {"a": -98, "b": "x" * 7}
    with pytest.raises(BodyError, match="fingerprint"):
        decoder(schema, OLD).decode(body)


def test_fingerprint_is_the_one_of_the_specification() -> None:
    """Its example: the little-endian CRC-64-AVRO of `"int"`, which other implementations publish, too."""
    assert AvroSchema('"int"').fingerprint().hex() == "8f5c393f1ad57572"


def test_framed_bodies_are_resolved_to_the_fields_of_the_reader(scripted: ScriptedRegistry) -> None:
    scripted.add(1, json.dumps(OLD))
    scripted.add(2, json.dumps(NEW))
    decode = decoder(NEW, registry=scripted).decode
    assert decode(framed(1, OLD, {"a": 5})) == {"b": "none", "a": 5}
    assert decode(framed(2, NEW, {"b": "x", "a": 6})) == {"b": "x", "a": 6}
    assert decode(framed(2, NEW, {"b": "y", "a": 7})) == {"b": "y", "a": 7}
    assert [path for path, _ in scripted.requests] == ["/schemas/ids/1", "/schemas/ids/2"]


@pytest.mark.parametrize(
    ("number", "schema", "kind"),
    [
        (1, json.dumps(OLD), "PROTOBUF"),
        (1, "{}", "AVRO"),
        (1, '{"type":"record","name":"Other","fields":[]}', "AVRO"),
    ],
)
def test_body_of_a_schema_that_cannot_be_read_is_refused(
    scripted: ScriptedRegistry, number: int, schema: str, kind: str
) -> None:
    scripted.add(number, schema, kind)
    decode = decoder(NEW, registry=scripted).decode
    for body in (
        framed(number, OLD, {"a": 5}),
        framed(77, OLD, {"a": 5}),
        framed(2**31, OLD, {"a": 5}),
        b"\1" + framed(1, OLD, {"a": 5})[1:],
        b"\0",
    ):
        with pytest.raises(BodyError):
            decode(body)
    assert {path for path, _ in scripted.requests} == {"/schemas/ids/1", "/schemas/ids/77"}  # ids are signed


def test_schema_that_was_unknown_once_is_asked_for_again_by_the_next_registry(
    scripted: ScriptedRegistry,
) -> None:
    access, reader = RegistryAccess(scripted.url), AvroSchema(json.dumps(NEW))
    with pytest.raises(BodyError):
        AvroDecoder(reader, registry=SchemaRegistry(access)).decode(framed(1, OLD, {"a": 5}))
    scripted.add(1, json.dumps(OLD))
    decoder = AvroDecoder(reader, registry=SchemaRegistry(access))
    assert decoder.decode(framed(1, OLD, {"a": 5})) == {"b": "none", "a": 5}


def test_references_are_read_before_the_schema_that_uses_them(scripted: ScriptedRegistry) -> None:
    user = {"type": "record", "name": "shop.User", "fields": [{"name": "at", "type": "shop.Time"}]}
    when = {"type": "fixed", "name": "shop.Time", "size": 2}
    order = {"type": "record", "name": "shop.Order", "fields": [{"name": "user", "type": "User"}]}
    users = [{"name": "shop.User", "subject": "user", "version": 3}]
    times = [{"name": "shop.Time", "subject": "time", "version": 1}]
    scripted.add(1, json.dumps(order), subject="orders", references=users)
    scripted.answers["/subjects/user/versions/3"] = 200, {"schema": json.dumps(user), "references": times}
    scripted.answers["/subjects/time/versions/1"] = 200, {"schema": json.dumps(when)}
    found = SchemaRegistry(RegistryAccess(scripted.url)).latest("orders")
    schema = BodySchema(AVRO, found.text, tuple(found.references.values()))
    assert [f"{field}:{kind}" for field, kind in schema.columns()] == ["user:struct<at:binary>"]
    assert schema.decoder(None).decode(b"ab") == {"user": {"at": b"ab"}}
    assert BodySchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"type":"record"}', '{"type":"nothing"}', '"shop.Missing"', "[" * 5000]
)
def test_schema_that_is_not_valid(text: str) -> None:
    with pytest.raises(BodySchemaError, match="the Avro schema is not valid"):
        AvroSchema(text)
