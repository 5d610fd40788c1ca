"""The columns of the source `nsq`: those of a message, and with `format=json` those of the fields of bodies.

Spark imports this to look up any data source, so it imports pyarrow only to infer types.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..export.layout import BODY, REST, UNPARSED, BodyFormat, JsonColumn, JsonType, Layout, name_columns
from ..options import OptionError, parse_choice

_FIELD, _KIND = "nsq.field", "nsq.type"
"""The keys of a column's metadata: its JSON field, and the type of the field."""
_MESSAGE = {
    "topic": StringType(),
    "broker": StringType(),
    "seq": LongType(),
    "id": StringType(),
    "ts_ns": LongType(),
    "ts": TimestampType(),
    "attempts": IntegerType(),
}
_BODY_COLUMNS: Mapping[BodyFormat, Mapping[str, DataType]] = {
    BodyFormat.BINARY: {BODY: BinaryType()},
    BodyFormat.TEXT: {BODY: StringType(), UNPARSED: BinaryType()},
    BodyFormat.JSON: {BODY: BinaryType(), REST: StringType(), UNPARSED: BinaryType()},
}
_JSON_TYPES: Mapping[JsonType, DataType] = {
    JsonType.STRING: StringType(),
    JsonType.LONG: LongType(),
    JsonType.DOUBLE: DoubleType(),
    JsonType.BOOLEAN: BooleanType(),
    JsonType.TIMESTAMP: TimestampType(),
    JsonType.JSON: StringType(),
}
_BODY_PREFIX = "body_"

SampleBodies = Callable[[], Iterable[bytes]]
"""Returns bodies of the query, to infer types."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How messages become rows. Can be pickled.

    Attributes:
        layout: The columns to build.
        columns: The columns to return, in order: the name in the layout, the name in the rows, and whether it may be
            null.
    """

    layout: Layout
    columns: tuple[tuple[str, str, bool], ...]

    def rows(self, table: Any) -> Any:
        """Select the columns of a table that has the layout."""
        import pyarrow as pa

        fields = [pa.field(name, table.schema.field(own).type, null) for own, name, null in self.columns]
        return pa.Table.from_arrays([table[own] for own, _, _ in self.columns], schema=pa.schema(fields))


def parse_format(options: Mapping[str, str]) -> BodyFormat:
    """Parse the option `format`. Raises OptionError."""
    return BodyFormat(parse_choice(options, "format", *BodyFormat))


def infer_schema(options: Mapping[str, str], sample: SampleBodies) -> StructType:
    """Return the columns of the option `columns`, or all.

    Raises:
        OptionError: A column does not exist.
        LayoutError: There are no JSON columns, or too many.
    """
    form, text = parse_format(options), options.get("columns")
    own = _columns_of(form)
    if form is not BodyFormat.JSON:
        names = [name.strip() for name in text.split(",")] if text else list(own)
        for name in names:
            if name not in own:
                raise OptionError(f"the source nsq has no column {name}; it has {', '.join(own)}")
        return StructType([own[name] for name in names])
    if not text:
        fields = [_json_field(column) for column in _infer(sample(), [])]
        return StructType([*(own[name] for name in _MESSAGE), *fields, own[REST], own[UNPARSED]])
    items = [_parse_item(item.strip()) for item in text.split(",")]
    asked = [(name, kind) for name, kind in items if kind is not None or name not in own]
    if any(kind is None for _, kind in asked):
        columns = _infer(sample(), asked)
    else:
        columns = _named([(name, kind) for name, kind in asked if kind is not None])
    found = iter(columns)
    return StructType(
        [own[name] if kind is None and name in own else _json_field(next(found)) for name, kind in items]
    )


