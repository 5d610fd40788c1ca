"""The types of columns of exports and of the data source, and their text.

    string, long, int, short, byte, double, float, boolean, date, time, timestamp, binary, json
    decimal(PRECISION,SCALE)
    timestamp(UNIT), timestamp(UNIT,"FORMAT"), local-timestamp(UNIT), local-timestamp(UNIT,"FORMAT")
    array<TYPE>, map<string,TYPE>, struct<NAME:TYPE,...>

UNIT is s, ms, us or ns. A NAME of a struct that is no word is a JSON string: `struct<"first name":string>`.
Every type can be null, also inside of others.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class JsonType(StrEnum):
    """The type of the column of a field of JSON bodies.

    Attributes:
        spark: The class in `pyspark.sql.types`; empty: Spark 4.0 has none.
        arrow: The type, as pyarrow shows it.
        plain: The types of decoded JSON that Arrow converts as `JsonParser` does, or refuses.
    """

    spark: str
    arrow: str
    plain: frozenset[type]

    STRING = "string", "StringType", "string", str
    LONG = "long", "LongType", "int64", int
    INT = "int", "IntegerType", "int32", int
    SHORT = "short", "ShortType", "int16", int
    BYTE = "byte", "ByteType", "int8", int
    DOUBLE = "double", "DoubleType", "float64", float, int
    FLOAT = "float", "FloatType", "float32"
    BOOLEAN = "boolean", "BooleanType", "bool", bool
    DATE = "date", "DateType", "date32"
    TIMESTAMP = "timestamp", "TimestampType", "timestamp[us, tz=UTC]"
    JSON = "json", "StringType", "string"
    TIME = "time", "", "time64[us]"
    BINARY = "binary", "BinaryType", "binary", bytes

    def __new__(cls, name: str, spark: str = "", arrow: str = "", *plain: type) -> "JsonType":
        member = str.__new__(cls, name)
        member._value_ = name
        member.spark, member.arrow, member.plain = spark, arrow, frozenset(plain)
        return member


@dataclass(frozen=True, slots=True)
class DecimalType:
    """The type of a column of numbers with all their digits.

    Attributes:
        precision: The number of digits, 1 to 38.
        scale: How many of them are after the point.
    """

    precision: int
    scale: int

    @property
    def value(self) -> str:
        return f"decimal({self.precision},{self.scale})"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class TimeType:
    """The type of a column of times whose values have a unit or a format. Columns have us, or ns with the unit ns.

    Attributes:
        unit: The unit of values that are numbers, since 1970.
        pattern: The format of values that are text or whole numbers, as of `strptime`; empty: text is in RFC 3339.
        is_local: Whether the times are those of a clock on a wall, without a zone; otherwise UTC.
    """

    unit: str
    pattern: str = ""
    is_local: bool = False

    @property
    def value(self) -> str:
        name = "local-timestamp" if self.is_local else "timestamp"
        pattern = f",{json.dumps(self.pattern)}" if self.pattern else ""
        return f"{name}({self.unit}{pattern})"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class JsonArray:
    """The type of a column of arrays."""

    element: "ColumnType"

    @property
    def value(self) -> str:
        return f"array<{self.element.value}>"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class JsonStruct:
    """The type of a column of objects of which some fields have columns."""

    fields: tuple[tuple[str, "ColumnType"], ...]

    @property
    def value(self) -> str:
        return f"struct<{','.join(f'{_quoted(name)}:{kind.value}' for name, kind in self.fields)}>"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class JsonMap:
    """The type of a column of objects whose fields have any names, and values of one type."""

    values: "ColumnType"

    @property
    def value(self) -> str:
        return f"map<string,{self.values.value}>"

    def __str__(self) -> str:
        return self.value


ColumnType = JsonType | DecimalType | TimeType | JsonArray | JsonStruct | JsonMap
TYPE_NAMES = ", ".join(
    [
        *JsonType,
        "decimal(PRECISION,SCALE)",
        "timestamp(UNIT)",
        "array<TYPE>",
        "map<string,TYPE>",
        "struct<NAME:TYPE,...>",
    ]
)
_WORD = re.compile(r"[^\W\d]\w*")


def _quoted(name: str) -> str:
    return name if _WORD.fullmatch(name) else json.dumps(name, ensure_ascii=False)


# ---------------------------------------------------------------------- parsing

_NAME = re.compile(r"[a-z]+(-[a-z]+)*")
_DECIMAL = re.compile(r"\( ?(\d{1,2}), ?(\d{1,2})\)")
_UNIT = re.compile(r"\((s|ms|us|ns)(?:, ?(?=\")|(?=\)))")
_MAX_DEPTH = 50
_BEGINS_TYPE = re.compile(r":\s*((?:decimal|timestamp|local-timestamp|array|map|struct)(?=[(<]))")
"""Where a type with parts begins in a list of columns."""


def parse_type(text: str) -> ColumnType:
    """Parse the `value` of a type. Raises ValueError."""
    kind, end = _parse(text, 0, 0)
    if end != len(text):
        raise ValueError(f"{text!r} is not a type: nothing may follow {text[:end]!r}")
    return kind


def split_columns(text: str) -> list[str]:
    """Split `FIELD[:TYPE],...` at the commas that are not in a type."""
    parts, start, at = [], 0, 0
    while at <= len(text):
        comma = text.find(",", at)
        comma = len(text) if comma < 0 else comma
        if begin := _BEGINS_TYPE.search(text, at, comma + 1):
            try:
                at = _parse(text, begin.start(1), 0)[1]
                continue
            except ValueError:
                pass  # the whole is refused later, by its part
        parts.append(text[start:comma].strip())
        start = at = comma + 1
    return parts


def parse_column(item: str) -> tuple[str, ColumnType | None]:
    """Parse `FIELD` or `FIELD:TYPE`. Raises ValueError; the field may be empty."""
    for begin in _BEGINS_TYPE.finditer(item):
        try:
            return item[: begin.start()], parse_type(item[begin.start(1) :])
        except ValueError:
            pass
    name, colon, kind = item.rpartition(":")
    return (name, parse_type(kind.strip())) if colon else (item, None)


def _parse(text: str, at: int, depth: int) -> tuple[ColumnType, int]:
    """Return the type that begins at this index, and the index after it."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"the type has more than {_MAX_DEPTH} levels")
    found = _NAME.match(text, at)
    name = found[0] if found else ""
    end = at + len(name)
    opening = text[end : end + 1]
    match name, opening:
        case "decimal", _:
            return _parse_decimal(text, at, end)
        case (("timestamp" | "local-timestamp"), "("):
            return _parse_time(text, name, end)
        case "array", "<":
            element, end = _parse(text, end + 1, depth + 1)
            return JsonArray(element), _expect(text, end, ">")
        case "map", "<":
            values, end = _parse(text, _after_key(text, end + 1), depth + 1)
            return JsonMap(values), _expect(text, end, ">")
        case "struct", "<":
            return _parse_struct(text, end + 1, depth)
    try:
        return JsonType(name), end
    except ValueError:
        raise ValueError(f"{text[at:]!r} is not a type: types are {TYPE_NAMES}") from None


