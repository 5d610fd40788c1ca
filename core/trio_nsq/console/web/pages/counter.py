"""How many messages the fleet has processed, and where."""

from dataclasses import dataclass

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ..listing import Column, listing
from ..page import Page, View
from .topic import charts


@dataclass(frozen=True, slots=True)
class CounterRow:
    """A channel. `processed`: messages that it got since its brokers were started, as in nsqadmin."""

    topic: str
    channel: str
    processed: int
    out_rate: float | None


_COLUMNS: dict[str, Column[CounterRow]] = {
    "name": Column(lambda row: (row.topic, row.channel), descending=False),
    "processed": Column(lambda row: row.processed),
    "out": Column(lambda row: row.out_rate),
}


async def counter(request: Request) -> View:
    """The sum over all channels."""
    viewer, console = viewer_of(request), console_of(request)
    rows = [
        CounterRow(topic.name, channel.name, channel.sum.messages, channel.sum.out_rate)
        for topic in snapshot_of(request).topics.values()
        if viewer.sees(topic.name)
        for channel in topic.channels.values()
    ]
    rates = [row.out_rate for row in rows if row.out_rate is not None]
    sees_all = all(viewer.sees(topic) for topic in snapshot_of(request).topics)
    return View(
        "counter.html",
        {
            "total": sum(row.processed for row in rows),
            "rate": sum(rates) if rates else None,
            "charts": charts(console.history.series()) if sees_all else "",
            "listing": listing(
                request,
                "counter",
                rows,
                _COLUMNS,
                name=lambda row: f"{row.topic}/{row.channel}",
                default="processed",
            ),
        },
    )


PAGES = [Page("/counter", "counter", counter, live=True)]
