"""Which part of the logs a query reads."""

from dataclasses import dataclass

from ...log.positions import LATEST, Position
from .fleet import LogKey

CLOCK_TOLERANCE_NS = 3600 * 10**9
"""The log is searched by time, which is exact if times rise along the log: they fall when the clock is set back."""
_MAX_TIME_NS = 2**63 - 1
"""The last time that a record can have, in 2262; queries use later ones, such as the year 9999, for no end."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """What a query reads.

    Attributes:
        topics, brokers: The values of these columns; None: all.
        first, end: The sequences, from `first` and before `end`; an `end` of None: to the end of the log.
        from_ns, until_ns: The times, both included; None: any.
    """

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    first: int = 0
    end: int | None = None
    from_ns: int | None = None
    until_ns: int | None = None

    def includes(self, key: LogKey) -> bool:
        """Whether a log may have messages that are read."""
        is_topic = self.topics is None or key.topic in self.topics
        return is_topic and (self.brokers is None or key.broker in self.brokers)

    @property
    def first_position(self) -> str | None:
        """Where the times begin, as a position, `CLOCK_TOLERANCE_NS` earlier; None: anywhere."""
        return None if self.from_ns is None else _position(self.from_ns - CLOCK_TOLERANCE_NS)

    @property
    def end_position(self) -> str | None:
        """Where the times end, as a position, `CLOCK_TOLERANCE_NS` later; None: anywhere."""
        if self.until_ns is None or (until_ns := self.until_ns + CLOCK_TOLERANCE_NS + 1) > _MAX_TIME_NS:
            return None
        return _position(until_ns)


NO_RESTRICTION = Restriction()


def _position(timestamp_ns: int) -> str:
    return str(LATEST if timestamp_ns > _MAX_TIME_NS else Position("time", max(0, timestamp_ns)))
