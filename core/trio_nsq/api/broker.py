"""The requests of clients to brokers: the only place with their paths and parameters.

docs/reference/http-api.md describes them. `tests/client/test_api.py` makes each of them to a running broker.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from .answers import (
    ChannelMessage,
    ChannelStats,
    Cluster,
    DeadLetter,
    DeadLetterTopic,
    DeferredCounts,
    Definitions,
    Disconnected,
    Gap,
    Info,
    LetterCounts,
    LettersMoved,
    LogBounds,
    LogPosition,
    MemberView,
    Message,
    Move,
    ProducerState,
    Seek,
    Stats,
    TopicStats,
    settings_fields,
)
from .fields import Field, check, exactly, fields_of, only, value_of
from .request import Decoder, Endpoint, Request, json_lines, json_object, parameters, raw

Action = Literal["create", "delete", "empty", "pause", "unpause"]
Line = dict[str, Any]
"""A message, or where `gap` is one of its fields, missing messages."""
DONE = {"requeue": "requeued", "drop": "dropped"}
"""What is done with dead letters, and its past."""

_CANNOT_BE_READ = "cannot be read by sequence or time"
_NO_DEAD_LETTERS = "has no dead letters"
_NO_DEFERRED = "has no list of deferred messages"
_NO_CLUSTER = "cannot be a member of a cluster"
_T = TypeVar("_T")


def _json(kind: type[_T]) -> Callable[[bytes, Decoder], _T]:
    return json_object(exactly(kind))


# ---------------------------------------------------------------------- how answers are read


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not an object, so this is not a broker")
    return value


def _info(value: Any) -> Info:
    if _object(value).get("version") is None:
        raise ValueError("no version")
    return check(value, Info)


def _stats(value: Any) -> Stats:
    """Return the answer of `/stats`, with the counts that clients rely on."""
    if "topics" not in _object(value):
        raise ValueError("no topics")
    found = check(value, Stats)
    for topic in found["topics"]:
        queues: list[TopicStats | ChannelStats] = [topic, *topic["channels"]]
        for queue in queues:
            queue["paused"] = bool(queue.get("paused"))
        for channel in topic["channels"]:
            channel["in_flight_count"] = channel.get("in_flight_count") or 0
            channel["deferred_count"] = channel.get("deferred_count") or 0
            channel["client_count"] = channel.get("client_count") or 0
    return found


def _position(value: Any) -> LogPosition:
    found = exactly(LogPosition)(value)
    if not 0 <= found["first_sequence"] <= found["next_sequence"]:
        raise ValueError("its bounds are not those of a log")
    return found


def _line(kind: type, value: Any, *, or_gap: bool = True) -> Line:
    """Check a line: a message or, if there may be any, a gap."""
    if or_gap and isinstance(value, dict) and "gap" in value:
        return only(value, fields_of(Gap))
    found = only(value, fields_of(kind))
    if found.get("body") is None:
        if not (encoded := found.get("body_base64")):
            raise ValueError("body is missing")
        base64.b64decode(encoded, validate=True)
        found.pop("body", None)
    return found


_messages = json_lines(partial(_line, Message))
_channel_messages = json_lines(partial(_line, ChannelMessage))


def _deferred_counts(times: int, value: Any) -> DeferredCounts:
    found = exactly(DeferredCounts)(value)
    if len(found["due_before"]) != times:
        raise ValueError("not a count for each time")
    return found


def _letters_moved(done: str, value: Any) -> LettersMoved:
    found = exactly(LettersMoved)(value)
    return {**found, "done": value_of(done, int)(value)}


def _move_or_none(value: Any) -> Move | None:
    has_none = isinstance(value, dict) and value.get("move", "") is None
    return None if has_none else _move(value)


def _move(value: Any) -> Move:
    found = check(value, Move)
    for stream in found["streams"]:
        stream.setdefault("channel", None)
        stream.setdefault("moved", None)
        if stream["channel"] is not None and {"withdrawn", "dead_letter_topic"} - stream.keys():
            raise ValueError("a stream is incomplete")
    return found


def _stored(value: Any) -> int | None:
    number: int | None = value_of("number", int | None)(value)
    if number is not None and number < 0:
        raise ValueError("a negative number")
    return number


# ---------------------------------------------------------------------- the broker

info: Endpoint[Info] = Endpoint("GET /info", json_object(_info))
"""What the broker is."""
unchecked_info: Endpoint[dict[str, Any]] = Endpoint("GET /info", json_object(_object))
jobs: Endpoint[dict[str, Any]] = Endpoint("GET /jobs", json_object(_object))
"""The jobs that programs report, unchecked."""
metrics: Endpoint[bytes] = Endpoint("GET /metrics", raw)
"""The metrics for Prometheus, as text."""
debug_tasks: Endpoint[bytes] = Endpoint("GET /debug/tasks", raw)
"""The tree of tasks, as text. It needs the role admin; nsqd does not have it."""


def stats(
    topic: str | None = None, channel: str | None = None, *, clients: bool = False, disk: bool = False
) -> Request[Stats]:
    """Ask for the statistics of all topics and channels, or of one, without memory.

    Args:
        clients: List the clients, too.
        disk: Tell the disk space, too; an nsqd does not.
    """
    asked = unchecked_stats(topic, channel, clients=clients, disk=disk)
    return Request(asked.method, asked.path, json_object(_stats), asked.params)


def unchecked_stats(
    topic: str | None = None,
    channel: str | None = None,
    *,
    clients: bool = False,
    disk: bool = False,
    memory: bool = False,
) -> Request[dict[str, Any]]:
    """As `stats`, for those who show what has the right type, whatever else is in the answer."""
    words = {"include_clients": clients, "include_mem": memory}
    query = {"format": "json", **{name: str(value).lower() for name, value in words.items()}}
    more = parameters({"include_disk": disk, "topic": topic, "channel": channel})
    return Request("GET", "/stats", json_object(_object), query | more)


def report_job(job: str, report: Mapping[str, Any]) -> Request[bytes]:
    """Report the progress of a job."""
    return Request("PUT", f"/jobs/{job}", raw, body=json.dumps(report).encode())


def option(name: str) -> Request[bytes]:
    """Ask for an option, as text."""
    return Request("GET", f"/config/{name}", raw)


def set_option(name: str, value: bytes) -> Request[bytes]:
    """Change an option, or have a file read again."""
    return Request("PUT", f"/config/{name}", raw, body=value)


def set_draining(draining: bool) -> Request[bytes]:
    """Begin or end the drain mode: the broker refuses publishes."""
    return set_option("draining", b"true" if draining else b"false")


# ---------------------------------------------------------------------- topics and channels


def act(action: Action, topic: str, channel: str | None = None) -> Request[bytes]:
    """Create, delete, empty, pause or unpause a topic, or the channel if there is one."""
    kind = "topic" if channel is None else "channel"
    return Request("POST", f"/{kind}/{action}", raw, parameters({"topic": topic, "channel": channel}))


def settings(
    topic: str,
    channel: str | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    dry_run: bool = False,
) -> Request[dict[str, Any]]:
    """Ask for the settings of a topic or channel, by the broker's keys, or change some.

    Args:
        dry_run: Tell what the change would do: the settings, and how many messages are `dropped`; an older
            broker does not tell this for a channel.
    """
    kind = "topic" if channel is None else "channel"
    fields = settings_fields(kind)
    if dry_run:
        fields += (Field("dropped", int, needed=kind == "topic"),)
    return Request(
        "GET" if changes is None else "PUT",
        f"/{kind}/settings",
        json_object(partial(only, fields=fields)),
        parameters({"topic": topic, "channel": channel, "dry_run": dry_run}),
        None if changes is None else json.dumps(changes).encode(),
        "has no settings of topics and channels",
    )


seek: Endpoint[Seek] = Endpoint(
    "POST /channel/seek", _json(Seek), "topic channel to incarnation dry_run", _CANNOT_BE_READ
)
"""Move a channel to a position of its topic, which has the log `incarnation`. With `dry_run`, only tell the effect."""

definitions: Endpoint[Definitions] = Endpoint(
    "GET /definitions", _json(Definitions), lacking="has no list of settings"
)
"""All topics and channels that are not ephemeral, with the settings that are set."""
disconnect: Endpoint[list[Disconnected]] = Endpoint(
    "POST /channel/disconnect",
    json_object(value_of("disconnected", list[Disconnected])),
    "topic channel client",
    "cannot disconnect consumers",
)
"""Disconnect the consumers of a channel; with `client`, an id or an address, those of this client."""

# ---------------------------------------------------------------------- messages

bounds: Endpoint[LogBounds] = Endpoint("GET /topic/bounds", _json(LogBounds), "topic", _CANNOT_BE_READ)
position: Endpoint[LogPosition] = Endpoint(
    "GET /topic/bounds", json_object(_position), "topic at", _CANNOT_BE_READ
)
"""The bounds of a topic's log, and the sequence of a position."""
read: Endpoint[list[Line]] = Endpoint(
    "GET /topic/read", _messages, "topic start=from count=max_messages", _CANNOT_BE_READ
)
log: Endpoint[bytes] = Endpoint(
    "GET /topic/read", raw, "topic start=from until format wait max_messages max_bytes", _CANNOT_BE_READ
)
"""The log of a topic as it is sent: the `format` raw has records, else there are JSON lines."""
peek: Endpoint[list[Line]] = Endpoint(
    "GET /channel/peek",
    _channel_messages,
    "topic channel count=max_messages states=state",
    "cannot show the messages of a channel",
)
"""The messages that a channel delivers next."""
deferred: Endpoint[list[Line]] = Endpoint(
    "GET /channel/deferred", _channel_messages, "topic channel count=max_messages", _NO_DEFERRED
)
"""The deferred messages of a channel that are due first."""
cancel_deferred: Endpoint[list[str]] = Endpoint(
    "POST /channel/deferred/cancel",
    json_object(value_of("cancelled", list[str])),
    "topic channel ids=id",
    _NO_DEFERRED,
)
"""Drop deferred messages of a channel; the answer has the ids of those that were deferred."""


