"""`qcli pub`: standard input, or files, into a topic."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from trio_nsq.protocol import Limits

from ...broker.address_options import (
    HTTP_OPTION,
    HTTP_VARIABLE,
    TCP_OPTION,
    TCP_VARIABLE,
    check_tcp_address,
    http_addresses,
    tcp_addresses,
)
from ...broker.connection_options import Connecting, tcp_connection
from ...broker.name_completion import complete_topic
from ...framework.command import DocumentedCommand, Example
from ...framework.errors import Failure, not_connected
from ...framework.exit_codes import ExitCode
from ...framework.options import option
from ...framework.output import count_of, quiet_library, size, talk, talks_to_live_terminal
from ...framework.output import rate as per_second
from ...framework.params import delimiter, duration_text, long_duration, topic_name

if TYPE_CHECKING:
    from .publish import BrokerOutcome, Outcome
    from .send import Sender

LIMITS = Limits()
RATED_READ_BYTES = 4096
"""With --rate: what is read is published soon, also when a signal ends the reading."""

_OUT_OF_RANGE = re.compile(r"^DPUB timeout \d+ out of range 0-(\d+)")

INPUT, SENDING = "Input", "Sending"


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line."""

    topic: str
    files: tuple[str, ...]
    brokers: dict[str, str]
    """The TCP address of each, and the HTTP address for its numbered batches."""
    delimiter: bytes
    max_msg_size: int
    batch_size: int | None
    rate: float | None
    defer_ms: int
    retry: bool
    quiet: bool


