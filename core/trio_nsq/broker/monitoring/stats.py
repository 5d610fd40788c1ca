"""The document of `/stats`, with nsqd's names, order and units (NSQ's HTTP API: /stats)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from operator import itemgetter
from typing import Any

import trio

from ..._version import __version__
from ..server import Server
from ..session.session import Session
from ..state.channel import Channel
from ..state.channel_messages import ChannelMessages
from ..state.quantiles import Sketch
from ..state.settings import TopicSettings
from ..state.topic import Topic
from ..state.topic_limits import TopicLimits
from .oldest import OldestMessages

_NS_PER_MS = 1_000_000
_PER_STEP = 50
"""Describing these topics and channels takes about two milliseconds."""


async def broker_stats(
    server: Server,
    now_ns: int,
    *,
    oldest: OldestMessages | None = None,
    topic: str = "",
    channel: str = "",
    include_clients: bool = True,
    include_mem: bool = True,
    sees: Callable[[str], bool] | None = None,
    reads: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Build the JSON document of `/stats`, in steps. The broker serves clients in between.

    Fields that nsqd does not have are present only if they apply. An unavailable topic has the reason under
    `unavailable`, no channels, and 0 for all counts.

    Args:
        now_ns: Unix nanoseconds by the wall clock.
        oldest: The ages of messages, refreshed just before; None: leave them out.
        topic: Only this topic; empty for all. If the topic does not exist, `topics` is None, as in nsqd.
        channel: Only this channel of each topic, and only topics that have it; empty for all.
        include_clients: List the clients of channels, and the producers.
        sees: Whether the reader may know a topic of this name; None: all.
        reads: Whether the reader may know the clients of a topic; None: all.
    """
    by_consumer = {
        s.subscription.consumer: s for s in server.sessions.connected if s.subscription is not None
    }
    figures = _Figures(server.options.e2e_processing_latency_percentiles, now_ns, oldest)
    topics: list[dict[str, Any]] | None = None
    steps = count(1)
    for name, found in sorted(server.broker.topics.items()):
        if next(steps) % _PER_STEP == 0:
            await trio.lowlevel.checkpoint()
        if server.broker.topics.get(name) is not found:
            continue  # deleted meanwhile
        if (topic and found.name != topic) or (sees is not None and not sees(found.name)):
            continue
        topics = [] if topics is None else topics
        channels = [found.channels[channel]] if channel in found.channels else []
        if not channel:
            channels = [c for _, c in sorted(found.channels.items())]
        if channel and not channels:
            continue
        described = []
        for each in channels:
            if next(steps) % _PER_STEP == 0:
                await trio.lowlevel.checkpoint()
            if found.channels.get(each.name) is not each:
                continue
            clients = [by_consumer[c] for c in each.consumers if c in by_consumer]
            listed = (
                [_client(c, topic or (found.name if sees else "")) for c in clients]
                if include_clients and (reads is None or reads(found.name))
                else None
            )
            described.append(figures.channel(found, each, listed))
        topics.append(figures.topic(found, described))
    if not channel or topic:
        missing = _unavailable_topics(server.broker.unavailable, topic)
        missing = [each for each in missing if sees is None or sees(each["topic_name"])]
        if missing:
            topics = sorted([*(topics or ()), *missing], key=itemgetter("topic_name"))
    unknown = topics is None and bool(topic)  # then nsqd lists nothing, not even producers
    publishing = []
    if include_clients and not unknown and sees is None:  # producers publish to any topics
        publishing = [session for session in server.sessions.connected if session.pub_counts]
    stats: dict[str, Any] = {
        "version": __version__,
        "health": server.health,
        "start_time": server.start_time_s,
        "topics": topics if topics is not None or unknown else [],
    }
    if server.broker.draining:
        stats["draining"] = True
    if sees is None and (cluster := _cluster(server)) is not None:
        stats["cluster"] = cluster
    if sees is None and server.archiving is not None:
        stats["archive"] = asdict(server.archiving.status()) | {
            "retention_waits": len(server.checkpointer.retention.waits_since_ns)
        }
    if include_mem:
        stats["memory"] = server.process.memory()
    stats["producers"] = [_client(c, topic) for c in publishing] or None
    return stats


def _cluster(server: Server) -> dict[str, Any] | None:
    """Describe the cluster that the broker leads, in short; None: it is no member of one."""
    if server.replication is None or server.replication.control is None:
        return None
    status = server.replication.control.status()
    members = status["members"]
    return {
        "name": status["cluster"],
        "epoch": status["epoch"],
        "role": "leader",
        "in_sync": sum(each["in_sync"] and each["state"] != "disconnected" for each in members),
        "members": len(members),
    }


def _unavailable_topics(reasons: Mapping[str, str], topic: str) -> list[dict[str, Any]]:
    return [
        {
            "topic_name": name,
            "channels": [],
            "depth": 0,
            "backend_depth": 0,
            "message_count": 0,
            "message_bytes": 0,
            "paused": False,
            "e2e_processing_latency": {"count": 0, "percentiles": None},
            "unavailable": reason,
        }
        for name, reason in reasons.items()
        if not topic or name == topic
    ]


