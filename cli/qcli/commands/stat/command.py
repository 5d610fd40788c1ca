"""`qcli stat`: backlogs and rates of topics and channels."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from ...broker.brokers import Brokers, broker_http_options
from ...broker.name_completion import complete_source
from ...framework import output
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import option, output_format
from ...framework.params import Source, positive_duration, source
from . import rows
from .rows import Reports, Row

if TYPE_CHECKING:
    from ...broker.admin_client import AdminClient

RETRY_S = 0.1
"""With --wait: the time between two attempts to reach a broker."""

FORMATS = ("table", "json", "csv", "tsv")


@click.command(
    "stat",
    cls=DocumentedCommand,
    short_help="Show backlogs and rates of topics and channels.",
    examples={
        "show everything, live on a terminal": "qcli stat",
        "show one topic once": "qcli stat clicks --once",
        "print a number for a script": "qcli stat clicks/archive --format json | jq .depth",
        "wait for a broker that is starting": "qcli serve --data-path ./data & qcli stat --wait 10s --once",
        "print ten lines, one per minute": "qcli stat clicks/archive --format csv --count 10 --interval 1m",
    },
    exits={
        ExitCode.FAILURE: "There is no such topic or channel, or standard output cannot be written.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} If the connection is lost later, the live table "
        "reconnects.",
    },
    details={
        "Keys and columns": "time (Unix seconds); topic; channel (null for a topic); nsqd's depth, backend_depth, "
        "in_flight_count, deferred_count, requeue_count, timeout_count, message_count and client_count; paused; "
        "ingress_rate and egress_rate: messages per second that arrived and that were finished or emptied since the "
        "last report, null in the first report. Counts that only channels have are null for a topic. Then the "
        "counts of messages that were removed unfinished: expired_count (older than ttl), dropped_count (over a "
        "limit), dead_letter_count and given_up_count (after max_attempts). They are null, and not in the table, "
        "if the settings do not allow it. Last, unavailable: null, or why a topic is unavailable; such a topic has no "
        "channels and no counts, and the table shows the reason below.",
        "On a narrow terminal": "If the table does not fit, headings are shorter: "
        + ", ".join(f"{short} is {long}" for long, short in rows.NARROW_HEADINGS.items())
        + ", P marks paused and U unavailable topics and channels. Numbers are cut to thousands (12k), millions (M) "
        "and so on. If that is not enough, columns are left out in this order: "
        + ", ".join(heading or "the mark for paused or unavailable" for heading in rows.LEFT_OUT_FIRST)
        + ". Topic, channel and depth always stay; as a last resort, long names are shortened in the middle.",
    },
)
@click.argument(
    "wanted", metavar="[TOPIC[/CHANNEL]]", required=False, type=source, shell_complete=complete_source
)
@broker_http_options
@output_format(
    "table: for people. json: write an object per line. csv, tsv: write a line of headings first.",
    *FORMATS,
)
@option("Output", "--once", is_flag=True, help="Print one report, also on a terminal.")
@option(
    "Output",
    "--count",
    type=click.IntRange(min=0),
    help="Print N reports; 0: without limit. By default a table on a terminal is live; otherwise print one report.",
)
@option(
    "Output",
    "--interval",
    type=positive_duration,
    default="2s",
    help="Wait this long between reports.",
)
@option(
    "Output",
    "--wait",
    "wait_ms",
    type=positive_duration,
    help="If a broker does not answer, as it may just be starting, try again for this long, such as 10s.",
)
def command(
    wanted: Source | None,
    brokers: Brokers,
    form: str,
    once: bool,
    count: int | None,
    interval: int,
    wait_ms: int | None,
) -> None:
    """Show backlogs and rates of topics and channels.

    On a terminal the table is live until Ctrl-C. Otherwise the command prints one report, unless --count asks for
    more. Numbers of several brokers are added up.
    """
    from ...broker.admin_client import AdminClient

    if once and count is not None:
        raise click.UsageError("--once and --count exclude each other.")
    if wait_ms is not None:
        clients = [AdminClient(address) for address in brokers.addresses]
        _wait(clients, time.monotonic() + wait_ms / 1000)
    reports = Reports(brokers, wanted)
    if form == "table" and count is None and not once and output.is_live_terminal(sys.stdout):
        from .live import show_live

        show_live(reports, interval)
    else:
        _print_reports(reports, form, 1 if count is None else count, interval)


def _wait(brokers: Iterable[AdminClient], deadline_s: float) -> None:
    """Wait until each broker answers. Raises Failure: one does not answer by the deadline, or refuses."""
    for broker in brokers:
        while True:
            try:
                broker.request("GET", "/info", {})
                break
            except Failure as error:
                if error.exit_code != ExitCode.UNREACHABLE or time.monotonic() >= deadline_s:
                    raise
            time.sleep(RETRY_S)


def _print_reports(reports: Reports, form: str, count: int, interval_ms: int) -> None:
    done = 0
    while True:
        due_s = time.monotonic() + interval_ms / 1000
        _print_report(reports.take(), form, first=done == 0)
        reports.answers.check()
        done += 1
        if done == count:
            return
        time.sleep(max(0.0, due_s - time.monotonic()))


def _print_report(found: list[Row], form: str, *, first: bool) -> None:
    if form == "table":
        width = shutil.get_terminal_size().columns if output.is_terminal(sys.stdout) else None
        text = output.plain_table(rows.table(found, width), rows.NAME_COLUMNS) + "".join(
            f"{line}\n" for line in rows.unavailable_lines(found)
        )
        output.write(("" if first else "\n") + text)
        return
    now_s = time.time()
    records = [row.record(now_s) for row in found]
    if form == "json":
        output.write(output.json_lines(records))
        return
    headings = [rows.RECORD_KEYS] if first else []
    rows_of_values = [[output.table_value(value) for value in record.values()] for record in records]
    output.write(output.delimited([*headings, *rows_of_values], "," if form == "csv" else "\t"))
