"""`qcli dlq list`: counts the dead letters that wait."""

from __future__ import annotations

from typing import Any

import click

from ...broker.address_options import broker_http_options
from ...broker.fan_out import read_each, with_broker
from ...broker.json_api import get_json
from ...framework.command import DocumentedCommand, Example
from ...framework.exit_codes import ExitCode
from ...framework.options import output_format
from ...framework.output import json_lines, plain_table, print_diagnostic, write
from ...framework.params import Source, topic_name
from ...framework.positions import moment
from .selection import CHANNEL, NOTE, WHAT, complete_dead_letter_topic


@click.command(
    "list",
    cls=DocumentedCommand,
    examples=[
        Example("all there are", "qcli dlq list"),
        Example("of one dead-letter topic", "qcli dlq list clicks.dead"),
        Example("how many", "qcli dlq list clicks.dead --format json | jq -s 'map(.count) | add'"),
    ],
    exits={
        ExitCode.OK: "They were listed; also if there are none.",
        ExitCode.FAILURE: "There is no such dead-letter topic, or standard output cannot be written.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
    },
    notes={
        "Dead letters": NOTE,
        "JSON": "One object per origin and reason: dead_letter_topic; topic and channel that they come from, and "
        "reason (requeued, timed_out or connection_lost), null for what somebody published to the dead-letter topic; "
        "count; first_ns and last_ns, when the first and the last of them became a dead letter, Unix nanoseconds. "
        "Of several brokers also broker, its address.",
    },
)
@click.argument(
    "topic", metavar="[TOPIC]", required=False, type=topic_name, shell_complete=complete_dead_letter_topic
)
@broker_http_options
@output_format("table: for people. json: an object per line, see below.", "table", "json")
def command(topic: str | None, nsqd_http_addresses: tuple[str, ...], form: str) -> None:
    """Count the dead letters that wait, by where they come from and why."""

    def count(address: str) -> list[dict[str, Any]]:
        topics = [topic] if topic is not None else _dead_letter_topics(address)
        return [record for name in topics for record in _count(address, name)]

    found = read_each(nsqd_http_addresses, count)
    records = [record for each in found for record in with_broker(found[each], each, nsqd_http_addresses)]
    if form == "json":
        write(json_lines(records))
    elif records:
        headings = ["TOPIC", "FROM", "REASON", "FIRST", "LAST", "LETTERS"]
        rows = [_row(record) for record in records]
        if "broker" in records[0]:
            headings.insert(0, "BROKER")
            rows = [(record["broker"], *row) for record, row in zip(records, rows, strict=True)]
        write(plain_table([headings, *rows], len(headings) - 1))
    if not records:
        print_diagnostic(f"{topic or 'All topics'}: no letter waits there")


def _dead_letter_topics(address: str) -> list[str]:
    found = get_json(address, Source("", None), "/dead_letters", {}, WHAT)
    return [each["topic"] for each in found["topics"]]


def _count(address: str, topic: str) -> list[dict[str, Any]]:
    counts: dict[tuple[Any, ...], dict[str, Any]] = {}
    start: int | None = 0
    while start is not None:
        answer = get_json(address, Source(topic, None), "/dead_letters", {"from": str(start)}, WHAT)
        for row in answer["origins"]:
            known = counts.setdefault((row["topic"], row["channel"], row["reason"]), dict(row, count=0))
            known["count"] += row["count"]
            known["first_ns"] = min(known["first_ns"], row["first_ns"])
            known["last_ns"] = max(known["last_ns"], row["last_ns"])
        start = answer["next_sequence"]
    if answer["in_flight"]:
        print_diagnostic(
            f"{topic}: {answer['in_flight']:,} more in flight with consumers of {topic}/{CHANNEL}"
        )
    return [{"dead_letter_topic": topic, **row} for row in counts.values()]


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    times = moment(record["first_ns"]), moment(record["last_ns"])
    origin = "" if record["topic"] is None else str(Source(record["topic"], record["channel"]))
    return record["dead_letter_topic"], origin, record["reason"] or "", *times, f"{record['count']:,}"
