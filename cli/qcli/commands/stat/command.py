"""`qcli stat`: backlogs and rates of topics and channels."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import click

from ...broker.at_once import in_context
from ...broker.brokers import Brokers, broker_http_options
from ...broker.name_completion import complete_source
from ...framework import output
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import option, output_format
from ...framework.params import Integer, positive_duration
from ...records.brokers import StatRecord
from ...terminal.figures import speaks_unicode
from .columns import COLUMNS, LEFT_OUT_FIRST, Column, ColumnName
from .reports import Reports, check_names, print_reports, rows_of
from .selection import Order, Pattern, Selection, Test, condition, pattern

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
        "show some topics and channels once": "qcli stat 'click*' 'orders/arch*' --once",
        "show the deepest backlogs first": "qcli stat --sort depth --filter 'depth>0'",
        "show channels without consumers, on each broker": "qcli stat --filter clients=0 --by-broker",
        "print a number for a script": "qcli stat clicks/archive --format json | jq .depth",
        "wait for a broker that is starting": "qcli serve --data-path ./data & qcli stat --wait 10s --once",
        "print ten lines, one per minute": "qcli stat clicks/archive --format csv --count 10 --interval 1m",
    },
    exits={
        ExitCode.FAILURE: "There is no such topic or channel, or standard output cannot be written.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} If the connection is lost later, the live table "
        "reconnects.",
        ExitCode.PARTIAL: "A broker failed; the output has the numbers of the others.",
    },
    details={
        "Keys and columns": "time (Unix seconds); topic; channel (null for a topic); nsqd's depth, backend_depth, "
        "in_flight_count, deferred_count, requeue_count, timeout_count, message_count and client_count; paused; "
        "ingress_rate and egress_rate: messages per second that arrived and that were finished or emptied since the "
        "last report, null in the first report. Counts that only channels have are null for a topic; its depth and "
        "backend_depth count messages that no channel has. Then the "
        "counts of messages that were removed unfinished: expired_count (older than ttl), dropped_count (over a "
        "limit), dead_letter_count and given_up_count (after max_attempts); and blocked_count, the messages of depth "
        "that wait for an earlier message of their key (order_by). They are null, and not in the table, "
        "if the settings do not allow it. rate_limit_per_s: the rate limit of a channel; null without one. "
        "unavailable: null, or why a topic is unavailable; such a topic has no "
        "channels and no counts, and the table shows the reason below. oldest_message_age_ms: the age of the oldest "
        "message that is ready or in flight; null for a topic, and if no broker knows it: nsqd does not. broker: the "
        "address with --by-broker; null in the sum of all brokers. total_depth: the depth of a topic with that of its "
        "channels; of a channel, its depth.",
        "Depth": "The column depth, also in --sort and --filter, is total_depth: for a topic, the messages that no "
        "channel has and those that wait in its channels, as in the web console. The key depth is nsqd's.",
        "Total": "The table ends with a total if it has several rows. Messages and in/s count each published message "
        "once; the other numbers count the copies in all channels. The age is the highest one.",
        "Conditions": "--filter takes COLUMN, one of > >= < <= = !=, and a number such as 0 or 10k; for age a "
        "duration such as 5m. Or a word: paused, unavailable. All conditions must be met. Columns, also for --sort: "
        + ", ".join(column.name for column in COLUMNS)
        + ".",
        "On a terminal": "Channels are below their topic. If the table does not fit, names are shortened in the "
        "middle; then headings are shorter: "
        + ", ".join(f"{each.short_heading} is {each.heading}" for each in COLUMNS if each.has_short_heading)
        + ", P marks paused and U unavailable topics and channels; and numbers are cut to thousands (12k), millions "
        "(1.2M) and so on. If that is not enough, columns are left out in this order: "
        + ", ".join(LEFT_OUT_FIRST)
        + ". Depth always stays.",
        "Live screen": "Keys: arrows, page-up, page-down, home and end move to a row; enter shows one topic; / shows "
        "rows with a part of a name, a pattern, or a condition; s and S change the column to sort by, r reverses; b "
        "shows each broker; space stops the numbers; ? explains the keys; q quits. The line below the table has the "
        "full name of the row, and its rates in the last reports as bars; a wide screen has them in each row. A "
        "broker that does not answer is named in a red line; the numbers are then of the other brokers. Brokers that "
        "register at a discovery service later are added.",
    },
)
@click.argument(
    "patterns", metavar="[TOPIC[/CHANNEL]]...", nargs=-1, type=pattern, shell_complete=complete_source
)
@broker_http_options
@option(
    "Rows",
    "--filter",
    "tests",
    multiple=True,
    type=condition,
    metavar="CONDITION",
    help="Show only such rows: 'depth>0', clients=0, 'age>5m', paused. Repeat it for several conditions.",
)
@option(
    "Rows",
    "--sort",
    type=ColumnName(),
    default="name",
    metavar="COLUMN",
    help="Sort topics, and the channels of each, by this column: name, or depth, in/s, age and so on, highest first.",
)
@option("Rows", "--reverse", is_flag=True, help="Sort in the opposite order.")
@option("Rows", "--by-broker", is_flag=True, help="Show the numbers of each broker below their sum.")
@output_format(
    "table: for people. json: write an object per line. csv, tsv: write a line of headings first.",
    *FORMATS,
    records=[StatRecord],
)
@option("Output", "--once", is_flag=True, help="Print one report, also on a terminal.")
@option(
    "Output",
    "--count",
    type=Integer(min=0),
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
    patterns: tuple[Pattern, ...],
    brokers: Brokers,
    tests: tuple[Test, ...],
    sort: Column | None,
    reverse: bool,
    by_broker: bool,
    form: str,
    once: bool,
    count: int | None,
    interval: int,
    wait_ms: int | None,
) -> None:
    """Show backlogs and rates of topics and channels.

    On a terminal the table is live: ? explains the keys. Otherwise the command prints one report, unless --count asks
    for more. TOPIC and CHANNEL may be patterns such as 'click*'. Numbers of several brokers are added up.
    """
    from ...broker.admin_client import AdminClient

    if once and count is not None:
        raise click.UsageError("--once and --count exclude each other.")
    if wait_ms is not None:
        clients = [AdminClient(address) for address in brokers.addresses]
        _wait(clients, time.monotonic() + wait_ms / 1000)
    selection = Selection(patterns, tests, Order(sort, reverse))
    if form == "table" and count is None and not once and output.is_live_terminal(sys.stdout):
        _show_live(brokers, selection, by_broker, interval)
    else:
        reports = Reports(brokers, selection)
        print_reports(reports, selection, by_broker, form, 1 if count is None else count, interval)


def _show_live(brokers: Brokers, selection: Selection, by_broker: bool, interval_ms: int) -> None:
    from .drawing import Drawing
    from .live import Live
    from .settings import Settings
    from .stats_poller import StatsPoller

    interval_s = interval_ms / 1000
    discover = in_context(lambda: brokers.again().addresses) if brokers.lookupds else None
    poller = StatsPoller(
        brokers.addresses, partial(rows_of, patterns=selection.patterns), interval_s, discover
    )
    poller.start()
    live = Live(poller, interval_s)
    if not poller.problems():
        check_names(selection, live.picture().report)
    settings = Settings(selection, by_broker)
    live.run(settings, Drawing(settings, unicode=speaks_unicode()))


def _wait(brokers: Iterable[AdminClient], deadline_s: float) -> None:
    """Wait until each broker answers. Raises Failure: one does not answer by the deadline, or refuses."""
    for broker in brokers:
        while True:
            try:
                broker.info()
                break
            except Failure as error:
                if error.exit_code != ExitCode.UNREACHABLE or time.monotonic() >= deadline_s:
                    raise
            time.sleep(RETRY_S)
