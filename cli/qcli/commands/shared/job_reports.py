"""Reports a command's progress to its brokers, for the page Jobs of `qcli admin`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...broker.connection_options import ConnectOptions
from ...framework.errors import Terminated, leaf_exceptions, translate

if TYPE_CHECKING:
    from trio_nsq.client.http.job_reporter import JobProgress, JobReporter


@contextmanager
def job_reports(
    addresses: Sequence[str],
    kind: str,
    topic: str,
    progress: Callable[[], JobProgress],
    *,
    channel: str = "",
    name: str = "",
) -> Iterator[JobReporter]:
    """Report the job while the block runs, and how it ended; see `JobReporter`.

    The block may end the reports itself, if it stops without an exception.
    """
    from trio_nsq.client.http.job_reporter import JobReporter

    connecting = ConnectOptions.of_command()
    reporter = JobReporter(
        addresses,
        kind,
        topic,
        progress,
        channel=channel,
        name=name,
        tls=connecting.tls_files(),
        secret=connecting.secret,
    )
    reporter.start()
    try:
        yield reporter
    except BaseException as error:
        if any(isinstance(leaf, KeyboardInterrupt | Terminated) for leaf in leaf_exceptions(error)):
            reporter.end("stopped")
        else:
            failure = translate(error)
            reporter.end("failed", getattr(failure, "message", "") or str(error))
        raise
    reporter.end("succeeded")
