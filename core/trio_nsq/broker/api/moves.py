"""`/topic/move`: move what is left of a topic to another broker, exactly once. nsqd does not have these endpoints.

See docs/how-to/drain-a-broker.md. `qcli drain --move-to` takes batches of messages from the source (`next`), and gives
them to the target (`store`).
"""

import time
from typing import Any

import trio

from ...http.messages import HTTPError, Request, Response, given
from ...protocol import CommandError
from ..moved_groups import MovedGroup, decode_groups
from ..server import Server
from ..state.move import Move, MoveStream
from ..state.topic import Topic
from .targets import find_channel, find_topic, is_set, may_send_to, producer_given, require, whole_number

DEFAULT_BATCH_BYTES = 1024 * 1024
MAX_BATCH_BYTES = 4 * 1024 * 1024
_MAX_ADDRESS = 300
_OCTETS = "application/octet-stream"
_NS_PER_MS = 1_000_000
_GROUPS_AT_ONCE = 100
"""Groups decoded before other tasks run; a group of one message takes some microseconds, dead letters some more."""

# ---------------------------------------------------------------------- at the source


async def status(server: Server, request: Request) -> Response:
    """Return the move of a topic with its streams; `{"topic": name, "move": null}` without one."""
    return Response.json(_status(find_topic(server, request)))


async def begin(server: Server, request: Request) -> Response:
    """Begin to move a topic to the broker at `to`, or continue: its durable channels deliver nothing from now on."""
    topic, to = find_topic(server, request), given(request, "to")
    if not 0 < len(to) <= _MAX_ADDRESS or not to.isprintable():
        raise HTTPError(400, "INVALID_TO: not an address")
    await server.moves.begin(topic, to)
    return Response.json(_status(topic))


async def next_batch(server: Server, request: Request) -> Response:
    """Drop the messages of a stream up to `moved`, and return the next ones, see `moved_groups`."""
    topic, move_id = find_topic(server, request), given(request, "move")
    require(request.identity, "read", topic.name)
    channel = find_channel(server, request) if "channel" in request.query else None
    moved = whole_number(request, "moved", least=0)
    max_bytes = whole_number(request, "max_bytes", least=1) or DEFAULT_BATCH_BYTES
    batch = await server.moves.next(topic, channel, move_id, moved, min(max_bytes, MAX_BATCH_BYTES))
    counts = {
        "NSQ-Move-Messages": batch.count,
        "NSQ-Move-Left": batch.left,
        "NSQ-Move-Damaged": batch.damaged,
        "NSQ-Move-Expired": batch.expired,
    }
    if batch.through is not None:
        counts["NSQ-Move-Through"] = batch.through
    headers = {name: str(count) for name, count in counts.items()}
    return Response(body=batch.body, content_type=_OCTETS, headers=headers)


async def end(server: Server, request: Request) -> Response:
    """End a move, durably: the topic delivers again. With `cancel`, also if messages are left."""
    topic, move_id = find_topic(server, request), given(request, "move")
    cancel = is_set(request, "cancel")
    await server.moves.end(topic, move_id, cancel=cancel)
    return Response.json(_status(topic))


def _status(topic: Topic) -> dict[str, Any]:
    move = topic.moving.current
    if move is None:
        return {"topic": topic.name, "move": None}
    streams = [_stream(topic, move, None, topic.moving.stream)]
    for channel in topic.moving.channels:
        if channel.stream is None:
            continue
        streams.append(
            _stream(topic, move, channel.name, channel.stream)
            | {
                "in_flight": channel.in_flight_count,
                "withdrawn": len(channel.messages.withdrawn),
                "dead_letter_topic": channel.settings.dead_letter_topic,
            }
        )
    return {
        "topic": topic.name,
        "move": move.id,
        "to": move.to,
        "end_sequence": move.end,
        "began_ns": move.began_ns,
        "streams": streams,
    }


def _stream(topic: Topic, move: Move, name: str | None, stream: MoveStream) -> dict[str, Any]:
    return {
        "channel": name,
        "producer": move.producer(name),
        "begun": name is None or stream.is_fixed,
        "moved": stream.moved if stream.moved >= 0 else None,
        "left": topic.moving.left(name),
    }


# ---------------------------------------------------------------------- at the target


async def store(server: Server, request: Request) -> Response:
    """Store the groups of the body that are not stored yet, durably; return the highest number of the stream.

    With `close`, refuse further groups of the stream.
    """
    topic, producer = find_topic(server, request), producer_given(request)
    groups: list[MovedGroup] = []
    try:
        for group in decode_groups(request.body, server.options.limits):
            groups.append(group)
            if group.letters is not None or len(groups) % _GROUPS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
    except CommandError as exc:
        limit = server.options.limits.max_msg_size
        raise HTTPError(413, f"MSG_TOO_BIG: --max-msg-size is {limit}") from exc
    except ValueError as exc:
        raise HTTPError(400, f"BAD_BODY: {exc}") from exc
    if not server.broker.serves(topic):
        raise HTTPError(404, "TOPIC_NOT_FOUND")
    defer_limit_ns = time.time_ns() + server.options.limits.max_defer_ms * _NS_PER_MS
    for group in groups:
        # Otherwise a publisher could defer messages for longer than with PUB.
        if group.due_ns > defer_limit_ns:
            require(request.identity, "manage", topic.name, "a message is deferred beyond --max-defer")
        # A dead letter can be requeued to its topic of origin: messages must not get there by a detour.
        if group.letters is not None and not may_send_to(request.identity, group.letters["topic"]):
            origin = group.letters["topic"][:100]
            raise HTTPError(403, f"FORBIDDEN: this needs the role publish or manage on topic {origin}")
    close = is_set(request, "close")
    stored = await server.moved_messages.store(topic, producer, groups, close=close)
    return Response.json(
        {"topic": topic.name, "stored": stored, "number": topic.producers.number_of(producer)}
    )
