"""`qcli tail`: prints the messages of topics."""

import click

from ...broker.address_options import http_addresses, lookupd_addresses, tcp_addresses
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_source
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import (
    count_option,
    delimiter_options,
    max_in_flight_option,
    option,
    options_as,
    output_format,
)
from ...framework.params import positive_duration, source
from ...framework.positions import POSITIONS_NOTE, from_option, to_option
from .options import TAKE_BACKLOG, TailOptions

OUTPUT, RECEIVING, HISTORY = "Output", "Receiving", "Which messages"


@click.command(
    "tail",
    cls=DocumentedCommand,
    short_help="Print the messages of topics.",
    examples={
        "consume a channel": "qcli tail clicks/archive >> clicks.log",
        "look at what is published from now on; others still get it too": "qcli tail clicks",
        "a hundred messages as JSON": "qcli tail clicks -n 100 --format json | jq .body",
        "from every broker that has the topic": "qcli tail clicks --lookupd-http-address 127.0.0.1:4161",
        "two topics": "qcli tail clicks orders --print-topic",
        "the last hour, and what comes from now on": "qcli tail clicks --since 1h",
        "all that is kept, then end": "qcli tail clicks --from earliest --to latest",
        "empty a channel into a file, then end": "qcli tail clicks/archive --idle-timeout 2s > rest.log",
    },
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
        "Positions": POSITIONS_NOTE,
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
@delimiter_options(OUTPUT, "What follows each body", "for xargs -0")
@option(OUTPUT, "--print-topic", is_flag=True, help="Write the topic and ' | ' before each body.")
@count_option(RECEIVING, "End after exactly N messages, of all topics together.")
@option(
    RECEIVING,
    "--idle-timeout",
    "idle_timeout_ms",
    type=positive_duration,
    help="End after so long without a message.",
)
@max_in_flight_option(RECEIVING, "Messages to receive ahead, per topic; never more than -n asks for.")
@option(
    RECEIVING,
    TAKE_BACKLOG,
    is_flag=True,
    help="Without a channel, at an nsqd: go on even if this takes what waits for the topic's first channel.",
)
@options_as(TailOptions)
def command(options: TailOptions) -> int:
    """Write the messages of topics to standard output, one per line, as they come.

    With a channel, this is one of its consumers, and what it writes is done for that channel. Without one it
    listens on a private channel that goes away with it: it sees what is published from now on, and takes nothing
    from anybody. With --from it begins with what was published before.
    """
    import trio

    options = options.resolve()
    if options.reads_log:
        from .read_log import tail_log

        return trio.run(tail_log, options)
    from .consume import tail_channels

    return trio.run(tail_channels, options)
