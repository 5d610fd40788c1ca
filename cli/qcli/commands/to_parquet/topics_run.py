"""Runs `to-parquet` for several topics, with one engine, one schedule, one report and one exit code."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NoReturn, Protocol

import click

from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.client.http.job_reporter import JobReporter
from trio_nsq.protocol.errors import NSQError
from trio_nsq.spark.export.backoff import Backoff
from trio_nsq.spark.export.request import ExportResult
from trio_nsq.spark.export.topics import TopicOutcome, TopicsExport, TopicSource
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import Engine
from trio_nsq.spark.runtime.processes import ProcessDied
from trio_nsq.text.wording import count_of

from ...broker.brokers import combined
from ...broker.topic_log import report_gap
from ...framework.errors import ExitCode, Failure, Terminated
from ...framework.output import json_lines, plain_table, print_diagnostic, size, write, write_lines
from ...terminal.progress import message_progress
from ..shared.engine import failure_from, library_errors
from ..shared.job_reports import job_reports
from .brokers import GO_ON, incomplete, is_temporary, note_new_channel, when_refused
from .export_run import RETRY_S, choose_engine, unread_warning
from .monitoring import Monitoring
from .options import ToParquetOptions
from .pipeline import Pipeline
from .reports import LOSS_CODES, json_record, loss_code, print_notes, summary, totals
from .topic_finder import TopicFinder, TopicSection


def export_pipeline(options: ToParquetOptions, pipeline: Pipeline) -> int:
    """Export what a configuration file describes, or with --check-config print it. See `export_topics`."""
    sections = pipeline.open(click.get_current_context())
    if options.check_config:
        write_lines(pipeline.lines())
        return ExitCode.OK
    options = dataclasses.replace(options, engine=sections[0].options.engine)  # it is the same in all
    return export_topics(options, sections, f"topics of {pipeline.path.name}")


def export_topics(options: ToParquetOptions, sections: Sequence[TopicSection], name: str) -> int:
    """Export once or until interrupted, and return the exit code.

    Args:
        options: Those of the whole command.
        sections: The topics.
        name: What people call the job.

    Raises Failure: the export is incomplete.
    """
    with library_errors(when_refused), ExitStack() as stack:
        run = TopicsRun(options, TopicFinder(sections), stack, Monitoring(options, name))
        reports = job_reports((), "to-parquet", "", run.monitoring.reported, name=name)
        try:
            with run.monitoring.serving(), reports as run.reporter:
                if options.interval_s is None:
                    return run.once()
                run.follow(options.interval_s)
        except (KeyboardInterrupt, Terminated) as stop:
            run.conclude()
            return ExitCode.INTERRUPTED if isinstance(stop, KeyboardInterrupt) else ExitCode.TERMINATED


class Finder(Protocol):
    """Finds the topics of a run, each time anew; see `TopicFinder`."""

    failures: dict[str, Failure]
    without_broker: list[str]

    def find(self) -> list[TopicSource]:
        """Return the topics. Raises as `TopicFinder.find`."""

    def options_of(self, topic: str) -> ToParquetOptions:
        """Return the options of a topic that was found."""


class TopicsRun:
    """One run of the command; the caller closes the stack at its end.

    Args:
        check: Supervise the topics: go on also if all of them fail, leave out those that fail again and again, and
            begin a round as soon as the topics change. It is called before each round and each search for topics, and
            ends the run with the error that it raises. None: do not.

    Attributes:
        monitoring: Counts what it does.
        reporter: Reports to the brokers of each round.
    """

    reporter: JobReporter

    def __init__(
        self,
        options: ToParquetOptions,
        finder: Finder,
        stack: ExitStack,
        monitoring: Monitoring,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.monitoring = monitoring
        self._options = options
        self._stack = stack
        self._finder = finder
        self._check = check
        self._backoff = Backoff(options.every_ms / 1000)
        self._sources: list[TopicSource] = []
        self._find_s = 0.0  # when to look for topics again
        self._problems: list[str] = []  # of the last search for topics
        self._warnings_of: dict[str, dict[str, str]] = {}  # of each topic, in the last round that had it
        self._engine: Engine | None = None
        self._engine_name = ""
        self._begun_s = self._round_s = time.monotonic()
        self._total: dict[str, ExportResult] = {}
        self._has_worked = False  # a topic was exported, in part at least
        self._ends: dict[str, Failure | ExitCode] = {}  # of each topic in this round
        self._temporary: set[str] = set()  # topics of this round that may succeed later
        self._warnings: dict[str, str] = {}  # of this round, each with the broker that does not answer
        self._noted: set[str] = set()  # topics whose new channel was noted
        self._damages: set[str] = set()  # that were reported

    def once(self) -> int:
        self._round(self._finder.find())
        self._print_table()
        for topic in self._finder.without_broker:
            self._ends[topic] = Failure(f"The discovery services know no broker with topic {topic}.")
        failures = [end for end in self._ends.values() if isinstance(end, Failure)]
        failures += self._finder.failures.values()
        codes = {end for end in self._ends.values() if not isinstance(end, Failure)}
        if failures:
            partial = bool(codes) or any(result.ranges for result in self._total.values())
            raise combined(failures, partial=partial)
        if not self._ends:
            print_diagnostic("Note: no topic matches.")
        return next((code for code in LOSS_CODES if code in codes), ExitCode.OK)

    def follow(self, every_s: float) -> NoReturn:
        """Export in rounds until interrupted. A topic or a broker that fails is reported once, and tried again.

        Raises Failure: nothing can be exported, and waiting does not help.
        """
        told: dict[str, str] = {}
        while True:
            begun_s = time.monotonic()
            self._check_supervision()
            if begun_s >= self._find_s or not self._sources:
                self._find()
            sources = self._sources
            self._warnings = dict.fromkeys(self._problems, "")
            self._round(sources)
            self.monitoring.status.end_round(time.monotonic(), time.time(), self._problems)
            failures = [end for end in self._ends.values() if isinstance(end, Failure)]
            has_failed = bool(failures) and len(failures) == len(sources) and not self._temporary
            if has_failed and not self._has_worked and self._check is None:
                raise combined(failures, partial=False)
            for text, broker in told.items():
                if broker and text not in self._warnings and broker not in self._warnings.values():
                    print_diagnostic(f"Note: the broker at {broker} answers; the export continues with it.")
            for text in self._warnings.keys() - told.keys():
                print_diagnostic(f"Warning: {text.rstrip('.')}; retrying.")
            told = dict(self._warnings)
            is_failing = bool(self._warnings) and (not sources or len(failures) == len(sources))
            self._pause(begun_s + (min(every_s, RETRY_S) if is_failing else every_s))

    def _find(self) -> None:
        """Look for topics; if nothing answers, the known ones remain. Raises Failure: waiting does not help."""
        self._find_s = time.monotonic() + self._options.topic_refresh_ms / 1000
        try:
            self._sources = self._finder.find()
            self._problems = [each.brief for each in self._finder.failures.values()]
        except (Failure, NSQError, OSError) as error:
            if isinstance(error, Failure) and error.exit_code is not ExitCode.UNREACHABLE:
                raise
            self._problems = [failure_from(error, when_refused).brief]

    def _pause(self, until_s: float) -> None:
        """Wait for the next round; under supervision, it begins when the topics or their places have changed."""
        while (left_s := until_s - time.monotonic()) > 0:
            if self._check is None:
                time.sleep(left_s)
                return
            time.sleep(max(0.0, min(left_s, self._find_s - time.monotonic())))
            if time.monotonic() < self._find_s:
                continue
            self._check()
            before, problems = {_key(source) for source in self._sources}, self._problems
            self._find()
            if before != {_key(source) for source in self._sources} or problems != self._problems:
                return

    def _check_supervision(self) -> None:
        if self._check is not None:
            self._check()

    def conclude(self) -> None:
        """Report the total after an interruption, and say how to continue."""
        self._print_table()
        if not self._options.quiet:
            print_diagnostic(GO_ON)

    # ------------------------------------------------------------------ a round

    def _round(self, sources: Sequence[TopicSource]) -> None:
        self._ends, self._temporary = {}, set()
        self._round_s = time.monotonic()
        self.monitoring.status.begin_round((source.request.topic for source in sources), self._round_s)
        sources = self._due(sources)
        addresses = {
            source.request.topic: [place.address for place in source.places if isinstance(place, BrokerPlace)]
            for source in sources
        }
        self.reporter.addresses = list(dict.fromkeys(each for found in addresses.values() for each in found))
        self._note_channels(sources)
        try:
            with message_progress(None, self._options.quiet) as show:
                advance = self.monitoring.progress.and_then(show)
                backlog = self.monitoring.status.note_backlog
                TopicsExport(self._choose, advance, self._report, backlog=backlog).run(sources)
        except (NSQError, OSError) as error:
            self._print_table()
            if isinstance(error, ProcessDied) or any(result.ranges for result in self._total.values()):
                raise incomplete([error]) from error
            raise

    def _due(self, sources: Sequence[TopicSource]) -> Sequence[TopicSource]:
        """Leave out the topics that fail again and again; their warnings remain."""
        if self._check is None:
            return sources
        due = [source for source in sources if self._backoff.is_due(_key(source), self._round_s)]
        names = {source.request.topic for source in due}
        for topic in {source.request.topic for source in sources} - names:
            self._warnings |= self._warnings_of.get(topic, {})
            self.monitoring.status.leave_out(topic)
        return due

    def _note_channels(self, sources: Sequence[TopicSource]) -> None:
        """Note the first time that a topic's channel begins after its messages: not of logs that came later."""
        addresses = {
            source.request.topic: [
                place.address
                for place in source.places
                if isinstance(place, BrokerPlace)
                and (not source.memory.has_planned or place.where in source.memory.seen)
            ]
            for source in sources
            if source.request.topic not in self._noted and source.request.has_position_of_channel
        }
        by_channel: dict[str, tuple[ToParquetOptions, dict[str, list[str]]]] = {}
        for topic, found in addresses.items():
            options = self._finder.options_of(topic)
            by_channel.setdefault(options.channel or "", (options, {}))[1][topic] = found
        for options, new in by_channel.values():
            note_new_channel(options, new)
        self._noted.update(addresses)

    def _choose(self, planned_bytes: int, ranges: int) -> Engine:
        if self._engine is None:
            self._engine_name, self._engine = choose_engine(self._options, self._stack, planned_bytes, ranges)
        return self._engine

    def _report(self, outcome: TopicOutcome) -> None:
        """Report how the export of a topic ended in this round."""
        topic, result = outcome.topic, outcome.result
        self.monitoring.status.end_topic(
            topic,
            result,
            "; ".join(dict.fromkeys(self._brief(topic, error) for error in outcome.errors)),
            waiting=outcome.waiting,
        )
        end = self._ends[topic] = self._end_of(outcome)
        self._note_failure(outcome)
        self._has_worked |= bool(result.ranges) or not isinstance(end, Failure)
        is_news = bool(result.ranges or result.missing)
        if is_news or topic not in self._total:
            self._total.setdefault(topic, ExportResult()).merge(result)
        for broker, first, stop, reason in result.gaps:
            report_gap(f"{topic} on {broker}", first, stop, reason)
        for damage in set(result.unread) - self._damages:
            print_diagnostic(unread_warning(damage))
        self._damages.update(result.unread)
        for label, messages in outcome.left_elsewhere.items():
            if not self._options.follow:
                print_diagnostic(
                    f"Warning: an earlier run planned {count_of(messages, 'message')} of {topic} on {label}, which "
                    "are not in files yet. Run it with this broker again."
                )
        elapsed_s = time.monotonic() - self._round_s
        if self._options.form == "json":
            if is_news or not self._options.follow:
                request = outcome.source.request
                record = json_record(request, result, self._engine_name, elapsed_s, outcome.failures)
                record["error"] = end.brief if isinstance(end, Failure) else None
                record["exit_code"] = int(end.exit_code if isinstance(end, Failure) else end)
                write(json_lines([record]))
        elif self._options.follow and is_news and not self._options.quiet:
            print_diagnostic(summary(outcome.source.request, result, elapsed_s))
        is_first = (
            self._total.get(topic, result).messages == result.messages
        )  # a rare field is not in each round
        masks = outcome.source.request.layout.masks if is_first else ()
        print_notes(result, topic, masks, quiet=self._options.quiet)

    def _end_of(self, outcome: TopicOutcome) -> Failure | ExitCode:
        """Return the failure of a topic, or its exit code; note what to warn of in a continuous export."""
        topic, result = outcome.topic, outcome.result
        errors = outcome.errors
        if errors:
            for error in errors:
                address = error.address if isinstance(error, BrokerUnreachable) else ""
                self._warnings[self._brief(topic, error)] = address
            if all(is_temporary(error) for error in errors):
                self._temporary.add(topic)
            wrote = result.ranges or (outcome.failures and len(outcome.failures) < len(outcome.source.places))
            failure = incomplete(errors) if wrote else failure_from(errors[0], when_refused)
            # Of a broker that does not answer, one report is enough for all topics.
            is_of_broker = all(isinstance(error, BrokerUnreachable) for error in errors)
            brief = failure.brief if is_of_broker else self._named(topic, failure.brief)
            return Failure(brief, failure.exit_code, brief=brief)
        if outcome.is_interrupted:
            return Failure(f"{topic}: interrupted", ExitCode.PARTIAL)
        return loss_code(result)

    def _note_failure(self, outcome: TopicOutcome) -> None:
        key, topic = _key(outcome.source), outcome.topic
        self._warnings_of[topic] = {
            text: self._warnings[text]
            for error in outcome.errors
            if (text := self._brief(topic, error)) in self._warnings
        }
        # A broker that does not answer says nothing about the topic, and costs one question.
        if any(not isinstance(error, BrokerUnreachable) for error in outcome.errors):
            self._backoff.failed(key, self._round_s)
        else:
            self._backoff.succeeded(key)

    def _brief(self, topic: str, error: Exception) -> str:
        """Return an error of a topic; of a broker that does not answer, it is the same for all topics."""
        brief = failure_from(error, when_refused).brief
        return brief if isinstance(error, BrokerUnreachable) else self._named(topic, brief)

    @staticmethod
    def _named(topic: str, text: str) -> str:
        has_name = re.search(rf"(?<![\w.-]){re.escape(topic)}(?![\w-])", text)
        return text if has_name else f"{topic}: {text}"

    # ------------------------------------------------------------------ the report of all rounds

    def _print_table(self) -> None:
        """Print a row for each topic, and the sum."""
        if self._options.form == "json" or self._options.quiet or not self._total:
            return
        rows = [["TOPIC", "RESULT", "MESSAGES", "SIZE", "FILES", "FILE SIZE"]]
        for topic, result in sorted(self._total.items()):
            numbers = (
                f"{result.messages:,}",
                size(result.body_bytes),
                f"{result.files:,}",
                size(result.file_bytes),
            )
            rows.append([topic, self._result_of(topic, result), *numbers])
        print_diagnostic(plain_table(rows, 2).rstrip("\n"))
        print_diagnostic(totals(self._total.values(), time.monotonic() - self._begun_s))

    def _result_of(self, topic: str, result: ExportResult) -> str:
        end = self._ends.get(topic, ExitCode.OK)
        if isinstance(end, Failure):
            return "incomplete" if end.exit_code is ExitCode.PARTIAL else "failed"
        if result.damaged or result.unread:
            return "damaged"
        return "missing" if result.missing else "exported" if result.ranges else "nothing new"


def _key(source: TopicSource) -> tuple[str, str, str]:
    """Identify a topic and where it goes."""
    request = source.request
    return request.topic, request.place, str(request.table)
