"""The columns of the source `nsq`: those of a message, and with `format=json` those of the fields of bodies.

Spark imports this to look up any data source, so it imports pyarrow only to infer types.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import types
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from pyspark.sql.types import DecimalType as SparkDecimal

from ..export.layout import BODY, HEADERS, REST, UNPARSED, BodyFormat, JsonColumn, Layout, name_columns
from ..options import OptionError, parse_choice
from ..schemas.column_types import (
    TYPE_NAMES,
    ColumnType,
    DecimalType,
    JsonArray,
    JsonMap,
    JsonStruct,
    JsonType,
    TimeType,
    parse_column,
    parse_type,
    split_columns,
)

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
    kind: getattr(types, kind.spark)() for kind in JsonType if kind.spark and kind is not JsonType.BINARY
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
    return BodyFormat(parse_choice(options, "format", *(each for each in BodyFormat if not each.has_schema)))


def infer_schema(options: Mapping[str, str], sample: SampleBodies) -> StructType:
    """Return the columns of the option `columns`, or all.

    Raises:
        OptionError: A column does not exist.
        LayoutError: There are no JSON columns, or too many.
    """
    form, text = parse_format(options), options.get("columns")
    own = _columns_of(form, options)
    if form is not BodyFormat.JSON:
        names = [name.strip() for name in text.split(",")] if text else list(own)
        for name in names:
            if name not in own:
                raise OptionError(f"the source nsq has no column {name}; it has {', '.join(own)}")
        return StructType([own[name] for name in names])
    if not text:
        fields = [_json_field(column) for column in _named_apart(_infer(sample(), []), options)]
        return StructType(
            [*(own[name] for name in _message_columns(options)), *fields, own[REST], own[UNPARSED]]
        )
    items = [_parse_item(item) for item in split_columns(text)]
    asked = [(name, kind) for name, kind in items if kind is not None or name not in own]
    if any(kind is None for _, kind in asked):
        columns = _infer(sample(), asked)
    else:
        columns = _named([(name, kind) for name, kind in asked if kind is not None])
    found = iter(_named_apart(columns, options))
    return StructType(
        [own[name] if kind is None and name in own else _json_field(next(found)) for name, kind in items]
    )


def row_format(options: Mapping[str, str], schema: StructType) -> RowFormat:
    """Return how to build rows with a schema: that of `infer_schema`, or one that the user gave.

    Raises:
        OptionError: A column of the schema does not exist, or has another type.
    """
    form = parse_format(options)
    own = _columns_of(form, options)
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
        return RowFormat(Layout(body=form, headers=HEADERS in names), tuple(columns))
    headers = HEADERS in _message_columns(options) and HEADERS in names
    if not fields and not names & {REST, UNPARSED}:
        # bodies need not be parsed
        return RowFormat(Layout(headers=headers), tuple(columns))
    layout = Layout(
        body=form,
        json_columns=tuple(fields),
        keep_rest=REST in names,
        keep_body=BODY in names,
        headers=headers,
    )
    return RowFormat(layout, tuple(columns))


def _columns_of(form: BodyFormat, options: Mapping[str, str]) -> dict[str, StructField]:
    """Return the columns that are no fields of bodies."""
    nullable = {"attempts", HEADERS, REST, UNPARSED, *([BODY] if form is BodyFormat.TEXT else [])}
    types = {**_message_columns(options), **_BODY_COLUMNS[form]}
    return {name: StructField(name, kind, name in nullable) for name, kind in types.items()}


def _message_columns(options: Mapping[str, str]) -> dict[str, DataType]:
    """Return the columns about a message. As of Spark's Kafka source, headers are among them only if asked for.

    A query of an earlier version may append to a table without this column, or have JSON fields of this name.
    """
    asked = parse_choice(options, "includeHeaders", "false", "true") == "true"
    return _MESSAGE | ({HEADERS: MapType(StringType(), StringType())} if asked else {})


def _named_apart(columns: Sequence[JsonColumn], options: Mapping[str, str]) -> Sequence[JsonColumn]:
    """Return the columns of fields with other names than that of the headers, if this column is asked for."""
    has_headers = HEADERS in _message_columns(options)
    return Layout(json_columns=tuple(columns), headers=True).named().json_columns if has_headers else columns


def _parse_item(item: str) -> tuple[str, ColumnType | None]:
    """Parse `NAME` or `FIELD:TYPE`. Raises OptionError."""
    try:
        name, kind = parse_column(item)
        if name:
            return name, kind
    except ValueError:
        pass
    raise OptionError(f"the option columns: {item!r} must be NAME or FIELD:TYPE, where TYPE is {TYPE_NAMES}")


def _infer(bodies: Iterable[bytes], given: Sequence[tuple[str, ColumnType | None]]) -> list[JsonColumn]:
    from ..export.json_columns import infer_columns

    return infer_columns(bodies, given)


def _named(fields: Sequence[tuple[str, ColumnType]]) -> list[JsonColumn]:
    names = name_columns(field for field, _ in fields)
    return [JsonColumn(field, kind, name) for (field, kind), name in zip(fields, names, strict=True)]


def _json_field(column: JsonColumn) -> StructField:
    metadata = {_FIELD: column.field, _KIND: column.type.value}
    return StructField(column.name, _spark_type(column.type), True, metadata)


def _spark_type(kind: ColumnType) -> DataType:
    """Return the type of a column in Spark. Raises OptionError: Spark has none."""
    match kind:
        case DecimalType():
            return SparkDecimal(kind.precision, kind.scale)
        case JsonArray():
            return ArrayType(_spark_type(kind.element))
        case JsonMap():
            return MapType(StringType(), _spark_type(kind.values))
        case JsonStruct():
            return StructType([StructField(name, _spark_type(each)) for name, each in kind.fields])
        case TimeType(unit="s" | "ms" | "us"):
            return TimestampNTZType() if kind.is_local else TimestampType()
        case JsonType.BINARY:
            return BinaryType()
        case JsonType() if kind in _JSON_TYPES:
            return _JSON_TYPES[kind]
    raise OptionError(f"the option columns: Spark has no type for {kind.value}")


def _json_type(kind: DataType, *, nullable: bool) -> ColumnType:
    """Return the type of a field from that of a column. Raises ValueError."""
    if not nullable:
        raise ValueError("NOT NULL")
    match kind:
        case SparkDecimal():
            return DecimalType(kind.precision, kind.scale)
        case ArrayType():
            return JsonArray(_json_type(kind.elementType, nullable=kind.containsNull))
        case StructType():
            return JsonStruct(
                tuple((each.name, _json_type(each.dataType, nullable=each.nullable)) for each in kind.fields)
            )
        case MapType() if kind.keyType == StringType():
            return JsonMap(_json_type(kind.valueType, nullable=kind.valueContainsNull))
    for own, there in _JSON_TYPES.items():
        if there == kind:
            return own
    raise ValueError(f"the type {kind.simpleString()}")


def _column_of(column: StructField) -> JsonColumn:
    """Return the JSON column of a schema's column. Raises OptionError."""
    if _FIELD in column.metadata:
        return JsonColumn(column.metadata[_FIELD], parse_type(column.metadata[_KIND]), column.name)
    try:
        kind = _json_type(column.dataType, nullable=column.nullable)
    except ValueError as problem:
        raise OptionError(
            f"the column {column.name} has {problem}: JSON fields are string, boolean, tinyint, smallint, int, bigint, "
            "float, double, decimal, date, timestamp, or arrays, structs, or maps from string of these, and may be null"
        ) from None
    named_apart = column.name.removeprefix(_BODY_PREFIX)
    field = named_apart if name_columns([named_apart]) == [column.name] else column.name
    return JsonColumn(field, kind, column.name)


def _wrong_type(column: StructField, there: StructField, form: BodyFormat) -> str:
    null = "" if there.nullable or column.nullable else " NOT NULL"
    text = (
        f"the column {column.name} is {there.dataType.simpleString()}{'' if there.nullable else ' NOT NULL'}, not "
        f"{column.dataType.simpleString()}{null}"
    )
    if form is BodyFormat.JSON:
        text += f": for the field {column.name} of the bodies, name the column {_BODY_PREFIX}{column.name}"
    return text
