"""The clusters of brokers: who leads, who is in sync, and changes of that."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import trio
from starlette.requests import Request
from starlette.responses import Response

from ....api.answers import Cluster, ClusterMember
from ....api.broker import cluster as ask_cluster
from ....api.broker import remove_member, switch_leader
from ....fleet.cluster import name_of
from ...access.viewer import require
from ...actions import commands
from ...actions.report import Report
from ...actions.run import record_action
from ...console import console_of, snapshot_of, upstream_of
from ...fleet.clusters import ClusterView, ask_clusters
from ...upstream.client import Upstream, UpstreamError
from ..confirming import Confirmation, finished
from ..forms import form
from ..navigation import CLUSTERS
from ..page import NotFound, Page, Table, Unanswered, View
from ..rendering import path_of

_COLUMNS = ("cluster", "epoch", *ClusterMember.__annotations__, "problem")
_SWITCH_S: Final = 10.0
"""A page waits this long for the next leader. Then the member leads, or the switch was given up."""
_POLL_S: Final = 0.1


async def clusters(request: Request) -> View:
    """All clusters; they need the role read on all topics, as at the brokers."""
    require(request, "read")
    views = await _views(request)
    return View("clusters.html", {"clusters": views}, table=Table("clusters", _COLUMNS, _records(views)))


def _records(views: Sequence[ClusterView]) -> Iterator[Mapping[str, Any]]:
    """Yield a record for each member as the leader sees it; without a leader, as the members say."""
    for view in views:
        if view.led is not None:
            for member in view.led["members"]:
                known = {name: member.get(name) for name in _COLUMNS if name in member}
                yield {"cluster": view.name, "epoch": view.led["epoch"], **known}
            continue
        for address, about in view.members.items():
            found = {"cluster": view.name, "epoch": about["epoch"], "id": about["id"], "addresses": [address]}
            yield {**found, "in_sync": bool(about.get("in_sync")), "problem": about.get("reason", "")}
        for address, reason in view.errors.items():
            yield {"cluster": view.name, "addresses": [address], "problem": reason}


async def _views(request: Request) -> Sequence[ClusterView]:
    console, snapshot = console_of(request), snapshot_of(request)
    ask = partial(ask_clusters, console.upstream, snapshot)
    return await console.shared.once("clusters", snapshot.version, ask)


async def _find(request: Request) -> tuple[ClusterView, Cluster, ClusterMember]:
    """Return the cluster and the member of a path, as the leader sees them. Raises NotFound."""
    name, member = request.path_params["cluster"], request.path_params["member"]
    view = next((view for view in await _views(request) if view.name == name), None)
    if view is None:
        raise NotFound(f"No broker of this fleet is a member of a cluster {name[:100]!r}.")
    if view.led is None:
        raise Unanswered(f"The cluster {name} has no leader.")
    found = next((each for each in view.led["members"] if each["id"] == member), None)
    if found is None:
        raise NotFound(f"The cluster {name} has no member {member[:100]!r}.")
    return view, view.led, found


async def lead(request: Request) -> View | Response:
    """Let another member lead."""
    require(request, "admin")
    view, led, member = await _find(request)
    console, name, broker = console_of(request), name_of(member), view.broker
    page = _question(
        request,
        f"Let {name} lead",
        [
            f"The member becomes the leader of the cluster {view.name}. The present leader finishes what it has begun, "
            "and follows. Clients are disconnected, and connect again. No message is lost; publishes without an answer "
            "must be repeated.",
        ],
        commands.switch_leader(broker, member["id"]),
        "Let this member lead",
    )
    if member["id"] == led["leader"]:
        return replace(
            page, texts=[f"{name} leads the cluster {view.name} already."], command="", name=""
        ).view()
    if request.method == "GET":
        return page.view()
    if (refusal := page.refused(await form(request))) is not None:
        return refusal

    async def switch(server: str) -> str:
        await upstream_of(request).ask(server, switch_leader(member["id"]))
        return await _until_led(console.upstream, server, led)

    report = Report.of(await console.upstream.on_all([broker], switch))
    record_action(request, "switch_leader", report)
    await console.watcher.refresh()
    return finished(request, path_of(request, "clusters"), f"{name} was asked to lead {view.name}", report)


async def _until_led(upstream: Upstream, server: str, before: Cluster) -> str:
    """Wait for the next leader, and return what happened. Requests to a follower wait for one, too."""
    with trio.move_on_after(_SWITCH_S):
        while True:
            try:
                found = await upstream.ask(server, ask_cluster())
                if found["epoch"] > before["epoch"]:
                    return f"{found['leader']} leads, with epoch {found['epoch']}"
            except UpstreamError:
                pass  # it begins to follow, or another leader begins
            await trio.sleep(_POLL_S)
    return f"no other member leads after {_SWITCH_S:.0f} s"


async def remove(request: Request) -> View | Response:
    """Forget a member that is gone."""
    require(request, "admin")
    view, _, member = await _find(request)
    console, name = console_of(request), name_of(member)
    page = _question(
        request,
        f"Remove {name}",
        [
            f"The cluster {view.name} no longer expects the member. Its data folder does not change. If it is started "
            "again, it is a member again.",
        ],
        commands.remove_member(view.broker, member["id"]),
        "Remove member",
    )
    if member["state"] != "disconnected":
        texts = [f"{name} is connected, so it cannot be removed. Stop it first."]
        return replace(page, texts=texts, command="", name="").view()
    if request.method == "GET":
        return page.view()
    if (refusal := page.refused(await form(request))) is not None:
        return refusal

    async def forget(server: str) -> str:
        await upstream_of(request).ask(server, remove_member(member["id"]))
        return "removed the member"

    report = Report.of(await console.upstream.on_all([view.broker], forget))
    record_action(request, "remove_member", report)
    await console.watcher.refresh()
    return finished(request, path_of(request, "clusters"), f"{name} removed from {view.name}", report)


def _question(request: Request, title: str, texts: Sequence[str], command: str, button: str) -> Confirmation:
    back = path_of(request, "clusters")
    return Confirmation(
        title,
        texts,
        command,
        request.url.path,
        back,
        button,
        crumbs=[("Cluster", back)],
        name=request.path_params["member"],
    )


PAGES = [
    Page(CLUSTERS, "clusters", clusters, live=True),
    Page(f"{CLUSTERS}/{{cluster}}/{{member}}/lead", "switch_leader", lead, ("GET", "POST")),
    Page(f"{CLUSTERS}/{{cluster}}/{{member}}/remove", "remove_member", remove, ("GET", "POST")),
]
