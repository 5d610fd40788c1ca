"""Delete, empty, pause and unpause a topic or channel: first a page that asks, then the action."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ....api import broker as api
from ....fleet.changes import Change, Count, Step
from ....protocol import is_valid_name
from ....text.wording import NAME_RULE
from ...access.viewer import require
from ...actions import cluster, commands, impact, targets
from ...actions.report import LACKS_IT, Report
from ...actions.run import fleet_of, record_action
from ...console import console_of, snapshot_of, upstream_of
from ..confirming import (
    Confirmation,
    crumbs_of,
    finished,
    label,
    names_of,
    place,
    problem_of,
)
from ..forms import form, whole
from ..page import Page, View
from ..rendering import path_of


@dataclass(frozen=True, slots=True)
class _Verb:
    """An action.

    Attributes:
        done: The end of the report.
        topic, channel: What it does to a topic and to a channel.
        destroys: Whether messages go, so that the name must be typed.
    """

    done: str
    topic: str
    channel: str
    destroys: bool = False


_VERBS: Mapping[api.Action, _Verb] = {
    "delete": _Verb(
        "deleted",
        "Deletes the topic with all its channels and messages on every broker, and in the discovery services. "
        "Consumers are disconnected. A later publish creates the topic again.",
        "Deletes the channel with its messages on every broker, and in the discovery services. Consumers are "
        "disconnected; one that connects again creates the channel again.",
        destroys=True,
    ),
    "empty": _Verb(
        "emptied",
        "Deletes the messages that wait for the topic's first channel, or for the end of a pause. Channels keep their "
        "messages.",
        "Deletes all messages of the channel, also those in flight and deferred. Other channels keep their messages.",
        destroys=True,
    ),
    "pause": _Verb(
        "paused",
        "Stops passing messages to the channels. The brokers still accept and store messages.",
        "Stops delivering messages to consumers. The channel still gets messages.",
    ),
    "unpause": _Verb(
        "unpaused", "Passes messages to the channels again.", "Delivers messages to consumers again."
    ),
}


async def change(request: Request, *, verb: api.Action) -> View | Response:
    """Ask before the action, or do it."""
    topic, channel = names_of(request)
    viewer = require(request, "manage", topic, channel)
    console, known = console_of(request), _VERBS[verb]
    answering, failing = targets.reachable(snapshot_of(request))
    wanted = Change(verb, topic, channel)
    shown = await impact.poll(upstream_of(request), answering, wanted)
    shown = replace(shown, errors={**failing, **shown.errors})
    page = _question(request, verb, topic, channel, shown)
    if request.method == "GET":
        return page.view()
    sent = await form(request)
    if (refusal := page.refused(sent)) is not None:
        return refusal
    before = Count(whole(sent.get("messages")), whole(sent.get("channels")))
    if known.destroys and (grown := impact.surprise(shown.total, before)):
        return page.view(grown, 409)
    report = cluster_report(await cluster.apply(console, wanted, token=viewer.token), known.done)
    record_action(request, wanted.name, report, topic=topic, channel=channel)
    await console.watcher.refresh()
    gone = verb == "delete" and bool(report.done) and not report.failed
    if gone:
        back = place(request, topic) if channel else path_of(request, "topics")
    else:
        back = place(request, topic, channel)
    return finished(request, back, f"{label(topic, channel)} {known.done}", report)


def _question(
    request: Request, verb: api.Action, topic: str, channel: str, shown: impact.Impact
) -> Confirmation:
    known, name = _VERBS[verb], label(topic, channel)
    texts = [known.channel if channel else known.topic]
    if not shown.parts:
        texts.append(f"No broker that answers has the {name}.")
    total = shown.total
    head, rows, sums = _table(shown, with_channels=verb == "delete" and not channel)
    return Confirmation(
        f"{verb.capitalize()} {name}",
        texts,
        commands.change(fleet_of(request), verb, topic, channel),
        path_of(request, f"{verb}_{'channel' if channel else 'topic'}", **request.path_params),
        place(request, topic, channel),
        f"{verb.capitalize()} {'channel' if channel else 'topic'}",
        crumbs=crumbs_of(request, topic, channel),
        head=head if known.destroys else (),
        rows=rows,
        total=sums if len(rows) > 1 else (),
        errors=shown.errors,
        name=(f"{topic}/{channel}" if channel else topic) if known.destroys else "",
        fields=[("messages", str(total.messages)), ("channels", str(total.channels))],
        is_destructive=known.destroys,
    )


def _table(
    shown: impact.Impact, *, with_channels: bool
) -> tuple[list[str], list[list[str | int]], list[str | int]]:
    """Return the heading, the rows and the sums of what goes."""

    def cells(name: str, count: Count) -> list[str | int]:
        middle = [count.channels] if with_channels else []
        return [name, count.messages, *middle, count.clients]

    head = ["Broker", "Messages", *(["Channels"] if with_channels else []), "Consumers"]
    rows = [cells(address, count) for address, count in shown.parts.items()]
    return head, rows, cells("All brokers", shown.total)


def cluster_report(outcome: cluster.Outcome, done: str) -> Report:
    """Return the report of a change of a whole fleet."""
    failed = {step.name: step.error.reason for step in outcome.failed if step.error is not None}
    failed |= {error.address: error.reason for error in outcome.lookups if not error.is_missing}
    every = {step.name: done for step in outcome.done if step.name not in failed}
    if not every and not failed:
        failed = {step.name: LACKS_IT for step in outcome.missing}
    return Report(every, failed)


async def create(request: Request) -> View | Response:
    """A form that creates a topic, or a channel, on all brokers."""
    console = console_of(request)
    sent: Mapping[str, str] = await form(request) if request.method == "POST" else request.query_params
    topic, channel = sent.get("topic", "").strip(), sent.get("channel", "").strip()
    require(request, "manage", topic, channel)
    context = {"topic": topic, "channel": channel, "problem": "", "command": ""}
    if request.method == "GET":
        return View("create.html", context)
    if not is_valid_name(topic) or (channel and not is_valid_name(channel)):
        wrong = channel if is_valid_name(topic) else topic
        return View("create.html", {**context, "problem": f"{wrong[:100]!r} is no name: {NAME_RULE}."}, 422)
    brokers = snapshot_of(request).brokers
    plan = [[Step(address, api.act("create", topic)) for address in brokers]]
    if channel:
        plan.append([Step(address, api.act("create", topic, channel)) for address in brokers])
    report = cluster_report(await cluster.run(upstream_of(request), plan), "created, or there already")
    name = "create_channel" if channel else "create_topic"
    record_action(request, name, report, topic=topic, channel=channel)
    await console.watcher.refresh()
    command = commands.create(fleet_of(request), topic, channel)
    title = f"{label(topic, channel)} created"
    if not report.done:
        return View("create.html", {**context, "problem": problem_of(report, title), "command": command}, 502)
    return finished(request, place(request, topic, channel), title, report)


_ASKED = ("GET", "POST")
PAGES = [
    Page("/create", "create", create, _ASKED),
    *(
        Page(
            f"/topics/{{topic}}{part}/{verb}", f"{verb}_{kind}", partial(change, verb=verb), _ASKED, acts=True
        )
        for kind, part in (("topic", ""), ("channel", "/{channel}"))
        for verb in _VERBS
    ),
]
