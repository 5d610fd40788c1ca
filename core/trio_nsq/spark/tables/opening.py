"""Open a table of any kind."""

from ..storage import Storage
from .table import Table
from .target import TableError, TableKind, TableOptions, TableTarget


def open_table(
    target: TableTarget, storage: Storage, topic: str, export_id: str, options: TableOptions | None = None
) -> Table:
    """Open a table, which need not exist.

    Raises:
        TableError: The packages for the table are not installed, or its catalog is not configured.
        TableUnavailable: The catalog cannot be reached.
    """
    options = options or TableOptions()
    try:
        if target.kind is TableKind.DELTA:
            from .delta import DeltaExportTable

            return DeltaExportTable(storage, topic, export_id, options)
        from .iceberg import IcebergExportTable

        return IcebergExportTable(target, storage, topic, export_id, options)
    except ImportError as exc:
        raise missing_extra(target.kind, exc) from exc


def missing_extra(kind: TableKind, error: ImportError) -> TableError:
    """Return the error for a missing package."""
    from ...extras import install_hint

    return TableError(
        f"--{kind} needs the extra '{kind}', which is not installed ({error}): {install_hint(kind.value)}"
    )
