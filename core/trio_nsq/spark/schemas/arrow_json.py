"""Arrow's schema as JSON, and the form of it that is printed and edited.

    {"fields": [
      {"name": "id", "type": "long"},
      {"name": "price", "type": "decimal(10,2)"},
      {"name": "user", "type": "struct", "children": [{"name": "age", "type": "int"}]},
      {"name": "items", "type": "array", "children": [{"name": "element", "type": "struct", "children": [...]}]}
    ]}

A type is the text of `column_types`, or the object that Arrow's libraries write: `{"name": "int", "bitWidth": 64,
"isSigned": true}`. `nullable` is ignored: each column can be null.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .column_types import (
    ColumnType,
    JsonArray,
    JsonMap,
    JsonStruct,
    JsonType,
    TimeType,
    decimal_type,
    parse_type,
)
from .errors import SchemaError, shown

_INTS = {8: JsonType.BYTE, 16: JsonType.SHORT, 32: JsonType.INT, 64: JsonType.LONG}
_UNITS = {"SECOND": "s", "MILLISECOND": "ms", "MICROSECOND": "us", "NANOSECOND": "ns"}
_PLAIN = {
    "bool": JsonType.BOOLEAN,
    **dict.fromkeys(("utf8", "largeutf8", "utf8view"), JsonType.STRING),
    **dict.fromkeys(("binary", "largebinary", "binaryview", "fixedsizebinary"), JsonType.BINARY),
    "date": JsonType.DATE,
    "time": JsonType.TIME,
}
_LISTS = ("array", "list", "largelist", "listview", "fixedsizelist")


def arrow_columns(schema: object) -> list[tuple[str, ColumnType]]:
    """Return the fields of a schema, with the types of their columns.

    Args:
        schema: The decoded JSON of the schema, or of a file of Arrow's integration tests, which has it as `schema`.

    Raises:
        SchemaError: It is not valid, or has a type that columns do not have.
    """
    found = schema.get("schema", schema) if isinstance(schema, dict) else schema
    if not isinstance(found, dict):
        raise SchemaError("the schema is no object with fields")
    return _fields(found.get("fields"), "the schema")


def print_schema(columns: Sequence[tuple[str, ColumnType]]) -> str:
    """Return the document for columns, with a line for each field."""
    lines = ['{"fields": [', *_lines(columns, 1), "]}"]
    return "\n".join(lines) + "\n"


def _lines(columns: Sequence[tuple[str, ColumnType]], depth: int) -> list[str]:
    lines = []
    for number, (name, kind) in enumerate(columns):
        comma = "," if number < len(columns) - 1 else ""
        indent, head = "  " * depth, f'{{"name": {json.dumps(name, ensure_ascii=False)}'
        word, children = _parts(kind)
        if children is None:
            lines.append(f'{indent}{head}, "type": {json.dumps(kind.value, ensure_ascii=False)}}}{comma}')
        else:
            lines += [f'{indent}{head}, "type": "{word}", "children": [', *_lines(children, depth + 1)]
            lines.append(f"{indent}]}}{comma}")
    return lines


def _parts(kind: ColumnType) -> tuple[str, Sequence[tuple[str, ColumnType]] | None]:
    """Return the word and the children of a type that has a struct in it; None: its text is short."""
    match kind:
        case JsonStruct():
            return "struct", kind.fields
        case JsonArray() if _parts(kind.element)[1] is not None:
            return "array", [("element", kind.element)]
        case JsonMap() if _parts(kind.values)[1] is not None:
            return "map", [("value", kind.values)]
    return "", None


def _fields(fields: object, where: str) -> list[tuple[str, ColumnType]]:
    if not isinstance(fields, list):
        raise SchemaError(f"{where} has no list of fields")
    found: dict[str, ColumnType] = {}
    for field in fields:
        name = field.get("name") if isinstance(field, dict) else None
        if not isinstance(name, str) or not name or name in found:
            raise SchemaError(f"{where}: {shown(field)} has no name, or one that another field has")
        found[name] = _kind(field, f"the field {name}")
    return list(found.items())


def _kind(field: Mapping[str, Any], where: str) -> ColumnType:
    kind = field.get("type")
    if isinstance(kind, str) and kind not in ("struct", "array", "map"):
        try:
            return parse_type(kind)
        except ValueError as exc:
            raise SchemaError(f"{where}: {exc}") from None
    name = kind if isinstance(kind, str) else kind.get("name") if isinstance(kind, dict) else None
    children = field.get("children", [])
    if name == "struct":
        found = _fields(children, where)
        if not found:
            raise SchemaError(f"{where}: a struct needs children; for any object, the type is json")
        return JsonStruct(tuple(found))
    if name in _LISTS:
        return JsonArray(_only(children, where))
    if name == "map":
        return JsonMap(_map_values(children, where))
    return _arrow_type(name, kind if isinstance(kind, dict) else {}, where)


def _only(children: object, where: str) -> ColumnType:
    if not isinstance(children, list) or len(children) != 1 or not isinstance(children[0], dict):
        raise SchemaError(f"{where}: it needs one child")
    return _kind(children[0], f"{where}: {children[0].get('name')}")


def _map_values(children: object, where: str) -> ColumnType:
    """Return the type of the values: of the only child, or, as Arrow has them, of the second one of that struct."""
    match children:
        case [{"type": {"name": "struct"}, "children": [dict() as key, dict() as value]}]:
            if _kind(key, f"{where}: key") is not JsonType.STRING:
                raise SchemaError(f"{where}: the keys of a map are strings")
            return _kind(value, f"{where}: value")
    return _only(children, where)


def _arrow_type(name: object, kind: Mapping[str, Any], where: str) -> ColumnType:
    try:
        match name:
            case "int" if kind.get("isSigned", True):
                return _INTS[kind["bitWidth"]]
            case "int" if kind["bitWidth"] < 64:
                return _INTS[2 * kind["bitWidth"]]  # it has all numbers without a sign
            case "int":
                return decimal_type(20, 0)
            case "floatingpoint":
                return JsonType.DOUBLE if kind["precision"] == "DOUBLE" else JsonType.FLOAT
            case "decimal":
                return decimal_type(kind["precision"], kind["scale"])
            case "timestamp":
                return TimeType(_UNITS[kind["unit"]], is_local=not kind.get("timezone"))
            case str() if name in _PLAIN:
                return _PLAIN[name]
    except (KeyError, TypeError, ValueError) as exc:
        raise SchemaError(
            f"{where}: the type {shown(kind)} is not complete, or does not exist: {exc}"
        ) from None
    raise SchemaError(f"{where}: no column can have the type {shown(kind or name)}")