def deferred_counts(topic: str, channel: str, before: Sequence[int]) -> Request[DeferredCounts]:
    """Count the deferred messages of a channel that are due before each of these times, in Unix seconds."""
    query = {"topic": topic, "channel": channel, "before": ",".join(f"@{each}" for each in before)}
    read = json_object(partial(_deferred_counts, len(before)))
    return Request("GET", "/channel/deferred/counts", read, query, lacking=_NO_DEFERRED)


# ---------------------------------------------------------------------- dead letters

_CHOSEN = "topic origin reason start=from"
"""The letters of an origin, `TOPIC` or `TOPIC/CHANNEL`, and with a reason; from a sequence on."""
_SOME = f"{_CHOSEN} count=max_messages ids=id"
dead_letter_topics: Endpoint[list[DeadLetterTopic]] = Endpoint(
    "GET /dead_letters", json_object(value_of("topics", list[DeadLetterTopic])), "", _NO_DEAD_LETTERS
)
count_dead_letters: Endpoint[LetterCounts] = Endpoint(
    "GET /dead_letters", _json(LetterCounts), _CHOSEN, _NO_DEAD_LETTERS
)
"""The numbers of letters by origin and reason."""
dead_letters: Endpoint[list[Line]] = Endpoint(
    "GET /dead_letters/messages",
    json_lines(partial(_line, DeadLetter, or_gap=False)),
    _SOME,
    _NO_DEAD_LETTERS,
)
move_dead_letters: dict[str, Endpoint[LettersMoved]] = {
    verb: Endpoint(
        f"POST /dead_letters/{verb}",
        json_object(partial(_letters_moved, done)),
        f"{_SOME} to",
        _NO_DEAD_LETTERS,
    )
    for verb, done in DONE.items()
}
"""Requeue letters `to` the channel of their origin, or all channels of its topic; or drop them."""

