"""Runs `pipeline run`: one export of all declared tables, while this process has the lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from trio_nsq.client.http.job_reporter import JobReporter
from trio_nsq.spark.places import storage_at
from trio_nsq.storage import Lease, LeaseLost, StorageError

from ...framework.errors import ExitCode, Terminated
from ...framework.output import print_diagnostic
from ..shared.engine import library_errors
from ..shared.job_reports import job_reports
from ..shared.places import without_secrets
from ..to_parquet.brokers import when_refused
from ..to_parquet.monitoring import Monitoring
from ..to_parquet.topics_run import TopicsRun
from .declared_topics import DeclaredTopics
from .sections import TableSections

_LEASE = "pipeline.lock"
_POLL_S = 1.0
_RETRY_S = 5.0


class _Held(StorageError):
    """Another process has the lease; the text says which."""


def supervise(sections: TableSections, lease: str | None, config: Path | None) -> int:
    """Write the declared tables until interrupted, and return the exit code.

    Args:
        lease: Where the lease is; None: there is none.
        config: For the name of the job.

    Raises Failure: the status cannot be served, or an option cannot be used.
    """
    name = "declared tables" + (f" ({config.name})" if config else "")
    monitoring = Monitoring(sections.options, name, "pipeline")
    supervisor = _Supervisor(sections, None if lease is None else without_secrets(lease), monitoring)
    reports = job_reports((), "pipeline", "", monitoring.reported, name=name)
    with library_errors(when_refused):
        try:
            with monitoring.serving(), reports as supervisor.reporter:
                supervisor.follow()
        except (KeyboardInterrupt, Terminated) as stop:
            if supervisor.run is not None:
                supervisor.run.conclude()
            return ExitCode.INTERRUPTED if isinstance(stop, KeyboardInterrupt) else ExitCode.TERMINATED


class _Supervisor:
    """Runs exports one after the other: a new one each time that it gets the lease.

    Attributes:
        run: The current run, or the last one; None: there was none.
        reporter: Reports to the brokers.
    """

    reporter: JobReporter

    def __init__(self, sections: TableSections, lease: str | None, monitoring: Monitoring) -> None:
        self.run: TopicsRun | None = None
        self._options = sections.options
        self._topics = DeclaredTopics(sections)
        self._lease = lease
        self._monitoring = monitoring

    def follow(self) -> NoReturn:
        while True:
            with self._active() as check, ExitStack() as stack:
                self.run = TopicsRun(self._options, self._topics, stack, self._monitoring, check)
                self.run.reporter = self.reporter
                try:
                    self.run.follow(self._options.every_ms / 1000)
                except LeaseLost as lost:
                    print_diagnostic(f"Warning: {lost}. Waiting for the lease.")

    @contextmanager
    def _active(self) -> Iterator[Callable[[], None]]:
        """Wait for the lease and hold it; yield what raises LeaseLost when this process may have lost it."""
        if self._lease is None:
            yield lambda: None
            return
        storage, told = storage_at(self._lease), ""
        while True:
            with ExitStack() as stack:
                try:
                    held = stack.enter_context(storage.hold(_LEASE, _Held))
                except (StorageError, OSError) as error:
                    told, pause_s = self._tell_waiting(error, told), _POLL_S
                    if not isinstance(error, _Held):
                        pause_s = _RETRY_S
                    self._monitoring.status.begin_round((), time.monotonic())
                    time.sleep(pause_s)
                    continue
                if told and not self._options.quiet:
                    print_diagnostic("Note: this process has the lease now, and writes.")
                yield partial(_check, held)
                return

    def _tell_waiting(self, error: Exception, told: str) -> str:
        """Report once why this process waits, and return it."""
        if isinstance(error, _Held):
            text = f"Note: {error} has the lease and writes; waiting for it."
        else:
            text = f"Warning: the lease cannot be used: {error}; retrying."
        if text != told and not (self._options.quiet and isinstance(error, _Held)):
            print_diagnostic(text)
        return text


def _check(lease: Lease) -> None:
    """Raises LeaseLost, also if the store does not answer: then another process may have the lease."""
    try:
        lease.check()
    except LeaseLost:
        raise
    except StorageError as error:
        raise LeaseLost(str(error)) from error
