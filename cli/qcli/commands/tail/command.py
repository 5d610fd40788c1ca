"""`qcli tail`: prints the messages of topics."""

import click

from ...broker.address_options import (
    check_default_tcp_address,
    http_addresses,
    lookupd_addresses,
    tcp_addresses,
)
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
from ...framework.output import end_echoed_line
from ...framework.params import positive_duration, source
from ...framework.positions import POSITIONS_NOTE, from_option, to_option
from ...records.messages import MessageRecord
from ..shared.body_options import body_options
from ..shared.format_string import format_string_option
from .options import TAKE_BACKLOG, TailOptions

OUTPUT, RECEIVING, HISTORY = "Output", "Receiving", "Which messages"


@click.command(
    "tail",
    cls=DocumentedCommand,
    short_help="Print the messages of topics.",
    examples={
        "consume a channel": "qcli tail clicks/archive >> clicks.log",
        "print new messages, without taking them from other consumers": "qcli tail clicks",
        "print the last hour, then new messages": "qcli tail clicks --since 1h",
        "print a hundred messages as JSON": "qcli tail clicks -n 100 --format json | jq .body",
        "consume from every broker that has the topic": "qcli tail clicks --lookupd-http-address 127.0.0.1:4161",
        "print time, size and body": r"qcli tail clicks -f '%r %S %s\n'",
        "print Protobuf bodies as JSON": "qcli tail clicks --body-format protobuf --schema clicks.desc --message Click",
        "print two topics": "qcli tail clicks orders --print-topic",
        "print all retained messages, then end": "qcli tail clicks --from earliest --to latest",
        "empty a channel into a file, then end": "qcli tail clicks/archive --idle-timeout 2s > rest.log",
    },
    exits={
        ExitCode.OK: "The requested messages were written, the idle timeout expired, or the reader of standard "
        "output closed it.",
        ExitCode.FAILURE: "Standard output cannot be written, or the broker refused.",
        ExitCode.USAGE: f"{ExitCode.USAGE.meaning} Or the command would take a topic's backlog; see Private channels.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} If a connection is lost later, the command reconnects.",
        ExitCode.PARTIAL: "The idle timeout expired while one of several brokers was unreachable.",
        ExitCode.DAMAGED: "With --from or --to: damaged messages were skipped; standard error says which.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Unwritten messages were requeued.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). Unwritten messages were requeued.",
    },
    details={
        "Delivery": "The command finishes a message after it has written it to standard output. At the end it requeues "
        "the messages that it received and did not write, so nothing stays in flight. A message may be delivered "
        "twice if the broker or the connection fails. Missing topics and channels are created, as by any NSQ consumer.",
        "Private channels": "Without a channel, the command uses a private channel. That begins at the end of the "
        "topic and has no effect on others: the backlog still waits for the first ordinary channel. nsqd has no "
        "private channels. There the command creates an ordinary ephemeral channel, but only if the topic has another "
        "channel already, which it checks over HTTP: as the topic's first channel it would take the backlog, and lose "
        "it at the end. --take-backlog skips this check.",
        "Pipes": "A message counts as written once it is in a pipe, whether or not the pipe's reader reads it: "
        "'qcli tail clicks/archive | head -1' prints one message and finishes as many as fit into the pipe, hundreds "
        "or thousands. To take a number of messages and leave the others, use -n.",
        "History": "With --from or --to the command reads the topic's log, in order and regardless of channels: no "
        "channel loses a message, and none is created. Without --to it continues with new messages, without gaps or "
        "repetitions, also over a restart of the broker. Deferred messages are printed when they are published. The "
        "topic's retention limits how far back the log goes. The logs of several brokers are read at the same time; "
        "messages of different brokers have no order. To have a channel's messages delivered again, "
        "see 'qcli channel seek'.",
        "Positions": POSITIONS_NOTE,
        "JSON": "One object per line: topic, id, timestamp_ns and timestamp (when it was published, in Unix "
        "nanoseconds and RFC 3339), attempts (1 at the first delivery), headers, an object, if the message has some, "
        "and body, a string; if a body is not UTF-8, body_base64 replaces it. With --from or --to attempts is 0, and "
        "there are also sequence, and due_ns and due (until when it is deferred; null: not deferred).",
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
@tcp_addresses("Connect to these brokers.")
@lookupd_addresses("Connect to the brokers that these nsqlookupd name, too; ask them once a minute.")
@http_addresses(
    "Read logs (--from, --to) at these addresses; also for completion and to ask an nsqd for channels."
)
@from_option(HISTORY, "Begin at this position in the topic's log: see 'qcli help positions'.")
@tcp_connection
@to_option(HISTORY, "End before this position.")
@output_format(
    "raw: write bodies unchanged. json: write an object per line.", "raw", "json", records=[MessageRecord]
)
@format_string_option(OUTPUT)
@delimiter_options(OUTPUT, "Write this text after each body", "for xargs -0")
@body_options(OUTPUT)
@option(OUTPUT, "--print-topic", is_flag=True, help="Write the topic and ' | ' before each body.")
@count_option(RECEIVING, "End after exactly N messages over all topics.")
@option(
    RECEIVING,
    "--idle-timeout",
    "idle_timeout_ms",
    type=positive_duration,
    help="End after this time without a message.",
)
@max_in_flight_option(
    RECEIVING, "Receive at most N messages ahead per topic, and never more than -n asks for."
)
@option(
    RECEIVING,
    TAKE_BACKLOG,
    is_flag=True,
    brief=True,
    help="Without a channel, on an nsqd: continue even if this takes the topic's backlog.",
)
@options_as(TailOptions)
def command(options: TailOptions) -> int:
    """Write the messages of topics to standard output, one per line.

    With a channel, the command is a consumer of it and finishes the messages that it writes. Without a channel it
    prints new messages and takes none from other consumers. With --from it begins with older messages.
    """
    options = options.resolve()
    if options.reads_log:
        from .read_log import tail_log

        return _ended(tail_log(options))
    check_default_tcp_address("messages come from")
    from ...framework.signals import run_trio
    from .consume import tail_channels

    return _ended(run_trio(tail_channels, options))


def _ended(code: ExitCode) -> ExitCode:
    """Return the exit code, after a line break for the next prompt if the user ended the command."""
    if code is ExitCode.INTERRUPTED:
        end_echoed_line()
    return code
