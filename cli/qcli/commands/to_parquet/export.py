"""Runs `to-parquet`: finds the brokers, opens the export or prints its schema, and returns the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ...broker.brokers import distinct_brokers
from ...framework.errors import ExitCode, Failure, Terminated
from ...framework.output import print_diagnostic, write
from ..shared.engine import library_errors
from ..shared.job_reports import job_reports
from .brokers import NoBrokerKnown, find_brokers, healthy, is_temporary, note_new_channel, when_refused
from .export_run import ExportRun

if TYPE_CHECKING:
    from .options import ToParquetOptions


def export(options: ToParquetOptions) -> int:
    """Export, once or until interrupted, and return the exit code. Raises Failure: the export is incomplete."""
    from trio_nsq.spark.export.job import open_export

    if not options.is_of_one_topic:
        from .topic_finder import TopicSection
        from .topics_run import export_topics

        return export_topics(options, [TopicSection.of(options)], f"topics to {options.folder}")
    request = options.request()
    with library_errors(when_refused), ExitStack() as stack:
        addresses = _known_brokers(options)
        if not options.consume:
            places = [options.place(address) for address in addresses]
            waits_for = is_temporary if options.follow else lambda _: False
            job = stack.enter_context(open_export(request, places, waits_for=waits_for))
            note_new_channel(options, {options.topic: healthy(addresses, job.failures)})
            run = ExportRun(job, options, stack)
        else:
            from .spool_run import SpoolExportRun, check_reachable

            if options.spool is not None and not options.spool.exists():
                check_reachable(addresses)
            run = SpoolExportRun(stack.enter_context(open_export(request, ())), options, stack)
        channel, name = options.channel or "", f"{options.topic} to {options.folder}"
        has_brokers = not options.consume and not options.from_segments
        brokers = addresses if has_brokers else ()
        reports = job_reports(
            brokers, "to-parquet", options.topic, run.monitoring.reported, channel=channel, name=name
        )
        try:
            with run.monitoring.serving(), reports as reporter:
                if has_brokers:
                    run.reporter = reporter
                if options.interval_s is None:
                    return run.once(addresses)
                return run.follow(addresses, options.interval_s)
        except (KeyboardInterrupt, Terminated) as stop:
            if run.code is not None:
                return run.code
            run.job.remove_temporary_files()
            run.conclude()
            return ExitCode.INTERRUPTED if isinstance(stop, KeyboardInterrupt) else ExitCode.TERMINATED


def print_columns(options: ToParquetOptions) -> int:
    """Print the schema that the folder has, or else a sample of the messages. Raises Failure: there is none."""
    from trio_nsq.spark.export.sampling import find_columns
    from trio_nsq.spark.schemas.arrow_json import print_schema

    request = options.request()
    with library_errors(when_refused):
        found = [] if options.consume else find_brokers(options)
        addresses = found if options.from_segments else distinct_brokers(found)
        columns = find_columns(request, [options.place(address) for address in addresses])
    write(print_schema(columns))
    return ExitCode.OK


def _known_brokers(options: ToParquetOptions) -> Sequence[str]:
    """Return the brokers' addresses; none if --follow waits for them. Raises Failure: there are none."""
    try:
        found = find_brokers(options)
        return found if options.consume or options.from_segments else distinct_brokers(found)
    except Failure as failure:
        may_come = isinstance(failure, NoBrokerKnown) or failure.exit_code is ExitCode.UNREACHABLE
        if not (options.follow and may_come) or options.consume:
            raise
        print_diagnostic(f"Warning: {failure} Waiting for one.")
        return []
