"""Deferred messages of a channel: a calendar of what is due, a list, and cancellation."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....api import broker as api
from ....fleet.deferred import Cancelled
from ....text.wording import count_of
from ...access.changes import note_nothing_changed
from ...access.viewer import require
from ...actions import commands, deferred, impact, targets
from ...actions.report import Report
from ...actions.run import record_action
from ...actions.targets import Targets
from ...console import snapshot_of, upstream_of
from ...messages.list_download import LINE_LIMITS, MAX_LINES
from ...notices import Continuation
from ..confirming import Confirmation, crumbs_of, finished, names_of, selected
from ..forms import Form, form, whole
from ..page import Page, View
from ..rendering import path_of
from ..table_files import wanted_form
from .message_files import file_of_channel
from .shown_bodies import channel_reader

_LISTED = (50, 200, 1000)


async def show(request: Request) -> View | Response:
    """The calendar and the list; cancellation."""
    topic, channel = names_of(request)
    found = targets.ours_with(snapshot_of(request), topic, channel)
    if request.method == "POST":
        return await _cancel(request, topic, channel, found, await form(request))
    viewer = require(request, "read", topic, channel)
    upstream = upstream_of(request)
    if file_form := wanted_form(request):
        lines, missing = api.deferred(topic, channel, MAX_LINES), found.missing
        return await file_of_channel(
            request, topic, channel, found.addresses, lambda _: lines, file_form, missing, name="deferred"
        )
    wanted = whole(request.query_params.get("count"))
    at_most = next((number for number in _LISTED if number >= wanted), _LISTED[-1])
    calendar = deferred.slots(time.time())
    counts = await deferred.count(upstream, found.addresses, topic, channel, calendar)
    answering = [address for address, each in counts.values.items() if each.total]
    lists = await deferred.messages(
        upstream, answering, topic, channel, at_most, channel_reader(request, topic)
    )
    bars = deferred.bars(calendar, list(counts.values.values()))
    total = sum(each.total for each in counts.values.values())
    larger = next((number for number in _LISTED if number > at_most), None)
    context: dict[str, Any] = {
        "topic": topic,
        "channel": channel,
        "crumbs": crumbs_of(request, topic, channel),
        "here": path_of(request, "deferred", topic=topic, channel=channel),
        "counts": counts.values,
        "total": total,
        "bars": bars,
        "highest": max((bar.count for bar in bars), default=0),
        "messages": deferred.first(lists.values, at_most),
        "more": larger if total > at_most else None,
        "failures": found.failures(counts.errors, lists.errors),
        "left_out": found.left_out,
        "only_nsqd": found.only_nsqd,
        "may_change": viewer.allows("manage", topic, channel),
        "several": len(found.addresses) > 1,
        "limits": LINE_LIMITS,
    }
    return View("deferred.html", context)


async def _cancel(request: Request, topic: str, channel: str, found: Targets, sent: Form) -> View | Response:
    require(request, "manage", topic, channel)
    upstream = upstream_of(request)
    here = path_of(request, "deferred", topic=topic, channel=channel)
    everything = sent.get("action") == "cancel-all"
    ids = None if everything else selected(sent.getlist("message"), found.addresses)
    counts = await deferred.count(upstream, found.addresses, topic, channel, [])
    by_broker = (
        {address: each.total for address, each in counts.values.items()}
        if ids is None
        else {address: len(some) for address, some in ids.items()}
    )
    total = sum(by_broker.values())
    if not total:
        title = (
            "nothing was cancelled: there are no deferred messages" if everything else "select messages first"
        )
        note_nothing_changed(request)
        return finished(request, here, title, Report(failed=found.failing, left_out=found.left_out))
    page = _question(request, topic, channel, found, by_broker, ids)
    page = replace(page, errors=found.failures(counts.errors))
    if "shown" not in sent:
        return page.view()
    if (refusal := page.refused(sent)) is not None:
        return refusal
    if impact.is_surprise(total, whole(sent.get("shown"))):
        return page.view("Nothing was cancelled: many more messages are deferred now. Look again.", 409)
    done, stopped = await deferred.cancel(
        upstream, list(counts.values) if ids is None else list(ids), topic, channel, ids
    )
    report = _report(done, stopped, found.failures(counts.errors), found.left_out)
    record_action(request, "cancel_deferred", report, topic=topic, channel=channel)
    continuation = None
    if not all(each.is_finished for each in done.values()):
        fields = [("action", "cancel-all"), ("shown", str(total)), ("typed", f"{topic}/{channel}")]
        continuation = Continuation(here, "Continue", fields)
    count = sum(len(each.ids) for each in done.values())
    return finished(request, here, f"{count_of(count, 'deferred message')} cancelled", report, continuation)


def _question(
    request: Request,
    topic: str,
    channel: str,
    found: Targets,
    by_broker: Mapping[str, int],
    ids: Mapping[str, Sequence[str]] | None,
) -> Confirmation:
    here = path_of(request, "deferred", topic=topic, channel=channel)
    total = sum(by_broker.values())
    which = "" if ids is None else "selected "
    if ids is None:
        command = commands.cancel_all(found.addresses, topic, channel)
        chosen = [("action", "cancel-all")]
    else:
        command = commands.cancel(list(ids), topic, channel, [each for some in ids.values() for each in some])
        chosen = [("message", f"{address} {each}") for address, some in ids.items() for each in some]
    return Confirmation(
        f"Cancel {total:,} {which}deferred {'message' if total == 1 else 'messages'} of {topic}/{channel}",
        ["The channel will not deliver them. Other channels of the topic keep their copies."],
        command,
        here,
        here,
        f"Cancel {count_of(total, 'message')}",
        crumbs=[*crumbs_of(request, topic, channel), ("Deferred", here)],
        head=["Broker", "Messages"],
        rows=[[address, count] for address, count in by_broker.items()],
        total=["All brokers", total] if len(by_broker) > 1 else (),
        left_out=found.left_out,
        name=f"{topic}/{channel}",
        fields=[*chosen, ("shown", str(total))],
    )


def _report(
    done: Mapping[str, Cancelled],
    stopped: Mapping[str, str],
    failures: Mapping[str, str],
    left_out: Mapping[str, str],
) -> Report:
    texts: dict[str, str] = {}
    failed: dict[str, str] = {**failures}
    for address, each in done.items():
        text = f"{len(each.ids):,} cancelled"
        if each.missed:
            text += f", {each.missed:,} no longer deferred"
        if address in stopped:
            failed[address] = f"{text}; then: {stopped[address]}" if each.ids else stopped[address]
        else:
            texts[address] = text
    return Report(texts, failed, left_out)


PAGES = [Page("/topics/{topic}/{channel}/deferred", "deferred", show, ("GET", "POST"))]
