"""What PySpark's data source API has in some versions only. This is the one place that checks versions of Spark.

    4.0  batches; writers of Arrow batches; streams without limits
    4.1  its own class for streams that write Arrow batches; filters of a query (`HAS_FILTERS`)
    4.2  streams with limits (`HAS_READ_LIMITS`): Spark passes the start of a batch to `latestOffset`, and a limit

Spark imports this to look up any data source, so it imports nothing else.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyspark
from pyspark.sql.datasource import DataSourceReader

VERSION: str = pyspark.__version__

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    HAS_FILTERS: bool
    HAS_READ_LIMITS: bool
else:
    HAS_FILTERS = hasattr(DataSourceReader, "pushFilters")
    try:
        from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    except ImportError:  # 4.0 calls writers of streams with Arrow batches if they have the class of batches
        from pyspark.sql.datasource import DataSourceArrowWriter as StreamArrowWriter
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxBytes,
            ReadMaxRows,
            ReadMinRows,
            SupportsTriggerAvailableNow,
        )

        HAS_READ_LIMITS = True
    except ImportError:
        HAS_READ_LIMITS = False

        class ReadLimit:
            pass

        @dataclass
        class ReadAllAvailable(ReadLimit):
            pass

        @dataclass
        class ReadMinRows(ReadLimit):
            min_rows: int

        @dataclass
        class ReadMaxRows(ReadLimit):
            max_rows: int

        @dataclass
        class ReadMaxBytes(ReadLimit):
            max_bytes: int

        class SupportsTriggerAvailableNow:
            pass


__all__ = [
    "HAS_FILTERS",
    "HAS_READ_LIMITS",
    "VERSION",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "StreamArrowWriter",
    "SupportsTriggerAvailableNow",
]
