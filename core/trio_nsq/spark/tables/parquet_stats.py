"""The statistics of Parquet footers, as Delta tables store them, so that readers skip files."""

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Any

_MAX_TEXT = 64
"""Longer text is cut."""
_LAST_CHARACTER = "\U0010ffff"
_WITHOUT_BOUNDS = "BYTE_ARRAY"
"""The type of binary columns in Parquet: they have no bounds in Delta, and readers expect none."""


def delta_stats(footer: Any) -> str:
    """Return the `stats` of a Delta action for a file.

    If a column with values has no bounds, the file has only its number of rows: deltalake's `to_pyarrow_dataset`
    compares the missing bound with a filter, and then leaves out the file.
    """
    rows = f'"numRecords":{footer.num_rows}'
    nulls, low, high = [], [], []
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        if column.max_repetition_level or column.max_definition_level > 1:
            # In an array, a map or a struct. The first two have no statistics in Delta, and those of a struct are an
            # object, which no reader needs.
            continue
        statistics = [
            footer.row_group(number).column(index).statistics for number in range(footer.num_row_groups)
        ]
        is_binary = column.physical_type == _WITHOUT_BOUNDS and column.logical_type.type == "NONE"
        if any(one is None or not one.has_null_count for one in statistics):
            if is_binary:
                continue
            return f"{{{rows}}}"
        name = _json(column.path)
        nulls.append(f"{name}:{sum(one.null_count for one in statistics)}")
        with_values = [one for one in statistics if one.num_values]  # a row group of nulls has no bounds
        if is_binary or not with_values:
            continue
        if not all(one.has_min_max for one in with_values):
            return f"{{{rows}}}"
        try:
            low.append(f"{name}:{_bound(min(one.min for one in with_values))}")
            high.append(f"{name}:{_bound(max(one.max for one in with_values), is_upper=True)}")
        except OverflowError:  # a time outside the years 1 to 9999; older versions exported these
            return f"{{{rows}}}"
    groups = (("nullCount", nulls), ("minValues", low), ("maxValues", high))
    return "{" + ",".join([rows, *(f'"{key}":{{{",".join(found)}}}' for key, found in groups)]) + "}"


def _json(value: Any) -> str:
    """Return a value as JSON, without escapes above U+FFFF: deltalake decodes some of them to another character."""
    return json.dumps(value, ensure_ascii=False)


def _bound(value: Any, *, is_upper: bool = False) -> str:
    if isinstance(value, datetime):
        # `strftime` does not pad years before 1000, and readers then skip files with such a bound.
        return f'"{value.replace(tzinfo=None).isoformat(timespec="microseconds")}Z"'
    if isinstance(value, date):
        return f'"{value.isoformat()}"'
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        end = _MAX_TEXT
        while is_upper and value[end : end + 1] == _LAST_CHARACTER:
            end += 1
        value = value[:end] + (_LAST_CHARACTER if is_upper else "")
    return _json(value)
