"""The newest messages of a topic, followed live."""

from starlette.requests import Request

from ...access.viewer import require
from ...console import console_of, snapshot_of, upstream_of
from ...messages.paging import Start, read_page
from ..page import Page, View
from .message_brokers import brokers_of
from .message_rows import listed_rows
from .shown_bodies import shown_bodies

SHOWN_MESSAGES = 25


async def tail(request: Request) -> View:
    """The newest messages; each snapshot brings the newest again, so it reads no more however many are published."""
    topic = request.path_params["topic"]
    require(request, "read", topic)
    brokers = await brokers_of(request, topic)
    console = console_of(request)
    listing = await read_page(
        upstream_of(request),
        shown_bodies(request, topic),
        brokers.ours,
        Start(backwards=True),
        SHOWN_MESSAGES,
        deadline_s=console.options.request_timeout_ms / 1000,
    )
    interval_s = console.options.poll_interval_ms / 1000
    state = snapshot_of(request).topics.get(topic)
    rate = state.sum.in_rate if state is not None else None
    context = {
        "topic": topic,
        "brokers": brokers,
        "rows": listed_rows(request, topic, listing.page.rows),
        "errors": {**brokers.errors, **listing.errors},
        "rate": rate,
        "interval_s": interval_s,
        "skipped": max(0, round((rate or 0) * interval_s) - SHOWN_MESSAGES),
    }
    return View("tail.html", context)


PAGES = [Page("/topics/{topic}/tail", "tail", tail, live=True)]
