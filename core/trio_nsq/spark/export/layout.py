"""The layout of exported files: columns, partition folders and names. The first export to a folder determines it."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from ...log.gaps import Span
from ...protocol.errors import NSQError
from ..bodies.schema import BodySchema
from ..schemas.column_types import ColumnType, JsonMap, JsonType, parse_type
from .levels import Level, parse_level


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
    AVRO = "avro"
    PROTOBUF = "protobuf"

    @property
    def has_schema(self) -> bool:
        """Whether bodies can only be decoded with a schema."""
        return self in (BodyFormat.AVRO, BodyFormat.PROTOBUF)

    @property
    def has_fields(self) -> bool:
        """Whether bodies have fields that become columns."""
        return self is BodyFormat.JSON or self.has_schema


MESSAGE_COLUMNS = ("topic", "broker", "seq", "id", "ts_ns", "ts", "attempts")
UNPARSED = "unparsed"
"""The column of bodies that are not valid text or JSON."""
REST = "rest"
"""The column of all other JSON fields, as a JSON object."""
BODY = "body"
HEADERS = "headers"
HEADERS_TYPE = JsonMap(JsonType.STRING)
"""The type of the column of the headers of messages."""
_TAKEN = {*MESSAGE_COLUMNS, UNPARSED, REST, BODY, "date", "hour"}
_REFUSED_BY_SPARK = re.compile(r"[ ,;{}()\n\t=]")
MAX_COLUMNS = 500
"""The maximum number of columns without a list of fields: of more, the keys of the bodies are probably data."""


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """A field of JSON bodies and its column.

    Attributes:
        name: The name of the column, see `name_columns`.
        widens: Whether a long becomes a double, in all files, when the field has fractions: the type was inferred.
        keeps_type: Whether the column cannot follow, whatever the contract: a file has a long that no double has.
    """

    field: str
    type: ColumnType
    name: str
    widens: bool = False
    keeps_type: bool = False

    def to_json(self) -> list[object]:
        """Convert to a value of the manifest. Earlier programs do not know the last element, and need not often."""
        found: list[object] = [self.field, self.type.value, self.name, self.widens]
        return [*found, True] if self.keeps_type else found


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of all files of a folder.

    Attributes:
        json_columns: The columns of the fields of bodies, at least one, if `body` has fields.
        keep_rest: With `BodyFormat.JSON`, whether the column `rest` has the fields without a column.
        keep_body: If `body` has fields, whether the column `body` has the bodies too, so that they can be replayed.
        headers: Whether there is a column of the headers of messages; folders of earlier versions have none.
        where: The condition in SQL that the messages in the files meet, see `selection`; empty: the files have all.
        masks: Fields of JSON bodies whose values are masked, each with its `Mask`.
        levels: The levels of partition folders, outermost first: fields of JSON columns, transforms of fields, see
            `levels`, and the value of `partition`; empty: only `partition`.
        event_time: The field with the time that `partition` is of; empty: it is of the publish time. Its column has
            times.
        keeps_levels: Whether the files have the columns of the fields among `levels`, too, as Iceberg needs. Otherwise
            their values are in the names of folders only, as those of Spark and Delta.
        body_schema: The reader's schema, if bodies can only be decoded with one.
        key: Fields that identify a row of the table, which is that of the newest message with these values. Empty: each
            message is a row.
        operation: The field that says whether a message deletes its key, see `operations`; empty: none does.
        paths: Fields that are those of another name, or are in objects, each with its path, such as `user.id`.
        sort_by: The columns by which the rows of each file are sorted, each with whether that is descending.
    """

    partition: PartitionBy = PartitionBy.NONE
    body: BodyFormat = BodyFormat.BINARY
    json_columns: tuple[JsonColumn, ...] = ()
    keep_rest: bool = False
    keep_body: bool = False
    headers: bool = False
    where: str = ""
    masks: tuple[tuple[str, str], ...] = ()
    levels: tuple[str, ...] = ()
    event_time: str = ""
    keeps_levels: bool = False
    body_schema: BodySchema | None = None
    key: tuple[str, ...] = ()
    operation: str = ""
    paths: tuple[tuple[str, str], ...] = ()
    sort_by: tuple[tuple[str, bool], ...] = ()

    @property
    def key_columns(self) -> list[str]:
        """The columns of the key."""
        return [self.column_of(field).name for field in self.key]

    @property
    def field_levels(self) -> list[Level]:
        """The levels of fields."""
        return [parse_level(level) for level in self.levels if level != self.partition]

    @property
    def partition_fields(self) -> list[str]:
        """The fields of the levels."""
        return list(dict.fromkeys(level.field for level in self.field_levels))

    @property
    def shapes(self) -> bool:
        """Whether fields have other names, names of folders are transforms of values, or rows are sorted."""
        return bool(self.paths or self.sort_by or any(level.suffix for level in self.field_levels))

    def path_of(self, field: str) -> str:
        """Return where bodies have the value of a column's field."""
        return dict(self.paths).get(field, field)

    def level_name(self, level: Level) -> str:
        """Return the name of the folders of a level: that of the column, with the transform."""
        return plain_name(level.field) + level.suffix if level.suffix else self.column_of(level.field).name

    @property
    def _taken_names(self) -> list[str]:
        """The names of columns that are not of fields, beside those of each layout."""
        names = [self.level_name(level) for level in self.field_levels if level.suffix]
        return [*names, HEADERS] if self.headers else names

    @property
    def is_by_publish_time(self) -> bool:
        """Whether only the publish time determines the folder."""
        return self.partition is not PartitionBy.NONE and not self.levels

    @property
    def fixed_fields(self) -> set[str]:
        """The fields whose columns keep their types: folders, keys, or values, that are there could not follow."""
        kept = [column.field for column in self.json_columns if column.keeps_type]
        return {*self.partition_fields, self.event_time, *self.key, self.operation, *kept}

    @property
    def dropped_columns(self) -> list[str]:
        """The columns whose values are in the names of folders only."""
        whole = [] if self.keeps_levels else [level.field for level in self.field_levels if not level.suffix]
        return [self.column_of(field).name for field in whole]

    @property
    def time_column(self) -> str:
        """The column with the time that `partition` is of."""
        return self.column_of(self.event_time).name if self.event_time else "ts"

    def column_of(self, field: str) -> JsonColumn:
        """Return the column of a field. Raises LayoutError: there is none."""
        for column in self.json_columns:
            if column.field == field:
                return column
        raise LayoutError(f"the field {field} has no column")

    def with_fields(
        self,
        new_fields: Mapping[str, str],
        fits: "ColumnFits | None" = None,
        *,
        widens: bool = False,
        at_most: int | None = MAX_COLUMNS,
    ) -> "Layout":
        """Return the layout with a column for each of these fields that has none.

        Args:
            new_fields: Types by field, as in `RangeResult.new_fields`.
            widens: See `JsonColumn`; not in a table, which could not follow.
            at_most: The number of columns in total; None: any.
            fits: Whether the table can have a column of this name and type; None: there is no table.
        """
        known = {column.field for column in self.json_columns}
        fields = [field for field in new_fields if field not in known]
        if at_most is not None:
            fields = fields[: max(0, at_most - len(known))]
        return self._with_columns(
            [JsonColumn(field, parse_type(new_fields[field]), "", widens) for field in fields], fits
        )

    def renamed(self, fits: "ColumnFits") -> "Layout":
        """Return the layout whose inferred columns have names that fit a table. No file may have them yet."""
        if not self.keep_rest:
            return self
        return replace(self, json_columns=())._with_columns(self.json_columns, fits)

    def named(self) -> "Layout":
        """Return the layout with names of columns that fit its other columns. No file may have them yet."""
        return replace(self, json_columns=())._with_columns(self.json_columns, None)

    def _with_columns(self, columns: Iterable[JsonColumn], fits: "ColumnFits | None") -> "Layout":
        """Return the layout with more columns, and names for them."""
        found = list(self.json_columns)
        for column in columns:
            kind, there = column.type, [each.name for each in found]
            suits = None if fits is None else partial(fits, kind=kind)
            (name,) = name_columns([column.field], there, suits, self._taken_names)
            found.append(replace(column, name=name))
        return replace(self, json_columns=tuple(found))

    def widened(self, fields: Mapping[str, str]) -> "Layout":
        """Return the layout with these types, by field."""
        wider = fields.keys() - self.fixed_fields
        columns = (
            replace(column, type=parse_type(fields[column.field])) if column.field in wider else column
            for column in self.json_columns
        )
        return replace(self, json_columns=tuple(columns))

    def fixed(self) -> "Layout":
        """Return the layout in which no column is widened without the contract evolve."""
        columns = (replace(column, widens=False) for column in self.json_columns)
        return replace(self, json_columns=tuple(columns))

    def keeping_types(self, fields: Collection[str]) -> "Layout":
        """Return the layout in which the columns of these fields keep their types."""
        columns = (
            replace(column, keeps_type=column.keeps_type or column.field in fields)
            for column in self.json_columns
        )
        return replace(self, json_columns=tuple(columns))

    def to_json(self) -> dict[str, Any]:
        """Convert to an object of the manifest."""
        return {
            "partition_by": self._partition_json(),
            "body": self.body.value,
            "json_columns": [column.to_json() for column in self.json_columns],
            "keep_rest": self.keep_rest,
            "keep_body": self.keep_body,
            "headers": self.headers,
            **({"where": self.where} if self.where else {}),
            **({"masks": self.masks} if self.masks else {}),
            **({"paths": self.paths} if self.paths else {}),
            **({"sort_by": self.sort_by} if self.sort_by else {}),
            **({"body_schema": self.body_schema.to_json()} if self.body_schema is not None else {}),
            **({"key": self.key, "operation": self.operation} if self.key else {}),
        }

    def _partition_json(self) -> object:
        """Return `partition`, or an object, which programs that know only `partition` refuse."""
        if not self.levels:
            return self.partition.value
        return {
            "time": self.partition.value,
            "levels": self.levels,
            "event_time": self.event_time,
            "keeps_levels": self.keeps_levels,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Layout":
        """Parse an object of the manifest. Raises ValueError, KeyError, TypeError.

        Manifests of version 1 have only the field and the type of a column. Without a list of fields (`keep_rest`),
        their types were inferred.
        """
        keep_rest = bool(found["keep_rest"])
        names = distinct_names(column[0] for column in found["json_columns"])
        columns = []
        for (field, kind, *more), name in zip(found["json_columns"], names, strict=True):
            stored, widens, *kept = more or (name, keep_rest)
            columns.append(JsonColumn(field, parse_type(kind), stored, bool(widens), bool(kept)))
        partition = found["partition_by"]
        by = partition if isinstance(partition, dict) else {"time": partition}
        return cls(
            PartitionBy(by["time"]),
            BodyFormat(found["body"]),
            tuple(columns),
            keep_rest,
            bool(found.get("keep_body")),
            bool(found.get("headers")),
            found.get("where", ""),
            tuple((field, mask) for field, mask in found.get("masks", ())),
            tuple(by.get("levels", ())),
            by.get("event_time", ""),
            bool(by.get("keeps_levels")),
            BodySchema.from_json(found["body_schema"]) if "body_schema" in found else None,
            tuple(found.get("key", ())),
            found.get("operation", ""),
            tuple((field, path) for field, path in found.get("paths", ())),
            tuple((column, bool(is_descending)) for column, is_descending in found.get("sort_by", ())),
        )


class ColumnFits(Protocol):
    """Whether a table can have a column of this name and type."""

    def __call__(self, name: str, kind: ColumnType) -> bool: ...


def name_columns(
    fields: Iterable[str],
    there: Iterable[str] = (),
    fits: Callable[[str], bool] | None = None,
    more_taken: Iterable[str] = (),
) -> list[str]:
    """Return the names of the columns of fields: the names of the fields, where possible.

    Characters that Spark refuses in the columns of Delta tables become `_`; see also `distinct_names`.

    Args:
        there: The names of columns of other fields.
        fits: Whether a column can have this name; None: each can.
        more_taken: More names of columns that are not of fields: `HEADERS`, if there is this column, and of folders.
    """
    return distinct_names(map(plain_name, fields), there, fits, more_taken)


def plain_name(field: str) -> str:
    """Return the name of a field without the characters that Spark refuses in the columns of Delta tables."""
    return _REFUSED_BY_SPARK.sub("_", field)


def distinct_names(
    fields: Iterable[str],
    there: Iterable[str] = (),
    fits: Callable[[str], bool] | None = None,
    more_taken: Iterable[str] = (),
) -> list[str]:
    """Return different names for the columns of fields. The manifests of version 1 have none: these are theirs.

    The name of another column (`ts`, `hour`) gets the prefix `body_`. A name that differs from an earlier one in upper
    and lower case only, which Spark and others ignore, gets a number: `user`, `User_2`. So does one that does not fit.
    """
    seen, taken = {name.casefold() for name in there}, _TAKEN.union(name.casefold() for name in more_taken)
    names = []
    for field in fields:
        name = base = f"body_{field}" if field.casefold() in taken else field
        number = 1
        while name.casefold() in seen | taken or (fits is not None and not fits(name)):
            number += 1
            name = f"{base}_{number}"
        seen.add(name.casefold())
        names.append(name)
    return names


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


def files_prefix(topic: str, broker: str) -> str:
    """Return what the names of the files of a topic and broker begin with, see `ExportState.check_names`."""
    return f"{safe_name(topic)}-{safe_name(broker)}-"


def range_name(topic: str, broker: str, span: Span) -> str:
    """Return the name of the files of a range, without the suffix; all attempts use the same name."""
    return f"{files_prefix(topic, broker)}{span.first:020d}-{span.end:020d}"


def span_of_file(name: str, topic: str, broker: str) -> Span | None:
    """Return the range of a file of messages; None if it is no file of this topic and broker."""
    prefix = re.escape(files_prefix(topic, broker))
    found = re.fullmatch(rf"{prefix}(\d{{20}})-(\d{{20}})(-\d+)?\.parquet", name.rpartition("/")[2])
    return None if found is None else Span(int(found[1]), int(found[2]))


def merged_name(topic: str, key: str) -> str:
    """Return the name of a file that has replaced small files of a table.

    Args:
        key: 20 hex digits that the names of the replaced files determine.
    """
    return f"{safe_name(topic)}-merged-{key}.parquet"


def is_file_of(name: str, topic: str, brokers: Iterable[str]) -> bool:
    """Whether a file has messages of this topic, from one of these brokers or merged.

    The names of another topic may begin with that of this one: `clicks` and `clicks-eu`.
    """
    found = re.fullmatch(r".*-merged-([0-9a-f]{20})\.parquet", last := name.rpartition("/")[2])
    if found is not None and last == merged_name(topic, found[1]):
        return True
    return any(span_of_file(name, topic, broker) is not None for broker in brokers)
