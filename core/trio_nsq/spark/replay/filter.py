"""Select rows by a condition in Spark SQL. It is evaluated once, when a replay is planned, to one bit per row.

So a replay that is resumed publishes the same rows, even if the condition has `rand()` or `now()`, and does not need
Spark again. Bodies do not pass through Spark.
"""

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ...protocol.errors import NSQError
from ..runtime.spark_engine import SparkEngine, SparkFailed
from ..storage import local_path
from .files import ReplayFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BITMAP_ROWS = 32768
"""The rows of one bitmap of Spark. It has the least significant bit first, like Arrow."""
_GLOB = re.compile(r"([\\{}\[\]*?])")
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Spark has no nanosecond type, and cannot read files with nanoseconds without this; they become integers.
    "spark.sql.legacy.parquet.nanosAsLong": "true",
    # Only one bit per row is shuffled.
    "spark.sql.shuffle.partitions": "4",
}


class FilterError(NSQError):
    """A condition is invalid; the text has the reason."""


def select_rows(
    engine: SparkEngine, files: ReplayFiles, condition: str, settings: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Select rows.

    Args:
        condition: A condition as in WHERE. It can use the columns of the files and of Hive-style folders.
        settings: Additional settings of Spark, by name.

    Returns:
        For each file with selected rows, a bitmap of all its rows, least significant bit first.

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
        selected = _bitmaps(session, files, condition)
        for row in selected.collect():
            name = _name_of(row["file"], bitmaps)
            at = (row["bucket"] - 1) * _BITMAP_ROWS // 8
            bits = bitmaps[name]
            part = bytes(row["bits"])[: len(bits) - at]
            bits[at : at + len(part)] = part
    except (AnalysisException, ParseException) as exc:
        raise FilterError(f"--where cannot be used: {_first_line(exc)}") from exc
    except Exception as exc:
        if isinstance(exc, PySparkException) or type(exc).__module__.partition(".")[0] == "py4j":
            raise SparkFailed(f"Spark could not apply --where: {_first_line(exc)}") from exc
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
    rows = frame.where(condition).select(f.col("_metadata.file_path").alias("file"), index.alias("number"))
    bits = f.bitmap_construct_agg(f.bitmap_bit_position("number")).alias("bits")
    found: DataFrame = rows.groupBy("file", f.bitmap_bucket_number("number").alias("bucket")).agg(bits)
    return found


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
