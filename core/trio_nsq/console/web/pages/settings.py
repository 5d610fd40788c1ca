"""The settings of a topic or channel on each broker, and their change after a preview."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from ....api import broker as api
from ....text.settings import DEFAULT
from ....text.wording import count_of
from ...access.viewer import Viewer, may_send_to, require
from ...actions import commands, impact, settings, targets
from ...actions.run import record_action
from ...actions.settings import Preview
from ...actions.targets import Targets
from ...console import snapshot_of, upstream_of
from ...upstream.client import Results
from ..confirming import Confirmation, crumbs_of, finished, label, names_of
from ..forms import form, whole
from ..page import Page, View
from ..rendering import path_of


async def show(request: Request) -> View | Response:
    """The settings; a changed form, its preview, the change."""
    topic, channel = names_of(request)
    upstream = upstream_of(request)
    found = targets.ours_with(snapshot_of(request), topic, channel)
    if request.method == "GET":
        viewer = require(request, "read", topic, channel)
        return await _page(request, viewer, topic, channel, found)
    viewer = require(request, "manage", topic, channel)
    sent = await form(request)
    assignments, errors = settings.changes_of(channel, sent)
    errors |= _missing_roles(viewer, topic, assignments)
    if errors or not assignments:
        problem = "" if errors else "Nothing was changed: all values are as before."
        return await _page(request, viewer, topic, channel, found, sent, errors, problem)
    changes = settings.values(assignments, channel)
    planned = await settings.preview(upstream, found.addresses, topic, channel, changes)
    if not planned.values:
        failures = found.failures(planned.errors)
        reasons = "; ".join(f"{address}: {why}" for address, why in failures.items()) or "No broker has it."
        return await _page(
            request, viewer, topic, channel, found, sent, {}, f"Nothing was changed. {reasons}"
        )
    dropped = sum(each.dropped for each in planned.values.values())
    page = _question(request, topic, channel, found, assignments, planned, dropped)
    if "dropped" not in sent:
        return page.view()
    if (refusal := page.refused(sent)) is not None:
        return refusal
    if impact.is_surprise(dropped, whole(sent.get("dropped"))):
        return page.view(
            "Nothing was changed: this would drop many more messages than was shown. Look again.", 409
        )
    results = await upstream.ask_all(planned.values, api.settings(topic, channel or None, changes))
    report = found.report(results.map(lambda *_: "changed"), planned.errors)
    record_action(request, f"set_{settings.kind_of(channel)}", report, topic=topic, channel=channel)
    words = ", ".join(f"{name}={text}" for name, text in assignments)
    return finished(request, _here(request, topic, channel), f"{label(topic, channel)}: {words}", report)


def _missing_roles(viewer: Viewer, topic: str, assignments: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the errors of settings that move messages to topics where others may read them.

    Brokers check it, too, but not for viewers that use the console's own credentials.
    """
    errors = {}
    may_read = viewer.allows("read", topic)
    for name, text in assignments:
        if name == "dead_letter_topic" and text not in ("", DEFAULT):
            if not may_send_to(viewer, text):
                errors[name] = f"this needs the role publish or manage on topic {text}"
            elif not may_read:
                errors[name] = f"dead letters disclose messages, so this needs the role read on topic {topic}"
        elif name == "max_attempts" and viewer.token is None and not may_read:
            errors[name] = f"this may make dead letters, so it needs the role read on topic {topic}"
    return errors


async def _page(
    request: Request,
    viewer: Viewer,
    topic: str,
    channel: str,
    found: Targets,
    sent: Mapping[str, str] | None = None,
    errors: Mapping[str, str] | None = None,
    problem: str = "",
) -> View:
    """Return the settings; with `sent`, a form that was not accepted."""
    rows, results = await settings.read(upstream_of(request), found.addresses, topic, channel)
    shown: dict[str, str] = {row.setting.name: row.text for row in rows}
    context = {
        "name": label(topic, channel),
        "topic": topic,
        "channel": channel,
        "crumbs": crumbs_of(request, topic, channel),
        "here": _here(request, topic, channel),
        "rows": rows,
        "brokers": list(results.values),
        "failures": found.failures(results.errors),
        "left_out": found.left_out,
        "only_nsqd": found.only_nsqd,
        "may_change": viewer.allows("manage", topic, channel),
        "shown": {**shown, **{name: sent[name] for name in shown if name in sent}} if sent else shown,
        "before": shown,
        "wrong": errors or {},
        "problem": problem,
        "command": commands.show_settings(list(results.values), topic, channel),
    }
    return View("settings.html", context, 422 if errors or problem else 200)


def _question(
    request: Request,
    topic: str,
    channel: str,
    found: Targets,
    assignments: Sequence[tuple[str, str]],
    planned: Results[Preview],
    dropped: int,
) -> Confirmation:
    names = [name for name, _ in assignments]
    here = _here(request, topic, channel)
    texts = [
        "Changes "
        + ", ".join(f"{name} to {text or 'no topic'}" for name, text in assignments)
        + ", at once.",
        f"This drops {count_of(dropped, 'message')} that wait." if dropped else "This drops no message.",
    ]
    return Confirmation(
        f"Change settings of {label(topic, channel)}",
        texts,
        commands.settings(found.addresses, topic, channel, assignments),
        here,
        here,
        "Change and drop messages" if dropped else "Change",
        crumbs=[*crumbs_of(request, topic, channel), ("Settings", here)],
        head=["Broker", *names, "Dropped messages"],
        rows=[
            [address, *(each.texts[name] for name in names), each.dropped]
            for address, each in planned.values.items()
        ],
        errors=found.failures(planned.errors),
        left_out=found.left_out,
        name=(f"{topic}/{channel}" if channel else topic) if dropped else "",
        fields=[
            *((name, text) for name, text in assignments),
            *((f"was_{name}", settings.DIFFERENT) for name in names),
            ("dropped", str(dropped)),
        ],
        is_destructive=bool(dropped),
    )


def _here(request: Request, topic: str, channel: str) -> str:
    if channel:
        return path_of(request, "channel_settings", topic=topic, channel=channel)
    return path_of(request, "topic_settings", topic=topic)


PAGES = [
    Page("/topics/{topic}/settings", "topic_settings", show, ("GET", "POST")),
    Page("/topics/{topic}/{channel}/settings", "channel_settings", show, ("GET", "POST")),
]
