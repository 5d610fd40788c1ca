"""What discovery services know and no broker has, and a form that creates topics and channels."""

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.inactive import find_channels, find_inactive
from ..listing import Column, listing
from ..page import Page, View

_COLUMNS: dict[str, Column[str]] = {"name": Column(lambda name: name, descending=False)}


async def lookup(request: Request) -> View:
    """Topics without a producer."""
    viewer, console = viewer_of(request), console_of(request)
    lookupds = console.watcher.lookupds
    found = await find_inactive(console.upstream, lookupds, snapshot_of(request))
    topics = [topic for topic in found.topics if viewer.sees(topic)]
    rows = listing(request, "lookup", topics, _COLUMNS, name=lambda name: name, default="name")
    channels = await find_channels(console.upstream, lookupds, rows.rows)
    return View(
        "lookup.html", {"listing": rows, "channels": channels, "errors": found.errors, "lookupds": lookupds}
    )


PAGES = [Page("/lookup", "lookup", lookup)]
