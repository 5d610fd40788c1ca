"""The data source `nsq` for people's own Spark jobs: a topic as a DataFrame, a batch at a time.

    spark.read.format("nsq").option("topic", "clicks").option("nsqdHttpAddress", "127.0.0.1:4151").load()

It has the columns of an export (`columns`), and reads ranges of sequences as one does. Where each ends is settled when
a query is planned. Nothing here imports pyarrow before rows are read: Spark imports this to look up any source.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..log.gaps import Gap
from ..protocol.errors import NSQError
from .broker_log import BrokerLog
from .ranges import Span, split

BATCH_ROWS = 10_000
"""Of an Arrow batch; larger ones are not faster."""
_MS_PER_S = 1000
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
_OPTIONS = {
    "topic",
    "nsqdhttpaddress",
    "startingoffsets",
    "endingoffsets",
    "startingtimestamp",
    "endingtimestamp",
    "minpartitions",
    "failondataloss",
    "columns",
}


class SourceError(NSQError):
    """An option is wrong, or messages that were asked for are not there any more; the text says which."""


class NsqPartition(InputPartition):
    """A range of one broker's log."""

    def __init__(self, address: str, span: Span) -> None:
        super().__init__((address, *span))
        self.address = address
        self.span = span


class NsqDataSource(DataSource):
    """See the module. Options are in docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        """What it is called in `format`."""
        return "nsq"

    def schema(self) -> StructType:
        """The columns that the option `columns` names, or all."""
        return StructType(
            [StructField(name, _TYPES[name], name == "attempts") for name in _columns(self.options)]
        )

    def reader(self, schema: StructType) -> "NsqReader":
        """Of a batch."""
        return NsqReader(self.options, schema.names)


class NsqReader(DataSourceReader):
    """Plans where Spark's driver is, and reads in its tasks.

    Args:
        options: Of the user.
        columns: Which are to be read.
    """

    def __init__(self, options: Mapping[str, str], columns: list[str]) -> None:
        unknown = {name.lower() for name in options} - _OPTIONS - {"path"}
        if unknown:
            raise SourceError(f"the source nsq has no option {', '.join(sorted(unknown))}")
        self._topic = options.get("topic") or ""
        if not self._topic:
            raise SourceError("the source nsq needs the option topic")
        self._addresses = (options.get("nsqdHttpAddress") or "127.0.0.1:4151").split(",")
        self._starting = _position(options, "starting", "earliest")
        self._ending = _position(options, "ending", "latest")
        self._least = int(options.get("minPartitions") or 0)
        self._fails = (options.get("failOnDataLoss") or "true").lower() != "false"
        self._columns = columns

    def partitions(self) -> list[NsqPartition]:
        """The ranges, as they are now."""
        each = max(1, -(-self._least // len(self._addresses)))
        found: list[NsqPartition] = []
        for address in self._addresses:
            span = self._span(address)
            if span is not None:
                pieces = split(span, max(1, -(-span.length // each)))
                found += [NsqPartition(address, piece) for piece in pieces]
        return found

    def _span(self, address: str) -> Span | None:
        log = BrokerLog(address, self._topic)
        wanted, until = (_at(position, address) for position in (self._starting, self._ending))
        bounds = log.bounds(wanted)
        first = int(wanted) if wanted.isdecimal() else bounds.at
        end = log.bounds(until).at
        if first < min(bounds.first, end):
            if self._fails:
                raise SourceError(
                    f"messages {first} to {bounds.first - 1} of topic {self._topic} on {address} are no longer kept; "
                    "failOnDataLoss=false reads what there is"
                )
            first = bounds.first
        return Span(first, end) if first < end else None

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Arrow batches of a range."""
        if not isinstance(partition, NsqPartition):  # Spark has one even if there are none
            return
        from .columns import TableBuilder
        from .export import is_for_all
        from .layout import Layout

        span = partition.span
        builder = TableBuilder(self._topic, partition.address, Layout())

        def batches() -> Iterator[Any]:
            yield from builder.table().select(self._columns).to_batches(max_chunksize=BATCH_ROWS)

        for found in BrokerLog(partition.address, self._topic).read(span):
            if isinstance(found, Gap):
                if self._fails:
                    raise SourceError(
                        f"messages {found.first_sequence} to {found.next_sequence - 1} of topic {self._topic} on "
                        f"{partition.address} are {found.reason}; failOnDataLoss=false passes them over"
                    )
                continue
            if is_for_all(found):
                first = max(0, span.first - found.base_sequence)
                builder.add(found, range(first, min(found.count, span.end - found.base_sequence)))
            if len(builder) >= BATCH_ROWS:
                yield from batches()
        if len(builder):
            yield from batches()


def _columns(options: Mapping[str, str]) -> list[str]:
    names = [name.strip() for name in (options.get("columns") or ",".join(_TYPES)).split(",")]
    for name in names:
        if name not in _TYPES:
            raise SourceError(f"the source nsq has no column {name}; it has {', '.join(_TYPES)}")
    return names


def _position(options: Mapping[str, str], which: str, default: str) -> str:
    """What was asked for: a position, or a JSON object with one for each broker."""
    offsets, timestamp = options.get(f"{which}Offsets"), options.get(f"{which}Timestamp")
    if timestamp is None:
        return offsets or default
    if offsets is not None:
        raise SourceError(f"{which}Offsets and {which}Timestamp exclude each other")
    seconds, ms = divmod(int(timestamp), _MS_PER_S)
    return f"@{seconds}.{ms:03d}"


def _at(position: str, address: str) -> str:
    if not position.startswith("{"):
        return position
    by_broker = json.loads(position)
    if address not in by_broker:
        raise SourceError(f"the offsets do not say anything of the broker {address}")
    return str(by_broker[address])
