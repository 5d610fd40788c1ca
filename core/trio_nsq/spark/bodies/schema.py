"""The schema of Avro or Protobuf bodies: where it comes from, and what it makes of them."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...bodies.errors import BodySchemaError
from ...platform.extras import install_hint
from ..schemas.column_types import ColumnType

if TYPE_CHECKING:  # of the extra `schemas`, and slow to import: every export imports this
    from ...bodies.registry import RegisteredSchema, RegistryAccess, SchemaRegistry
    from .protobuf import ProtobufDecoder

AVRO, PROTOBUF = "avro", "protobuf"
SUBJECT = "{topic}-value"
"""The subject in which Confluent's serializers register the schemas of a topic."""
_T = TypeVar("_T")


class BodyDecoder(Protocol):
    """Decodes bodies to records."""

    def decode(self, body: bytes) -> Mapping[str, Any]:
        """Return the fields of a body. Raises BodyError: it is not valid; RegistryError."""


@dataclass(frozen=True, slots=True)
class BodySchema:
    """The reader's schema: its fields are the columns, whatever schemas the bodies were written with.

    Can be pickled, and stored in the manifest.

    Attributes:
        kind: `avro` or `protobuf`.
        text: The Avro schema, or the descriptors (`FileDescriptorSet`) in base64.
        references: The Avro schemas with the names that it uses, each after those that it uses itself.
        writers: Avro schemas of older bodies, for those in the single-object encoding.
        message: The full name of the Protobuf message.
    """

    kind: str
    text: str
    references: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    message: str = ""

    def columns(self) -> Sequence[tuple[str, ColumnType]]:
        """Return the fields and their types. Raises BodySchemaError."""
        if self.kind == PROTOBUF:
            return self._protobuf(None).columns
        return _with_packages(self.kind, self._avro_columns)

    def _avro_columns(self) -> Sequence[tuple[str, ColumnType]]:
        from ...bodies.avro import AvroSchema
        from ..schemas.avro import avro_columns

        return avro_columns(AvroSchema(self.text, self.references).expanded)

    def decoder(self, registry: "SchemaRegistry | None") -> BodyDecoder:
        """Return a decoder of bodies that have the framing of this registry; None: of bodies without it.

        Raises BodySchemaError.
        """
        if self.kind == PROTOBUF:
            return self._protobuf(registry)
        return _with_packages(self.kind, lambda: self._avro(registry))

    def _avro(self, registry: "SchemaRegistry | None") -> BodyDecoder:
        from ...bodies.avro import AvroDecoder, AvroSchema

        writers = [AvroSchema(text) for text in self.writers]
        return AvroDecoder(AvroSchema(self.text, self.references), writers, registry)

    def _protobuf(self, registry: "SchemaRegistry | None") -> "ProtobufDecoder":
        def decoder() -> "ProtobufDecoder":
            from ...bodies.descriptors import message_of, parse_set
            from .protobuf import ProtobufDecoder

            files = parse_set(base64.b64decode(self.text)).file
            return ProtobufDecoder(message_of(files, self.message), registry)

        return _with_packages(self.kind, decoder)

    def to_json(self) -> list[Any]:
        """Convert to a value of the manifest."""
        return [self.kind, self.text, list(self.references), list(self.writers), self.message]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> "BodySchema":
        """Parse a value of the manifest. Raises ValueError, TypeError."""
        kind, text, references, writers, message = found
        return cls(str(kind), str(text), tuple(map(str, references)), tuple(map(str, writers)), str(message))


