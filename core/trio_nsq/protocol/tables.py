"""The table that a topic declares: `delta:URL`, `iceberg:CATALOG/NAMESPACE.TABLE` or `parquet:URL`. Syntax only."""

import re
from typing import Literal, NamedTuple, cast

TableFormat = Literal["delta", "iceberg", "parquet"]

MAX_TABLE = 1024
_FORMATS = ("delta", "iceberg", "parquet")
_FORMS = "delta:URL, iceberg:CATALOG/NAMESPACE.TABLE or parquet:URL"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://(.+)")
_WITH_SECRET = re.compile(r"[^/?@:]*:[^@]*@")


class DeclaredTable(NamedTuple):
    """A table that a topic declares.

    Attributes:
        target: The absolute path or the URL of a folder; of an Iceberg table `CATALOG/NAMESPACE.TABLE`.
    """

    format: TableFormat
    target: str

    def __str__(self) -> str:
        return f"{self.format}:{self.target}"

    @classmethod
    def parse(cls, text: str) -> "DeclaredTable":
        """Parse the value of the setting `table`. Raises ValueError: it has another form, or a secret."""
        if len(text) > MAX_TABLE:
            raise ValueError(f"the maximum is {MAX_TABLE} characters")
        if not text.isprintable() or " " in text:
            raise ValueError("it has a blank or a control character")
        if "{" in text or "}" in text:
            raise ValueError("it has braces: write the name of the table of this topic in full")
        kind, _, target = text.partition(":")
        if kind not in _FORMATS or not target:
            raise ValueError(f"it must be {_FORMS}, or empty")
        if kind == "iceberg":
            iceberg_name(target)
        else:
            _check_place(target)
        return cls(cast(TableFormat, kind), target)


def iceberg_name(text: str) -> tuple[str, str]:
    """Split `CATALOG/NAMESPACE.TABLE` into the catalog and `NAMESPACE.TABLE`. Raises ValueError."""
    catalog, slash, name = text.partition("/")
    if not catalog or not slash or not all(name.split(".")) or "." not in name or "/" in name:
        raise ValueError(f"{text!r} is not CATALOG/NAMESPACE.TABLE, such as prod/events.clicks")
    return catalog, name


def _check_place(place: str) -> None:
    """Raise ValueError for a folder that the supervisor could not find, or that has a secret."""
    url = _URL.fullmatch(place)
    if url is None:
        if not place.startswith("/"):
            raise ValueError("the folder must be an absolute path or a URL such as s3://bucket/clicks")
        return
    if "?" in url[1] or _WITH_SECRET.match(url[1]):
        raise ValueError(
            "everyone who may see the topic sees it, so it must have no secrets and no options: give keys and the "
            "endpoint to the program that writes the table"
        )
