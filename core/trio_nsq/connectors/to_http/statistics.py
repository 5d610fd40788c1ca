"""Counts of deliveries, and the lines about them. No IO; time is a parameter."""

from collections import Counter
from dataclasses import dataclass, field

from trio_nsq.wording import count_of

MAX_SAMPLES = 10_000
LINE_INTERVAL_S = 1.0
"""The shortest time between two lines about the requests."""


@dataclass(slots=True)
class Statistics:
    """Counts since the start.

    Attributes:
        requests: Requests that ended, by receiver.
        delivered: Messages that were accepted.
        requeued: Deliveries that failed and are tried again.
        dead: Messages that went to a dead-letter topic.
        sampled_out: Messages that were finished without a request.
    """

    requests: Counter[str] = field(default_factory=Counter)
    delivered: int = 0
    requeued: int = 0
    dead: int = 0
    sampled_out: int = 0
    _times_s: list[float] = field(default_factory=list)
    _since_line: int = 0
    _line_at: float = 0.0

    def record_request(self, receiver: str, elapsed_s: float) -> None:
        """Count a request that ended."""
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
        """Return the counts since the start."""
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
