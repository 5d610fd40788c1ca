"""Prints reports of `stat`: as a table, JSON, CSV or TSV."""

from __future__ import annotations

import shutil
import sys
import time

from trio_nsq.wording import printable

from ...framework import output
from ...terminal.figures import speaks_unicode
from .columns import RECORD_KEYS
from .layout import lay_out, plain, unavailable_lines, with_topics
from .reports import Reports
from .rows import Report, Row, total
from .selection import Selection, with_parts


def print_reports(
    reports: Reports, selection: Selection, by_broker: bool, form: str, count: int, interval_ms: int
) -> None:
    """Print this many reports; 0: without limit.

    Raises Failure: no broker answers, or something that was named does not exist; or, after the last report, a broker
    did not answer. Before that, this is a warning.
    """
    done, failed = 0, set[str]()
    while True:
        due_s = time.monotonic() + interval_ms / 1000
        report = reports.take()
        found = selection.rows(report)
        _print_report(with_parts(found, report) if by_broker else found, report, form, first=done == 0)
        done += 1
        if done == count:
            reports.answers.check()
            return
        failures = reports.answers.failures
        for address in failures.keys() - failed:
            output.print_diagnostic(f"Warning: {failures[address].brief}")
        failed = set(failures)
        time.sleep(max(0.0, due_s - time.monotonic()))


def _print_report(found: list[Row], report: Report, form: str, *, first: bool) -> None:
    if form == "table":
        output.write(("" if first else "\n") + _table(found, report))
        return
    now_s = time.time()
    records = [row.record(now_s) for row in found]
    if form == "json":
        output.write(output.json_lines(records))
        return
    headings = [RECORD_KEYS] if first else []
    rows_of_values = [[output.table_value(value) for value in record.values()] for record in records]
    output.write(output.delimited([*headings, *rows_of_values], "," if form == "csv" else "\t"))


def _table(found: list[Row], report: Report) -> str:
    sums = [row for row in found if row.broker is None]
    everything = total(sums)
    several = len(sums) > 1
    if not output.is_terminal(sys.stdout):
        table = plain(found, everything if several else None)
    else:
        items = with_topics(found)
        layout = lay_out(items, everything, shutil.get_terminal_size().columns, unicode=speaks_unicode())
        lines = [layout.heading(), *map(layout.line, items), *([layout.line(everything)] if several else [])]
        table = "".join(f"{line}\n" for line in lines)
    return table + "".join(f"{printable(line)}\n" for line in unavailable_lines(sums, report))
