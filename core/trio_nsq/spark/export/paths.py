"""Fields of bodies that have other names as columns, or are in objects: `user.id AS user_id`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...filters.conditions import parse_path
from ..schemas.column_types import ColumnType, JsonMap, JsonStruct
from .layout import Layout, LayoutError

Decode = Callable[[bytes], Mapping[str, Any]]


def with_paths(decode: Decode, layout: Layout) -> Decode:
    """Return a function that decodes bodies, and adds the fields of `Layout.paths`.

    A field whose own name is the path comes first. A field that is missing, or is below a value that is no object, is
    null.
    """
    if not layout.paths:
        return decode
    paths = [(field, path, parse_path(path)) for field, path in layout.paths]

    def decoded(body: bytes) -> dict[str, Any]:
        found = decode(body)
        # All of them first: `a AS b, b AS a` exchanges two.
        values = {
            field: found[path] if path in found else _value_at(found, names) for field, path, names in paths
        }
        return {**found, **values}

    return decoded


def _value_at(value: Any, names: Sequence[str]) -> Any:
    for name in names:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def type_at(columns: Mapping[str, ColumnType], path: str) -> ColumnType:
    """Return the type of the values at a path of a schema. Raises LayoutError: it has no such field."""
    if path in columns:
        return columns[path]
    first, *names = parse_path(path)
    kind: ColumnType | None = columns.get(first)
    for name in names:
        match kind:
            case JsonStruct():
                kind = dict(kind.fields).get(name)
            case JsonMap():
                kind = kind.values
            case _:
                kind = None
    if kind is None:
        raise LayoutError(f"the schema has no field {path}; it has {', '.join(columns)}")
    return kind
