"""Schema documents: which kind a document is, and the columns that it describes."""

import json
from collections.abc import Mapping
from typing import Any

from .arrow_json import arrow_columns
from .avro import avro_columns
from .column_types import ColumnType, parse_type
from .errors import SchemaError
from .json_schema import json_schema_columns


def schema_columns(document: bytes | str) -> list[tuple[str, ColumnType]]:
    """Return the fields of a JSON Schema, an Avro schema, or Arrow's JSON, with the types of their columns.

    Raises:
        SchemaError: It is none of these, or cannot be used.
    """
    try:
        found = json.loads(document)
    except (ValueError, RecursionError) as exc:
        raise SchemaError(f"it is not valid JSON: {exc}") from None
    if not isinstance(found, dict):
        raise SchemaError("it is no JSON object")
    try:
        columns = _columns(found)
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    if not columns:
        raise SchemaError("it has no field")
    for name, kind in columns:
        _check_text(name, kind)
    return columns


def _check_text(name: str, kind: ColumnType) -> None:
    """Check that a manifest can have a column. Raises SchemaError."""
    try:
        name.encode()
        kind.value.encode()
        parse_type(kind.value)
    except UnicodeEncodeError:
        raise SchemaError(f"a name in the field {name!a} is no Unicode text: it has half of a pair") from None
    except ValueError as exc:
        raise SchemaError(f"the field {name}: {exc}") from None


def _columns(found: Mapping[str, Any]) -> list[tuple[str, ColumnType]]:
    if found.get("type") in ("record", "error"):
        return avro_columns(found)
    if isinstance(found.get("fields"), list) or isinstance(found.get("schema"), dict):
        return arrow_columns(found)
    if found.keys() & {"$schema", "properties", "$ref", "anyOf", "oneOf", "type"}:
        return json_schema_columns(found)
    raise SchemaError(
        'it is no JSON Schema ("properties"), Avro schema ("type": "record"), or Arrow schema ("fields")'
    )
