"""Reports of brokers, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...broker.brokers import Answers, Brokers
from ...broker.refusals import missing
from ...framework.errors import Failure
from .rows import Report, Row, Sampler, combine
from .selection import Pattern, Selection

if TYPE_CHECKING:
    from ...broker.admin_client import AdminClient


class Reports:
    """Asks all brokers at once, for each report.

    Attributes:
        answers: What the brokers answered last; `check` raises the failures of those that did not.
    """

    answers: Answers[list[Row]]

    def __init__(self, brokers: Brokers, selection: Selection) -> None:
        self._brokers = brokers
        self._selection = selection
        self._samplers: dict[str, Sampler] = {}

    def take(self) -> Report:
        """Return a report of the brokers that answered.

        Raises Failure: no broker answers, or a topic or channel of the command line does not exist.
        """

        from ...broker.admin_client import AdminClient

        def rows(address: str) -> list[Row]:
            topics = ask(AdminClient(address), self._selection.patterns)
            return self._samplers.setdefault(address, Sampler()).rows(topics, time.monotonic())

        self.answers = self._brokers.read(rows)
        report = combine(self.answers.results)
        if self._selection.patterns and not self._selection.named(report.sums):
            self.answers.check()
        if not self.answers.failures:
            check_names(self._selection, report)
        return report


def ask(broker: AdminClient, patterns: Sequence[Pattern]) -> list[dict[str, Any]]:
    """Return the `topics` of `/stats` that the patterns need. Raises Failure: the broker does not answer."""
    exact = patterns[0].exact if len(patterns) == 1 else None
    topics: list[dict[str, Any]] = broker.stats(*(exact or (None, None)))["topics"]
    return topics


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
