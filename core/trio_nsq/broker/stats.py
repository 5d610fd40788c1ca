"""What `/stats` says, in nsqd's names, order and units (NSQ's HTTP API: /stats)."""

from collections.abc import Iterable
from typing import Any

from .channel import Channel
from .connection import Connection
from .server import Server
from .topic import Topic


def broker_stats(
    server: Server, *, topic: str = "", channel: str = "", include_clients: bool = True
) -> dict[str, Any]:
    """The JSON document of `/stats`.

    Args:
        topic: Only this topic; empty for all. With a name that is unknown `topics` is None, as in nsqd.
        channel: Only this channel of each topic, and only topics that have it; empty for all.
        include_clients: Whether to list the clients of channels, and the producers.
    """
    by_consumer = {c.consumer: c for c in server.connections if c.consumer is not None}
    topics: list[dict[str, Any]] | None = None
    for _, found in sorted(server.broker.topics.items()):
        if topic and found.name != topic:
            continue
        topics = [] if topics is None else topics
        channels = [found.channels[channel]] if channel in found.channels else []
        if not channel:
            channels = [c for _, c in sorted(found.channels.items())]
        if channel and not channels:
            continue
        described = []
        for each in channels:
            clients = [by_consumer[c] for c in each.consumers if c in by_consumer]
            described.append(_channel(each, clients if include_clients else None))
        topics.append(_topic(found, described))
    publishing = [c for c in server.connections if c.pub_counts] if include_clients else []
    return {
        "version": server.version,
        "health": server.health,
        "start_time": server.start_time_s,
        "topics": topics if topics is not None or topic else [],
        "producers": [_client(c, topic) for c in publishing] or None,
    }


def _topic(topic: Topic, channels: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "topic_name": topic.name,
        "channels": channels,
        "depth": topic.depth,
        "backend_depth": topic.backend_depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }


def _channel(channel: Channel, clients: Iterable[Connection] | None) -> dict[str, Any]:
    return {
        "channel_name": channel.name,
        "depth": channel.depth,
        "backend_depth": channel.backend_depth,
        "in_flight_count": channel.in_flight_count,
        "deferred_count": channel.deferred_count,
        "message_count": channel.message_count,
        "requeue_count": channel.requeue_count,
        "timeout_count": channel.timeout_count,
        "client_count": len(channel.consumers),
        "clients": None if clients is None else [_client(c, "") for c in clients],
        "paused": channel.paused,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }


def _client(client: Connection, topic: str) -> dict[str, Any]:
    consumer = client.consumer
    stats: dict[str, Any] = {
        "client_id": client.identity.client_id,
        "hostname": client.identity.hostname,
        "version": "V2",
        "remote_address": client.peer,
        "state": int(client.state),
        "ready_count": consumer.ready_count if consumer else 0,
        "in_flight_count": len(consumer.in_flight) if consumer else 0,
        "message_count": consumer.message_count if consumer else 0,
        "finish_count": consumer.finish_count if consumer else 0,
        "requeue_count": consumer.requeue_count if consumer else 0,
        "connect_ts": client.connected_s,
        "sample_rate": client.settings.sample_rate,
        "deflate": False,
        "snappy": False,
        "user_agent": client.identity.user_agent,
    }
    # All topics it published to; nsqd shows one of them.
    counts = [
        {"topic": t, "count": n} for t, n in sorted(client.pub_counts.items()) if not topic or t == topic
    ]
    if counts:
        stats["pub_counts"] = counts
    stats |= {
        "tls": False,
        "tls_cipher_suite": "",
        "tls_version": "",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": False,
    }
    return stats
