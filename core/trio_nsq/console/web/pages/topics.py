"""The list of topics, with the sums of the fleet."""

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.rows import TopicRow, sum_up
from ..charts import sparkline
from ..listing import Column, listing
from ..page import Page, View

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
    rows = [row for row in console.rows.topics(snapshot_of(request)) if viewer.sees(row.name)]
    columns: dict[str, Column[TopicRow]] = {**COLUMNS, "brokers": Column(lambda row: row.brokers)}
    found = listing(request, "topics", rows, columns, name=lambda row: row.name, default="name")
    history = console.history
    sparks = {row.name: sparkline(history.rate_in(row.name), "messages in, last hour") for row in found.rows}
    return View("topics.html", {"listing": found, "sums": sum_up(rows), "sparks": sparks})


PAGES = [Page("/", "topics", topics, live=True)]
