"""Creates, deletes, empties, pauses and configures topics and channels (NSQ's HTTP API).

nsqd does not have the endpoints for settings and producers.
"""

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from ...access.policy import Identity
from ...http.messages import HTTPError, Request, Response, channel_names, given, valid_name
from ...protocol.untrusted_json import decode_json
from ..dead_letters import refuse_loop
from ..server import Server
from ..session.session import Session
from ..state.channel import Channel
from ..state.settings import ChannelSettings, TopicSettings
from ..state.topic import Topic
from .targets import (
    find_channel,
    find_topic,
    find_topic_and_channel,
    is_set,
    may_send_to,
    producer_given,
    require,
    topic_named,
)

_NS_PER_MS = 1_000_000
_EMPTY = Response.empty()

# ---------------------------------------------------------------------- topics


async def create_topic(server: Server, request: Request) -> Response:
    """Create a topic, unless it exists."""
    await server.topics.create(valid_name(request, "topic", "INVALID_TOPIC"))
    return _EMPTY


async def delete_topic(server: Server, request: Request) -> Response:
    """Delete a topic, its channels and its files."""
    name = given(request, "topic")
    try:
        if name in server.broker.unavailable:
            await server.topics.delete_unavailable(name)
        else:
            await server.topics.delete_topic(topic_named(server, name))
    except OSError as exc:
        raise HTTPError(503, f"cannot delete the files of topic {name}: {exc.strerror}") from exc
    return _EMPTY


async def empty_topic(server: Server, request: Request) -> Response:
    """Drop the messages that the topic has not distributed yet. Its channels keep their messages."""
    await server.admin.empty_topic(topic_named(server, valid_name(request, "topic", "INVALID_TOPIC")))
    return _EMPTY


async def pause_topic(server: Server, request: Request, *, paused: bool) -> Response:
    """Pause a topic or unpause it. A paused topic distributes no messages to its channels."""
    topic = find_topic(server, request)
    if not paused:
        topic.moving.refuse_changes()
    await server.admin.pause_topic(topic, paused)
    return _EMPTY


async def get_producer(server: Server, request: Request) -> Response:
    """Return the highest batch number of a producer."""
    topic, producer = find_topic(server, request), producer_given(request)
    last = topic.producers.last_of(producer)
    return Response.json(
        {
            "producer": producer,
            "number": None if last is None else last.number,
            "instance": None if last is None else last.instance or None,
            "may_be_forgotten": topic.producers.may_have_forgotten(producer),
        }
    )


async def forget_producer(server: Server, request: Request) -> Response:
    """Forget an idempotent producer, durably."""
    await server.admin.forget_producer(find_topic(server, request), producer_given(request))
    return Response()


# ---------------------------------------------------------------------- channels


async def create_channel(server: Server, request: Request) -> Response:
    """Create a channel of an existing topic, unless it exists."""
    topic, channel = channel_names(request)
    topic_named(server, topic)
    await server.topics.create(topic, channel)
    return _EMPTY


async def delete_channel(server: Server, request: Request) -> Response:
    """Delete a channel, and disconnect its clients."""
    await server.admin.delete_channel(find_channel(server, request))
    return _EMPTY


async def empty_channel(server: Server, request: Request) -> Response:
    """Drop all messages of a channel: ready, in flight and deferred."""
    await server.admin.empty(find_channel(server, request))
    return _EMPTY


async def pause_channel(server: Server, request: Request, *, paused: bool) -> Response:
    """Pause a channel or unpause it. A paused channel delivers no messages."""
    topic, channel = find_topic_and_channel(server, request)
    if not paused:
        topic.moving.refuse_changes()
    await server.admin.pause(channel, paused)
    return _EMPTY


async def disconnect_consumers(server: Server, request: Request) -> Response:
    """Disconnect the consumers of a channel, or those of a client: its `client_id` or its address.

    Their messages in flight are requeued, as when they disconnect themselves. They may connect again.
    """
    channel, client = find_channel(server, request), request.query.get("client")
    found = [
        session
        for each in channel.consumers
        if isinstance(session := each.subscriber, Session)
        and client in (None, session.handshake.identity.client_id, session.peer)
    ]
    if client is not None and not found:
        raise HTTPError(404, "CLIENT_NOT_FOUND")
    for session in found:
        session.close()
    return Response.json(
        {
            "disconnected": [
                {"client_id": each.handshake.identity.client_id, "remote_address": each.peer}
                for each in found
            ]
        }
    )


# ---------------------------------------------------------------------- settings


async def get_topic_settings(server: Server, request: Request) -> Response:
    """Return a topic's effective settings as a JSON object."""
    return Response.json(asdict(find_topic(server, request).settings))


async def put_topic_settings(server: Server, request: Request) -> Response:
    """Change a topic's settings in the body's JSON object, durably; null resets one to the broker's default.

    With `dry_run`, change nothing, and return in `dropped` how many messages the change would drop at once.
    """
    topic, changes = find_topic(server, request), _changes(request)
    if is_set(request, "dry_run"):
        return await _try_topic_settings(server, topic, changes)
    await server.admin.configure_topic(topic, changes)
    return Response.json(asdict(topic.settings))


async def _try_topic_settings(server: Server, topic: Topic, changes: dict[str, Any]) -> Response:
    settings = topic.settings_with(changes)
    expired_before = 0
    if settings.ttl_ms and settings.ttl_ms != topic.settings.ttl_ms:
        oldest_ns = time.time_ns() - settings.ttl_ms * _NS_PER_MS
        expired_before = await server.readers.call(topic, partial(topic.store.first_since, oldest_ns))
    return _effect(settings, topic.limits.would_drop(settings, expired_before))


async def get_channel_settings(server: Server, request: Request) -> Response:
    """Return a channel's settings as a JSON object."""
    return Response.json(asdict(find_channel(server, request).settings))


async def put_channel_settings(server: Server, request: Request) -> Response:
    """Change a channel's settings, as `put_topic_settings`."""
    channel, changes = find_channel(server, request), _changes(request)
    settings = channel.settings_with(changes)
    _check_dead_letters(request.identity, channel, settings)
    if is_set(request, "dry_run"):
        refuse_loop(server.broker, channel, changes)
        return _effect(settings, channel.would_drop(settings))
    await server.admin.configure_channel(channel, changes)
    return Response.json(asdict(channel.settings))


def _check_dead_letters(identity: Identity | None, channel: Channel, settings: ChannelSettings) -> None:
    """Check that a client may have the broker move messages of a channel to its dead-letter topic.

    There, clients read them that have no role on the channel's topic. Raises HTTPError.
    """
    if identity is None or not settings.discloses_more_than(channel.settings):
        return
    to = settings.dead_letter_topic
    if to != channel.settings.dead_letter_topic and not may_send_to(identity, to):
        raise HTTPError(403, f"FORBIDDEN: this needs the role publish or manage on topic {to[:100]}")
    require(identity, "read", channel.topic.name, "dead letters disclose messages")


def _effect(settings: TopicSettings | ChannelSettings, dropped: int) -> Response:
    """Return the answer to a dry run: the resulting settings, and how many messages would be dropped at once."""
    return Response.json(asdict(settings) | {"dropped": dropped, "dry_run": True})


def _changes(request: Request) -> dict[str, Any]:
    try:
        changes = decode_json(request.body)
    except ValueError as exc:
        raise HTTPError(400, "INVALID_BODY: not valid JSON") from exc
    if not isinstance(changes, dict):
        raise HTTPError(400, "INVALID_BODY: not a JSON object")
    return changes