def row_format(options: Mapping[str, str], schema: StructType) -> RowFormat:
    """Return how to build rows with a schema: that of `infer_schema`, or one that the user gave.

    Raises:
        OptionError: A column of the schema does not exist, or has another type.
    """
    form = parse_format(options)
    own = _columns_of(form)
    columns: list[tuple[str, str, bool]] = []
    fields: list[JsonColumn] = []
    for column in schema.fields:
        lower = column.name.lower()
        if lower in own and _FIELD not in column.metadata:
            there = own[lower]
            if column.dataType != there.dataType or (there.nullable and not column.nullable):
                raise OptionError(_wrong_type(column, there, form))
            columns.append((lower, column.name, column.nullable))
        elif form is BodyFormat.JSON:
            fields.append(_column_of(column))
            columns.append((column.name, column.name, True))
        else:
            raise OptionError(f"the source nsq has no column {column.name}; it has {', '.join(own)}")
    names = {name for name, _, _ in columns}
    if form is not BodyFormat.JSON:
        return RowFormat(Layout(body=form), tuple(columns))
    if not fields and not names & {REST, UNPARSED}:
        return RowFormat(Layout(), tuple(columns))  # bodies need not be parsed
    layout = Layout(body=form, json_columns=tuple(fields), keep_rest=REST in names, keep_body=BODY in names)
    return RowFormat(layout, tuple(columns))


def _columns_of(form: BodyFormat) -> dict[str, StructField]:
    """Return the columns that are no fields of bodies."""
    nullable = {"attempts", REST, UNPARSED, *([BODY] if form is BodyFormat.TEXT else [])}
    types = {**_MESSAGE, **_BODY_COLUMNS[form]}
    return {name: StructField(name, kind, name in nullable) for name, kind in types.items()}


def _parse_item(item: str) -> tuple[str, JsonType | None]:
    """Parse `NAME` or `FIELD:TYPE`. Raises OptionError."""
    name, colon, kind = item.rpartition(":")
    if not colon:
        name = item
    if not name or (colon and kind not in list(JsonType)):
        raise OptionError(
            f"the option columns: {item!r} must be NAME or FIELD:TYPE, where TYPE is {', '.join(JsonType)}"
        )
    return name, JsonType(kind) if colon else None


def _infer(bodies: Iterable[bytes], given: Sequence[tuple[str, JsonType | None]]) -> list[JsonColumn]:
    from ..export.json_columns import infer_columns

    return infer_columns(bodies, given)


def _named(fields: Sequence[tuple[str, JsonType]]) -> list[JsonColumn]:
    names = name_columns(field for field, _ in fields)
    return [JsonColumn(field, kind, name) for (field, kind), name in zip(fields, names, strict=True)]


def _json_field(column: JsonColumn) -> StructField:
    metadata = {_FIELD: column.field, _KIND: column.type.value}
    return StructField(column.name, _JSON_TYPES[column.type], True, metadata)


def _column_of(column: StructField) -> JsonColumn:
    """Return the JSON column of a schema's column. Raises OptionError."""
    if _FIELD in column.metadata:
        return JsonColumn(column.metadata[_FIELD], JsonType(column.metadata[_KIND]), column.name)
    kinds = [kind for kind, there in _JSON_TYPES.items() if there == column.dataType]
    if not kinds or not column.nullable:
        problem = f"the type {column.dataType.simpleString()}" if column.nullable else "NOT NULL"
        raise OptionError(
            f"the column {column.name} has {problem}: columns of JSON fields are string, bigint, double, boolean or "
            "timestamp, and may be null"
        )
    named_apart = column.name.removeprefix(_BODY_PREFIX)
    field = named_apart if named_apart in _columns_of(BodyFormat.JSON) else column.name
    return JsonColumn(field, kinds[0], column.name)


def _wrong_type(column: StructField, there: StructField, form: BodyFormat) -> str:
    null = "" if there.nullable or column.nullable else " NOT NULL"
    text = (
        f"the column {column.name} is {there.dataType.simpleString()}{'' if there.nullable else ' NOT NULL'}, not "
        f"{column.dataType.simpleString()}{null}"
    )
    if form is BodyFormat.JSON:
        text += f": for the field {column.name} of the bodies, name the column {_BODY_PREFIX}{column.name}"
    return text
