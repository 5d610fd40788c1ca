"""Mask fields of JSON bodies before anything else of an export sees them, except the condition of `--where`.

The bodies themselves are rewritten, so the columns, `rest`, `unparsed` and `body` have the masked values. In a body
that is no JSON object the field cannot be found: only its size is kept.

The types of columns are those of the values themselves, so that the condition can use them; a column whose mask is text
is text, and the condition sees the text of its values.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

from ...filters.conditions import Path, parse_path
from ..schemas.column_types import ColumnType, JsonArray, JsonMap, JsonStruct, JsonType
from .json_values import decode_object, json_text
from .layout import JsonColumn, Layout, LayoutError

_HIDDEN = "***"
_LAST = 4
_MIN_CHARS = 8
"""Of shorter values, the last characters would be most of them."""


class Mask(StrEnum):
    """What a value becomes: null, its SHA-256 in hex, or asterisks and its last 4 characters.

    Of a value with less than 8 characters, and of an object or array, `LAST4` leaves the asterisks only.
    """

    NULL = "null"
    SHA256 = "sha256"
    LAST4 = "last4"


class BodyMasks:
    """The masks of a layout.

    Args:
        masks: Fields with their masks. Names of nested fields are separated by dots; in arrays, each element is
            masked. A field whose own name has these dots is masked, too. A value in which a nested field cannot be
            found, because it is neither an object nor an array, is masked itself.

    Attributes:
        text_paths: The paths whose masks are text.
    """

    def __init__(self, masks: Iterable[tuple[str, Mask]]) -> None:
        self._paths: list[tuple[Path, Mask]] = []
        for field, mask in masks:
            self._paths += [(path, mask) for path in {(field,), parse_path(field)}]
        self.text_paths: list[Path] = [path for path, mask in self._paths if mask is not Mask.NULL]

    def readable(self, bodies: Iterable[bytes]) -> list[bytes]:
        """Return the bodies for a condition: with the text of values whose masks are text, so that they fit."""
        return [self._readable(body) for body in bodies] if self.text_paths else list(bodies)

    def _readable(self, body: bytes) -> bytes:
        try:
            found = decode_object(body)
            for path in self.text_paths:
                _changed(found, path, _text)
            return json_text(found).encode()
        except (ValueError, RecursionError):
            return body

    def masked(self, bodies: Iterable[bytes]) -> list[bytes]:
        """Return the bodies as JSON with masked fields."""
        return [self._masked(body) for body in bodies]

    def _masked(self, body: bytes) -> bytes:
        try:
            found = decode_object(body)
            for path, mask in self._paths:
                _changed(found, path, partial(_hidden, mask=mask))
            # Also without the field: the body may have two members of a name, of which only the last one is decoded.
            return json_text(found).encode()
        except (ValueError, RecursionError):
            return b"withheld: %d bytes" % len(body)


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
        if (field in layout.fixed_fields and mask == Mask.NULL) or field == layout.event_time:
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


def _changed(value: Any, path: Sequence[str], change: Callable[[Any], str | None]) -> Any:
    """Return a value whose field is changed, also in each element of an array.

    A value that cannot have the field is changed itself.
    """
    if path and isinstance(value, list):
        return [_changed(each, path, change) for each in value]
    if path and isinstance(value, dict):
        if path[0] in value:
            value[path[0]] = _changed(value[path[0]], path[1:], change)
        return value
    return change(value)


def _text(value: Any) -> str | None:
    """Return the text that a mask is made of."""
    return value if value is None or isinstance(value, str) else json_text(value)


def _hidden(value: Any, mask: Mask) -> str | None:
    text = _text(value)
    if text is None or mask is Mask.NULL:
        return None
    if mask is Mask.SHA256:
        return hashlib.sha256(text.encode()).hexdigest()
    is_plain = not isinstance(value, dict | list)
    return _HIDDEN + text[-_LAST:] if is_plain and len(text) >= _MIN_CHARS else _HIDDEN
