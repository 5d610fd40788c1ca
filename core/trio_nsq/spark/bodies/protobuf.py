"""Decode Protobuf bodies to Python values, and the columns of a message.

| field | column |
|---|---|
| int32, sint32, sfixed32 | int |
| int64, sint64, sfixed64, uint32, fixed32 | long |
| uint64, fixed64 | decimal(20,0) |
| enum | string: the name, or the number of a value that the schema does not have |
| repeated, map | array, map; keys become text |
| message | struct |
| google.protobuf.Timestamp | timestamp, in microseconds |
| google.protobuf.Duration | decimal(21,9), in seconds |
| a wrapper such as google.protobuf.Int64Value | the type of its value |
| google.protobuf.Struct, Value, ListValue | json |
| a message inside of itself, or without fields | json |

A field that has presence (`optional`, a message, or a part of a `oneof`) is null if it is absent; others have their
default value then.
"""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from operator import attrgetter
from typing import Any, NamedTuple

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ...bodies.descriptors import file_of_schema, message_at
from ...bodies.errors import BodyError, BodySchemaError, SchemaNotFound
from ...bodies.framing import message_indexes, schema_id
from ...bodies.registry import SchemaRegistry
from ..schemas.column_types import ColumnType, DecimalType, JsonArray, JsonMap, JsonStruct, JsonType

