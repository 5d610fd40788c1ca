"""Where the tables of topics may be: who may change the settings of a topic chooses its table. Pure."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..protocol.tables import DeclaredTable
from ..storage import local_path, shown_place
from ..storage.storage_uri import AZURE, parse_place
from .table_places import ICEBERG, folder_parts, has_dots, iceberg_parts, parts_of

_FORMATS = ("delta", ICEBERG, "parquet")


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
        if kind == ICEBERG:
            _check_iceberg(place)
            return cls(kind, iceberg_parts(place))
        parts = folder_parts(place, base)
        _check_folder(place)
        return cls(kind, parts)

    def has(self, table: DeclaredTable) -> bool:
        """Whether a table is here."""
        if self.format != table.format and (self.format or table.format == ICEBERG):
            return False
        try:
            parts = parts_of(table)
        except ValueError:
            return False
        return parts[: len(self.parts)] == self.parts and not has_dots(table.target)


def is_allowed(table: DeclaredTable, places: Sequence[AllowedPlace]) -> bool:
    """Whether a table may be where it is: without places, anywhere."""
    return not places or any(place.has(table) for place in places)


def may_have_table(folder: str, base: Path, places: Sequence[AllowedPlace]) -> bool:
    """Whether a topic may declare its table in this folder, which has something else.

    Args:
        folder: A path, relative to `base`, or a URL.
        places: The places where tables may be; empty: nothing is known of them, so this is false.

    Raises:
        StorageError: It is no folder.
    """
    parts = folder_parts(shown_place(folder), base)
    return any(place.format != ICEBERG and parts[: len(place.parts)] == place.parts for place in places)


def _check_iceberg(name: str) -> None:
    """Raises ValueError: it is no catalog, namespace or table."""
    catalog, slash, rest = name.removesuffix(".").partition("/")
    if not catalog or (slash and not all(rest.split("."))) or "/" in rest:
        raise ValueError(
            f"'iceberg:{name}' is not iceberg:CATALOG, iceberg:CATALOG/NAMESPACE or iceberg:CATALOG/NAMESPACE.TABLE"
        )


def _check_folder(place: str) -> None:
    """Raises ValueError: no table could be below this folder."""
    if not place:
        raise ValueError("it is empty: name a folder, such as s3://lake/")
    if local_path(place) is not None:
        return
    shown, uri = shown_place(place), parse_place(place)
    if uri.secret or uri.options or (uri.user and uri.kind != AZURE):
        raise ValueError(
            f"{shown}: a place of tables has no user, no secret and no options after '?', because the tables that "
            "topics declare have none. Leave them out, and give keys and the endpoint to this command in its "
            "environment"
        )
    if not uri.host or has_dots(place):
        raise ValueError(f"{shown!r} is not a folder, such as s3://lake/ or delta:/data/lake")
