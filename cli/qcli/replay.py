"""`qcli replay`: what was published to one topic, published to another."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from .commands import DocumentedCommand, Example, option
from .completing import complete_topic
from .connecting import Connecting, tcp_connection
from .errors import Failure, not_connected
from .exit_codes import ExitCode
from .options import TCP_OPTION, http_address, tcp_address
from .output import hear_library, quiet_library, size, talk, talks_to_live_terminal
from .output import rate as per_second
from .params import Source, source, topic_name, without_scheme
from .positions import NOTE as POSITIONS
from .positions import check_range, from_option, to_option

if TYPE_CHECKING:
    from .replaying import ReplayOutcome

SELECTION, SENDING = "Which messages", "Sending"
_MAX_BYTES = 2**30
"""Whether a message is too long is for the broker to say, whose limit we do not know."""


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line."""

    source: str
    topic: str
    http_address: str
    tcp_address: str
    first: str
    end: str | None
    count: int | None
    pattern: re.Pattern[bytes] | None
    rate: float | None
    speed: float | None
    quiet: bool


class Speed(click.ParamType[float]):
    """How many times as fast, such as `2x` or `0.5x`."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)x?", str(value))
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is not a speed such as 1x, 2x or 0.5x.", param, ctx)
        return float(found[1])


class Pattern(click.ParamType["re.Pattern[bytes]"]):
    """A regular expression for bytes."""

    name = "regex"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[bytes]:
        """Compiled."""
        try:
            return re.compile(os.fsencode(value))
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression: {error}.", param, ctx)


def destination(text: str) -> str:
    """The name of a topic."""
    found: Source = source(text)
    if found.channel is not None:
        raise click.BadParameter(
            f"{text!r} is a channel: to have messages delivered to it again, see 'qcli channel seek'."
        )
    return found.topic


@click.command(
    "replay",
    cls=DocumentedCommand,
    short_help="Publish again what was published before.",
    examples=[
        Example("the last two hours into a topic of their own", "qcli replay clicks clicks.again --from 2h"),
        Example(
            "from one time to another, at 500 messages a second",
            "qcli replay clicks test --from 2026-11-21T04:00 --to 2026-11-21T05:00 --rate 500",
        ),
        Example("a day in an hour, as it came", "qcli replay clicks test --from 24h --speed 24x"),
        Example("only some", "qcli replay clicks errors --match '\"status\": *5..'"),
        Example(
            "into another broker",
            "qcli replay clicks clicks --from 1h --nsqd-http-address prod:4151 --nsqd-tcp-address test:4150",
        ),
    ],
    exits={
        ExitCode.OK: "Everything was published and acknowledged.",
        ExitCode.FAILURE: "Nothing was published: no such topic, or a broker refused.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} Or it went away before any message was acknowledged.",
        ExitCode.PARTIAL: "Some messages were acknowledged, then it failed. Standard error says how to go on.",
        ExitCode.DAMAGED: "Damaged messages were passed over; standard error says which. All others were published.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Standard error says how to go on.",
        ExitCode.TERMINATED: "Terminated (SIGTERM), likewise.",
    },
    notes={
        "What is published": "Bodies, as new messages: with ids and times of their own, to all channels of the "
        "destination, and at once, also those that were deferred. Messages are read out of the topic's log, whatever "
        "has become of them, and no channel of the topic notices. The end is fixed at the beginning: a topic may be "
        "replayed into itself. To have one channel get its messages again, see 'qcli channel seek'.",
        "Going on": "At a signal, or if the destination fails, what is on its way is waited for, and the command line "
        "that goes on from there is told. A broker that is read from and goes away is waited for. If an "
        "acknowledgement was lost, messages may be published twice.",
        "Positions": POSITIONS,
    },
)
@click.argument("wanted", metavar="SOURCE", type=topic_name, shell_complete=complete_topic)
@click.argument("topic", metavar="DESTINATION", type=destination, shell_complete=complete_topic)
@tcp_address("The broker to publish to.")
@http_address("The HTTP address of the broker to read from.")
@tcp_connection
@from_option(
    SELECTION,
    "Begin with the message of this sequence, or with those published at this time; if it is not given, with the "
    "earliest that is kept.",
)
@to_option(SELECTION, "End before the message of this sequence, or before those published at this time.")
@option(
    SELECTION,
    "-n",
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="End after N messages published.",
)
@option(
    SELECTION,
    "--match",
    "pattern",
    type=Pattern(),
    metavar="REGEX",
    help="Only messages in whose body this regular expression (Python's) is found.",
)
@option(
    SENDING,
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Messages per second, at most; evenly.",
)
@option(
    SENDING,
    "--speed",
    type=Speed(),
    metavar="FACTOR",
    help="As far apart in time as they were, 1x, or nearer: 2x in half the time.",
)
@option("Output", "--quiet", "-q", is_flag=True, help="No progress and no report; errors only.")
def command(
    wanted: str,
    topic: str,
    nsqd_tcp_address: str,
    nsqd_http_address: str,
    first: str | None,
    end: str | None,
    count: int | None,
    pattern: re.Pattern[bytes] | None,
    rate: float | None,
    speed: float | None,
    quiet: bool,
) -> int:
    """Publish messages of one topic, from its log, to another topic.

    In their order, and as fast as it goes unless --rate or --speed say otherwise. At the end the numbers of messages
    are reported on standard error.
    """
    import trio

    if rate is not None and speed is not None:
        raise click.UsageError("--rate and --speed exclude each other.")
    check_range(first, end)
    request = _Request(
        wanted,
        topic,
        nsqd_http_address,
        nsqd_tcp_address,
        first or "earliest",
        end,
        count,
        pattern,
        rate,
        speed,
        quiet,
    )
    begun_s = time.monotonic()
    outcome = trio.run(_replay, request)
    return _conclude(request, outcome, time.monotonic() - begun_s)


async def _replay(request: _Request) -> ReplayOutcome:
    import trio

    from trio_nsq.client import ConnectionFailed, Producer
    from trio_nsq.client.topic_reader import TopicReader

    from .broker_log import note_beginning, reading_errors
    from .reading import Pace
    from .replaying import Replay, Spacing
    from .signals import watch_signals

    quiet_library()
    connecting = Connecting.of_command()
    try:
        async with Producer(
            request.tcp_address,
            max_msg_size=_MAX_BYTES,
            max_body_size=_MAX_BYTES,
            **connecting.options(),
        ) as producer:
            with reading_errors(request.http_address):
                async with (
                    TopicReader(
                        without_scheme(request.http_address),
                        request.source,
                        tls=connecting.https_context(request.http_address),
                        start=request.first,
                        end=request.end,
                        max_messages=request.count if request.pattern is None else None,
                    ) as reader,
                    trio.open_nursery() as nursery,
                ):
                    hear_library()
                    note_beginning(request.source, reader, request.first)
                    replay = Replay(
                        request.source,
                        reader,
                        producer,
                        request.topic,
                        count=request.count,
                        pattern=request.pattern,
                        pace=Pace(request.rate, trio.current_time()) if request.rate else None,
                        spacing=Spacing(request.speed) if request.speed else None,
                    )
                    await nursery.start(watch_signals, replay.stop)
                    if not request.quiet and talks_to_live_terminal():
                        from .progress import show_progress

                        nursery.start_soon(show_progress, replay.outcome, lambda: replay.outcome.share)
                    await replay.run()
                    nursery.cancel_scope.cancel()
    except ConnectionFailed as error:
        raise not_connected(request.tcp_address, TCP_OPTION, error) from error
    return replay.outcome


def _conclude(request: _Request, outcome: ReplayOutcome, elapsed_s: float) -> ExitCode:
    """Report, and say how the command ends.

    Raises:
        Failure: It did not go well.
    """
    if not request.quiet:
        talk(_report(request, outcome, elapsed_s))
    going_on = f"Go on with --from {outcome.position} --to {outcome.end}"
    if request.count is not None:
        going_on += f" -n {request.count - outcome.acknowledged}"
    if outcome.failure is not None:
        from trio_nsq.client import BrokerError

        fate = f"{_messages(outcome.acknowledged)} acknowledged"
        if outcome.maybe_stored:
            fate += f", up to {outcome.maybe_stored:,} more may have been stored"
        code = ExitCode.PARTIAL if outcome.acknowledged else ExitCode.FAILURE
        if not outcome.acknowledged and not isinstance(outcome.failure.__cause__, BrokerError):
            code = ExitCode.UNREACHABLE
        raise Failure(
            f"The broker at {request.tcp_address}: {outcome.failure.reason}; {fate}. {going_on}.", code
        )
    if outcome.stopped is not None:
        if outcome.position < outcome.end:
            talk(f"{going_on}.")
        return outcome.stopped
    return ExitCode.DAMAGED if outcome.damaged else ExitCode.OK


def _report(request: _Request, outcome: ReplayOutcome, elapsed_s: float) -> str:
    text = (
        f"{_messages(outcome.acknowledged)} ({size(outcome.acknowledged_bytes)}) of {request.source} "
        f"published to {request.topic} in {elapsed_s:.2f} s: "
        f"{per_second(outcome.acknowledged / elapsed_s)} messages/s"
    )
    if outcome.position > outcome.begun:
        text += f"; sequences {outcome.begun} to {outcome.position - 1}"
    if outcome.left_out:
        text += f"; {outcome.left_out:,} left out, which do not match"
    if outcome.missing:
        text += f"; {outcome.missing:,} missing"
    return text


def _messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"
