"""The stream reader for Spark before 4.2, which passes neither the start of a batch nor a limit to `latestOffset`.

A batch then ends where the logs end. After a restart, the start is unknown until `partitions` is called, so what the
other reader checks in `latestOffset` is checked there, and all brokers must answer.
"""

from ...client.errors import RequestRefused
from ..logs import LogPlace
from .columns import RowFormat
from .fleet import LogKey, ask_all_logs, check_topics
from .located import with_names_of
from .log_probes import start_of
from .offsets import LogOffset, LogOffsets, Offset, build_offset, parse_offset
from .options import ReadOptions, SourceError, TriggerLimits
from .partitions import NsqPartition
from .stream import NsqStreamReader


class StreamReaderWithoutLimits(NsqStreamReader):
    """Reads a stream in batches that end where the logs end."""

    def __init__(self, options: ReadOptions, form: RowFormat) -> None:
        super().__init__(options, form)
        self._read_to: LogOffsets = {}  # the end of the last batch of this process

    def latestOffset(self) -> Offset:  # type: ignore[override]
        """Return the current ends of the logs. Raises the errors of `NsqStreamReader.latestOffset`."""
        if not self._read_to:
            options = self._options
            places = self._located_in({}, self._fleet).places
            for error in self._fleet.away.values():
                raise error
            ends = ask_all_logs(places, self._end_position, options.patience_s, "the query waits for it")
            check_topics(options, ends)
            self._read_to = {**ends}
        else:
            self._read_to = self.next_offsets(self._read_to, TriggerLimits())
        return build_offset(self._read_to, self._options.subscription)

    def partitions(self, start: Offset, end: Offset) -> list[NsqPartition]:
        """Return the ranges between two offsets. Raises the errors of `latestOffset`, also about the start."""
        options = self._options
        before, after = parse_offset(start, options.subscription), parse_offset(end, options.subscription)
        self._read_to = self._read_to or after  # a batch that is repeated after a restart
        before = with_names_of(after, before, self._located_for(after, after).places)
        known = {key: position for key, position in before.items() if isinstance(position, LogOffset)}
        asked = self._planned_places(before, known)
        if missing := sorted(key for key in before.keys() - after.keys() if self._is_read(key)):
            topic, broker = missing[0]
            raise SourceError(
                f"the checkpoint has topic {topic} on {broker}, which was not found: before Spark 4.2, all logs must "
                "be there when a query is started again"
            )

        def check(key: LogKey, place: LogPlace) -> None:
            self._probes.bounds_of_known(key, place.open(), known[key])

        ask_all_logs(asked, check, options.patience_s, "the batch waits for it")
        return self._plan(before, after)

    def _end_position(self, key: LogKey, place: LogPlace) -> LogOffset | None:
        """Return the end of a log as a position, which started at the position of the options."""
        log = place.open()
        try:
            start = self._probes.starting_position(key, is_first=True, log=log)
            bounds, first = start_of(key, log, start)
            last_id = log.id_at(bounds.end - 1) if bounds.end else None
            return LogOffset(first, bounds.end, last_id, bounds.incarnation)
        except RequestRefused as error:
            if error.is_without_topic:
                return None
            raise
