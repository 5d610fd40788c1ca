"""Tests for Protobuf bodies: what Google's library has written is decoded, and all else is refused."""

import base64
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from hypothesis import given
from hypothesis import strategies as st

from spark import protos
from spark.registries import ScriptedRegistry
from trio_nsq.bodies.errors import BodyError, BodySchemaError, RegistryError
from trio_nsq.bodies.registry import RegistryAccess, SchemaRegistry
from trio_nsq.log import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.bodies.schema import PROTOBUF, BodyDecoder, BodySchema, read_schema
from trio_nsq.spark.export.columns import TableBuilder
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled messages."""
    return protos.compiled(protos.FOLDER, tmp_path_factory.mktemp("protobuf") / "order.desc", "order.proto")


def rows_of(schema: BodySchema, bodies: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the rows of bodies, without the columns about messages."""
    fields = tuple(JsonColumn(field, kind, f"_{field}") for field, kind in schema.columns())
    builder = TableBuilder(
        "t", "b", Layout(body=BodyFormat.PROTOBUF, json_columns=fields, body_schema=schema)
    )
    builder.add(RecordBatch(0, 1, 1, 0, pack_messages(bodies)))
    rows = builder.table().select([*(each.name for each in fields), "unparsed"]).to_pylist()
    return [{name.removeprefix("_"): value for name, value in row.items()} for row in rows]


def test_columns_of_scalars(descriptors: Path) -> None:
    columns = dict(read_schema(PROTOBUF, descriptors, "Scalars").columns())
    assert {field.removeprefix("f_"): kind.value for field, kind in columns.items()} == {
        "double": "double",
        "float": "float",
        "int32": "int",
        "int64": "long",
        "uint32": "long",
        "uint64": "decimal(20,0)",
        "sint32": "int",
        "sint64": "long",
        "fixed32": "long",
        "fixed64": "decimal(20,0)",
        "sfixed32": "int",
        "sfixed64": "long",
        "bool": "boolean",
        "string": "string",
        "bytes": "binary",
    }


def test_columns_of_messages(descriptors: Path) -> None:
    columns = read_schema(PROTOBUF, descriptors, "shop.Order").columns()
    assert {field: kind.value for field, kind in columns} == {
        "id": "long",
        "status": "string",
        "at": "timestamp",
        "took": "decimal(21,9)",
        "items": "array<struct<sku:string,flags:array<boolean>>>",
        "states": "map<string,string>",
        "card": "string",
        "cash": "struct<amount:double>",
        "discount": "int",
        "limit": "decimal(20,0)",
        "more": "json",
        "parent": "json",
    }


SCALARS = {
    "double": st.floats(allow_nan=False),
    "float": st.floats(width=32, allow_nan=False),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "sint32": st.integers(-(2**31), 2**31 - 1),
    "sint64": st.integers(-(2**63), 2**63 - 1),
    "fixed32": st.integers(0, 2**32 - 1),
    "fixed64": st.integers(0, 2**64 - 1),
    "sfixed32": st.integers(-(2**31), 2**31 - 1),
    "sfixed64": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "string": st.text(),
    "bytes": st.binary(),
}


@given(st.fixed_dictionaries({f"f_{name}": each for name, each in SCALARS.items()}), st.data())
def test_scalars_arrive_as_they_were_written_and_broken_bodies_are_kept(
    descriptors: Path, values: dict[str, Any], data: st.DataObject
) -> None:
    schema = read_schema(PROTOBUF, descriptors, "Scalars")
    body = protos.message_class(descriptors, "shop.Scalars")(**values).SerializeToString()
    assert rows_of(schema, [body]) == [values | {"unparsed": None}]
    at = data.draw(st.integers(0, len(body)))
    broken = body[:at] + data.draw(st.binary(min_size=1, max_size=4)) + body[at + 1 :]
    (row,) = rows_of(schema, [broken])
    assert row["unparsed"] in (None, broken)
    if row["unparsed"]:
        assert set(row.values()) == {None, broken}


