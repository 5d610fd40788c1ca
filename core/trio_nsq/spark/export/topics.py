"""Export many topics with one engine: a few of them are open at a time, and get their turns one after the other.

An open topic has its manifest in memory, and its lock: a descriptor in a local folder, in a bucket a thread that renews
a lease. So no more than `OPEN_TOPICS` are open, whatever their number. A turn of the engine has at most `TURN_RANGES`
ranges, dealt out to the open topics one by one, and the next topic opens as soon as one has no more ranges: a large
topic takes only the turns that the small ones leave it.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice

from ...client.errors import BrokerUnreachable
from ...client.reading.broker_log import Bounds
from ...event_loop.fan_out import start_all
from ...protocol.errors import NSQError
from ..logs import LogPlace
from ..runtime.engine import Advance, Engine, Task
from .job import ExportJob, ExportMemory, open_export
from .log_queries import Skipped, TolerantTask
from .manifest import RangeResult
from .request import ExportRequest, ExportResult
from .task import ExportTask

OPEN_TOPICS = 32
TURN_RANGES = 64
_QUESTIONS = 16
"""How many logs are asked at the same time whether they have new messages."""


@dataclass(frozen=True, slots=True)
class TopicSource:
    """A topic to export, and the logs that have it; `memory` is that of its earlier rounds."""

    request: ExportRequest
    places: Sequence[LogPlace]
    memory: ExportMemory = field(default_factory=ExportMemory)


@dataclass(slots=True)
class TopicOutcome:
    """How the export of one topic ended, in one round.

    Attributes:
        failures: Why logs could not be read, see `ExportJob.failures`.
        error: Why the topic is not exported, or not completely; None: it is, except of the logs in `failures`.
        left_elsewhere: See `ExportJob.left_elsewhere`.
        waiting: See `ExportJob.waiting`.
        is_interrupted: The run ended, by a signal, before all its ranges.
    """

    source: TopicSource
    result: ExportResult = field(default_factory=ExportResult)
    failures: dict[str, Exception] = field(default_factory=dict)
    error: Exception | None = None
    left_elsewhere: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    is_interrupted: bool = False

    @property
    def topic(self) -> str:
        return self.source.request.topic

    @property
    def errors(self) -> list[Exception]:
        """Why the topic is not exported completely, of each log and of the topic; empty: it is."""
        return [*self.failures.values(), *([self.error] if self.error else [])]


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A task whose failure does not end the others. Can be pickled. Returns the topic's name with the result."""

    task: TolerantTask

    @property
    def messages(self) -> int:
        return self.task.messages

    def run(self, advance: Advance | None = None) -> tuple[str, RangeResult | Skipped | NSQError | OSError]:
        topic = self.task.task.request.topic
        try:
            return topic, self.task.run(advance)
        except (NSQError, OSError) as exc:
            return topic, exc


class _OpenTopic:
    """A topic that is open, with its tasks.

    Attributes:
        waiting: Tasks that no turn has had yet.
        running: How many tasks are in this turn.
    """

    def __init__(self, source: TopicSource, unreachable: dict[str, Exception]) -> None:
        self.outcome = TopicOutcome(source)
        self.waiting: deque[TolerantTask] = deque()
        self.running = 0
        self._stack = ExitStack()
        self.job: ExportJob = self._stack.enter_context(
            open_export(
                source.request,
                source.places,
                waits_for=lambda _: True,
                memory=source.memory,
                unreachable=unreachable,
            )
        )

    def begin(self, tasks: Sequence[ExportTask], plan: str) -> None:
        self.waiting.extend(self.job.begin(tasks, plan))

    def collect(self, found: RangeResult | Skipped | NSQError | OSError) -> None:
        self.running -= 1
        if isinstance(found, RangeResult | Skipped):
            self.job.collect(found)
        else:
            self.fail(found)

    def fail(self, error: Exception) -> None:
        self.outcome.error = self.outcome.error or error
        self.waiting.clear()

    def end(self, report: Callable[[TopicOutcome], None]) -> None:
        """Report the topic, note that the report told of missing messages, and release the lock."""
        outcome, job = self.outcome, self.job
        outcome.result, outcome.failures = job.result, dict(job.failures)
        outcome.left_elsewhere, outcome.waiting = job.left_elsewhere, job.waiting
        with self._stack:
            report(outcome)
            if outcome.error is None and not outcome.failures:
                job.mark_reported(outcome.result)

    def abandon(self, error: BaseException) -> None:
        """Release the lock after an interruption; the unfinished files are removed."""
        self._stack.__exit__(type(error), error, error.__traceback__)


