"""`replay` of Parquet files: the job, the choice of an engine, progress and the report."""

import dataclasses
import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from trio_nsq.client.http.job_reporter import JobProgress
from trio_nsq.spark.options import BrokerAccess
from trio_nsq.spark.replay.job import ReplayJob, RowSelector, open_job, remove_old_jobs
from trio_nsq.spark.replay.request import ReplayRequest, ReplayResult
from trio_nsq.spark.runtime.engine import Engine
from trio_nsq.spark.runtime.spark_engine import SparkEngine
from trio_nsq.text.wording import count_of

from ...broker.connection_options import ConnectOptions, refuse_plain_http
from ...framework.errors import ExitCode, Failure, Terminated
from ...framework.output import json_lines, print_diagnostic, rate, size, with_counts, write
from ...terminal.progress import message_progress
from ..shared.engine import better_engine, failure_from, library_errors, local_engine, spark_engine
from ..shared.job_reports import job_reports
from .options import ReplayOptions, default_jobs_folder

_FILTER_MEMORY = "2g"
"""The memory of Spark's JVM if it filters rows, in whole row groups."""


def replay_files(request: ReplayRequest | None, options: ReplayOptions) -> int:
    """Run a request, or, without one, the saved request of the job. Raises Failure: not all was published."""
    with library_errors(), ExitStack() as stack:
        jobs = options.jobs
        if options.dry_run:
            jobs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qcli-replay-")))
        else:
            remove_old_jobs(jobs, time.time())
        job = stack.enter_context(open_job(jobs, options.job, request, options.new_address()))
        return _FilesReplay(job, options, stack).run()


