"""The parts of the name of a table's place: the same for all names of one place. Pure."""

import os
from pathlib import Path
from urllib.parse import unquote

from ..protocol.tables import DeclaredTable
from ..storage import StorageError, local_path
from ..storage.storage_uri import parse_place

ICEBERG = "iceberg"
_LOCAL = "file"


def parts_of(table: DeclaredTable) -> tuple[str, ...]:
    """Return the parts of the place of a table. Raises ValueError: its folder cannot be one."""
    return iceberg_parts(table.target) if table.format == ICEBERG else folder_parts(table.target)


def folder_parts(place: str, base: Path = Path("/")) -> tuple[str, ...]:
    """Return the parts of a folder: `/a//b` and `file:///a/b` are one folder, and so are `s3://a/b` and `s3a://a/b/`.

    Args:
        base: The folder of relative paths.

    Raises:
        ValueError: It is none.
    """
    try:
        local = local_path(place)
    except StorageError as exc:
        raise ValueError(str(exc)) from exc
    if local is not None:
        return (_LOCAL, *_split(os.path.normpath(base / local), "/"))
    uri = parse_place(place)
    return (uri.kind or uri.scheme, uri.user, uri.host, *_split(uri.path, "/"))


def iceberg_parts(name: str) -> tuple[str, ...]:
    """Return the parts of `CATALOG[/NAMESPACE[.TABLE]]`."""
    catalog, _, table = name.partition("/")
    return (catalog, *_split(table, "."))


def has_dots(place: str) -> bool:
    """Whether a part of a folder is `.` or `..`, also if it is escaped: servers and links may resolve it elsewhere."""
    return not {".", ".."}.isdisjoint(unquote(place).split("/"))


def _split(text: str, sign: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(sign)))
