"""Convert the values of Avro and Protobuf bodies to Arrow arrays.

They have the types of their schema already, so Arrow converts a column at a time. What has no type of its own in a
column, such as a union of a string and a number, becomes JSON.
"""

import json
from collections.abc import Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

from ..schemas.arrow_types import arrow_type
from ..schemas.column_types import ColumnType, JsonType
from .column_arrays import ColumnArrays

_ARROW_REFUSES = (OverflowError, ValueError, TypeError, pa.ArrowException)


class TypedArrays(ColumnArrays):
    """Converts the columns of some rows, whose values come from a schema."""

    def leaves(self, kind: ColumnType, values: list[Any], path: str, rows: Sequence[int]) -> Any:
        arrow = arrow_type(kind)
        if kind is not JsonType.JSON:
            try:
                return pa.array(values, arrow)
            except _ARROW_REFUSES:
                pass
        for index, value in enumerate(values):
            if value is None:
                continue
            try:
                values[index] = _json(value) if kind is JsonType.JSON else _fitting(value, arrow)
            except (*_ARROW_REFUSES, RecursionError):
                values[index] = None
                self._misfit(rows[index], path, kind, value)
        return pa.array(values, arrow)


def _fitting(value: Any, arrow: Any) -> Any:
    """Return a value that Arrow can convert to a type. Raises an error of `_ARROW_REFUSES`."""
    if isinstance(value, UUID):
        value = str(value)
    pa.scalar(value, arrow)
    return value


def _json(value: Any) -> str:
    """Return a value as JSON; bytes as of Avro's JSON encoding, a character for each. Raises ValueError, TypeError."""
    return _ENCODER.encode(value)


def _plain(value: Any) -> str:
    """Return what JSON has no type for as text. Raises TypeError."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
