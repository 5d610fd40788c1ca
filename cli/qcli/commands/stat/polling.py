"""Asks brokers for their statistics again and again, each in its own thread: one that hangs delays nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...framework.errors import Failure
from .rows import Row, Sampler

SLOW_S = 2.0
"""A broker that has not answered for this long is shown as silent; its request goes on until the timeout."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The last answer of a broker, or its last failure."""

    rows: list[Row] | None = None
    failure: Failure | None = None


class Poller:
    """Asks one broker every `interval_s` from `start` on, in a daemon thread.

    Args:
        ask: Returns the `topics` of `/stats`. Raises Failure.
        wake: Called in the thread after each answer.

    Attributes:
        answer: The last answer; None before the first one.
    """

    def __init__(
        self, ask: Callable[[], list[dict[str, Any]]], interval_s: float, wake: Callable[[], None]
    ) -> None:
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self._ask = ask
        self._interval_s = interval_s
        self._wake = wake
        self._asked_s: float | None = None
        self._sampler = Sampler()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def silent_s(self, now_s: float) -> float | None:
        """Return for how long the broker has not answered, if this is too long; `now_s` is of the monotonic clock."""
        asked_s = self._asked_s
        return now_s - asked_s if asked_s is not None and now_s - asked_s >= SLOW_S else None

    def _run(self) -> None:
        while True:
            self._asked_s = begun_s = time.monotonic()
            try:
                topics = self._ask()
                self.answer = Answer(self._sampler.rows(topics, time.monotonic()))
            except Failure as failure:
                self.answer = Answer(failure=failure)
            except BaseException as error:
                self.error = error
                return
            finally:
                self._asked_s = None
                self._wake()
            time.sleep(max(0.0, begun_s + self._interval_s - time.monotonic()))
