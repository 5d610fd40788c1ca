"""One run of `to-parquet`: the brokers, rounds, the choice of an engine, progress, errors and the report."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NoReturn

from trio_nsq.bodies.errors import RegistryUnavailable
from trio_nsq.client.errors import BrokerUnreachable, RequestRefused
from trio_nsq.client.http.job_reporter import JobReporter
from trio_nsq.protocol.errors import NSQError
from trio_nsq.spark.export.job import ExportJob
from trio_nsq.spark.export.request import ExportResult
from trio_nsq.spark.export.status import ExportStatus
from trio_nsq.spark.export.task import ExportTask
from trio_nsq.spark.logs import LogPlace
from trio_nsq.spark.runtime.engine import Engine
from trio_nsq.spark.runtime.processes import ProcessDied
from trio_nsq.spark.tables.target import TableUnavailable
from trio_nsq.storage import StorageError
from trio_nsq.text.wording import count_of

from ...broker.topic_log import report_gap
from ...framework.errors import ExitCode, Failure, Terminated
from ...framework.output import json_lines, print_diagnostic, write
from ...terminal.progress import message_progress
from ..shared.engine import better_engine, local_engine, spark_engine, useful_processes
from .brokers import GO_ON, NoBrokerKnown, find_brokers, incomplete, is_temporary, may_pass
from .monitoring import Monitoring
from .options import ToParquetOptions
from .reports import json_record, loss_code, print_notes, summary

_SPARK_CORES = 4
"""With fewer cores, an export in this process is faster than one on Spark: `bench/export.py` has 2."""
RETRY_S = 5.0
"""The maximum time from the start of a failed round to the next round."""


class ExportRun:
    """One run of the command; the caller closes the stack at its end.

    Attributes:
        monitoring: Counts what it does.
        reporter: Reports to the brokers, also to those that come later; None: it does not.
        code: The exit code, once everything is exported and reported.
    """

    def __init__(self, job: ExportJob, options: ToParquetOptions, stack: ExitStack) -> None:
        self.job = job
        self.monitoring = Monitoring(options, f"{options.topic} to {options.folder}")
        self.reporter: JobReporter | None = None
        self.code: ExitCode | None = None
        self._options = options
        self._stack = stack
        self._engine_name = ""
        self._engine: Engine | None = None
        self._gaps_reported = 0
        self._damage_reported: set[str] = set()
        self._rounds_reported = 0
        self._heading = ""
        self._masks = job.request.layout.masks
        self._begun_s = time.monotonic()
        self._failing: set[str] = set()  # labels of brokers whose failure was told

    def once(self, addresses: Sequence[str]) -> int:
        try:
            self._all(addresses)
        except Exception as error:
            if _wrote_nothing(error, self.job.result):
                raise
            raise self._partial(error) from error
        failures = self.job.failures
        if len(failures) == len(addresses) and self.job.result.ranges == 0:
            raise next(iter(failures.values()))
        self.report()
        for label, messages in self.job.left_elsewhere.items():
            print_diagnostic(
                f"Warning: an earlier run planned {count_of(messages, 'message')} of {label}, which are not in files "
                "yet. Run it with this broker again."
            )
        if failures:
            raise incomplete(failures.values(), others=len(failures) < len(addresses))
        result = self.job.result
        self.code = loss_code(result)
        try:
            self.job.mark_reported(result)
        except (NSQError, OSError) as error:
            raise incomplete([error]) from error
        return self.code

    def follow(self, addresses: Sequence[str], every_s: float) -> NoReturn:
        """Export in rounds until interrupted; then the text report is the total of all rounds."""
        begun_s, total = time.monotonic(), ExportResult()
        try:
            self._rounds(addresses, every_s, total)
        except (KeyboardInterrupt, Terminated):
            several = self._rounds_reported > 1 or (self._rounds_reported and self._is_news())
            # Not in JSON: a program that adds up the rounds would count everything twice.
            if several and self._options.form != "json":
                total.merge(self.job.result)
                self.job.result, self._begun_s, self._rounds_reported = total, begun_s, 0
                self._heading = "Total: "
            raise
        except Exception as error:
            if _wrote_nothing(error, total, self.job.result):
                raise
            raise self._partial(error) from error

    def _rounds(self, addresses: Sequence[str], every_s: float, total: ExportResult) -> NoReturn:
        """Export in rounds. A temporary failure is reported once, and the round is repeated."""
        failing = broken = worked = False
        told = ""
        while True:
            begun_s = self._begun_s = time.monotonic()
            self._status.begin_round([self.job.request.topic], begun_s)
            problem = ""
            try:
                self._round(addresses)
                problem = "; ".join(map(str, self.job.failures.values()))
                failing = self._tell_failures(addresses, worked=worked)
                if broken:
                    print_diagnostic("Note: the export continues.")
                broken, worked = False, worked or not failing
            except (
                BrokerUnreachable,
                RequestRefused,
                TableUnavailable,
                RegistryUnavailable,
                StorageError,
            ) as error:
                if not (is_temporary(error) or (worked and may_pass(error))):
                    raise
                if not broken:
                    print_diagnostic(f"Warning: {error}; retrying.")
                failing = broken = True
                problem = str(error)
            outcome = self.job.result
            # A failed round is retried soon, and then reports missing messages.
            is_due = outcome.ranges or (not failing and (outcome.missing or not self._rounds_reported))
            if is_due or not outcome.missing:
                self.job.result, self._gaps_reported = type(total)(), 0
                total.merge(outcome)
            counted = (
                ExportResult() if self.job.result is outcome else outcome
            )  # it is counted when it is reported
            self._status.end_topic(self.job.request.topic, counted, problem, waiting=self.job.waiting)
            self._status.end_round(time.monotonic(), time.time())
            if is_due:
                # Before the report, so that an interruption does not report the round again.
                self._rounds_reported += 1
                self.report(outcome)
                with suppress(StorageError, OSError):  # the next round repeats it
                    self.job.mark_reported(total)
            self._pause(begun_s + (min(every_s, RETRY_S) if failing else every_s), failing)
            try:
                # A broker that is down is forgotten by discovery services, and still has messages to export.
                addresses = sorted({*addresses, *find_brokers(self._options)})
                if self.reporter is not None:
                    self.reporter.addresses = addresses
                told = ""
            except NoBrokerKnown:
                pass  # the topic does not exist yet
            except Failure as failure:  # keep the known addresses
                if str(failure) != told:
                    print_diagnostic(f"Warning: {failure}")
                told = str(failure)

    def _tell_failures(self, addresses: Sequence[str], *, worked: bool) -> bool:
        """Tell once which brokers do not answer, and when they do again. Return whether none can be exported.

        Args:
            worked: Whether a round has succeeded before.

        Raises:
            NSQError: A log cannot be exported, and waiting does not help.
        """
        failures = self.job.failures
        for error in failures.values():
            if not (is_temporary(error) or (worked and may_pass(error))):
                raise error
        for label in sorted(self._failing - failures.keys()):
            print_diagnostic(f"Note: the broker at {label} answers; the export continues with it.")
        others = "; the others are exported" if len(failures) < len(addresses) else ""
        for label in sorted(failures.keys() - self._failing):
            print_diagnostic(f"Warning: {failures[label]}{others}; retrying.")
        self._failing = set(failures)
        return len(failures) == len(addresses)

    def _pause(self, until_s: float, failing: bool) -> None:
        """Wait until a time of the monotonic clock; `failing` says whether the last round failed."""
        time.sleep(max(0.0, until_s - time.monotonic()))

    def _all(self, addresses: Sequence[str]) -> None:
        self._round(addresses)

    def _round(self, addresses: Sequence[str]) -> None:
        self._export([self._options.place(address) for address in addresses])

    def _export(self, places: Sequence[LogPlace]) -> None:
        tasks = self.job.plan(places)
        self._report_gaps()
        if not tasks:
            self.job.run(lambda *_: None, [], lambda *_: None)
            return
        engine = self._engine or self._choose(tasks)
        messages = sum(task.span.length for task in tasks)
        progress = self.monitoring.progress
        if self._options.interval_s is None:
            progress.total = (progress.total or 0) + messages
        self._status.note_backlog(self.job.request.topic, messages)
        with message_progress(messages, self._options.quiet) as show:
            self.job.run(engine, tasks, progress.and_then(show))
        self._report_gaps()

    def _choose(self, tasks: Sequence[ExportTask]) -> Engine:
        """Return the engine of this and all later rounds."""
        planned = self.job.result.planned_bytes
        self._engine_name, self._engine = choose_engine(self._options, self._stack, planned, len(tasks))
        return self._engine

    def _report_gaps(self) -> None:
        gaps = self.job.result.gaps
        for broker, first, end, reason in gaps[self._gaps_reported :]:
            report_gap(f"{self.job.request.topic} on {broker}", first, end, reason)
        self._gaps_reported = len(gaps)
        for damage in self.job.result.unread:
            if damage not in self._damage_reported:
                print_diagnostic(unread_warning(damage))
        self._damage_reported = set(self.job.result.unread)

    @property
    def _status(self) -> ExportStatus:
        return self.monitoring.status

    def _is_news(self) -> bool:
        """Return whether the result has ranges or missing messages."""
        return bool(self.job.result.ranges or self.job.result.missing)

    def conclude(self) -> None:
        """Report after an interruption, unless the last round's report has the same numbers; say how to continue."""
        if self._is_news() or not self._rounds_reported:
            self.report()
        if not self._options.quiet:
            print_diagnostic(GO_ON)

    def report(self, outcome: ExportResult | None = None) -> None:
        """Report the current result, or that of a finished round."""
        outcome, request = outcome or self.job.result, self.job.request
        elapsed_s = time.monotonic() - self._begun_s
        if self._options.form == "json":
            record = json_record(request, outcome, self._engine_name, elapsed_s, self.job.failures)
            write(json_lines([record]))
        elif not self._options.quiet:
            print_diagnostic(self._heading + summary(request, outcome, elapsed_s))
        print_notes(outcome, masks=self._masks, quiet=self._options.quiet)
        self._masks = () if outcome.messages else self._masks  # once in a continuous export

    def _partial(self, error: Exception) -> Failure:
        """Return the failure after a part of the export was written."""
        self._report_gaps()
        if self._is_news():  # else an earlier round has reported everything
            self.report()
        return incomplete([error])


def _wrote_nothing(error: Exception, *results: ExportResult) -> bool:
    """Whether no file was written before an error. A process may have written one before it was killed."""
    return not isinstance(error, ProcessDied) and all(result.ranges == 0 for result in results)


def unread_warning(damage: str) -> str:
    """Return the warning of a damaged object of an archive."""
    return (
        f"Warning: {damage}. Messages behind it are exported when the broker has written its next checkpoint."
    )


def choose_engine(
    options: ToParquetOptions, stack: ExitStack, planned_bytes: int, ranges: int
) -> tuple[str, Engine]:
    """Return the name of an engine, and the engine, until the end of the stack."""
    wanted, processes, why = options.engine, options.processes, ""
    if wanted == "auto" and processes is not None:
        wanted = "inline"
    elif wanted == "auto":
        wanted, why = better_engine(planned_bytes, ranges, "range", _SPARK_CORES)
    if why and not options.quiet:
        print_diagnostic(f"Note: engine {wanted}: {why}.")
    if wanted == "inline":
        if processes is None:
            processes = useful_processes(planned_bytes, ranges)
        return wanted, local_engine(stack, processes)
    return wanted, stack.enter_context(spark_engine(options.master))
