"""The order of the rows in each file: by columns, nulls last."""

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..schemas.column_types import JsonArray, JsonMap, JsonStruct
from .layout import MESSAGE_COLUMNS, Layout, LayoutError

_ROWS_AT_ONCE = 20_000


def order_columns(layout: Layout) -> list[tuple[str, bool]]:
    """Return the names of the columns of `Layout.sort_by`, each with whether the order is descending.

    Raises LayoutError: there is no such column.
    """
    fields = {column.field for column in layout.json_columns}
    found = []
    for name, is_descending in layout.sort_by:
        if name not in fields and name not in MESSAGE_COLUMNS:
            raise LayoutError(
                f"--sort-by has {name}, which is no column: name a field with --columns, or ts or seq"
            )
        found.append((layout.column_of(name).name if name in fields else name, is_descending))
    return found


def check_order(layout: Layout) -> None:
    """Check that rows can be sorted by these columns. Raises LayoutError."""
    names = {name for name, _ in order_columns(layout)}
    for column in layout.json_columns:
        if column.name in names and isinstance(column.type, JsonArray | JsonMap | JsonStruct):
            raise LayoutError(f"--sort-by cannot have {column.field}: values of {column.type} have no order")


def sorted_rows(tables: Iterable[Any], layout: Layout) -> Iterator[Any]:
    """Yield the rows of Arrow tables in the order of the layout, as tables. Equal rows stay in their order.

    Args:
        tables: The rows of one file. They are in memory together.
    """
    dropped = layout.dropped_columns  # they are the same in all rows
    keys = [
        (name, "descending" if is_descending else "ascending")
        for name, is_descending in order_columns(layout)
        if name not in dropped
    ]
    table = pa.concat_tables(tables).combine_chunks()
    if not keys:
        yield table
        return
    order = pc.sort_indices(table.select([name for name, _ in keys]), sort_keys=keys)
    for first in range(0, len(table), _ROWS_AT_ONCE):
        yield table.take(order.slice(first, _ROWS_AT_ONCE))


def shown_order(each: tuple[str, bool]) -> str:
    """Return an element of `--sort-by`."""
    name, is_descending = each
    return f"{name} DESC" if is_descending else name
