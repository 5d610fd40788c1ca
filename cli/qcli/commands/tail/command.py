"""`qcli tail`: the messages of a topic on standard output."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import click

from ...broker.address_options import (
    HTTP_OPTION,
    LOOKUPD_OPTION,
    TCP_OPTION,
    check_tcp_address,
    chosen_lookupds,
    http_addresses,
    lookupd_addresses,
    tcp_addresses,
)
from ...broker.connection_options import Connecting, refuse_plain_http, tcp_connection
from ...broker.name_completion import complete_source
from ...broker.position_options import NOTE as POSITIONS
from ...broker.position_options import check_range, from_option, to_option
from ...framework.command import DocumentedCommand, Example
from ...framework.errors import leaves, no_lookupd, not_connected
from ...framework.exit_codes import ExitCode
from ...framework.options import option, output_format
from ...framework.output import RawOutput, hear_library, quiet_library
from ...framework.params import Source, delimiter, positive_duration, source, without_scheme

MAX_IN_FLIGHT = 2500
"""What brokers allow by default. Larger batches cost less for each message."""

TAKE_BACKLOG = "--take-backlog"
IDLE_S, REDISTRIBUTE_S = 1.0, 0.5
"""With more brokers than messages wanted: how soon another is asked if one has nothing. Somebody is watching."""

OUTPUT, RECEIVING, HISTORY = "Output", "Receiving", "Which messages"


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line."""

    sources: tuple[Source, ...]
    addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    count: int | None
    form: str
    delimiter: bytes
    print_topic: bool
    max_in_flight: int
    idle_timeout_ms: int | None
    first: str | None
    end: str | None
    http_addresses: tuple[str, ...]
    take_backlog: bool


