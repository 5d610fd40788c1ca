"""`/topic/settings` and `/channel/settings`: what can be set for one of them; not an endpoint of nsqd's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...http import HTTPError, Request, Response, Route
from ...untrusted_json import decode_json
from ..state.settings import SettingsError, as_json
from .targets import find_channel, find_topic, given

if TYPE_CHECKING:
    from ..server import Server


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
        """Change those that the JSON object in the body names; null goes back to the broker's default."""
        topic = find_topic(self._server, given(request, "topic"))
        with _refusing():
            await self._server.configure_topic(topic, _changes(request))
        return Response.json(as_json(topic.settings))

    async def get_channel(self, request: Request) -> Response:
        """A channel's settings, likewise."""
        return Response.json(as_json(find_channel(self._server, request).settings))

    async def put_channel(self, request: Request) -> Response:
        """Change those of a channel, likewise."""
        channel = find_channel(self._server, request)
        with _refusing():
            await self._server.configure_channel(channel, _changes(request))
        return Response.json(as_json(channel.settings))


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
