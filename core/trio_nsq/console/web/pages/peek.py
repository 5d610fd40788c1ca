"""What a channel delivers next."""

from dataclasses import dataclass

from starlette.requests import Request

from ...access.viewer import require
from ...console import upstream_of
from ...messages.body_view import BodyView, body_view, preview
from ...messages.command_lines import peek_with_curl, peek_with_qcli
from ...messages.peeking import STATES, Waiting, peek
from ..page import Page, View
from ..rendering import path_of
from .message_brokers import brokers_of

COUNTS = (10, 25, 50, 100)
_PREVIEW = 160
_ROW_HTML = 6 * 1024
_PAGE_HTML = 64 * 1024


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A message that waits; `body` is None if the page has no room left for it."""

    waiting: Waiting
    preview: str
    body: BodyView | None
    link: str


async def channel_messages(request: Request) -> View:
    """The next messages of a channel, for each broker."""
    topic, channel = request.path_params["topic"], request.path_params["channel"]
    require(request, "read", topic, channel)
    text = request.query_params.get("count", "10")
    count = int(text) if text in map(str, COUNTS) else COUNTS[0]
    state = request.query_params.get("state", "")
    states = (state,) if state in STATES else STATES
    brokers = await brokers_of(request, topic, channel)
    found = await peek(
        upstream_of(request),
        topic,
        channel,
        brokers.ours,
        count,
        states=states,
    )
    room = _PAGE_HTML
    listed: dict[str, list[WaitingRow]] = {}
    for address, waiting in found.waiting.items():
        rows = listed[address] = []
        for each in waiting:
            body = body_view(each.body, each.size, limit=min(_ROW_HTML, room)) if room > 0 else None
            room -= len(body.html) if body is not None else 0
            link = path_of(request, "message", {"broker": address}, topic=topic, sequence=str(each.sequence))
            rows.append(WaitingRow(each, preview(each.body, _PREVIEW), body, link))
    commands = {
        address: (
            peek_with_curl(address, topic, channel, count),
            peek_with_qcli(address, topic, channel, count),
        )
        for address in brokers.ours
    }
    context = {
        "topic": topic,
        "channel": channel,
        "brokers": brokers,
        "listed": listed,
        "errors": {**brokers.errors, **found.errors},
        "count": count,
        "counts": COUNTS,
        "state": state if state in STATES else "",
        "states": STATES,
        "commands": commands,
    }
    return View("channel_messages.html", context)


PAGES = [Page("/topics/{topic}/{channel}/messages", "channel_messages", channel_messages)]