def _parse_decimal(text: str, at: int, end: int) -> tuple[DecimalType, int]:
    if (found := _DECIMAL.match(text, end)) is None:
        raise ValueError(f"{text[at:]!r} is not decimal(PRECISION,SCALE)")
    return decimal_type(int(found[1]), int(found[2])), found.end()


def decimal_type(precision: int, scale: int) -> DecimalType:
    """Return a decimal type. Raises ValueError: it does not exist."""
    if not 0 <= scale <= precision <= 38 or not precision:
        raise ValueError(
            f"decimal({precision},{scale}) has no scale up to its precision, or a precision beyond 38"
        )
    return DecimalType(precision, scale)


def _parse_time(text: str, name: str, at: int) -> tuple[TimeType, int]:
    if (found := _UNIT.match(text, at)) is None:
        raise ValueError(f'{text[at:]!r} is not (UNIT) or (UNIT,"FORMAT") with the unit s, ms, us or ns')
    pattern, end = "", found.end()
    if text[end : end + 1] == '"':
        pattern, end = _parse_string(text, end)
    return TimeType(found[1], pattern, name == "local-timestamp"), _expect(text, end, ")")


def _parse_struct(text: str, at: int, depth: int) -> tuple[JsonStruct, int]:
    fields: list[tuple[str, ColumnType]] = []
    while True:
        at = _after_space(text, at)
        if text[at : at + 1] == '"':
            name, at = _parse_string(text, at)
        elif word := _WORD.match(text, at):
            name, at = word[0], word.end()
        else:
            raise ValueError(f"{text[at:]!r} does not begin with the name of a field of a struct")
        at = _after_space(text, _expect(text, _after_space(text, at), ":"))
        kind, at = _parse(text, at, depth + 1)
        if name in dict(fields):
            raise ValueError(f"the struct has two fields {name!r}")
        fields.append((name, kind))
        at = _after_space(text, at)
        if text[at : at + 1] != ",":
            return JsonStruct(tuple(fields)), _expect(text, at, ">")
        at += 1


def _parse_string(text: str, at: int) -> tuple[str, int]:
    found, end = json.JSONDecoder().raw_decode(text, at)
    return str(found), end


def _after_key(text: str, at: int) -> int:
    found = re.compile(r"string, ?").match(text, at)
    if found is None:
        raise ValueError(f"{text[at:]!r}: the keys of a map are of type string")
    return found.end()


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] == " ":
        at += 1
    return at


def _expect(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        raise ValueError(f"{text[:at]!r} is not followed by {sign!r}")
    return at + 1


# ---------------------------------------------------------------------- walking


def map_types(kind: ColumnType, change: Callable[[ColumnType], ColumnType]) -> ColumnType:
    """Return a type in which a function has replaced the types inside of it, and then the type itself."""
    match kind:
        case JsonArray():
            kind = JsonArray(map_types(kind.element, change))
        case JsonMap():
            kind = JsonMap(map_types(kind.values, change))
        case JsonStruct():
            kind = JsonStruct(tuple((name, map_types(each, change)) for name, each in kind.fields))
        case _:
            pass
    return change(kind)
