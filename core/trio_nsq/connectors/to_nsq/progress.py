"""What was copied so far."""

import threading
from dataclasses import dataclass, field, replace

from ..monitoring.status import TopicStatus
from ..source.batch import Source


@dataclass(slots=True)
class SourceProgress:
    """The messages of one topic of one broker since the program was started.

    Attributes:
        topic, broker: See `Source`.
        exactly_once: Whether copies are stored exactly once.
        copied, copied_bytes: Messages that are stored, and the bytes of their bodies.
        dropped: Messages that the filters left out.
        not_json: Bodies that are not JSON objects, if a filter needs one.
        waiting: Messages that were received and are not stored yet.
        source: While it is open.
        last_lag: The lag when it was closed.
        failures: Attempts of a destination to publish, or to say what it has, that failed.
        error: Why the last one failed; empty: it succeeded.
    """

    topic: str
    broker: str
    exactly_once: bool = False
    copied: int = 0
    copied_bytes: int = 0
    dropped: int = 0
    not_json: int = 0
    waiting: int = 0
    source: Source | None = None
    last_lag: int | None = None
    failures: int = 0
    error: str = ""

    def record_attempt(self, error: str) -> None:
        """Record how a request to a destination ended. Empty: it succeeded."""
        self.error = error
        self.failures += bool(error)

    @property
    def lag(self) -> int | None:
        """Messages that are not stored yet; None: unknown."""
        if self.source is None:
            return self.last_lag
        ahead = self.source.lag()
        return ahead + self.waiting if ahead is not None else None

    def add(self, other: "SourceProgress") -> None:
        """Add the counts of another source."""
        for name in ("copied", "copied_bytes", "dropped", "not_json", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Progress:
    """The progress of all sources, in the order in which they were found.

    Attributes:
        sources: Without those whose topic was deleted; `sums` has them.
    """

    sources: dict[tuple[str, str], SourceProgress] = field(default_factory=dict)
    _forgotten: dict[str, SourceProgress] = field(default_factory=dict)  # by topic
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """While a source moves to the forgotten ones: its counts are neither missing nor twice for another thread."""

    def of(self, topic: str, broker: str) -> SourceProgress:
        return self.sources.setdefault((topic, broker), SourceProgress(topic, broker))

    def forget(self, topic: str, broker: str) -> None:
        """Remove a source; its messages still count."""
        with self._lock:
            if (gone := self.sources.pop((topic, broker), None)) is not None:
                self._forgotten.setdefault(topic, SourceProgress(topic, "")).add(gone)

    def topics(self) -> list[TopicStatus]:
        """Return the status of each topic, also of those that were deleted. Other threads may call it."""
        with self._lock:
            # A copy: the forgotten ones grow by the next one, which may be among the sources.
            sources = [*map(replace, self._forgotten.values()), *self.sources.values()]
        found: dict[str, TopicStatus] = {}
        for each in sources:
            status = found.setdefault(each.topic, TopicStatus(each.topic))
            status.messages += each.copied
            status.body_bytes += each.copied_bytes
            status.left_out += each.dropped
            status.failures += each.failures
            status.error = each.error or status.error
            if (lag := each.lag) is not None:
                status.lag = (status.lag or 0) + lag
        return list(found.values())

    def log_brokers(self) -> list[str]:
        """Return the HTTP addresses of the brokers whose logs are read. Other threads may call it."""
        sources = [each.source for each in list(self.sources.values())]
        return [source.broker for source in sources if source is not None and source.is_log]

    @property
    def sums(self) -> SourceProgress:
        """The counts of all sources together, also of those that were removed."""
        sums = SourceProgress("", "")
        for each in (*self.sources.values(), *self._forgotten.values()):
            sums.add(each)
        return sums
