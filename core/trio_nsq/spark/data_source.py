"""The data source `nsq`: a topic as a DataFrame, in batches or as a stream.

    spark.read.format("nsq").option("topic", "clicks").option("nsqdHttpAddress", "127.0.0.1:4151").load()
    spark.readStream.format("nsq") ...

It has the columns of an export (`export.columns`) and reads ranges of sequences in the same way. `sink.writers`
describes writing. Spark imports this module to look up any data source, so pyarrow is imported only when rows are read
or written.
"""

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from .sink.writers import NsqStreamWriter, NsqWriter
from .source.batch import NsqReader, sample_bodies
from .source.columns import infer_schema, row_format
from .source.options import ReadMode, ReadOptions, check_is_no_table
from .source.stream import NsqStreamReader
from .source.without_limits import StreamReaderWithoutLimits
from .versions import HAS_READ_LIMITS


class NsqDataSource(DataSource):
    """The entry point for Spark. docs/reference/spark-data-source.md describes the options."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> StructType:
        """Return the columns of the options. Not called if the user gives a schema."""
        check_is_no_table(self.options)
        return infer_schema(self.options, lambda: sample_bodies(self.options))

    def reader(self, schema: StructType) -> NsqReader:
        options, form = ReadOptions.parse(self.options, ReadMode.BATCH), row_format(self.options, schema)
        if not options.push_filters:
            return NsqReader(options, form)
        from .source.pushdown import FilteredNsqReader

        return FilteredNsqReader(options, form)

    def streamReader(self, schema: StructType) -> NsqStreamReader:
        reader = NsqStreamReader if HAS_READ_LIMITS else StreamReaderWithoutLimits
        return reader(ReadOptions.parse(self.options, ReadMode.STREAM), row_format(self.options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:
        return NsqWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        return NsqStreamWriter(self.options, schema, overwrite)
