"""Convert the values of a column to an Arrow array, also arrays, structs and maps.

Values inside of others are converted like columns: all those of one field of a struct, or all elements of the arrays of
a column, are one Arrow array. So most values need no Python call of their own, however deep they are.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from types import NoneType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...filters.exact_json import Digits, string
from ..schemas.arrow_types import arrow_type
from ..schemas.column_types import (
    ColumnType,
    DecimalType,
    JsonArray,
    JsonMap,
    JsonStruct,
    JsonType,
    TimeType,
)
from .json_values import SECONDS, converter, times_of

_REFUSED = (ValueError, OverflowError, RecursionError)
_ARROW_REFUSES = (OverflowError, UnicodeEncodeError, pa.ArrowException)
_NUMBERS = {int, float, Digits}
_MAX_DECIMAL = 38


class ColumnArrays:
    """Converts the columns of some rows.

    Args:
        misfit: Called with the row, the path and the type of a place whose value does not fit it, and the value.
        unknown: Called with the row and the path of a field of a struct that its type does not have; None: such
            fields are not looked for.
    """

    def __init__(
        self,
        misfit: Callable[[int, str, ColumnType, object], None],
        unknown: Callable[[int, str], None] | None = None,
    ) -> None:
        self._misfit = misfit
        self._unknown = unknown

    def build(self, kind: ColumnType, values: list[Any], path: str, rows: Sequence[int] | None = None) -> Any:
        """Return an array of values; those that do not fit are null.

        Args:
            values: Decoded values, which may be changed.
            path: The path of these values: `user.age`, of the elements of an array `tags[]`, of the values of a map
                `labels{}`.
            rows: The row of each value; None: their indexes.
        """
        if rows is None:
            rows = range(len(values))
        match kind:
            case JsonStruct():
                return self._structs(kind, self._only(dict, kind, values, path, rows), path, rows)
            case JsonArray():
                return self._lists(kind, self._only(list, kind, values, path, rows), path, rows)
            case JsonMap():
                return self._maps(kind, self._only(dict, kind, values, path, rows), path, rows)
        return self.leaves(kind, values, path, rows)

    def _only(
        self, wanted: type, kind: ColumnType, values: list[Any], path: str, rows: Sequence[int]
    ) -> list[Any]:
        """Return the values, of which all that do not have the wanted type are None."""
        if not _types_of(values) - {wanted}:
            return values
        for index, value in enumerate(values):
            if value is not None and type(value) is not wanted:
                self._misfit(rows[index], path, kind, value)
                values[index] = None
        return values

    def _structs(self, kind: JsonStruct, values: list[Any], path: str, rows: Sequence[int]) -> Any:
        nulls = [value is None for value in values]
        has_nulls = True in nulls
        children = []
        for name, each in kind.fields:
            if has_nulls:
                inner = [None if value is None else value.get(name) for value in values]
            else:
                inner = [value.get(name) for value in values]
            children.append(self.build(each, inner, f"{path}.{name}", rows))
        if self._unknown is not None:
            known = frozenset(name for name, _ in kind.fields)
            for index, value in enumerate(values):
                if value is not None and not known.issuperset(value):
                    for name, inner in value.items():
                        if inner is not None and name not in known:
                            self._unknown(rows[index], f"{path}.{name}")
        mask = pa.array(nulls, pa.bool_()) if has_nulls else None
        fields = list(arrow_type(kind))
        if not fields:  # of no field, Arrow cannot tell the length
            return pa.array([None if null else {} for null in nulls], arrow_type(kind))
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)

    def _lists(self, kind: JsonArray, values: list[Any], path: str, rows: Sequence[int]) -> Any:
        flat = list(chain.from_iterable(value for value in values if value))
        inner_rows = [row for row, value in zip(rows, values, strict=True) if value for _ in value]
        elements = self.build(kind.element, flat, f"{path}[]", inner_rows)
        return pa.ListArray.from_arrays(_offsets(values), elements, type=arrow_type(kind))

    def _maps(self, kind: JsonMap, values: list[Any], path: str, rows: Sequence[int]) -> Any:
        for index, value in enumerate(values):
            try:
                for name in value or ():
                    string(name)
            except ValueError:  # half of a surrogate pair
                self._misfit(rows[index], path, kind, value)
                values[index] = None
        keys = list(chain.from_iterable(value for value in values if value))
        items = list(chain.from_iterable(value.values() for value in values if value))
        inner_rows = [row for row, value in zip(rows, values, strict=True) if value for _ in value]
        found = self.build(kind.values, items, f"{path}{{}}", inner_rows)
        return pa.MapArray.from_arrays(_offsets(values), pa.array(keys, pa.string()), found, arrow_type(kind))

    def leaves(self, kind: ColumnType, values: list[Any], path: str, rows: Sequence[int]) -> Any:
        """Return an array of values that have no parts. Arguments as for `build`."""
        arrow = arrow_type(kind)
        if (found := _plain(kind, arrow, values)) is not None:
            return found
        convert = converter(kind)
        for index, value in enumerate(values):
            if value is None:
                continue
            try:
                values[index] = convert(value)
            except _REFUSED:
                values[index] = None
                self._misfit(rows[index], path, kind, value)
        return pa.array(values, arrow)


def _types_of(values: Sequence[Any]) -> set[type]:
    return set(map(type, values)) - {NoneType}


def _plain(kind: ColumnType, arrow: Any, values: list[Any]) -> Any:
    """Return an array of values that Arrow converts by itself, in 1/10 of the time; None: it does not."""
    types = _types_of(values)
    if kind is JsonType.TIMESTAMP:
        kind = SECONDS
    try:
        if isinstance(kind, TimeType):
            if types == {int} and not kind.pattern:
                return times_of(kind, pa.array(values, pa.int64())).cast(arrow)
        elif isinstance(kind, DecimalType):
            if types <= _NUMBERS:
                return _decimals(kind, arrow, list(map(_number_text, values)))
        elif isinstance(kind, JsonType) and types <= kind.plain:
            array = pa.array(values, arrow)
            if kind is not JsonType.DOUBLE or pc.all(pc.is_finite(array)).as_py() is not False:
                return array
    except _ARROW_REFUSES:
        pass
    return None


def _decimals(kind: DecimalType, arrow: Any, texts: list[str | None]) -> Any:
    """Return an array of numbers with all their digits; None: Arrow cannot convert these.

    It takes a number of too many digits for another one, and crashes with large exponents.
    """
    longest = max((len(text) for text in texts if text is not None), default=0)
    if longest + kind.scale > _MAX_DECIMAL or any("e" in text or "E" in text for text in texts if text):
        return None
    return pa.array(texts, pa.string()).cast(arrow)  # raises if a number does not fit


def _number_text(value: Any) -> str | None:
    return None if value is None else value.text if type(value) is Digits else str(value)


def _offsets(values: Sequence[Any]) -> Any:
    """Return where the parts of each value begin among those of all; null for a value that is None."""
    ends = accumulate((len(value) if value else 0 for value in values), initial=0)
    begins = [None if value is None else end for value, end in zip(values, ends, strict=False)]
    return pa.array([*begins, sum(len(value) for value in values if value)], pa.int32())
