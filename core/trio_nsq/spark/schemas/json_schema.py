"""JSON Schema: the columns of an object. Only keywords that determine types count; those that check values do not."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from .column_types import (
    ColumnType,
    JsonArray,
    JsonMap,
    JsonStruct,
    JsonType,
    decimal_type,
    parse_type,
)
from .errors import SchemaError, shown

_TYPES = {
    "string": JsonType.STRING,
    "integer": JsonType.LONG,
    "number": JsonType.DOUBLE,
    "boolean": JsonType.BOOLEAN,
}
_FORMATS: Mapping[str, Mapping[str, ColumnType]] = {
    "string": {
        "date": JsonType.DATE,
        "date-time": JsonType.TIMESTAMP,
        "time": JsonType.TIME,
        "byte": JsonType.BINARY,
    },
    "integer": {
        "int8": JsonType.BYTE,
        "int16": JsonType.SHORT,
        "int32": JsonType.INT,
        "int64": JsonType.LONG,
    },
    "number": {"float": JsonType.FLOAT, "double": JsonType.DOUBLE},
}
_UNKNOWN = (
    *("allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "patternProperties"),
    *("prefixItems", "additionalItems", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "extends"),
)
"""Keywords that can change a type, and are not understood here."""
_PRECISION = 38


def json_schema_columns(schema: object) -> list[tuple[str, ColumnType]]:
    """Return the properties of an object, with the types of their columns.

    Args:
        schema: The decoded JSON of the schema.

    Raises:
        SchemaError: It is no object with properties, is not valid, or has a keyword that can change types and is not
            known here.
    """
    kind = _JsonSchemaReader(schema).read(schema, "#", frozenset())
    if not isinstance(kind, JsonStruct):
        raise SchemaError(f"the JSON Schema is {kind.value}, and columns are the properties of an object")
    return list(kind.fields)


class _JsonSchemaReader:
    def __init__(self, root: object) -> None:
        self._root = root

    def read(self, schema: object, where: str, inside: frozenset[str]) -> ColumnType:
        """Return the type of a schema; `where` is its JSON pointer, `inside` has the references that led to it."""
        if schema is True:
            return JsonType.JSON
        if not isinstance(schema, dict):
            raise SchemaError(f"{where}: {shown(schema)} is no schema")
        for keyword in _UNKNOWN:
            if keyword in schema:
                raise SchemaError(
                    f"{where}: {keyword} is not supported: say type, or nothing, for a column of JSON text"
                )
        if (reference := schema.get("$ref")) is not None:
            return self._referred(reference, where, inside)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._any_of(schema, keyword, where, inside)
        names = self._type_names(schema, where)
        kinds = [self._of_type(name, schema, where, inside) for name in names]
        return _common(kinds) if kinds else JsonType.JSON

    def _referred(self, reference: object, where: str, inside: frozenset[str]) -> ColumnType:
        if isinstance(reference, str) and reference[:1] == "#" and reference[1:2] not in ("", "/"):
            raise SchemaError(f"{where}: $ref {reference} is an anchor: give its place, such as #/$defs/NAME")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(f"{where}: $ref {shown(reference)} is not in this file: put it below $defs")
        if reference in inside or reference == "#":
            return JsonType.JSON  # an object inside of itself
        found: Any = self._root
        for part in reference[2:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise SchemaError(f"{where}: $ref {reference} does not exist") from None
        return self.read(found, reference, inside | {reference})

    def _any_of(
        self, schema: Mapping[str, Any], keyword: str, where: str, inside: frozenset[str]
    ) -> ColumnType:
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise SchemaError(f"{where}: {keyword} is no list of schemas")
        if "type" in schema or "properties" in schema:
            raise SchemaError(f"{where}: {keyword} beside a type is not supported: put all into {keyword}")
        return _common(
            [
                self.read(each, f"{where}/{keyword}/{number}", inside)
                for number, each in enumerate(branches)
                if not (isinstance(each, dict) and each.get("type") in ("null", ["null"]))
            ]
        )

    def _type_names(self, schema: Mapping[str, Any], where: str) -> list[str]:
        """Return the types of a schema, except null."""
        found = schema.get("type")
        if found is None:
            if "properties" in schema:
                found = "object"
            elif "items" in schema:
                found = "array"
            else:
                values = schema.get("enum", [schema["const"]] if "const" in schema else [])
                return list(dict.fromkeys(_type_name(each) for each in values if each is not None))
        names = [found] if isinstance(found, str) else found
        if not isinstance(names, list) or not all(
            each in (*_TYPES, "null", "array", "object") for each in names
        ):
            raise SchemaError(f"{where}: {shown(found)} is no type of JSON Schema")
        return [each for each in names if each != "null"] or ["string"]

    def _of_type(
        self, name: str, schema: Mapping[str, Any], where: str, inside: frozenset[str]
    ) -> ColumnType:
        match name:
            case "object":
                return self._object(schema, where, inside)
            case "array":
                items = schema.get("items", True)
                if isinstance(items, list):
                    raise SchemaError(f"{where}: a list of items is not supported: give one schema for all")
                return JsonArray(self.read(items, f"{where}/items", inside))
        form = schema.get("format")
        if isinstance(form, str):
            if form == "decimal":
                return _decimal(schema, where)
            if form.startswith(("decimal(", "timestamp(", "local-timestamp(")):
                try:
                    return parse_type(form)
                except ValueError as exc:
                    raise SchemaError(f"{where}: format: {exc}") from None
            if (kind := _FORMATS.get(name, {}).get(form)) is not None:
                return kind
        if name == "string" and schema.get("contentEncoding") == "base64":
            return JsonType.BINARY
        return _TYPES[name]

    def _object(self, schema: Mapping[str, Any], where: str, inside: frozenset[str]) -> ColumnType:
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, dict) and properties:
            found = {
                name: self.read(each, f"{where}/properties/{name}", inside)
                for name, each in properties.items()
            }
            return JsonStruct(tuple(found.items()))
        if isinstance(others, dict):
            return JsonMap(self.read(others, f"{where}/additionalProperties", inside))
        return JsonType.JSON


def _common(kinds: list[ColumnType]) -> ColumnType:
    different = set(kinds)
    if not different:
        return JsonType.STRING  # null only
    if len(different) == 1:
        return kinds[0]
    if different == {JsonType.LONG, JsonType.DOUBLE}:
        return JsonType.DOUBLE
    return JsonType.JSON


def _decimal(schema: Mapping[str, Any], where: str) -> ColumnType:
    """Return the type of `"format": "decimal"`, with `precision` and `scale`, or with `multipleOf` for the scale."""
    precision, scale, step = (
        schema.get("precision", _PRECISION),
        schema.get("scale"),
        schema.get("multipleOf"),
    )
    if scale is None and isinstance(step, int | float) and not isinstance(step, bool) and step > 0:
        scale = max(0, -int(Decimal(str(step)).normalize().as_tuple().exponent))
    if type(scale) is not int or type(precision) is not int:
        raise SchemaError(
            f'{where}: the format decimal needs "scale", or "multipleOf" such as 0.01; "precision" is {_PRECISION} '
            "without it"
        )
    try:
        return decimal_type(precision, scale)
    except ValueError as exc:
        raise SchemaError(f"{where}: {exc}") from None


def _type_name(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
