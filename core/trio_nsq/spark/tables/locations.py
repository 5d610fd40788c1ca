"""The locations of tables, as their libraries take them: a path or a URI, which each of them parses differently."""

import re

from ...storage import Storage, local_path
from .target import TableError, TableKind

_CONTROL = r"[\x00-\x1f\x7f]"
_ESCAPE = "%[0-9A-Fa-f]{2}"
"""deltalake decodes it, also where it is encoded once more."""
_END_OF_PATH = "[#?]"
"""What follows is no part of the path of a URI. deltalake encodes it in a local path, pyiceberg does not."""


def table_location(kind: TableKind, storage: Storage, shown: str) -> str:
    """Return the location of a table's folder, without a slash at its end.

    Args:
        shown: The table, for messages.

    Raises:
        TableError: The library of the table would read and write another folder.
    """
    location = storage.url_of("").rstrip("/")
    local = local_path(location)
    if kind is TableKind.ICEBERG:
        library, misread = "pyiceberg", [_END_OF_PATH]
    else:
        library, misread = "deltalake", [_ESCAPE, r"\\" if local is not None else _END_OF_PATH]
    if found := re.search("|".join([*misread, _CONTROL]), location):
        raise TableError(
            f"{shown} cannot be used: {library} would use another folder than {storage.shown}, because of "
            f"{found.group()!r} in its name. Choose another folder"
        )
    return f"file://{local}" if kind is TableKind.ICEBERG and local is not None else location