@click.command(
    "pub",
    cls=DocumentedCommand,
    short_help="Publish lines to a topic.",
    examples=[
        Example("a file, one message per line", "cat access.log | qcli pub clicks"),
        Example("as lines are written", "tail -F access.log | qcli pub clicks"),
        Example("anything at all, separated by NUL", "find . -name '*.json' -print0 | qcli pub -0 names"),
        Example("files, at 500 messages a second", "qcli pub clicks --rate 500 monday.log tuesday.log"),
        Example(
            "to two brokers, each message to both",
            "qcli pub clicks --nsqd-tcp-address a:4150,b:4150 < access.log",
        ),
        Example("delivered in a minute and a half", "echo later | qcli pub reminders --defer 1m30s"),
    ],
    exits={
        ExitCode.OK: "Everything was published and acknowledged.",
        ExitCode.FAILURE: "Nothing was published: reading the input failed, a message is too long, the broker refused.",
        ExitCode.USAGE: "The command line is wrong, or names a file that is not there or cannot be read.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} Or it went away before any message was acknowledged, "
        "and there was a signal, or --no-retry.",
        ExitCode.PARTIAL: "Some messages were acknowledged, then it failed, or there was a signal while the broker was "
        "away. Standard error says how many were, and how many more may have been stored.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). What had been read was published; see Interruption.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). What had been read was published, likewise.",
    },
    notes={
        "Messages": "Bytes are kept as they are: nothing is decoded, and a carriage return before a line feed "
        "belongs to the message. What follows the last delimiter is a message too. Empty messages are skipped, "
        "because NSQ has none; their number is reported at the end.",
        "Lost connections": "If the broker goes away, as in an upgrade, the command waits for it and goes on, and says "
        "both on standard error. Nothing is read meanwhile. It also waits if the broker refuses because its disk or "
        "the topic is full, once some messages were acknowledged. It ends if the broker cannot be reached at the "
        "start, or refuses for another reason. With --no-retry it ends at the first failure.",
        "Once, or at least once": "What was on its way when the connection was lost is sent again. 'qcli serve' "
        "publishes it once: batches are numbered, which takes HTTP. For that --nsqd-http-address must be of the "
        "same broker as --nsqd-tcp-address, and https:// or a unix socket if TLS is asked for. With nsqd, another HTTP "
        "address, --auth-secret, --snappy or --deflate, messages go over TCP, and some may be there twice after a lost "
        "connection; standard error says how many at most.",
        "Several brokers": f"With several addresses of {TCP_OPTION}, every message goes to every broker. The first "
        f"address of {HTTP_OPTION} is that of the first broker, the second that of the second, and so on. The input "
        "is read once, no faster than the slowest broker takes it. While the command waits for one broker, the others "
        "get nothing new. If a broker cannot be reached at the start, nothing is published. If one fails later, the "
        "others still get what had been read, and the command ends; it does not wait for another that is away then. "
        "The report counts the messages that all brokers have acknowledged. If some have more, the error gives the "
        "number of each.",
        "Interruption": "At a signal nothing more is read, and the messages that had been read are published. One "
        "that had been read in part only is not. With --rate, those that were not yet due are not either. The "
        "report on standard error counts both. While the broker is away a signal ends the command at once, and what "
        "had been read is not published.",
    },
)
@click.argument("topic", metavar="TOPIC", type=topic_name, shell_complete=complete_topic)
@click.argument(
    "files",
    metavar="[FILE...]",
    nargs=-1,
    type=click.Path(
        readable=False, allow_dash=True
    ),  # whether they can be read is no matter of the command line
)
@http_addresses(
    "The brokers' HTTP addresses, in the order of the TCP addresses: for numbered batches, and to complete names."
)
@tcp_addresses("The brokers to publish to; each gets every message.")
@tcp_connection
@option(
    INPUT,
    "--delimiter",
    "-d",
    "separator",
    type=delimiter,
    default=r"\n",
    metavar="TEXT",
    show_default=True,
    help=r"What stands between messages. \n, \t, \0, \xNN and the like are understood.",
)
@option(INPUT, "--null", "-0", is_flag=True, help=r"The same as --delimiter '\0', as find -print0 writes.")
@option(
    INPUT,
    "--max-msg-size",
    type=click.IntRange(min=1),
    default=LIMITS.max_msg_size,
    metavar="BYTES",
    show_default=True,
    help="The broker's limit. A longer message ends the command, with its number, before it is sent.",
)
@option(
    SENDING,
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="1000, or 10000 if they are numbered at all brokers",
    help="Messages in one batch, at most. When input is slow, those that have come leave after 50 ms.",
)
@option(
    SENDING,
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Messages per second, at most; evenly, never more than a tenth of a second's worth at once.",
)
@option(
    SENDING,
    "--defer",
    "defer_ms",
    type=long_duration,
    default="0",
    metavar="DURATION",
    help="Deliver each message so long after it is published, such as 500ms, 1m30s or 7d. Slower: one DPUB per "
    "message.",
)
@option(
    SENDING,
    "--no-retry",
    is_flag=True,
    help="End at the first failure, also if the connection was lost; nothing is sent twice, or over HTTP.",
)
@option("Output", "--quiet", "-q", is_flag=True, help="No progress and no report; errors and warnings only.")
def command(
    topic: str,
    files: tuple[str, ...],
    nsqd_tcp_addresses: tuple[str, ...],
    nsqd_http_addresses: tuple[str, ...],
    separator: bytes,
    null: bool,
    max_msg_size: int,
    batch_size: int | None,
    rate: float | None,
    defer_ms: int,
    no_retry: bool,
    quiet: bool,
) -> int:
    """Publish standard input, or files, to a topic: one message per line.

    Messages go out in batches and in order, to every broker if there are several. A broker that goes away is waited
    for. At the end the numbers of
    messages and bytes, and the rate, are reported on standard error.
    """
    import trio

    if null and separator != b"\n":
        raise click.UsageError("--null and --delimiter exclude each other.")
    for path in files:
        _check_readable(path)
    request = _Request(
        topic,
        files or ("-",),
        _paired(nsqd_tcp_addresses, nsqd_http_addresses, click.get_current_context()),
        b"\0" if null else separator,
        max_msg_size,
        batch_size,
        rate,
        defer_ms,
        not no_retry,
        quiet,
    )
    begun_s = time.monotonic()
    outcome = trio.run(_publish, request)
    return _conclude(request, outcome, time.monotonic() - begun_s)