@dataclass(frozen=True, slots=True)
class SchemaSource:
    """Where the reader's schema comes from. Can be pickled.

    Attributes:
        given: The schema of a file; None: the latest one of `subject`.
        registry: The registry whose framing all bodies have; None: bodies have none.
        kind, message: See `BodySchema`; without `given`, `message` may be the part of the name after the package, or
            empty if the schema has one message only.
        subject: A subject of the registry; `{topic}` stands for the name of the topic.
    """

    kind: str
    given: BodySchema | None = None
    registry: "RegistryAccess | None" = None
    subject: str = SUBJECT
    message: str = ""

    def reader(self, topic: str) -> BodySchema:
        """Return the reader's schema now. Raises BodySchemaError, RegistryError, TLSFilesError."""
        if self.given is not None:
            return self.given
        assert self.registry is not None
        registry = registry_at(self.registry)
        found = registry.latest(self.subject.replace("{topic}", topic))
        if self.kind == PROTOBUF:
            return _with_packages(self.kind, lambda: _registered_protobuf(registry, found, self.message))
        return _with_packages(self.kind, lambda: _registered_avro(found))


def read_schema(kind: str, file: Path, message: str = "", writers: Sequence[Path] = ()) -> BodySchema:
    """Read a schema from a file: an Avro schema (.avsc), or what `protoc --descriptor_set_out` has written.

    Args:
        message: See `SchemaSource`.
        writers: Files with Avro schemas, see `BodySchema`.

    Raises:
        BodySchemaError: The file cannot be read, is not valid, or has no such message.
    """
    found = _parse_file(kind, file, message)
    return replace(found, writers=tuple(_parse_file(kind, each).text for each in writers))


def parse_schema(kind: str, data: bytes, message: str = "") -> BodySchema:
    """Parse the content of such a file. Arguments and errors are those of `read_schema`."""
    try:
        return _with_packages(
            kind, lambda: _protobuf_of_set(data, message) if kind == PROTOBUF else _avro_of_text(data)
        )
    except UnicodeDecodeError as exc:
        raise BodySchemaError(str(exc)) from exc


def _parse_file(kind: str, file: Path, message: str = "") -> BodySchema:
    try:
        data = file.read_bytes()
    except OSError as exc:
        raise BodySchemaError(f"the schema {file} cannot be read: {exc.strerror}") from exc
    try:
        return parse_schema(kind, data, message)
    except BodySchemaError as exc:
        raise BodySchemaError(f"the schema {file} cannot be used: {exc}") from exc


def _avro_of_text(data: bytes) -> BodySchema:
    from ...bodies.avro import AvroSchema

    text = data.decode()
    AvroSchema(text)
    return BodySchema(AVRO, text)


def _protobuf_of_set(data: bytes, message: str) -> BodySchema:
    from ...bodies.descriptors import message_of, parse_set

    return _protobuf_schema(message_of(parse_set(data).file, message))


def _registered_avro(found: "RegisteredSchema") -> BodySchema:
    from ...bodies.avro import avro_schema

    avro_schema(found)
    return BodySchema(AVRO, found.text, tuple(found.references.values()))


def _registered_protobuf(registry: "SchemaRegistry", found: "RegisteredSchema", name: str) -> BodySchema:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from ...bodies.descriptors import file_of_schema, message_of

    file = file_of_schema(registry, found)
    files = [FileDescriptorProto.FromString(each.serialized_pb) for each in (*file.dependencies, file)]
    return _protobuf_schema(message_of(files, name))


def _protobuf_schema(message: Any) -> BodySchema:
    from ...bodies.descriptors import self_contained

    text = base64.b64encode(self_contained(message).SerializeToString(deterministic=True)).decode()
    return BodySchema(PROTOBUF, text, message=message.full_name)


def _with_packages(kind: str, act: Callable[[], _T]) -> _T:
    """Call a function that needs the packages of the extra. Raises BodySchemaError: they are missing; its errors."""
    try:
        return act()
    except ModuleNotFoundError as exc:
        raise BodySchemaError(
            f"{kind} bodies need the extra 'schemas', which is not installed ({exc}): {install_hint('schemas')}"
        ) from exc


@cache
def registry_at(access: "RegistryAccess") -> "SchemaRegistry":
    """Return the registry, the same for each call of this process, so that schemas are asked for once."""
    from ...bodies.registry import SchemaRegistry

    return SchemaRegistry(access)
