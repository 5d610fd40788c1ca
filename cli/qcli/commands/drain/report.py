"""The progress of a drain: a status line on a terminal, else a line every few seconds, or JSON records."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trio_nsq.text.wording import count_of

from ...framework.output import (
    is_live_terminal,
    json_lines,
    no_color,
    plain_table,
    print_diagnostic,
    rate,
    write,
)
from ...records.brokers import DrainRecord
from ...terminal.progress import RecentRate
from .remaining import Remaining, named

if TYPE_CHECKING:
    from rich.live import Live

    from trio_nsq.client.http.job_reporter import JobProgress

LINE_EVERY_S = 5.0
"""Between two lines, if standard error is not a terminal."""


@dataclass(slots=True)
class Progress:
    """The progress of a drain. Time is a parameter.

    Attributes:
        address: The broker.
        left: What is left on it.
        moved: Messages moved to another broker by this run, counted for each channel; None: they are not moved.
        waits_for: What a move waits for; empty: nothing.
        per_second: Messages that became fewer, recently; None: not known yet.
    """

    address: str
    left: Remaining = field(default_factory=lambda: Remaining(()))
    moved: int | None = None
    waits_for: str = ""
    per_second: float | None = None
    _begun_with: int | None = None
    _moved_since: int = 0
    _recent: RecentRate = field(default_factory=RecentRate)

    def update(self, left: Remaining, now_s: float) -> None:
        self.left, self._moved_since = left, 0
        if self._begun_with is None:
            self._begun_with = left.messages
        self._record_rate(now_s)

    def record_moved(self, messages: int, now_s: float) -> None:
        """Record that messages have moved since the last `update`."""
        self.moved = (self.moved or 0) + messages
        self._moved_since += messages
        self.waits_for = ""
        self._record_rate(now_s)

    def _record_rate(self, now_s: float) -> None:
        self.per_second = self._recent.after(now_s, max(0, (self._begun_with or 0) - self.messages))

    @property
    def messages(self) -> int:
        return max(0, self.left.messages - self._moved_since)

    @property
    def seconds_left(self) -> float | None:
        """The estimated time; None: not known."""
        return self.messages / self.per_second if self.per_second and self.per_second > 0 else None

    def of_job(self) -> JobProgress:
        """Return the progress for a report to the broker."""
        from trio_nsq.client.http.job_reporter import JobProgress

        total = self._begun_with
        return JobProgress(max(0, (total or 0) - self.messages), total, self.waits_for)

    def line(self) -> str:
        deferred = sum(row.deferred for row in self.left.rows) if self.moved is None else 0
        parts = [
            f"{count_of(self.messages, 'message')} left" + (f" ({deferred:,} deferred)" if deferred else "")
        ]
        if self.moved is not None:
            parts.append(f"{self.moved:,} moved")
        if self.waits_for:
            return f"{', '.join(parts)}; {self.waits_for}"
        if self.per_second:
            parts.append(f"{rate(self.per_second)} messages/s")
        if (seconds := self.seconds_left) is not None:
            parts.append(f"{_duration(seconds)} left")
        text = ", ".join(parts)
        if self.moved is None and (stuck := self.left.stuck):
            text += f"; no consumer: {named(stuck)}"
        return text

    def record(self, state: Literal["draining", "moving", "empty", "timeout"]) -> DrainRecord:
        """Return the progress for JSON output; `state` is `draining`, `moving`, `empty` or `timeout`."""
        seconds = self.seconds_left
        found: DrainRecord = {
            "broker": self.address,
            "state": state,
            "messages": self.messages,
            "per_second": None if self.per_second is None else round(self.per_second, 1),
            "seconds_left": None if seconds is None else round(seconds, 1),
            "left": [
                {
                    "topic": row.topic,
                    "channel": row.channel,
                    "depth": row.depth,
                    "in_flight": row.in_flight,
                    "deferred": row.deferred,
                    "clients": row.clients,
                }
                for row in self.left.rows
            ],
            "unavailable": list(self.left.unavailable),
        }
        if self.moved is not None:
            found["moved"] = self.moved
        if self.waits_for:
            found["waits_for"] = self.waits_for
        return found

    def table(self) -> str:
        head = ("TOPIC/CHANNEL", "DEPTH", "IN FLIGHT", "DEFERRED", "CONSUMERS")
        rows = [
            (row.name, f"{row.depth:,}", f"{row.in_flight:,}", f"{row.deferred:,}", f"{row.clients:,}")
            for row in self.left.rows
        ]
        return plain_table([head, *rows], 1) if rows else ""


def _duration(seconds: float) -> str:
    for unit, unit_s in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * unit_s:
            return f"{max(1, round(seconds / unit_s))} {unit}"
    return "days"


Show = Callable[[Progress], None]


@contextmanager
def reporter(form: str, quiet: bool) -> Iterator[Show]:
    if form == "json":
        yield lambda progress: write(json_lines([progress.record(_state(progress))]))
    elif quiet:
        yield lambda _progress: None
    elif is_live_terminal(sys.stderr):
        with _live() as live:
            from rich.text import Text

            bold = "" if no_color() else "bold"

            def show(progress: Progress) -> None:
                count, _, rest = progress.line().partition(" ")
                text = Text.assemble((count, bold), " ", rest, no_wrap=True, overflow="ellipsis")
                live.update(text, refresh=True)

            yield show
    else:
        yield _lines()


def _state(progress: Progress) -> Literal["draining", "moving"]:
    return "draining" if progress.moved is None else "moving"


@contextmanager
def _live() -> Iterator[Live]:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    # Without auto_refresh: its thread would compete with the work.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield live


def _lines() -> Show:
    shown_s = -LINE_EVERY_S

    def show(progress: Progress) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= LINE_EVERY_S:
            shown_s = time.monotonic()
            print_diagnostic(f"{progress.address}: {progress.line()}")

    return show
