"""Convert JSON bodies to columns: infer the columns from a sample, and parse bodies into values.

A body that is not a JSON object, or has a value that does not match its column, is kept unparsed as a whole.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from .layout import JsonColumn, JsonType, Layout, LayoutError, check_columns

_INT64 = range(-(2**63), 2**63)
_MAX_INFERRED = 500
"""More inferred columns are an error: the keys of the bodies are probably data."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def parse_bodies(
    bodies: Sequence[bytes], layout: Layout
) -> tuple[list[list[Any]], list[str | None], list[bytes | None]]:
    """Parse bodies into the columns of a layout.

    Returns:
        The values of each column; the other fields of each body as JSON, or None; and each unparsed body, or None.
    """
    columns = layout.json_columns
    fields = [column.field for column in columns]
    converters = [_CONVERTERS[column.type] for column in columns]
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
                None if (value := found.get(name)) is None else convert(value)
                for name, convert in zip(fields, converters, strict=True)
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
    """Parse a JSON object, without the extensions NaN and Infinity. Raises ValueError, RecursionError."""
    found = _DECODER.decode(body.decode())
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def infer_columns(bodies: Iterable[bytes], given: Sequence[tuple[str, JsonType | None]]) -> list[JsonColumn]:
    """Infer columns from a sample.

    Args:
        given: Fields, with a type or None to infer it; empty: all fields of the sample.

    Raises:
        LayoutError: There are no columns, too many, or two with the same name.
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
        raise LayoutError("no message of the sample is a JSON object: columns cannot be inferred")
    if len(columns) > _MAX_INFERRED and not given:
        raise LayoutError(
            f"the messages of the sample have {len(columns)} different fields: list the columns explicitly"
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


# ---------------------------------------------------------------------- converters; raise ValueError for invalid values


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
        value.encode()  # half of a surrogate pair raises
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
    """Convert RFC 3339 text (UTC by default) or Unix seconds to microseconds."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no time")
    found = round(value * 1_000_000)
    if found not in _INT64:
        raise ValueError("no time")
    return found


_CONVERTERS: dict[JsonType, Callable[[object], Any]] = {
    JsonType.STRING: _string,
    JsonType.LONG: _long,
    JsonType.DOUBLE: _double,
    JsonType.BOOLEAN: _boolean,
    JsonType.TIMESTAMP: _timestamp,
    JsonType.JSON: _text,
}
