"""Which rows a condition in Spark SQL chooses: asked once, when a replay is planned, and a bit for each row since.

So whatever a condition says at another time, `rand()` or `now()` in it, a replay that is gone on with publishes what
was chosen at first; and bodies never come here, nor does it take Spark to go on.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ...protocol.errors import NSQError
from ..runtime.spark_engine import SparkEngine, SparkFailed
from ..storage import local_path
from .files import ReplayFile, ReplayFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BITMAP_ROWS = 32768
"""Of one bitmap of Spark's, least significant bit first, as Arrow has it."""
_GLOB = re.compile(r"([\\{}\[\]*?])")
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # There is no type for nanoseconds: such columns are numbers then, and else no file with one could be read.
    "spark.sql.legacy.parquet.nanosAsLong": "true",
    # What is brought together is a bit for each row.
    "spark.sql.shuffle.partitions": "4",
}


class FilterError(NSQError):
    """A condition is none; the text says why."""


def select_rows(engine: SparkEngine, source: ReplayFiles, condition: str) -> dict[str, bytes]:
    """Have Spark choose rows.

    Args:
        engine: Spark.
        source: The files.
        condition: What follows WHERE. ReplayColumns are those of the files, and of folders such as `date=2026-11-21`.

    Returns:
        For each file in which rows were chosen a bitmap of all its rows, least significant bit first.

    Raises:
        FilterError: It cannot be understood.
        SparkFailed: It went wrong with the rows.
    """
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    # It tells on standard error, with all of the JVM's stack, what we say in a line.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    session = engine.session()
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    bitmaps = {file.stamp.name: bytearray((file.rows + 7) // 8) for file in source.files}
    try:
        chosen = _rows_of(session, source, condition)
        for row in chosen.collect():
            name = _name_of(row["file"], bitmaps)
            at = (row["bucket"] - 1) * _BITMAP_ROWS // 8
            bits = bitmaps[name]
            part = bytes(row["bits"])[: len(bits) - at]
            bits[at : at + len(part)] = part
    except (AnalysisException, ParseException) as exc:
        raise FilterError(f"--where cannot be used: {_first_line(exc)}") from exc
    except PySparkException as exc:
        raise SparkFailed(f"Spark could not apply --where: {_first_line(exc)}") from exc
    except Exception as exc:
        if type(exc).__module__.partition(".")[0] != "py4j":
            raise
        raise SparkFailed(f"Spark could not apply --where: {_first_line(exc)}") from exc
    return {name: bytes(bits) for name, bits in bitmaps.items() if any(bits)}


def _rows_of(session: Any, source: ReplayFiles, condition: str) -> "DataFrame":
    from pyspark.sql import functions as f

    folder = _uri(source.place)
    paths = [f"{folder}/{_GLOB.sub(_escaped, file.stamp.name)}" for file in source.files]
    frame = (
        session.read.option("basePath", folder).option("mergeSchema", _differ(source.files)).parquet(*paths)
    )
    index = f.col("_metadata.row_index") + 1
    rows = frame.where(condition).select(f.col("_metadata.file_path").alias("file"), index.alias("number"))
    bits = f.bitmap_construct_agg(f.bitmap_bit_position("number")).alias("bits")
    found: DataFrame = rows.groupBy("file", f.bitmap_bucket_number("number").alias("bucket")).agg(bits)
    return found


def _differ(files: Sequence[ReplayFile]) -> bool:
    return len({file.topics for file in files}) > 1


def _uri(place: str) -> str:
    local = local_path(place)
    # Spark knows S3 under another name than pyarrow does.
    folder = place.replace("s3://", "s3a://", 1) if local is None else str(local)
    return _GLOB.sub(_escaped, folder.rstrip("/"))


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[1]}"


def _name_of(uri: str, names: Mapping[str, object]) -> str:
    """The file of ours that Spark calls so: it has a scheme, and another way to write some characters."""
    parts = unquote(uri).split("/")
    for start in range(len(parts)):
        if (name := "/".join(parts[start:])) in names:
            return name
    raise SparkFailed(f"Spark read {uri}, which it was not told to")


def _first_line(error: BaseException) -> str:
    """What it says, without where in the plan it is."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage())
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r" SQLSTATE: \w+.*$", "", re.sub(r"^\[[A-Z0-9_.]+\]\s*", "", line)).rstrip(".;")
