"""`qcli nodes`: brokers and discovery services, their state, and checks for monitoring."""

import time
from collections.abc import Sequence
from dataclasses import replace

import click

from trio_nsq.text.wording import count_of

from ...broker.brokers import Brokers, broker_http_options, combined
from ...framework import output
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import given, given_flags, option, output_format
from ...framework.params import Integer, long_duration
from ...records.brokers import NodeRecord, ProblemRecord
from ...terminal.fitted_table import output_width
from . import checks, rows
from .checks import Limits, Problem, Space, space
from .survey import Survey, take_survey

FORMATS = ("table", "json", "csv", "tsv")
_LIMITS = ("max_depth", "max_age_ms", "min_free", "min_brokers")
_DEFAULT_FREE = "5%"


@click.command(
    "nodes",
    cls=DocumentedCommand,
    short_help="Show brokers and discovery services, or check them.",
    examples={
        "show the brokers of a fleet": "qcli nodes --lookupd-http-address 127.0.0.1:4161",
        "show one broker": "qcli nodes --nsqd-http-address 127.0.0.1:4151",
        "check a fleet, for monitoring": "qcli nodes --check --max-age 5m --min-free 10%",
        "list brokers that do not answer": "qcli nodes --format json | jq -r 'select(.reason) | .address'",
    },
    exits={
        ExitCode.OK: "All servers answer; with --check, nothing is wrong.",
        ExitCode.FAILURE: "With --check: all servers answer, and a check failed. Standard output lists the problems.",
        ExitCode.UNREACHABLE: "No broker answers.",
        ExitCode.PARTIAL: "Some brokers or discovery services do not answer, or refuse; also with --check.",
    },
    details={
        "Columns": "broker: its HTTP address. status: ok; draining: it refuses publishes until it is empty; unhealthy: "
        "its last write to disk failed, or a topic is unavailable; refused: it answers with an error; no answer. role "
        "and cluster are shown if a broker leads a cluster; each follower has a row below it, with its state in the "
        "cluster. topics; clients: consumers; depth: messages that wait, in all topics and channels; oldest: the "
        "highest age of a message that is ready or in flight; used: the size of all logs; free: free space on the disk "
        "of the data folder; up: the time since its start; lookupds: at how many of the nsqlookupd it is registered. "
        "nsqd tells neither ages nor disk space. On a narrow terminal, columns are left out. The lines below the "
        "tables name brokers that are unhealthy, hidden by a tombstone, or not registered. Standard error says why a "
        "server does not answer.",
        "Keys": "kind (broker, lookupd, or member: a follower of the broker before it), address, status, reason (why "
        "it does not answer), version, health, draining, hostname, broadcast_address, tcp_port, http_port, start_time "
        "(Unix seconds), uptime_s, topics, channels, clients, depth, in_flight, deferred, messages (published since "
        "the start), oldest_message_age_ms, disk_used_bytes, disk_free_bytes, disk_total_bytes, configured (its "
        "address was given; otherwise a discovery service lists it), registered_at, not_registered_at, tombstones "
        "(topics whose consumers do not find the broker), brokers (of an nsqlookupd), and of members of a cluster: "
        "cluster, epoch and role (leader or follower). What a server does not tell is null, or empty in csv and tsv, "
        "where lists are separated by blanks.",
        "Checks": "reachable: each server answers. health: the broker says that it is healthy. registered: each broker "
        "is registered at all nsqlookupd, unless it is draining. cluster: all members are in sync, and the coordinator "
        "answers, as 'qcli cluster status' checks. archive: it is written, and less than a minute behind. disk, age, "
        "depth, brokers: the thresholds of the options. The first "
        "line is OK or CRITICAL, with the number of problems and servers. Then each problem has a line; with --format "
        "json each problem is an object with check, address, about (a topic, channel or cluster) and problem. The "
        "channel dead-letters may have messages of any age.",
    },
)
@broker_http_options
@output_format(
    "table: for people. json: write an object per line. csv, tsv: write a line of headings first.",
    *FORMATS,
    records=[NodeRecord, ProblemRecord],
)
@option(
    "Checks",
    "--check",
    is_flag=True,
    help="Print problems instead of numbers, and exit with 1 if there is one.",
)
@option(
    "Checks",
    "--max-depth",
    type=Integer(min=0),
    help="Fail if more messages wait in a topic or channel of a broker.",
)
@option(
    "Checks",
    "--max-age",
    "max_age_ms",
    type=long_duration,
    metavar="DURATION",
    help="Fail if the oldest message of a channel is older, such as 5m.",
)
@option(
    "Checks",
    "--min-free",
    type=space,
    default=_DEFAULT_FREE,
    metavar="SIZE|PERCENT",
    help="Fail if the disk of a broker has less free space, such as 10GiB. 0: do not check.",
)
@option(
    "Checks",
    "--min-brokers",
    type=Integer(min=0),
    help="Fail if fewer brokers answer: nsqlookupd no longer lists a broker that has ended.",
)
def command(
    brokers: Brokers,
    form: str,
    check: bool,
    max_depth: int | None,
    max_age_ms: int | None,
    min_free: Space,
    min_brokers: int | None,
) -> int:
    """Show brokers and discovery services, or check them.

    The command asks all brokers that are given or that an nsqlookupd lists, at the same time. It also shows those that
    are listed and do not answer, and those that are not registered.
    """
    if not check and (flags := given_flags(*_LIMITS)):
        raise click.UsageError(f"{flags[0]} needs --check.")
    survey = take_survey(brokers)
    if check:
        limits = Limits(max_depth, max_age_ms, min_free, min_brokers)
        return _check(survey, limits, form)
    records = rows.records_of(survey, time.time())
    if form == "table":
        output.write(rows.tables(records, output_width()))
    else:
        output.write_records(records, rows.KEYS, form)
    if survey.failures:
        raise combined(survey.failures.values(), partial=survey.answered)
    return ExitCode.OK


def _check(survey: Survey, limits: Limits, form: str) -> int:
    problems = list(checks.problems_of(survey, limits))
    typed = limits if given("min_free") else replace(limits, free=None)
    for sentence in checks.unchecked(survey, typed):
        output.print_diagnostic(f"Note: {sentence}")
    if form == "table":
        lines = [_summary(survey, problems), *(problem.line() for problem in problems)]
        output.write_lines(lines)
    else:
        output.write_records([problem.record() for problem in problems], checks.KEYS, form)
    if survey.failures:
        return combined(survey.failures.values(), partial=survey.answered).exit_code
    return ExitCode.FAILURE if problems else ExitCode.OK


def _summary(survey: Survey, problems: Sequence[Problem]) -> str:
    asked = f"{count_of(len(survey.brokers), 'broker')}, {count_of(len(survey.lookupds), 'nsqlookupd')}"
    return f"CRITICAL: {count_of(len(problems), 'problem')} ({asked})" if problems else f"OK: {asked}"
