"""Measure the conversion of Avro, Protobuf and JSON bodies to columns, beside their libraries alone.

    python bench/bodies.py [--messages 20000] [--rounds 5]

Prints the processor time per message in µs, the least of the rounds: of the library that decodes the bodies, and of the
columns of an export, which includes decoding. The records have seven fields, of which one is a list and one a struct.
"""

import base64
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import fastavro
from bench import record
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import DESCRIPTOR as TIMESTAMP

from trio_nsq.bodies.descriptors import self_contained
from trio_nsq.log import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.bodies.protobuf import ProtobufDecoder
from trio_nsq.spark.bodies.schema import AVRO, PROTOBUF, BodySchema
from trio_nsq.spark.export.columns import TableBuilder
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout

POINT = {
    "type": "record",
    "name": "Point",
    "fields": [{"name": name, "type": "double"} for name in ("lat", "lon")],
}
SCHEMA = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "string"},
        {"name": "n", "type": "long"},
        {"name": "price", "type": "double"},
        {"name": "ok", "type": ["null", "boolean"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "place", "type": POINT},
    ],
}
"""Of Avro. The messages of the other formats have the same fields."""


def main() -> None:
    parser = record.parser(__doc__, rounds=5)
    parser.add_argument("--messages", type=int, default=20_000)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": record.begin(options, beside_nsqd=False)}
    print("| bodies | library | library alone, µs | columns, µs |\n|---|---|---|---|")
    for name, library, decode, layout, bodies in _formats(options.messages):
        alone = _least(options.rounds, len(bodies), partial(_decode, decode, bodies))
        columns = _least(options.rounds, len(bodies), partial(_table, layout, bodies))
        print(f"| {name} | {library} | {alone:.1f} | {columns:.1f} |")
        results[name] = {"library": library, "alone_us": alone, "columns_us": columns}
    record.finish(results, options, "bodies")


def _least(rounds: int, messages: int, act: Callable[[], object]) -> float:
    """Return the processor time of a call per message in µs, the least of the rounds."""
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        act()
        found.append((time.process_time() - begun) / messages * 1e6)
    return min(found)


def _decode(decode: Callable[[bytes], Any], bodies: Sequence[bytes]) -> None:
    for body in bodies:
        decode(body)


def _table(layout: Layout, bodies: Sequence[bytes]) -> Any:
    builder = TableBuilder("t", "b", layout)
    builder.add(RecordBatch(0, 1, 1, 0, pack_messages(bodies)))
    table = builder.table()
    assert builder.unparsed == 0
    return table


def _formats(messages: int) -> list[tuple[str, str, Callable[[bytes], Any], Layout, list[bytes]]]:
    """Return the formats: the name, the library, what decodes a body with it, the layout, and the bodies."""
    moment = datetime(2026, 11, 29, 12, tzinfo=UTC)
    values = [
        {
            "user": f"user{number}",
            "n": number,
            "price": number / 7,
            "ok": None if number % 3 else True,
            "at": moment,
            "tags": ["new", "mobile"],
            "place": {"lat": 52.5, "lon": 13.4},
        }
        for number in range(messages)
    ]
    avro = BodySchema(AVRO, json.dumps(SCHEMA))
    parsed = fastavro.parse_schema(SCHEMA)
    message = _message()
    kind = GetMessageClass(message)
    text = self_contained(message).SerializeToString()
    protobuf = BodySchema(PROTOBUF, base64.b64encode(text).decode(), message=message.full_name)
    return [
        (
            "Avro",
            f"fastavro {fastavro.__version__}",
            lambda body: fastavro.schemaless_reader(io.BytesIO(body), parsed, parsed),
            _layout(BodyFormat.AVRO, avro, avro),
            [_avro(parsed, value) for value in values],
        ),
        (
            "Protobuf",
            "protobuf, and fields to a dict",
            ProtobufDecoder(message).decode,
            _layout(BodyFormat.PROTOBUF, protobuf, protobuf),
            [
                kind(**{name: each for name, each in value.items() if each is not None}).SerializeToString()
                for value in values
            ],
        ),
        (
            "JSON",
            "json",
            json.loads,
            _layout(BodyFormat.JSON, avro),
            [json.dumps(value, default=lambda moment: moment.isoformat()).encode() for value in values],
        ),
    ]


def _layout(body: BodyFormat, columns: BodySchema, schema: BodySchema | None = None) -> Layout:
    fields = tuple(JsonColumn(field, kind, field) for field, kind in columns.columns())
    return Layout(body=body, json_columns=fields, body_schema=schema)


def _avro(schema: Any, value: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema, value)
    return stream.getvalue()


def _message() -> Any:
    """Return the descriptor of the Protobuf message."""
    kinds = FieldDescriptorProto
    file = FileDescriptorProto(name="click.proto", syntax="proto3", dependency=[TIMESTAMP.name])
    click, point = file.message_type.add(name="Click"), file.message_type.add(name="Point")
    for number, name in enumerate(("lat", "lon"), 1):
        point.field.add(name=name, number=number, type=kinds.TYPE_DOUBLE, label=kinds.LABEL_OPTIONAL)
    plain = (
        ("user", kinds.TYPE_STRING),
        ("n", kinds.TYPE_INT64),
        ("price", kinds.TYPE_DOUBLE),
        ("ok", kinds.TYPE_BOOL),
    )
    for number, (name, kind) in enumerate(plain, 1):
        click.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    click.field.add(
        name="at",
        number=5,
        type=kinds.TYPE_MESSAGE,
        type_name=".google.protobuf.Timestamp",
        label=kinds.LABEL_OPTIONAL,
    )
    click.field.add(name="tags", number=6, type=kinds.TYPE_STRING, label=kinds.LABEL_REPEATED)
    click.field.add(
        name="place", number=7, type=kinds.TYPE_MESSAGE, type_name=".Point", label=kinds.LABEL_OPTIONAL
    )
    pool = DescriptorPool()
    timestamp = FileDescriptorProto.FromString(TIMESTAMP.serialized_pb)
    pool.Add(timestamp)
    pool.Add(file)
    return pool.FindMessageTypeByName("Click")


if __name__ == "__main__":
    main()
