"""Several brokers, some of which may not answer: ask them at the same time, and read from the others."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...client.errors import BrokerUnreachable, RequestRefused
from ...client.reading.broker_log import LogReplaced
from ...log.gaps import Span
from ...protocol.errors import NSQError
from ..logs import LogPlace
from ..runtime.engine import Advance
from .manifest import RangeResult
from .task import ExportTask

_T = TypeVar("_T")
_WATCH_S, _MAX_WATCH_S = 0.5, 5.0
"""The pauses between two requests to a broker that does not answer; they double."""


class Brokers:
    """Asks the logs of several brokers at the same time.

    A broker that failed is asked again in the background, so that the others do not wait for it. A single broker is
    only asked when there is a question.

    Attributes:
        failures: Why a log could not be read, by label, until it can be read again.
    """

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self._watches: dict[str, _Watch] = {}
        self._are_several = False

    def ask(self, places: Sequence[LogPlace], question: Callable[[LogPlace], _T]) -> list[_T]:
        """Ask a question about each place; wait for the answers, except of those that failed and still do.

        Args:
            question: Called in a thread if there are several places. Its errors become `failures`.

        Returns:
            The answers, in the order of the places.
        """
        by_label = {place.label: place for place in places}
        self._are_several = len(by_label) > 1
        for label in self.failures.keys() - by_label.keys():
            self._unwatch(label)
            del self.failures[label]
        asked = []
        for label, place in by_label.items():
            watch = self._watches.get(label)
            if self._are_several and watch is not None and not watch.answers:
                self.failures[label] = watch.error
                continue
            asked.append(_Question(place, question))
        for each in asked:
            if self._are_several:
                threading.Thread(target=each.run, name="trio-nsq-ask", daemon=True).start()
            else:
                each.run()  # here, so that a signal interrupts it
        answers = []
        for each in asked:
            each.ended.wait()
            if isinstance(each.error, NSQError | OSError):
                self.failed(each.place, each.error)
            elif each.error is not None:
                raise each.error
            else:
                answers.extend(each.answers)
                self.failures.pop(each.place.label, None)
                self._unwatch(each.place.label)
        return answers

    def failed(self, place: LogPlace, error: Exception) -> None:
        """Note that a log cannot be read, and ask in the background when it can be read again."""
        self.failures[place.label] = error
        self._unwatch(place.label)
        if self._are_several:
            self._watches[place.label] = _Watch(place, error)

    def _unwatch(self, label: str) -> None:
        if (watch := self._watches.pop(label, None)) is not None:
            watch.stop()

    def close(self) -> None:
        """Stop to ask in the background."""
        for watch in self._watches.values():
            watch.stop()


class _Question(Generic[_T]):
    """A question about one place; `run` sets the answer or the error."""

    def __init__(self, place: LogPlace, question: Callable[[LogPlace], _T]) -> None:
        self.place = place
        self.answers: list[_T] = []
        self.error: Exception | None = None
        self.ended = threading.Event()
        self._question = question

    def run(self) -> None:
        try:
            self.answers.append(self._question(self.place))
        except Exception as exc:
            self.error = exc
        finally:
            self.ended.set()


class _Watch:
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
        threading.Thread(target=self._run, name="trio-nsq-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause_s = _WATCH_S
        while not self._stopped.wait(pause_s):
            pause_s = min(2 * pause_s, _MAX_WATCH_S)
            try:
                self._place.open().bounds()
            except (NSQError, OSError) as exc:
                self.error = exc
            else:
                self.answers = True
                return


# ---------------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class Unread:
    """A range that could not be read, because its broker does not answer, or has another log now."""

    broker: str
    span: Span
    error: NSQError


@dataclass(frozen=True, slots=True)
class Attempt:
    """A task whose broker may be gone: then it returns `Unread`, and the other tasks go on. Can be pickled.

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

    def run(self, advance: Advance | None = None) -> RangeResult | Unread:
        gone = _gone_in(self.plan)
        broker = self.task.broker
        try:
            if broker not in gone:
                return self.task.run(advance)
        except (BrokerUnreachable, RequestRefused, LogReplaced) as exc:
            gone[broker] = exc
        return Unread(broker, self.task.span, gone[broker])


_gone: dict[str, dict[str, NSQError]] = {}
"""The brokers that could not be read in this process, with their errors, by plan."""


def _gone_in(plan: str) -> dict[str, NSQError]:
    if plan not in _gone:
        _gone.clear()  # plans are executed one after the other
        _gone[plan] = {}
    return _gone[plan]
