"""Convert JSON bodies to columns: infer the columns from a sample, and parse bodies into Arrow arrays.

A value that does not fit its column becomes null, and the body is kept in the column `unparsed`; the other columns of
the row keep their values. A body that is not a JSON object is in `unparsed` only.
"""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from types import NoneType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...protocol.go_json import refuse_constant
from .layout import (
    MAX_COLUMNS,
    REST,
    ColumnType,
    DecimalType,
    JsonArray,
    JsonColumn,
    JsonMap,
    JsonStruct,
    JsonType,
    Layout,
    LayoutError,
    name_columns,
)

_ARROW_TYPES = {
    kind: pa.timestamp("us", "UTC") if kind is JsonType.TIMESTAMP else pa.type_for_alias(kind.arrow)
    for kind in JsonType
}
_ARROW_REFUSES = (OverflowError, UnicodeEncodeError, pa.ArrowException)
_INT64 = range(-(2**63), 2**63)
_FLOAT = struct.Struct("f")
_MAX_NEW_FIELDS = 100
_MAX_NAME_CHARS = 255
"""Fields with longer names have no column: they are in `rest`, and would make the manifest and every footer large."""
_MAX_DIGITS = 800
"""A double written without exponent has at most 767 digits that are not zero."""
_SHORT = 16
"""A number with a point and at most 15 digits."""
_IS_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII).fullmatch
_DATE = r"\d{4}-\d\d-\d\d"
_IS_DATE = re.compile(_DATE, re.ASCII).fullmatch
_IS_TIME = re.compile(_DATE + r"([Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?([Zz]|[+-]\d\d:\d\d)?)?", re.ASCII).fullmatch
"""RFC 3339, also without zone, seconds or time of day. Python takes more: weeks of ISO 8601, for example."""
_HAS_NEGATIVE_ZERO = re.compile(r"[\s:,[]-0[\s,\]}]").search
_NEGATIVE_ZERO = "-0"
_JSON_SPACE = " \t\r\n"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TIMES_US = range(
    (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND,
    (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND + 1,
)
"""The years 1 to 9999. Arrow has others too, but many readers, and the statistics of tables, do not."""
_NOTHING: Mapping[str, Any] = {}


def arrow_type(kind: ColumnType) -> Any:
    match kind:
        case DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
        case JsonArray():
            return pa.list_(arrow_type(kind.element))
        case JsonStruct():
            return pa.struct([pa.field(name, arrow_type(each)) for name, each in kind.fields])
        case JsonMap():
            return pa.map_(pa.string(), arrow_type(kind.values))
        case _:
            return _ARROW_TYPES[kind]


class Digits:
    """A number whose text is not that of its double, such as `1.10`; of whole numbers only `-0`.

    Attributes:
        text: The number in the body.
        value: The nearest double, or a float near it.
    """

    __slots__ = ("text", "value")

    def __init__(self, text: str, value: float) -> None:
        self.text: str = text
        self.value: float = value

    @property
    def is_exact(self) -> bool:
        """Whether the value, rounded to as many digits as the text has, is the number."""
        mantissa = self.text.lower().partition("e")[0].strip("-0.")
        if not self.value or not mantissa:
            return not mantissa
        if not math.isfinite(self.value):
            return False
        digits = min(len(mantissa.replace(".", "")), _MAX_DIGITS)
        return Decimal(f"{self.value:.{digits - 1}e}") == Decimal(self.text)


class JsonParser:
    """Parses bodies into the columns of a layout, and counts what does not fit.

    Attributes:
        unparsed: The number of bodies so far that are in the column `unparsed`.
        misfits: The number of values so far that did not fit their column, by field; `rest` for the column `rest`.
        new_fields: Fields so far that have no column and a value other than null, with their types; at most 100.
        widen: The types that columns need for values so far, by field, of columns that may be widened.
        milliseconds: The timestamps among `misfits`, by field, that are plausible as Unix milliseconds.
    """

    def __init__(self, layout: Layout) -> None:
        self.unparsed: int = 0
        self.misfits: Counter[str] = Counter()
        self.new_fields: dict[str, str] = {}
        self.widen: dict[str, str] = {}
        self.milliseconds: Counter[str] = Counter()
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
        field, kind = column.field, arrow_type(column.type)
        values = [each.get(field) for each in objects]
        types = set(map(type, values)) - {NoneType}
        if isinstance(column.type, JsonType) and types <= column.type.plain:
            try:  # in 1/10 of the time of `_CONVERTERS`
                array = pa.array(values, kind)
                if column.type is not JsonType.DOUBLE or pc.all(pc.is_finite(array)).as_py() is not False:
                    return array
            except _ARROW_REFUSES:
                pass
        convert = _converter(column.type)
        for index, value in enumerate(values):
            if value is None:
                continue
            try:
                values[index] = convert(value)
            except (ValueError, OverflowError, RecursionError):
                values[index] = None
                bad.add(index)
                self.misfits[field] += 1
                if column.type is JsonType.TIMESTAMP and _is_milliseconds(value):
                    self.milliseconds[field] += 1
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
    decoder = _DECODER
    if _NEGATIVE_ZERO in text and _HAS_NEGATIVE_ZERO(text):
        decoder = _ZERO_DECODER
    found, end = decoder.raw_decode(text)  # faster than `decode`, which allows space around the value
    if end != len(text) or not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def infer_columns(
    bodies: Iterable[bytes], given: Sequence[tuple[str, ColumnType | None]]
) -> list[JsonColumn]:
    """Infer columns from a sample.

    Args:
        given: Fields, with a type or None to infer it; empty: all fields of the sample, or those in most messages if
            there are more than `MAX_COLUMNS`.

    Raises:
        LayoutError: There are no columns.
    """
    types: dict[str, JsonType | None] = {}
    counts = Counter[str]()
    for body in bodies:
        try:
            found = decode_object(body)
        except (ValueError, RecursionError):
            continue
        counts.update(found.keys())
        for name, value in found.items():
            before = types.setdefault(name, None)
            if value is not None:
                kind = _type_of(value)
                types[name] = kind if before is None else _common(before, kind)
    asked = given or [(name, None) for name in types if _is_name(name)]
    if not asked:
        raise LayoutError("no message of the sample is a JSON object: columns cannot be inferred")
    if len(asked) > MAX_COLUMNS and not given:
        kept = set(sorted((name for name, _ in asked), key=lambda name: -counts[name])[:MAX_COLUMNS])
        asked = [(name, kind) for name, kind in asked if name in kept]
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
    if (isinstance(value, int) and value in _INT64) or _is_zero(value):
        return JsonType.LONG
    if isinstance(value, int | float | Digits):
        return JsonType.DOUBLE if _fits(_double, value) else JsonType.JSON
    return JsonType.STRING if isinstance(value, str) else JsonType.JSON


def _common(one: JsonType, other: JsonType) -> JsonType:
    if one is other:
        return one
    if {one, other} == {JsonType.LONG, JsonType.DOUBLE}:
        return JsonType.DOUBLE
    return JsonType.JSON


# ---------------------------------------------------------------------- converters; raise ValueError for invalid values


def _number(text: str) -> float | Digits:
    value = float(text)
    # Up to 15 digits `repr` returns the same, and takes as long as all of the rest.
    if (
        len(text) <= _SHORT
        and text[-1] in "123456789"
        and not -0.001 < value < 0.001
        and "e" not in text.lower()
    ):
        return value
    return value if repr(value) == text else Digits(text, value)


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_number)
_ZERO_DECODER = json.JSONDecoder(
    parse_constant=refuse_constant,
    parse_float=_number,
    parse_int=lambda text: int(text) if text != _NEGATIVE_ZERO else Digits(text, -0.0),
)
"""Keeps `-0`, which is 0 as an int; takes longer."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
"""`json.dumps` would create one for each value."""


def _text(value: object) -> str:
    try:
        text = _ENCODER.encode(value)
    except TypeError:  # of `Digits`
        text = _with_digits(value)
    return _string(text)


def _with_digits(value: object) -> str:
    """Encode a value with `Digits`, which takes several times as long."""
    if isinstance(value, Digits):
        return value.text
    if isinstance(value, dict):
        return (
            f"{{{','.join(f'{_ENCODER.encode(name)}:{_with_digits(each)}' for name, each in value.items())}}}"
        )
    if isinstance(value, list):
        return f"[{','.join(map(_with_digits, value))}]"
    return _ENCODER.encode(value)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no string")
    if not value.isascii():
        value.encode()  # half of a surrogate pair raises
    return value


def _is_zero(value: object) -> bool:
    return isinstance(value, Digits) and value.text == _NEGATIVE_ZERO


def _whole(numbers: range, value: object) -> int:
    if _is_zero(value):
        return 0
    if type(value) is not int or value not in numbers:
        raise ValueError("no such whole number")
    return value


def _double(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and int(float(value)) == value:
        return float(value)
    if type(value) is Digits and value.is_exact:
        return value.value
    raise ValueError("no double")


def _float(value: object) -> float:
    number = _double(value)  # which has each number that a float has
    found: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    text = value.text if isinstance(value, Digits) else repr(number)
    if found != number and (type(value) is int or not Digits(text, found).is_exact):
        raise ValueError("no float")
    return found


def _decimal(kind: DecimalType, value: object) -> Decimal:
    """Convert a number, or a string with one, whose digits all fit."""
    if isinstance(value, Digits):
        value = value.text
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("no number")
    text = str(value)
    if not _IS_NUMBER(text):
        raise ValueError("no number")
    exact = Context(prec=kind.precision, traps=[Inexact, InvalidOperation])
    try:
        return Decimal(text).quantize(Decimal((0, (1,), -kind.scale)), context=exact)
    except ArithmeticError as exc:
        raise ValueError("too many digits") from exc


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("no boolean")
    return value


def _date(value: object) -> date:
    text = _string(value)
    if not _IS_DATE(text):
        raise ValueError("no date")
    return date.fromisoformat(text)


def _timestamp(value: object) -> int:
    """Convert RFC 3339 text (UTC by default) or Unix seconds to microseconds."""
    if isinstance(value, Digits):
        value = value.value
    if isinstance(value, str):
        if not _IS_TIME(value):
            raise ValueError("no time")
        moment = datetime.fromisoformat(value.upper())
        found = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no time")
    else:
        found = round(value * 1_000_000)
    if found not in _TIMES_US:
        raise ValueError("no time")
    return found


def _is_milliseconds(value: object) -> bool:
    """Whether a number that is no time in seconds is one in milliseconds, after 1970."""
    number = value.value if isinstance(value, Digits) else value
    return type(number) in (int, float) and number > 0 and _fits(_timestamp, number / 1000)  # type: ignore[operator]


_CONVERTERS: dict[JsonType, Callable[[object], Any]] = {
    JsonType.STRING: _string,
    JsonType.LONG: partial(_whole, _INT64),
    JsonType.INT: partial(_whole, range(-(2**31), 2**31)),
    JsonType.SHORT: partial(_whole, range(-(2**15), 2**15)),
    JsonType.BYTE: partial(_whole, range(-(2**7), 2**7)),
    JsonType.DOUBLE: _double,
    JsonType.FLOAT: _float,
    JsonType.BOOLEAN: _boolean,
    JsonType.DATE: _date,
    JsonType.TIMESTAMP: _timestamp,
    JsonType.JSON: _text,
}


def _converter(kind: ColumnType) -> Callable[[object], Any]:
    """Return what converts values of a type; a value inside of another one may be null."""
    match kind:
        case DecimalType():
            return partial(_decimal, kind)
        case JsonArray():
            return partial(_array, _converter(kind.element))
        case JsonStruct():
            return partial(_struct, [(name, _converter(each)) for name, each in kind.fields])
        case JsonMap():
            return partial(_map, _converter(kind.values))
        case _:
            return _CONVERTERS[kind]


def _array(convert: Callable[[object], Any], value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("no array")
    return [None if each is None else convert(each) for each in value]


def _struct(converters: Iterable[tuple[str, Callable[[object], Any]]], value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    found = ((name, value.get(name), convert) for name, convert in converters)
    return {name: None if each is None else convert(each) for name, each, convert in found}


def _map(convert: Callable[[object], Any], value: object) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    return [(_string(name), None if each is None else convert(each)) for name, each in value.items()]


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
