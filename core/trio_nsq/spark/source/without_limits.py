"""The stream reader for Spark before 4.2, which passes neither the start of a batch nor a limit to `latestOffset`.

A batch then ends where the logs end. After a restart, the start is unknown until `partitions` is called, so what the
other reader checks in `latestOffset` is checked there.
"""

from ..versions import ReadAllAvailable
from .options import ReadOptions
from .partitions import NsqPartition, id_of_message
from .readers import BrokerOffset, NsqStreamReader, Offset, parse_offset


class StreamReaderWithoutLimits(NsqStreamReader):
    """Reads a stream in batches that end where the logs end."""

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        super().__init__(options, columns)
        self._read_to: Offset = {}  # the end of the last batch of this process

    def latestOffset(self) -> Offset:  # type: ignore[override]
        """Return the current ends of the logs. Raises the errors of `NsqStreamReader.latestOffset`."""
        start = dict(self._read_to)
        for broker in self._options.brokers:
            if broker not in start:
                bounds, first = self._start_of_new(broker)
                last_id = id_of_message(self._options.log(broker), bounds.end - 1)
                start[broker] = BrokerOffset(first, bounds.end, last_id).to_json()
        self._read_to = super().latestOffset(start, ReadAllAvailable())
        return self._read_to

    def partitions(self, start: Offset, end: Offset) -> list[NsqPartition]:
        """Return the ranges between two offsets. Raises the errors of `latestOffset`, also about the start."""
        self._read_to = self._read_to or end  # a batch that is repeated after a restart
        before = parse_offset(start)
        self._check_brokers(before)
        for broker in before.keys() & self._options.brokers.keys():
            self._known_broker(broker, before[broker])
        return super().partitions(start, end)
