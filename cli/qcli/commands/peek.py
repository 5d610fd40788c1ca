"""`qcli peek`: prints messages without consuming them."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from trio_nsq.api import broker as api

from ..broker.brokers import Brokers, broker_http_options
from ..broker.name_completion import complete_source
from ..broker.requests import ask
from ..broker.topic_log import report_gap
from ..framework.command import DocumentedCommand
from ..framework.errors import ExitCode
from ..framework.options import count_option, option
from ..framework.output import RawOutput, json_lines, report_none, write
from ..framework.params import Source, source
from ..framework.positions import POSITIONS_NOTE, from_option, is_in_future, refuse_sequence, short_time
from ..records.messages import PeekedRecord
from .shared.body_options import body_options, decoded_bodies
from .shared.format_string import FormatString, columns_of, message_formats, refuse_other_formats
from .shared.messages import body_of, columns_to_leave_out, message_table

DEFAULT_COUNT = 10
OUTPUT, SELECTION = "Output", "Which messages"
STATES = ("requeued", "fresh", "deferred")


@click.command(
    "peek",
    cls=DocumentedCommand,
    short_help="Look at messages without taking them.",
    examples={
        "show what a channel delivers next": "qcli peek clicks/archive",
        "show deferred messages": "qcli peek clicks/archive --state deferred",
        "show the newest messages of a topic": "qcli peek clicks",
        "show the first ones of the last hour as JSON": "qcli peek clicks --from 1h --format json | jq .",
        "show Avro bodies as JSON": "qcli peek clicks --body-format avro --schema click.avsc",
        "write one body to a file": "qcli peek clicks --from 1000 -n 1 --format raw > body",
    },
    exits={
        ExitCode.OK: "The messages were shown, or there are none.",
        ExitCode.FAILURE: "There is no such topic or channel, or standard output cannot be written.",
        ExitCode.DAMAGED: "Damaged messages were skipped; standard error says which.",
    },
    details={
        "States": "The order in a channel is: requeued messages (requeued, timed out, or deferred until now), then "
        "fresh messages (never delivered), then deferred messages, the earliest first. Messages in flight are not "
        "shown.",
        "Positions": POSITIONS_NOTE,
        "JSON": "One object per line: topic, id, timestamp_ns and timestamp (when it was published, in Unix "
        "nanoseconds and RFC 3339), attempts (how often the channel has delivered it; 0 for a topic), sequence, due_ns "
        "and due (until when it is deferred; null: not deferred), for a channel also channel and state, with several "
        "brokers broker (its address), headers, an object, if the message has some, and body, a string; "
        "if a body is not UTF-8, body_base64 replaces it.",
    },
)
@click.argument("wanted", metavar="TOPIC[/CHANNEL]", type=source, shell_complete=complete_source)
@broker_http_options
@count_option(SELECTION, "Show at most N messages.", most=10_000, default=DEFAULT_COUNT)
@from_option(SELECTION, "Begin at this position of a topic: see 'qcli help positions'.")
@option(
    SELECTION,
    "--state",
    "states",
    type=click.Choice(STATES),
    multiple=True,
    help="Show only messages of a channel in this state. May be repeated.",
)
@message_formats(OUTPUT, PeekedRecord)
@body_options(OUTPUT)
def command(
    wanted: Source,
    brokers: Brokers,
    count: int,
    first: str | None,
    states: Sequence[str],
    form: str,
    format_string: FormatString | None,
    body_format: str | None,
    schema: Path | None,
    message: str,
    registry: str,
    bodies_file: Path | None,
) -> int:
    """Show the next messages of a channel, or the newest of a topic, without taking them.

    The messages stay where they are and do not count as delivered. Consumers may take them at any time.
    """
    if wanted.channel is not None and first is not None:
        raise click.UsageError("--from is for topics: a channel begins with its next message.")
    if wanted.channel is None and states:
        raise click.UsageError("--state is for channels: write TOPIC/CHANNEL.")
    if format_string is not None:
        refuse_other_formats("form")
    refuse_sequence(first, brokers.addresses)
    decoded = decoded_bodies(body_format, schema, message, registry, bodies_file)

    def look(address: str) -> list[dict[str, Any]]:
        if wanted.channel is not None:
            return ask(address, api.peek(wanted.topic, wanted.channel, count, states))
        return ask(address, api.read(wanted.topic, first or _newest(address, wanted, count), count))

    found = brokers.read(look)
    lines = brokers.merge(found)
    messages = [line for line in lines if "gap" not in line]
    if brokers.is_fleet:
        messages = _merged(messages, count, newest=first is None)
    if decoded is not None:
        messages = decoded.in_records(messages)
    damaged = _report_gaps(line for line in lines if "gap" in line)
    if format_string is not None:
        columns = columns_of(messages, "".join(brokers.addresses[:1]))
        RawOutput().write(format_string.render(columns, len(messages)))
    elif form == "raw":
        RawOutput().write(b"".join(body_of(each) + b"\n" for each in messages))
    elif form == "json":
        write(json_lines(messages))
    elif messages:
        write(_table(messages))
    if not lines:
        for address in found.results:
            _report_none_of(address, wanted, first, states)
    found.check()
    return ExitCode.DAMAGED if damaged else ExitCode.OK


def _merged(messages: list[dict[str, Any]], count: int, *, newest: bool) -> list[dict[str, Any]]:
    """Return the first messages of several brokers, in the order of one broker, or the newest messages."""
    if messages and "state" in messages[0]:
        messages.sort(key=lambda each: (_rank(each["state"]), each["due_ns"] or 0))
        return messages[:count]
    messages.sort(key=lambda each: each["timestamp_ns"])
    return messages[-count:] if newest else messages[:count]


def _rank(state: str) -> int:
    return STATES.index(state) if state in STATES else len(STATES)


def _report_none_of(address: str, wanted: Source, first: str | None, states: Sequence[str]) -> None:
    """Say why no message of a broker is shown."""
    if wanted.channel is not None:
        report_none(f"{' or '.join(states)} messages" if states else "messages", wanted)
        return
    bounds = ask(address, api.bounds(wanted.topic))
    if bounds["first_sequence"] == bounds["next_sequence"]:
        report_none("messages", wanted)
        return
    future = ", which is in the future" if first is not None and is_in_future(first, time.time()) else ""
    newest = bounds["next_sequence"] - 1
    report_none("messages", f"{wanted} after --from{future}", f"The newest message is {newest}.")


def _newest(address: str, wanted: Source, count: int) -> str:
    """Return the first sequence of a topic's `count` newest messages."""
    bounds = ask(address, api.bounds(wanted.topic))
    return str(max(bounds["first_sequence"], bounds["next_sequence"] - count))


