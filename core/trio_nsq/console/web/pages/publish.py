"""Publish a message to a topic."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from ....text.durations import parse_long_duration_ms
from ....text.wording import count_of
from ...access.guard import MAX_BODY_BYTES
from ...access.viewer import Viewer, require
from ...console import upstream_of
from ...messages.publishing import FORMATS, Published, bodies_of, headers_of, publish
from ...upstream.client import UpstreamError
from ..forms import form, uploads
from ..page import Page, View
from .message_brokers import TopicBrokers, brokers_of

_NAMES = {
    "text": "one message",
    "lines": "one message for each line",
    "hex": "one message, in hexadecimal",
    "base64": "one message, in Base64",
}


@dataclass(frozen=True, slots=True)
class PublishForm:
    """The fields of the form, as they were filled in."""

    body: str = ""
    format: str = "text"
    defer: str = ""
    broker: str = ""
    headers: str = ""


async def publish_form(request: Request) -> View:
    topic = request.path_params["topic"]
    viewer = require(request, "publish", topic)
    brokers = await brokers_of(request, topic)
    return _view(viewer, topic, brokers, PublishForm(broker=request.query_params.get("broker", "")))


async def publish_messages(request: Request) -> View:
    """Publish what the form has, and show it again with the result."""
    topic = request.path_params["topic"]
    viewer = require(request, "publish", topic)
    fields = await form(request)
    filled = PublishForm(
        fields.get("body", ""),
        fields.get("format", "text"),
        fields.get("defer", ""),
        fields.get("broker", ""),
        fields.get("headers", ""),
    )
    brokers = await brokers_of(request, topic)
    try:
        address = _broker(brokers, filled.broker)
        defer_ms = parse_long_duration_ms(filled.defer.strip()) if filled.defer.strip() else 0
        bodies = _bodies(filled, await uploads(request))
        published = await publish(
            upstream_of(request),
            address,
            topic,
            bodies,
            defer_ms=defer_ms,
            is_nsqd=address in brokers.nsqds,
            may_read=viewer.allows("read", topic),
            headers=headers_of(filled.headers),
        )
    except ValueError as exc:
        return _view(viewer, topic, brokers, filled, problem=f"Nothing was published: {exc}.", status=400)
    except UpstreamError as exc:
        return _view(viewer, topic, brokers, filled, problem=_failure(exc), status=502)
    kept = PublishForm("", filled.format, "", filled.broker, filled.headers)
    return _view(viewer, topic, brokers, kept, address=address, published=published)


def _broker(brokers: TopicBrokers, wanted: str) -> str:
    """Return the broker to publish to. Raises ValueError."""
    addresses = brokers.publishable
    if wanted in addresses:
        return wanted
    if wanted in brokers.errors:
        raise ValueError(f"{wanted} does not answer: {brokers.errors[wanted]}")
    if wanted or not addresses:
        raise ValueError(f"the topic is not on a broker {wanted or 'that answers'}")
    return addresses[0]


def _bodies(filled: PublishForm, files: Mapping[str, bytes]) -> list[bytes]:
    """Return the messages. Raises ValueError."""
    uploaded = files.get("file")
    if uploaded is None:
        return bodies_of(filled.body, filled.format)
    if filled.body:
        raise ValueError("give either a text or a file")
    if filled.format == "lines":
        return [line for line in uploaded.split(b"\n") if line]
    if not uploaded:
        raise ValueError("the file is empty: a message has at least 1 byte")
    return [uploaded]


def _failure(error: UpstreamError) -> str:
    if not error.status:
        return f"No answer: {error}. The messages may be published: look at the topic before you try again."
    return f"Nothing was published: {error}."


def _view(
    viewer: Viewer,
    topic: str,
    brokers: TopicBrokers,
    filled: PublishForm,
    *,
    problem: str = "",
    status: int = 200,
    address: str = "",
    published: Published | None = None,
) -> View:
    context = {
        "topic": topic,
        "addresses": brokers.publishable,
        "draining": brokers.draining,
        "errors": brokers.errors,
        "filled": filled,
        "formats": [(each, _NAMES[each]) for each in FORMATS],
        "problem": problem,
        "address": address,
        "published": published,
        "what": count_of(published.count, "message") if published is not None else "",
        "may_read": viewer.allows("read", topic),
        "is_log": address in brokers.ours,
        "max_bytes": MAX_BODY_BYTES,
    }
    return View("publish.html", context, status)


PAGES = [
    Page("/topics/{topic}/publish", "publish", publish_form),
    Page("/topics/{topic}/publish", "publish_messages", publish_messages, methods=("POST",)),
]
