"""A topic: its sums, charts, channels and brokers."""

from markupsafe import Markup
from starlette.requests import Request

from ....fleet.snapshot import ChannelState, TopicState
from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.history import STEP_S, Series
from ...fleet.latencies import latencies
from ...fleet.rows import row_of
from .. import formats
from ..charts import Line, chart, nice_time_top_s, sparkline
from ..listing import Column, listing
from ..page import NotFound, Page, Unanswered, View
from ..preferences import preferences_of

_CHANNELS: dict[str, Column[ChannelState]] = {
    "name": Column(lambda each: each.name, descending=False),
    "depth": Column(lambda each: each.sum.depth),
    "in_flight": Column(lambda each: each.sum.in_flight),
    "deferred": Column(lambda each: each.sum.deferred),
    "requeued": Column(lambda each: each.sum.requeued),
    "timed_out": Column(lambda each: each.sum.timed_out),
    "in": Column(lambda each: each.sum.in_rate),
    "out": Column(lambda each: each.sum.out_rate),
    "oldest": Column(lambda each: each.sum.oldest_age_ms),
    "messages": Column(lambda each: each.sum.messages),
    "clients": Column(lambda each: each.sum.clients),
}


async def topic(request: Request) -> View:
    """One topic on all brokers."""
    console, name = console_of(request), request.path_params["topic"]
    state = find_topic(request, name)
    channels = listing(
        request, "topic", state.channels.values(), _CHANNELS, name=lambda each: each.name, default="name"
    )
    history, row = console.history, row_of(state)
    snapshot = snapshot_of(request)
    brokers, depth = snapshot.brokers, row.depth + snapshot.unanswered_depth(name)
    raw = {address: part.raw for address, part in state.parts.items()}
    preferences = preferences_of(request)
    context = {
        "topic": name,
        "is_favourite": name in preferences.favourites,
        "is_hidden": name in preferences.hidden,
        "state": state,
        "row": row,
        "listing": channels,
        "brokers": {address: brokers[address] for address in state.parts},
        "raw": raw,
        "depths": {
            address: part.depth
            + sum(each.parts[address].depth for each in state.channels.values() if address in each.parts)
            for address, part in state.parts.items()
        },
        "charts": charts(history.series(name).until_now(row.in_rate, row.out_rate, depth, row.oldest_age_ms)),
        "sparks": {
            each.name: sparkline(history.depth(name, each.name), "depth, last hour", "depth")
            for each in channels.rows
        },
        "latencies": latencies(raw),
    }
    return View("topic.html", context)


def find_topic(request: Request, name: str) -> TopicState:
    """Return a topic that the viewer sees. Raises NotFound."""
    snapshot = snapshot_of(request)
    state = snapshot.topics.get(name) if viewer_of(request).sees(name) else None
    if state is not None:
        return state
    raise missing(request, name)


def missing(request: Request, topic: str, channel: str = "") -> NotFound:
    """Return the error for a topic or channel that no broker that answers has."""
    what = f"channel {channel} of topic {topic}" if channel else f"topic {topic}"
    snapshot = snapshot_of(request)
    if unanswered := snapshot.unanswered_with(topic, channel):
        reasons = "; ".join(f"{address}: {reason}" for address, reason in list(unanswered.items())[:10])
        return Unanswered(
            f"No broker that answers has the {what}. It may be on one that does not answer. {reasons}"
        )
    return NotFound(f"There is no {what} on the brokers of this console. It may have been deleted.")


def charts(series: Series) -> Markup:
    """Draw the last hour of a topic, a channel or the fleet."""
    rates = [Line("In", series.rate_in, "in"), Line("Out", series.rate_out, "out")]
    return Markup("").join(
        [
            chart("Messages per second", rates, step_s=STEP_S, text=formats.short),
            chart("Depth", [Line("Now", series.depth, "depth")], step_s=STEP_S, text=formats.short),
            chart(
                "Oldest message",
                [Line("Now", series.oldest_s, "age")],
                step_s=STEP_S,
                text=_seconds,
                top=nice_time_top_s,
            ),
        ]
    )


def _seconds(value: float) -> str:
    return formats.age(value * 1000) if value else "0"


PAGES = [Page("/topics/{topic}", "topic", topic, live=True, personal=True)]
