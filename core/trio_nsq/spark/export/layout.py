"""The layout of exported files: columns, partition folders and names. The first export to a folder determines it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from ...log.gaps import Span
from ...protocol.errors import NSQError


class LayoutError(NSQError):
    """A layout is invalid, or differs from that of the folder; the text has the reason."""


class PartitionBy(StrEnum):
    """The partition folders, by publish time in UTC."""

    NONE = "none"
    DATE = "date"
    HOUR = "hour"


class BodyFormat(StrEnum):
    """The columns of the bodies."""

    BINARY = "binary"
    TEXT = "text"
    JSON = "json"


class JsonType(StrEnum):
    """The type of the column of a field of JSON bodies."""

    STRING = "string"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    JSON = "json"


MESSAGE_COLUMNS = ("topic", "broker", "seq", "id", "ts_ns", "ts", "attempts")
UNPARSED = "unparsed"
"""The column of bodies that are not valid text or JSON."""
REST = "rest"
"""The column of all other JSON fields, as a JSON object."""
_TAKEN = {*MESSAGE_COLUMNS, UNPARSED, REST, "body", "date", "hour"}


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """A field of JSON bodies and its column."""

    field: str
    type: JsonType

    @property
    def name(self) -> str:
        """The name of the column: the name of the field, unless it is reserved."""
        return f"body_{self.field}" if self.field.lower() in _TAKEN else self.field


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of all files of a folder.

    Attributes:
        json_columns: With `BodyFormat.JSON`, the columns, at least one.
        keep_rest: With `BodyFormat.JSON`, whether the column `rest` has the fields without a column.
    """

    partition: PartitionBy = PartitionBy.NONE
    body: BodyFormat = BodyFormat.BINARY
    json_columns: tuple[JsonColumn, ...] = ()
    keep_rest: bool = False

    def to_json(self) -> dict[str, Any]:
        """Convert to an object of the manifest."""
        return {
            "partition_by": self.partition.value,
            "body": self.body.value,
            "json_columns": [[column.field, column.type.value] for column in self.json_columns],
            "keep_rest": self.keep_rest,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Layout":
        """Parse an object of the manifest. Raises ValueError, KeyError, TypeError."""
        return cls(
            PartitionBy(found["partition_by"]),
            BodyFormat(found["body"]),
            tuple(JsonColumn(field, JsonType(kind)) for field, kind in found["json_columns"]),
            bool(found["keep_rest"]),
        )


def check_columns(columns: Sequence[JsonColumn]) -> None:
    """Check that column names are unique; Spark ignores case. Raises LayoutError."""
    seen: dict[str, str] = {}
    for column in columns:
        before = seen.setdefault(column.name.lower(), column.field)
        if before != column.field:
            raise LayoutError(
                f"the fields {before!r} and {column.field!r} would share the column {column.name}"
            )
        seen[column.name.lower()] = column.field


_HOUR_NS = 3600 * 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def partition_key(partition: PartitionBy, timestamp_ns: int) -> int:
    """Return the number of the date or hour of a time, counted from 1970; 0 without partitions."""
    if partition is PartitionBy.NONE:
        return 0
    return timestamp_ns // (_HOUR_NS if partition is PartitionBy.HOUR else 24 * _HOUR_NS)


def partition_folder(partition: PartitionBy, key: int) -> str:
    """Return the Hive-style folder of a partition, with a trailing slash; empty without partitions."""
    if partition is PartitionBy.NONE:
        return ""
    moment = _EPOCH + timedelta(hours=key if partition is PartitionBy.HOUR else 24 * key)
    folder = f"date={moment:%Y-%m-%d}/"
    return f"{folder}hour={moment:%H}/" if partition is PartitionBy.HOUR else folder


def safe_name(text: str) -> str:
    """Convert text to a part of a file name. It starts with no dot or underscore: readers ignore such files."""
    safe = re.sub(r"[^A-Za-z0-9.\-]", "_", text)
    return f"x{safe}" if safe[0] in "._" else safe


def range_name(topic: str, broker: str, span: Span) -> str:
    """Return the name of the files of a range, without the suffix; all attempts use the same name."""
    return f"{safe_name(topic)}-{safe_name(broker)}-{span.first:020d}-{span.end:020d}"
