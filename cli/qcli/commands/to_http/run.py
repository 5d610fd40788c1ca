"""Runs `to-http` until a signal."""

from functools import partial

from trio_nsq.client.connection.options import ConnectionOptions
from trio_nsq.connectors.source.options import SourceOptions
from trio_nsq.connectors.to_http.options import DeliveryOptions
from trio_nsq.connectors.to_http.run import to_http
from trio_nsq.connectors.to_http.statistics import Statistics

from ...framework.errors import leaf_exceptions
from ...framework.output import print_diagnostic, show_library_warnings
from ...framework.signals import run_until_signal
from ..shared.consuming import source_failure


def run(
    sources: SourceOptions, delivery: DeliveryOptions, connecting: ConnectionOptions, *, quiet: bool
) -> int:
    """Deliver until a signal. Raises Failure: no broker can be reached, or one refuses."""
    show_library_warnings(notes=not quiet)
    statistics = Statistics()
    try:
        run_until_signal(partial(_run, sources, delivery, connecting, statistics))
    finally:
        if not quiet and (statistics.delivered or statistics.requeued or statistics.dead):
            print_diagnostic(statistics.summary())
    return 0


async def _run(
    sources: SourceOptions,
    delivery: DeliveryOptions,
    connecting: ConnectionOptions,
    statistics: Statistics,
) -> None:
    try:
        await to_http(sources, delivery, connecting, statistics)
    except* Exception as group:
        (error, *_) = leaf_exceptions(group)
        failure = source_failure(error, reads_logs=False) if isinstance(error, Exception) else None
        if failure is None:
            raise
        raise failure from None
