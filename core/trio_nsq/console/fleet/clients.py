"""The clients of channels, asked for when a viewer opens a channel: the watcher's polls leave them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...api.broker import unchecked_stats
from ...fleet.snapshot import Snapshot
from ...fleet.stats import number, objects, text
from ..upstream.client import Upstream

_MAX_CLIENTS = 5000
"""Clients of one broker that are shown."""


@dataclass(frozen=True, slots=True)
class Client:
    """A consumer of a channel. Everything but `broker` comes from strangers.

    Attributes:
        id: Tells it apart from others of the channel.
        compression: `snappy`, `deflate` or empty.
        sample_rate: In percent; 0: all messages.
        connected_s: Unix seconds.
        in_flight, ready, finished, requeued, messages: Counts.
    """

    broker: str
    id: str
    name: str
    hostname: str
    address: str
    agent: str
    protocol: str
    tls: str
    compression: str
    sample_rate: int
    identity: str
    connected_s: int
    in_flight: int
    ready: int
    finished: int
    requeued: int
    messages: int


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of a channel on all brokers, and why some brokers did not tell theirs."""

    clients: Sequence[Client] = ()
    errors: Mapping[str, str] = field(default_factory=dict)


async def ask_clients(upstream: Upstream, snapshot: Snapshot, topic: str, channel: str) -> Clients:
    """Ask the brokers of a channel that is in the snapshot for its clients."""
    request = unchecked_stats(topic, channel, clients=True)

    results = await upstream.ask_all(snapshot.topics[topic].channels[channel].parts, request)
    clients = [
        client
        for address, stats in results.values.items()
        for client in parse_clients(address, stats, topic, channel)
    ]
    clients.sort(key=lambda client: (client.broker, client.hostname, client.id))
    return Clients(clients, {address: error.reason for address, error in results.errors.items()})


def parse_clients(broker: str, stats: Mapping[str, Any], topic: str, channel: str) -> list[Client]:
    found = _find(_find(stats, "topics", "topic_name", topic), "channels", "channel_name", channel)
    return [_client(broker, each) for each in objects(found.get("clients"))[:_MAX_CLIENTS]]


def _find(parent: Mapping[str, Any], key: str, name_key: str, name: str) -> Mapping[str, Any]:
    return next((each for each in objects(parent.get(key)) if each.get(name_key) == name), {})


def _client(broker: str, raw: Mapping[str, Any]) -> Client:
    address = text(raw, "remote_address")
    counts = ("in_flight_count", "ready_count", "finish_count", "requeue_count", "message_count")
    return Client(
        broker,
        f"{broker} {address} {text(raw, 'client_id')}",
        text(raw, "client_id") or text(raw, "name"),
        text(raw, "hostname"),
        address,
        text(raw, "user_agent"),
        text(raw, "version"),
        (text(raw, "tls_version") or "TLS") if raw.get("tls") is True else "",
        "snappy" if raw.get("snappy") is True else "deflate" if raw.get("deflate") is True else "",
        number(raw, "sample_rate"),
        text(raw, "auth_identity"),
        number(raw, "connect_ts"),
        *(number(raw, key) for key in counts),
    )
