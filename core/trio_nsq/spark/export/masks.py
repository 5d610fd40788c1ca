"""The masks of an export: nothing else of it sees the bodies before, except the condition of `--where`.

The columns, `rest`, `unparsed` and `body` have the masked values.

The types of columns are those of the values themselves, so that the condition can use them; a column whose mask is text
is text, and the condition sees the text of its values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...filters.conditions import Path, parse_path
from ...filters.masks import BodyMasks, Mask
from ..schemas.column_types import ColumnType, JsonArray, JsonMap, JsonStruct, JsonType
from .layout import JsonColumn, Layout, LayoutError


def masks_of(layout: Layout) -> BodyMasks | None:
    """Return the masks of a layout; None: it has none."""
    return BodyMasks((field, Mask(mask)) for field, mask in layout.masks) if layout.masks else None


def with_types_of_masks(columns: Iterable[JsonColumn], layout: Layout) -> list[JsonColumn]:
    """Return columns whose types were inferred from the values themselves, with the types of masked values."""
    paths = BodyMasks((field, Mask(mask)) for field, mask in layout.masks).text_paths
    found = []
    for column in columns:
        inner = [rest for path in paths for rest in _below(layout, column.field, path)]
        if column.widens and (() in inner or (inner and column.type is not JsonType.JSON)):
            column = replace(column, type=JsonType.STRING)
        found.append(column)
    return found


def _below(layout: Layout, field: str, path: Path) -> list[Path]:
    """Return where a masked path is in the values of a field's column; empty: it is in none of them."""
    return [path[len(begin) :] for begin in _paths_of(layout, field) if path[: len(begin)] == begin]


def _paths_of(layout: Layout, field: str) -> set[Path]:
    """Return where bodies may have the values of a field's column."""
    source = layout.path_of(field)
    return {(source,), (parse_path(source) if source != field else (source,))}


def _overlap(one: Path, other: Path) -> bool:
    """Whether one path begins with the other. A mask below a value hides that, too, if it is no object."""
    return one[: len(other)] == other or other[: len(one)] == one


def check_masks(layout: Layout) -> None:
    """Check that masked values fit the columns, and leave different keys different. Raises LayoutError."""
    renamed = dict(layout.paths)
    for field, mask in layout.masks:
        paths = {(field,), parse_path(field)}
        if (source := renamed.get(field)) is not None and not any(
            begin[: len(path)] == path for begin in _paths_of(layout, field) for path in paths
        ):
            raise LayoutError(
                f"--mask {field} names a column, and its values have the path {source} in the bodies: write "
                f"--mask {source}={mask}"
            )
        for each in filter(None, [*layout.key, layout.operation]):
            is_distinct = mask == Mask.SHA256 and each != layout.operation
            begins = _paths_of(layout, each)
            if any(
                _overlap(begin, path) and not (is_distinct and begin == path)
                for begin in begins
                for path in paths
            ):
                raise LayoutError(
                    f"--mask {field}={mask} hides the field {each} of --key or --op, so different keys would be one, "
                    "or none: leave out one of them, or choose the mask sha256 for a key"
                )
        columns = [
            *(layout.partition_fields if mask == Mask.NULL else ()),
            *filter(None, [layout.event_time]),
        ]
        if any(
            _overlap(begin, path) for each in columns for begin in _paths_of(layout, each) for path in paths
        ):
            raise LayoutError(
                f"--mask hides the field {field}, which names the folders: leave out one of them"
            )
        if mask == Mask.NULL:
            continue
        for column in layout.json_columns:
            for inner in (inner for path in paths for inner in _below(layout, column.field, path)):
                for kind in _types_at(column.type, inner):
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
