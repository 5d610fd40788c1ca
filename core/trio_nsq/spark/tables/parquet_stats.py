"""The statistics of Parquet footers, as Delta tables store them, so that readers skip files."""

import json
from datetime import datetime
from typing import Any

_MAX_TEXT = 64
"""Longer text is left out; readers then cannot skip by this column."""


def delta_stats(footer: Any) -> str:
    """Return the `stats` of a Delta action for a file.

    Only whole numbers, times and short text have bounds: Parquet's bounds of fractions leave out NaN, and binary values
    have none in Delta.
    """
    found: dict[str, Any] = {"numRecords": footer.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for index in range(footer.num_columns):
        each = [footer.row_group(number).column(index) for number in range(footer.num_row_groups)]
        name = footer.schema.column(index).path
        statistics = [column.statistics for column in each]
        if any(one is None for one in statistics):
            continue
        if all(one.has_null_count for one in statistics):
            found["nullCount"][name] = sum(one.null_count for one in statistics)
        bounded = [one for one in statistics if one.has_min_max]
        # A row group of nulls has no bounds.
        if not bounded or any(not one.has_min_max and one.num_values for one in statistics):
            continue
        low, high = (_value(pick(values)) for pick, values in _bounds(bounded))
        if low is not None and high is not None:
            found["minValues"][name], found["maxValues"][name] = low, high
    return json.dumps(found)


def _bounds(statistics: list[Any]) -> Any:
    return (min, [one.min for one in statistics]), (max, [one.max for one in statistics])


def _value(value: Any) -> Any:
    """Convert a bound to JSON; None: there are no bounds of this type."""
    if isinstance(value, bool):
        return None
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(value, int) or (isinstance(value, str) and len(value) <= _MAX_TEXT):
        return value
    return None
