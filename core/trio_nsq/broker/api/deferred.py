"""`/channel/deferred` and `/channel/deferred/cancel`: what waits for its time in a channel; not endpoints of nsqd's.

See docs/deferred.md.
"""

import re
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ...http import HTTPError, Request, Response, Route
from ...log import LogReadError
from ..state.channel import Channel
from ..state.finding import find_ids
from ..state.topic import Topic
from .read import NDJSON
from .seek import MAX_PEEK_MESSAGES, WaitingLines
from .targets import find_topic_and_channel, given, whole_number

if TYPE_CHECKING:
    from ..server import Server

DEFAULT_MESSAGES = 100
MAX_IDS = 1000
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


class DeferredEndpoints:
    """The handlers.

    Args:
        server: Whose channels these are.
    """

    def __init__(self, server: "Server") -> None:
        self._server = server

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            Route("GET", "/channel/deferred", self.deferred),
            Route("POST", "/channel/deferred/cancel", self.cancel),
        ]

    async def deferred(self, request: Request) -> Response:
        """The next messages of a channel that wait for their time, by that time, as JSON lines."""
        topic, channel = find_topic_and_channel(self._server, request)
        count = whole_number(request, "max_messages", least=1) or DEFAULT_MESSAGES
        if count > MAX_PEEK_MESSAGES:
            raise HTTPError(400, f"INVALID_MAX_MESSAGES: {MAX_PEEK_MESSAGES} is the most")
        waiting = list(islice(channel.messages.peek("deferred"), count))
        lines = WaitingLines(self._server.readers, topic, channel, waiting)
        headers = {"X-NSQ-Deferred-Count": str(channel.deferred_count)}
        return Response(body=lines.pieces(), content_type=NDJSON, headers=headers)

    async def cancel(self, request: Request) -> Response:
        """Drop deferred messages, durably; `id` is one id or more, with commas."""
        topic, channel = find_topic_and_channel(self._server, request)
        ids = ids_given(request)
        sequences = await find_sequences(self._server, topic, channel, ids)
        cancelled = set(await self._server.admin.cancel(channel, sequences.values()))
        return Response.json(
            {
                "cancelled": [each for each in ids if sequences.get(each) in cancelled],
                "not_deferred": [each for each in ids if sequences.get(each) not in cancelled],
            }
        )


def ids_given(request: Request) -> list[str]:
    """The ids that a request names, each once. Raises HTTPError."""
    ids = list(dict.fromkeys(given(request, "id").split(",")))
    for message_id in ids:
        if not _ID.fullmatch(message_id):
            raise HTTPError(400, f"INVALID_ID: {message_id!r} is not 16 of the digits 0-9 a-f")
    if len(ids) > MAX_IDS:
        raise HTTPError(400, f"INVALID_ID: {MAX_IDS} ids are the most")
    return ids


async def find_sequences(server: "Server", topic: Topic, channel: Channel, ids: list[str]) -> dict[str, int]:
    """Where in the topic of a channel these messages lie, those that are there. Raises HTTPError."""
    carried: list[int] = []
    if topic.log.has_carried_forward:
        carried = channel.messages.waiting_before(topic.log.first_sequence)
    try:
        work = partial(find_ids, topic.store, [int(message_id, 16) for message_id in ids], carried)
        found = await server.readers.call(topic, work)
    except LogReadError as exc:
        raise HTTPError(503, str(exc)) from exc
    if not server.broker.serves_channel(channel):
        raise HTTPError(404, "CHANNEL_NOT_FOUND")
    return {f"{message_id:016x}": sequence for message_id, sequence in found.items()}
