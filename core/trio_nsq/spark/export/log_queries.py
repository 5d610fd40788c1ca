"""Several brokers, some of which may not answer: ask them at the same time, and read from the others."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...client.errors import BrokerUnreachable, RequestRefused
from ...client.reading.broker_log import LogReplaced
from ...event_loop.fan_out import start
from ...event_loop.retries import Delays
from ...log.gaps import Span
from ...protocol.errors import NSQError
from ..logs import LogPlace
from ..runtime.engine import Advance
from .manifest import RangeResult
from .task import ExportTask

_T = TypeVar("_T")
_PROBE_S, _MAX_PROBE_S = 0.5, 5.0
"""The pauses between two requests to a broker that does not answer; they double."""


class LogQueries:
    """Asks the logs of several brokers at the same time.

    A broker that failed is asked again in the background, so that the others do not wait for it. A single broker is
    only asked when there is a question.

    Args:
        unreachable: The brokers that did not answer in this round, by `LogPlace.where`, for all topics that are
            exported in it: they are not asked again. None: there is one topic.

    Attributes:
        failures: Why a log could not be read, by `LogPlace.where`, until it can be read again.
    """

    def __init__(self, unreachable: dict[str, Exception] | None = None) -> None:
        self.failures: dict[str, Exception] = {}
        self._unreachable = unreachable
        self._probes: dict[str, _RecoveryProbe] = {}
        self._are_several = False

    def begin(self, places: Sequence[LogPlace]) -> None:
        """Begin a round: from now on, only these places are asked. The failures of others are forgotten."""
        wheres = {place.where for place in places}
        self._are_several = len(wheres) > 1
        for where in self.failures.keys() - wheres:
            self._end_probe(where)
            del self.failures[where]

    def ask(self, places: Sequence[LogPlace], question: Callable[[LogPlace], _T]) -> list[_T]:
        """Ask a question about places of the round; wait for the answers, except of those that failed and still do.

        Args:
            question: Called in a thread if there are several places. Its errors become `failures`.

        Returns:
            The answers, in the order of the places.
        """
        asked: dict[LogPlace, Future[_T] | None] = {}
        for where, place in {place.where: place for place in places}.items():
            probe = self._probes.get(where)
            if self._unreachable is not None and where in self._unreachable:
                self.failures[where] = self._unreachable[where]
            elif self._are_several and probe is not None and not probe.answers:
                self.failures[where] = probe.error
            else:
                # A single one is asked here, so that a signal interrupts it.
                asked[place] = start(partial(question, place)) if self._are_several else None
        answers: list[_T] = []
        for place, future in asked.items():
            try:
                answers.append(question(place) if future is None else future.result())
            except (NSQError, OSError) as error:
                self.failed(place, error)
            else:
                self.failures.pop(place.where, None)
                self._end_probe(place.where)
        return answers

    def failed(self, place: LogPlace, error: Exception) -> None:
        """Note that a log cannot be read, and ask in the background when it can be read again."""
        self.failures[place.where] = error
        self._end_probe(place.where)
        if self._unreachable is not None:
            if isinstance(error, BrokerUnreachable):
                self._unreachable[place.where] = error
        elif self._are_several:
            self._probes[place.where] = _RecoveryProbe(place, error)

    def found_elsewhere(self, where: str) -> None:
        """Note that a log that cannot be read here is read at another address: that is no failure."""
        self.failures.pop(where, None)

    def _end_probe(self, where: str) -> None:
        if (probe := self._probes.pop(where, None)) is not None:
            probe.stop()

    def close(self) -> None:
        """Stop to ask in the background."""
        for probe in self._probes.values():
            probe.stop()


class _RecoveryProbe:
    """Asks a log that failed for its bounds, again and again, until it answers.

    Attributes:
        error: The last error.
        answers: Whether it has answered.
    """

    def __init__(self, place: LogPlace, error: Exception) -> None:
        self.error = error
        self.answers = False
        self._place = place
        self._stopped = threading.Event()
        start(self._run)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pauses = Delays(_PROBE_S, _MAX_PROBE_S)
        while not self._stopped.wait(pauses.next_s()):
            try:
                self._place.open().bounds()
            except (NSQError, OSError) as exc:
                self.error = exc
            else:
                self.answers = True
                return


# ---------------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class Skipped:
    """A range that could not be read, because its broker does not answer, or has another log now."""

    broker: str
    span: Span
    error: NSQError


@dataclass(frozen=True, slots=True)
class TolerantTask:
    """A task whose broker may be gone: then it returns `Skipped`, and the other tasks go on. Can be pickled.

    After a broker has not answered for its patience, other tasks of the plan in the same process do not wait for it
    again. So a dead broker costs a job this time once, and not once for each range.

    Attributes:
        plan: Identifies the plan of the task.
    """

    task: ExportTask
    plan: str

    @property
    def messages(self) -> int:
        return self.task.messages

    def run(self, advance: Advance | None = None) -> RangeResult | Skipped:
        gone, task = _gone_in(self.plan), self.task
        log = task.request.topic, task.log.where
        error = gone.get(("", task.log.where)) or gone.get(log)
        if error is None:
            try:
                return task.run(advance)
            except BrokerUnreachable as exc:
                error = gone["", task.log.where] = exc
            except (RequestRefused, LogReplaced) as exc:
                error = gone[log] = exc
        return Skipped(task.broker, task.span, error)


_gone: dict[str, dict[tuple[str, str], NSQError]] = {}
"""What could not be read in this process, by plan: topic and `LogPlace.where`, or a broker with all its topics."""


def _gone_in(plan: str) -> dict[tuple[str, str], NSQError]:
    if plan not in _gone:
        _gone.clear()  # plans are executed one after the other
        _gone[plan] = {}
    return _gone[plan]
