"""Counts of deliveries, and the lines about them. No IO; time is a parameter."""

import math
from collections import Counter
from dataclasses import dataclass, field

from trio_nsq.text.wording import count_of

from ..monitoring.status import TopicStatus

MAX_SAMPLES = 10_000
LINE_INTERVAL_S = 1.0
"""The shortest time between two lines about the requests."""
REPORT_S = 10.0
"""The shortest time between two warnings of the same kind."""


@dataclass(slots=True)
class Statistics:
    """Counts since the start.

    Attributes:
        requests: Requests that ended, by receiver.
        delivered: Messages that were accepted.
        requeued: Deliveries that failed and are tried again.
        failed: Requests that failed, also those that were tried again while their messages waited.
        error: Why the last request failed; empty: it succeeded.
        dead: Messages that went to a dead-letter topic.
        sampled_out: Messages that were finished without a request.
    """

    requests: Counter[str] = field(default_factory=Counter)
    delivered: int = 0
    requeued: int = 0
    failed: int = 0
    error: str = ""
    dead: int = 0
    sampled_out: int = 0
    _times_s: list[float] = field(default_factory=list)
    _since_line: int = 0
    _line_at: float = 0.0

    def status(self, topic: str) -> TopicStatus:
        """Return the counts as the status of a topic, which may stand for several. Other threads may call it."""
        return TopicStatus(
            topic,
            self.delivered,
            left_out=self.sampled_out,
            dead_letters=self.dead,
            failures=self.failed,
            error=self.error,
        )

    def record_outcome(self, error: str) -> None:
        """Record how a request, or the attempt to send one, ended. Empty: a receiver has accepted the messages."""
        self.error = error
        self.failed += bool(error)

    def record_request(self, receiver: str, elapsed_s: float) -> None:
        self.requests[receiver] += 1
        self._since_line += 1
        if len(self._times_s) < MAX_SAMPLES:
            self._times_s.append(elapsed_s)

    def line(self, every: int, now: float) -> str | None:
        """Return the next line about the requests if it is due: after `every` requests, at most once a second."""
        if not every or self._since_line < every or now < self._line_at + LINE_INTERVAL_S:
            return None
        self._line_at = now
        times_ms = sorted(1000 * each for each in self._times_s)
        text = (
            f"{count_of(self._since_line, 'request')}: 99th {_part(times_ms, 0.99):.1f} ms, "
            f"95th {_part(times_ms, 0.95):.1f} ms, average {sum(times_ms) / len(times_ms):.1f} ms; {self.summary()}"
        )
        self._since_line = 0
        self._times_s.clear()
        return text

    def summary(self) -> str:
        parts = [f"{count_of(self.delivered, 'message')} delivered"]
        if self.requeued:
            parts.append(f"{self.requeued:,} requeued")
        if self.dead:
            parts.append(f"{self.dead:,} to dead-letter topics")
        if self.sampled_out:
            parts.append(f"{self.sampled_out:,} left out by --sample")
        if len(self.requests) > 1:
            parts.append(", ".join(f"{url} {count:,}" for url, count in sorted(self.requests.items())))
        return "; ".join(parts)


def _part(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


class Reports:
    """Warnings of messages that were not delivered, at most one in `REPORT_S`, with their number.

    Args:
        one, many: What happened to the message, or to the messages.
    """

    def __init__(self, one: str, many: str) -> None:
        self._one = one
        self._many = many
        self._unreported = 0
        self._reported_at = -math.inf

    def add(self, reason: str, now: float, count: int = 1) -> str | None:
        """Count messages, and return a warning if it is time for one."""
        self._unreported += count
        if now < self._reported_at + REPORT_S:
            return None
        self._reported_at = now
        return f"{self.rest()}; the last one: {reason}"

    def rest(self) -> str | None:
        """Return a warning of those that were not reported; None: there are none."""
        count, self._unreported = self._unreported, 0
        what = self._one if count == 1 else self._many
        return f"{count_of(count, 'message')} not delivered and {what}" if count else None
