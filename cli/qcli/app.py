"""The root command, and how a command line runs: errors, signals and closed pipes become exit codes."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import click

from .broker.address_options import HTTP_VARIABLE, LOOKUPD_VARIABLE, TCP_VARIABLE
from .broker.connection_options import VARIABLES
from .broker.name_completion import TIMEOUT_VARIABLE
from .contexts.choice import CONTEXT_VARIABLE, note_of_unused_context, root_context_option
from .framework.command import LazyGroup, contexts_below, did_you_mean
from .framework.completion import COMPLETE_VARIABLE, answer_shell
from .framework.errors import (
    ExitCode,
    Failure,
    OutputClosed,
    Terminated,
    causes_of,
    leaf_exceptions,
    translate,
)
from .framework.options import VERBOSE, GroupedOption, version_option
from .framework.output import configure_streams, print_diagnostic
from .framework.raised_signals import interrupt, sending_dropped_again, terminate

_PREFIX = "QCLI_"
_OF_MOST_COMMANDS = frozenset(
    {TCP_VARIABLE, HTTP_VARIABLE, LOOKUPD_VARIABLE, TIMEOUT_VARIABLE, CONTEXT_VARIABLE, *VARIABLES}
)

_MODULES = {
    "serve": "qcli.commands.serve.command",
    "lookupd": "qcli.commands.lookupd",
    "admin": "qcli.commands.admin.command",
    "pub": "qcli.commands.pub.command",
    "tail": "qcli.commands.tail.command",
    "peek": "qcli.commands.peek",
    "replay": "qcli.commands.replay.command",
    "to-file": "qcli.commands.to_file.command",
    "to-parquet": "qcli.commands.to_parquet.command",
    "to-http": "qcli.commands.to_http.command",
    "to-nsq": "qcli.commands.to_nsq.command",
    "pipeline": "qcli.commands.pipeline.command",
    "spark": "qcli.commands.spark",
    "stat": "qcli.commands.stat.command",
    "bench": "qcli.commands.bench.command",
    "nodes": "qcli.commands.nodes.command",
    "cluster": "qcli.commands.cluster.command",
    "clients": "qcli.commands.clients",
    "topic": "qcli.commands.topic",
    "channel": "qcli.commands.channel",
    "definitions": "qcli.commands.definitions.command",
    "tombstone": "qcli.commands.tombstone",
    "drain": "qcli.commands.drain.command",
    "undrain": "qcli.commands.drain.undrain",
    "dlq": "qcli.commands.dlq.command",
    "deferred": "qcli.commands.deferred",
    "log": "qcli.commands.log.command",
    "archive": "qcli.commands.archive.command",
    "context": "qcli.commands.context.command",
    "token": "qcli.commands.token",
    "support": "qcli.commands.support.command",
    "help": "qcli.commands.help",
}

_WITHOUT_BROKERS = ("serve", "lookupd", "spark", "log", "archive")

_SYNONYMS = {
    "broker": "serve",
    "run": "serve",
    "server": "serve",
    "start": "serve",
    "nsqd": "serve",
    "nsqlookupd": "lookupd",
    "produce": "pub",
    "publish": "pub",
    "send": "pub",
    "to_nsq": "pub",
    "consume": "tail",
    "read": "tail",
    "sub": "tail",
    "subscribe": "tail",
    "nsq_tail": "tail",
    "nsq_to_file": "to-file",
    "nsq_to_http": "to-http",
    "webhook": "to-http",
    "nsq_to_nsq": "to-nsq",
    "mirror": "to-nsq",
    "list": "topic list",
    "ls": "topic list",
    "create": "topic create",
    "status": "stat",
    "stats": "stat",
    "info": "stat",
    "nsq_stat": "stat",
    "brokers": "nodes",
    "failover": "cluster switch",
    "restore": "archive restore",
    "backup": "archive",
    "members": "cluster status",
    "console": "admin",
    "dashboard": "admin",
    "nsqadmin": "admin",
    "ui": "admin",
    "web": "admin",
    "health": "nodes --check",
    "connections": "clients",
    "consumers": "clients",
    "producers": "clients",
    "benchmark": "bench",
    "bench_writer": "bench pub",
    "bench_reader": "bench sub",
    "export": "to-parquet",
    "parquet": "to-parquet",
    "import": "log import",
    "apply": "definitions apply",
    "verify": "log verify",
    "config": "context",
    "profile": "context",
    "bug-report": "support bundle",
    "diagnostics": "support bundle",
    "seek": "channel seek",
    "version": "--version",
    "doctor": "nodes --check",
}
"""What users of other tools may type, and the command for it."""


@click.group(
    "qcli",
    cls=LazyGroup,
    modules=_MODULES,
    examples={
        "run a broker that keeps its messages in ./data": "qcli serve --data-path ./data",
        "publish a file, one message per line": "cat access.log | qcli pub clicks",
        "print messages as they arrive": "qcli tail clicks/archive",
        "watch the backlogs": "qcli stat clicks",
    },
    synonyms=_SYNONYMS,
    notes={
        "Topics": "qcli help connection, environment, positions, format-strings, durations or exit-codes.",
        "Exit codes": "0 success, 1 failure, 2 wrong command line, 3 no broker answers, 4 only partly done, 5 damaged "
        "data. See 'qcli help exit-codes'.",
    },
    details={
        "Environment": "QCLI_NSQD_TCP_ADDRESS, QCLI_NSQD_HTTP_ADDRESS and QCLI_LOOKUPD_HTTP_ADDRESS set "
        "--nsqd-tcp-address, --nsqd-http-address and --lookupd-http-address of every command; separate several "
        "addresses with commas. The connection options have variables whose names begin with QCLI_CLIENT_, such as "
        "QCLI_CLIENT_TLS_ROOT_CA_FILE. QCLI_COMPLETION_TIMEOUT is how long completion waits for a broker's names, "
        "500ms by default. NO_COLOR turns colours off.",
    },
)
@root_context_option
@version_option
@click.pass_context
def root(ctx: click.Context, context_name: str | None) -> None:
    """Run a message broker that speaks NSQ's protocol, and work with its topics.

    Data goes to standard output, diagnostics go to standard error.
    """
    if ctx.invoked_subcommand in _WITHOUT_BROKERS and context_name is not None:
        raise click.UsageError(
            f"--context is for commands that connect to brokers: 'qcli {ctx.invoked_subcommand}' does not."
        )


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return the exit code. Raises errors that are bugs in qcli."""
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return answer_shell(root, instruction)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with sending_dropped_again():
            return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _run(arguments: Sequence[str]) -> int:
    for line in notices(os.environ, root):
        print_diagnostic(line)
    ctx: click.Context | None = None
    try:
        # click's `main` would report a closed pipe as a failure.
        with root.make_context("qcli", list(arguments)) as ctx:
            result = root.invoke(ctx)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except BaseException as error:
        # trio wraps the errors of tasks in groups.
        if (code := _code_of_signal(leaf_exceptions(error))) is not None:
            return code
        outcome = translate(error)
        if outcome is None:
            # A signal may have interrupted a function in the middle, such as one that had a lock, which then failed.
            if (code := _code_of_signal(_handled_before(error))) is not None:
                return code
            raise
        if isinstance(outcome, OutputClosed):
            return ExitCode.OK
        if isinstance(outcome, Failure):
            if ctx is not None and ctx.meta.get(VERBOSE):
                print_diagnostic(causes_of(error))
            print_diagnostic(f"Error: {outcome.message}")
            if ctx is not None and (note := note_of_unused_context(ctx)):
                print_diagnostic(note)
        else:
            outcome.show()
        return outcome.exit_code
    return int(result or ExitCode.OK)


