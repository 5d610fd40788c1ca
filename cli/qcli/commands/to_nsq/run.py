"""Runs `to-nsq` until a signal."""

import sys

import trio

from trio_nsq.client.errors import AuthRefused, RequestRefused
from trio_nsq.connectors.to_nsq.errors import LoopFound, NoDestination
from trio_nsq.connectors.to_nsq.options import CopyOptions
from trio_nsq.connectors.to_nsq.progress import Progress
from trio_nsq.connectors.to_nsq.run import copy_topics
from trio_nsq.protocol.errors import NSQError

from ...framework.daemon.run import raise_file_limit
from ...framework.errors import ExitCode, Failure, leaf_exceptions
from ...framework.output import is_live_terminal, print_diagnostic, show_library_warnings
from ...framework.signals import watch_signals
from ..shared.consuming import source_failure
from .options import DESTINATION_OPTION, NsqCommand
from .status import Status, show_live, summary, write_status


def run(copying: CopyOptions, options: NsqCommand) -> ExitCode:
    """Copy until a signal, and return the exit code. Raises Failure: it cannot work."""
    show_library_warnings(notes=not options.quiet)
    raise_file_limit()
    progress = Progress()
    try:
        return trio.run(_run, copying, options, progress)
    except Exception as group:
        failure = _failure(group)
        if failure is None:
            raise
        raise failure from group
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

        await nursery.start(watch_signals, stop)
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


def _failure(group: Exception) -> Failure | None:
    """Return the failure for an error; None: it is a defect."""
    for error in leaf_exceptions(group):
        if isinstance(error, Failure):
            return error
        if isinstance(error, NoDestination):
            return Failure(
                f"No destination answers: {error}. Start a broker there, or use another address: {DESTINATION_OPTION}.",
                ExitCode.UNREACHABLE,
            )
        if isinstance(error, Exception) and (failure := source_failure(error)) is not None:
            return failure
        if isinstance(error, NSQError):
            text = str(error)
            code = ExitCode.USAGE if isinstance(error, LoopFound) else ExitCode.FAILURE
            cause = error.__cause__
            if isinstance(cause, AuthRefused) or (
                isinstance(cause, RequestRefused) and cause.is_about_secret
            ):
                text += (
                    ". Give --auth-secret-file, or only for destinations --producer-opt auth_secret_file,FILE"
                )
            return Failure(f"{text[0].upper()}{text[1:]}.", code)
    return None
