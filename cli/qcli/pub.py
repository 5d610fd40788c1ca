"""`qcli pub`: standard input, or files, into a topic."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trio_nsq.protocol import Limits

from .commands import DocumentedCommand, Example, option
from .completing import complete_topic
from .connecting import Connecting, tcp_connection
from .errors import Failure, not_connected
from .exit_codes import ExitCode
from .options import HTTP_OPTION, TCP_OPTION, http_address, tcp_address
from .output import count_of, quiet_library, size, talk, talks_to_live_terminal
from .output import rate as per_second
from .params import delimiter, duration_text, long_duration, topic_name

if TYPE_CHECKING:
    from .publishing import Outcome

LIMITS = Limits()
RATED_READ_BYTES = 4096
"""With --rate: what is read is published soon, also when a signal ends the reading."""

_OUT_OF_RANGE = re.compile(r"^DPUB timeout \d+ out of range 0-(\d+)")

INPUT, SENDING = "Input", "Sending"


class _PubCommand(DocumentedCommand):
    def note_repeated(self, ctx: click.Context, text: str) -> None:
        if text.startswith((TCP_OPTION, HTTP_OPTION)):
            raise click.UsageError(
                f"{text}, and messages go to one broker. Start a 'qcli pub' for each: ... | "
                f"tee >(qcli pub TOPIC {TCP_OPTION} A) | qcli pub TOPIC {TCP_OPTION} B",
                ctx,
            )
        super().note_repeated(ctx, text)


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line."""

    topic: str
    files: tuple[str, ...]
    address: str
    delimiter: bytes
    max_msg_size: int
    http_address: str
    batch_size: int | None
    rate: float | None
    defer_ms: int
    retry: bool
    quiet: bool