# ---------------------------------------------------------------------- publishing

publish: Endpoint[bytes] = Endpoint("POST /pub", raw, "topic defer_ms=defer")
publish_batch: Endpoint[bytes] = Endpoint(
    "POST /mpub", raw, "topic producer binary number first defer_ms=defer instance"
)
"""The body has the number of messages, and then the messages."""
publish_with_headers: Endpoint[bytes] = Endpoint(
    "POST /hpub", raw, "topic producer number first defer_ms=defer instance"
)
"""The body is that of an HPUB, see `protocol/headers.py`. An nsqd and older brokers do not know the path."""
producer_state: Endpoint[ProducerState] = Endpoint(
    "GET /topic/producer", _json(ProducerState), "topic producer"
)
forget_producer: Endpoint[bytes] = Endpoint("POST /topic/producer/forget", raw, "topic producer")

# ---------------------------------------------------------------------- moves of topics

move_of: Endpoint[Move | None] = Endpoint("GET /topic/move", json_object(_move_or_none), "topic")
begin_move: Endpoint[Move] = Endpoint("POST /topic/move/begin", json_object(_move), "topic to")
end_move: Endpoint[bytes] = Endpoint("POST /topic/move/end", raw, "topic move cancel")
"""With `cancel`, also if messages are left."""
next_of_move: Endpoint[bytes] = Endpoint("POST /topic/move/next", raw, "topic move channel moved max_bytes")
"""Drop the messages of a stream up to `moved`, and take the next ones."""
store_moved: Endpoint[int | None] = Endpoint(
    "POST /topic/move/store", json_object(_stored), "topic producer close"
)
"""Store the next messages of a stream; the answer is how far it is stored. With `close`, refuse further ones."""

# ---------------------------------------------------------------------- clusters

cluster: Endpoint[Cluster] = Endpoint("GET /cluster", _json(Cluster), lacking=_NO_CLUSTER)
"""The cluster and its members. Each member passes the request on to the leader."""
member: Endpoint[MemberView] = Endpoint("GET /cluster/member", _json(MemberView), lacking=_NO_CLUSTER)
"""The member itself, which answers also without a leader."""
unchecked_member: Endpoint[dict[str, Any]] = Endpoint(
    "GET /cluster/member", json_object(_object), lacking=_NO_CLUSTER
)
switch_leader: Endpoint[str] = Endpoint(
    "POST /cluster/switch", json_object(value_of("to", str)), "to", _NO_CLUSTER
)
"""Let another member lead: `to`, or one that is in sync. The answer is its id."""
remove_member: Endpoint[bytes] = Endpoint("POST /cluster/remove", raw, "member", _NO_CLUSTER)
"""Forget a member that is gone."""
promote_member: Endpoint[bytes] = Endpoint("POST /cluster/promote", raw, lacking=_NO_CLUSTER)
"""Let the member itself lead, although the leader is lost and messages may be with it."""
