"""The live screen of `qcli stat`."""

import time

from trio_nsq.text.wording import printable

from ...terminal.fullscreen import full_screen
from .drawing import Drawing, History, Picture
from .rows import Report, combine
from .settings import Settings
from .stats_poller import Samples, StatsPoller

REFRESH_S = 1.0
"""Draw again after this time: a broker may have become silent."""
_REST = 3
"""Adding up the numbers of thousands of channels takes time: rest this many times as long, so that keys work."""


class Live:
    """The current report of brokers, and their rates in the past."""

    def __init__(self, poller: StatsPoller, interval_s: float) -> None:
        self._poller = poller
        self._interval_s = interval_s
        self._shown: Samples = {}
        self._report = Report()
        self._title = ""
        self._next_s = 0.0
        self._history = History()
        self._recorded_s = 0.0

    def run(self, settings: Settings, drawing: Drawing) -> None:
        """Show the screen until the user quits. The last table stays on the terminal."""

        def is_news() -> bool:
            return not settings.stopped and self._has_news(self._poller.samples())

        with full_screen() as screen:
            picture = self.picture()
            try:
                while not settings.quits:
                    if not settings.stopped:
                        picture = self.picture()
                    screen.draw(drawing.lines(picture, *screen.size()))
                    for key in screen.wait(REFRESH_S, is_news):
                        settings.press(key)
            finally:
                screen.farewell = drawing.farewell(picture, *screen.size())

    def picture(self) -> Picture:
        """Return the current numbers: those of the brokers that answer, or, if none does, the last ones."""
        samples = self._poller.samples()
        begun_s = time.monotonic()
        if self._has_news(samples):
            self._report = combine(
                {address: each.rows for address, each in samples.items() if each is not None}
            )
            self._shown = samples
            self._title = f"{_names(samples)}  {time.strftime('%H:%M:%S')}"
            # All brokers answer once in an interval: record them together.
            if begun_s >= self._recorded_s + 0.9 * self._interval_s:
                parts = (row for parts in self._report.parts.values() for row in parts)
                self._history.add([*self._report.sums, *parts])
                self._recorded_s = begun_s
            self._next_s = time.monotonic() + _REST * (time.monotonic() - begun_s)
        return Picture(self._title, self._report, self._history, self._poller.problems())

    def _has_news(self, samples: Samples) -> bool:
        """Return whether a report of these rows would differ, and is due; if no broker answers, the last one stays."""
        if time.monotonic() < self._next_s or all(each is None for each in samples.values()):
            return False
        return any(each is not self._shown.get(address) for address, each in samples.items())


def _names(samples: Samples) -> str:
    """Return the addresses of the brokers, with their notes; of many brokers only the number."""
    if len(samples) > 2:
        return f"{len(samples)} brokers"
    return " and ".join(
        printable(f"{address} ({sample.note})" if sample is not None and sample.note else address)
        for address, sample in samples.items()
    )
