"""The columns of the source `nsq`.

Spark imports this to look up any data source, so it does not import pyarrow.
"""

from collections.abc import Mapping

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..options import OptionError

_TYPES = {
    "topic": StringType(),
    "broker": StringType(),
    "seq": LongType(),
    "id": StringType(),
    "ts_ns": LongType(),
    "ts": TimestampType(),
    "attempts": IntegerType(),
    "body": BinaryType(),
}


def schema_of_columns(options: Mapping[str, str]) -> StructType:
    """Return the columns of the option `columns`, or all. Raises OptionError if a column does not exist."""
    names = [name.strip() for name in (options.get("columns") or ",".join(_TYPES)).split(",")]
    for name in names:
        if name not in _TYPES:
            raise OptionError(f"the source nsq has no column {name}; it has {', '.join(_TYPES)}")
    return StructType([StructField(name, _TYPES[name], name == "attempts") for name in names])
