"""`qcli to-http`: sends the messages of topics to HTTP receivers."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from ...broker.connection_options import ConnectOptions
from ...framework.errors import ExitCode
from ...framework.go_flags import GoFlagsCommand
from ...framework.options import option, options_as, several
from ...framework.output import is_live_terminal, print_diagnostic
from ...framework.params import Integer, Number, byte_size, duration, positive_duration, topic_name
from ..shared.consuming import consuming_options
from .options import MODES, ToHttpOptions, http_status

if TYPE_CHECKING:
    from trio_nsq.client.connection.options import ConnectionOptions
    from trio_nsq.connectors.source.options import SourceOptions
    from trio_nsq.connectors.to_http.options import DeliveryOptions
    from trio_nsq.connectors.to_http.statistics import Statistics

RECEIVERS, REQUESTS, BATCHES, FAILURES = "Where to", "Requests", "Batches", "Failures"
_FILE = click.Path(exists=True, dir_okay=False)

PLACEHOLDERS = (
    "{{topic}}, {{channel}}, {{id}}, {{timestamp}} (RFC 3339), {{timestamp_ns}}, {{attempts}} and {{body}} stand "
    "for the message's values in the path and query of a URL and in header values. In a URL they are percent-encoded. "
    "In a header, control characters, bytes outside of ASCII and % are percent-encoded, so a message cannot add a "
    "header. In --get, %s is the body too, with blanks as +. A request with several messages has topic and "
    "channel only."
)


def size(text: str) -> int:
    """Parse a size above 0."""
    if (found := byte_size(text)) < 1:
        raise click.BadParameter(f"{text!r} is not a size such as 4096, 500MB or 10GiB.")
    return found


@click.command(
    "to-http",
    cls=GoFlagsCommand,
    short_help="Send the messages of topics to HTTP receivers.",
    examples={
        "POST each message": "qcli to-http clicks --post http://127.0.0.1:8080/hook",
        "send batches as JSON arrays": "qcli to-http clicks --post http://127.0.0.1:8080/bulk --batch-size 100",
        "authenticate, with the header in a file": "qcli to-http clicks --post https://hooks.example.com/x --header "
        "@/etc/nsq/hook-headers",
        "GET, with the body in the query": "qcli to-http clicks --get 'http://127.0.0.1:8080/put?data=%s'",
        "let receivers drop repeated messages": "qcli to-http orders --put 'http://127.0.0.1:8080/orders/{{id}}' "
        "--header 'Idempotency-Key: {{id}}'",
        "use the receivers that work": "qcli to-http clicks --post http://a.example:8080/ --post "
        "http://b.example:8080/",
        "consume all topics of a discovery service": "qcli to-http --topic-pattern '^web_' --post "
        "'http://127.0.0.1:8080/{{topic}}' --lookupd-http-address 127.0.0.1:4161",
    },
    exits={
        ExitCode.FAILURE: "The brokers refused, or a file cannot be used.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Messages that were not accepted were requeued.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). Messages that were not accepted were requeued.",
    },
    details={
        "Delivery": "Each message is sent at least once. It is finished when a receiver has answered with a status "
        "from 200 to 299, or when it is stored as a dead letter. It may be sent again after a kill, a lost connection "
        "or a timeout. While it waits for a receiver, it is in flight, and the command extends its timeout.",
        "Failures": "Statuses 408, 425, 429 and from 500 on, except 501 and 505, and requests without a valid "
        "response are retried: the message is requeued with a delay that doubles with each attempt. All others are "
        "final. --retry-status and --final-status change this. After a final failure, or the last of --max-attempts, a "
        "message becomes a dead letter. If the channel has the settings max_attempts and dead_letter_topic on a broker "
        "of this project, the broker makes it, with its origin. Otherwise, or with --dead-letter-topic, the command "
        "publishes the body on the broker that the message came from.",
        "Receivers that fail": "A receiver that cannot be reached, or answers 429 or 503, gets no requests for the "
        "time in its Retry-After, at most --max-retry-after, or else for 1 s, which doubles up to 1 minute. So does a "
        "receiver that fails 5 times in a row. Then it gets one request. Meanwhile other receivers get its messages; "
        "if there are none, messages wait, and the broker sends no more.",
        "Several receivers": "hostpool sends each message to one receiver, in turn; a receiver that failed is left out "
        "for 30 s, and longer each time, while others work. round-robin: in turn. epsilon-greedy: mostly to fast ones. "
        "all: to every receiver; a message is finished when all have accepted it.",
        "Proxies": "HTTP_PROXY, HTTPS_PROXY and the like have no effect, as in nsq_to_http.",
        "Placeholders": PLACEHOLDERS,
        "Batches": "With --batch-size, --batch-format or --with-metadata a request is a JSON array, or NDJSON. A body "
        "that is JSON goes in unchanged. Another one becomes a JSON string, or, if it is not UTF-8, "
        '{"body_base64": "..."}. With --with-metadata each message is an object as of \'qcli tail --format json\'. If '
        "a receiver refuses a batch with 400, 413 or 422, its halves are sent, so that only the refused messages "
        "become dead letters. A message at its last attempt is sent alone.",
        "Secrets": "Other users see a command line. --header @FILE reads headers from a file, one per line, and a "
        "URL's user and password can be a header, too. Logs show URLs without user, password and query.",
        "nsq_to_http": "The options of nsq_to_http have the same names, with one dash or two. Differences: several "
        "topics; 200 to 299 is success for GET too; redirects are not followed; a message that fails finally goes to "
        "the dead-letter topic.",
    },
)
@consuming_options("nsq_to_http", reads_logs=False)
@option(RECEIVERS, "--post", multiple=True, metavar="URL", help="POST each message here. May be repeated.")
@option(RECEIVERS, "--put", multiple=True, metavar="URL", help="PUT each message here. May be repeated.")
@option(
    RECEIVERS,
    "--get",
    multiple=True,
    metavar="URL",
    help="GET this URL for each message; %s stands for the body. May be repeated.",
)
@option(
    RECEIVERS,
    "--mode",
    type=click.Choice(MODES),
    default=MODES[0],
    help="Choose one of several receivers in this way; all: send to each of them.",
)
@option(
    RECEIVERS,
    "--follow-redirects",
    is_flag=True,
    brief=True,
    help="Send the request again where the receiver redirects it, with the same method and body: on the same host and "
    "port, or from http to https.",
)
@option(
    RECEIVERS,
    "--receiver-tls-root-ca-file",
    type=_FILE,
    metavar="FILE",
    brief=True,
    help="Trust the CAs in this PEM file for receivers, instead of the system's.",
)
@option(
    RECEIVERS,
    "--receiver-tls-cert",
    type=_FILE,
    metavar="FILE",
    brief=True,
    help="Send the client certificate in this PEM file to receivers.",
)
@option(
    RECEIVERS,
    "--receiver-tls-key",
    type=_FILE,
    metavar="FILE",
    brief=True,
    help="Read the certificate's key from this PEM file, if it is not in the same file.",
)
@option(
    RECEIVERS,
    "--receiver-tls-insecure-skip-verify",
    is_flag=True,
    brief=True,
    help="Skip the verification of the receivers' certificates.",
)
@option(
    REQUESTS,
    "--header",
    "-H",
    "headers",
    multiple=True,
    metavar="NAME: VALUE|@FILE",
    help="Add this header, or the headers in a file, one per line. May be repeated.",
)
@option(
    REQUESTS,
    "--content-type",
    metavar="TYPE",
    help="Send this Content-Type. The default is application/octet-stream, or that of the batch format.",
)
@option(
    REQUESTS,
    "--concurrency",
    "-n",
    type=Integer(min=1),
    default=100,
    help="Send at most N requests at a time.",
)
@option(
    REQUESTS,
    "--http-client-connect-timeout",
    "connect_timeout_ms",
    type=positive_duration,
    default="2s",
    brief=True,
    help="Wait so long for a connection to a receiver.",
)
@option(
    REQUESTS,
    "--http-client-request-timeout",
    "request_timeout_ms",
    type=positive_duration,
    default="20s",
    brief=True,
    help="Wait so long for the end of a response, connecting included.",
)
@option(
    REQUESTS,
    "--sample",
    type=Number(0, 1),
    default=1.0,
    brief=True,
    help="Send this part of the messages, at random; finish the others without a request.",
)
@option(BATCHES, "--batch-size", type=Integer(min=1), default=1, help="Send up to N messages at once.")
@option(
    BATCHES,
    "--batch-format",
    type=click.Choice(["json", "ndjson"]),
    help="Send a JSON array (the default of batches), or a line per message.",
)
@option(
    BATCHES,
    "--batch-bytes",
    type=size,
    default="1MiB",
    metavar="SIZE",
    brief=True,
    help="Send at most this many bytes of bodies at once.",
)
@option(
    BATCHES,
    "--batch-wait",
    "batch_wait_ms",
    type=duration,
    default="100ms",
    brief=True,
    help="Wait so long for more messages after the first.",
)
@option(
    BATCHES,
    "--with-metadata",
    is_flag=True,
    brief=True,
    help="Send each message as an object with topic, id, timestamp, attempts and body.",
)
@several(
    FAILURES,
    "--retry-status",
    "retried",
    type=http_status,
    metavar="STATUS",
    help="Retry requests with this status, too: 401, or 4xx.",
)
@several(
    FAILURES,
    "--final-status",
    "final",
    type=http_status,
    metavar="STATUS",
    brief=True,
    help="Do not retry requests with this status: 500, or 5xx.",
)
@option(
    FAILURES,
    "--max-attempts",
    type=Integer(min=0, max=65535),
    default=10,
    help="Move a message that failed N times to the dead-letter topic; 0: no limit.",
)
@option(
    FAILURES,
    "--dead-letter-topic",
    type=topic_name,
    metavar="TOPIC",
    help="Move messages that cannot be delivered to this topic. The default is that of the channel's settings, or the "
    "message's topic and .dead.",
)
@option(
    FAILURES,
    "--retry-delay",
    "retry_delay_ms",
    type=positive_duration,
    default="1s",
    brief=True,
    help="Deliver a failed message again after this time; it doubles with each attempt.",
)
@option(
    FAILURES,
    "--max-retry-delay",
    "max_retry_delay_ms",
    type=positive_duration,
    default="5m",
    brief=True,
    help="Deliver a failed message again after this time at the latest.",
)
@option(
    FAILURES,
    "--max-retry-after",
    "max_retry_after_ms",
    type=positive_duration,
    default="10m",
    brief=True,
    help="Wait for a receiver that sends Retry-After this long at most.",
)
@option(
    "Output",
    "--status-every",
    type=Integer(min=0),
    default=250,
    brief=True,
    help="Print counts and response times after N requests, at most once a second; 0: never.",
)
@option("Output", "--quiet", "-q", is_flag=True, brief=True, help="Print warnings and errors only.")
@options_as(ToHttpOptions)
def command(options: ToHttpOptions) -> int:
    """Send the messages of topics to HTTP receivers until interrupted, at least once.

    A message is finished when a receiver has accepted it. If a receiver fails, messages wait or are tried again.
    Messages that a receiver refuses for good go to a dead-letter topic.
    """
    delivery = options.delivery_options()
    sources = options.source_options()
    connecting = ConnectOptions.of_command().options()
    from trio_nsq.connectors.to_http.statistics import Statistics

    from ..shared.connector_status import connector_status
    from ..shared.connectors import run_connector
    from ..shared.consuming import source_failure

    statistics, quiet = Statistics(), options.quiet
    failure_of = partial(source_failure, reads_logs=False)
    consuming = options.consuming
    status = connector_status(
        "to-http",
        consuming,
        sources,
        lambda: [statistics.status(", ".join(consuming.all_topics) or str(consuming.topic_pattern))],
        quiet=quiet,
    )
    try:
        with status:
            run_connector(
                _run, sources, delivery, connecting, statistics, quiet, failure_of=failure_of, quiet=quiet
            )
    finally:
        if not quiet and (statistics.delivered or statistics.requeued or statistics.dead):
            print_diagnostic(statistics.summary())
    return ExitCode.OK


async def _run(
    sources: SourceOptions,
    delivery: DeliveryOptions,
    connecting: ConnectionOptions,
    statistics: Statistics,
    quiet: bool,
) -> None:
    """Send messages until cancelled, and show the counts on a terminal."""
    import trio

    from trio_nsq.connectors.to_http.run import to_http

    async with trio.open_nursery() as nursery:
        if not quiet and is_live_terminal(sys.stderr):
            from rich.text import Text

            from ...terminal.progress import show_live_text

            begun_s = trio.current_time()
            nursery.start_soon(
                show_live_text, lambda now_s: Text(f"{statistics.summary()}, {now_s - begun_s:.0f} s")
            )
        await to_http(sources, delivery, connecting, statistics)
        nursery.cancel_scope.cancel()
