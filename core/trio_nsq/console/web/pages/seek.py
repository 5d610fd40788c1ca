"""Seek: moves a channel to another position, after a dry run on every broker."""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....api import broker as api
from ....api.answers import Seek
from ....text.wording import count_of
from ...access.viewer import require
from ...actions import commands, impact, targets
from ...actions.run import record_action
from ...actions.seek import Destination, destination, done_text, limit_text
from ...console import console_of, snapshot_of, upstream_of
from ...upstream.client import Results, UpstreamError
from ..confirming import Confirmation, crumbs_of, finished, names_of, place
from ..forms import form, whole
from ..page import Page, View
from ..rendering import path_of


async def show(request: Request) -> View | Response:
    """The form; with a position, the dry run; the move itself."""
    topic, channel = names_of(request)
    require(request, "manage", topic, channel)
    console, upstream = console_of(request), upstream_of(request)
    found = targets.ours_with(snapshot_of(request), topic, channel)
    asked: Any = await form(request) if request.method == "POST" else request.query_params
    context = {
        "topic": topic,
        "channel": channel,
        "asked": dict(asked),
        "brokers": found.addresses,
        "left_out": found.left_out,
        "only_nsqd": found.only_nsqd,
        "crumbs": crumbs_of(request, topic, channel),
        "problem": "",
    }
    context["failures"] = found.failures()
    if "to" not in asked or not found.addresses:
        return View("seek.html", context)
    kind, broker = asked.get("to", ""), asked.get("broker", "")
    try:
        to = destination(kind, asked.get(kind, ""))
        addresses = _chosen(found, broker, to)
    except (ValueError, UpstreamError) as exc:
        return View("seek.html", {**context, "problem": f"{exc}."}, 422)
    dry = await upstream.ask_all(addresses, api.seek(topic, channel, to.http, dry_run=True))
    page = _question(request, topic, channel, to, broker, addresses, dry, found)
    if request.method == "GET" or not dry.values:
        return page.view()
    if (refusal := page.refused(asked)) is not None:
        return refusal
    skipped = sum(move["skipped"] for move in dry.values.values())
    again = sum(move["delivered_again"] for move in dry.values.values())
    shown = whole(asked.get("skipped")), whole(asked.get("again"))
    if impact.is_surprise(skipped, shown[0]) or impact.is_surprise(again, shown[1]):
        return page.view(
            "Nothing was changed: the numbers have grown much since they were shown. Look again.", 409
        )
    moves = await upstream.ask_all(dry.values, api.seek(topic, channel, to.http))
    texts = Results({address: done_text(move) for address, move in moves.values.items()}, moves.errors)
    report = found.report(texts, dry.errors)
    record_action(request, "seek_channel", report, topic=topic, channel=channel)
    await console.watcher.refresh()
    return finished(
        request, place(request, topic, channel), f"channel {topic}/{channel} moved to {to.text}", report
    )


def _chosen(found: targets.Targets, broker: str, to: Destination) -> list[str]:
    """Return the brokers to move the channel on. Raises ValueError, and UpstreamError of a broker that is down."""
    if broker:
        return found.only(broker).addresses
    if to.is_sequence and len(found.addresses) > 1:
        raise ValueError("each broker has its own sequences: choose one broker, or give a time")
    return found.addresses


def _question(
    request: Request,
    topic: str,
    channel: str,
    to: Destination,
    broker: str,
    addresses: list[str],
    dry: Results[Seek],
    found: targets.Targets,
) -> Confirmation:
    moves = dry.values.values()
    again, skipped = sum(move["delivered_again"] for move in moves), sum(move["skipped"] for move in moves)
    in_flight = sum(move["in_flight"] for move in moves)
    texts = [
        f"To {to.text}: {count_of(again, 'message')} delivered again, {count_of(skipped, 'message')} skipped.",
        "Other channels are not affected. Messages in flight cannot be finished any more: they are skipped, or "
        "delivered again.",
    ]
    here = path_of(request, "seek", topic=topic, channel=channel)
    page = Confirmation(
        f"Move channel {topic}/{channel}",
        texts,
        commands.seek(addresses, topic, channel, to.qcli),
        here,
        here,
        "Move the channel",
        crumbs=[*crumbs_of(request, topic, channel), ("Seek", here)],
        head=["Broker", "From sequence", "To sequence", "Delivered again", "Skipped", "In flight", "Limit"],
        rows=[
            [
                address,
                move["from_sequence"],
                move["to_sequence"],
                move["delivered_again"],
                move["skipped"],
                move["in_flight"],
                limit_text(move),
            ]
            for address, move in dry.values.items()
        ],
        total=["All brokers", "", "", again, skipped, in_flight, ""] if len(moves) > 1 else (),
        errors=found.failures(dry.errors),
        left_out=found.left_out,
        name=f"{topic}/{channel}" if skipped or in_flight else "",
        fields=[
            *_asked(to).items(),
            ("broker", broker),
            ("skipped", str(skipped)),
            ("again", str(again)),
        ],
        is_destructive=bool(skipped),
    )
    return page if dry.values else replace(page, command="", name="")


def _asked(to: Destination) -> dict[str, str]:
    """Return the fields that name a position again."""
    if to.http in ("earliest", "latest"):
        return {"to": to.http}
    if to.is_sequence:
        return {"to": "sequence", "sequence": to.http}
    return {"to": "ago", "ago": to.qcli} if to.http.startswith("-") else {"to": "time", "time": to.qcli}


PAGES = [Page("/topics/{topic}/{channel}/seek", "seek", show, ("GET", "POST"))]
