"""Iceberg's types of columns of exported files."""

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import pyarrow as pa
from pyiceberg import types

from .target import TableError

_TYPES: dict[Any, types.PrimitiveType] = {
    pa.string(): types.StringType(),
    pa.binary(): types.BinaryType(),
    pa.int8(): types.IntegerType(),
    pa.int16(): types.IntegerType(),
    pa.int32(): types.IntegerType(),
    pa.int64(): types.LongType(),
    pa.float32(): types.FloatType(),
    pa.float64(): types.DoubleType(),
    pa.bool_(): types.BooleanType(),
    pa.date32(): types.DateType(),
    pa.time64("us"): types.TimeType(),
    pa.timestamp("us", tz="UTC"): types.TimestamptzType(),
    pa.timestamp("us"): types.TimestampType(),
}
_FIRST_ID = 10_001
"""Of a value inside of others; more than there are columns. Tables give them other numbers, as those of columns."""
_DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")


def column_type(field: Any) -> types.IcebergType:
    """Return the type of a column of files, an Arrow field. Raises TableError: Iceberg has none."""
    try:
        return _iceberg_type(field.type, count(_FIRST_ID))
    except _MissingType as exc:
        raise TableError(
            f"an Iceberg table has no type {exc}, that of the column {field.name}: choose another type, such as string "
            "or timestamp(us)"
        ) from exc


class _MissingType(Exception):
    """Iceberg has no such type; the text is the type."""


def _iceberg_type(arrow: Any, ids: Iterator[int]) -> types.IcebergType:
    """Return the type of Arrow's. Raises _MissingType."""
    if pa.types.is_map(arrow):
        key, value = next(ids), next(ids)
        kinds = _iceberg_type(arrow.key_type, ids), _iceberg_type(arrow.item_type, ids)
        return types.MapType(key, kinds[0], value, kinds[1], value_required=False)
    if pa.types.is_list(arrow):
        number = next(ids)
        return types.ListType(number, _iceberg_type(arrow.value_type, ids), element_required=False)
    if pa.types.is_struct(arrow):
        numbers = [next(ids) for _ in arrow]
        return types.StructType(
            *(
                types.NestedField(number, field.name, _iceberg_type(field.type, ids), required=False)
                for number, field in zip(numbers, arrow, strict=True)
            )
        )
    if pa.types.is_decimal(arrow):
        return types.DecimalType(arrow.precision, arrow.scale)
    if (found := _TYPES.get(arrow)) is None:
        raise _MissingType(arrow)
    return found


def shown_type(kind: types.IcebergType) -> str:
    """Return the text of a type, without the numbers of its fields, which differ from table to table."""
    match kind:
        case types.MapType():
            return f"map<{shown_type(kind.key_type)}, {shown_type(kind.value_type)}>"
        case types.ListType():
            return f"list<{shown_type(kind.element_type)}>"
        case types.StructType():
            fields = (f"{each.name}: {shown_type(each.field_type)}" for each in kind.fields)
            return f"struct<{', '.join(fields)}>"
    return str(kind)


def can_promote(one: str, other: str) -> bool:
    """Whether Iceberg changes a column of one type to another one, given as text."""
    if (one, other) in (("int", "long"), ("float", "double")):
        return True
    decimals = _DECIMAL.fullmatch(one), _DECIMAL.fullmatch(other)
    if decimals[0] is None or decimals[1] is None:
        return False
    return decimals[0][2] == decimals[1][2] and int(decimals[0][1]) < int(decimals[1][1])
