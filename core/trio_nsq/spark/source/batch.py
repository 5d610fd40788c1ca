"""The batch reader of the source `nsq`: `spark.read.format("nsq")`."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from ..ranges import Span
from .options import ReadOptions, position_on
from .partitions import NsqPartition, make_partitions, read_partition, without_lost


class NsqReader(DataSourceReader):
    """Reads a batch. `partitions` runs on the driver, `read` in the tasks.

    Args:
        options: What to read.
        columns: The columns to return.
    """

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[NsqPartition]:
        """The ranges of the logs as they are now."""
        spans = {broker: self._span(broker) for broker in self._options.brokers}
        return make_partitions(
            {broker: span for broker, span in spans.items() if span}, self._options.min_partitions
        )

    def _span(self, broker: str) -> Span | None:
        options = self._options
        log = options.log(broker)
        start, stop = (
            position_on(position, broker, options.brokers[broker])
            for position in (options.starting, options.ending)
        )
        bounds = log.bounds(start)
        first = int(start) if start.isdecimal() else bounds.at
        end = log.bounds(stop).at
        return without_lost(options, broker, Span(first, end), bounds.first) if first < end else None

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """The Arrow batches of a range."""
        return read_partition(self._options, self._columns, partition)
