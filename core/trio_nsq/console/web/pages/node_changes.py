"""Changes of single brokers: drain, and tombstone of a topic."""

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ....api.broker import set_draining
from ....fleet.changes import Change, Count
from ....fleet.snapshot import BrokerState
from ....protocol import is_valid_name
from ....text.wording import count_of
from ...access.viewer import require
from ...actions import cluster, commands, impact
from ...actions.report import Report
from ...actions.run import fleet_of, record_action
from ...console import console_of, snapshot_of, upstream_of
from ..confirming import Confirmation, crumbs_of, finished, place
from ..forms import form, whole
from ..page import NotFound, Page, View
from ..rendering import path_of
from .changes import cluster_report


def _broker(request: Request) -> BrokerState:
    """Return the broker of a path. Raises NotFound."""
    address = request.path_params["node"]
    broker = snapshot_of(request).brokers.get(address)
    if broker is None:
        raise NotFound(f"There is no broker {address[:200]!r} in this fleet.")
    return broker


async def drain(request: Request, *, stop: bool = False) -> View | Response:
    """Begin or end the drain mode of a broker: it refuses publishes, and consumers empty it."""
    require(request, "admin")
    console, broker = console_of(request), _broker(request)
    address = broker.address
    here = path_of(request, "undrain" if stop else "drain", node=address)
    back = path_of(request, "node", node=address)
    waiting = sum(topic.waiting for topic in broker.topics.values())
    page = Confirmation(
        f"End draining {address}" if stop else f"Drain {address}",
        [
            "The broker accepts publishes again."
            if stop
            else "The broker refuses publishes, so that producers use another broker. Consumers stay connected and get "
            f"what is left: {count_of(waiting, 'message')}. A restart of the broker ends the mode.",
            *([] if stop else ["The command also waits until the broker is empty."]),
        ],
        commands.drain(address, stop=stop),
        here,
        back,
        "End draining" if stop else "Drain",
        crumbs=[("Nodes", path_of(request, "nodes")), (address, back)],
        is_destructive=False,
    )
    if broker.is_nsqd:
        texts = [f"{address} is an nsqd, which cannot drain. Have its producers publish to another broker."]
        return replace(page, texts=texts, command="").view()
    if request.method == "GET":
        return page.view()

    async def switch(server: str) -> str:
        await upstream_of(request).ask(server, set_draining(not stop))
        return "accepts publishes again" if stop else "refuses publishes"

    report = Report.of(await console.upstream.on_all([address], switch))
    record_action(request, "end_drain" if stop else "drain", report, node=address)
    await console.watcher.refresh()
    return finished(request, back, f"draining of {address} {'ended' if stop else 'begun'}", report)


async def tombstone(request: Request) -> View | Response:
    """Hide a broker from the consumers of a topic, and delete the topic there."""
    console, topic = console_of(request), request.query_params.get("topic", "")
    if not is_valid_name(topic):
        raise NotFound(f"{topic[:100]!r} is not the name of a topic.")
    viewer = require(request, "manage", topic)
    broker = _broker(request)
    address = broker.address
    registered = [node.http_address for node in broker.registrations.values() if node.http_address]
    node = registered[0] if registered else address
    shown = await impact.poll(upstream_of(request), [address], Change("delete", topic))
    total = shown.total
    page = Confirmation(
        f"Tombstone topic {topic} on {address}, and delete it there",
        [
            "Discovery services hide the broker from the consumers of this topic for some time (45 seconds by "
            "default), and the broker deletes the topic with its channels and messages. Other brokers keep theirs."
        ],
        commands.tombstone(fleet_of(request), topic, node, address),
        path_of(request, "tombstone", {"topic": topic}, node=address),
        place(request, topic),
        "Tombstone and delete",
        crumbs=crumbs_of(request, topic),
        head=["Broker", "Messages", "Channels", "Consumers"],
        rows=[[address, total.messages, total.channels, total.clients]] if shown.parts else (),
        errors=shown.errors,
        name=topic,
        fields=[("messages", str(total.messages)), ("channels", str(total.channels))],
    )
    if not console.watcher.lookupds:
        return replace(page, head=(), command="", name="").view(
            "The console has no discovery service, so there is nothing to hide the broker from. Delete the topic "
            "instead."
        )
    if request.method == "GET":
        return page.view()
    sent = await form(request)
    if (refusal := page.refused(sent)) is not None:
        return refusal
    before = Count(whole(sent.get("messages")), whole(sent.get("channels")))
    if grown := impact.surprise(total, before):
        return page.view(grown, 409)
    outcome = await cluster.tombstone(console, topic, node, address, token=viewer.token)
    report = cluster_report(outcome, "hidden")
    report = replace(report, done={**report.done, **({address: "deleted"} if address in report.done else {})})
    record_action(request, "tombstone_topic_producer", report, topic=topic, node=node)
    await console.watcher.refresh()
    return finished(request, place(request, topic), f"topic {topic} tombstoned on {address}", report)


PAGES = [
    Page("/nodes/{node}/drain", "drain", drain, ("GET", "POST"), acts=True),
    Page("/nodes/{node}/undrain", "undrain", partial(drain, stop=True), ("GET", "POST"), acts=True),
    Page("/nodes/{node}/tombstone", "tombstone", tombstone, ("GET", "POST"), acts=True),
]
