"""Disconnects the consumers of a channel, or one of them."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from ....api import broker as api
from ....text.wording import count_of
from ...access.viewer import require
from ...actions import commands, targets
from ...actions.run import record_action
from ...console import console_of, snapshot_of, upstream_of
from ..confirming import Confirmation, crumbs_of, finished, names_of, place
from ..page import NotFound, Page, View
from ..rendering import path_of


async def disconnect(request: Request) -> View | Response:
    """Ask, or disconnect: all consumers, or with `broker` and `client` in the query the one with this address."""
    topic, channel = names_of(request)
    require(request, "manage", topic, channel)
    console, found = console_of(request), targets.ours_with(snapshot_of(request), topic, channel)
    query = request.query_params
    client = query.get("client") or None
    if client is not None:
        try:
            found = found.only(query.get("broker", ""))
        except ValueError as exc:
            raise NotFound(f"Consumers of channel {topic}/{channel}: {exc}.") from exc
    which = f"the consumer {client}" if client is not None else "all consumers"
    here = path_of(
        request, "disconnect", dict(query) if client is not None else None, topic=topic, channel=channel
    )
    page = Confirmation(
        f"Disconnect {which} of channel {topic}/{channel}",
        [
            "The brokers close the connections. Messages in flight are requeued at once, and go to other consumers. "
            "Consumers usually connect again within seconds: pause the channel to keep them from getting messages."
        ],
        commands.disconnect(found.addresses, topic, channel, client),
        here,
        place(request, topic, channel),
        "Disconnect",
        crumbs=crumbs_of(request, topic, channel),
        errors=found.failures(),
        left_out=found.left_out,
        is_destructive=False,
    )
    if not found.addresses:
        texts = ["No broker that can disconnect consumers has this channel: an nsqd cannot."]
        return replace(page, texts=texts, command="").view()
    if request.method == "GET":
        return page.view()
    results = await upstream_of(request).ask_all(found.addresses, api.disconnect(topic, channel, client))
    report = found.report(
        results.map(lambda _, consumers: f"{count_of(len(consumers), 'consumer')} disconnected")
    )
    record_action(request, "disconnect_consumers", report, topic=topic, channel=channel)
    await console.watcher.refresh()
    return finished(
        request, place(request, topic, channel), f"{which} of channel {topic}/{channel} disconnected", report
    )


PAGES = [Page("/topics/{topic}/{channel}/disconnect", "disconnect", disconnect, ("GET", "POST"), acts=True)]
