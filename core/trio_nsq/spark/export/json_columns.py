"""JSON bodies as columns: which there are, and what is in them.

A body is taken to pieces whole or not at all: one that is no JSON object, or has a value that does not fit its column,
is kept as it is.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from .layout import JsonColumn, JsonType, Layout, LayoutError, check_columns

_INT64 = range(-(2**63), 2**63)
_MAX_INFERRED = 500
"""Bodies whose keys are data would make columns without end."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def parse_bodies(
    bodies: Sequence[bytes], layout: Layout
) -> tuple[list[list[Any]], list[str | None], list[bytes | None]]:
    """Take bodies to pieces.

    Returns:
        The values of each column; what is left of each body, as JSON (all None if that is not kept); and each body that
        does not fit, else None.
    """
    columns = layout.json_columns
    fields = [column.field for column in columns]
    fits = [_FITS[column.type] for column in columns]
    known = set(fields)
    values: list[list[Any]] = [[] for _ in columns]
    add = [column_values.append for column_values in values]
    rest: list[str | None] = []
    unparsed: list[bytes | None] = []
    for body in bodies:
        left = None
        try:
            found = decode_object(body)
            row = [
                None if (value := found.get(name)) is None else fit(value)
                for name, fit in zip(fields, fits, strict=True)
            ]
            if layout.keep_rest and not known.issuperset(found):
                left = _text({name: value for name, value in found.items() if name not in known})
            unparsed.append(None)
        except (ValueError, OverflowError, RecursionError):
            row = [None] * len(columns)
            left = None
            unparsed.append(body)
        rest.append(left)
        for add_to, value in zip(add, row, strict=True):
            add_to(value)
    return values, rest, unparsed


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object as the RFC has it. Raises ValueError; RecursionError if it is too deep."""
    found = _DECODER.decode(body.decode())
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def infer_columns(bodies: Iterable[bytes], given: Sequence[tuple[str, JsonType | None]]) -> list[JsonColumn]:
    """Which columns there are to be.

    Args:
        bodies: Some of what is to come.
        given: Fields, and the types of those whose type is known; none: all fields there are.

    Raises:
        LayoutError: There are none, or some would be called the same.
    """
    types: dict[str, JsonType | None] = {}
    for body in bodies:
        try:
            found = decode_object(body)
        except (ValueError, RecursionError):
            continue
        for name, value in found.items():
            before = types.setdefault(name, None)
            if value is not None:
                kind = _type_of(value)
                types[name] = kind if before is None else _common(before, kind)
    if given:
        columns = [JsonColumn(name, kind or types.get(name) or JsonType.STRING) for name, kind in given]
    else:
        named = ((name, kind) for name, kind in types.items() if name and name.isprintable())
        columns = [JsonColumn(name, kind or JsonType.STRING) for name, kind in named]
    if not columns:
        raise LayoutError(
            "none of the messages looked at is a JSON object: there are no columns to be inferred"
        )
    if len(columns) > _MAX_INFERRED and not given:
        raise LayoutError(
            f"the messages looked at have {len(columns)} different fields: name those to be columns"
        )
    check_columns(columns)
    return columns


def _type_of(value: object) -> JsonType:
    if isinstance(value, bool):
        return JsonType.BOOLEAN
    if isinstance(value, int):
        return JsonType.LONG if value in _INT64 else JsonType.DOUBLE
    if isinstance(value, float):
        return JsonType.DOUBLE
    return JsonType.STRING if isinstance(value, str) else JsonType.JSON


def _common(one: JsonType, other: JsonType) -> JsonType:
    if one is other:
        return one
    if {one, other} == {JsonType.LONG, JsonType.DOUBLE}:
        return JsonType.DOUBLE
    return JsonType.JSON


# ---------------------------------------------------------------------- values; all raise ValueError if they do not fit


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _string(text)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no string")
    if not value.isascii():
        value.encode()  # half of a surrogate pair cannot be
    return value


def _long(value: object) -> int:
    if type(value) is not int or value not in _INT64:
        raise ValueError("no long")
    return value


def _double(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and int(float(value)) == value:
        return float(value)
    raise ValueError("no double")


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("no boolean")
    return value


def _timestamp(value: object) -> int:
    """Microseconds, of RFC 3339 text (UTC if it does not say otherwise), or of Unix seconds."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no time")
    found = round(value * 1_000_000)
    if found not in _INT64:
        raise ValueError("no time")
    return found


_FITS: dict[JsonType, Callable[[object], Any]] = {
    JsonType.STRING: _string,
    JsonType.LONG: _long,
    JsonType.DOUBLE: _double,
    JsonType.BOOLEAN: _boolean,
    JsonType.TIMESTAMP: _timestamp,
    JsonType.JSON: _text,
}
