"""The list of topics, with the sums of the fleet."""

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.rows import TopicRow, sum_up
from ..charts import sparkline
from ..listing import Column, listing, matches
from ..page import Page, View
from ..preferences import hides, preferences_of

COLUMNS: dict[str, Column[TopicRow]] = {
    "name": Column(lambda row: row.name, descending=False),
    "channels": Column(lambda row: row.channels),
    "depth": Column(lambda row: row.depth),
    "in_flight": Column(lambda row: row.in_flight),
    "deferred": Column(lambda row: row.deferred),
    "in": Column(lambda row: row.in_rate),
    "out": Column(lambda row: row.out_rate),
    "oldest": Column(lambda row: row.oldest_age_ms),
    "messages": Column(lambda row: row.messages),
}
"""Those of every table of topics."""


async def topics(request: Request) -> View:
    """All topics that the viewer sees, with their numbers."""
    viewer, console = viewer_of(request), console_of(request)
    preferences = preferences_of(request)
    is_hidden = hides(console.options.hide_topics, preferences)
    rows = [row for row in console.rows.topics(snapshot_of(request)) if viewer.sees(row.name)]
    columns: dict[str, Column[TopicRow]] = {**COLUMNS, "brokers": Column(lambda row: row.brokers)}
    shows_hidden = request.query_params.get("hidden") == "show"
    favourites = frozenset(preferences.favourites)
    found = listing(
        request,
        "topics",
        rows if shows_hidden else (row for row in rows if not is_hidden(row.name)),
        columns,
        name=lambda row: row.name,
        default="name",
        first=lambda row: row.name in favourites,
        kept=("hidden",),
    )
    context = {
        "hidden": sum(is_hidden(row.name) and matches(found.q, row.name) for row in rows),
        "shows_hidden": shows_hidden,
        "is_hidden": is_hidden,
        "favourites": favourites,
    }
    history = console.history
    sparks = {row.name: sparkline(history.rate_in(row.name), "messages in, last hour") for row in found.rows}
    return View("topics.html", {"listing": found, "sums": sum_up(rows), "sparks": sparks, **context})


PAGES = [Page("/", "topics", topics, live=True, personal=True)]