def _paired(tcp: tuple[str, ...], http: tuple[str, ...], ctx: click.Context) -> dict[str, str]:
    """The HTTP address of each broker, by its TCP address.

    Raises:
        click.UsageError: It is not clear which belong together.
        click.BadParameter: A TCP address is none.
    """
    for address in tcp:
        check_tcp_address(address)
    sources = [ctx.get_parameter_source(name) for name in ("nsqd_tcp_addresses", "nsqd_http_addresses")]
    if len(http) == 1 and sources[1] not in (sources[0], ParameterSource.COMMANDLINE):
        http *= len(tcp)  # not given for these brokers: `numbered_sender` uses it for the one it belongs to
    if len(tcp) != len(http):
        names = [
            variable if source is ParameterSource.ENVIRONMENT else option
            for source, option, variable in zip(
                sources, (TCP_OPTION, HTTP_OPTION), (TCP_VARIABLE, HTTP_VARIABLE), strict=True
            )
        ]
        raise click.UsageError(
            f"{names[0]} names {count_of(len(tcp), 'broker')} and {names[1]} {len(http)}. Give an HTTP address for "
            "each broker, in the same order, or none."
        )
    return dict(zip(tcp, http, strict=True))


def _check_readable(path: str) -> None:
    """Look before anything is published.

    Raises:
        Failure: It cannot be read, which is the command line's fault.
    """
    if path == "-":
        return
    problem = 0
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            problem = errno.EISDIR
        elif not os.access(path, os.R_OK):
            problem = errno.EACCES
    except OSError as error:
        problem = error.errno or errno.ENOENT
    if problem:
        raise Failure(f"Cannot read {path}: {os.strerror(problem)}. Nothing was published.", ExitCode.USAGE)


def _shows_progress(request: _Request) -> bool:
    # A line that is redrawn would get in the way of typing.
    typing = "-" in request.files and sys.stdin is not None and sys.stdin.isatty()
    return not request.quiet and talks_to_live_terminal() and not typing


async def _publish(request: _Request) -> Outcome:
    import trio

    from ...framework.signals import watch_signals
    from ..shared.rate_limiter import Pace
    from .input import READ_BYTES
    from .publish import Publication

    quiet_library()
    connecting = Connecting.of_command()
    async with AsyncExitStack() as stack:
        senders = {}
        for address in request.brokers:
            senders[address] = await _connect(request, address, connecting, stack)
        batch_size = min(sender.batch_size for sender in senders.values())
        async with trio.open_nursery() as nursery:
            publication = Publication(
                senders,
                delimiter=request.delimiter,
                max_msg_size=request.max_msg_size,
                batch_size=request.batch_size or batch_size,
                retry=request.retry,
                pace=Pace(request.rate, trio.current_time()) if request.rate else None,
            )
            await nursery.start(watch_signals, publication.stop)
            if _shows_progress(request):
                from ...terminal.progress_line import show_progress

                nursery.start_soon(show_progress, publication.outcome)
            await publication.run(request.files, RATED_READ_BYTES if request.rate else READ_BYTES)
            for broker in publication.outcome.brokers:
                if broker.failure is None:
                    await senders[broker.address].end()
            nursery.cancel_scope.cancel()
    return publication.outcome


async def _connect(request: _Request, address: str, connecting: Connecting, stack: AsyncExitStack) -> Sender:
    """Connect to a broker, until the stack is left.

    Raises:
        Failure: It cannot be reached, or refuses.
    """
    from trio_nsq.client import ConnectionFailed, Producer

    from .send import TCPSender, numbered_sender

    producer = Producer(
        address,
        max_msg_size=request.max_msg_size,
        # A message may be the only one of its MPUB, which holds two numbers besides.
        max_body_size=max(LIMITS.max_body_size, request.max_msg_size + 8),
        ordered=True,  # so that what is acknowledged are the first messages, without a gap
        **connecting.options(),
    )
    try:
        await stack.enter_async_context(producer)
    except ConnectionFailed as error:
        failure = not_connected(address, TCP_OPTION, error)
        if len(request.brokers) > 1:
            failure = Failure(f"{failure.message} Nothing was published to any broker.", failure.exit_code)
        raise failure from error
    over_tcp = TCPSender(producer, request.topic, request.defer_ms)
    if not request.retry:
        return over_tcp
    numbered = await numbered_sender(
        address, request.brokers[address], request.topic, request.defer_ms, connecting, over_tcp
    )
    return numbered or over_tcp


