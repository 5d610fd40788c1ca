"""`/api/topics`, `/api/nodes` and `/api/counter`: what nsqadmin's API shows and changes."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...api import broker as api
from ...fleet.changes import Change
from ...protocol.go_json import GoObject, decode_object
from ...protocol.names import is_valid_name
from ..access.changes import note_change
from ..access.viewer import Forbidden, require, viewer_of
from ..actions.cluster import Outcome, apply, tombstone
from ..console import console_of
from .aggregate import Object, sum_channels, sum_topics
from .answers import APIError, answer, body_of
from .producers import out_of_date
from .questions import AllFailed, Questions

MAX_BODY_BYTES = 64 * 1024
_VERBS: dict[str, api.Action] = {"pause": "pause", "unpause": "unpause", "empty": "empty"}


async def ping(request: Request) -> Response:
    """Say that the console runs."""
    return PlainTextResponse("OK")


# ------------------------------------------------------------------------ show


async def topics(request: Request) -> Response:
    """Show the names of all topics; with `inactive=true`, those that no broker has, and their channels."""
    asked = _questions(request)
    names = await asked.topics()
    if request.query_params.get("inactive") == "true":
        return answer({"topics": await asked.inactive_topics(names)}, asked.warnings)
    return answer({"topics": names or None}, asked.warnings)


async def topic(request: Request) -> Response:
    """Show a topic, summed over all brokers."""
    asked, name = _questions(request), request.path_params["topic"]
    _must_see(request, name)
    parts = await _parts(asked, name)
    return answer(sum_topics(name, parts), asked.warnings)


async def channel(request: Request) -> Response:
    """Show a channel, summed over all brokers, with its clients."""
    asked, of, name = _questions(request), request.path_params["topic"], request.path_params["channel"]
    _must_see(request, of)
    parts = await _parts(asked, of, name, clients=True)
    found = [each for part in parts for each in part["channels"] or () if each["channel_name"] == name]
    return answer(sum_channels(of, name, found) if found else {}, asked.warnings)


async def nodes(request: Request) -> Response:
    """Show the brokers."""
    asked = _questions(request)
    producers = await asked.producers()
    brokers = console_of(request).watcher.snapshot.brokers
    old = out_of_date(
        producers, lambda each: brokers[each.address].is_nsqd if each.address in brokers else None
    )
    shown = [producer.shown(producer.address in old, asked.viewer.sees) for producer in producers]
    return answer({"nodes": shown or None}, asked.warnings)


async def node(request: Request) -> Response:
    """Show a broker, with its topics, channels and clients."""
    asked, name = _questions(request), request.path_params["node"]
    producers = [each for each in await asked.producers() if each.node == name]
    if not producers:
        raise APIError(404, "NODE_NOT_FOUND")
    parts = await asked.topic_parts(producers, clients=True)
    clients = (len(each["clients"] or ()) for part in parts for each in part["channels"] or ())
    fields = {
        "node": name,
        "topics": parts or None,
        "total_messages": sum(part["message_count"] for part in parts),
        "total_clients": sum(clients),
    }
    return answer(fields, asked.warnings)


async def counter(request: Request) -> Response:
    """Show the messages of each channel on each broker."""
    asked = _questions(request)
    stats = {}
    for part in await asked.topic_parts(await asked.producers()):
        for each in part["channels"] or ():
            fields = {key: each[key] for key in ("node", "topic_name", "channel_name", "message_count")}
            stats[f"{each['topic_name']}:{each['channel_name']}:{each['node']}"] = fields
    return answer({"stats": stats}, asked.warnings)


# ---------------------------------------------------------------------- change


async def create(request: Request) -> Response:
    """Create a topic, and a channel if the body names one."""
    fields = await _body(request)
    change = Change("create", _name(fields, "topic"), _name(fields, "channel", may_be_empty=True))
    return await _change(request, change, also=Change("create", change.topic))


async def act_on_topic(request: Request) -> Response:
    """Pause, unpause or empty a topic."""
    return await _act(request, request.path_params["topic"], "")


async def act_on_channel(request: Request) -> Response:
    """Pause, unpause or empty a channel."""
    return await _act(request, request.path_params["topic"], request.path_params["channel"])


async def delete_topic(request: Request) -> Response:
    """Delete a topic on all brokers and discovery services."""
    return await _change(request, Change("delete", request.path_params["topic"]))


async def delete_channel(request: Request) -> Response:
    """Delete a channel on all brokers and discovery services."""
    return await _change(
        request, Change("delete", request.path_params["topic"], request.path_params["channel"])
    )


async def hide_node(request: Request) -> Response:
    """Hide a broker from the consumers of a topic, and delete the topic there."""
    name = request.path_params["node"]
    of = _name(await _body(request), "topic")
    viewer = require(request, "manage", of)
    asked = _questions(request)
    addresses = [each.address for each in await asked.producers() if each.node == name]
    if not addresses:
        raise APIError(404, "NODE_NOT_FOUND")
    console = console_of(request)
    outcome = await tombstone(console, of, name, addresses[0], token=viewer.token)
    note_change(request, topic=of, results=outcome.results)
    _check(outcome, console.watcher.lookupds)
    console.notifier.notify(request, "tombstone_topic_producer", of, node=name)
    return answer({}, _warnings(outcome))


async def _act(request: Request, topic: str, channel: str) -> Response:
    verb = _VERBS.get(_text(await _body(request), "action"))
    if verb is None:
        raise APIError(400, "INVALID_ACTION")
    return await _change(request, Change(verb, topic, channel))


async def _change(request: Request, change: Change, *, also: Change | None = None) -> Response:
    """Make a change and notify of it.

    Args:
        also: A change that is part of it.
    """
    viewer = require(request, "manage", change.topic, change.channel)
    if also is not None:
        require(request, "manage", also.topic, also.channel)
    console = console_of(request)
    outcome = await apply(console, change, token=viewer.token)
    note_change(request, topic=change.topic, channel=change.channel, results=outcome.results)
    _check(outcome, console.watcher.lookupds, creates=change.verb == "create")
    for each in dict.fromkeys([also or change, change]):
        console.notifier.notify(request, each.name, each.topic, each.channel)
    return answer({}, _warnings(outcome))


def _check(outcome: Outcome, lookupds: Sequence[str], *, creates: bool = False) -> None:
    """Check that a server did it, or that a discovery service knows the topic.

    Raises:
        AllFailed: Every broker failed; without brokers, every discovery service.
        Forbidden: Every one refused the viewer's token.
    """
    on_brokers = [step for step in outcome.steps if not step.is_lookupd]
    decisive = on_brokers or outcome.steps
    errors = [step.error for step in decisive if step.error is not None and not step.error.is_missing]
    if errors and len(errors) == len(decisive):
        if all(error.status in (401, 403) for error in errors):
            raise Forbidden("; ".join(map(str, errors)))
        raise AllFailed("nsqd" if on_brokers else "nsqlookupd", errors)
    if not on_brokers and lookupds and len(outcome.lookups) == len(lookupds) and not creates:
        raise AllFailed("nsqlookupd", outcome.lookups)


def _warnings(outcome: Outcome) -> list[str]:
    """Return all errors as nsqadmin does: one text with a line for each."""
    errors = [*outcome.lookups, *(step.error for step in outcome.steps if step.error is not None)]
    return ["\n".join(map(str, errors))] if errors else []


# --------------------------------------------------------------------- request


def _questions(request: Request) -> Questions:
    return Questions(console_of(request), viewer_of(request))


async def _parts(asked: Questions, topic: str, channel: str = "", *, clients: bool = False) -> list[Object]:
    """Return a topic's parts on its brokers. Raises APIError, if there are none, and AllFailed."""
    producers = await asked.topic_producers(topic)
    if not producers:
        raise APIError(404, ": ".join(["TOPIC_NOT_FOUND", *asked.warnings]))
    return await asked.topic_parts(producers, topic, channel, clients=clients)


def _must_see(request: Request, topic: str) -> None:
    if not viewer_of(request).sees(topic):
        raise Forbidden(f"This needs a role on topic {topic}.")


async def _body(request: Request) -> GoObject:
    body = await body_of(request, MAX_BODY_BYTES)
    try:
        return decode_object(body)
    except ValueError as exc:
        raise APIError(400, f"INVALID_BODY: {exc}: send a JSON object") from None


def _text(fields: GoObject, key: str) -> str:
    try:
        return fields.text(key)
    except ValueError as exc:
        raise APIError(400, f"INVALID_BODY: {exc}") from None


def _name(fields: GoObject, key: str, *, may_be_empty: bool = False) -> str:
    name = _text(fields, key)
    if not (is_valid_name(name) or (may_be_empty and not name)):
        raise APIError(400, f"INVALID_{key.upper()}")
    return name
