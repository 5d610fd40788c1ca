"""`qcli pub`: publishes standard input, or files, to a topic."""

import click

from ...broker.address_options import HTTP_OPTION, TCP_OPTION, http_addresses, tcp_addresses
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_topic
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import delimiter_options, max_msg_size_option, option, options_as, rate_option
from ...framework.params import long_duration, topic_name
from .options import PubOptions

INPUT, SENDING = "Input", "Sending"


@click.command(
    "pub",
    cls=DocumentedCommand,
    short_help="Publish lines to a topic.",
    examples={
        "a file, one message per line": "cat access.log | qcli pub clicks",
        "as lines are written": "tail -F access.log | qcli pub clicks",
        "anything at all, separated by NUL": "find . -name '*.json' -print0 | qcli pub -0 names",
        "files, at 500 messages a second": "qcli pub clicks --rate 500 monday.log tuesday.log",
        "to two brokers, each message to both": "qcli pub clicks --nsqd-tcp-address a:4150,b:4150 < access.log",
        "delivered in a minute and a half": "echo later | qcli pub reminders --defer 1m30s",
    },
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
    type=click.Path(readable=False, allow_dash=True),  # `PubOptions.check` looks whether they can be read
)
@http_addresses(
    "The brokers' HTTP addresses, in the order of the TCP addresses: for numbered batches, and to complete names."
)
@tcp_addresses("The brokers to publish to; each gets every message.")
@tcp_connection
@delimiter_options(INPUT, "What stands between messages", "as find -print0 writes")
@max_msg_size_option(INPUT, "A longer message ends the command, with its number, before it is sent.")
@option(
    SENDING,
    "--batch-size",
    type=click.IntRange(min=1),
    show_default="1000, or 10000 if they are numbered at all brokers",
    help="Messages in one batch, at most. When input is slow, those that have come leave after 50 ms.",
)
@rate_option(SENDING, ", never more than a tenth of a second's worth at once")
@option(
    SENDING,
    "--defer",
    "defer_ms",
    type=long_duration,
    default="0",
    show_default=False,
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
@options_as(PubOptions)
def command(options: PubOptions) -> int:
    """Publish standard input, or files, to a topic: one message per line.

    Messages go out in batches and in order, to every broker if there are several. A broker that goes away is waited
    for. At the end the numbers of messages and bytes, and the rate, are reported on standard error.
    """
    options.check()
    brokers = options.brokers()

    import time

    import trio

    from .run import conclude, publish

    begun_s = time.monotonic()
    result = trio.run(publish, options, brokers)
    return conclude(options, result, time.monotonic() - begun_s)