@click.command(
    "pub",
    cls=_PubCommand,
    short_help="Publish lines to a topic.",
    examples=[
        Example("a file, one message per line", "cat access.log | qcli pub clicks"),
        Example("as lines are written", "tail -F access.log | qcli pub clicks"),
        Example("anything at all, separated by NUL", "find . -name '*.json' -print0 | qcli pub -0 names"),
        Example("files, at 500 messages a second", "qcli pub clicks --rate 500 monday.log tuesday.log"),
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
        "Several brokers": "Messages go to one broker. For the same messages on several, start a command for each: "
        f"'... | tee >(qcli pub TOPIC {TCP_OPTION} A) | qcli pub TOPIC {TCP_OPTION} B'. While one of them is "
        "waited for, the others wait, too.",
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
@http_address("The broker's HTTP address, for numbered batches, and for names to be completed.")
@tcp_address("The broker to connect to.")
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
    show_default="1000, or 10000 if they are numbered",
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
    nsqd_tcp_address: str,
    nsqd_http_address: str,
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

    Messages go out in batches and in order. A broker that goes away is waited for. At the end the numbers of
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
        nsqd_tcp_address,
        b"\0" if null else separator,
        max_msg_size,
        nsqd_http_address,
        batch_size,
        rate,
        defer_ms,
        not no_retry,
        quiet,
    )
    begun_s = time.monotonic()
    outcome = trio.run(_publish, request)
    return _conclude(request, outcome, time.monotonic() - begun_s)


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

    from trio_nsq.client import ConnectionFailed, Producer

    from .publishing import Publication
    from .reading import READ_BYTES, Pace
    from .sending import Sender, TCPSender, numbered_sender
    from .signals import watch_signals

    quiet_library()
    connecting = Connecting.of_command()
    try:
        async with (
            Producer(
                request.address,
                max_msg_size=request.max_msg_size,
                # A message may be the only one of its MPUB, which holds two numbers besides.
                max_body_size=max(LIMITS.max_body_size, request.max_msg_size + 8),
                ordered=True,  # so that what is acknowledged are the first messages, without a gap
                **connecting.options(),
            ) as producer,
            trio.open_nursery() as nursery,
        ):
            over_tcp = TCPSender(producer, request.topic, request.defer_ms)
            numbered = None
            if request.retry:
                address, topic, defer_ms = request.address, request.topic, request.defer_ms
                numbered = await numbered_sender(
                    address, request.http_address, topic, defer_ms, connecting, over_tcp
                )
            sender: Sender = numbered or over_tcp
            publication = Publication(
                sender,
                request.address,
                delimiter=request.delimiter,
                max_msg_size=request.max_msg_size,
                batch_size=request.batch_size or sender.batch_size,
                retry=request.retry,
                pace=Pace(request.rate, trio.current_time()) if request.rate else None,
            )
            await nursery.start(watch_signals, publication.stop)
            if _shows_progress(request):
                from .progress import show_progress

                nursery.start_soon(show_progress, publication.outcome)
            await publication.run(request.files, RATED_READ_BYTES if request.rate else READ_BYTES)
            if publication.outcome.publish_failure is None:
                await sender.end()
            nursery.cancel_scope.cancel()
    except ConnectionFailed as error:
        raise not_connected(request.address, TCP_OPTION, error) from error
    return publication.outcome


def _conclude(request: _Request, outcome: Outcome, elapsed_s: float) -> ExitCode:
    """Report, and say how the command ends.

    Raises:
        Failure: It did not go well.
    """
    reason = _failure(request, outcome)
    if not request.quiet and (outcome.acknowledged or reason is None):
        if outcome.stopped == ExitCode.INTERRUPTED and _stands_after_echo(request):
            talk("")
        talk(_report(request, outcome, elapsed_s))
    if reason is None:
        return outcome.stopped or ExitCode.OK
    fate = f"{count_of(outcome.acknowledged, 'message')} acknowledged"
    if outcome.maybe_stored:
        fate += f", up to {outcome.maybe_stored:,} more may have been stored"
    if unsent := outcome.not_stored + outcome.held_back:
        fate += f", {unsent:,} more had been read"
    code = ExitCode.PARTIAL if outcome.acknowledged else ExitCode.FAILURE
    if code is ExitCode.FAILURE and _is_gone(outcome):
        code = ExitCode.UNREACHABLE
    raise Failure(f"{reason} {fate}.", code)


def _stands_after_echo(request: _Request) -> bool:
    """Whether the terminal has written ^C into the line that comes next. The line of progress took it along."""
    return sys.stderr is not None and sys.stderr.isatty() and not _shows_progress(request)


def _is_gone(outcome: Outcome) -> bool:
    from trio_nsq.client import BrokerError

    error = outcome.publish_failure
    return error is not None and not isinstance(error.__cause__, BrokerError)


def _failure(request: _Request, outcome: Outcome) -> str | None:
    from trio_nsq.client import BrokerError

    error = outcome.publish_failure
    if error is None:
        return outcome.input_failure
    if _is_gone(outcome):
        return f"The broker at {request.address} went away ({error.reason})."
    cause = error.__cause__
    if isinstance(cause, BrokerError) and cause.code == "INVALID_DEFER":
        return (
            "The broker does not defer for that long (--max-defer of 'qcli serve'), and --defer is "
            f"{duration_text(request.defer_ms)}."
        )
    if request.defer_ms and isinstance(cause, BrokerError) and (most := _OUT_OF_RANGE.search(cause.text)):
        return (
            f"The broker defers for no longer than {duration_text(int(most[1]))} (--max-defer of 'qcli serve', "
            f"--max-req-timeout of nsqd), and --defer is {duration_text(request.defer_ms)}."
        )
    if isinstance(cause, BrokerError) and cause.code == "E_TOPIC_FULL":
        limit = cause.text.partition(" failed ")[2] or cause.text
        return f"The broker refused: {limit}."  # which says that nothing of it was stored
    hint = " Say --tls." if isinstance(cause, BrokerError) and "TLS required" in cause.text else ""
    return f"The broker refused: {error.reason}.{hint}"


def _report(request: _Request, outcome: Outcome, elapsed_s: float) -> str:
    text = (
        f"{count_of(outcome.acknowledged, 'message')} ({size(outcome.acknowledged_bytes)}) published to "
        f"{request.topic} in {elapsed_s:.2f} s: {per_second(outcome.acknowledged / elapsed_s)} messages/s, "
        f"{size(outcome.acknowledged_bytes / elapsed_s)}/s"
    )
    if outcome.empty:
        text += f"; {outcome.empty:,} empty skipped"
    if outcome.unfinished_bytes and outcome.stopped:
        text += f"; a message that was read only in part ({size(outcome.unfinished_bytes)}) was not published"
    if outcome.held_back:
        text += f"; {count_of(outcome.held_back, 'message')} read and not published"
    return text
