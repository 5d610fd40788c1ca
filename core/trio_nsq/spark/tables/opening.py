"""Open a table of any kind."""

from ...storage import Storage
from .table import Table
from .target import TableKind, TableOptions, TableTarget, missing_extra


def open_table(
    target: TableTarget, storage: Storage, topic: str, export_id: str, options: TableOptions | None = None
) -> Table:
    """Open a table, which need not exist.

    Args:
        export_id: The id of the export's manifest; the numbers of commits are of this export.

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
