"""`qcli pub`: standard input, or files, into a topic."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from trio_nsq.protocol import Limits

from .commands import DocumentedCommand, Example, option
from .completing import complete_topic
from .errors import Failure, failure_reason, unreachable
from .exit_codes import ExitCode
from .options import TCP_OPTION, USER_AGENT, streams_from_broker
from .output import quiet_library, size, talk, talks_to_live_terminal
from .params import delimiter, duration, topic_name

if TYPE_CHECKING:
    from .publishing import Outcome

LIMITS = Limits()
DEFAULT_BATCH_SIZE = 1000
RATED_READ_BYTES = 4096
"""With --rate: what is read is published soon, also when a signal ends the reading."""

INPUT, SENDING = "Input", "Sending"


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line."""

    topic: str
    files: tuple[str, ...]
    address: str
    delimiter: bytes
    max_msg_size: int
    batch_size: int
    rate: float | None
    defer_ms: int
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
        Example("delivered in a minute and a half", "echo later | qcli pub reminders --defer 1m30s"),
    ],
    exits={
        ExitCode.OK: "Everything was published and acknowledged.",
        ExitCode.FAILURE: "Nothing was published: the input cannot be read, a message is too long, the broker refused.",
        ExitCode.UNREACHABLE: "No broker answers at the address, or it went away; no message was acknowledged.",
        ExitCode.PARTIAL: "Some messages were acknowledged, then it failed. Standard error says how many were, "
        "and how many more may have been stored.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). What had been read was published.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). What had been read was published.",
    },
    notes={
        "Messages": "Bytes are kept as they are: nothing is decoded, and a carriage return before a line feed "
        "belongs to the message. What follows the last delimiter is a message too. Empty messages are skipped, "
        "because NSQ has none; their number is reported at the end.",
    },
)
@click.argument("topic", metavar="TOPIC", type=topic_name, shell_complete=complete_topic)
@click.argument(
    "files",
    metavar="[FILE...]",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True),
)
@streams_from_broker
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
    default=DEFAULT_BATCH_SIZE,
    metavar="N",
    show_default=True,
    help="Messages in one MPUB, at most. When input is slow, those that have come leave after 50 ms.",
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
    type=duration,
    default="0",
    metavar="DURATION",
    help="Deliver each message so long after it is published, such as 500ms or 1m30s. Slower: one DPUB per message.",
)
@option("Output", "--quiet", "-q", is_flag=True, help="No progress and no report; errors only.")
def command(
    topic: str,
    files: tuple[str, ...],
    nsqd_tcp_address: str,
    nsqd_http_address: str,
    separator: bytes,
    null: bool,
    max_msg_size: int,
    batch_size: int,
    rate: float | None,
    defer_ms: int,
    quiet: bool,
) -> int:
    """Publish standard input, or files, to a topic: one message per line.

    Messages go out in batches, several of them on their way at once, and in order. At the end the numbers of
    messages and bytes, and the rate, are reported on standard error.
    """
    import trio

    if null and separator != b"\n":
        raise click.UsageError("--null and --delimiter exclude each other.")
    request = _Request(
        topic,
        files or ("-",),
        nsqd_tcp_address,
        b"\0" if null else separator,
        max_msg_size,
        batch_size,
        rate,
        defer_ms,
        quiet,
    )
    begun_s = time.monotonic()
    outcome = trio.run(_publish, request)
    return _conclude(request, outcome, time.monotonic() - begun_s)


async def _publish(request: _Request) -> Outcome:
    import trio

    from trio_nsq.client import ConnectionFailed, Producer

    from .publishing import Publication
    from .reading import READ_BYTES, Pace
    from .signals import watch_signals

    quiet_library()
    try:
        async with (
            Producer(
                request.address,
                max_msg_size=request.max_msg_size,
                # A message may be the only one of its MPUB, which holds two numbers besides.
                max_body_size=max(LIMITS.max_body_size, request.max_msg_size + 8),
                # Whether it is too long is for the broker to say, whose limit we do not know.
                max_req_timeout_ms=max(LIMITS.max_req_timeout_ms, request.defer_ms),
                user_agent=USER_AGENT,
            ) as producer,
            trio.open_nursery() as nursery,
        ):
            publication = Publication(
                producer,
                request.topic,
                delimiter=request.delimiter,
                max_msg_size=request.max_msg_size,
                batch_size=request.batch_size,
                defer_ms=request.defer_ms,
                pace=Pace(request.rate, trio.current_time()) if request.rate else None,
            )
            await nursery.start(watch_signals, publication.stop)
            # A line that is redrawn would get in the way of typing.
            typing = "-" in request.files and sys.stdin is not None and sys.stdin.isatty()
            if not request.quiet and talks_to_live_terminal() and not typing:
                from .progress import show_progress

                nursery.start_soon(show_progress, publication.outcome)
            await publication.run(request.files, RATED_READ_BYTES if request.rate else READ_BYTES)
            nursery.cancel_scope.cancel()
    except ConnectionFailed as error:
        raise unreachable(request.address, TCP_OPTION, failure_reason(error)) from error
    return publication.outcome


def _conclude(request: _Request, outcome: Outcome, elapsed_s: float) -> ExitCode:
    """Report, and say how the command ends.

    Raises:
        Failure: It did not go well.
    """
    reason = _failure(request, outcome)
    if not request.quiet and (outcome.acknowledged or reason is None):
        talk(_report(request, outcome, elapsed_s))
    if reason is None:
        return outcome.stopped or ExitCode.OK
    fate = f"{_messages(outcome.acknowledged)} acknowledged"
    if outcome.maybe_stored:
        fate += f", up to {outcome.maybe_stored:,} more may have been stored"
    if outcome.not_stored:
        fate += f", {outcome.not_stored:,} more had been read"
    code = ExitCode.PARTIAL if outcome.acknowledged else ExitCode.FAILURE
    if code is ExitCode.FAILURE and _is_gone(outcome):
        code = ExitCode.UNREACHABLE
    raise Failure(f"{reason} {fate}.", code)


def _is_gone(outcome: Outcome) -> bool:
    from trio_nsq.client import BrokerError

    error = outcome.publish_failure
    return error is not None and not isinstance(error.__cause__, BrokerError)


def _failure(request: _Request, outcome: Outcome) -> str | None:
    error = outcome.publish_failure
    if error is None:
        return outcome.input_failure
    if _is_gone(outcome):
        return f"The broker at {request.address} went away ({error.reason})."
    return f"The broker refused: {error.reason}."


def _report(request: _Request, outcome: Outcome, elapsed_s: float) -> str:
    rate = outcome.acknowledged / elapsed_s
    text = (
        f"{_messages(outcome.acknowledged)} ({size(outcome.acknowledged_bytes)}) published to {request.topic} "
        f"in {elapsed_s:.2f} s: {rate:,.0f} messages/s, {size(outcome.acknowledged_bytes / elapsed_s)}/s"
    )
    if outcome.empty:
        text += f"; {outcome.empty:,} empty skipped"
    if outcome.unfinished_bytes and outcome.stopped:
        text += f"; an unfinished one of {outcome.unfinished_bytes:,} bytes was not published"
    return text


def _messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"