_GOOGLE = "google.protobuf."
_JSON_MESSAGES = frozenset({f"{_GOOGLE}Struct", f"{_GOOGLE}Value", f"{_GOOGLE}ListValue"})
_WRAPPERS = frozenset(
    f"{_GOOGLE}{kind}Value"
    for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_SCALARS: Mapping[int, ColumnType] = {
    FieldDescriptor.TYPE_DOUBLE: JsonType.DOUBLE,
    FieldDescriptor.TYPE_FLOAT: JsonType.FLOAT,
    FieldDescriptor.TYPE_INT32: JsonType.INT,
    FieldDescriptor.TYPE_SINT32: JsonType.INT,
    FieldDescriptor.TYPE_SFIXED32: JsonType.INT,
    FieldDescriptor.TYPE_INT64: JsonType.LONG,
    FieldDescriptor.TYPE_SINT64: JsonType.LONG,
    FieldDescriptor.TYPE_SFIXED64: JsonType.LONG,
    FieldDescriptor.TYPE_UINT32: JsonType.LONG,
    FieldDescriptor.TYPE_FIXED32: JsonType.LONG,
    FieldDescriptor.TYPE_UINT64: DecimalType(20, 0),
    FieldDescriptor.TYPE_FIXED64: DecimalType(20, 0),
    FieldDescriptor.TYPE_BOOL: JsonType.BOOLEAN,
    FieldDescriptor.TYPE_STRING: JsonType.STRING,
    FieldDescriptor.TYPE_BYTES: JsonType.BINARY,
}
_DURATION = DecimalType(21, 9)
_TIMES_S = range(-62_135_596_800, 253_402_300_800)
"""The years 1 to 9999, those of a valid Timestamp."""

MAX_TYPES = 10_000
"""How many fields a message may have, with those of each place where a message is used."""

_Convert = Callable[[Any], Any]


class _Kind(NamedTuple):
    """The type of a column, and what converts a value; None: nothing to convert."""

    type: ColumnType
    convert: _Convert | None


class ProtobufDecoder:
    """Decodes bodies to records with the fields of one message.

    Args:
        message: The message.
        registry: The registry whose framing all bodies have; None: bodies are plain.

    Raises:
        BodySchemaError: The message has too many fields.
    """

    def __init__(self, message: Descriptor, registry: SchemaRegistry | None = None) -> None:
        self.columns, self._convert = _Columns().record(message, ())
        self._parse = GetMessageClass(message).FromString
        self._name = message.full_name
        self._registry = registry
        self._files: dict[int, FileDescriptor | None] = {}
        """The files of schemas, by id; None for one that cannot be used."""
        self._names: dict[tuple[int, tuple[int, ...]], str] = {}
        """The full names of messages, by id and message indexes. Only of messages that exist: others have no limit."""

    def decode(self, body: bytes) -> Mapping[str, Any]:
        """Return the record of a body.

        Raises:
            BodyError: The body is not valid, has an unknown schema, or is another message.
            RegistryError: The registry cannot be asked.
        """
        if self._registry is not None:
            number = schema_id(body)
            indexes, begin = message_indexes(body)
            if self._name_of(number, indexes, self._registry) != self._name:
                raise BodyError(f"the body is no {self._name}, or its schema is unknown")
            body = body[begin:]
        try:
            found: dict[str, Any] = self._convert(self._parse(body))
        except (DecodeError, ValueError, OverflowError, TypeError, KeyError, json_format.Error) as exc:
            # json_format raises TypeError for an Any of an unknown type.
            raise BodyError(f"the body is no {self._name}: {exc}") from exc
        return found

    def _name_of(self, number: int, indexes: tuple[int, ...], registry: SchemaRegistry) -> str:
        """Return the full name of a message; empty if the schema is unknown. Raises BodyError: it lacks the message."""
        key = number, indexes
        if (name := self._names.get(key)) is not None:
            return name
        if number not in self._files:
            try:
                self._files[number] = file_of_schema(registry, registry.schema(number))
            except SchemaNotFound:
                return ""  # not kept: there may be any number of unknown ids, and the registry forgets them
            except BodySchemaError:
                self._files[number] = None
        if (file := self._files[number]) is None:
            return ""
        name = self._names[key] = message_at(file, indexes).full_name
        return name


class _Columns:
    """Makes the columns of a message, and counts their types."""

    def __init__(self) -> None:
        self._types = 0

    def record(
        self, message: Descriptor, above: tuple[str, ...]
    ) -> tuple[tuple[tuple[str, ColumnType], ...], Callable[[Any], dict[str, Any]]]:
        """Return the fields of a message with their types, and what converts the message to a dict.

        Args:
            above: The names of the messages that it is in.

        Raises:
            BodySchemaError: There are too many types.
        """
        self._types += len(message.fields)
        if self._types > MAX_TYPES:
            raise BodySchemaError(
                f"the message has more than {MAX_TYPES:,} fields, with those of each place where a message is used"
            )
        fields = []
        getters: list[tuple[str, _Convert]] = []
        for each in message.fields:
            kind, get = self._field(each, (*above, message.full_name))
            fields.append((each.name, kind))
            getters.append((each.name, get))
        return tuple(fields), lambda found: {name: get(found) for name, get in getters}

    def _field(self, field: FieldDescriptor, above: tuple[str, ...]) -> tuple[ColumnType, _Convert]:
        """Return the type of a field, and what returns its value from a message."""
        name, entry = field.name, field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            values, convert = self._kind(entry.fields_by_name["value"], above)
            return JsonMap(values), lambda found: _map(getattr(found, name), convert)
        kind, convert = self._kind(field, above)
        get = attrgetter(name)
        if field.is_repeated:
            if convert is None:
                return JsonArray(kind), lambda found: list(get(found))
            return JsonArray(kind), lambda found: [*map(convert, get(found))]
        if field.has_presence:
            if convert is None:
                return kind, lambda found: get(found) if found.HasField(name) else None
            return kind, lambda found: convert(get(found)) if found.HasField(name) else None
        return kind, get if convert is None else lambda found: convert(get(found))

    def _kind(self, field: FieldDescriptor, above: tuple[str, ...]) -> _Kind:
        """Return the type of one value of a field."""
        if field.enum_type is not None:
            return _Kind(JsonType.STRING, _enum(field.enum_type))
        if (message := field.message_type) is None:
            return _Kind(_SCALARS[field.type], None)
        name = message.full_name
        if name == f"{_GOOGLE}Timestamp":
            return _Kind(JsonType.TIMESTAMP, _microseconds)
        if name == f"{_GOOGLE}Duration":
            return _Kind(_DURATION, _seconds)
        if name in _WRAPPERS:
            return _Kind(_SCALARS[message.fields_by_name["value"].type], attrgetter("value"))
        if name in _JSON_MESSAGES or name in above or not message.fields:
            return _Kind(JsonType.JSON, _json)
        fields, convert = self.record(message, above)
        return _Kind(JsonStruct(fields), convert)


def _enum(enum: EnumDescriptor) -> _Convert:
    names = {number: value.name for number, value in enum.values_by_number.items()}
    return lambda number: names.get(number) or str(number)


def _map(found: Mapping[Any, Any], convert: _Convert | None) -> dict[str, Any]:
    return {_key(key): found[key] if convert is None else convert(found[key]) for key in found}


def _key(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key)  # `true`, not `True`


def _microseconds(found: Any) -> int:
    if found.seconds not in _TIMES_S or not 0 <= found.nanos < 10**9:
        raise ValueError("a Timestamp is out of range")
    return int(found.seconds * 1_000_000 + found.nanos // 1000)


def _seconds(found: Any) -> Decimal:
    if abs(found.nanos) >= 10**9 or abs(found.seconds) >= 10**12:
        raise ValueError("a Duration is out of range")
    return (Decimal(found.seconds * 10**9 + found.nanos)).scaleb(-9)


def _json(found: Any) -> Any:
    return json_format.MessageToDict(found, preserving_proto_field_name=True)
