"""The live screen of `qcli stat`: brokers are asked in threads, so that keys react at once while one of them hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...broker.brokers import combined
from ...framework.errors import ExitCode, Failure
from ...terminal.fullscreen import FullScreen
from .drawing import Drawing, Picture
from .history import History
from .polling import Poller
from .rows import Report, Row, combine
from .settings import Settings

FIRST_WAIT_S = 1.0
"""Wait this long for slow brokers at the start, if another one has answered."""
REFRESH_S = 1.0
"""Draw again after this time: a broker may have become silent."""


_REST = 3
"""Adding up the numbers of thousands of channels takes time: rest this many times as long, so that keys work."""


class Live:
    """The latest answers of brokers.

    Args:
        asks: For each address what returns the `topics` of its `/stats`, or raises Failure.
    """

    def __init__(self, asks: Mapping[str, Callable[[], list[dict[str, Any]]]], interval_s: float) -> None:
        self._interval_s = interval_s
        self._news = threading.Event()
        self._wake_screen: Callable[[], None] | None = None
        self._pollers = {address: Poller(ask, interval_s, self._wake) for address, ask in asks.items()}
        self._shown: list[list[Row] | None] = []
        self._history = History()
        self._recorded_s = 0.0
        self._title = ""
        self._report = Report()
        self._next_s = 0.0

    def start(self) -> Report:
        """Ask the brokers, and return the first report: of all brokers, or without those that are slow.

        Raises Failure: no broker answers.
        """
        for poller in self._pollers.values():
            poller.start()
        deadline_s = time.monotonic() + FIRST_WAIT_S
        while not self._complete(time.monotonic() >= deadline_s):
            self._news.wait(max(0.0, deadline_s - time.monotonic()) or None)
            self._news.clear()
        self._check_errors()
        failures = self._failures()
        if len(failures) == len(self._pollers):
            raise combined(failures.values(), partial=False)
        return self.picture().report

    @property
    def all_answered(self) -> bool:
        """Whether every broker has answered."""
        return all(rows is not None for rows in self._rows().values())

    def run(self, settings: Settings, drawing: Drawing) -> None:
        """Show the screen until the user quits. The last table stays on the terminal."""
        with self._on_screen() as screen:
            picture = self.picture()
            try:
                while not settings.quits:
                    self._check_errors()
                    if not settings.stopped:
                        picture = self.picture()
                    screen.draw(drawing.lines(picture, *screen.size()))
                    for key in screen.wait(REFRESH_S if settings.stopped else self._timeout_s()):
                        settings.press(key)
            finally:
                screen.farewell = drawing.farewell(picture, *screen.size())

    @contextmanager
    def _on_screen(self) -> Iterator[FullScreen]:
        with FullScreen() as screen:
            self._wake_screen = screen.wake
            try:
                yield screen
            finally:
                self._wake_screen = None

    def _wake(self) -> None:
        self._news.set()
        if (wake := self._wake_screen) is not None:
            wake()

    def _complete(self, is_late: bool) -> bool:
        answers = [poller.answer for poller in self._pollers.values()]
        if any(poller.error for poller in self._pollers.values()) or all(answers):
            return True
        return is_late and any(answer.rows is not None for answer in answers if answer)

    def _check_errors(self) -> None:
        """Raise the error of a thread that is not a failure of its broker."""
        for poller in self._pollers.values():
            if poller.error is not None:
                raise poller.error

    def _rows(self) -> dict[str, list[Row] | None]:
        """Return the rows of each broker; None if it failed or is silent."""
        now_s = time.monotonic()
        return {
            address: poller.answer.rows if poller.answer and poller.silent_s(now_s) is None else None
            for address, poller in self._pollers.items()
        }

    def _failures(self) -> dict[str, Failure]:
        found = {address: poller.answer for address, poller in self._pollers.items()}
        return {
            address: answer.failure
            for address, answer in found.items()
            if answer and answer.failure is not None
        }

    def picture(self) -> Picture:
        """Return the current numbers: those of the brokers that answer, or, if none does, the last ones."""
        rows = self._rows()
        if self._differs(rows) and time.monotonic() >= self._next_s:
            begun_s = time.monotonic()
            report = combine({address: each for address, each in rows.items() if each is not None})
            # All brokers answer once in an interval: record them together.
            if begun_s >= self._recorded_s + 0.9 * self._interval_s:
                self._history.add([*report.sums, *(row for parts in report.parts.values() for row in parts)])
                self._recorded_s = begun_s
            self._title = f"{_addresses(list(rows))}  {time.strftime('%H:%M:%S')}"
            self._report = report
            self._shown = list(rows.values())
            self._next_s = time.monotonic() + _REST * (time.monotonic() - begun_s)
        return Picture(self._title, self._report, self._history, self._problems(rows))

    def _differs(self, rows: Mapping[str, list[Row] | None]) -> bool:
        """Return whether a report of these rows would differ; if no broker answers, the last report stays."""
        if not any(each is not None for each in rows.values()):
            return False
        shown = self._shown or [None] * len(rows)
        return any(old is not new for old, new in zip(shown, rows.values(), strict=True))

    def _timeout_s(self) -> float:
        """Return how long the screen may stay as it is."""
        if self._differs(self._rows()):
            return min(REFRESH_S, max(0.0, self._next_s - time.monotonic()))
        return REFRESH_S

    def _problems(self, rows: Mapping[str, list[Row] | None]) -> list[str]:
        failures = self._failures()
        silent, lines = [], []
        for address, answered in rows.items():
            failure = failures.get(address)
            if failure is not None and failure.exit_code != ExitCode.UNREACHABLE:
                lines.append(failure.brief if address in failure.brief else f"{address}: {failure.brief}")
            elif answered is None:
                silent.append(address)
        if silent:
            numbers = "these are the last numbers" if len(silent) == len(rows) else "not in these numbers"
            lines.insert(0, f"no answer from {', '.join(silent)}: {numbers}")
        return lines


def _addresses(addresses: Sequence[str]) -> str:
    if len(addresses) <= 2:
        return " and ".join(addresses)
    return f"{len(addresses)} brokers"
