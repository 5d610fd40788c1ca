"""`qcli pub`: publishes standard input, or files, to a topic."""

import click

from ...broker.address_options import (
    HTTP_OPTION,
    TCP_OPTION,
    check_default_tcp_address,
    http_addresses,
    lookupd_addresses,
    tcp_addresses,
)
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_topic
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import delimiter_options, max_msg_size_option, option, options_as, rate_option
from ...framework.params import Integer, long_duration
from .options import ALL, HASH, ROUND_ROBIN, PubOptions, field_path, header, pattern, topic_before_files

INPUT, SENDING, STRATEGY = "Input", "Sending", "Several brokers"


@click.command(
    "pub",
    cls=DocumentedCommand,
    short_help="Publish lines to a topic.",
    examples={
        "publish a file, one message per line": "cat access.log | qcli pub clicks",
        "publish lines as they are written": "tail -F access.log | qcli pub clicks",
        "publish names that are separated by NUL": "find . -name '*.json' -print0 | qcli pub -0 names",
        "publish files at 500 messages per second": "qcli pub clicks --rate 500 monday.log tuesday.log",
        "publish each message to two brokers": "qcli pub clicks --nsqd-tcp-address a:4150,b:4150 < access.log",
        "divide messages among all brokers": "qcli pub clicks --lookupd-http-address 127.0.0.1:4161 < access.log",
        "keep messages of a user together": "qcli pub clicks --nsqd-tcp-address a:4150,b:4150 --strategy hash "
        "--key-field user < access.log",
        "copy a topic to another broker, with bodies, topic, delays and headers": "qcli tail clicks --from earliest "
        "--to latest --format json | qcli pub --format json --nsqd-tcp-address b:4150",
        "deliver a message in 90 seconds": "echo later | qcli pub reminders --defer 1m30s",
        "give a message a header": "echo paid | qcli pub orders -H tenant:7",
    },
    exits={
        ExitCode.OK: "All messages were published and acknowledged.",
        ExitCode.FAILURE: "Nothing was published: the input cannot be read, a message is too long, or the broker "
        "refused.",
        ExitCode.USAGE: "The command line is wrong, or a file does not exist or cannot be read.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} Or the connection was lost before any message was "
        "acknowledged, with --no-retry or at a signal.",
        ExitCode.PARTIAL: "Some messages were acknowledged before a failure, or before a signal while the broker was "
        "unreachable. Standard error says how many, and how many more may be stored.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Messages that had been read are published.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). Messages that had been read are published.",
    },
    details={
        "Messages": "Bytes are published unchanged: nothing is decoded, and a carriage return before a line feed "
        "belongs to the message, unless --strip-cr is given. Bytes after the last delimiter are a message too. Empty "
        "messages are skipped, because NSQ has none; the report counts them.",
        "JSON": "With --format json each line is an object: body, a string, or body_base64, for other bytes; topic; "
        "and defer_ms, the delay in milliseconds, or due_ns, until when the message is deferred, in Unix nanoseconds. "
        "headers is an object of names and values. Other fields are ignored, so that 'qcli tail --format json' and "
        "'qcli pub --format json' copy messages exactly, with topic, delay and headers. TOPIC, --defer and --header "
        "override the fields; without TOPIC, or with - before the files, each record needs a topic. Blank lines are "
        "skipped. A line that is not such an object ends the command: the messages before it are published, and the "
        "error has its number. With --skip-bad it is reported, skipped and counted, and does not change the exit code.",
        "Headers": "A message can have headers, names in lower case with values, beside its body: at most 64, and 16 "
        "KiB of them. Blanks around the value of --header are removed. An nsqd and older 'qcli serve' have no headers: "
        "the command fails before it sends such messages. To copy messages to them without headers: jq -c "
        "'del(.headers)'.",
        "Lost connections": "If the connection is lost, as in an upgrade, the command reconnects and continues, and "
        "reports both on standard error. Meanwhile it reads no input. It also retries if the broker refuses messages "
        "because its disk or the topic is full, once some messages were acknowledged. It fails if the broker is "
        "unreachable at the start, or refuses for another reason. With --no-retry it fails at the first error.",
        "Delivery guarantee": "After a lost connection, unacknowledged messages are sent again. 'qcli serve' stores "
        "them once: batches are numbered, which needs HTTP. For that, --nsqd-http-address must be an address of the "
        "same broker as --nsqd-tcp-address, and https:// or a unix socket if TLS is on. With nsqd, another HTTP "
        "address, --snappy or --deflate, messages go over TCP, and some may be stored twice after a lost connection; "
        "standard error says how many at most.",
        "Several brokers": f"With --strategy all, every message goes to every broker: the input is read once, at the "
        "speed of the slowest broker. While one broker is unreachable, the others get no new messages. If a broker is "
        "unreachable at the start, nothing is published. If a broker fails later, the others still get the messages "
        "that had been read, and the command ends, without a retry at other unreachable brokers. The report counts the "
        "messages that all brokers acknowledged; if the counts differ, the error has the count of each broker. "
        f"The first address of {HTTP_OPTION} belongs to the first one of {TCP_OPTION}, and so on.",
        "Round-robin and hash": "Each message goes to one broker: in turn, or to the one that the CRC-32 of its key, "
        "modulo the number of brokers, selects in the order of the addresses (of nsqlookupd: sorted). If a broker is "
        "unreachable, drains or cannot store messages, its messages go to the others, with hash to the next one in the "
        "order; a warning says so, and the broker is tried again after up to 5 s. One reachable broker is enough. "
        "Numbered batches in doubt wait for their broker, as another one would store them again: at the end the "
        "command waits for it, and a signal ends the wait, with the number of messages in doubt. The report has the "
        "count of each broker. Messages without a key go to the brokers in turn. nsqlookupd is asked once, at the "
        "start; brokers that drain, or have a tombstone for TOPIC, are left out.",
        "Interruption": "At a signal the command stops reading and publishes the messages that it has read, with "
        "--rate at once: it reads about as many as it publishes in 50 ms, and at most 4 KiB. It does not publish an "
        "incomplete message; the report has its size. If the broker is unreachable, a signal ends the command at "
        "once, without publishing what was read.",
    },
)
@click.argument(
    "topic", metavar="TOPIC", required=False, type=topic_before_files, shell_complete=complete_topic
)
@click.argument(
    "files",
    metavar="[FILE...]",
    nargs=-1,
    type=click.Path(readable=False, allow_dash=True),  # `PubOptions.check` checks that they can be read
)
@http_addresses("Publish numbered batches to these HTTP addresses, in the order of the TCP addresses.")
@tcp_addresses("Publish to these brokers.")
@lookupd_addresses("Publish to the brokers that these nsqlookupd list.")
@tcp_connection
@option(
    STRATEGY,
    "--strategy",
    type=click.Choice([ALL, ROUND_ROBIN, HASH]),
    show_default=False,
    help="all: each broker gets every message. round-robin: the brokers get messages in turn. hash: messages with the "
    "same key go to the same broker. The default is all, or round-robin with nsqlookupd.",
)
@option(
    STRATEGY,
    "--key",
    type=pattern,
    metavar="REGEX",
    help="The key is what this regular expression finds: its first group, or else the match. Default: the message.",
)
@option(
    STRATEGY,
    "--key-field",
    type=field_path,
    default="",
    metavar="FIELD",
    help="The key is this field of JSON messages, or with --format json of the records, such as user or user.id.",
)
@delimiter_options(INPUT, "Split the input into messages at this text", "for find -print0")
@option(
    INPUT,
    "--framing",
    type=click.Choice(["delimiter", "length"]),
    default="delimiter",
    brief=True,
    help="delimiter: split the input at --delimiter. length: each message follows its length, a 4-byte big-endian "
    "integer, as in files of 'qcli to-file --framing length'.",
)
@option(
    INPUT,
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    help="raw: publish lines unchanged. json: publish the bodies of JSON objects, one per line, as 'qcli tail' writes.",
)
@option(
    INPUT,
    "--skip-bad",
    is_flag=True,
    help="With --format json: skip bad lines with a warning. By default the first one ends the command.",
)
@option(
    INPUT,
    "--strip-cr",
    is_flag=True,
    help="Remove a carriage return before each line feed, and at the end of the input.",
)
@max_msg_size_option(INPUT, "A longer message is an error, before it is sent.")
@option(
    SENDING,
    "--batch-size",
    type=Integer(min=1),
    show_default="1000, or 10000 if they are numbered at all brokers",
    brief=True,
    help="Put at most N messages into a batch. With slow input, a batch is sent after 50 ms.",
)
@rate_option(SENDING)
@option(
    SENDING,
    "--defer",
    "defer_ms",
    type=long_duration,
    default="0",
    show_default=False,
    help="Deliver each message this long after it is published, such as 500ms, 1m30s or 7d.",
)
@option(
    SENDING,
    "-H",
    "--header",
    "headers",
    type=header,
    multiple=True,
    metavar="NAME:VALUE",
    help="Give each message this header. May be repeated. The broker must be a 'qcli serve'.",
)
@option(
    SENDING,
    "--no-retry",
    is_flag=True,
    help="Fail at the first error, also if the connection is lost. Nothing is sent twice, or over HTTP.",
)
@option(
    "Output", "--quiet", "-q", is_flag=True, help="Show errors and warnings only, no progress and no report."
)
@options_as(PubOptions)
def command(options: PubOptions) -> int:
    """Publish standard input, or files, to a topic: one message per line.

    Messages are published in order, to every broker if there are several: see --strategy. If the connection is lost,
    the command reconnects and continues. At the end it reports messages, bytes and the rate on standard error.
    """
    options = options.resolve()
    options.check()
    check_default_tcp_address("messages go to")
    brokers = options.brokers()

    import time

    from ...framework.signals import run_trio
    from .report import conclude
    from .run import publish

    begun_s = time.monotonic()
    result = run_trio(publish, options, brokers)
    return conclude(options, result, time.monotonic() - begun_s)
