"""The root command, and how a command line runs: errors, signals and closed pipes become exit codes here."""

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NoReturn

import click

from .broker.address_options import HTTP_VARIABLE, LOOKUPD_VARIABLE, TCP_VARIABLE
from .broker.connection_options import VARIABLES
from .broker.name_completion import TIMEOUT_VARIABLE
from .framework.command import LazyGroup, contexts_below, did_you_mean
from .framework.completion import COMPLETE_VARIABLE, answer_shell
from .framework.errors import ExitCode, Failure, OutputClosed, Terminated, leaf_exceptions, translate
from .framework.options import version_option
from .framework.output import configure_streams, print_diagnostic

_PREFIX = "QCLI_"
_OF_MOST_COMMANDS = frozenset({TCP_VARIABLE, HTTP_VARIABLE, LOOKUPD_VARIABLE, TIMEOUT_VARIABLE, *VARIABLES})

_MODULES = {
    "serve": "qcli.commands.serve.command",
    "lookupd": "qcli.commands.lookupd",
    "pub": "qcli.commands.pub.command",
    "tail": "qcli.commands.tail.command",
    "peek": "qcli.commands.peek",
    "replay": "qcli.commands.replay.command",
    "to-parquet": "qcli.commands.to_parquet.command",
    "spark": "qcli.commands.spark",
    "stat": "qcli.commands.stat.command",
    "topic": "qcli.commands.topic",
    "channel": "qcli.commands.channel",
    "dlq": "qcli.commands.dlq.command",
    "deferred": "qcli.commands.deferred",
    "log": "qcli.commands.log.command",
}


@click.group(
    "qcli",
    cls=LazyGroup,
    modules=_MODULES,
    examples={
        "a broker that keeps its messages in ./data": "qcli serve --data-path ./data",
        "publish a file, one message per line": "cat access.log | qcli pub clicks",
        "print messages as they come": "qcli tail clicks/archive",
        "watch the queues": "qcli stat clicks",
    },
    notes={
        "Environment": "QCLI_NSQD_TCP_ADDRESS and QCLI_NSQD_HTTP_ADDRESS stand for --nsqd-tcp-address and "
        "--nsqd-http-address, of every command that talks to a broker, and QCLI_LOOKUPD_HTTP_ADDRESS for "
        "--lookupd-http-address; several addresses with commas. The options under Connection have variables "
        "whose names begin with QCLI_CLIENT_, such as QCLI_CLIENT_TLS_ROOT_CA_FILE. QCLI_COMPLETION_TIMEOUT is how "
        "long completion waits for a broker's names, instead of 500ms. NO_COLOR turns colours off.",
    },
)
@version_option
def root() -> None:
    """A message broker that speaks NSQ's protocol, and the tools around it.

    Data goes to standard output, diagnostics go to standard error.
    """


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return the exit code. Errors that mean a bug in qcli are raised."""
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return answer_shell(root, instruction)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _run(arguments: Sequence[str]) -> int:
    for line in notices(os.environ, root):
        print_diagnostic(line)
    try:
        # Not click's `main`, which takes a closed pipe for a failure.
        with root.make_context("qcli", list(arguments)) as ctx:
            result = root.invoke(ctx)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except BaseException as error:
        # trio wraps whatever comes out of tasks.
        for leaf in leaf_exceptions(error):
            if isinstance(leaf, KeyboardInterrupt | click.Abort):
                return ExitCode.INTERRUPTED
            if isinstance(leaf, Terminated):
                return ExitCode.TERMINATED
        outcome = translate(error)
        if outcome is None:
            raise
        if isinstance(outcome, OutputClosed):
            return ExitCode.OK
        if isinstance(outcome, Failure):
            print_diagnostic(f"Error: {outcome.message}")
        else:
            outcome.show()
        return outcome.exit_code
    return int(result or ExitCode.OK)


def notices(names: Iterable[str], root: click.Command) -> list[str]:
    """A line for each variable among `names` that begins as ours do and that no command knows: probably misspelled."""
    ours = {name for name in names if name.startswith(_PREFIX)} - _OF_MOST_COMMANDS
    if not ours:
        return []
    params = [param for ctx in contexts_below(click.Context(root)) for param in ctx.command.params]
    known = {*_OF_MOST_COMMANDS, *(param.envvar for param in params if isinstance(param.envvar, str))}
    return [
        f"Note: the variable {name} means nothing to qcli{did_you_mean(name, sorted(known))}."
        for name in sorted(ours - known)
    ]


def run_process() -> NoReturn:
    """Run the command line of this process and end it."""
    configure_streams()
    try:
        # Also if SIGINT was ignored, as by a shell without a terminal for background processes. nsqd does the same.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    # One that comes after the end needs no answer of ours.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            # What could not be written now cannot be written by the interpreter at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) and _has_arrow_threads():
        os._exit(code)
    # If SIGINT comes while Python executes a string, as it does to make a dataclass, Python notes that, and
    # `python -m qcli` would end by SIGINT and not with this code. The next string resets the note.
    exec("")
    sys.exit(code)


def _has_arrow_threads() -> bool:
    """Whether threads of Arrow may still work on what was interrupted: they abort the process when Python ends.

    Where Spark was begun, it has to be ended in order, and Arrow works elsewhere.
    """
    return "pyarrow" in sys.modules and "pyspark" not in sys.modules


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated
