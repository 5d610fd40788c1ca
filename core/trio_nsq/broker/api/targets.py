"""The topic and the channel that a request is about, by its parameters, with nsqd's error strings."""

import re
from typing import TYPE_CHECKING

from ...http import HTTPError, Request
from ...http.arguments import channel_names as channel_names
from ...http.arguments import given as given
from ...http.arguments import valid_name as valid_name
from ..errors import TopicUnavailable
from ..ingest.idempotent import BatchNumber
from ..state.channel import Channel
from ..state.topic import Topic

if TYPE_CHECKING:
    from ..server import Server

_NS_PER_MS = 1_000_000
_PRODUCER = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
_DIGITS = re.compile(r"[0-9]{1,19}", re.ASCII)
_NUMBERS = 2**63
_DECIMAL = re.compile(r"[+-]?0*([0-9]{1,19})", re.ASCII)


def whole_number(request: Request, parameter: str, *, least: int) -> int | None:
    """A parameter that has to be a whole number, if it is there."""
    text = request.query.get(parameter)
    if text is None:
        return None
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if number < least:
        raise HTTPError(400, f"INVALID_{parameter.upper()}: a whole number is wanted, {least} or more")
    return number


def is_dry_run(request: Request) -> bool:
    """Whether only the effect of the request is wanted."""
    return request.query.get("dry_run", "false") not in ("0", "false")


def due_given(request: Request, server: "Server") -> int:
    """When a message may be delivered that is published with `defer`, in milliseconds; 0: at once. Raises HTTPError."""
    if "defer" not in request.query:
        return 0
    text = request.query["defer"]
    match = _DECIMAL.fullmatch(text)
    defer_ms = int(match[1]) if match else -1
    if not 0 <= defer_ms <= server.options.limits.max_defer_ms or (defer_ms and text.startswith("-")):
        raise HTTPError(400, "INVALID_DEFER")
    return server.timers.now_ns() + defer_ms * _NS_PER_MS if defer_ms else 0


def producer_given(request: Request) -> str:
    """Who numbers its batches. Raises HTTPError."""
    producer = given(request, "producer")
    if not _PRODUCER.fullmatch(producer):
        raise HTTPError(400, "INVALID_PRODUCER: 1 to 64 of A-Z a-z 0-9 . _ : - are wanted")
    return producer


def batch_given(request: Request) -> BatchNumber | None:
    """The number that what is published has, if it is to be published once. Raises HTTPError."""
    if "producer" not in request.query and "number" not in request.query:
        return None
    producer, text = producer_given(request), given(request, "number")
    number = int(text) if _DIGITS.fullmatch(text) else _NUMBERS
    if number >= _NUMBERS:
        raise HTTPError(400, "INVALID_NUMBER: a whole number is wanted, from 0 to 9223372036854775807")
    return BatchNumber(producer, number)


def find_topic(server: "Server", name: str) -> Topic:
    """The topic of this name, which need not be a valid one. Raises HTTPError."""
    topic = server.broker.topics.get(name)
    if topic is None:
        if name in server.broker.unavailable:
            raise HTTPError(503, str(TopicUnavailable(name, server.broker.unavailable[name])))
        raise HTTPError(404, "TOPIC_NOT_FOUND")
    return topic


def find_channel(server: "Server", request: Request) -> Channel:
    """The channel that a request names. Raises HTTPError."""
    return find_topic_and_channel(server, request)[1]


def find_topic_and_channel(server: "Server", request: Request) -> tuple[Topic, Channel]:
    """The channel that a request names, and its topic. Raises HTTPError."""
    topic_name, channel_name = channel_names(request)
    topic = find_topic(server, topic_name)
    channel = topic.channels.get(channel_name)
    if channel is None:
        raise HTTPError(404, "CHANNEL_NOT_FOUND")
    return topic, channel
