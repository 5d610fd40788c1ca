"""Runs `to-file` until a signal."""

import signal
import sys

import trio

from trio_nsq.connectors.source.options import SourceOptions
from trio_nsq.connectors.to_file.checkpoint import CheckpointDamaged
from trio_nsq.connectors.to_file.connector import ToFile, ToFileOptions
from trio_nsq.connectors.to_file.names import FileNameError
from trio_nsq.protocol.errors import NSQError
from trio_nsq.text.wording import count_of

from ...framework.errors import ExitCode, Failure, reason_of
from ...framework.output import is_live_terminal, print_diagnostic, size
from ...framework.signals import at_first_signal, watch_signal
from ..shared.connector_status import connector_status
from ..shared.connectors import failure_with, run_connector
from ..shared.consuming import Consuming, source_failure

_EXIT_CODES = {CheckpointDamaged: ExitCode.DAMAGED, FileNameError: ExitCode.USAGE}


def run(consuming: Consuming, sources: SourceOptions, options: ToFileOptions, *, quiet: bool) -> ExitCode:
    """Write until a signal, and return the exit code. Raises Failure: it cannot work."""
    connector = ToFile(sources, options)
    status = connector_status(
        "to-file", consuming, sources, connector.topics, connector.log_brokers, quiet=quiet
    )
    with status as reporter:
        code = run_connector(_run, connector, quiet, failure_of=_failure, quiet=quiet)
        reporter.end("succeeded" if code is ExitCode.OK else "stopped")
        return code


async def _run(connector: ToFile, quiet: bool) -> ExitCode:
    code = ExitCode.OK
    try:
        await trio.to_thread.run_sync(connector.prepare)
    except OSError as error:
        raise Failure(
            f"Cannot write to {error.filename}: {reason_of(error)}. Choose another folder."
        ) from error

    def stop(which: ExitCode) -> None:
        nonlocal code
        code = which
        connector.stop()

    async def reopen() -> None:
        connector.reopen()

    def progress() -> tuple[int, int, float | None]:
        counts = connector.counts
        return counts.messages, counts.body_bytes, None

    try:
        async with trio.open_nursery() as nursery:
            at_first_signal(stop)
            await nursery.start(watch_signal, signal.SIGHUP, reopen)
            if not quiet and is_live_terminal(sys.stderr):
                from ...terminal.progress import show_progress

                # Written ones count after a sync, by default every 30 s: until then, a 0 would look like a fault.
                nursery.start_soon(show_progress, progress, "synced")
            await connector.run()
            nursery.cancel_scope.cancel()
    finally:
        counts = connector.counts
        if not quiet and counts.messages:
            print_diagnostic(
                f"Wrote {count_of(counts.messages, 'message')} ({size(counts.body_bytes)}) to "
                f"{count_of(counts.files, 'file')}."
            )
    return code


def _failure(error: Exception) -> Failure | None:
    """Return the failure for an error; None: it is a defect."""
    if (failure := source_failure(error)) is not None:
        return failure
    if isinstance(error, NSQError):
        return failure_with(str(error), _EXIT_CODES.get(type(error), ExitCode.FAILURE))
    return None