def _conclude(request: _Request, outcome: Outcome, elapsed_s: float) -> ExitCode:
    """Report, and say how the command ends.

    Raises:
        Failure: It did not go well.
    """
    failed = [broker for broker in outcome.brokers if broker.failure is not None]
    reason = " ".join(_failure(request, broker) for broker in failed) or outcome.input_failure
    if not request.quiet and (outcome.acknowledged or reason is None):
        if outcome.stopped == ExitCode.INTERRUPTED and _stands_after_echo(request):
            talk("")
        talk(_report(request, outcome, elapsed_s))
    if reason is None:
        return outcome.stopped or ExitCode.OK
    code = ExitCode.FAILURE
    if any(broker.acknowledged for broker in outcome.brokers):
        code = ExitCode.PARTIAL
    elif failed and all(map(_is_gone, failed)):
        code = ExitCode.UNREACHABLE
    raise Failure(f"{reason} {_fates(outcome)}.", code)


def _fates(outcome: Outcome) -> str:
    """How much was acknowledged and what became of the rest, at each broker if they differ."""
    fates = {}
    for broker in outcome.brokers:
        fate = f"{count_of(broker.acknowledged, 'message')} acknowledged"
        if broker.maybe_stored:
            fate += f", up to {broker.maybe_stored:,} more may have been stored"
        if unsent := broker.not_stored + outcome.held_back:
            fate += f", {unsent:,} more had been read"
        fates[broker.address] = fate
    if len(set(fates.values())) > 1:
        return "; ".join(f"{address}: {fate}" for address, fate in fates.items())
    (fate,) = set(fates.values())
    return f"At each broker: {fate}" if len(fates) > 1 else fate


def _stands_after_echo(request: _Request) -> bool:
    """Whether the terminal has written ^C into the line that comes next. The line of progress took it along."""
    return sys.stderr is not None and sys.stderr.isatty() and not _shows_progress(request)


def _is_gone(broker: BrokerOutcome) -> bool:
    from trio_nsq.client import BrokerError

    return broker.failure is not None and not isinstance(broker.failure.__cause__, BrokerError)


def _failure(request: _Request, broker: BrokerOutcome) -> str:
    from trio_nsq.client import BrokerError

    error = broker.failure
    assert error is not None
    if _is_gone(broker):
        return f"The broker at {broker.address} went away ({error.reason})."
    name = "The broker" if len(request.brokers) == 1 else f"The broker at {broker.address}"
    cause = error.__cause__
    if isinstance(cause, BrokerError) and cause.code == "INVALID_DEFER":
        return (
            f"{name} does not defer for that long (--max-defer of 'qcli serve'), and --defer is "
            f"{duration_text(request.defer_ms)}."
        )
    if request.defer_ms and isinstance(cause, BrokerError) and (most := _OUT_OF_RANGE.search(cause.text)):
        return (
            f"{name} defers for no longer than {duration_text(int(most[1]))} (--max-defer of 'qcli serve', "
            f"--max-req-timeout of nsqd), and --defer is {duration_text(request.defer_ms)}."
        )
    if isinstance(cause, BrokerError) and cause.code == "E_TOPIC_FULL":
        limit = cause.text.partition(" failed ")[2] or cause.text
        return f"{name} refused: {limit}."  # which says that nothing of it was stored
    hint = " Say --tls." if isinstance(cause, BrokerError) and "TLS required" in cause.text else ""
    return f"{name} refused: {error.reason}.{hint}"


def _report(request: _Request, outcome: Outcome, elapsed_s: float) -> str:
    brokers = f" on {len(request.brokers)} brokers" if len(request.brokers) > 1 else ""
    text = (
        f"{count_of(outcome.acknowledged, 'message')} ({size(outcome.acknowledged_bytes)}) published to "
        f"{request.topic}{brokers} in {elapsed_s:.2f} s: {per_second(outcome.acknowledged / elapsed_s)} messages/s, "
        f"{size(outcome.acknowledged_bytes / elapsed_s)}/s"
    )
    if outcome.empty:
        text += f"; {outcome.empty:,} empty skipped"
    if outcome.unfinished_bytes and outcome.stopped:
        text += f"; a message that was read only in part ({size(outcome.unfinished_bytes)}) was not published"
    if outcome.held_back:
        text += f"; {count_of(outcome.held_back, 'message')} read and not published"
    return text
