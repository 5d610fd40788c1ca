"""Runs `to-parquet`: finds the brokers, opens the export, and returns the exit code."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ...framework.errors import ExitCode, Terminated
from ..shared.engine import library_errors
from ..shared.job_reports import job_reports
from .export_run import ExportRun, find_brokers, note_new_channel, when_refused

if TYPE_CHECKING:
    from .options import ToParquetOptions


def export(options: ToParquetOptions) -> int:
    """Export, once or until interrupted, and return the exit code. Raises Failure: the export is incomplete."""
    from trio_nsq.spark.export.job import open_export

    request = options.request()
    with library_errors(when_refused), ExitStack() as stack:
        addresses = find_brokers(options)
        if not options.consume:
            note_new_channel(options, addresses)
            run = ExportRun(
                stack.enter_context(open_export(request, [options.place(each) for each in addresses])),
                options,
                stack,
            )
        else:
            from .spool_run import SpoolExportRun, check_reachable

            if options.spool is not None and not options.spool.exists():
                check_reachable(addresses)
            run = SpoolExportRun(stack.enter_context(open_export(request, ())), options, stack)
        channel, name = options.channel or "", f"{options.topic} to {options.folder}"
        brokers = () if options.consume or options.from_segments else addresses
        reports = job_reports(
            brokers, "to-parquet", options.topic, lambda: run.progress, channel=channel, name=name
        )
        try:
            with reports:
                if options.interval_s is None:
                    return run.once(addresses)
                return run.follow(addresses, options.interval_s)
        except (KeyboardInterrupt, Terminated) as stop:
            run.job.remove_temporary_files()
            run.conclude()
            return ExitCode.INTERRUPTED if isinstance(stop, KeyboardInterrupt) else ExitCode.TERMINATED
