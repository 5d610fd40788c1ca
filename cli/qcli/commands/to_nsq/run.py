"""Runs `to-nsq` until a signal."""

import sys

import trio

from trio_nsq.client.errors import AuthRefused, ConnectionFailed, RequestRefused
from trio_nsq.connectors.source.log_source import ChannelAhead
from trio_nsq.connectors.to_nsq.errors import LoopFound, NoDestination
from trio_nsq.connectors.to_nsq.options import CopyOptions
from trio_nsq.connectors.to_nsq.progress import Progress
from trio_nsq.connectors.to_nsq.run import copy_topics
from trio_nsq.protocol import FrameError
from trio_nsq.protocol.errors import NSQError

from ...broker.failures import connection_failure
from ...framework.errors import ExitCode, Failure
from ...framework.output import is_live_terminal, print_diagnostic
from ...framework.signals import at_first_signal
from ..shared.connector_status import connector_status
from ..shared.connectors import failure_with, run_connector
from ..shared.consuming import source_failure
from .options import DESTINATION_OPTION, NsqCommand
from .status import Status, show_live, summary, write_status


def run(copying: CopyOptions, options: NsqCommand) -> ExitCode:
    """Copy until a signal, and return the exit code. Raises Failure: it cannot work."""
    progress = Progress()
    status = connector_status(
        "to-nsq",
        options.consuming,
        copying.source,
        progress.topics,
        progress.log_brokers,
        quiet=options.quiet,
    )
    try:
        with status as reporter:
            code = run_connector(_run, copying, options, progress, failure_of=_failure, quiet=options.quiet)
            reporter.end("succeeded" if code is ExitCode.OK else "stopped")
            return code
    finally:
        if not options.quiet and options.form == "text" and progress.sources:
            print_diagnostic(summary(progress))


async def _run(copying: CopyOptions, options: NsqCommand, progress: Progress) -> ExitCode:
    code = ExitCode.OK
    status = Status(progress, trio.current_time())
    async with trio.open_nursery() as nursery:
        copies = trio.CancelScope()

        def stop(which: ExitCode) -> None:
            nonlocal code
            code = which
            copies.cancel()

        at_first_signal(stop)
        if options.form == "json" or not options.quiet:
            if options.form == "text" and is_live_terminal(sys.stderr):
                nursery.start_soon(show_live, progress)
            else:
                nursery.start_soon(write_status, status, options.form, options.status_interval_ms / 1000)
                if options.status_every:
                    nursery.start_soon(write_status, status, options.form, 0.0, options.status_every)
        with copies:
            await copy_topics(copying, progress)
        nursery.cancel_scope.cancel()
    if options.form == "json":
        status.write("json")
    return code


def _failure(error: Exception) -> Failure | None:
    """Return the failure for an error; None: it is a defect."""
    cause = error.__cause__
    if isinstance(error, NoDestination):
        if isinstance(cause, ConnectionFailed) and isinstance(cause.__cause__, FrameError):
            return connection_failure(cause, option=DESTINATION_OPTION)
        return Failure(
            f"No destination answers: {error}. Start a broker there, or use another address: {DESTINATION_OPTION}.",
            ExitCode.UNREACHABLE,
        )
    if (failure := source_failure(error)) is not None:
        return failure
    if not isinstance(error, NSQError):
        return None
    text = str(error)
    if isinstance(error, ChannelAhead):
        text += (
            ". End all commands that copy it, move it back with 'qcli channel seek "
            f"{error.topic}/{error.channel} --to {error.first}', and start again; "
            "or give --allow-gaps to go on without these messages"
        )
    if isinstance(cause, AuthRefused) or (isinstance(cause, RequestRefused) and cause.is_about_secret):
        text += ". Give --auth-secret-file, or only for destinations --producer-opt auth_secret_file,FILE"
    return failure_with(text, ExitCode.USAGE if isinstance(error, LoopFound) else ExitCode.FAILURE)
