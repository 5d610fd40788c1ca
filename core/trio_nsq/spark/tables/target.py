"""Which table an export writes to, how, and the errors of tables.

This module imports neither pyarrow nor a library of tables.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from ...platform.extras import install_hint
from ...protocol.errors import NSQError
from ...protocol.tables import iceberg_name


class TableError(NSQError):
    """A table cannot be used; the text has the reason."""


class TableUnavailable(TableError):
    """The table or its catalog cannot be reached now. Whether a commit was applied is unknown; repeat it."""


class TableBusy(TableUnavailable):
    """Another writer changed the table first; nothing was committed."""


class TableKind(StrEnum):
    """The formats of tables."""

    DELTA = "delta"
    ICEBERG = "iceberg"


@dataclass(frozen=True, slots=True)
class TableTarget:
    """A table to commit exported files to.

    Attributes:
        catalog, name: Of an Iceberg table: the catalog in the configuration of pyiceberg, and `NAMESPACE.TABLE`; empty
            for a Delta table, which is the export folder itself.
    """

    kind: TableKind
    catalog: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return the option of `to-parquet` for this table."""
        return f"--iceberg {self.catalog}/{self.name}" if self.kind is TableKind.ICEBERG else "--delta"

    @classmethod
    def parse(cls, text: str) -> "TableTarget":
        """Parse the result of `str`. Raises ValueError."""
        if text == "--delta":
            return cls(TableKind.DELTA)
        return cls.iceberg(text.removeprefix("--iceberg "))

    @classmethod
    def iceberg(cls, text: str) -> "TableTarget":
        """Parse `CATALOG/NAMESPACE.TABLE`. Raises ValueError."""
        return cls(TableKind.ICEBERG, *iceberg_name(text))


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How a table is changed.

    Attributes:
        compression, compression_level, row_group_bytes: How compacted files are written; see `ExportRequest`.
        evolves: Whether its columns get wider types that files have; otherwise such files do not fit it.
    """

    compression: str = "zstd"
    compression_level: int | None = 1
    row_group_bytes: int = 64 * 1024 * 1024
    evolves: bool = False


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A version of a table; without `number` and `as_of_ns` the current one.

    Attributes:
        number: The version of a Delta table, or the id of a snapshot of an Iceberg table.
        as_of_ns: The version that was current at this time, Unix nanoseconds.
    """

    kind: TableKind
    number: int | None = None
    as_of_ns: int | None = None

    @property
    def as_of(self) -> datetime | None:
        return None if self.as_of_ns is None else datetime.fromtimestamp(self.as_of_ns / 10**9, UTC)


def missing_extra(kind: TableKind, error: ImportError) -> TableError:
    """Return the error for a missing package."""
    return TableError(
        f"--{kind} needs the extra '{kind}', which is not installed ({error}): {install_hint(kind.value)}"
    )
