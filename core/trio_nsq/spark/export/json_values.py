"""Decode JSON bodies, and convert their values to those of columns.

A converter raises ValueError or OverflowError for a value that does not fit. It also takes the values that decoders of
other formats return: bytes, Decimal, date, time and datetime.
"""

import base64
import binascii
import math
import re
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...filters.exact_json import NEGATIVE_ZERO, Digits, json_text, string
from ..schemas.column_types import ColumnType, DecimalType, JsonType, TimeType

INT64 = range(-(2**63), 2**63)
_FLOAT = struct.Struct("f")
_IS_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII).fullmatch
_DATE = r"\d{4}-\d\d-\d\d"
_IS_DATE = re.compile(_DATE, re.ASCII).fullmatch
_IS_TIME = re.compile(_DATE + r"([Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?([Zz]|[+-]\d\d:\d\d)?)?", re.ASCII).fullmatch
"""RFC 3339, also without zone, seconds or time of day. Python takes more: weeks of ISO 8601, for example."""
_FRACTION = re.compile(r"\.(\d+)", re.ASCII).search
_IS_TIME_OF_DAY = re.compile(r"(\d\d:\d\d(:\d\d(\.\d+)?)?)[Zz]?", re.ASCII).fullmatch
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TIMES_US = range(
    (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND,
    (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND + 1,
)
"""The years 1 to 9999. Arrow has others too, but many readers, and the statistics of tables, do not."""
_PER_UNIT = {"s": 1_000_000, "ms": 1_000, "us": 1}
_MOST_DIGITS_OF_TIME = 20
"""More than an int64 has: `round` returns all digits of a Decimal, which may be a million."""
SECONDS = TimeType("s")
"""What the type `timestamp` means."""


def type_of(value: object) -> JsonType:
    """Return the type that a column of such values has."""
    if isinstance(value, bool):
        return JsonType.BOOLEAN
    if (isinstance(value, int) and value in INT64) or _is_zero(value):
        return JsonType.LONG
    if isinstance(value, int | float | Digits):
        return JsonType.DOUBLE if fits(double, value) else JsonType.JSON
    return JsonType.STRING if isinstance(value, str) else JsonType.JSON


# ---------------------------------------------------------------------- converters


def _is_zero(value: object) -> bool:
    return isinstance(value, Digits) and value.text == NEGATIVE_ZERO


def _whole(numbers: range, value: object) -> int:
    if _is_zero(value):
        return 0
    if type(value) is not int or value not in numbers:
        raise ValueError("no such whole number")
    return value


def double(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and int(float(value)) == value:
        return float(value)
    if type(value) is Digits and value.is_exact:
        return value.value
    raise ValueError("no double")


def _float(value: object) -> float:
    number = double(value)  # which has each number that a float has
    found: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    text = value.text if isinstance(value, Digits) else repr(number)
    if found != number and (type(value) is int or not Digits(text, found).is_exact):
        raise ValueError("no float")
    return found


def exact_decimal(value: object) -> Decimal:
    """Convert a number, or a string with one, to all its digits. Raises ValueError."""
    if isinstance(value, Digits):
        value = value.text
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise ValueError("no number")
    text = f"{value:f}" if isinstance(value, Decimal) else str(value)
    if not _IS_NUMBER(text):
        raise ValueError("no number")
    try:
        return Decimal(text)
    except ArithmeticError as exc:
        raise ValueError("no exponent that a number can have") from exc


def _decimal(kind: DecimalType, value: object) -> Decimal:
    exact = Context(prec=kind.precision, traps=[Inexact, InvalidOperation])
    try:
        return exact_decimal(value).quantize(Decimal((0, (1,), -kind.scale)), context=exact)
    except ArithmeticError as exc:
        raise ValueError("too many digits") from exc


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("no boolean")
    return value


def _date(value: object) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    text = string(value)
    if not _IS_DATE(text):
        raise ValueError("no date")
    return date.fromisoformat(text)


def _time_of_day(value: object) -> int:
    """Convert `HH:MM`, `HH:MM:SS` or `HH:MM:SS.F`, in UTC or without a zone, to microseconds."""
    if not isinstance(value, time):
        if (found := _IS_TIME_OF_DAY(string(value))) is None:
            raise ValueError("no time of day")
        value = time.fromisoformat(found[1])
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


def _time(kind: TimeType, value: object) -> int:
    """Convert a time to the microseconds, or with the unit ns the nanoseconds, of its column."""
    if isinstance(value, Digits):
        value = exact_decimal(value)
        if value.adjusted() > _MOST_DIGITS_OF_TIME:
            raise ValueError("no time")
    nanoseconds = 0  # what a datetime cannot have
    if kind.pattern and type(value) is int:
        value = str(value)
    if isinstance(value, str):
        if kind.pattern:
            value = datetime.strptime(value, kind.pattern)
        else:
            if not _IS_TIME(value):
                raise ValueError("no time")
            if kind.unit == "ns" and (fraction := _FRACTION(value)) is not None:
                nanoseconds = int(f"{fraction[1]:0<9}"[6:9])
            value = datetime.fromisoformat(value.upper())
        if kind.is_local and value.tzinfo is not None:
            raise ValueError("a time with a zone")
    if isinstance(value, datetime):
        found = ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
        if kind.unit == "ns":
            found = found * 1000 + nanoseconds
    elif kind.pattern or isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ValueError("no time")
    elif kind.unit == "ns":
        found = round(value)
    else:
        found = round(value * _PER_UNIT[kind.unit])
    if found not in (INT64 if kind.unit == "ns" else _TIMES_US):
        raise ValueError("no time")
    return found


def times_of(kind: TimeType, numbers: Any) -> Any:
    """Convert an int64 array of times in the unit of a type, without a pattern. Raises pyarrow.ArrowException."""
    if kind.unit == "ns":
        return numbers
    found = pc.multiply_checked(numbers, pa.scalar(_PER_UNIT[kind.unit], pa.int64()))
    bounds = pc.min_max(found).as_py()
    if bounds["min"] is not None and not (bounds["min"] in _TIMES_US and bounds["max"] in _TIMES_US):
        raise pa.ArrowInvalid("a year that no reader has")
    return found


def _binary(value: object) -> bytes:
    """Convert base64 text."""
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(string(value), validate=True)
    except binascii.Error as exc:
        raise ValueError("no base64") from exc


def is_milliseconds(value: object) -> bool:
    """Whether a number that is no time in seconds is one in milliseconds, after 1970."""
    number = value.value if isinstance(value, Digits) else value
    return type(number) in (int, float) and number > 0 and fits(partial(_time, SECONDS), number / 1000)  # type: ignore[operator]


_CONVERTERS: dict[JsonType, Callable[[object], Any]] = {
    JsonType.STRING: string,
    JsonType.LONG: partial(_whole, INT64),
    JsonType.INT: partial(_whole, range(-(2**31), 2**31)),
    JsonType.SHORT: partial(_whole, range(-(2**15), 2**15)),
    JsonType.BYTE: partial(_whole, range(-(2**7), 2**7)),
    JsonType.DOUBLE: double,
    JsonType.FLOAT: _float,
    JsonType.BOOLEAN: _boolean,
    JsonType.DATE: _date,
    JsonType.TIMESTAMP: partial(_time, SECONDS),
    JsonType.TIME: _time_of_day,
    JsonType.BINARY: _binary,
    JsonType.JSON: json_text,
}


def converter(kind: ColumnType) -> Callable[[object], Any]:
    """Return what converts values of a type without parts; they are not None."""
    match kind:
        case DecimalType():
            return partial(_decimal, kind)
        case TimeType():
            return partial(_time, kind)
        case JsonType():
            return _CONVERTERS[kind]
    raise TypeError(f"{kind} has parts")


def doubles_of(longs: Any) -> Any:
    """Convert a column of longs to doubles. Raises ValueError if a value cannot be represented exactly."""
    try:
        return longs.cast(pa.float64())
    except pa.ArrowInvalid:  # also raised for numbers beyond 2**53 that a double has
        return pa.array([None if each is None else double(each) for each in longs.to_pylist()], pa.float64())


def fits(convert: Callable[[object], Any], value: object) -> bool:
    try:
        convert(value)
    except (ValueError, OverflowError):
        return False
    return True
