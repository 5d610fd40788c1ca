"""Select rows by a condition in Spark SQL, instead of DuckDB's: see `filter`. Bodies do not pass through Spark."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from ...storage import local_path
from ..places import storage_at
from ..runtime.failures import SparkFailed, failure
from ..runtime.spark_engine import SparkEngine
from ..sql_conditions import FilterError
from .files import ReplayFiles
from .rows import open_parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BITMAP_ROWS = 32768
"""The rows of one bitmap of Spark. It has the least significant bit first, like Arrow."""
_FILE, _ROW = "trio_nsq_file", "trio_nsq_row"
_GLOB = re.compile(r"([\\{}\[\]*?])")
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Spark has no nanosecond type, and cannot read files with nanoseconds without this. They become integers first.
    "spark.sql.legacy.parquet.nanosAsLong": "true",
    # Only one bit per row is shuffled.
    "spark.sql.shuffle.partitions": "4",
}


def select_rows_with_spark(
    engine: SparkEngine, files: ReplayFiles, condition: str, settings: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Select rows with Spark; see `select_rows`.

    Args:
        settings: Additional settings of Spark, by name.

    Raises:
        FilterError: The condition is invalid.
        SparkFailed: The evaluation failed.
    """
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    # Spark would log the error that is raised here, with the stack of the JVM.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    session = engine.session()
    for name, value in {**_SETTINGS, **(settings or {})}.items():
        session.conf.set(name, value)
    bitmaps = {file.stamp.name: bytearray((file.rows + 7) // 8) for file in files.files}
    try:
        for row in engine.interruptible(lambda: _bitmaps(session, files, condition).collect()):
            name = _name_of(row[_FILE], bitmaps)
            at = (row["bucket"] - 1) * _BITMAP_ROWS // 8
            bits = bitmaps[name]
            part = bytes(row["bits"])[: len(bits) - at]
            bits[at : at + len(part)] = part
    except (AnalysisException, ParseException) as exc:
        raise FilterError(f"--where cannot be used: {_first_line(exc)}") from exc
    except Exception as exc:
        if isinstance(exc, PySparkException) or type(exc).__module__.partition(".")[0] == "py4j":
            raise failure(exc, "Spark could not apply --where (without --engine spark, DuckDB does)") from exc
        raise
    return {name: bytes(bits) for name, bits in bitmaps.items() if any(bits)}


def _bitmaps(session: Any, files: ReplayFiles, condition: str) -> "DataFrame":
    from pyspark.sql import functions as f

    local = local_path(files.place)
    # Spark's scheme for S3 differs from pyarrow's.
    place = files.place.replace("s3://", "s3a://", 1) if local is None else str(local)
    folder = _escape_glob(place.rstrip("/"))
    paths = [f"{folder}/{_escape_glob(file.stamp.name)}" for file in files.files]
    differ = len({file.topics for file in files.files}) > 1
    frame = session.read.option("basePath", folder).option("mergeSchema", differ).parquet(*paths)
    index = f.col("_metadata.row_index") + 1
    columns = [*_as_in_duckdb(frame, files), f.col("_metadata.file_path").alias(_FILE), index.alias(_ROW)]
    rows = frame.select(columns).where(condition)
    bits = f.bitmap_construct_agg(f.bitmap_bit_position(_ROW)).alias("bits")
    found: DataFrame = rows.groupBy(_FILE, f.bitmap_bucket_number(_ROW).alias("bucket")).agg(bits)
    return found


def _as_in_duckdb(frame: "DataFrame", files: ReplayFiles) -> Iterator[Any]:
    """Yield the columns of the files as conditions see them: binary is text, nanoseconds are times."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType

    with open_parquet(storage_at(files.place), files.files[0].stamp) as parquet:
        nanoseconds = {
            field.name: "timestamp" if field.type.tz else "timestamp_ntz"
            for field in parquet.schema_arrow
            if pa.types.is_timestamp(field.type) and field.type.unit == "ns"
        }
    for field in frame.schema:
        column = frame[f"`{field.name.replace('`', '``')}`"]
        if isinstance(field.dataType, BinaryType):
            column = f.make_valid_utf8(column.cast("string"))
        elif field.name in nanoseconds:
            column = f.timestamp_micros(f.floor(column / 1000)).cast(nanoseconds[field.name])
        yield column.alias(field.name)


def _escape_glob(path: str) -> str:
    return _GLOB.sub(r"\\\1", path)


def _name_of(uri: str, names: Mapping[str, object]) -> str:
    """Return the file of a URI from Spark, which has a scheme and escapes some characters."""
    parts = unquote(uri).split("/")
    for start in range(len(parts)):
        if (name := "/".join(parts[start:])) in names:
            return name
    raise SparkFailed(f"Spark read the unexpected file {uri}")


def _first_line(error: BaseException) -> str:
    """Return the message of an error, without the position in the plan."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage())
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r" SQLSTATE: \w+.*$", "", re.sub(r"^\[[A-Z0-9_.]+\]\s*", "", line)).rstrip(".;")