def test_nested_values(descriptors: Path) -> None:
    order = protos.message_class(descriptors, "shop.Order")(id=5, status=1)
    order.at.FromDatetime(datetime(2026, 11, 29, 12, 0, 0, 123456))
    order.took.FromNanoseconds(-1_500_000_001)
    order.items.add(sku="a", flags=[True, False])
    order.states[7] = 1
    order.states[8] = 99
    order.cash.amount = 2.5
    order.limit.value = 0
    order.more["x"] = [1, None, "y"]
    order.parent.id = 4
    row = {
        "id": 5,
        "status": "PAID",
        "at": datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC),
        "took": Decimal("-1.500000001"),
        "items": [{"sku": "a", "flags": [True, False]}],
        "states": [("7", "PAID"), ("8", "99")],
        "card": None,
        "cash": {"amount": 2.5},
        "discount": None,
        "limit": Decimal(0),
        "more": '{"x":[1.0,null,"y"]}',
        "parent": '{"id":"4"}',
        "unparsed": None,
    }
    (found,) = rows_of(read_schema(PROTOBUF, descriptors, "Order"), [order.SerializeToString()])
    assert found | {"states": sorted(found["states"])} == row


def test_absent_fields_are_null_where_they_have_presence(descriptors: Path) -> None:
    (row,) = rows_of(read_schema(PROTOBUF, descriptors, "Order"), [b""])
    defaults = {"id": 0, "status": "NEW", "items": [], "states": []}
    assert row == dict.fromkeys(row) | defaults
    (row,) = rows_of(read_schema(PROTOBUF, descriptors, "Order"), [b"\x48\0"])  # an explicit 0
    assert row["discount"] == 0


def test_time_beyond_the_years_of_protobuf_leaves_the_body(descriptors: Path) -> None:
    order = protos.message_class(descriptors, "shop.Order")(id=5)
    order.at.seconds = 2**40
    body = order.SerializeToString()
    (row,) = rows_of(read_schema(PROTOBUF, descriptors, "Order"), [body])
    assert (row["id"], row["unparsed"]) == (None, body)


def test_any_of_an_unknown_type_leaves_the_body(tmp_path: Path) -> None:
    """A message inside of itself is JSON, and JSON of an Any needs the descriptor of its message."""
    fields = "google.protobuf.Any detail = 1; Node child = 2;"
    (tmp_path / "node.proto").write_text(
        f'syntax = "proto3"; import "google/protobuf/any.proto"; message Node {{ {fields} }}'
    )
    output = protos.compiled(tmp_path, tmp_path / "node.desc", "node.proto")
    schema = read_schema(PROTOBUF, output, "Node")
    assert dict(schema.columns())["detail"].value == "struct<type_url:string,value:binary>"
    unknown = b"\x0a\x05\x0a\x03x/y"  # detail { type_url: "x/y" }
    above, below = rows_of(schema, [unknown, b"\x12\x07" + unknown])
    assert (above["detail"], above["unparsed"]) == ({"type_url": "x/y", "value": b""}, None)
    assert (below["detail"], below["unparsed"]) == (None, b"\x12\x07" + unknown)


# ---------------------------------------------------------------------- descriptors


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "",
            "it has several messages, of which one must be chosen: shop.Empty, shop.Item, shop.Order, shop.Scalars",
        ),
        ("Nothing", "it has no message Nothing; it has shop.Empty, shop.Item, shop.Order, shop.Order.Cash, "),
    ],
)
def test_message_must_be_one(descriptors: Path, name: str, said: str) -> None:
    with pytest.raises(BodySchemaError) as caught:
        read_schema(PROTOBUF, descriptors, name)
    assert said in str(caught.value)


def test_nested_message_by_its_name(descriptors: Path) -> None:
    assert read_schema(PROTOBUF, descriptors, "Order.Cash").message == "shop.Order.Cash"