@click.command(
    "tail",
    cls=DocumentedCommand,
    short_help="Print the messages of topics.",
    examples=[
        Example("consume a channel", "qcli tail clicks/archive >> clicks.log"),
        Example("look at what is published from now on; others still get it too", "qcli tail clicks"),
        Example("a hundred messages as JSON", "qcli tail clicks -n 100 --format json | jq .body"),
        Example(
            "from every broker that has the topic", "qcli tail clicks --lookupd-http-address 127.0.0.1:4161"
        ),
        Example("two topics", "qcli tail clicks orders --print-topic"),
        Example("the last hour, and what comes from now on", "qcli tail clicks --since 1h"),
        Example("all that is kept, then end", "qcli tail clicks --from earliest --to latest"),
        Example(
            "empty a channel into a file, then end", "qcli tail clicks/archive --idle-timeout 2s > rest.log"
        ),
    ],
    exits={
        ExitCode.OK: "The messages asked for were written, the idle timeout was over, or the reader of standard "
        "output went away.",
        ExitCode.FAILURE: "Standard output cannot be written, or the broker refused.",
        ExitCode.USAGE: f"{ExitCode.USAGE.meaning} Or it would take a topic's backlog; see Private channels.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} A broker that goes away later is waited for.",
        ExitCode.DAMAGED: "With --from or --to: damaged messages were passed over; standard error says which.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). What had not been written was returned.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). What had not been written was returned.",
    },
    notes={
        "Delivery": "A message is finished once it is written to standard output, and not before. What was "
        "received and not written goes back to the channel at the end, so nothing stays in flight. A message may "
        "come twice if the broker or the connection fails. A topic or channel that is not there is made, as by any NSQ "
        "consumer.",
        "Private channels": "Without a channel, this command listens on a private one of its own. It begins at the end "
        "of the topic and takes nothing: messages wait for the first other channel as if it were not there. nsqd has "
        "no private channels. There an ordinary channel stands in for one and goes away with this command, but only "
        "if the topic has another channel already, which is asked over HTTP: as the first channel it would take all "
        "messages that wait, and lose them at the end. --take-backlog allows it in any case.",
        "Pipes": "What has gone into a pipe is written, whether or not its reader takes it: 'qcli tail clicks/archive "
        "| head -1' prints one message and finishes as many as the pipe holds, hundreds or thousands, which the "
        "channel then has no more. To take a number of messages and leave the others, use -n, such as -n 1.",
        "History": "With --from or --to messages are read out of the topic's log, in their order, whatever has become "
        "of them: no channel loses any of them, and none is made. Without --to it then goes on with what is "
        "published, without a gap and without repeating anything, also over a restart of the broker. A deferred "
        "message comes when it is published. How far back the log goes is a matter of the topic's retention; see 'qcli "
        "channel seek --help' for having messages delivered again.",
        "Positions": POSITIONS,
        "JSON": "One object per line: topic, id, timestamp_ns (when it was published), attempts (1 at the first "
        "delivery), and body, a string; for a body that is not UTF-8, body_base64 stands in its place. With --from or "
        "--to attempts is 0, and there are also sequence, and due_ns (until when it is deferred; null: it is not).",
    },
)
@click.argument(
    "sources",
    metavar="TOPIC[/CHANNEL]...",
    nargs=-1,
    required=True,
    type=source,
    shell_complete=complete_source,
)
@tcp_addresses("The brokers to connect to.")
@lookupd_addresses(
    "An nsqlookupd that names the brokers instead, also those that come later: it is asked once a minute, and "
    "while nobody has the topic after 1, 2, 4, ... seconds."
)
@http_addresses(
    "The brokers' HTTP addresses, for --from and --to, for names to be completed, and to ask an nsqd for channels."
)
@from_option(HISTORY, "Begin with the message of this sequence, or with those published at this time.")
@tcp_connection
@to_option(HISTORY, "End before the message of this sequence, or before those published at this time.")
@output_format("raw: bodies as they are. json: an object per message and line, see below.", "raw", "json")
@option(
    OUTPUT,
    "--delimiter",
    "-d",
    "separator",
    type=delimiter,
    default=r"\n",
    metavar="TEXT",
    show_default=True,
    help=r"What follows each body. \n, \t, \0, \xNN and the like are understood.",
)
@option(OUTPUT, "--null", "-0", is_flag=True, help=r"The same as --delimiter '\0', for xargs -0.")
@option(OUTPUT, "--print-topic", is_flag=True, help="Write the topic and ' | ' before each body.")
@option(
    RECEIVING,
    "-n",
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="End after exactly N messages, of all topics together.",
)
@option(
    RECEIVING,
    "--idle-timeout",
    "idle_timeout_ms",
    type=positive_duration,
    metavar="DURATION",
    help="End after so long without a message.",
)
@option(
    RECEIVING,
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=MAX_IN_FLIGHT,
    metavar="N",
    show_default=True,
    help="Messages to receive ahead, per topic; never more than -n asks for.",
)
@option(
    RECEIVING,
    TAKE_BACKLOG,
    is_flag=True,
    help="Without a channel, at an nsqd: go on even if this takes what waits for the topic's first channel.",
)
def command(
    sources: tuple[Source, ...],
    nsqd_tcp_addresses: tuple[str, ...],
    lookupd_addresses: tuple[str, ...],
    nsqd_http_addresses: tuple[str, ...],
    form: str,
    separator: bytes,
    null: bool,
    print_topic: bool,
    count: int | None,
    idle_timeout_ms: int | None,
    max_in_flight: int,
    take_backlog: bool,
    first: str | None,
    end: str | None,
) -> int:
    """Write the messages of topics to standard output, one per line, as they come.

    With a channel, this is one of its consumers, and what it writes is done for that channel. Without one it
    listens on a private channel that goes away with it: it sees what is published from now on, and takes nothing
    from anybody. With --from it begins with what was published before.
    """
    import trio

    if null and separator != b"\n":
        raise click.UsageError("--null and --delimiter exclude each other.")
    if form == "json" and (null or separator != b"\n"):
        raise click.UsageError("--null and --delimiter are for --format raw; JSON is one object per line.")
    lookupds = chosen_lookupds(lookupd_addresses, "nsqd_tcp_addresses")
    request = _Request(
        sources,
        nsqd_tcp_addresses,
        lookupds,
        count,
        form,
        b"\0" if null else separator,
        print_topic,
        min(max_in_flight, count or max_in_flight),
        idle_timeout_ms,
        first,
        end,
        nsqd_http_addresses,
        take_backlog,
    )
    if first is None and end is None:
        if not lookupds:
            for address in nsqd_tcp_addresses:
                check_tcp_address(address)
        return trio.run(_tail, request)
    _check_history(request, click.get_current_context())
    return trio.run(_tail_log, request)


