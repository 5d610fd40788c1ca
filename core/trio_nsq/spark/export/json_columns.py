"""Convert JSON bodies to columns: infer the columns from a sample, and parse bodies into Arrow arrays.

A value that does not fit its column becomes null, and the body is kept in the column `unparsed`; the other columns of
the row keep their values. A body that is not a JSON object is in `unparsed` only.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import NoneType
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from .layout import MAX_COLUMNS, REST, JsonColumn, JsonType, Layout, LayoutError, name_columns

ARROW_TYPES = {
    JsonType.STRING: pa.string(),
    JsonType.LONG: pa.int64(),
    JsonType.DOUBLE: pa.float64(),
    JsonType.BOOLEAN: pa.bool_(),
    JsonType.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    JsonType.JSON: pa.string(),
}
_PYTHON_TYPES: Mapping[JsonType, frozenset[type]] = {
    JsonType.STRING: frozenset({str}),
    JsonType.LONG: frozenset({int}),
    JsonType.DOUBLE: frozenset({float, int}),
    JsonType.BOOLEAN: frozenset({bool}),
}
"""The types that Arrow converts as `_CONVERTERS` do, or refuses. It converts a column in 1/10 of their time."""
_ARROW_REFUSES = (OverflowError, UnicodeEncodeError, pa.ArrowException)
_INT64 = range(-(2**63), 2**63)
_MAX_NEW_FIELDS = 100
_MAX_NAME_CHARS = 255
"""Fields with longer names have no column: they are in `rest`, and would make the manifest and every footer large."""
_JSON_SPACE = " \t\r\n"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NOTHING: Mapping[str, Any] = {}


class JsonParser:
    """Parses bodies into the columns of a layout, and counts what does not fit.

    Attributes:
        unparsed: The number of bodies so far that are in the column `unparsed`.
        misfits: The number of values so far that did not fit their column, by field; `rest` for the column `rest`.
        new_fields: Fields so far that have no column and a value other than null, with their types; at most 100.
        widen: The types that columns need for values so far, by field, of columns that may be widened.
    """

    def __init__(self, layout: Layout) -> None:
        self.unparsed = 0
        self.misfits: Counter[str] = Counter()
        self.new_fields: dict[str, str] = {}
        self.widen: dict[str, str] = {}
        self._columns = layout.json_columns
        self._known = frozenset(column.field for column in layout.json_columns)
        self._keep_rest = layout.keep_rest

    def parse(self, bodies: Sequence[bytes]) -> list[Any]:
        """Return Arrow arrays: the columns, `rest` if the layout has it, and `unparsed`."""
        objects: list[Mapping[str, Any]] = []
        bad: set[int] = set()  # indexes of the bodies for `unparsed`
        for index, body in enumerate(bodies):
            try:
                objects.append(decode_object(body))
            except (ValueError, RecursionError):
                objects.append(_NOTHING)
                bad.add(index)
        arrays = [self._column(column, objects, bad) for column in self._columns]
        if self._keep_rest:
            arrays.append(self._rest(objects, bad))
        if not bad:
            return [*arrays, pa.nulls(len(bodies), pa.binary())]
        self.unparsed += len(bad)
        kept = [body if index in bad else None for index, body in enumerate(bodies)]
        return [*arrays, pa.array(kept, pa.binary())]

    def _column(self, column: JsonColumn, objects: Sequence[Mapping[str, Any]], bad: set[int]) -> Any:
        field, kind = column.field, ARROW_TYPES[column.type]
        values = [each.get(field) for each in objects]
        types = set(map(type, values)) - {NoneType}
        if types <= _PYTHON_TYPES.get(column.type, frozenset()):
            try:
                array = pa.array(values, kind)
                if column.type is not JsonType.DOUBLE or pc.all(pc.is_finite(array)).as_py() is not False:
                    return array
            except _ARROW_REFUSES:
                pass
        convert = _CONVERTERS[column.type]
        for index, value in enumerate(values):
            if value is None:
                continue
            try:
                values[index] = convert(value)
            except (ValueError, OverflowError, RecursionError):
                values[index] = None
                bad.add(index)
                self.misfits[field] += 1
                if column.widens and column.type is JsonType.LONG and _fits(_double, value):
                    self.widen[field] = JsonType.DOUBLE.value
        return pa.array(values, kind)

    def _rest(self, objects: Sequence[Mapping[str, Any]], bad: set[int]) -> Any:
        known = self._known
        texts: list[str | None] = []
        for index, each in enumerate(objects):
            text = None
            if not known.issuperset(each):
                left = {name: value for name, value in each.items() if name not in known}
                self._note_fields(left)
                try:
                    text = _text(left)
                except (ValueError, RecursionError):
                    bad.add(index)
                    self.misfits[REST] += 1
            texts.append(text)
        return pa.array(texts, pa.string())

    def _note_fields(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            before = self.new_fields.get(name)
            full = before is None and len(self.new_fields) >= _MAX_NEW_FIELDS
            if value is not None and not full and _is_name(name):
                kind = _type_of(value)
                self.new_fields[name] = kind if before is None else _common(JsonType(before), kind)


def decode_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, without the extensions NaN and Infinity. Raises ValueError, RecursionError."""
    text = body.decode().strip(_JSON_SPACE)
    found, end = _DECODER.raw_decode(text)  # faster than `decode`, which allows space around the value
    if end != len(text) or not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def infer_columns(bodies: Iterable[bytes], given: Sequence[tuple[str, JsonType | None]]) -> list[JsonColumn]:
    """Infer columns from a sample.

    Args:
        given: Fields, with a type or None to infer it; empty: all fields of the sample.

    Raises:
        LayoutError: There are no columns, or too many.
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
    asked = given or [(name, None) for name in types if _is_name(name)]
    if not asked:
        raise LayoutError("no message of the sample is a JSON object: columns cannot be inferred")
    if len(asked) > MAX_COLUMNS and not given:
        raise LayoutError(
            f"the messages of the sample have {len(asked)} different fields: list the columns explicitly"
        )
    names = name_columns(field for field, _ in asked)
    return [
        JsonColumn(field, kind or types.get(field) or JsonType.STRING, name, kind is None)
        for (field, kind), name in zip(asked, names, strict=True)
    ]


def _is_name(field: str) -> bool:
    """Whether a field can name a column."""
    return 0 < len(field) <= _MAX_NAME_CHARS and field.isprintable()


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
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
"""`json.dumps` would create one for each value."""


def _text(value: object) -> str:
    return _string(_ENCODER.encode(value))


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


def doubles_of(longs: Any) -> Any:
    """Convert a column of longs to doubles. Raises ValueError if a value cannot be represented exactly."""
    try:
        return longs.cast(pa.float64())
    except pa.ArrowInvalid:  # also raised for numbers beyond 2**53 that a double has
        return pa.array([None if each is None else _double(each) for each in longs.to_pylist()], pa.float64())


def _fits(convert: Callable[[object], Any], value: object) -> bool:
    try:
        convert(value)
    except (ValueError, OverflowError):
        return False
    return True
