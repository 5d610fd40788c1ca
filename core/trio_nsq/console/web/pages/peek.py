"""What a channel delivers next."""

from itertools import islice

from starlette.requests import Request
from starlette.responses import Response

from ....api import broker as api
from ...access.viewer import require
from ...console import upstream_of
from ...messages.command_lines import peek_with_curl, peek_with_qcli
from ...messages.list_download import LINE_LIMITS, MAX_LINES
from ...messages.peeking import STATES, peek
from ...messages.query import COUNTS
from ..page import Page, View
from ..table_files import wanted_form
from .message_brokers import brokers_of
from .message_files import file_of_channel
from .message_rows import listed_rows
from .shown_bodies import channel_reader


async def channel_messages(request: Request) -> View | Response:
    """The next messages of a channel, for each broker."""
    topic, channel = request.path_params["topic"], request.path_params["channel"]
    require(request, "read", topic, channel)
    text = request.query_params.get("count", "10")
    count = int(text) if text in map(str, COUNTS) else COUNTS[0]
    state = request.query_params.get("state", "")
    states = (state,) if state in STATES else STATES
    brokers = await brokers_of(request, topic, channel)
    if form := wanted_form(request):
        lines = api.peek(topic, channel, MAX_LINES, states)
        return await file_of_channel(
            request, topic, channel, brokers.ours, lambda _: lines, form, brokers.errors
        )
    found = await peek(
        upstream_of(request),
        topic,
        channel,
        brokers.ours,
        count,
        channel_reader(request, topic),
        states=states,
    )
    rows = iter(listed_rows(request, topic, [each for waiting in found.waiting.values() for each in waiting]))
    listed = {address: list(islice(rows, len(waiting))) for address, waiting in found.waiting.items()}
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
        "limits": LINE_LIMITS,
        "commands": commands,
    }
    return View("channel_messages.html", context)


PAGES = [Page("/topics/{topic}/{channel}/messages", "channel_messages", channel_messages)]
