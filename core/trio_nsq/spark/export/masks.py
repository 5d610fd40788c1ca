"""The masks of an export: nothing else of it sees the bodies before, except the condition of `--where`.

The columns, `rest`, `unparsed` and `body` have the masked values.

The types of columns are those of the values themselves, so that the condition can use them; a column whose mask is text
is text, and the condition sees the text of its values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...filters.conditions import parse_path
from ...filters.masks import BodyMasks, Mask
from ..schemas.column_types import ColumnType, JsonArray, JsonMap, JsonStruct, JsonType
from .layout import JsonColumn, Layout, LayoutError


def masks_of(layout: Layout) -> BodyMasks | None:
    """Return the masks of a layout; None: it has none."""
    return BodyMasks((field, Mask(mask)) for field, mask in layout.masks) if layout.masks else None


def with_types_of_masks(columns: Iterable[JsonColumn], layout: Layout) -> list[JsonColumn]:
    """Return columns whose types were inferred from the values themselves, with the types of masked values."""
    paths = BodyMasks((field, Mask(mask)) for field, mask in layout.masks).text_paths
    whole, inside = {path[0] for path in paths if len(path) == 1}, {path[0] for path in paths}
    return [
        replace(column, type=JsonType.STRING)
        if column.widens
        and (column.field in whole or (column.field in inside and column.type is not JsonType.JSON))
        else column
        for column in columns
    ]


def check_masks(layout: Layout) -> None:
    """Check that masked values fit the columns. Raises LayoutError."""
    for field, mask in layout.masks:
        if (field in layout.partition_fields and mask == Mask.NULL) or field == layout.event_time:
            raise LayoutError(
                f"--mask hides the field {field}, which names the folders: leave out one of them"
            )
        if mask == Mask.NULL:
            continue
        for column in layout.json_columns:
            for path in {(field,), parse_path(field)}:
                kinds = _types_at(column.type, path[1:]) if column.field == path[0] else []
                for kind in kinds:
                    if kind not in (JsonType.STRING, JsonType.JSON):
                        raise LayoutError(
                            f"the field {field} has the type {kind}, and its mask {mask} is text: give it the type "
                            "string, or the mask null"
                        )


def _types_at(kind: ColumnType, path: Sequence[str]) -> list[ColumnType]:
    """Return the types of the values at a path that a column has; in an array, those of its elements."""
    match kind:
        case JsonArray() if path:
            return _types_at(kind.element, path)
        case JsonStruct() if path:
            return [
                found
                for name, inner in kind.fields
                if name == path[0]
                for found in _types_at(inner, path[1:])
            ]
        case JsonMap() if path:
            return _types_at(kind.values, path[1:])
        case JsonType.JSON | JsonType.STRING if path:
            return []
    return [kind]
