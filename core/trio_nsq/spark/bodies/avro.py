"""Decode Avro bodies to Python values.

A plain body is one record without a header; its writer's schema is the given one. A single object names its schema by
the fingerprint, and a framed body by an id in a registry. Whatever the writer's schema is, the record has the fields of
the reader's: Avro's schema resolution adds defaults, leaves out others, and converts numbers.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import fastavro
import fastavro.read
import fastavro.schema

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


class AvroSchema:
    """A parsed schema.

    Args:
        text: The schema as JSON.
        references: The schemas with the names that it uses, each after those that it uses itself.

    Attributes:
        parsed: The schema, for fastavro.
        expanded: The same with the definitions of named types in place of their names, where that is possible.

    Raises:
        BodySchemaError: A schema is not valid.
    """

    def __init__(self, text: str, references: Iterable[str] = ()) -> None:
        try:
            schemas = [_with_text_ids(json.loads(each)) for each in (*references, text)]
            self.parsed: Any = _parsed(schemas, expand=False)
            self.expanded: Any = _parsed(schemas, expand=True)
        except (*_REFUSES, fastavro.schema.UnknownType) as exc:
            what = f"{type(exc).__name__}: {exc}" if isinstance(exc, KeyError | TypeError) else str(exc)
            raise BodySchemaError(f"the Avro schema is not valid: {what}") from exc

    def fingerprint(self) -> bytes:
        """Return the 8 bytes of a single object."""
        canonical = fastavro.schema.to_parsing_canonical_form(self.parsed)
        return bytes.fromhex(fastavro.schema.fingerprint(canonical, _FINGERPRINT))


def _parsed(schemas: Sequence[Any], *, expand: bool) -> Any:
    """Return the last schema, which may use the names of the others."""
    named: dict[str, Any] = {}
    found = None
    for each in schemas:
        found = fastavro.parse_schema(each, named, expand=expand)
    return found


def _with_text_ids(schema: Any) -> Any:
    """Return a schema in which UUIDs are strings: Arrow would have to convert each object of Python."""
    if isinstance(schema, list):
        return [_with_text_ids(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_id = schema.get("logicalType") == "uuid" and schema.get("type") == "string"
    return "string" if is_id else {name: _with_text_ids(each) for name, each in schema.items()}


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
        self._reader = reader.parsed
        self._registry = registry
        self._by_fingerprint = {each.fingerprint(): each.parsed for each in (*writers, reader)}
        self._by_id: dict[int, Any] = {}

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
        else:
            writer, begin = self._reader, 0
        stream = io.BytesIO(body)
        stream.seek(begin)
        try:
            found = fastavro.schemaless_reader(stream, writer, self._reader)
        except _REFUSES as exc:
            raise BodyError(f"the body is no record of its schema: {exc}") from exc
        if stream.tell() != len(body):
            raise BodyError("the body is longer than a record of its schema")
        if not isinstance(found, dict):
            raise BodyError("the body is not a record")
        return found

    def _writer(self, number: int, registry: SchemaRegistry) -> Any:
        try:
            writer = self._by_id[number]
        except KeyError:
            writer = self._by_id[number] = self._asked(number, registry)
        if writer is None:
            raise BodyError(f"the schema {number} is unknown to the registry, or no Avro schema")
        return writer

    def _asked(self, number: int, registry: SchemaRegistry) -> Any:
        """Return a schema of the registry; None if it has no such Avro schema."""
        try:
            return avro_schema(registry.schema(number)).parsed
        except (SchemaNotFound, BodySchemaError):
            return None


def avro_schema(found: RegisteredSchema) -> AvroSchema:
    """Parse a schema of a registry. Raises BodySchemaError."""
    if found.kind != "AVRO":
        raise BodySchemaError(f"the schema {found.id} of the registry is {found.kind}, not AVRO")
    return AvroSchema(found.text, found.references.values())
