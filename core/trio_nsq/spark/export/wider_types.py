"""The type that a column needs for a value that does not fit it."""

from decimal import Context

from ..schemas.column_types import ColumnType, DecimalType, JsonType
from ..schemas.promotions import Promotion, common_type
from .json_values import converter, double, exact_decimal, fits

_MAX_DIGITS = 1000
"""More than any type has; numbers with more are rounded, and still have too many."""
_WIDER = {
    JsonType.BYTE: (JsonType.SHORT, JsonType.INT, JsonType.LONG, JsonType.DOUBLE),
    JsonType.SHORT: (JsonType.INT, JsonType.LONG, JsonType.DOUBLE),
    JsonType.INT: (JsonType.LONG, JsonType.DOUBLE),
    JsonType.LONG: (JsonType.DOUBLE,),
    JsonType.FLOAT: (JsonType.DOUBLE,),
}


def type_with(kind: ColumnType, value: object, by: Promotion) -> ColumnType | None:
    """Return the type to which a column can change for a value that does not fit; None: no type has it."""
    if isinstance(kind, DecimalType):
        needed = _decimal_of(value)
        return common_type(kind, needed, by) if needed is not None else None
    if isinstance(kind, JsonType):
        for each in _WIDER.get(kind, ()):
            if fits(converter(each), value) and common_type(kind, each, by) is not None:
                return each
    return None


def needs_double(kind: ColumnType, value: object) -> bool:
    """Whether a value does not fit a long, and fits a double."""
    return kind is JsonType.LONG and fits(double, value)


def _decimal_of(value: object) -> DecimalType | None:
    """Return the smallest type of a number; None: it is no number, or has too many digits."""
    try:
        number = exact_decimal(value).normalize(Context(prec=_MAX_DIGITS))
    except (ValueError, ArithmeticError):  # also exponents beyond those of the context
        return None
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    scale = max(0, -exponent)
    before = max(0, len(digits) + exponent)
    precision = max(1, before + scale)
    return DecimalType(precision, scale) if precision <= 38 else None
