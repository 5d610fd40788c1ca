"""Decode Avro and Protobuf bodies for people: with a schema, with that of a registry, or, of Protobuf, without one.

A body is shown as it was written: the schema of the registry is the one that its producer had.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from .avro import AvroSchema, avro_schema, read_value
from .descriptors import file_of_schema, message_at, message_of, parse_set
from .errors import BodyError, BodySchemaError, RegistryError, SchemaNotFound
from .framing import FINGERPRINT_END, SINGLE_OBJECT, message_indexes, schema_id
from .protobuf_fields import decode_fields
from .registry import RegistryAccess, SchemaRegistry

MAX_VALUES = 200_000
"""How many values that take no bytes a body may have."""
FIELDS_BYTES = 64 * 1024
"""The most bytes of a message without a schema: each part is tried as a message, too."""
_REGISTRY_TIMEOUT_S = 3.0
_PAUSE_S = 10.0
"""How long a registry that does not answer is not asked again."""
_AFTER_ID = 5
_T = TypeVar("_T")


class PatientRegistry:
    """A registry for viewers: it is asked by one thread at a time, and after a failure not for some time.

    Args:
        access: Where it is.
    """

    def __init__(self, access: RegistryAccess) -> None:
        self._registry = SchemaRegistry(access)
        self._lock = threading.Lock()
        self._failed: tuple[float, RegistryError] | None = None
        self._avro: dict[int, AvroSchema] = {}

    def avro(self, number: int) -> AvroSchema:
        """Return the Avro schema with an id. Raises BodySchemaError, RegistryError."""
        return self._asked(lambda: self._parsed(number))

    def message(self, number: int, indexes: Sequence[int]) -> Descriptor:
        """Return the message with these indexes of a schema. Raises BodyError, BodySchemaError, RegistryError."""
        return self._asked(
            lambda: message_at(file_of_schema(self._registry, self._registry.schema(number)), indexes)
        )

    def _parsed(self, number: int) -> AvroSchema:
        if (found := self._avro.get(number)) is None:
            found = self._avro[number] = avro_schema(self._registry.schema(number))
        return found

    def _asked(self, ask: Callable[[], _T]) -> _T:
        with self._lock:
            if self._failed is not None and time.monotonic() < self._failed[0] + _PAUSE_S:
                raise self._failed[1].with_traceback(None)
            self._failed = None
            try:
                return ask()
            except SchemaNotFound:
                raise  # the registry keeps such ids itself
            except RegistryError as exc:
                self._failed = time.monotonic(), exc
                raise


class AvroBodies:
    """Decodes Avro bodies.

    Args:
        schema: The schema of bodies without framing; None: they must have a registry's.
        registry: The registry whose framing bodies have; None: none.
        writers: More schemas of single objects, which are found by their fingerprints.
    """

    format = "avro"
    names_fields = True

    def __init__(
        self,
        schema: AvroSchema | None,
        registry: PatientRegistry | None,
        writers: Sequence[AvroSchema] = (),
    ) -> None:
        self._schema = schema
        self._registry = registry
        known = (*writers, *([] if schema is None else [schema]))
        self._by_fingerprint = {each.fingerprint(): each for each in known}

    def value(self, body: bytes) -> Any:
        """Return the value of a body. Raises BodyError, BodySchemaError, RegistryError."""
        if self._registry is not None:
            return read_value(body, _AFTER_ID, self._registry.avro(schema_id(body)), max_values=MAX_VALUES)
        assert self._schema is not None
        schema, begin = self._schema, 0
        if body.startswith(SINGLE_OBJECT) and (known := self._by_fingerprint.get(body[2:FINGERPRINT_END])):
            schema, begin = known, FINGERPRINT_END
        return read_value(body, begin, schema, max_values=MAX_VALUES)


class ProtobufBodies:
    """Decodes Protobuf bodies.

    Args:
        message: The message of bodies without framing; None: a registry's, or the fields by number.
        registry: The registry whose framing bodies have; None: none.
    """

    format = "protobuf"

    def __init__(self, message: Descriptor | None, registry: PatientRegistry | None) -> None:
        self._message = message
        self._registry = registry
        self.names_fields: bool = message is not None or registry is not None

    def value(self, body: bytes) -> Any:
        """Return the value of a body. Raises BodyError, BodySchemaError, RegistryError."""
        message = self._message
        if self._registry is not None:
            number = schema_id(body)
            indexes, begin = message_indexes(body)
            message, body = self._registry.message(number, indexes), body[begin:]
        if message is None:
            if len(body) > FIELDS_BYTES:
                raise BodyError(f"without a schema, at most {FIELDS_BYTES // 1024} KiB are decoded")
            return decode_fields(body)
        try:
            found = GetMessageClass(message).FromString(body)
            return json_format.MessageToDict(found, preserving_proto_field_name=True)
        except (
            DecodeError,
            ValueError,
            OverflowError,
            TypeError,
            KeyError,
            RecursionError,
            json_format.Error,
        ) as exc:
            raise BodyError(f"the body is no {message.full_name}: {exc}") from exc


def avro_bodies(file: Path | None, writers: Sequence[Path], access: RegistryAccess | None) -> AvroBodies:
    """Return a decoder with the schemas of files, or of a registry. Raises BodySchemaError: a file cannot be used."""
    schema = None if file is None else _of_file(file, _avro)
    return AvroBodies(schema, _registry(access), [_of_file(each, _avro) for each in writers])


def protobuf_bodies(file: Path | None, message: str, access: RegistryAccess | None) -> ProtobufBodies:
    """Return a decoder with a message of a file's descriptors, of a registry, or without a schema.

    Raises BodySchemaError: the file cannot be used.
    """
    found = None if file is None else _of_file(file, lambda data: message_of(parse_set(data).file, message))
    return ProtobufBodies(found, _registry(access))


def _registry(access: RegistryAccess | None) -> PatientRegistry | None:
    if access is None:
        return None
    return PatientRegistry(replace(access, patience_s=0.0, request_timeout_s=_REGISTRY_TIMEOUT_S))


def _avro(data: bytes) -> AvroSchema:
    return AvroSchema(data.decode())


def _of_file(file: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(file.read_bytes())
    except OSError as exc:
        raise BodySchemaError(f"the schema {file} cannot be read: {exc.strerror}") from exc
    except (BodySchemaError, UnicodeDecodeError) as exc:
        raise BodySchemaError(f"the schema {file} cannot be used: {exc}") from exc
