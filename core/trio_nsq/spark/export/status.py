"""The status of a continuous export, from its rounds. No IO; time is a parameter.

The export's thread changes it, and other threads take snapshots.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...connectors.monitoring.status import JobStatus, TopicStatus, problems_of
from .request import ExportResult

STALLED_S = 600.0
"""An export that neither writes a message nor ends a round for this time is not healthy."""


@dataclass(slots=True)
class _Topic:
    """A topic of the export.

    Attributes:
        stored_up_to_s: When the last round began that has exported the topic completely, by the monotonic clock.
        has_failed: It has failed in this round.
        waiting: How many messages this round has left to a later one.
    """

    status: TopicStatus
    stored_up_to_s: float
    has_failed: bool = False
    waiting: int = 0


@dataclass(slots=True)
class ExportStatus:
    """What a continuous export has done since its start.

    Attributes:
        name: What people call the job, without secrets.
        started_at: Unix seconds.
        started_s: The same moment by the monotonic clock, which all other times are of.
        every_s: The interval of the rounds.
        max_lag_s: The greatest lag of a healthy topic; None: any.
        max_age_s: How long messages may wait for others, so that files are large; 0: they do not wait.
        knows_lag: A round exports all messages that were published before it; False: it consumes a channel, which may
            have more.
        kind: The command.
    """

    name: str
    started_at: float
    started_s: float
    every_s: float
    max_lag_s: float | None = None
    max_age_s: float = 0.0
    knows_lag: bool = True
    kind: str = "to-parquet"
    _topics: dict[str, _Topic] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _round_s: float = 0.0
    _active_s: float = 0.0
    _rounds: int = 0
    _written: int = 0
    _problems: list[str] = field(default_factory=list)

    def begin_round(self, topics: Iterable[str], now_s: float) -> None:
        """Begin a round for these topics; others are no longer exported, and forgotten."""
        with self._lock:
            self._round_s = self._active_s = now_s
            self._topics = {
                topic: self._topics.get(topic)
                or _Topic(TopicStatus(topic), self.started_s if not self._rounds else now_s)
                for topic in topics
            }
            for each in self._topics.values():
                each.has_failed, each.waiting = False, 0

    def leave_out(self, topic: str) -> None:
        """Note that this round leaves out a topic that has failed before: its error stays."""
        with self._lock:
            if (found := self._topics.get(topic)) is not None:
                found.has_failed = True

    def note_backlog(self, topic: str, messages: int) -> None:
        """Note how many messages of a topic are planned and not written yet."""
        with self._lock:
            if (found := self._topics.get(topic)) is not None:
                found.status.lag = messages

    def end_topic(self, topic: str, result: ExportResult, error: str = "", *, waiting: int = 0) -> None:
        """Note what a round has done for a topic.

        Args:
            error: Why it is not exported completely; empty: it is.
            waiting: How many messages wait for a later round, see `max_age_s`.
        """
        with self._lock:
            if (found := self._topics.get(topic)) is None:
                return
            found.waiting = waiting
            status = found.status
            status.messages += result.messages
            status.body_bytes += result.body_bytes
            status.files += result.files
            status.file_bytes += result.file_bytes
            status.unparsed += result.unparsed
            status.misfits += sum(result.misfits.values())
            status.left_out += (
                result.for_one_channel + result.repeated + result.filtered + result.discarded_rows
            )
            status.missing += result.missing
            status.dead_letters += result.dead_letters
            if error:
                found.has_failed = True
                status.error = error
                status.failures += 1

    def end_round(self, now_s: float, unix_s: float, problems: Iterable[str] = ()) -> None:
        """Note that a round has ended. Topics without an error in it are exported up to its begin, or wait.

        Args:
            problems: Why the round could not do all, besides the errors of topics, such as a discovery service that
                does not answer.
        """
        with self._lock:
            self._active_s, self._problems = now_s, list(problems)
            self._rounds += 1
            for each in self._topics.values():
                if not each.has_failed:
                    # Those that wait are not older.
                    waits_s = self.max_age_s if each.waiting else 0.0
                    each.stored_up_to_s = max(each.stored_up_to_s, self._round_s - waits_s)
                    each.status.error, each.status.last_round_at = "", unix_s
                    each.status.lag = each.waiting if self.knows_lag else None

    def snapshot(self, now_s: float, written: int) -> JobStatus:
        """Return the status now.

        Args:
            written: The messages that were written so far, see `JobStatus`.
        """
        with self._lock:
            if written != self._written:
                self._written, self._active_s = written, now_s
            topics = [
                replace(each.status, lag_s=max(0.0, now_s - each.stored_up_to_s) if self.knows_lag else None)
                for _, each in sorted(self._topics.items())
            ]
            problems = list(self._problems)
            since_s = now_s - (self._active_s or self.started_s)
            if since_s > self.every_s + STALLED_S:
                problems.append(f"for {since_s:.0f} s, no message was written and no round has ended")
            return JobStatus(
                self.kind,
                self.name,
                self.started_at,
                topics,
                problems_of(topics, self.max_lag_s, problems),
                self._rounds,
                self._written,
            )
