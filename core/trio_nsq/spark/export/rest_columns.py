"""Move the values of fields from the column `rest` to columns of their own."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from ...filters.exact_json import decode_object, json_text
from .column_arrays import ColumnArrays
from .layout import REST, JsonColumn


def columns_from_rest(texts: Sequence[str | None], columns: Sequence[JsonColumn]) -> dict[str, Any]:
    """Return the arrays of new columns, and that of `rest` without the fields that they have now.

    What does not fit a column stays in `rest`, and so does a struct with fields that its type does not have.

    Args:
        texts: The values of `rest`.
    """
    # Only these texts are decoded: this is how `json_text` writes a name.
    marks = [f"{json.dumps(column.field, ensure_ascii=False)}:" for column in columns]
    objects = [
        decode_object(text.encode()) if text and any(mark in text for mark in marks) else None
        for text in texts
    ]
    found: dict[str, Any] = {}
    for column in columns:
        kept: set[int] = set()

        keep = partial(_keep, kept)
        values = [None if each is None else each.get(column.field) for each in objects]
        found[column.name] = ColumnArrays(keep, keep).build(column.type, values, column.field)
        for row, each in enumerate(objects):
            if each is not None and row not in kept:
                each.pop(column.field, None)
    left = [
        text if each is None else json_text(each) if each else None
        for text, each in zip(texts, objects, strict=True)
    ]
    return found | {REST: pa.array(left, pa.string())}


def _keep(rows: set[int], row: int, *_: object) -> None:
    rows.add(row)
