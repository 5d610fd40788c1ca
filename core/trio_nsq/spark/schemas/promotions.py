"""Wider types that columns can change to, so that they have more values and lose none."""

from enum import StrEnum

from .column_types import ColumnType, DecimalType, JsonType

_INTS = (JsonType.BYTE, JsonType.SHORT, JsonType.INT, JsonType.LONG)
_MAX_PRECISION = 38
_PRECISIONS = (9, 18, _MAX_PRECISION)
"""To these a decimal grows: the sizes in Parquet. Each step may be a conversion of all files."""


class Promotion(StrEnum):
    """How the place of an export takes wider types.

    Attributes:
        FILES: Its files are converted: to any type that has all values.
        ICEBERG: By the rules of Iceberg, whose files stay: int to long, float to double, more digits of a decimal
            before the point.
    """

    FILES = "files"
    ICEBERG = "iceberg"


def common_type(one: ColumnType, other: ColumnType, by: Promotion) -> ColumnType | None:
    """Return the type to which a column of the first type can change, so that it has all values of both; None: none.

    With `Promotion.FILES`, a long becomes a double: the caller checks that no value has more digits than that.
    """
    if one == other:
        return one
    if isinstance(one, DecimalType) and isinstance(other, DecimalType):
        if by is Promotion.ICEBERG and other.scale > one.scale:
            return None
        digits = max(one.precision - one.scale, other.precision - other.scale)
        return wider_decimal(digits, max(one.scale, other.scale))
    if one in _INTS and other in _INTS:
        return max(one, other, key=_INTS.index)
    if {one, other} == {JsonType.FLOAT, JsonType.DOUBLE}:
        return JsonType.DOUBLE
    is_number = {one, other} <= {*_INTS, JsonType.DOUBLE}
    return JsonType.DOUBLE if is_number and by is Promotion.FILES else None


def wider_decimal(digits: int, scale: int) -> DecimalType | None:
    """Return a decimal with as many digits before and after the point, or more; None: there is none."""
    if digits + scale > _MAX_PRECISION:
        return None
    return DecimalType(next(each for each in _PRECISIONS if each >= digits + scale), scale)


def can_widen(one: ColumnType, other: ColumnType, by: Promotion) -> bool:
    """Whether a column of the first type can change to the second one, which is wider."""
    match one, other:
        case DecimalType(), DecimalType():
            more = other.precision - other.scale >= one.precision - one.scale and other.scale >= one.scale
            return one != other and more and (by is Promotion.FILES or one.scale == other.scale)
    return one != other and common_type(one, other, by) == other