def _check_history(request: _Request, ctx: click.Context) -> None:
    """Raises UsageError for what does not go with a log."""
    check_range(request.first, request.end)
    if len(request.http_addresses) > 1:
        raise click.UsageError(f"--from and --to read the log of one broker: name one with {HTTP_OPTION}.")
    refuse_plain_http(request.http_addresses[0])
    if ctx.get_parameter_source("lookupd_addresses") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(
            f"{LOOKUPD_OPTION} is for channels: --from and --to read the log of one broker."
        )
    for each in request.sources:
        if each.channel is not None:
            raise click.UsageError(
                f"--from and --to read a topic's log: leave '/{each.channel}' out, or see 'qcli channel seek'."
            )
    if ctx.get_parameter_source("max_in_flight") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--max-in-flight is for channels: nothing is in flight with --from and --to.")


async def _tail(request: _Request) -> ExitCode:
    import trio

    from trio_nsq.client import ConnectionFailed, Consumer

    from ...framework.signals import watch_signals
    from .channel_messages import Tail, json_renderer, raw_renderer
    from .private_channel import SharedChannel

    if len(request.addresses) > 1 and not request.lookupd_addresses:
        hear_library()  # others go on while one of them is away
    else:
        quiet_library()
    connecting = Connecting.of_command().options()
    consumers = []
    for each in request.sources:
        channel = each.channel or f"tail{random.randrange(10**6):06d}#ephemeral"
        consumer = Consumer(
            each.topic,
            channel,
            nsqd_tcp_addresses=[] if request.lookupd_addresses else request.addresses,
            lookupd_http_addresses=request.lookupd_addresses,
            max_in_flight=request.max_in_flight,
            private_channel=each.channel is None,
            low_rdy_idle_timeout_s=IDLE_S,
            rdy_redistribute_interval_s=REDISTRIBUTE_S,
            **connecting,
        )
        consumer.without_private_channels = SharedChannel(
            each.topic,
            channel,
            http_addresses=list(request.http_addresses),
            lookupd_addresses=request.lookupd_addresses,
            take_backlog=request.take_backlog,
        ).check
        consumers.append((each.topic, consumer))
    tail = Tail(
        RawOutput(),
        json_renderer if request.form == "json" else raw_renderer(request.delimiter, request.print_topic),
        count=request.count,
        idle_timeout_s=request.idle_timeout_ms / 1000 if request.idle_timeout_ms else math.inf,
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, tail.stop)
            await tail.run(
                consumers, f"Waiting for messages of {', '.join(map(str, request.sources))}; Ctrl-C ends."
            )
            nursery.cancel_scope.cancel()
    except* ConnectionFailed as group:
        (error, *_) = leaves(group)
        assert isinstance(error, ConnectionFailed)
        if request.lookupd_addresses:
            raise no_lookupd(error.address, error.reason) from None
        raise not_connected(error.address, TCP_OPTION, error) from None
    return tail.stopped or ExitCode.OK


async def _tail_log(request: _Request) -> ExitCode:
    import trio

    from trio_nsq.client.reading.topic_reader import TopicReader

    from ...broker.topic_log import reading_errors
    from ...framework.signals import watch_signals
    from .log_messages import LogTail, json_log_renderer, raw_log_renderer

    quiet_library()
    (address,) = request.http_addresses
    tls = Connecting.of_command().https_context(address)
    readers = [
        (
            each.topic,
            TopicReader(
                without_scheme(address),
                each.topic,
                tls=tls,
                start=request.first or "earliest",
                end=request.end,
                follow=request.end is None,
                max_messages=request.count,
            ),
        )
        for each in request.sources
    ]
    tail = LogTail(
        RawOutput(),
        json_log_renderer
        if request.form == "json"
        else raw_log_renderer(request.delimiter, request.print_topic),
        count=request.count,
        idle_timeout_s=request.idle_timeout_ms / 1000 if request.idle_timeout_ms else math.inf,
        first=request.first,
    )
    with reading_errors(address):
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, tail.stop)
            await tail.run(readers)
            nursery.cancel_scope.cancel()
    return tail.stopped or (ExitCode.DAMAGED if tail.damaged else ExitCode.OK)
