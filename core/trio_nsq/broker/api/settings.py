"""`/topic/settings` and `/channel/settings`: what can be set for one of them; not an endpoint of nsqd's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ...http import HTTPError, Request, Response, Route
from ...log import LogReadError
from ...untrusted_json import decode_json
from ..dead_letters import refuse_loop
from ..state.settings import ChannelSettings, SettingsError, TopicSettings, as_json
from ..state.topic import Topic
from .targets import find_channel, find_topic, given, is_dry_run

if TYPE_CHECKING:
    from ..server import Server


_NS_PER_MS = 1_000_000


class SettingsEndpoints:
    """The handlers. GET tells the settings in force, PUT changes those in its body, durably, and tells them too.

    Args:
        server: Whose topics these are.
    """

    def __init__(self, server: "Server") -> None:
        self._server = server

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            Route("GET", "/topic/settings", self.get_topic),
            Route("PUT", "/topic/settings", self.put_topic),
            Route("GET", "/channel/settings", self.get_channel),
            Route("PUT", "/channel/settings", self.put_channel),
        ]

    async def get_topic(self, request: Request) -> Response:
        """A topic's settings as a JSON object, by name."""
        return Response.json(as_json(find_topic(self._server, given(request, "topic")).settings))

    async def put_topic(self, request: Request) -> Response:
        """Change those that the JSON object in the body names; null goes back to the broker's default.

        With `dry_run` nothing is changed, and `dropped` tells how many messages the change would drop at once.
        """
        topic = find_topic(self._server, given(request, "topic"))
        if is_dry_run(request):
            return await self._try_topic(topic, _changes(request))
        with _refusing():
            await self._server.admin.configure_topic(topic, _changes(request))
        return Response.json(as_json(topic.settings))

    async def _try_topic(self, topic: Topic, changes: dict[str, Any]) -> Response:
        with _refusing():
            settings = topic.settings_with(changes)
        expired_before = 0
        if settings.ttl_ms and settings.ttl_ms != topic.settings.ttl_ms:
            oldest_ns = self._server.timers.now_ns() - settings.ttl_ms * _NS_PER_MS
            try:
                expired_before = await self._server.readers.call(
                    topic, partial(topic.store.first_since, oldest_ns)
                )
            except LogReadError as exc:
                raise HTTPError(503, str(exc)) from exc
        dropped = topic.limits.would_drop(settings, expired_before)
        return _effect(settings, dropped)

    async def get_channel(self, request: Request) -> Response:
        """A channel's settings, likewise."""
        return Response.json(as_json(find_channel(self._server, request).settings))

    async def put_channel(self, request: Request) -> Response:
        """Change those of a channel, likewise."""
        channel = find_channel(self._server, request)
        if is_dry_run(request):
            changes = _changes(request)
            with _refusing():
                refuse_loop(self._server.broker, channel, changes)
                settings = channel.settings_with(changes)
            return _effect(settings, channel.would_drop(settings))
        with _refusing():
            await self._server.admin.configure_channel(channel, _changes(request))
        return Response.json(as_json(channel.settings))


def _effect(settings: TopicSettings | ChannelSettings, dropped: int) -> Response:
    """The answer to a dry run: the settings that would be in force, and how many messages would be dropped at once."""
    return Response.json(as_json(settings) | {"dropped": dropped, "dry_run": True})


def _changes(request: Request) -> dict[str, Any]:
    try:
        changes = decode_json(request.body)
    except ValueError as exc:
        raise HTTPError(400, "INVALID_BODY: JSON is wanted") from exc
    if not isinstance(changes, dict):
        raise HTTPError(400, "INVALID_BODY: a JSON object is wanted")
    return changes


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except SettingsError as exc:
        raise HTTPError(400, f"INVALID_SETTING: {exc}") from exc
