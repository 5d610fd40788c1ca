"""Collects the statistics of brokers again and again, each in its own thread: one that hangs delays no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ...broker.brokers import combined
from ...framework.errors import ExitCode, Failure
from .rows import Sample

SLOW_S = 2.0
"""A broker that has not answered for this long is shown as silent; its request goes on until the timeout."""
FIRST_WAIT_S = 1.0
"""Wait this long for slow brokers at the start, if another one has answered."""
DISCOVER_EACH = 5
"""Ask discovery services again after this many intervals."""

Ask = Callable[[], Sample]
"""Returns the current rows of a broker. Raises Failure."""
Samples = dict[str, Sample | None]
"""By address; None: the broker does not answer. The order is that of the addresses."""


class StatsPoller:
    """The latest answers of brokers.

    Args:
        addresses: The brokers.
        ask_of: Returns how to ask a broker. Called in the thread that uses this object.
        discover: Returns the addresses again, with those of new brokers. May raise Failure. None: there are no others.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        ask_of: Callable[[str], Ask],
        interval_s: float,
        discover: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self._ask_of = ask_of
        self._interval_s = interval_s
        self._discover = discover
        self._pollers: dict[str, _BrokerPoller] = {}
        self._discovered: tuple[str, ...] = tuple(addresses)
        self._error: BaseException | None = None
        self._news = threading.Event()

    def start(self) -> None:
        """Ask the brokers until all of them have answered, or failed; slow ones are not awaited long.

        Raises Failure: no broker answers.
        """
        self._adopt()
        deadline_s = time.monotonic() + FIRST_WAIT_S
        while not self._has_begun(time.monotonic() >= deadline_s):
            self._news.wait(max(0.0, deadline_s - time.monotonic()) or None)
            self._news.clear()
        self.samples()  # raises unexpected errors
        failures = [each.failure for each in self._pollers.values() if each.failure is not None]
        if len(failures) == len(self._pollers):
            raise combined(failures, partial=False)
        if self._discover is not None:
            threading.Thread(target=self._run_discovery, args=(self._discover,), daemon=True).start()

    def samples(self) -> Samples:
        self._adopt()
        if self._error is not None:
            raise self._error
        now_s = time.monotonic()
        return {
            address: None if poller.is_silent(now_s) else poller.sample
            for address, poller in self._pollers.items()
        }

    def problems(self) -> list[str]:
        """Return lines about the brokers that have no rows: one for those that do not answer, others for refusals."""
        silent, lines = [], []
        for address, sample in self.samples().items():
            failure = self._pollers[address].failure
            if failure is not None and failure.exit_code != ExitCode.UNREACHABLE:
                lines.append(failure.brief if address in failure.brief else f"{address}: {failure.brief}")
            elif sample is None:
                silent.append(address)
        if silent:
            numbers = (
                "these are the last numbers" if len(silent) == len(self._pollers) else "not in these numbers"
            )
            lines.insert(0, f"no answer from {', '.join(silent)}: {numbers}")
        return lines

    def _has_begun(self, is_late: bool) -> bool:
        pollers = self._pollers.values()
        if self._error is not None or all(each.has_answered for each in pollers):
            return True
        return is_late and any(each.sample is not None for each in pollers)

    def _adopt(self) -> None:
        """Begin to ask new brokers. Brokers that are no longer listed stay: one that crashed must not vanish."""
        for address in self._discovered:
            if address not in self._pollers:
                poller = _BrokerPoller(self._ask_of(address))
                self._pollers[address] = poller
                threading.Thread(target=self._run, args=(poller,), daemon=True).start()

    def _run(self, poller: _BrokerPoller) -> None:
        while True:
            begun_s = time.monotonic()
            try:
                poller.ask()
            except BaseException as error:
                self._error = error
            self._news.set()
            time.sleep(max(0.0, begun_s + self._interval_s - time.monotonic()))

    def _run_discovery(self, discover: Callable[[], Iterable[str]]) -> None:
        while True:
            time.sleep(DISCOVER_EACH * self._interval_s)
            try:
                self._discovered = tuple(discover())
            except Failure:
                continue  # the known brokers can still be asked
            except BaseException as error:
                self._error = error
            self._news.set()


class _BrokerPoller:
    """The last answer of a broker.

    Attributes:
        sample: None: the broker failed, or has not answered yet.
        failure: Of the last request.
    """

    def __init__(self, ask: Ask) -> None:
        self.sample: Sample | None = None
        self.failure: Failure | None = None
        self._ask = ask
        self._asked_s: float | None = None

    @property
    def has_answered(self) -> bool:
        return self.sample is not None or self.failure is not None

    def is_silent(self, now_s: float) -> bool:
        """Return whether the broker has not answered for too long; `now_s` is of the monotonic clock."""
        asked_s = self._asked_s
        return asked_s is not None and now_s - asked_s >= SLOW_S

    def ask(self) -> None:
        self._asked_s = time.monotonic()
        try:
            self.sample, self.failure = self._ask(), None
        except Failure as failure:
            self.sample, self.failure = None, failure
        finally:
            self._asked_s = None
