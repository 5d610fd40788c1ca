"""`qcli bench`: measures throughput and latency of brokers."""

import click

from ...broker.address_options import http_addresses, lookupd_addresses, tcp_addresses
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_source, complete_topic
from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from ...framework.options import (
    Decorator,
    all_of,
    count_option,
    given,
    max_in_flight_option,
    option,
    options_as,
    output_format,
)
from ...framework.params import Integer, Number, channel_source, positive_duration, topic_name
from ...records.jobs import BenchRecord
from .options import BenchOptions

LOAD, TOPIC = "Load", "Topic"
_SMALLEST_STAMPED = 16
_DURATION_MS = 10_000
_JSON = (
    "One object: benchmark, brokers, topic, channel, settings, interrupted, messages, bytes, seconds, "
    "messages_per_second, bytes_per_second, messages_by_second (of whole seconds), connections (broker, messages, "
    "messages_per_second), connection_rates (min, avg, max, stddev), missing, finished_afterwards, "
    "client_cpu_seconds, and times: count, mean_ms, p50_ms, p90_ms, p99_ms, p99.9_ms, max_ms and histogram "
    "(up_to_ms, null: no limit; count) of each distribution. Percentiles are at most 1 % too high."
)
_EXITS = {
    ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} Or it stopped answering before a message was counted.",
    ExitCode.PARTIAL: "A broker failed during the measurement, or the topic was not deleted: the report has what was "
    "measured.",
    ExitCode.INTERRUPTED: "Interrupted (SIGINT). The report has what was measured.",
    ExitCode.TERMINATED: "Terminated (SIGTERM). The report has what was measured.",
}


@click.group(
    "bench",
    cls=DocumentedGroup,
    short_help="Measure throughput and latency of brokers.",
    examples={
        "publish for ten seconds": "qcli bench pub",
        "consume a million messages": "qcli bench sub",
        "measure delivery times at 1,000 messages per second": "qcli bench latency --rate 1000",
    },
    exits={ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning},
)
def command() -> None:
    """Measure throughput and latency of brokers that speak NSQ's protocol, nsqd included.

    By default, a measurement uses a topic of its own, bench-XXXXXXXX, and deletes it at the end, over HTTP. It tries
    the addresses of --nsqd-http-address, and the one after the TCP address: 4151 follows 4150.
    """


def _load(*more: Decorator) -> Decorator:
    return all_of(
        tcp_addresses("Measure these brokers together."),
        lookupd_addresses("Measure all brokers that these nsqlookupd list."),
        http_addresses("Create and delete the topic at this address of the same broker."),
        tcp_connection,
        *more,
        option(
            TOPIC, "--keep", is_flag=True, help="Keep the topic that the command creates when none is named."
        ),
        output_format("text: a report with charts. json: one object.", "text", "json", records=[BenchRecord]),
    )


_CONNECTIONS = option(
    LOAD,
    "--connections",
    type=Integer(1, 10_000),
    help="Use N connections to each broker, by default one per processor.",
)


def _duration(more: str = "") -> Decorator:
    return option(
        LOAD,
        "--duration",
        "duration_ms",
        type=positive_duration,
        default=None if more else "10s",
        help=f"Measure this long{more}.",
    )


def _size(least: int, text: str) -> Decorator:
    return option(LOAD, "--size", type=Integer(min=least), default=200, metavar="BYTES", help=text)


def _yes(what: str) -> Decorator:
    return option(TOPIC, "--yes", is_flag=True, help=f"{what} without asking.")


@command.command(
    "pub",
    short_help="Publish, and report rates and the times until OK.",
    examples={
        "publish for ten seconds": "qcli bench pub",
        "publish messages of 1 KiB one by one, over 50 connections": "qcli bench pub --size 1024 --batch-size 1 "
        "--connections 50",
        "publish a million messages, and keep them": "qcli bench pub -n 1000000 --keep",
        "measure a fleet": "qcli bench pub --lookupd-http-address 127.0.0.1:4161",
    },
    exits=_EXITS,
    details={
        "Method": "Each connection publishes a batch (MPUB, or PUB with --batch-size 1), waits for its OK, and "
        "publishes the next one. With --pipeline it does not wait for each. The defaults are those of NSQ's "
        "bench_writer, so the figures are comparable. The report has the time from sending a batch until its OK.",
        "The client's share": "One thread serves all connections. If the report says that this client used nearly "
        "all of a processor, the client is the limit: run several, and add their rates.",
        "JSON": _JSON + " The distribution is acknowledged.",
    },
)
@click.argument("topic", metavar="[TOPIC]", required=False, type=topic_name, shell_complete=complete_topic)
@_load(
    _CONNECTIONS,
    _size(1, "Publish messages of this size."),
    option(LOAD, "--batch-size", type=Integer(min=1), default=200, help="Publish batches of N messages."),
    option(
        LOAD,
        "--pipeline",
        type=Integer(min=1),
        default=1,
        help="Have up to N batches without OK on each connection.",
    ),
    count_option(LOAD, "End after N messages."),
    _duration(", by default 10s; with -n there is no limit"),
)
@options_as(BenchOptions)
def pub(options: BenchOptions) -> int:
    """Publish as fast as brokers acknowledge, and report rates and the times until OK.

    A topic that the command line names keeps the messages.
    """
    from dataclasses import replace

    from .run import run_pub

    if options.duration_ms is None and options.count is None:
        options = replace(options, duration_ms=_DURATION_MS)
    return run_pub(options)


