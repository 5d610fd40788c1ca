"""Runs `to-http` until a signal."""

from functools import partial

from trio_nsq.client.connection.options import ConnectionOptions
from trio_nsq.connectors.source.options import SourceOptions
from trio_nsq.connectors.to_http.options import DeliveryOptions
from trio_nsq.connectors.to_http.run import to_http
from trio_nsq.connectors.to_http.statistics import Statistics

from ...framework.output import print_diagnostic
from ..shared.connectors import run_connector
from ..shared.consuming import source_failure


def run(
    sources: SourceOptions, delivery: DeliveryOptions, connecting: ConnectionOptions, *, quiet: bool
) -> int:
    """Deliver until a signal. Raises Failure: no broker can be reached, or one refuses."""
    statistics = Statistics()
    failure_of = partial(source_failure, reads_logs=False)
    try:
        run_connector(to_http, sources, delivery, connecting, statistics, failure_of=failure_of, quiet=quiet)
    finally:
        if not quiet and (statistics.delivered or statistics.requeued or statistics.dead):
            print_diagnostic(statistics.summary())
    return 0
