"""Finds the topic and channel of a request and parses common parameters, with nsqd's error strings."""

import re

from ...access.policy import Identity, Role
from ...http.messages import HTTPError, Request, channel_names, given
from ...protocol.names import is_valid_producer
from ..errors import TopicUnavailable
from ..server import Server
from ..state.channel import Channel
from ..state.topic import Topic

FALSE = ("0", "false")


def whole_number(request: Request, parameter: str, *, least: int) -> int | None:
    """Return an optional parameter that must be a whole number. Raises HTTPError."""
    text = request.query.get(parameter)
    if text is None:
        return None
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if number < least:
        raise HTTPError(400, f"INVALID_{parameter.upper()}: not a whole number of {least} or more")
    return number


def is_set(request: Request, parameter: str, default: str = "false") -> bool:
    """Whether an optional parameter is neither 0 nor false. With `dry_run`, nothing is changed."""
    return request.query.get(parameter, default) not in FALSE


def may_send_to(identity: Identity | None, topic: str, channel: str | None = None) -> bool:
    """Whether a client may have the broker put messages of another topic into a topic, or one channel of it.

    Args:
        identity: The client; None without authentication.
    """
    return identity is None or identity.allows("publish", topic) or identity.allows("manage", topic, channel)


def require(identity: Identity | None, role: Role, topic: str, reason: str = "") -> None:
    """Check that a client has a role on a topic, besides that of the request's rule. Raises HTTPError.

    Args:
        identity: The client; None without authentication.
        reason: Why the request needs it, for the error.
    """
    if identity is not None and not identity.allows(role, topic):
        because = f"{reason}, so " if reason else ""
        raise HTTPError(403, f"FORBIDDEN: {because}this needs the role {role} on topic {topic}")


def producer_given(request: Request) -> str:
    """Return the name of an idempotent producer. Raises HTTPError."""
    producer = given(request, "producer")
    if not is_valid_producer(producer):
        raise HTTPError(400, "INVALID_PRODUCER: not 1 to 64 of the characters A-Z a-z 0-9 . _ : -")
    return producer


def topic_named(server: Server, name: str) -> Topic:
    """Return the topic of this name, which may be invalid. Raises HTTPError, TopicUnavailable."""
    topic = server.broker.topics.get(name)
    if topic is None:
        if name in server.broker.unavailable:
            raise TopicUnavailable(name, server.broker.unavailable[name])
        raise HTTPError(404, "TOPIC_NOT_FOUND")
    return topic


def find_topic(server: Server, request: Request) -> Topic:
    """Return the topic of a request. Raises as `topic_named`."""
    return topic_named(server, given(request, "topic"))


def find_channel(server: Server, request: Request) -> Channel:
    """Return the channel of a request. Raises as `topic_named`."""
    return find_topic_and_channel(server, request)[1]


def find_topic_and_channel(server: Server, request: Request) -> tuple[Topic, Channel]:
    """Return the topic and channel of a request. Raises as `topic_named`."""
    topic_name, channel_name = channel_names(request)
    topic = topic_named(server, topic_name)
    channel = topic.channels.get(channel_name)
    if channel is None:
        raise HTTPError(404, "CHANNEL_NOT_FOUND")
    return topic, channel