@command.command(
    "sub",
    short_help="Consume, and report rates.",
    examples={
        "publish a million messages, then consume them": "qcli bench sub",
        "consume what 'qcli bench pub --keep' published": "qcli bench sub bench-5d1f20ab/c --duration 1m",
        "consume a channel of another topic": "qcli bench sub clicks/speed --yes",
    },
    exits=_EXITS
    | {
        ExitCode.FAILURE: "No message arrived, or a broker refused.",
        ExitCode.USAGE: f"{ExitCode.USAGE.meaning} Or a channel must be consumed, standard input is not a terminal, "
        "and --yes is missing.",
    },
    details={
        "Method": "Each connection consumes and finishes messages; nothing is done with them. The measurement ends "
        "after --duration, when the backlog is consumed, or when nothing arrives for a second. Messages that are on "
        "their way then are finished and reported, but do not count. The defaults are those of NSQ's bench_reader, so "
        "the figures are comparable.",
        "Safety": "Consumed messages are gone. So the command asks before it consumes a channel, unless the topic's "
        "name begins with bench-.",
        "JSON": _JSON + " There are none here; missing counts messages that arrived too late to be finished.",
    },
)
@click.argument(
    "source", metavar="[TOPIC/CHANNEL]", required=False, type=channel_source, shell_complete=complete_source
)
@_load(
    _CONNECTIONS,
    max_in_flight_option(LOAD, "Have at most N messages in flight on each connection."),
    option(
        LOAD,
        "--backlog",
        type=Integer(1),
        default=1_000_000,
        help="Without TOPIC/CHANNEL: publish N messages first.",
    ),
    _size(1, "Their size."),
    _duration(),
    _yes("Consume the messages"),
)
@options_as(BenchOptions)
def sub(options: BenchOptions) -> int:
    """Consume and finish messages as fast as brokers deliver, and report rates.

    Without TOPIC/CHANNEL, the command first publishes messages to its own topic.
    """
    from .run import run_sub

    if options.source is not None and (extra := [f"--{name}" for name in given("backlog", "size")]):
        raise click.UsageError(
            f"{extra[0]} is for the command's own topic: leave {options.source} or {extra[0]} out."
        )
    return run_sub(options)


@command.command(
    "latency",
    short_help="Publish at a fixed rate, and report delivery times.",
    examples={
        "measure at 1,000 messages per second": "qcli bench latency",
        "measure for a minute, and keep the figures": "qcli bench latency --rate 5000 --duration 1m --format json > "
        "run.json",
    },
    exits=_EXITS
    | {
        ExitCode.USAGE: f"{ExitCode.USAGE.meaning} Or the use of a topic must be confirmed, standard input is not a "
        "terminal, and --yes is missing.",
    },
    details={
        "Method": "One connection to each broker publishes messages at a fixed rate (PUB), another one consumes them "
        "in an ephemeral channel, without output buffering. A message is sent when it is due, even if earlier ones "
        "have no OK yet, and its times count from then: if a broker stalls, all messages of that time are late, not "
        "one (no coordinated omission). 'sent late' is this client's own delay, which the other times include: if it "
        "is large, the machine is too busy to measure.",
        "Safety": "If a topic has no channel, the channel of the measurement takes its backlog. So the command asks "
        "before it uses a topic whose name does not begin with bench-.",
        "JSON": _JSON
        + " The distributions are received, acknowledged and sent_late; missing counts messages that "
        "did not arrive within 10 seconds.",
    },
)
@click.argument("topic", metavar="[TOPIC]", required=False, type=topic_name, shell_complete=complete_topic)
@_load(
    option(
        LOAD,
        "--rate",
        type=Number(min=0, min_open=True),
        default=1000,
        help="Publish N messages per second, over all brokers.",
    ),
    _size(_SMALLEST_STAMPED, "Publish messages of this size, at least 16."),
    _duration(),
    _yes("Use a topic of others"),
)
@options_as(BenchOptions)
def latency(options: BenchOptions) -> int:
    """Publish at a fixed rate, and report how long messages take to their OK and to a consumer."""
    from .run import run_latency

    return run_latency(options)
