"""`qcli deferred`: lists and cancels deferred messages of a channel."""

from collections.abc import Sequence
from typing import Any

import click

from trio_nsq.api import broker as api
from trio_nsq.fleet.deferred import Cancelled
from trio_nsq.fleet.deferred import cancel as cancel_messages

from ..broker.brokers import Brokers, broker_http_options
from ..broker.name_completion import complete_channel
from ..broker.refusals import ChannelNotFound
from ..broker.requests import ask, perform
from ..framework.command import DocumentedGroup
from ..framework.errors import ExitCode, Failure
from ..framework.options import count_option, output_format
from ..framework.output import RawOutput, json_lines, print_diagnostic, report_none, write
from ..framework.params import Source, channel_source, message_id
from ..framework.positions import short_time
from ..records.messages import PeekedRecord
from .shared.format_string import FormatString, columns_of, format_string_option, refuse_other_formats
from .shared.messages import columns_to_leave_out, message_table


@click.group(
    "deferred",
    cls=DocumentedGroup,
    short_help="List or cancel deferred messages.",
    examples={
        "list deferred messages": "qcli deferred list clicks/archive",
        "cancel one": "qcli deferred cancel clicks/archive 0cb2f1a3c9400001",
    },
    exits={ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning},
)
def command() -> None:
    """List or cancel the deferred messages of a channel.

    A message is deferred by its producer, or by a consumer that requeues it with a delay. Each channel of a topic has
    its own deferred messages.
    """


@command.command(
    "list",
    examples={
        "list the next ten": "qcli deferred list clicks/archive -n 10",
        "print when the first one is due": "qcli deferred list clicks/archive -n 1 --format json | jq -r .due",
    },
    exits={
        ExitCode.FAILURE: "There is no such channel, or standard output cannot be written.",
    },
    details={
        "JSON": "One object per line: topic, channel, id, due_ns and due (Unix nanoseconds, RFC 3339), sequence, "
        "timestamp_ns and timestamp (when it was published), attempts (deliveries by this channel), state, headers, "
        "an object, if there are some, and body, a string; if a body is not UTF-8, body_base64 replaces it. With "
        "several brokers also broker, its address.",
    },
)
@click.argument("wanted", metavar="TOPIC/CHANNEL", type=channel_source, shell_complete=complete_channel)
@broker_http_options
@count_option(
    "Which messages", "List at most N messages, those that are due first.", most=10_000, default=100
)
@output_format(
    "table: shorten bodies on a terminal; times are UTC. json: write an object per line.",
    "table",
    "json",
    records=[PeekedRecord],
)
@format_string_option("Output")
def list_deferred(
    wanted: Source, brokers: Brokers, count: int, form: str, format_string: FormatString | None
) -> None:
    """List the deferred messages of a channel, the earliest first."""
    if format_string is not None:
        refuse_other_formats("form")
    topic, channel = wanted.topic, wanted.channel or ""
    try:
        found = brokers.read(lambda address: ask(address, api.deferred(topic, channel, count)))
    except ChannelNotFound as error:
        # The topic keeps deferred messages for its first channel. A user may look here before there is one.
        raise ChannelNotFound(
            f"{error.message} The deferred messages of a topic without channels wait for its first channel."
        ) from error
    lines = brokers.merge(found)
    messages = [line for line in lines if "gap" not in line]  # damaged messages, which 'peek' reports
    messages = sorted(messages, key=lambda message: message["due_ns"] or 0)[:count]
    if format_string is not None:
        columns = columns_of(messages, "".join(brokers.addresses[:1]))
        RawOutput().write(format_string.render(columns, len(messages)))
    elif form == "json":
        write(json_lines(messages))
    elif messages:
        headings, rows = (
            ("DUE (UTC)", "ID", "ATTEMPTS", "PUBLISHED (UTC)"),
            [_row(message) for message in messages],
        )
        left_out = columns_to_leave_out(headings, rows, ("PUBLISHED (UTC)", "ATTEMPTS"))
        write(message_table(headings, rows, messages, left_out))
    if not messages:
        report_none("deferred messages", wanted)
    found.check()


def _row(message: dict[str, Any]) -> tuple[str, ...]:
    due, published = short_time(message["due_ns"] or 0), short_time(message["timestamp_ns"])
    return due, message["id"], str(message["attempts"]), published


@command.command(
    "cancel",
    examples={
        "cancel one message": "qcli deferred cancel clicks/archive 0cb2f1a3c9400001",
        "cancel all that mention a customer": "qcli deferred list clicks/archive --format json | jq -r "
        "'select(.body | test(\"customer 17\")).id' | "
        "xargs qcli deferred cancel clicks/archive",
    },
    exits={
        ExitCode.FAILURE: "None of the messages is deferred in the channel, or the broker refused.",
        ExitCode.PARTIAL: "Some messages are not deferred in the channel; standard error lists them. Or it failed.",
    },
)
@click.argument("wanted", metavar="TOPIC/CHANNEL", type=channel_source, shell_complete=complete_channel)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=message_id)
@broker_http_options
def cancel(wanted: Source, ids: Sequence[str], brokers: Brokers) -> None:
    """Delete deferred messages of a channel, by their ids.

    Other channels of the topic keep their copies. Messages that are due by now are not cancelled.
    """
    cancelled: set[str] = set()

    def act(address: str) -> list[str]:
        done = Cancelled()
        perform(address, cancel_messages(wanted.topic, wanted.channel or "", ids, done))
        return done.ids

    def report(address: str, done: list[str]) -> None:
        if done:
            print_diagnostic(f"channel {wanted}: {len(done):,} cancelled{brokers.suffix(address)}")
        cancelled.update(done)

    brokers.change(act, report)
    if missed := [each for each in dict.fromkeys(ids) if each not in cancelled]:
        done = bool(cancelled)
        code = ExitCode.PARTIAL if done else ExitCode.FAILURE
        raise Failure(f"Not deferred in {wanted}: {' '.join(missed)}.", code)