class _FilesReplay:
    """One run of the command; the caller closes the stack at its end."""

    def __init__(self, job: ReplayJob, options: ReplayOptions, stack: ExitStack) -> None:
        self._job = job
        self._options = options
        self._stack = stack
        connecting = ConnectOptions.of_command()
        self._access = BrokerAccess(connecting.tls_files(), connecting.secret)
        self._engine_name: str | None = None
        self._spark: SparkEngine | None = None
        self._begun_s = time.monotonic()

    def run(self) -> int:
        job, quiet = self._job, self._options.quiet
        if job.is_complete:
            if not quiet:
                print_diagnostic(f"Note: job {job.name} is complete: nothing to do.")
            return ExitCode.OK
        if not self._options.dry_run:
            self._check_broker()
            if not (job.is_new or self._options.allow_gaps):
                job.check_destination(publish_missing=self._options.publish_missing, access=self._access)
        self._plan()
        engine = self._choose_engine()
        local = self._spark is None or self._spark.is_local
        at_once = self._processes
        if self._spark is not None and self._engine_name == "spark":
            at_once = self._spark.slots
        tasks = job.tasks(at_once, save_results=local, dry_run=self._options.dry_run, access=self._access)
        self._begun_s = time.monotonic()
        progress = JobProgress(total=sum(task.messages for task in tasks))
        brokers = () if self._options.dry_run else (job.request.address,)
        name = f"{job.request.source} to {job.request.topic}"
        try:
            with (
                job_reports(brokers, "replay", job.request.topic, lambda: progress, name=name),
                message_progress(progress.total, quiet) as show,
            ):
                job.run(engine, tasks, progress.and_then(show))
        except (KeyboardInterrupt, Terminated) as stop:
            self._report()
            if not quiet and not self._options.dry_run:
                print_diagnostic(f"Resume with: {self._resume_command()}")
            return ExitCode.INTERRUPTED if isinstance(stop, KeyboardInterrupt) else ExitCode.TERMINATED
        except Exception as error:
            raise self._failure(error) from error
        self._report()
        return ExitCode.PARTIAL if job.result.too_long else ExitCode.OK

    def _check_broker(self) -> None:
        """Check early that the broker is reachable, and warn if it ignores numbered batches."""
        request = self._job.request
        refuse_plain_http(request.address)
        name = f"{self._job.name}:0"
        with self._access.producer(request.address, request.topic, name, patience_s=0) as publisher:
            publisher.last_number()
            if not publisher.remembers and not self._options.quiet:
                print_diagnostic(
                    f"Warning: the broker at {request.address} does not support numbered batches, as 'qcli "
                    "serve' does: delivery is at least once. Messages that are sent again are stored twice."
                )

    def _plan(self) -> None:
        job, quiet = self._job, self._options.quiet
        begins = job.is_new
        job.plan(self._row_selector() if begins and job.request.where is not None else None)
        if begins and not quiet and not self._options.dry_run:
            outcome = job.result
            what = f"{count_of(outcome.files, 'file')}, {count_of(outcome.pieces, 'piece')}"
            print_diagnostic(
                f"Note: job {job.name}: {what}. If it is interrupted, resume it: {self._resume_command()}"
            )

    def _row_selector(self) -> RowSelector:
        """Return the function that evaluates --where: DuckDB, unless Spark is asked for."""
        options = self._options
        if options.engine == "spark" or options.master is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
            from trio_nsq.spark.replay.spark_filter import select_rows_with_spark

            spark = self._open_spark(_FILTER_MEMORY)
            if not options.quiet:
                print_diagnostic("Note: Spark evaluates --where.")
            return partial(select_rows_with_spark, spark)
        try:
            import duckdb  # noqa: F401

            from trio_nsq.spark.replay.filter import select_rows_apart
        except ImportError as error:
            raise Failure(
                f"--where needs DuckDB, which is not installed ({error}): pip install duckdb. --match, --since and "
                "--until work without it."
            ) from error
        return select_rows_apart

    def _open_spark(self, memory: str = "512m") -> SparkEngine:
        self._spark = self._stack.enter_context(spark_engine(self._options.master, "qcli replay", memory))
        return self._spark

    @property
    def _processes(self) -> int:
        """How many processes publish without Spark; in order, only one can."""
        return 1 if self._job.request.ordered else self._options.processes or 1

    def _choose_engine(self) -> Engine:
        job, outcome = self._job, self._job.result
        wanted, why = "spark" if self._options.master is not None else self._options.engine, ""
        if job.request.ordered:
            wanted, why = "inline", "in order, only one process publishes" if wanted == "spark" else ""
        elif wanted == "auto" and (job.request.rate is not None or self._options.processes is not None):
            wanted = "inline"
        elif wanted == "auto":
            wanted, why = better_engine(job.size_bytes, outcome.pieces, "piece")
        if why and not self._options.quiet:
            print_diagnostic(f"Note: engine {wanted}: {why}.")
        self._engine_name = wanted
        if wanted == "inline":
            return local_engine(self._stack, self._processes)
        return self._spark or self._open_spark()

    def _resume_command(self) -> str:
        """Return the command line that resumes the job."""
        options = self._options
        words = ["qcli", "replay", "--job", self._job.name]
        if options.jobs != default_jobs_folder():
            words += ["--jobs-folder", str(options.jobs)]
        return shlex.join(words)

    def _failure(self, error: Exception) -> Failure:
        """Return the failure for an error while publishing, with the command line that resumes the job."""
        outcome = self._job.result
        self._report()
        if self._engine_name == "spark" and not self._options.quiet:
            print_diagnostic(
                "Note: this does not count messages that tasks published in the last two seconds."
            )
        failure = failure_from(error)
        text, code = failure.message, failure.exit_code
        # Lost tasks may have published messages that are not counted.
        if outcome.published or outcome.before or type(error).__name__ == "SparkFailed":
            code = ExitCode.PARTIAL
        return Failure(
            text if self._options.dry_run else f"{text} Resume with: {self._resume_command()}", code
        )

    def _report(self) -> None:
        outcome, options, request = self._job.result, self._options, self._job.request
        elapsed_s = time.monotonic() - self._begun_s
        for each in outcome.examples if not options.quiet else ():
            print_diagnostic(f"Note: longer than --max-msg-size and not published: {each}.")
        if options.form == "json":
            found = dataclasses.asdict(outcome)
            del found["examples"]
            head = {
                "job": None if options.dry_run else self._job.name,
                "source": request.source,
                "topic": request.topic,
                "engine": self._engine_name,
                "dry_run": options.dry_run,
            }
            write(json_lines([{**head, **found, "elapsed_s": round(elapsed_s, 3)}]))
        elif not options.quiet:
            print_diagnostic(_summary(request, outcome, elapsed_s, dry_run=options.dry_run))


def _summary(request: ReplayRequest, outcome: ReplayResult, elapsed_s: float, *, dry_run: bool) -> str:
    text = f"{count_of(outcome.published, 'message')} ({size(outcome.published_bytes)}) of {request.source} "
    if dry_run:
        text += f"would be published to {request.topic}"
    else:
        speed = rate(outcome.published / max(elapsed_s, 1e-6))
        text += f"published to {request.topic} in {elapsed_s:.2f} s: {speed} messages/s"
    return with_counts(
        text,
        (outcome.before, "{} published before by this job"),
        (outcome.left_out, "{} not selected"),
        (outcome.unmatched, "{} do not match"),
        (outcome.without_body, "{} without a body"),
        (outcome.too_long, "{} too long, and not published"),
        (outcome.maybe_twice, "{} sent twice, because an acknowledgement was lost"),
        (
            0 if dry_run else outcome.pieces - outcome.pieces_done,
            f"{{}} of {count_of(outcome.pieces, 'piece')} left",
        ),
    )
