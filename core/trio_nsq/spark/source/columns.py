"""The columns of the source `nsq`: those of a message, and those of the fields of bodies.

Fields of JSON bodies are those of a sample, of the option `columns`, or of a schema that the user gives. Fields of Avro
and Protobuf bodies are those of their own schema.

Spark imports this to look up any data source, so it imports pyarrow only to infer types, and to read schemas of bodies.
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

from ..bodies.schema import BodySchema, SchemaSource
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
    map_types,
    parse_column,
    parse_type,
    split_columns,
)
from .body_schemas import parse_schema_source, reader_schema
from .options import ReadOptions

_FIELD, _KIND = "nsq.field", "nsq.type"
"""The keys of a column's metadata: its field of the bodies, and the type of the field."""
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
    BodyFormat.AVRO: {BODY: BinaryType(), UNPARSED: BinaryType()},
    BodyFormat.PROTOBUF: {BODY: BinaryType(), UNPARSED: BinaryType()},
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
        schemas: Where the schemas of bodies come from, if the layout's format needs them.
    """

    layout: Layout
    columns: tuple[tuple[str, str, bool], ...]
    schemas: SchemaSource | None = None

    def rows(self, table: Any) -> Any:
        """Select the columns of a table that has the layout, with types that Spark has."""
        import pyarrow as pa

        from ..schemas.arrow_types import arrow_type

        types = {column.name: arrow_type(_for_spark(column.type)) for column in self.layout.json_columns}
        arrays, fields = [], []
        for own, name, null in self.columns:
            array = table[own]
            kind = types.get(own, array.type)
            arrays.append(array if array.type == kind else array.cast(kind))
            fields.append(pa.field(name, kind, null))
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def parse_format(options: Mapping[str, str]) -> BodyFormat:
    """Parse the option `format`. Raises OptionError."""
    return BodyFormat(parse_choice(options, "format", *BodyFormat))


def infer_schema(options: Mapping[str, str], sample: SampleBodies) -> StructType:
    """Return the columns of the option `columns`, or all.

    Raises:
        OptionError: A column does not exist.
        LayoutError: There are no columns of fields, or too many.
        BodySchemaError, RegistryError: The schema of the bodies cannot be read or used.
    """
    form, text = parse_format(options), options.get("columns")
    own = _columns_of(form, options)
    source = parse_schema_source(options, form)
    if not form.has_fields:
        names = [name.strip() for name in text.split(",")] if text else list(own)
        for name in names:
            if name not in own:
                raise OptionError(f"the source nsq has no column {name}; it has {', '.join(own)}")
        return StructType([own[name] for name in names])
    items = [_parse_item(item) for item in split_columns(text)] if text else []
    asked = [(name, kind) for name, kind in items if kind is not None or name not in own]
    columns = _fields(options, source, asked, sample) if asked or not items else []
    fields = map(_json_field, _named_apart(columns, options))
    if not items:
        last = [own[name] for name in (REST, UNPARSED) if name in own]
        return StructType([*(own[name] for name in _message_columns(options)), *fields, *last])
    return StructType([own[name] if kind is None and name in own else next(fields) for name, kind in items])


def _fields(
    options: Mapping[str, str],
    source: SchemaSource | None,
    asked: Sequence[tuple[str, ColumnType | None]],
    sample: SampleBodies,
) -> list[JsonColumn]:
    """Return the columns of fields; `asked` is empty for all. Raises as `infer_schema`."""
    if source is not None:
        return _fields_of_schema(_schema_of_bodies(options, source), asked)
    if not asked or any(kind is None for _, kind in asked):
        from ..export.json_columns import infer_columns

        return infer_columns(sample(), asked)
    return _named([(name, kind) for name, kind in asked if kind is not None])


def _fields_of_schema(schema: BodySchema, asked: Sequence[tuple[str, ColumnType | None]]) -> list[JsonColumn]:
    from ..export.sampling import columns_of_schema

    there = dict(schema.columns())
    for field, _ in asked:
        _check_field(field, there)
    return _named([(column.field, column.type) for column in columns_of_schema(schema, asked, Layout())])


def _check_field(field: str, there: Mapping[str, ColumnType]) -> None:
    if field not in there:
        raise OptionError(f"the schema of the bodies has no field {field}; it has {', '.join(there)}")


def _schema_of_bodies(options: Mapping[str, str], source: SchemaSource) -> BodySchema:
    return reader_schema(source, ReadOptions.parse(options).subscription.topics)


def row_format(options: Mapping[str, str], schema: StructType) -> RowFormat:
    """Return how to build rows with a schema: that of `infer_schema`, or one that the user gave.

    Raises:
        OptionError: A column of the schema does not exist, or has another type.
        BodySchemaError, RegistryError: The schema of the bodies cannot be read or used.
    """
    form = parse_format(options)
    own = _columns_of(form, options)
    source = parse_schema_source(options, form)
    body_schema = None if source is None else _schema_of_bodies(options, source)
    there = None if body_schema is None else dict(body_schema.columns())
    columns: list[tuple[str, str, bool]] = []
    fields: list[JsonColumn] = []
    for column in schema.fields:
        lower = column.name.lower()
        if lower in own and _FIELD not in column.metadata:
            wanted = own[lower]
            if column.dataType != wanted.dataType or (wanted.nullable and not column.nullable):
                raise OptionError(_wrong_type(column, wanted, form))
            columns.append((lower, column.name, column.nullable))
        elif form.has_fields:
            fields.append(_column_of(column) if there is None else _column_of_schema(column, there))
            columns.append((column.name, column.name, True))
        else:
            raise OptionError(f"the source nsq has no column {column.name}; it has {', '.join(own)}")
    names = {name for name, _, _ in columns}
    if not form.has_fields:
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
        body_schema=body_schema,
    )
    return RowFormat(layout, tuple(columns), source)


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


def _named(fields: Sequence[tuple[str, ColumnType]]) -> list[JsonColumn]:
    names = name_columns(field for field, _ in fields)
    return [JsonColumn(field, kind, name) for (field, kind), name in zip(fields, names, strict=True)]


def _json_field(column: JsonColumn) -> StructField:
    metadata = {_FIELD: column.field, _KIND: column.type.value}
    return StructField(column.name, _spark_type(_for_spark(column.type)), True, metadata)


def _for_spark(kind: ColumnType) -> ColumnType:
    """Return the type of a field's column in Spark: a number for a time that Spark has no type for."""

    def change(kind: ColumnType) -> ColumnType:
        is_number = kind is JsonType.TIME or (isinstance(kind, TimeType) and kind.unit == "ns")
        return JsonType.LONG if is_number else kind

    return map_types(kind, change)


