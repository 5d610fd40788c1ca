"""`/definitions`: what operators define, in one answer: topics, channels and their settings."""

from collections.abc import Mapping
from itertools import count
from typing import Any

import trio

from ...access.policy import Identity
from ...http.messages import Request, Response
from ..server import Server
from ..state.topic import Topic

_PER_STEP = 200
"""Describing these topics and channels takes less than a millisecond."""


async def definitions(server: Server, request: Request) -> Response:
    """Return the topics and channels that the client may read, with the settings that are set.

    Ephemeral ones are left out: they end with their last client.
    """
    identity = request.identity
    found: dict[str, dict[str, Any]] = {}
    steps = count(1)
    for name, topic in list(server.broker.topics.items()):
        if next(steps) % _PER_STEP == 0:
            await trio.lowlevel.checkpoint()
        if not topic.ephemeral and _may_read(identity, name):
            found[name] = _defined("topic", name, topic.paused, topic.own_settings) | {
                "channels": _channels(topic, identity)
            }
    for name, reason in server.broker.unavailable.items():
        if _may_read(identity, name):
            found[name] = _defined("topic", name, False, {}) | {"channels": [], "unavailable": reason}
    return Response.json({"topics": [found[name] for name in sorted(found)]})


def _channels(topic: Topic, identity: Identity | None) -> list[dict[str, Any]]:
    return [
        _defined("channel", name, channel.paused, channel.own_settings)
        for name, channel in sorted(topic.channels.items())
        if not channel.ephemeral and _may_read(identity, topic.name, name)
    ]


def _defined(kind: str, name: str, paused: bool, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{kind}_name": name, "paused": paused, "settings": dict(settings)}


def _may_read(identity: Identity | None, topic: str, channel: str | None = None) -> bool:
    return identity is None or identity.allows("read", topic, channel)
