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
from .history import History
from .polling import Poller
from .rows import Report, Row, combine
from .view import Picture, View

FIRST_WAIT_S = 1.0
"""Wait this long for slow brokers at the start, if another one has answered."""
REFRESH_S = 1.0
"""Draw again after this time: a broker may have become silent."""


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
        self._picture = Picture("", Report(), self._history)

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
        if not any(self._rows().values()) and (failures := self._failures()):
            raise combined(failures.values(), partial=False)
        return self.picture().report

    @property
    def all_answered(self) -> bool:
        """Whether every broker has answered."""
        return all(rows is not None for rows in self._rows().values())

    def run(self, view: View) -> None:
        """Show the screen until the user quits. The last table stays on the terminal."""
        with self._on_screen() as screen:
            picture = self.picture()
            try:
                while not view.quits:
                    self._check_errors()
                    if not view.stopped:
                        picture = self.picture()
                    screen.draw(view.lines(picture, *screen.size()))
                    for key in screen.wait(REFRESH_S):
                        view.press(key)
            finally:
                screen.farewell = view.farewell(picture, *screen.size())

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
        fresh = {address: each for address, each in rows.items() if each is not None}
        changed = len(rows) != len(self._shown) or any(
            old is not new for old, new in zip(self._shown, rows.values(), strict=True)
        )
        if changed and fresh:
            report = combine(fresh)
            now_s = time.monotonic()
            # All brokers answer once in an interval; record them together.
            if now_s >= self._recorded_s + 0.9 * self._interval_s:
                self._history.add([*report.sums, *(row for parts in report.parts.values() for row in parts)])
                self._recorded_s = now_s
            title = f"{_addresses(list(rows))}  {time.strftime('%H:%M:%S')}"
            self._picture = Picture(title, report, self._history)
        self._shown = list(rows.values())
        problems = self._problems(rows)
        return Picture(self._picture.title, self._picture.report, self._history, problems)

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
