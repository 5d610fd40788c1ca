"""Convert the arrays that Arrow's reader of JSON returns to those of columns, see `bulk_columns`."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..schemas.arrow_types import arrow_type
from ..schemas.column_types import ColumnType, DecimalType, JsonArray, JsonStruct, JsonType, TimeType
from .column_arrays import ColumnArrays
from .json_values import SECONDS, times_of

_EXACT_DIGITS = 15
"""Numbers with as many digits are different doubles."""
_LIMIT = 10.0**_EXACT_DIGITS
_DIGITS_OF_FLOAT = 6
_DATES = "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_TIMES = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\\.[0-9]{1,6})?Z$"
_YEAR_0 = "0000"


def converted(kind: ColumnType, found: Any) -> Any:
    """Convert an array with a type for reading to that of the column.

    Raises:
        ValueError, OverflowError, pyarrow.ArrowException: A value does not fit, or Arrow may have read it otherwise.
    """
    arrow = arrow_type(kind)
    match kind:
        case JsonStruct():
            children = [converted(each, found.field(index)) for index, (_, each) in enumerate(kind.fields)]
            return pa.StructArray.from_arrays(children, fields=list(arrow), mask=_nulls(found))
        case JsonArray():
            values = converted(kind.element, found.values)
            return pa.ListArray.from_arrays(found.offsets, values, type=arrow, mask=_nulls(found))
        case DecimalType():
            return _decimals(kind, found)
        case JsonType.DOUBLE:
            _largest(found)
            return found
        case JsonType.FLOAT:
            return _floats(found)
        case JsonType.TIMESTAMP:
            return _times(SECONDS, found)
        case TimeType():
            return _times(kind, found)
        case JsonType.DATE if _all_match(found, _DATES):
            return found.cast(arrow)
        case JsonType.DATE | JsonType.TIME | JsonType.BINARY:
            return _values(kind, found)
    return found


def _nulls(found: Any) -> Any:
    return pc.is_null(found) if found.null_count else None


def _largest(doubles: Any) -> float:
    """Return the largest absolute value. Raises ValueError: a number may have more digits than a double."""
    largest = pc.max(pc.abs(doubles)).as_py() or 0.0
    if not largest < _LIMIT or pc.all(pc.is_finite(doubles)).as_py() is False:
        raise ValueError("a double that may be another number")
    return float(largest)


def _floats(doubles: Any) -> Any:
    """Convert doubles of numbers with at most 15 digits. Raises ValueError: a float may be another number.

    A float has each number of up to 6 digits, and of others those that it is equal to.
    """
    _largest(doubles)
    floats = doubles.cast(pa.float32())
    fits = pc.equal(floats.cast(pa.float64()), doubles)
    for scale in range(_DIGITS_OF_FLOAT + 1):
        if pc.all(fits).as_py() is not False:
            break
        wholes, rounded = _rounded(doubles, scale)
        is_short = pc.and_(pc.equal(rounded, doubles), pc.less(pc.abs(wholes), 10.0**_DIGITS_OF_FLOAT))
        fits = pc.or_(fits, is_short)
    if pc.all(fits).as_py() is False:
        raise ValueError("more digits than a float has")
    return floats


def _rounded(doubles: Any, scale: int) -> tuple[Any, Any]:
    """Return doubles multiplied by a power of 10 and rounded, and these as doubles of the numbers."""
    wholes = pc.round(pc.multiply(doubles, 10.0**scale))
    return wholes, pc.divide(wholes, 10.0**scale)


def _decimals(kind: DecimalType, doubles: Any) -> Any:
    """Convert doubles of numbers with at most 15 digits. Raises ValueError: a number has too many digits.

    Each number of as many digits has a double of its own, so the decimal with the same double is the number.
    """
    largest = _largest(doubles)
    scale = min(kind.scale, _EXACT_DIGITS - len(str(int(largest))))
    wholes, rounded = _rounded(doubles, scale)
    if pc.all(pc.equal(rounded, doubles)).as_py() is False:
        raise ValueError("more digits after the point")
    numbers = wholes.cast(pa.int64())
    if (pc.max(pc.abs(numbers)).as_py() or 0) >= 10 ** (kind.precision - kind.scale + scale):
        raise ValueError("more digits before the point")
    scaled = pa.Array.from_buffers(
        pa.decimal128(38, scale), len(numbers), numbers.cast(pa.decimal128(19, 0)).buffers()
    )
    return scaled.cast(arrow_type(kind))


def _times(kind: TimeType, found: Any) -> Any:
    arrow = arrow_type(kind)
    if not pa.types.is_string(found.type):
        return times_of(kind, found).cast(arrow)
    if kind.pattern or kind.is_local or kind.unit == "ns" or not _all_match(found, _TIMES):
        return _values(kind, found)
    return found.cast(arrow)


def _all_match(texts: Any, pattern: str) -> bool:
    """Whether texts are what Arrow and Python read as the same time; Python has no year 0."""
    return (
        pc.all(pc.match_substring_regex(texts, pattern)).as_py() is not False
        and pc.any(pc.starts_with(texts, _YEAR_0)).as_py() is not True
    )


def _values(kind: ColumnType, texts: Any) -> Any:
    """Convert values as `JsonParser` does, each by itself."""
    return ColumnArrays(_refuse).leaves(kind, texts.to_pylist(), "", range(len(texts)))


def _refuse(_row: int, _path: str, kind: ColumnType, _value: object) -> None:
    raise ValueError(f"no {kind}")
