"""Avro schemas: the columns of a record."""

import re
from collections.abc import Mapping
from typing import Any

from .column_types import ColumnType, JsonArray, JsonMap, JsonStruct, JsonType, TimeType, decimal_type
from .errors import SchemaError, shown

_PRIMITIVES = {
    "null": JsonType.STRING,
    "boolean": JsonType.BOOLEAN,
    "int": JsonType.INT,
    "long": JsonType.LONG,
    "float": JsonType.FLOAT,
    "double": JsonType.DOUBLE,
    "bytes": JsonType.BINARY,
    "string": JsonType.STRING,
}
_LOGICAL: Mapping[tuple[str, str], ColumnType] = {
    ("int", "date"): JsonType.DATE,
    ("int", "time-millis"): JsonType.TIME,
    ("long", "time-micros"): JsonType.TIME,
    **{
        ("long", f"{prefix}timestamp-{name}"): TimeType(unit, is_local=bool(prefix))
        for prefix in ("", "local-")
        for name, unit in (("millis", "ms"), ("micros", "us"), ("nanos", "ns"))
    },
}
_WIDER = (
    ({JsonType.INT, JsonType.LONG}, JsonType.LONG),
    ({JsonType.FLOAT, JsonType.DOUBLE}, JsonType.DOUBLE),
    ({JsonType.INT, JsonType.FLOAT, JsonType.DOUBLE}, JsonType.DOUBLE),
)
_MAX_TYPES = 10_000
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def avro_columns(schema: object) -> list[tuple[str, ColumnType]]:
    """Return the fields of a record, with the types of their columns.

    Unions with null are the other type. Other unions of numbers are the wider type, and all other unions `json`, as is
    a record inside of itself. Enums are strings, and `fixed` is binary. Logical types are dates, times, decimals and
    timestamps; a uuid is a string.

    Args:
        schema: The decoded JSON of the schema.

    Raises:
        SchemaError: It is no record, is not valid, or has too many types.
    """
    reader = _AvroReader()
    kind = reader.read(schema, "", "the schema")
    if not isinstance(kind, JsonStruct):
        raise SchemaError(f"the Avro schema is {kind.value}, and the columns are those of a record")
    return list(kind.fields)


class _AvroReader:
    """Reads a schema with named types."""

    def __init__(self) -> None:
        self._named: dict[str, ColumnType | None] = {}  # None: it is being read
        self._sizes: dict[str, int] = {}
        self._types = 0  # so far, with those of each place where a named type is used

    def read(self, schema: object, namespace: str, where: str) -> ColumnType:
        self._count(1, where)
        match schema:
            case str():
                return self._reference(schema, namespace, where)
            case list():
                return self._union(schema, namespace, where)
            case {"type": dict() | list() as inner}:
                return self.read(inner, namespace, where)
            case dict() if isinstance(name := schema.get("type"), str):
                return self._complex(name, schema, namespace, where)
        raise SchemaError(f"{where}: {shown(schema)} is no Avro type")

    def _count(self, types: int, where: str) -> None:
        self._types += types
        if self._types > _MAX_TYPES:
            raise SchemaError(
                f"{where}: the schema has more than {_MAX_TYPES} types, with repeated uses of named types"
            )

    def _reference(self, name: str, namespace: str, where: str) -> ColumnType:
        if name in _PRIMITIVES:
            return _PRIMITIVES[name]
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        for each in (full, name):
            if each in self._named:
                self._count(self._sizes.get(each, 0), where)
                return self._named[each] or JsonType.JSON  # a record inside of itself
        raise SchemaError(f"{where}: there is no type {name}")

    def _union(self, branches: list[Any], namespace: str, where: str) -> ColumnType:
        kinds = [self.read(each, namespace, where) for each in branches if each != "null"]
        different = list(dict.fromkeys(kinds))
        if len(different) <= 1:
            return different[0] if different else JsonType.STRING
        for narrow, wide in _WIDER:
            if narrow.issuperset(different):
                return wide
        return JsonType.JSON

    def _complex(self, name: str, schema: Mapping[str, Any], namespace: str, where: str) -> ColumnType:
        match name:
            case "array":
                return JsonArray(self.read(schema.get("items"), namespace, f"{where}: items"))
            case "map":
                return JsonMap(self.read(schema.get("values"), namespace, f"{where}: values"))
            case "record" | "error":
                return self._record(schema, namespace, where)
            case "enum":
                self._name(schema, namespace, where, JsonType.STRING)
                return JsonType.STRING
            case "fixed":
                kind = self._decimal(schema, where) or JsonType.BINARY
                if schema.get("logicalType") == "uuid":
                    kind = JsonType.STRING
                self._name(schema, namespace, where, kind)
                return kind
        if name == "bytes" and (decimal := self._decimal(schema, where)) is not None:
            return decimal
        if (logical := _LOGICAL.get((name, str(schema.get("logicalType"))))) is not None:
            return logical
        return self._reference(name, namespace, where)

    def _record(self, schema: Mapping[str, Any], namespace: str, where: str) -> ColumnType:
        full, before = self._name(schema, namespace, where, None), self._types
        inner, fields = full.rpartition(".")[0], schema.get("fields")
        if not isinstance(fields, list):
            raise SchemaError(f"{where}: the record {full} has no list of fields")
        found: dict[str, ColumnType] = {}
        for field in fields:
            name = field.get("name") if isinstance(field, dict) else None
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in found:
                raise SchemaError(f"{where}: {shown(field)} has no name, or one that another field has")
            if "type" not in field:
                raise SchemaError(f"{where}: the field {name} has no type")
            found[name] = self.read(field["type"], inner, f"the field {name}")
        # No column type has no fields.
        kind = JsonStruct(tuple(found.items())) if found else JsonType.JSON
        self._named[full], self._sizes[full] = kind, self._types - before
        return kind

    def _name(self, schema: Mapping[str, Any], namespace: str, where: str, kind: ColumnType | None) -> str:
        """Give a named type to the types that may refer to it, and return its full name."""
        name = schema.get("name")
        if not isinstance(name, str):
            raise SchemaError(f"{where}: a {schema['type']} has no name")
        own = schema.get("namespace", namespace)
        full = name if "." in name or not own else f"{own}.{name}"
        self._named[full] = kind
        return full

    def _decimal(self, schema: Mapping[str, Any], where: str) -> ColumnType | None:
        if schema.get("logicalType") != "decimal":
            return None
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        try:
            if type(precision) is int and type(scale) is int:
                return decimal_type(precision, scale)
        except ValueError as exc:
            raise SchemaError(f"{where}: {exc}") from None
        raise SchemaError(f"{where}: a decimal needs a precision, and its scale is a whole number")
