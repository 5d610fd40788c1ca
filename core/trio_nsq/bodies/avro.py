"""Decode Avro bodies to Python values.

A plain body is one record without a header; its writer's schema is the given one. A single object names its schema by
the fingerprint, and a framed body by an id in a registry. Whatever the writer's schema is, the record has the fields of
the reader's: Avro's schema resolution adds defaults, leaves out others, and converts numbers.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any

import fastavro
import fastavro.read
import fastavro.schema

from .avro_bounds import MAX_VALUES, bounds_of, read_bounded
from .errors import BodyError, BodySchemaError, SchemaNotFound
from .framing import FINGERPRINT_END, SINGLE_OBJECT, schema_id
from .registry import RegisteredSchema, SchemaRegistry

_FINGERPRINT = "CRC-64-AVRO"
_REFUSES = (
    EOFError,
    ValueError,  # also UnicodeDecodeError
    IndexError,
    KeyError,
    TypeError,
    OverflowError,  # a date beyond the year 9999
    ArithmeticError,
    RecursionError,
    MemoryError,  # of a length in an invalid body
    fastavro.read.SchemaResolutionError,
    fastavro.schema.SchemaParseException,
)
"""What fastavro raises for schemas and bodies that are not valid, or do not fit each other."""
_DECIMAL = "trio-nsq-decimal"
"""The logical type of decimals for fastavro: its own reader takes minutes for a number of 1 MiB."""
_MAX_DECIMAL_BITS = 127  # of 38 digits
_DECIMAL_CONTEXT = Context(prec=39)


class AvroSchema:
    """A parsed schema.

    Args:
        text: The schema as JSON.
        references: The schemas with the names that it uses, each after those that it uses itself.

    Attributes:
        parsed: The schema, for fastavro.
        named: The schemas of its named types.
        bounds: What bodies of the schema can be.
        expanded: The schema with the definitions of named types in place of their names, where that is possible.

    Raises:
        BodySchemaError: A schema is not valid, or too large.
    """

    def __init__(self, text: str, references: Iterable[str] = ()) -> None:
        try:
            schemas = [json.loads(each) for each in (*references, text)]
            self.named: dict[str, Any] = {}
            self.parsed: Any = _parsed([_for_reading(each) for each in schemas], self.named, expand=False)
            self.bounds = bounds_of(self.parsed, self.named)  # before the types are expanded
            self.expanded: Any = _parsed(schemas, {}, expand=True)
        except (*_REFUSES, fastavro.schema.UnknownType) as exc:
            what = f"{type(exc).__name__}: {exc}" if isinstance(exc, KeyError | TypeError) else str(exc)
            raise BodySchemaError(f"the Avro schema is not valid: {what}") from exc

    def fingerprint(self) -> bytes:
        """Return the 8 bytes of a single object."""
        canonical = fastavro.schema.to_parsing_canonical_form(self.parsed)
        return bytes.fromhex(fastavro.schema.fingerprint(canonical, _FINGERPRINT))


def _parsed(schemas: Sequence[Any], named: dict[str, Any], *, expand: bool) -> Any:
    """Return the last schema, which may use the names of the others. Add all named types to `named`."""
    found = None
    for each in schemas:
        found = fastavro.parse_schema(each, named, expand=expand)
    return found


def _for_reading(schema: Any) -> Any:
    """Return a schema whose UUIDs are strings, as Arrow takes them, and whose decimals `_decimal` reads."""
    if isinstance(schema, list):
        return [_for_reading(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kind, logical = schema.get("type"), schema.get("logicalType")
    if logical == "uuid" and kind == "string":
        return "string"
    found = {name: _for_reading(each) for name, each in schema.items()}
    return found | {"logicalType": _DECIMAL} if logical == "decimal" and kind in ("bytes", "fixed") else found


def _decimal(data: Any, writer: dict[Any, Any] | None, reader: object = None) -> Decimal:
    """Return a decimal. Raises ValueError: it has more than 38 digits, and no column has its type."""
    number = int.from_bytes(data, "big", signed=True)
    if number.bit_length() > _MAX_DECIMAL_BITS:
        raise ValueError("a decimal has more than 38 digits")
    return Decimal(number).scaleb(-(writer or {}).get("scale", 0), _DECIMAL_CONTEXT)


for _kind in "bytes", "fixed":
    fastavro.read.LOGICAL_READERS[f"{_kind}-{_DECIMAL}"] = _decimal


class AvroDecoder:
    """Decodes bodies to records of one schema.

    Args:
        reader: The schema of the records.
        writers: More schemas of single objects, which are found by their fingerprints.
        registry: The registry whose framing all bodies have; None: bodies are plain, or single objects.
    """

    def __init__(
        self,
        reader: AvroSchema,
        writers: Sequence[AvroSchema] = (),
        registry: SchemaRegistry | None = None,
    ) -> None:
        self._reader = reader
        self._registry = registry
        self._by_fingerprint = {each.fingerprint(): each for each in (*writers, reader)}
        self._knows_writers = bool(writers)
        self._by_id: dict[int, AvroSchema | None] = {}  # without unknown ids: the registry forgets them

    def decode(self, body: bytes) -> Mapping[str, Any]:
        """Return the record of a body.

        Raises:
            BodyError: The body is not valid, or its schema is unknown or cannot be converted to the reader's.
            RegistryError: The registry cannot be asked.
        """
        if self._registry is not None:
            writer, begin = self._writer(schema_id(body), self._registry), 5
        elif body.startswith(SINGLE_OBJECT) and (known := self._by_fingerprint.get(body[2:FINGERPRINT_END])):
            writer, begin = known, FINGERPRINT_END
        elif body.startswith(SINGLE_OBJECT) and self._knows_writers:
            raise BodyError("the body is a single object, and none of the schemas has its fingerprint")
        else:
            writer, begin = self._reader, 0
        found = read_value(body, begin, writer, self._reader)
        if not isinstance(found, dict):
            raise BodyError("the body is not a record")
        return found

    def _writer(self, number: int, registry: SchemaRegistry) -> AvroSchema:
        try:
            writer = self._by_id[number]
        except KeyError:
            try:
                writer = self._by_id[number] = self._parsed(registry.schema(number))
            except SchemaNotFound as exc:
                raise BodyError(f"the schema {number} is unknown: {exc}") from None
        if writer is None:
            raise BodyError(f"the schema {number} of the registry is no Avro schema")
        return writer

    def _parsed(self, schema: RegisteredSchema) -> AvroSchema | None:
        """Return a schema of the registry; None if it is no valid Avro schema."""
        try:
            found = avro_schema(schema)
        except BodySchemaError:
            return None
        return self._reader if found.parsed == self._reader.parsed else found


def read_value(
    body: bytes,
    begin: int,
    writer: AvroSchema,
    reader: AvroSchema | None = None,
    max_values: int = MAX_VALUES,
) -> Any:
    """Return the value that begins at an index of a body, and ends with it.

    Args:
        reader: The schema of the value; None: the writer's.
        max_values: How many values that take no bytes it may have.

    Raises:
        BodyError: It is not a value of its schema, or has too many values.
    """
    found, end = read_prefix(body, begin, writer, reader, max_values)
    if end != len(body):
        raise BodyError("the body is longer than a record of its schema")
    return found


def read_prefix(
    body: bytes,
    begin: int,
    writer: AvroSchema,
    reader: AvroSchema | None = None,
    max_values: int = MAX_VALUES,
) -> tuple[Any, int]:
    """Return the value that begins at an index, and the index where it ends. See `read_value`."""
    stream = io.BytesIO(body)
    stream.seek(begin)
    reader = reader or writer
    size, free = len(body) - begin, writer.bounds.free
    if reader is not writer:
        free *= 1 + reader.bounds.defaults
    try:
        if writer.bounds.is_flat and size * free <= max_values:
            found = fastavro.schemaless_reader(stream, writer.parsed, reader.parsed)
        else:
            named = {"writer": writer.named, "reader": reader.named}
            other = None if reader is writer else reader.parsed
            found = read_bounded(stream, size, free, writer.parsed, other, named, max_values)
    except _REFUSES as exc:
        raise BodyError(f"the body is no record of its schema: {exc}") from exc
    return found, stream.tell()


def avro_schema(found: RegisteredSchema) -> AvroSchema:
    """Parse a schema of a registry. Raises BodySchemaError."""
    if found.kind != "AVRO":
        raise BodySchemaError(f"the schema {found.id} of the registry is {found.kind}, not AVRO")
    return AvroSchema(found.text, found.references.values())
