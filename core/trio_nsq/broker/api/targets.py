"""The topic and the channel that a request is about, by its parameters, with nsqd's error strings."""

import re

from ...http import HTTPError, Request, channel_names, given
from ..errors import TopicUnavailable
from ..server import Server
from ..state.channel import Channel
from ..state.topic import Topic

FALSE = ("0", "false")
_PRODUCER = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


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
    return request.query.get("dry_run", "false") not in FALSE


def producer_given(request: Request) -> str:
    """Who numbers its batches. Raises HTTPError."""
    producer = given(request, "producer")
    if not _PRODUCER.fullmatch(producer):
        raise HTTPError(400, "INVALID_PRODUCER: 1 to 64 of A-Z a-z 0-9 . _ : - are wanted")
    return producer


def topic_named(server: Server, name: str) -> Topic:
    """The topic of this name, which need not be a valid one. Raises HTTPError, TopicUnavailable."""
    topic = server.broker.topics.get(name)
    if topic is None:
        if name in server.broker.unavailable:
            raise TopicUnavailable(name, server.broker.unavailable[name])
        raise HTTPError(404, "TOPIC_NOT_FOUND")
    return topic


def find_topic(server: Server, request: Request) -> Topic:
    """The topic that a request names. Raises as `topic_named`."""
    return topic_named(server, given(request, "topic"))


def find_channel(server: Server, request: Request) -> Channel:
    """The channel that a request names. Raises as `topic_named`."""
    return find_topic_and_channel(server, request)[1]


def find_topic_and_channel(server: Server, request: Request) -> tuple[Topic, Channel]:
    """The channel that a request names, and its topic. Raises as `topic_named`."""
    topic_name, channel_name = channel_names(request)
    topic = topic_named(server, topic_name)
    channel = topic.channels.get(channel_name)
    if channel is None:
        raise HTTPError(404, "CHANNEL_NOT_FOUND")
    return topic, channel