def _report_gaps(gaps: Iterable[dict[str, Any]]) -> bool:
    """Report missing messages; return whether any are damaged."""
    damaged = False
    joined: list[dict[str, Any]] = []
    for gap in gaps:  # a channel reports one gap per message
        if (
            joined
            and joined[-1]["next_sequence"] == gap["first_sequence"]
            and joined[-1]["gap"] == gap["gap"]
        ):
            joined[-1]["next_sequence"] = gap["next_sequence"]
        else:
            joined.append(gap)
    for gap in joined:
        damaged |= report_gap(gap["topic"], gap["first_sequence"], gap["next_sequence"], gap["gap"])
    return damaged


def _table(messages: Sequence[dict[str, Any]]) -> str:
    headings = ["SEQUENCE", "PUBLISHED (UTC)"]
    rows = [[str(message["sequence"]), short_time(message["timestamp_ns"])] for message in messages]
    if "broker" in messages[0]:
        headings.insert(0, "BROKER")
        for row, message in zip(rows, messages, strict=True):
            row.insert(0, message["broker"])
    if "state" in messages[0]:
        headings += ["ATTEMPTS", "STATE"]
        for row, message in zip(rows, messages, strict=True):
            row += [str(message["attempts"]), message["state"]]
    if any(message["due_ns"] for message in messages):
        headings.append("DUE (UTC)")
        for row, message in zip(rows, messages, strict=True):
            row.append(short_time(message["due_ns"]) if message["due_ns"] else "")
    return message_table(
        headings,
        rows,
        messages,
        columns_to_leave_out(headings, rows, ("PUBLISHED (UTC)", "ATTEMPTS", "STATE")),
    )
