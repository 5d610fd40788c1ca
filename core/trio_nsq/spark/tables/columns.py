"""The columns of a table beside those of exported files.

Other programs, and other exports to the same table, add, remove and rename columns. A column of a new field gets a name
that fits the table; files that exist cannot get other names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ..export.layout import MESSAGE_COLUMNS
from ..schemas.arrow_types import arrow_type
from ..schemas.column_types import ColumnType
from .target import TableError


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A name that a table has in use.

    Attributes:
        type: The type, in the words of the table's format.
        required: Whether values cannot be null.
        now: The name of the column today, if another program has renamed it: the table reads the column `name` of files
            as that one. Empty: `name` is not an old name.
    """

    name: str
    type: str
    required: bool = False
    now: str = ""


class TableColumns:
    """The columns of a table.

    Args:
        type_name: Returns the type of an Arrow field, as in `TableColumn`.
        widens: Whether a column can change from one type to another one, which has its values; files with the former
            can still be added.
        evolves: Whether the columns of the table get the wider types of files.
    """

    def __init__(
        self,
        columns: Sequence[TableColumn],
        type_name: Callable[[Any], str],
        widens: Callable[[str, str], bool] = lambda one, other: False,
        *,
        evolves: bool = False,
    ) -> None:
        self._columns = {column.name: column for column in columns}
        self._cased: dict[str, list[TableColumn]] = {}
        for column in columns:
            self._cased.setdefault(column.name.casefold(), []).append(column)
        self._type_name = type_name
        self._widens = widens
        self._evolves = evolves

    def __contains__(self, name: str) -> bool:
        """Whether the table has this name in use."""
        return name in self._columns

    def fits(self, name: str, kind: ColumnType) -> bool:
        """Whether files can have this column: the table has the same, or none of that name in upper or lower case."""
        wanted = self._type_name(pa.field(name, arrow_type(kind)))
        return all(
            column == TableColumn(name, column.type) and self._is_same(column.type, wanted)
            for column in self._cased.get(name.casefold(), ())
        )

    def wider(self, ours: Any) -> list[Any]:
        """Return those of these Arrow fields whose columns in the table have to get wider types."""
        return [
            field
            for field in ours
            if self._evolves
            and (column := self._columns.get(field.name)) is not None
            and self._widens(column.type, self._type_name(field))
        ]

    def _is_same(self, there: str, ours: str) -> bool:
        return there == ours or self._widens(ours, there) or (self._evolves and self._widens(there, ours))

    def check(self, ours: Any, shown: str, place: str) -> None:
        """Check that files with these columns can be added.

        Args:
            ours: Their Arrow schema.
            shown: The table, for messages.
            place: See `Table`.

        Raises:
            TableError: The table has other columns.
        """
        for field in ours:
            self._check(field, shown, place)
        for column in self._columns.values():
            if column.required and not column.now and column.name not in ours.names:
                raise TableError(f"{shown} requires the column {column.name}, which the files do not have")

    def _check(self, field: Any, shown: str, place: str) -> None:
        column = self._columns.get(field.name)
        if column is not None and column.now:
            raise TableError(
                f"the column {field.name} of {shown} was renamed to {column.now} by another program, and the files "
                f"have {field.name}: rename it back, or choose another {place}"
            )
        if column is None:
            if field.name in MESSAGE_COLUMNS:
                raise TableError(
                    f"{shown} has no column {field.name}: it is not a table of exports, or another program has removed "
                    f"the column. Choose another {place}"
                )
            for other in self._cased.get(field.name.casefold(), ()):
                raise TableError(
                    f"{shown} has the column {other.name}, and the files {field.name}, which differs in upper and "
                    f"lower case only: choose another {place}"
                )
            return
        if not self._is_same(column.type, kind := self._type_name(field)):
            way = (
                "give --schema-contract evolve, which widens it, or "
                if self._widens(column.type, kind)
                else ""
            )
            raise TableError(
                f"the column {field.name} of {shown} has type {column.type}, and that of the files {kind}: {way}choose "
                f"another {place}"
            )
        if field.nullable and column.required:
            raise TableError(f"the column {field.name} of {shown} cannot be null, and that of the files can")
