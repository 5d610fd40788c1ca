"""What an action did, for the next page: it is kept for some minutes, for the viewer who did it."""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from .actions.report import Report

_MOST = 500
_LIFETIME_S = 600.0
_SHOWN = 50


@dataclass(frozen=True, slots=True)
class Continuation:
    """A form that continues an action which was stopped after some time.

    Attributes:
        path: Where it is sent.
        fields: Hidden fields.
    """

    path: str
    button: str
    fields: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Notice:
    """The result of an action on the next page.

    Attributes:
        title: What was done, or failed.
        continuation: How to go on, if there is more to do.
    """

    title: str
    report: Report
    continuation: Continuation | None = None

    @property
    def kind(self) -> str:
        """The colour: `ok`, `warn` or `bad`."""
        report = self.report
        if report.is_success:
            return "warn" if self.continuation else "ok"
        return "warn" if report.is_partial else "bad"

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What to list: kind, server and text; failures first."""
        found = [
            *(("failed", address, why) for address, why in self.report.failed.items()),
            *(("done", address, what) for address, what in self.report.done.items()),
            *(("left out", address, why) for address, why in self.report.left_out.items()),
        ]
        return found[:_SHOWN]

    @property
    def more(self) -> int:
        """How many are not listed."""
        report = self.report
        return max(0, len(report.failed) + len(report.done) + len(report.left_out) - _SHOWN)


class Notices:
    """Keeps the newest notices; the address of a page names one."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[float, str, Notice]] = OrderedDict()

    def add(self, viewer: str, notice: Notice) -> str:
        """Keep a notice for a viewer, and return its key."""
        key = secrets.token_urlsafe(12)
        self._kept[key] = (trio.current_time() + _LIFETIME_S, viewer, notice)
        while len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return key

    def get(self, viewer: str, key: str | None) -> Notice | None:
        """Return a notice; None: there is none with this key for this viewer any more."""
        deadline, owner, notice = self._kept.get(key or "", (0.0, "", None))
        if notice is None or owner != viewer or trio.current_time() > deadline:
            return None
        return notice
