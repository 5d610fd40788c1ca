"""The data source `nsq` for people's own Spark jobs: a topic as a DataFrame, a batch at a time or as a stream.

    spark.read.format("nsq").option("topic", "clicks").option("nsqdHttpAddress", "127.0.0.1:4151").load()
    spark.readStream.format("nsq") ...

It has the columns of an export (`columns`), and reads ranges of sequences as one does. Where each ends is settled when
a query, or a batch of it, is planned. Nothing here imports pyarrow before rows are read: Spark imports this to look up
any source.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from .ranges import Span
from .sink.writers import NsqStreamWriter, NsqWriter
from .source.options import ReadMode, ReadOptions, position_on, schema_of_columns
from .source.partitions import NsqPartition, make_partitions, read_partition, without_lost
from .source.stream import NsqStreamReader


class NsqDataSource(DataSource):
    """See the module. Options are in docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        """What it is called in `format`."""
        return "nsq"

    def schema(self) -> StructType:
        """The columns that the option `columns` names, or all."""
        return schema_of_columns(self.options)

    def reader(self, schema: StructType) -> "NsqReader":
        """Of a batch."""
        return NsqReader(ReadOptions.parse(self.options, ReadMode.BATCH), schema.names)

    def streamReader(self, schema: StructType) -> NsqStreamReader:
        """Of a stream."""
        return NsqStreamReader(ReadOptions.parse(self.options, ReadMode.STREAM), schema.names)

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:
        """Of a batch."""
        return NsqWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        """Of a stream."""
        return NsqStreamWriter(self.options, schema, overwrite)


class NsqReader(DataSourceReader):
    """Plans where Spark's driver is, and reads in its tasks.

    Args:
        options: What is to be read.
        columns: Which of its columns.
    """

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[NsqPartition]:
        """The ranges, as they are now."""
        spans = {broker: self._span(broker) for broker in self._options.brokers}
        return make_partitions(
            {broker: span for broker, span in spans.items() if span}, self._options.least_partitions
        )

    def _span(self, broker: str) -> Span | None:
        options = self._options
        log = options.log(broker)
        wanted, until = (
            position_on(position, broker, options.brokers[broker])
            for position in (options.starting, options.ending)
        )
        bounds = log.bounds(wanted)
        first = int(wanted) if wanted.isdecimal() else bounds.at
        end = log.bounds(until).at
        return without_lost(options, broker, Span(first, end), bounds.first) if first < end else None

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Arrow batches of a range."""
        return read_partition(self._options, self._columns, partition)
