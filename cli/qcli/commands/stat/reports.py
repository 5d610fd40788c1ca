"""Reports of brokers, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...broker.brokers import Answers, Brokers
from ...broker.failures import not_a_broker
from ...broker.refusals import missing
from ...framework.errors import Failure
from .rows import Report, Row, Sampler, combine
from .selection import Pattern, Selection

if TYPE_CHECKING:
    from ...broker.admin_client import AdminClient


class BrokerRows:
    """Asks one broker for its rows.

    Args:
        patterns: What is needed; if nothing, everything.
    """

    def __init__(self, broker: AdminClient, patterns: Sequence[Pattern]) -> None:
        self._broker = broker
        exact = patterns[0].exact if len(patterns) == 1 else None
        self._wanted = exact or (None, None)
        self._sampler = Sampler()

    def ask(self) -> list[Row]:
        """Return the current rows. Raises Failure: the broker does not answer, or it is no broker."""
        topics = self._broker.stats(*self._wanted)["topics"]
        try:
            return self._sampler.rows(topics, time.monotonic())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise not_a_broker(self._broker.address) from error


class Reports:
    """Asks all brokers at once, for each report.

    Attributes:
        answers: What the brokers answered last; `check` raises the failures of those that did not.
    """

    answers: Answers[list[Row]]

    def __init__(self, brokers: Brokers, selection: Selection) -> None:
        self._brokers = brokers
        self._selection = selection
        self._rows_of: dict[str, BrokerRows] = {}

    def take(self) -> Report:
        """Return a report of the brokers that answered.

        Raises Failure: no broker answers, or a topic or channel of the command line does not exist.
        """
        from ...broker.admin_client import AdminClient

        def ask(address: str) -> list[Row]:
            if address not in self._rows_of:
                self._rows_of[address] = BrokerRows(AdminClient(address), self._selection.patterns)
            return self._rows_of[address].ask()

        self.answers = self._brokers.read(ask)
        report = combine(self.answers.results)
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
