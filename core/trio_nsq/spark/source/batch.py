"""The reader of `spark.read.format("nsq")`, and the sample from which types are inferred."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from ...client.errors import RequestRefused
from ...client.reading.broker_log import Bounds
from ...log.gaps import Span
from ..logs import Log, LogPlace, resolve, starts_of
from ..options import OptionError
from .columns import RowFormat
from .fleet import Fleet, LogKey, ask_all_logs, check_topics
from .located import bounds_at, locate
from .options import ReadOptions, position_on
from .partitions import (
    NsqPartition,
    SizedSpan,
    make_partitions,
    read_partition,
    size_of,
    without_lost,
)
from .restriction import NO_RESTRICTION, Restriction


class NsqReader(DataSourceReader):
    """Reads a batch. `partitions` runs on the driver, `read` in the tasks.

    Attributes:
        restriction: The part of the logs to read.
    """

    def __init__(self, options: ReadOptions, form: RowFormat) -> None:
        self._options = options
        self._form = form
        self.restriction: Restriction = NO_RESTRICTION

    def partitions(self) -> list[NsqPartition]:
        """Return the current ranges of the logs. Raises the errors of `find_spans`."""
        options = self._options
        return make_partitions(
            find_spans(options, self.restriction), options.min_partitions, options.max_records
        )

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Read a range as Arrow batches. Raises the errors of `read_partition`."""
        return read_partition(partition, self._form, fails=self._options.fail_on_data_loss)


def find_spans(options: ReadOptions, restriction: Restriction = NO_RESTRICTION) -> dict[LogKey, SizedSpan]:
    """Return the messages of a batch, by log: those of the options that `restriction` leaves.

    Raises:
        BrokerUnreachable: A broker did not answer for `patience_s`: without it, the result would be incomplete.
        SourceError: Messages are lost, or there is no such topic.
    """
    fleet = Fleet(options)
    places = fleet.find(waits_for_all=True)
    for server, error in fleet.away.items():
        if server not in options.lookupds:
            raise error
    again = options.patience_s, "it is asked again"
    bounds = ask_all_logs(places, bounds_at, *again)
    spans = ask_all_logs(
        locate(places, bounds, {}, {}).places, partial(_span, options, restriction, bounds), *again
    )
    check_topics(options, spans)
    return {key: span for key, span in spans.items() if span.span.length}


def sample_bodies(options: Mapping[str, str]) -> Iterator[bytes]:
    """Yield bodies of a query with these options. Raises OptionError, and the errors of `find_spans`."""
    from ..export import sampling

    spans = find_spans(replace(ReadOptions.parse(options), fail_on_data_loss=False))
    return sampling.sample_bodies([(span.place, span.span) for span in spans.values()])


def _span(
    options: ReadOptions,
    restriction: Restriction,
    bounds: Mapping[LogKey, Bounds],
    key: LogKey,
    place: LogPlace,
) -> SizedSpan | None:
    """Return the messages to read, possibly none; None: the broker does not have the topic."""
    log = place.open()
    incarnation = bounds[key].incarnation if key in bounds else None
    try:
        start, first = _resolve(options, log, key, options.starting, incarnation)
        end, _ = _resolve(options, log, key, options.ending, incarnation)
    except RequestRefused as error:
        if error.is_without_topic:
            return None
        raise
    span: Span | None = None
    wanted = _restricted(log, key, restriction, first, end.at)
    if wanted is not None:
        span = without_lost(key, wanted, start.first, fails=options.fail_on_data_loss)
    size_bytes = size_of(start, end)
    if span is not None and first < end.at:
        size_bytes = size_bytes * span.length // (end.at - first)
    return SizedSpan(place, span or Span(end.at, end.at), size_bytes, starts=starts_of(log))


def _restricted(log: Log, key: LogKey, restriction: Restriction, first: int, end: int) -> Span | None:
    """Return what a restriction leaves of the messages from `first` to before `end`; None: nothing."""
    if not restriction.includes(key):
        return None
    first = max(first, restriction.first)
    if restriction.end is not None:
        end = min(end, restriction.end)
    if first < end and restriction.first_position is not None:
        first = max(first, resolve(log, restriction.first_position)[1])
    if first < end and restriction.end_position is not None:
        end = min(end, resolve(log, restriction.end_position)[1])
    return Span(first, end) if first < end else None


def _resolve(
    options: ReadOptions, log: Log, key: LogKey, position: str, incarnation: str | None
) -> tuple[Bounds, int]:
    """Return the bounds of a log, and the sequence of a position, which may not exist any more."""
    text = position_on(position, *key, options.brokers.get(key.broker, key.broker), incarnation)
    if text is None:
        if options.subscription.single:
            raise OptionError(f"the offsets have no entry for the broker {key.broker}")
        text = "earliest"  # in the offsets of a stream, a log that it had not found is missing
    return resolve(log, text)
