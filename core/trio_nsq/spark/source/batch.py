"""The reader of `spark.read.format("nsq")`."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from ...client.errors import RequestRefused
from ...client.reading.broker_log import Bounds
from ...log.gaps import Span
from ..logs import Log, LogPlace
from ..options import OptionError
from .fleet import Fleet, LogKey, ask_logs, check_topics, is_without_topic
from .inquiry import Inquiry
from .options import ReadOptions, position_on
from .partitions import (
    NsqPartition,
    SizedSpan,
    make_partitions,
    read_partition,
    size_of,
    starts_of,
    without_lost,
)


class NsqReader(DataSourceReader):
    """Reads a batch. `partitions` runs on the driver, `read` in the tasks."""

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[NsqPartition]:
        """Return the current ranges of the logs.

        Raises:
            BrokerUnreachable: A broker did not answer for `patience_s`: without it, the result would be incomplete.
            SourceError: Messages are lost, or there is no such topic.
        """
        options = self._options
        fleet = Fleet(options)
        places = fleet.find(waits_for_all=True)
        for server, error in fleet.away.items():
            if server not in options.lookupds:
                raise error
        inquiry: Inquiry[str, dict[LogKey, SizedSpan]] = Inquiry("it is asked again")
        answers = ask_logs(inquiry, places, self._span, options.patience_s, waits_for_all=True)
        for error in answers.away.values():
            raise error
        check_topics(options, answers.found)
        return make_partitions(
            {key: span for key, span in answers.found.items() if span.span.length}, options.min_partitions
        )

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Read a range as Arrow batches. Raises the errors of `read_partition`."""
        return read_partition(partition, self._columns, fails=self._options.fail_on_data_loss)

    def _span(self, key: LogKey, place: LogPlace) -> SizedSpan | None:
        """Return the messages to read, possibly none; None: the broker does not have the topic."""
        options, log = self._options, place.open()
        try:
            start, first = self._resolve(log, key, options.starting)
            end, _ = self._resolve(log, key, options.ending)
        except RequestRefused as error:
            if is_without_topic(error):
                return None
            raise
        span: Span | None = None
        if first < end.at:
            span = without_lost(key, Span(first, end.at), start.first, fails=options.fail_on_data_loss)
        return SizedSpan(place, span or Span(end.at, end.at), size_of(start, end), starts=starts_of(log))

    def _resolve(self, log: Log, key: LogKey, position: str) -> tuple[Bounds, int]:
        """Return the bounds of a log, and the sequence of a position, which may not exist any more."""
        text = position_on(position, *key, self._options.brokers.get(key.broker, key.broker))
        if text is None:
            if self._options.subscription.single:
                raise OptionError(f"the offsets have no entry for the broker {key.broker}")
            text = "earliest"  # in the offsets of a stream, a log that it had not found is missing
        bounds = log.bounds(text)
        return bounds, int(text) if text.isdecimal() else bounds.at