class _Figures:
    """Describes topics and channels. `fractions` are the quantiles of the end-to-end latency; empty if not measured."""

    def __init__(self, fractions: Sequence[float], now_ns: int, oldest: OldestMessages | None) -> None:
        self._fractions = fractions
        self._now_ns = now_ns
        self._oldest = oldest

    def topic(self, topic: Topic, channels: list[dict[str, Any]]) -> dict[str, Any]:
        stats = {
            "topic_name": topic.name,
            "channels": channels,
            "depth": topic.depth,
            "backend_depth": topic.backend_depth,
            "message_count": topic.message_count,
            "message_bytes": topic.message_bytes,
            "paused": topic.paused,
            "e2e_processing_latency": self._latency(topic.channels.values()),
        }
        if topic.settings.keeps:
            log = topic.log
            kept = {
                "first_sequence": log.first_sequence,
                "log_bytes": log.size_bytes,
                "log_files": len(log.files),
            }
            stats |= kept
        if topic.log.archived_files:
            stats["first_sequence"] = topic.log.first_sequence
            stats["disk_first_sequence"] = topic.log.disk_first_sequence
            stats["archived_bytes"] = topic.log.archived_bytes
        if topic.deferred_count:
            stats["deferred_count"] = topic.deferred_count
        if topic.moving.current is not None:
            stats["moving_to"] = topic.moving.current.to
        return stats | _non_default_settings(topic.settings) | _losses(topic.settings, topic.limits)

    def channel(self, topic: Topic, channel: Channel, clients: list[dict[str, Any]] | None) -> dict[str, Any]:
        stats = {
            "channel_name": channel.name,
            "depth": channel.depth,
            "backend_depth": channel.backend_depth,
            "in_flight_count": channel.in_flight_count,
            "deferred_count": channel.deferred_count,
            "message_count": channel.message_count,
            "requeue_count": channel.requeue_count,
            "timeout_count": channel.timeout_count,
            "client_count": len(channel.consumers),
            "clients": clients,
            "paused": channel.paused,
            "e2e_processing_latency": self._latency([channel]),
        }
        if self._oldest is not None:
            age_ns = self._oldest.age_ns(channel, self._now_ns)
            stats["oldest_message_age_ms"] = None if age_ns is None else age_ns // _NS_PER_MS
        if channel.settings.max_attempts or channel.dead_letter_count or channel.given_up_count:
            stats |= {
                "max_attempts": channel.settings.max_attempts,
                "dead_letter_topic": channel.settings.dead_letter_topic,
                "dead_letter_count": channel.dead_letter_count,
                "given_up_count": channel.given_up_count,
            }
        return stats | _losses(topic.settings, channel.messages)

    def _latency(self, channels: Iterable[Channel]) -> dict[str, Any]:
        """Merge the latencies of these channels. If none is measured, `percentiles` is None."""
        merged: Sketch | None = None
        for channel in channels:
            if channel.e2e_latency is not None:
                recent = channel.e2e_latency.recent(self._now_ns)
                if merged is None:
                    merged = recent
                else:
                    merged.merge(recent)
        if merged is None:
            return {"count": 0, "percentiles": None}
        values_ns = merged.quantiles(self._fractions)
        return {
            "count": merged.count,
            "percentiles": [
                {"quantile": int(f) if f == int(f) else f, "value": v}  # 1, as Go writes it
                for f, v in zip(self._fractions, values_ns, strict=True)
            ],
        }


def _non_default_settings(settings: TopicSettings) -> dict[str, Any]:
    """Return the settings of a topic that differ from nsqd's behaviour."""
    usual = asdict(TopicSettings())
    found = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    return found | ({"when_full": settings.when_full} if settings.is_limited else {})


def _losses(settings: TopicSettings, where: TopicLimits | ChannelMessages) -> dict[str, int]:
    """Return the counts of expired and dropped messages, if the settings allow such losses or a count is not 0."""
    losses = {}
    if settings.ttl_ms or where.expired_count:
        losses["expired_count"] = where.expired_count
    if settings.drops or where.dropped_count:
        losses["dropped_count"] = where.dropped_count
    return losses


def _client(client: Session, topic: str) -> dict[str, Any]:
    tls, identity = client.transport.tls, client.authorizer.identity
    handshake, subscription = client.handshake, client.subscription
    consumer = subscription.consumer if subscription is not None else None
    stats: dict[str, Any] = {
        "client_id": handshake.identity.client_id,
        "hostname": handshake.identity.hostname,
        "version": "V2",
        "remote_address": client.peer,
        "state": int(client.reader.state),
        "ready_count": consumer.ready_count if consumer else 0,
        "in_flight_count": len(consumer.in_flight) if consumer else 0,
        "message_count": consumer.message_count if consumer else 0,
        "finish_count": consumer.finish_count if consumer else 0,
        "requeue_count": consumer.requeue_count if consumer else 0,
        "connect_ts": client.connected_s,
        "sample_rate": handshake.settings.sample_rate,
        "deflate": handshake.upgrades.deflate,
        "snappy": handshake.upgrades.snappy,
        "user_agent": handshake.identity.user_agent,
    }
    if identity is not None:
        stats["authed"] = True
        about = {"auth_identity": identity.name, "auth_identity_url": identity.url}
        stats |= {name: text for name, text in about.items() if text}
    # All topics the client has published to; nsqd lists one of them.
    counts = [
        {"topic": t, "count": n} for t, n in sorted(client.pub_counts.items()) if not topic or t == topic
    ]
    if counts:
        stats["pub_counts"] = counts
    stats |= {
        "tls": tls is not None,
        "tls_cipher_suite": tls.cipher_suite if tls is not None else "",
        "tls_version": tls.version if tls is not None else "",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": tls is not None,  # as Go reports for every session
    }
    return stats
