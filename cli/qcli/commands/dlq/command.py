"""`qcli dlq`: lists, shows, requeues and drops dead letters."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import click

from trio_nsq.api import broker as api
from trio_nsq.fleet import dead_letters
from trio_nsq.fleet.dead_letters import CHANNEL, LetterFilter

from ...broker.brokers import Answers, Brokers, broker_http_options
from ...broker.failures import not_a_broker
from ...broker.requests import ask, perform
from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from ...framework.options import count_option, output_format
from ...framework.output import RawOutput, json_lines, print_diagnostic, report_none, write
from ...framework.params import Source, topic_name
from ...framework.positions import short_time
from ...records.messages import LetterCountRecord, LetterRecord
from ...terminal.fitted_table import Column, fitted_table, output_width
from ..shared.format_string import FormatString, columns_of, message_formats, refuse_other_formats
from ..shared.messages import body_of, columns_to_leave_out, message_table
from .move import drop, requeue
from .selection import (
    NOTE,
    SELECTION,
    Selection,
    complete_dead_letter_topic,
    selection_options,
    topic_argument,
)


@click.group(
    "dlq",
    cls=DocumentedGroup,
    short_help="List, show, requeue or drop dead letters.",
    examples={
        "count dead letters by channel and reason": "qcli dlq list",
        "show some": "qcli dlq show clicks.dead",
        "deliver them again": "qcli dlq requeue clicks.dead",
        "drop them": "qcli dlq drop clicks.dead --yes",
    },
    exits={ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning},
    details={"Dead letters": NOTE},
)
def command() -> None:
    """List, show, requeue or drop dead letters: messages that failed after max_attempts deliveries."""


@command.command(
    "list",
    examples={
        "count all dead letters": "qcli dlq list",
        "count those of one dead-letter topic": "qcli dlq list clicks.dead",
        "print the total": "qcli dlq list clicks.dead --format json | jq -s 'map(.count) | add'",
    },
    exits={
        ExitCode.OK: "Dead letters were counted, or there are none.",
        ExitCode.FAILURE: "There is no such dead-letter topic, or standard output cannot be written.",
    },
    details={
        "JSON": "One object per origin and reason: dead_letter_topic; topic and channel of origin, and "
        "reason (requeued, timed_out or connection_lost), null for messages that were published to the dead-letter "
        "topic; count; first_ns and last_ns, when the first and the last one became a dead letter, Unix nanoseconds, "
        "and first and last, the same in RFC 3339. With several brokers also broker, its address.",
    },
)
@click.argument(
    "topic", metavar="[TOPIC]", required=False, type=topic_name, shell_complete=complete_dead_letter_topic
)
@broker_http_options
@output_format(
    "table: for people; times are UTC. json: write an object per line.",
    "table",
    "json",
    records=[LetterCountRecord],
)
def list_letters(topic: str | None, brokers: Brokers, form: str) -> None:
    """Count dead letters by origin and reason."""

    def count(address: str) -> list[dict[str, Any]]:
        topics = [topic] if topic is not None else _dead_letter_topics(address)
        return [record for name in topics for record in _count(address, name)]

    found = brokers.read(count)
    records = brokers.merge(found)
    if form == "json":
        write(json_lines(records))
    elif records:
        write(fitted_table(_COLUMNS, records, output_width()))
    if not records:
        report_none("dead letters", topic or "")
    found.check()


def _dead_letter_topics(address: str) -> list[str]:
    return [each["topic"] for each in ask(address, api.dead_letter_topics())]


def _count(address: str, topic: str) -> list[dict[str, Any]]:
    counted = perform(address, dead_letters.count(LetterFilter(topic)))
    if counted.in_flight:
        print_diagnostic(f"{topic}: {counted.in_flight:,} more in flight with consumers of {topic}/{CHANNEL}")
    return [{"dead_letter_topic": topic, **row} for row in counted.rows.values()]


def _origin(record: dict[str, Any]) -> str:
    return "" if record["topic"] is None else str(Source(record["topic"], record["channel"]))


_COLUMNS: tuple[Column[dict[str, Any]], ...] = (
    Column("BROKER", lambda record: record.get("broker", ""), is_name=True),
    Column("TOPIC", lambda record: record["dead_letter_topic"], is_name=True),
    Column("FROM", _origin, is_name=True),
    Column("REASON", lambda record: record["reason"] or "", is_name=True),
    Column("FIRST (UTC)", lambda record: short_time(record["first_ns"]), is_name=True, rank=2),
    Column("LAST (UTC)", lambda record: short_time(record["last_ns"]), is_name=True, rank=1),
    Column("LETTERS", lambda record: f"{record['count']:,}"),
)


DEFAULT_COUNT = 10

_DISPENSABLE = ("PUBLISHED (UTC)", "ATTEMPTS", "REASON")
"""Columns that a narrow terminal leaves out, this one first."""

_PAGE = 1000


@command.command(
    "show",
    examples={
        "show the first ten": "qcli dlq show clicks.dead",
        "show timeouts of one channel": "qcli dlq show clicks.dead --origin clicks/archive --reason timed_out",
        "write one body to a file": "qcli dlq show clicks.dead --id 0cb2f1a3c9400001 --format raw > body",
        "write all as JSON": "qcli dlq show clicks.dead -n 0 --format json | jq .origin.id",
    },
    exits={
        ExitCode.OK: "Dead letters were shown, or there are none.",
        ExitCode.FAILURE: "There is no such dead-letter topic, or standard output cannot be written.",
    },
    details={
        "JSON": "One object per line: topic, id and sequence in the dead-letter topic; timestamp_ns and timestamp, "
        "when it became a dead letter, in Unix nanoseconds and RFC 3339; origin: an object with topic, channel, id, "
        "sequence, attempts, timestamp_ns and timestamp (when it was published) and reason, or null; headers, an "
        "object, if there are some; and body, a string; if a body is not UTF-8, body_base64 replaces it.",
    },
)
@topic_argument
@broker_http_options
@selection_options
@count_option(SELECTION, "Show at most N dead letters, the oldest; 0: all.", least=0, default=DEFAULT_COUNT)
@message_formats("Output", LetterRecord)
def show(form: str, format_string: FormatString | None, **selected: Any) -> None:
    """Show dead letters with their origin, the oldest first. They stay in the dead-letter topic.

    With several brokers, the dead letters of one follow those of another.
    """
    if format_string is not None:
        refuse_other_formats("form")
    selection = Selection(**selected)
    pages, found = _read_all(selection)
    begun = False
    left_out: tuple[str, ...] = ()
    for messages in pages:
        if format_string is not None:
            columns = columns_of(messages, "".join(selection.brokers.addresses[:1]))
            RawOutput().write(format_string.render(columns, len(messages)))
        elif form == "raw":
            RawOutput().write(b"".join(body_of(message) + b"\n" for message in messages))
        elif form == "json":
            write(json_lines(messages))
        else:
            headings = ("ID", "FROM", "ATTEMPTS", "REASON", "PUBLISHED (UTC)")
            rows = [_letter_row(message) for message in messages]
            if not begun:
                left_out = columns_to_leave_out(headings, rows, _DISPENSABLE)
            table = message_table(headings, rows, messages, left_out)
            write(table.partition("\n")[2] if begun else table)
        begun = True
    if not begun:
        print_diagnostic(f"{selection.topic}{selection.why_none()}")
    found.check()


def _read_all(selection: Selection) -> tuple[Iterator[list[dict[str, Any]]], Answers[Any]]:
    """Return the dead letters of one broker after the other, in non-empty pages, and what the brokers answered.

    The first page of each broker is read at once, so that a broker that does not answer delays the others only once.
    """
    brokers, count = selection.brokers, selection.count or 0
    readers = {address: _read(selection, address, count) for address in brokers.addresses}
    answered = brokers.read(lambda address: next(readers[address], []))

    def pages() -> Iterator[list[dict[str, Any]]]:
        left = count
        for address, first in answered.results.items():
            for messages in chain([first] if first else [], readers[address]):
                yield brokers.records(messages[:left] if count else messages, address)
                left -= len(messages)
                if count and left <= 0:
                    return

    return pages(), answered


def _read(selection: Selection, address: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield at most `count` dead letters (0: all) of one broker, in non-empty pages."""
    for page in selection.pages():
        start = 0
        while True:
            wanted = min(_PAGE, count) if count else _PAGE
            found = ask(address, api.dead_letters(*selection.chosen, start, wanted, page))
            if found:
                yield found
            if count:
                count -= len(found)
                if not count:
                    return
            if len(found) < wanted:
                break
            if found[-1]["sequence"] < start:
                raise not_a_broker(address)
            start = found[-1]["sequence"] + 1


def _letter_row(message: dict[str, Any]) -> tuple[str, ...]:
    origin = message["origin"]
    if origin is None:
        return message["id"], "", "", "", short_time(message["timestamp_ns"])
    where = str(Source(origin["topic"], origin["channel"]))
    published = short_time(origin["timestamp_ns"])
    return message["id"], where, str(origin["attempts"]), origin["reason"], published


for _command in (requeue, drop):
    command.add_command(_command)