class TopicsExport:
    """One round of the export of many topics.

    Args:
        choose: Returns the engine for plans of this many bytes in this many ranges; called once, if there are any.
        advance: Gets the progress.
        report: Gets the outcome of each topic that had something to export, or failed, while it is open.
        backlog: Gets the messages of an open topic that wait for a turn, before each turn.
        open_topics: How many topics are open at most.
        turn_ranges: How many ranges a turn of the engine has at most.
    """

    def __init__(
        self,
        choose: Callable[[int, int], Engine],
        advance: Advance,
        report: Callable[[TopicOutcome], None],
        *,
        backlog: Callable[[str, int], None] = lambda topic, messages: None,
        open_topics: int = OPEN_TOPICS,
        turn_ranges: int = TURN_RANGES,
    ) -> None:
        self._open_topics = open_topics
        self._turn_ranges = turn_ranges
        self._choose = choose
        self._advance = advance
        self._report = report
        self._backlog = backlog
        self._engine: Engine | None = None
        self._open: dict[str, _OpenTopic] = {}
        self._plan = secrets.token_hex(4)
        self._unreachable: dict[str, Exception] = {}
        self._heard: set[str] = set()  # where logs were asked in this round

    def run(self, sources: Sequence[TopicSource]) -> None:
        """Export the topics. What fails is in the outcome of its topic.

        Raises:
            NSQError, OSError: The engine failed; the next run continues.
        """
        left = deque(sources)
        try:
            while left or self._open:
                while left and (free := self._open_topics - len(self._open)):
                    self._open_all([left.popleft() for _ in range(min(free, len(left)))])
                planned = len(sources) - len(left)
                self._end_finished()
                for topic, each in self._open.items():
                    self._backlog(topic, sum(task.messages for task in each.waiting))
                if turn := self._next_turn():
                    if self._engine is None:
                        self._engine = self._choose(*self._estimate(len(sources) / planned))
                    self._engine(turn, self._collect, self._advance)
                    self._end_finished()
        except BaseException as exc:
            self._abandon(exc)
            raise

    def _estimate(self, factor: float) -> tuple[int, int]:
        """Return the bytes and the ranges of all topics, from those that are open."""
        size = sum(each.job.result.planned_bytes for each in self._open.values())
        ranges = sum(len(each.waiting) + each.running for each in self._open.values())
        return int(size * factor), max(1, int(ranges * factor))

    # ------------------------------------------------------------------ opening

    def _open_all(self, sources: Sequence[TopicSource]) -> None:
        """Open those of the topics that have something to export."""
        for source in self._with_news(sources):
            outcome = TopicOutcome(source)
            try:
                opened = _OpenTopic(source, self._unreachable)
            except (NSQError, OSError) as exc:
                outcome.error = exc
                self._report(outcome)
                continue
            self._open[source.request.topic] = opened
            try:
                opened.begin(opened.job.plan(source.places), self._plan)
            except (NSQError, OSError) as exc:
                opened.fail(exc)

    def _with_news(self, sources: Sequence[TopicSource]) -> list[TopicSource]:
        """Return the topics that may have something new: that needs neither their lock nor their manifest."""
        known = {  # the logs of the topics that were exported completely before
            (source.request.topic, place.where): (source, place)
            for source in sources
            if source.memory.ends.keys() >= {place.where for place in source.places}
            for place in source.places
        }
        # One question to each broker first: if it does not answer, the others would wait for it as long.
        first = {where: (topic, where) for topic, where in known if where not in self._heard}
        answers = self._bounds_of(known, first.values())
        for where, key in first.items():
            try:
                answers[key].result()
            except BrokerUnreachable as exc:
                self._unreachable[where] = exc
            except (KeyError, NSQError, OSError):
                pass  # see below
            self._heard.add(where)
        answers |= self._bounds_of(known, [key for key in known if key not in answers])
        idle = {topic for topic, _ in known}
        for (topic, where), (source, _) in known.items():
            try:
                bounds = answers[topic, where].result()
                is_idle = source.memory.ends[where] == (bounds.incarnation, bounds.at)
            except BrokerUnreachable as exc:
                self._unreachable[where], is_idle = exc, False
            except (KeyError, NSQError, OSError):
                is_idle = False
            if not is_idle:
                idle.discard(topic)
        return [source for source in sources if source.request.topic not in idle]

    def _bounds_of(
        self,
        known: Mapping[tuple[str, str], tuple[TopicSource, LogPlace]],
        keys: Iterable[tuple[str, str]],
    ) -> dict[tuple[str, str], Future[Bounds]]:
        """Ask for the bounds of these logs, except at brokers that do not answer."""
        return start_all(
            lambda key: known[key][1].open().bounds(),
            [key for key in keys if key[1] not in self._unreachable],
            at_most=_QUESTIONS,
        )

    # ------------------------------------------------------------------ turns

    def _next_turn(self) -> list[Task[tuple[str, RangeResult | Skipped | NSQError | OSError]]]:
        """Deal out the ranges of a turn, one of each open topic, and again until it is full."""
        turn: list[Task[tuple[str, RangeResult | Skipped | NSQError | OSError]]] = []
        while len(turn) < self._turn_ranges:
            having = [each for each in self._open.values() if each.waiting]
            if not having:
                break
            for each in islice(having, self._turn_ranges - len(turn)):
                turn.append(_Guarded(each.waiting.popleft()))
                each.running += 1
        return turn

    def _collect(self, found: tuple[str, RangeResult | Skipped | NSQError | OSError]) -> None:
        topic, outcome = found
        self._open[topic].collect(outcome)

    def _end_finished(self) -> None:
        """Bring the results of the topics that have no more ranges into their manifests and tables, and close them."""
        for topic, each in list(self._open.items()):
            if each.waiting or each.running:
                continue
            try:
                each.job.reconcile()
                if each.outcome.error is None:
                    if again := each.job.to_repeat():
                        each.begin(again, self._plan)
                        continue
                    each.job.complete()
            except (NSQError, OSError) as exc:
                each.fail(exc)
            del self._open[topic]
            try:
                each.end(self._report)
            except (NSQError, OSError) as exc:
                if each.outcome.error is None:  # the result is reported; the next run reports its gaps again
                    self._report(TopicOutcome(each.outcome.source, error=exc))

    def _abandon(self, error: BaseException) -> None:
        """Keep what is done of the open topics, and release their locks."""
        for each in self._open.values():
            try:
                each.job.reconcile()
            except (NSQError, OSError) as exc:
                each.fail(exc)
            if isinstance(error, Exception):
                each.outcome.error = each.outcome.error or error
            else:
                each.outcome.is_interrupted = bool(each.waiting or each.running)
            each.outcome.result = each.job.result
            with suppress(NSQError, OSError):  # of the removal of unfinished files
                each.abandon(error)
            if each.outcome.result.ranges:
                self._report(each.outcome)
        self._open.clear()
