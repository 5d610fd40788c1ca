"""Where the tables of topics may be: who may change the settings of a topic chooses its table. Pure."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from ..protocol.tables import DeclaredTable
from ..storage import StorageError, local_path

_FORMATS = ("delta", "iceberg", "parquet")
_ICEBERG = "iceberg"


class AllowedPlace(NamedTuple):
    """A place below which tables may be, `[FORMAT:]FOLDER` or `iceberg:CATALOG[/NAMESPACE[.TABLE]]`.

    Attributes:
        format: The only format of tables there; empty: `delta` and `parquet`.
        parts: The parts of its name.
    """

    format: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, base: Path) -> "AllowedPlace":
        """Parse a place; a relative folder is one of `base`. Raises ValueError."""
        kind, _, place = text.partition(":")
        if kind not in _FORMATS:
            kind, place = "", text
        parts = _iceberg_parts(place) if kind == _ICEBERG else _folder_parts(place, base)
        if not all(parts) or ".." in parts or "." in parts:
            raise ValueError(
                f"{text!r} is not a folder, such as s3://lake/ or delta:/data/lake, nor iceberg:CATALOG or "
                "iceberg:CATALOG/NAMESPACE"
            )
        return cls(kind, parts)

    def has(self, table: DeclaredTable) -> bool:
        """Whether a table is here."""
        if self.format != table.format and (self.format or table.format == _ICEBERG):
            return False
        if table.format == _ICEBERG:
            parts = _iceberg_parts(table.target)
        else:
            try:
                parts = _folder_parts(table.target)
            except ValueError:
                return False
        # A file system would resolve dots to a folder elsewhere.
        return parts[: len(self.parts)] == self.parts and not {"..", "."} & set(parts)


def is_allowed(table: DeclaredTable, places: Sequence[AllowedPlace]) -> bool:
    """Whether a table may be where it is: without places, anywhere."""
    return not places or any(place.has(table) for place in places)


def _folder_parts(place: str, base: Path | None = None) -> tuple[str, ...]:
    """Return the parts of a folder; with a base, those of its absolute path. Raises ValueError: it is none."""
    try:
        path: PurePath | None = local_path(place)
    except StorageError as exc:
        raise ValueError(str(exc)) from exc
    if path is None:
        scheme, _, rest = place.partition("://")
        return (f"{scheme.lower()}://", *_split(rest, "/"))
    if not place:
        raise ValueError("it is empty")
    return path.parts if base is None else PurePath(os.path.normpath(base / path)).parts


def _iceberg_parts(name: str) -> tuple[str, ...]:
    catalog, _, table = name.partition("/")
    return (catalog, *(_split(table, ".") if table else ()))


def _split(text: str, sign: str) -> list[str]:
    """Split text at a sign, which may be its end."""
    return text.removesuffix(sign).split(sign)
