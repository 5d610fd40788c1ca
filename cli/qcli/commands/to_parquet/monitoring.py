"""The status of a run of `to-parquet`, for `--http-address` and for the reports to brokers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trio_nsq.client.http.job_reporter import JobProgress
from trio_nsq.protocol.address import without_secrets
from trio_nsq.spark.export.status import ExportStatus

from ...framework.output import print_diagnostic

if TYPE_CHECKING:
    from trio_nsq.connectors.monitoring.status import JobStatus

    from .options import ToParquetOptions


class Monitoring:
    """Counts what a run does.

    Args:
        name: What people call the job.
        kind: The command.

    Attributes:
        progress: Messages written so far; without a total if the export goes on until it is stopped.
        status: What the rounds of a continuous export did.
    """

    def __init__(self, options: ToParquetOptions, name: str, kind: str = "to-parquet") -> None:
        self.progress = JobProgress()
        self.status = ExportStatus(
            without_secrets(name),
            time.time(),
            time.monotonic(),
            options.interval_s or 0.0,
            None if options.max_lag_ms is None else options.max_lag_ms / 1000,
            (options.max_age_ms or 0) / 1000,
            knows_lag=not options.consume,
            kind=kind,
        )
        self._options = options

    def snapshot(self) -> JobStatus:
        """Return the status now. Other threads may call it."""
        return self.status.snapshot(time.monotonic(), self.progress.done)

    def reported(self) -> JobProgress:
        """Return the progress for a report to the brokers; of a continuous export with its lag."""
        if self._options.follow:
            found = self.snapshot()
            self.progress.lag, self.progress.lag_s = found.lag, found.lag_s
            self.progress.failures = found.failures
            self.progress.message = found.problems[0] if found.problems else ""
        return self.progress

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve the status at `--http-address`, if it is given, while the block runs. Raises StartupError."""
        address = self._options.http_address
        if address is None:
            yield
            return
        from trio_nsq.connectors.monitoring.server import serving_status  # needs the extra `server`

        with serving_status(address, self.snapshot) as bound:
            if not self._options.quiet:
                print_diagnostic(f"Note: /healthz, /metrics and /stats are at {bound}.")
            yield
