"""`qcli pipeline status`: the tables that topics declare, and how far they are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import click

from trio_nsq.api.answers import TopicStats
from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.protocol.tables import DeclaredTable
from trio_nsq.protocol.untrusted_json import decode_json
from trio_nsq.text.wording import printable

from ...broker.brokers import Brokers, broker_http_options
from ...broker.failures import reason_unreachable
from ...framework import output, params
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import output_format
from ...records.topics import PipelineTableRecord
from ...terminal.figures import age, short_count
from ...terminal.fitted_table import Column, fitted_table, output_width
from .options import NO_TABLE, channel_option, status_address_option

_MS_PER_S = 1000


@click.command(
    "status",
    cls=DocumentedCommand,
    short_help="Show the tables that topics declare, and how far they are.",
    examples={
        "show the tables, and the messages that are not in them yet": "qcli pipeline status",
        "show also when they were complete last, and errors": "qcli pipeline status --http-address 127.0.0.1:9151",
        "check them, for monitoring": "qcli pipeline status --http-address 127.0.0.1:9151 > /dev/null || exit 2",
    },
    exits={
        ExitCode.OK: "All tables can be written, as far as it is known; perhaps there are none.",
        ExitCode.FAILURE: "A table cannot be written, or the last round failed; the output says why.",
        ExitCode.UNREACHABLE: "No broker answers, or nothing answers at --http-address.",
    },
    details={
        "Columns": "lag: the messages that the channel of 'qcli pipeline run' keeps because they are not in the table "
        "yet; empty: there is no channel, so nothing was exported yet. Only with --http-address: behind: all messages "
        "that were published this long ago are in the table; last round: when the table was complete last. state: "
        "failing if the last round failed, or if the settings contradict each other; the reasons are below the table.",
        "Keys": "An object for each topic: topic, table (null: it is not known), lag (null: there is no channel), "
        "and lag_s, messages (written since the start of qcli pipeline run), last_round_at (Unix seconds) and error, "
        "which are null if they are not known.",
    },
)
@broker_http_options
@channel_option
@status_address_option("Ask the 'qcli pipeline run' with this --http-address, too.", params.http_address)
@output_format(
    "table: for people. json: write an object per topic.", "table", "json", records=[PipelineTableRecord]
)
def status(brokers: Brokers, channel: str, http_address: str | None, form: str) -> int:
    """Show the tables that topics declare, and how far they are."""
    from ...broker.admin_client import AdminClient

    answers = brokers.read(lambda address: AdminClient(address).stats()["topics"])
    known = {} if http_address is None else _status_of(http_address)
    records = _records(answers.results, channel, known)
    if form == "json":
        output.write(output.json_lines(records))
    elif records:
        output.write(fitted_table(_columns(time.time()), records, output_width()))
        output.write_lines(dict.fromkeys(record["error"] for record in records if record["error"]))
    else:
        output.print_diagnostic(f"Note: {NO_TABLE}")
    answers.check()
    return ExitCode.FAILURE if any(record["error"] for record in records) else ExitCode.OK


def _records(
    topics_of: Mapping[str, Sequence[TopicStats]], channel: str, known: Mapping[str, Mapping[str, Any]]
) -> list[PipelineTableRecord]:
    """Return what is known of each topic that declares a table."""
    from trio_nsq.fleet.declared_tables import declared_tables

    settings = {
        broker: {topic["topic_name"]: topic.get("table", "") for topic in topics}
        for broker, topics in topics_of.items()
    }
    written = {
        topic: text for topics in settings.values() for topic, text in topics.items() if topic in known
    }
    declared = declared_tables(settings, _parsed(written))
    records: list[PipelineTableRecord] = []
    for topic in sorted({*declared.tables, *declared.problems}):
        told = known.get(topic, {})
        table = declared.tables.get(topic)
        records.append(
            {
                "topic": topic,
                "table": None if table is None else str(table),
                "lag": _lag(topics_of.values(), topic, channel),
                "lag_s": _number(told.get("lag_s")),
                "messages": _number(told.get("messages")),
                "last_round_at": _number(told.get("last_round_at")),
                "error": declared.problems.get(topic) or printable(str(told.get("error") or "")) or None,
            }
        )
    return records


def _parsed(texts: Mapping[str, str]) -> dict[str, DeclaredTable]:
    found = {}
    for topic, text in texts.items():
        with suppress(ValueError):
            found[topic] = DeclaredTable.parse(text)
    return found


def _lag(brokers: Iterable[Sequence[TopicStats]], topic: str, channel: str) -> int | None:
    """Return the messages that the channel keeps at all brokers; None: none has it."""
    depths = [
        each["depth"] + each["in_flight_count"] + each["deferred_count"]
        for topics in brokers
        for found in topics
        if found["topic_name"] == topic
        for each in found["channels"]
        if each["channel_name"] == channel
    ]
    return sum(depths) if depths else None


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) else None


def _status_of(address: str) -> dict[str, Mapping[str, Any]]:
    """Ask a `pipeline run` for its status by topic. Raises Failure."""
    from trio_nsq.client.http.broker_http import BrokerHTTP

    from ...broker.admin_client import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S

    http = BrokerHTTP(address, connect_timeout_s=CONNECT_TIMEOUT_S, answer_timeout_s=REQUEST_TIMEOUT_S)
    try:
        answer = decode_json(http.request("GET", "/stats", {}, b""))
        return {str(each["topic"]): each for each in answer["topics"]}
    except BrokerUnreachable as error:
        raise Failure(
            f"--http-address {address}: 'qcli pipeline run' does not answer: {reason_unreachable(error)}",
            ExitCode.UNREACHABLE,
        ) from error
    except (RequestRefused, ValueError, LookupError, TypeError) as error:
        raise Failure(f"--http-address {address} is not that of 'qcli pipeline run'.") from error


def _columns(now_s: float) -> tuple[Column[PipelineTableRecord], ...]:
    def ago(since_s: float | None) -> str:
        return "" if since_s is None else f"{age(max(0.0, now_s - since_s) * _MS_PER_S)} ago"

    return (
        Column("topic", lambda row: row["topic"], is_name=True),
        Column("table", lambda row: row["table"] or "", is_name=True),
        Column("state", lambda row: "failing" if row["error"] else "", is_name=True),
        Column("lag", lambda row: "" if row["lag"] is None else short_count(row["lag"])),
        Column("behind", lambda row: "" if row["lag_s"] is None else age(row["lag_s"] * _MS_PER_S)),
        Column("last round", lambda row: ago(row["last_round_at"]), rank=1),
    )
