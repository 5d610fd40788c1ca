"""Pages that ask before something changes: what goes, the command that does the same, and a name to type."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...protocol import is_valid_name
from ..access.viewer import viewer_of
from ..actions.report import Report
from ..console import console_of
from ..notices import Continuation, Notice
from .page import NotFound, View
from .rendering import path_of

TYPED = "typed"
_SEE_OTHER = 303
_ID = re.compile("[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A page that asks before an action.

    Attributes:
        title: The question's subject, such as `Delete topic clicks`.
        texts: What the action does.
        command: The equal command line.
        path: Where the form is sent.
        back: Where the viewer came from.
        button: The text of the button.
        crumbs: The pages above: texts and paths.
        head, rows, total: A table of what goes, by broker; `total` is its last row.
        errors: Why brokers did not say what goes there, by address.
        left_out: Why brokers take no part, by address.
        name: To be typed; empty: a click is enough.
        fields: Hidden fields.
        problem: Why the form was not accepted; empty at first.
        is_destructive: For the colour of the button.
    """

    title: str
    texts: Sequence[str]
    command: str
    path: str
    back: str
    button: str
    crumbs: Sequence[tuple[str, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str | int]] = ()
    total: Sequence[str | int] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    fields: Sequence[tuple[str, str]] = ()
    problem: str = ""
    is_destructive: bool = True

    def view(self, problem: str = "", status: int = 200) -> View:
        """Return the page; `problem` is why the form was not accepted."""
        return View(
            "confirm.html", {"confirm": replace(self, problem=problem)}, status, only_asks=not problem
        )

    def refused(self, form: Mapping[str, str]) -> View | None:
        """Return the page again if a form lacks the name; None: the viewer has confirmed."""
        if not self.name or form.get(TYPED, "").strip() == self.name:
            return None
        return self.view(f"Nothing was changed: type {self.name} to confirm.", 422)


def names_of(request: Request) -> tuple[str, str]:
    """Return the topic and channel of a path; an empty channel if it has none. Raises NotFound."""
    topic, channel = request.path_params["topic"], request.path_params.get("channel", "")
    if not is_valid_name(topic):
        raise NotFound(f"{topic[:100]!r} is not the name of a topic.")
    if channel and not is_valid_name(channel):
        raise NotFound(f"{channel[:100]!r} is not the name of a channel.")
    return topic, channel


def label(topic: str, channel: str) -> str:
    """Return `topic T` or `channel T/C`."""
    return f"channel {topic}/{channel}" if channel else f"topic {topic}"


def place(request: Request, topic: str, channel: str = "") -> str:
    """Return the path of the page of a topic or channel."""
    if channel:
        return path_of(request, "channel", topic=topic, channel=channel)
    return path_of(request, "topic", topic=topic)


def crumbs_of(request: Request, topic: str, channel: str = "") -> list[tuple[str, str]]:
    """Return the pages above one that belongs to a topic or channel."""
    found = [("Topics", path_of(request, "topics")), (topic, place(request, topic))]
    return [*found, (channel, place(request, topic, channel))] if channel else found


def problem_of(report: Report, what: str) -> str:
    """Return why an action failed on all servers."""
    reasons = "; ".join(f"{address}: {why}" for address, why in report.failed.items())
    return f"Failed: {what}. {reasons}" if reasons else f"Failed: {what}. No broker answers."


def finished(
    request: Request, path: str, title: str, report: Report, continuation: Continuation | None = None
) -> Response:
    """Redirect to a page that shows what was done.

    Args:
        path: The page, with the base path; it may have a query.
        title: What was done.
    """
    if not report.done:
        title = f"{'failed' if report.failed else 'nothing to do'}: {title}"
    elif report.failed:
        title = f"partly done: {title}"
    title = title[:1].upper() + title[1:]
    notice = Notice(title, report, continuation)
    key = console_of(request).notices.add(viewer_of(request).name, notice)
    return RedirectResponse(f"{path}{'&' if '?' in path else '?'}notice={key}", _SEE_OTHER)


def selected(values: Iterable[str], addresses: Collection[str]) -> dict[str, list[str]]:
    """Return the selected messages of a form, ids by broker; others than `ADDRESS ID` of these brokers are left out."""
    found: dict[str, list[str]] = {}
    for value in values:
        address, _, message_id = value.rpartition(" ")
        if address in addresses and _ID.fullmatch(message_id):
            found.setdefault(address, []).append(message_id)
    return found