@pytest.mark.parametrize("data", [b"", b"{}", b"\x0a\x02\x0a\x05"])
def test_file_that_has_no_descriptors(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(BodySchemaError, match="protoc --include_imports --descriptor_set_out"):
        read_schema(PROTOBUF, tmp_path / "file")


def test_files_of_protobuf_itself_need_not_be_included(tmp_path: Path) -> None:
    output = protos.compiled(protos.FOLDER, tmp_path / "order.desc", "order.proto", imports=False)
    assert read_schema(PROTOBUF, output, "Order").message == "shop.Order"


def test_missing_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.proto").write_text('syntax = "proto3"; message A { int32 x = 1; }')
    (tmp_path / "b.proto").write_text('syntax = "proto3"; import "a.proto"; message B { A a = 1; }')
    output = protos.compiled(tmp_path, tmp_path / "b.desc", "b.proto", imports=False)
    with pytest.raises(
        BodySchemaError, match=r"b\.proto imports a\.proto, which is missing: use protoc --include"
    ):
        read_schema(PROTOBUF, output)
    output = protos.compiled(tmp_path, tmp_path / "both.desc", "b.proto")
    assert read_schema(PROTOBUF, output, "B").decoder(None).decode(b"\x0a\x02\x08\x05") == {"a": {"x": 5}}


def test_messages_that_double_with_each_level_are_refused(tmp_path: Path) -> None:
    levels = "".join(f"message M{n} {{ M{n + 1} a = 1; M{n + 1} b = 2; }}" for n in range(20))
    (tmp_path / "a.proto").write_text(f'syntax = "proto3"; {levels} message M20 {{ int32 x = 1; }}')
    output = protos.compiled(tmp_path, tmp_path / "a.desc", "a.proto")
    with pytest.raises(BodySchemaError, match="the message has more than 10,000 fields"):
        read_schema(PROTOBUF, output, "M0").columns()
    assert read_schema(PROTOBUF, output, "M10").columns()


# ---------------------------------------------------------------------- framing


def serialized(descriptors: Path) -> str:
    """Return the file of the messages as Confluent's registry returns it with `format=serialized`."""
    (file,) = (
        file
        for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file
        if file.name == "order.proto"
    )
    return base64.b64encode(file.SerializeToString()).decode()


def decoder(descriptors: Path, scripted: ScriptedRegistry) -> BodyDecoder:
    registry = SchemaRegistry(RegistryAccess(scripted.url, patience_s=0.0))
    return read_schema(PROTOBUF, descriptors, "Item").decoder(registry)


ITEM = b"\x0a\x01a"
FRAME = b"\0\0\0\0\1"
INDEX_OF_ITEM = b"\x02\x02"


@pytest.mark.parametrize("has_compiler", [False, True])
def test_descriptors_are_asked_for_where_the_source_cannot_be_compiled(
    descriptors: Path, scripted: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    """With the compiler, the source has an import that only Confluent's registry has."""
    if not has_compiler:
        monkeypatch.setitem(sys.modules, "grpc_tools", None)
    scripted.add(1, protos.SOURCE + 'import "confluent/meta.proto";' * has_compiler, "PROTOBUF")
    answer = {"schema": serialized(descriptors), "schemaType": "PROTOBUF"}
    scripted.answers["/schemas/ids/1?format=serialized"] = 200, answer
    decode = decoder(descriptors, scripted).decode
    assert decode(FRAME + INDEX_OF_ITEM + ITEM) == {"sku": "a", "flags": []}
    assert decode(FRAME + INDEX_OF_ITEM) == {"sku": "", "flags": []}
    assert [path for path, _ in scripted.requests] == ["/schemas/ids/1", "/schemas/ids/1?format=serialized"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        ITEM,
        FRAME,
        FRAME + b"\0" + ITEM,  # another message
        FRAME + b"\x02\x63" + ITEM,
        FRAME + b"\x01" + ITEM,
        FRAME + b"\xff" * 20,
        FRAME + b"\x02\x02\xff",
        b"\0\0\0\0\2" + INDEX_OF_ITEM + ITEM,
        b"\0\0\0\0\3" + INDEX_OF_ITEM + ITEM,
    ],
)
def test_framed_bodies_that_are_refused(descriptors: Path, scripted: ScriptedRegistry, body: bytes) -> None:
    scripted.add(1, serialized(descriptors), "PROTOBUF")
    scripted.add(3, '"int"')
    with pytest.raises(BodyError):
        decoder(descriptors, scripted).decode(body)


def test_source_is_compiled_where_the_registry_has_nothing_else(
    descriptors: Path, scripted: ScriptedRegistry, tmp_path: Path
) -> None:
    source = 'syntax = "proto3"; package shop; import "more/kind.proto"; message Item { more.Kind kind = 1; }'
    kind = 'syntax = "proto3"; package more; message Kind { int32 x = 1; }'
    reference = {"name": "more/kind.proto", "subject": "kind", "version": 1}
    for query in "", "?format=serialized":
        scripted.answers[f"/schemas/ids/1{query}"] = (
            200,
            {
                "schema": source,
                "schemaType": "PROTOBUF",
                "references": [reference],
            },
        )
        scripted.answers[f"/subjects/kind/versions/1{query}"] = (
            200,
            {"schema": kind, "schemaType": "PROTOBUF"},
        )
    assert decoder(descriptors, scripted).decode(FRAME + b"\0" + ITEM) == {"sku": "a", "flags": []}


@pytest.mark.parametrize(
    ("source", "references"),
    [
        ("message", ()),
        ('syntax = "proto3"; import "/etc/passwd";', ()),
        ("\ud800", ()),
        ("", ("a.proto", "a.proto/b.proto")),
        ("", ("a.proto/b.proto", "a.proto")),
        ("", ("a" * 300,)),
        ("", ("a\0b",)),
    ],
)
def test_source_that_cannot_be_compiled_leaves_the_body(
    descriptors: Path, scripted: ScriptedRegistry, source: str, references: Sequence[str]
) -> None:
    listed = [{"name": name, "subject": "s", "version": 1} for name in references]
    scripted.add(1, source, "PROTOBUF", references=listed)
    for query in "", "?format=serialized":
        scripted.answers[f"/schemas/ids/1{query}"] = scripted.answers["/schemas/ids/1"]
        scripted.answers[f"/subjects/s/versions/1{query}"] = 200, {"schema": "", "schemaType": "PROTOBUF"}
    with pytest.raises(BodyError):
        decoder(descriptors, scripted).decode(FRAME + b"\0" + ITEM)


def test_schema_is_compiled_once_for_all_its_messages_and_ranges(
    descriptors: Path, scripted: ScriptedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.add(1, protos.SOURCE, "PROTOBUF")
    scripted.answers["/schemas/ids/1?format=serialized"] = scripted.answers["/schemas/ids/1"]
    registry = SchemaRegistry(RegistryAccess(scripted.url, patience_s=0.0))
    item, order = (read_schema(PROTOBUF, descriptors, name) for name in ("Item", "Order"))
    assert item.decoder(registry).decode(FRAME + INDEX_OF_ITEM + ITEM) == {"sku": "a", "flags": []}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))  # it cannot be compiled again
    assert item.decoder(registry).decode(FRAME + INDEX_OF_ITEM)
    numbers = range(8)
    decoded = 0
    for number in numbers:
        try:
            order.decoder(registry).decode(FRAME + bytes([2, 2 * number]))
            decoded += 1
        except BodyError:
            pass
    assert decoded == 1


def test_compiler_that_is_missing_is_named(
    descriptors: Path, scripted: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.add(1, protos.SOURCE, "PROTOBUF")
    scripted.answers["/schemas/ids/1?format=serialized"] = scripted.answers["/schemas/ids/1"]
    monkeypatch.setitem(sys.modules, "grpc_tools", None)
    with pytest.raises(RegistryError, match=r"the schema 1 as source only.*pip install grpcio-tools"):
        decoder(descriptors, scripted).decode(FRAME + INDEX_OF_ITEM + ITEM)
