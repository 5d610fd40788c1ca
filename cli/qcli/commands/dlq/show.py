"""`qcli dlq show`: shows dead letters, and takes none of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from ...broker.address_options import broker_http_options
from ...broker.fan_out import with_broker
from ...broker.json_api import get_json_lines
from ...broker.message_bodies import body_of, with_body_column
from ...framework.command import DocumentedCommand, Example
from ...framework.errors import NotFound
from ...framework.exit_codes import ExitCode
from ...framework.options import option, output_format
from ...framework.output import RawOutput, json_lines, plain_table, print_diagnostic, write
from ...framework.params import Source
from ...framework.positions import moment
from .selection import NOTE, SELECTION, WHAT, Selection, selection_options, topic_argument

DEFAULT_COUNT = 10

_PAGE = 1000


@click.command(
    "show",
    cls=DocumentedCommand,
    examples=[
        Example("the first ten", "qcli dlq show clicks.dead"),
        Example(
            "those of one channel that timed out",
            "qcli dlq show clicks.dead --origin clicks/archive --reason timed_out",
        ),
        Example("one body as it is", "qcli dlq show clicks.dead --id 0cb2f1a3c9400001 --format raw > body"),
        Example("all of it, for a program", "qcli dlq show clicks.dead -n 0 --format json | jq .origin.id"),
    ],
    exits={
        ExitCode.OK: "They were shown; also if there were none.",
        ExitCode.FAILURE: "There is no such dead-letter topic, or standard output cannot be written.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
    },
    notes={
        "Dead letters": NOTE,
        "JSON": "One object per line: topic, id and sequence in the dead-letter topic; timestamp_ns, when it became a "
        "dead letter, Unix nanoseconds; origin: an object with topic, channel, id, sequence, attempts, timestamp_ns "
        "(when it was published) and reason, or null; and body, a string; for a body that is not UTF-8, body_base64 "
        "stands in its place.",
    },
)
@topic_argument
@broker_http_options
@selection_options
@option(
    SELECTION,
    "-n",
    "--count",
    type=click.IntRange(min=0),
    default=DEFAULT_COUNT,
    metavar="N",
    show_default=True,
    help="How many, at most: the oldest; 0: all.",
)
@output_format(
    "table: for people, bodies cut short. json: an object per line, see below. raw: bodies as they are, and a "
    "line feed after each.",
    "table",
    "json",
    "raw",
)
def command(form: str, **selected: Any) -> None:
    """Show dead letters with where they come from, the oldest first, and take none of them.

    Of several brokers: those of one after those of the other.
    """
    selection = Selection(**selected)
    begun = False
    for messages in _read_all(selection):
        if form == "raw":
            RawOutput().write(b"".join(body_of(message) + b"\n" for message in messages))
        elif form == "json":
            write(json_lines(messages))
        else:
            headings = ("ID", "FROM", "ATTEMPTS", "REASON", "PUBLISHED")
            rows = [_letter_row(message) for message in messages]
            table = plain_table(with_body_column(headings, rows, messages), 6)
            write(table.partition("\n")[2] if begun else table)
        begun = True
    if not begun:
        print_diagnostic(f"{selection.topic}{selection.why_none()}")


def _read_all(selection: Selection) -> Iterator[list[dict[str, Any]]]:
    """The letters of one broker after the other, some at a time, at least one."""
    missing: list[NotFound] = []
    addresses = selection.nsqd_http_addresses
    left = count = selection.count or 0
    for address in addresses:
        try:
            for messages in _read(selection, address, left):
                yield with_broker(messages, address, addresses)
                left -= len(messages) if count else 0
        except NotFound as error:
            missing.append(error)
        if count and not left:
            return
    if len(missing) == len(addresses):
        raise missing[0]


def _read(selection: Selection, address: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """Letters of one broker, no more than `count` (0: all), some at a time, at least one."""
    for page in selection.pages():
        start = 0
        while True:
            wanted = min(_PAGE, count) if count else _PAGE
            more = {"from": str(start), "max_messages": str(wanted)}
            found = get_json_lines(
                address,
                Source(selection.topic, None),
                "/dead_letters/messages",
                selection.params() | page | more,
                WHAT,
            )
            if found:
                yield found
            if count:
                count -= len(found)
                if not count:
                    return
            if len(found) < wanted:
                break
            start = found[-1]["sequence"] + 1


def _letter_row(message: dict[str, Any]) -> tuple[str, ...]:
    origin = message["origin"]
    if origin is None:
        return message["id"], "", "", "", moment(message["timestamp_ns"])
    where = str(Source(origin["topic"], origin["channel"]))
    published = moment(origin["timestamp_ns"])
    return message["id"], where, str(origin["attempts"]), origin["reason"], published
