"""What the files of an export look like: fixed when a folder is begun, for readers want all files alike."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from ...protocol.errors import NSQError
from ..ranges import Span


class LayoutError(NSQError):
    """What was asked for cannot be, or does not fit what is there; the text says why."""


class PartitionBy(StrEnum):
    """Into which folders files go, by the time of the publish in UTC."""

    NONE = "none"
    DATE = "date"
    HOUR = "hour"


class BodyFormat(StrEnum):
    """What becomes of bodies."""

    BINARY = "binary"
    TEXT = "text"
    JSON = "json"


class JsonType(StrEnum):
    """The type of a column that is made of a field of JSON bodies."""

    STRING = "string"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    JSON = "json"


MESSAGE_COLUMNS = ("topic", "broker", "seq", "id", "ts_ns", "ts", "attempts")
UNPARSED = "unparsed"
"""The body, where it is not what it was said to be."""
REST = "rest"
"""A JSON object of the fields for which there is no column."""
_TAKEN = {*MESSAGE_COLUMNS, UNPARSED, REST, "body", "date", "hour"}


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """A field of JSON bodies, and the column that it is put into."""

    field: str
    type: JsonType

    @property
    def name(self) -> str:
        """The column's: the field's, but for names that are taken already."""
        return f"body_{self.field}" if self.field.lower() in _TAKEN else self.field


@dataclass(frozen=True, slots=True)
class Layout:
    """See the module.

    Attributes:
        partition: Into which folders files go.
        body: What becomes of bodies.
        json_columns: With `BodyFormat.JSON` the columns, at least one.
        keep_rest: With `BodyFormat.JSON` whether fields without a column are kept, in one called `rest`.
    """

    partition: PartitionBy = PartitionBy.NONE
    body: BodyFormat = BodyFormat.BINARY
    json_columns: tuple[JsonColumn, ...] = ()
    keep_rest: bool = False

    def as_json(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        return {
            "partition_by": self.partition.value,
            "body": self.body.value,
            "json_columns": [[column.field, column.type.value] for column in self.json_columns],
            "keep_rest": self.keep_rest,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Layout":
        """From there. Raises ValueError, KeyError or TypeError."""
        return cls(
            PartitionBy(found["partition_by"]),
            BodyFormat(found["body"]),
            tuple(JsonColumn(field, JsonType(kind)) for field, kind in found["json_columns"]),
            bool(found["keep_rest"]),
        )


def check_columns(columns: Sequence[JsonColumn]) -> None:
    """Raises LayoutError if two would be the same; case does not tell columns apart in Spark."""
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
    """A number that is the same for what was published in the same date or hour."""
    if partition is PartitionBy.NONE:
        return 0
    return timestamp_ns // (_HOUR_NS if partition is PartitionBy.HOUR else 24 * _HOUR_NS)


def partition_folder(partition: PartitionBy, key: int) -> str:
    """The folder, with a slash behind it, in the way of Hive; empty if there is none."""
    if partition is PartitionBy.NONE:
        return ""
    moment = _EPOCH + timedelta(hours=key if partition is PartitionBy.HOUR else 24 * key)
    folder = f"date={moment:%Y-%m-%d}/"
    return f"{folder}hour={moment:%H}/" if partition is PartitionBy.HOUR else folder


def safe_name(text: str) -> str:
    """Part of a file name. Whatever begins with a dot or an underline would be passed over by readers."""
    safe = re.sub(r"[^A-Za-z0-9.\-]", "_", text)
    return f"x{safe}" if safe[0] in "._" else safe


def range_name(topic: str, broker: str, span: Span) -> str:
    """What the files of a range are called, without what comes behind; the same at every attempt."""
    return f"{safe_name(topic)}-{safe_name(broker)}-{span.first:020d}-{span.end:020d}"