def _spark_type(kind: ColumnType) -> DataType:
    """Return the type in Spark of what `_for_spark` returns."""
    match kind:
        case DecimalType():
            return SparkDecimal(kind.precision, kind.scale)
        case JsonArray():
            return ArrayType(_spark_type(kind.element))
        case JsonMap():
            return MapType(StringType(), _spark_type(kind.values))
        case JsonStruct():
            return StructType([StructField(name, _spark_type(each)) for name, each in kind.fields])
        case TimeType():
            return TimestampNTZType() if kind.is_local else TimestampType()
        case JsonType.BINARY:
            return BinaryType()
    return _JSON_TYPES[kind]


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
    return JsonColumn(_field_of(column), kind, column.name)


def _column_of_schema(column: StructField, there: Mapping[str, ColumnType]) -> JsonColumn:
    """Return the column of a field of Avro or Protobuf bodies. Raises OptionError: the field has another type.

    Args:
        there: The types of the fields, by name.
    """
    field = column.metadata[_FIELD] if _FIELD in column.metadata else _field_of(column)
    _check_field(field, there)
    kind = there[field]
    if column.dataType != (wanted := _spark_type(_for_spark(kind))) or not column.nullable:
        null = "" if column.nullable else " NOT NULL"
        raise OptionError(
            f"the column {column.name} is {column.dataType.simpleString()}{null}, and the field {field} of the schema "
            f"of the bodies needs {wanted.simpleString()}, which may be null"
        )
    return JsonColumn(field, kind, column.name)


def _field_of(column: StructField) -> str:
    """Return the name of the field of a column in a schema that the user gave."""
    named_apart = column.name.removeprefix(_BODY_PREFIX)
    return named_apart if name_columns([named_apart]) == [column.name] else column.name


def _wrong_type(column: StructField, there: StructField, form: BodyFormat) -> str:
    null = "" if there.nullable or column.nullable else " NOT NULL"
    text = (
        f"the column {column.name} is {there.dataType.simpleString()}{'' if there.nullable else ' NOT NULL'}, not "
        f"{column.dataType.simpleString()}{null}"
    )
    if form.has_fields:
        text += f": for the field {column.name} of the bodies, name the column {_BODY_PREFIX}{column.name}"
    return text
