"""The status of `to-file`, `to-http` and `to-nsq`: reports to their brokers, and `--http-address`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ...framework.output import print_diagnostic
from .job_reports import job_reports

if TYPE_CHECKING:
    from trio_nsq.client.http.job_reporter import JobProgress, JobReporter
    from trio_nsq.connectors.monitoring.status import JobStatus, TopicStatus
    from trio_nsq.connectors.source.options import SourceOptions

    from .consuming import Consuming


@contextmanager
def connector_status(
    kind: str,
    consuming: Consuming,
    sources: SourceOptions,
    topics: Callable[[], Iterable[TopicStatus]],
    brokers: Callable[[], Iterable[str]] = tuple,
    *,
    quiet: bool,
) -> Iterator[JobReporter]:
    """Report a connector to its brokers and serve its status while the block runs.

    Args:
        topics: Returns what was done so far; threads call it.
        brokers: Returns the HTTP addresses of brokers that were found; threads call it.

    Raises StartupError: `--http-address` cannot be used.
    """
    from trio_nsq.client.http.job_reporter import JobProgress
    from trio_nsq.connectors.monitoring.status import JobStatus

    started_at, progress = time.time(), JobProgress()
    only = consuming.all_topics[0] if len(consuming.all_topics) == 1 and not consuming.topic_pattern else ""
    name = ", ".join([*consuming.all_topics, *filter(None, [consuming.topic_pattern])])
    # Not the addresses that are guessed from TCP ports: another server may be there, and would get the secret.
    named = [
        address
        for each in sources.brokers
        for address in ([each.paired_http] if each.paired_http else () if each.tcp else each.http)
    ]

    def status() -> JobStatus:
        found = sorted(topics(), key=lambda each: each.topic)
        return JobStatus(kind, name, started_at, found, written=sum(each.messages for each in found))

    def reported() -> JobProgress:
        found = status()
        # Only ever more: at the end nothing is open any more, and the brokers that list the job have to hear of it.
        reporter.addresses = list(dict.fromkeys([*reporter.addresses, *brokers()]))
        progress.done, progress.lag, progress.failures = found.written, found.lag, found.failures
        return progress

    with ExitStack() as stack:
        if consuming.http_address is not None:
            from trio_nsq.connectors.monitoring.server import serving_status  # needs the extra `server`

            bound = stack.enter_context(serving_status(consuming.http_address, status))
            if not quiet:
                print_diagnostic(f"Note: /healthz, /metrics and /stats are at {bound}.")
        reporter = stack.enter_context(
            job_reports(named, kind, only, reported, channel=consuming.channel, name=name)
        )
        yield reporter
