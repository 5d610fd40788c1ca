"""A channel: its sums, charts, brokers and clients."""

from functools import partial

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.clients import Client, Clients, ask_clients
from ...fleet.latencies import latencies
from ..listing import Column, listing
from ..page import Page, View
from .topic import charts, find_topic, missing

_CLIENTS: dict[str, Column[Client]] = {
    "host": Column(lambda each: each.hostname, descending=False),
    "agent": Column(lambda each: each.agent, descending=False),
    "broker": Column(lambda each: each.broker, descending=False),
    "in_flight": Column(lambda each: each.in_flight),
    "ready": Column(lambda each: each.ready),
    "finished": Column(lambda each: each.finished),
    "requeued": Column(lambda each: each.requeued),
    "messages": Column(lambda each: each.messages),
    "connected": Column(lambda each: each.connected_s, descending=False),
}


async def channel(request: Request) -> View:
    """One channel on all brokers."""
    console = console_of(request)
    topic, name = request.path_params["topic"], request.path_params["channel"]
    snapshot = snapshot_of(request)
    topic_state = find_topic(request, topic)
    state = topic_state.channels.get(name)
    if state is None:
        raise missing(request, topic, name)
    may_read = viewer_of(request).allows("read", topic)
    clients = Clients()
    if may_read:
        ask = partial(ask_clients, console.upstream, snapshot, topic, name)
        clients = await console.shared.once(("clients", topic, name), snapshot.version, ask)
    context = {
        "topic": topic,
        "channel": name,
        "state": state,
        "listing": listing(
            request, "channel", clients.clients, _CLIENTS, name=lambda each: each.id, default="broker"
        ),
        "client_errors": clients.errors,
        "may_read": may_read,
        "charts": charts(
            console.history.series(topic, name).until_now(
                state.sum.in_rate,
                state.sum.out_rate,
                state.sum.depth + snapshot.unanswered_depth(topic, name),
                state.sum.oldest_age_ms,
            )
        ),
        "latencies": latencies({address: part.raw for address, part in state.parts.items()}),
    }
    return View("channel.html", context)


PAGES = [Page("/topics/{topic}/{channel}", "channel", channel, live=True)]
