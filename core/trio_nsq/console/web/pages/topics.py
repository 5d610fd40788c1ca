"""The list of topics."""

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of
from ..page import Page, View


async def topics(request: Request) -> View:
    """All topics, with their numbers."""
    viewer = viewer_of(request)
    found = [
        topic for topic in console_of(request).watcher.snapshot.topics.values() if viewer.sees(topic.name)
    ]
    return View("topics.html", {"topics": found})


PAGES = [Page("/", "topics", topics, live=True)]
