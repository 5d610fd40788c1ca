"""The Arrow types of columns."""

from typing import Any

import pyarrow as pa

from .column_types import ColumnType, DecimalType, JsonArray, JsonMap, JsonStruct, JsonType, TimeType

_ARROW_TYPES = {
    kind: pa.timestamp("us", "UTC")
    if kind is JsonType.TIMESTAMP
    else pa.time64("us")
    if kind is JsonType.TIME
    else pa.type_for_alias(kind.arrow)
    for kind in JsonType
}


def arrow_type(kind: ColumnType) -> Any:
    match kind:
        case DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
        case TimeType():
            return pa.timestamp("ns" if kind.unit == "ns" else "us", None if kind.is_local else "UTC")
        case JsonArray():
            return pa.list_(arrow_type(kind.element))
        case JsonStruct():
            return pa.struct([pa.field(name, arrow_type(each)) for name, each in kind.fields])
        case JsonMap():
            return pa.map_(pa.string(), arrow_type(kind.values))
        case _:
            return _ARROW_TYPES[kind]