def _code_of_signal(errors: Iterable[BaseException]) -> ExitCode | None:
    """Return the exit code if one of these errors is what a signal raises."""
    for each in errors:
        if isinstance(each, KeyboardInterrupt | click.Abort):
            return ExitCode.INTERRUPTED
        if isinstance(each, Terminated):
            return ExitCode.TERMINATED
    return None


def _handled_before(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors during whose handling this one occurred."""
    for leaf in leaf_exceptions(error):
        while (before := leaf.__context__) is not None:
            yield before
            leaf = before


def notices(names: Iterable[str], root: click.Command) -> list[str]:
    """Return a line for each variable that has qcli's prefix and that no command knows: probably misspelled."""
    prefixed = {name for name in names if name.startswith(_PREFIX)} - _OF_MOST_COMMANDS
    if not prefixed:
        return []
    known = set(_OF_MOST_COMMANDS)
    for ctx in contexts_below(click.Context(root)):
        for param in ctx.command.params:
            if isinstance(param, GroupedOption):
                known.update(param.variables(ctx))
    return [
        f"Note: qcli does not know the environment variable {name}{did_you_mean(name, sorted(known))}."
        for name in sorted(prefixed - known)
    ]


def run_process() -> NoReturn:
    """Run the command line of this process and end it."""
    configure_streams()
    try:
        # A shell without a terminal starts background processes with SIGINT ignored. nsqd handles it too.
        signal.signal(signal.SIGINT, interrupt)
        code = run(sys.argv[1:])
    except (KeyboardInterrupt, Terminated) as error:  # while `run` ended
        code = ExitCode.TERMINATED if isinstance(error, Terminated) else ExitCode.INTERRUPTED
    # After the command has ended, SIGINT has its default effect.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            # The interpreter would fail to flush the same data at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) and _has_arrow_threads():
        os._exit(code)
    # If SIGINT arrives while Python executes a string, as for a dataclass, Python sets a flag, and `python -m qcli`
    # would end by SIGINT instead of this exit code. Executing another string clears the flag.
    exec("")
    sys.exit(code)


def _has_arrow_threads() -> bool:
    """Return whether threads of Arrow may still run after an interruption: they abort the process when Python ends.

    With Spark, Arrow runs in other processes, and Spark must be shut down properly.
    """
    return "pyarrow" in sys.modules and "pyspark" not in sys.modules
