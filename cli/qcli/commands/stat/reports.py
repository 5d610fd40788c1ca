"""Reports of brokers, one after the other, and how they are printed: as a table, JSON, CSV or TSV."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from trio_nsq.text.wording import printable

from ...broker.brokers import Answers, Brokers
from ...broker.refusals import missing
from ...framework import output
from ...framework.errors import Failure
from ...terminal.figures import speaks_unicode
from .columns import RECORD_KEYS
from .layout import lay_out, plain, unavailable_lines, with_topics
from .rows import Report, Row, Sample, Sampler, combine, total
from .selection import Pattern, Selection, with_parts
from .stats_poller import Ask


def rows_of(address: str, patterns: Sequence[Pattern]) -> Ask:
    """Return what asks a broker for its current rows: those that the patterns need; without any, all."""
    from ...broker.admin_client import AdminClient

    broker, sampler = AdminClient(address), Sampler()
    exact = patterns[0].exact if len(patterns) == 1 else None

    def ask() -> Sample:
        stats = broker.stats(*(exact or ()))
        return Sample.of(sampler.rows(stats["topics"], time.monotonic()), stats)

    return ask


class Reports:
    """Asks all brokers at once, for each report.

    Attributes:
        answers: What the brokers answered last; `check` raises the failures of those that did not.
    """

    answers: Answers[Sample]

    def __init__(self, brokers: Brokers, selection: Selection) -> None:
        self._brokers = brokers
        self._selection = selection
        self._asks: dict[str, Ask] = {}

    def take(self) -> Report:
        """Return a report of the brokers that answered.

        Raises Failure: no broker answers, or a topic or channel of the command line does not exist.
        """

        def ask(address: str) -> Sample:
            if address not in self._asks:
                self._asks[address] = rows_of(address, self._selection.patterns)
            return self._asks[address]()

        self.answers = self._brokers.read(ask)
        report = combine({address: sample.rows for address, sample in self.answers.results.items()})
        if self._selection.patterns and not self._selection.named(report.sums):
            self.answers.check()
        if not self.answers.failures:
            check_names(self._selection, report)
        return report


def check_names(selection: Selection, report: Report) -> None:
    """Raise Failure if something that the command line names does not exist on the brokers, which all answered."""
    absent = selection.missing(report)
    if not absent:
        return
    if (source := absent[0].exact) is not None:
        raise missing(source, *report.brokers)
    raise Failure(
        f"No topic or channel matches {str(absent[0])!r} on {' or '.join(report.brokers)}. "
        "'qcli topic list' lists their names."
    )


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
        notes = {address: sample.note for address, sample in reports.answers.results.items()}
        _print_report(with_parts(found, report) if by_broker else found, report, form, notes, first=done == 0)
        done += 1
        if done == count:
            reports.answers.check()
            return
        failures = reports.answers.failures
        for address in failures.keys() - failed:
            output.print_diagnostic(f"Warning: {failures[address].brief}")
        failed = set(failures)
        time.sleep(max(0.0, due_s - time.monotonic()))


def _print_report(
    found: list[Row], report: Report, form: str, notes: Mapping[str, str], *, first: bool
) -> None:
    if form == "table":
        lines = [f"{address}: {note}" for address, note in notes.items() if note]
        text = "".join(f"{printable(line)}\n" for line in lines)
        output.write(("" if first else "\n") + _table(found, report) + text)
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
