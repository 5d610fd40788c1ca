"""The document of `/stats`, with nsqd's names, order and units (NSQ's HTTP API: /stats)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

import trio

from ..._version import __version__
from ..options import BrokerOptions
from ..server import Server
from ..session.session import Session
from ..state.channel import Channel
from ..state.channel_messages import ChannelMessages
from ..state.quantiles import Sketch
from ..state.settings import TopicSettings
from ..state.topic import Topic
from ..state.topic_limits import TopicLimits
from .forms import Dicts, Form
from .oldest import OldestMessages

_NS_PER_MS = 1_000_000
_PER_STEP = 200
"""Describing these topics, channels and clients takes about two milliseconds."""
_DICTS = Dicts()


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
    figures_only: bool = False,
    form: Form = _DICTS,
) -> dict[str, Any]:
    """Build the JSON document of `/stats`, in steps. The broker serves clients in between.

    The topics, with what they contain, and the producers are in this form; the rest is a dict.

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
        figures_only: Leave out settings, memory, and why topics are unavailable.
    """
    figures = _Figures(form, server.options, now_ns, oldest, figures_only=figures_only)
    clients_form = _Clients(form)
    topics: dict[str, Any] | None = None  # by name
    steps = count(1)

    async def clients_of(found: Topic, each: Channel) -> list[Any]:
        clients = []
        for consumer in list(each.consumers):
            session = consumer.subscriber
            if isinstance(session, Session) and session.subscription is not None:
                clients.append(clients_form.describe(session, topic or (found.name if sees else "")))
            if next(steps) % _PER_STEP == 0:
                await trio.lowlevel.checkpoint()
        return clients

    for name, found in sorted(server.broker.topics.items()):
        if next(steps) % _PER_STEP == 0:
            await trio.lowlevel.checkpoint()
        if server.broker.topics.get(name) is not found:
            continue  # deleted meanwhile
        if (topic and found.name != topic) or (sees is not None and not sees(found.name)):
            continue
        topics = {} if topics is None else topics
        lists_clients = include_clients and (reads is None or reads(found.name))
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
            clients = await clients_of(found, each) if lists_clients else None
            described.append(figures.channel(found, each, clients))
        topics[name] = figures.topic(found, described)
    if not channel or topic:
        missing = _unavailable_topics(server.broker.unavailable, topic)
        missing = {name: found for name, found in missing.items() if sees is None or sees(name)}
        if figures_only:
            missing = {name: found | {"unavailable": "unavailable"} for name, found in missing.items()}
        if missing:
            described_missing = {name: form.other(found) for name, found in missing.items()}
            topics = dict(sorted(((topics or {}) | described_missing).items()))
    unknown = topics is None and bool(topic)  # then nsqd lists nothing, not even producers
    publishing = []
    if include_clients and not unknown and sees is None:  # producers publish to any topics
        publishing = [session for session in server.sessions.connected if session.pub_counts]
    stats: dict[str, Any] = {
        "version": __version__,
        "health": server.health,
        "start_time": server.start_time_s,
        "topics": list(topics.values()) if topics is not None else None if unknown else [],
    }
    if server.broker.draining:
        stats["draining"] = True
    if sees is None and (cluster := _cluster(server)) is not None:
        stats["cluster"] = cluster
    if sees is None and server.archiving is not None:
        stats["archive"] = asdict(server.archiving.status()) | {
            "retention_waits": len(server.checkpointer.retention.waits_since_ns)
        }
    if include_mem and not figures_only:
        stats["memory"] = server.process.memory()
    producers = []
    for session in publishing:
        producers.append(clients_form.describe(session, topic))
        if next(steps) % _PER_STEP == 0:
            await trio.lowlevel.checkpoint()
    stats["producers"] = producers or None
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


def _unavailable_topics(reasons: Mapping[str, str], topic: str) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "topic_name": name,
            "channels": [],
            "depth": 0,
            "backend_depth": 0,
            "message_count": 0,
            "message_bytes": 0,
            "paused": False,
            "e2e_processing_latency": _NO_LATENCY,
            "unavailable": reason,
        }
        for name, reason in reasons.items()
        if not topic or name == topic
    }


_TOPIC = (
    "topic_name", "channels", "depth", "backend_depth", "message_count", "message_bytes", "paused",
    "e2e_processing_latency",
)  # fmt: skip
_CHANNEL = (
    "channel_name", "depth", "backend_depth", "in_flight_count", "deferred_count", "message_count", "requeue_count",
    "timeout_count", "client_count", "clients", "paused", "e2e_processing_latency",
)  # fmt: skip
_CHANNEL_WITH_AGE = (*_CHANNEL, "oldest_message_age_ms")
_SENT_TO = "zone_local_msg_count", "region_local_msg_count", "global_msg_count"
_NO_LATENCY = {"count": 0, "percentiles": None}
_USUAL_SETTINGS = TopicSettings()


class _Figures:
    """Describes topics and channels."""

    def __init__(
        self,
        form: Form,
        options: BrokerOptions,
        now_ns: int,
        oldest: OldestMessages | None,
        *,
        figures_only: bool,
    ) -> None:
        self._form = form
        self._no_latency = form.other(_NO_LATENCY)
        self._fractions = options.e2e_processing_latency_percentiles
        self._knows_place = bool(options.topology_region or options.topology_zone)
        self._now_ns = now_ns
        self._oldest = oldest
        self._figures_only = figures_only

    def topic(self, topic: Topic, channels: list[Any]) -> Any:
        form = self._form
        values = (
            form.text(topic.name), form.listed(channels), topic.depth, topic.backend_depth, topic.message_count,
            topic.message_bytes, form.boolean(topic.paused), self._latency(topic.channels.values()),
        )  # fmt: skip
        more = self._more_of_topic(topic)
        return form.describe(_TOPIC, values, form.fields(more) if more else None)

    def _more_of_topic(self, topic: Topic) -> dict[str, Any]:
        """Return the fields that only some topics have."""
        if self._figures_only:
            return {"deferred_count": topic.deferred_count} if topic.deferred_count else {}
        stats: dict[str, Any] = {}
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

    def channel(self, topic: Topic, channel: Channel, clients: list[Any] | None) -> Any:
        form = self._form
        names: tuple[str, ...] = _CHANNEL
        values: tuple[Any, ...] = (
            form.text(channel.name), *channel.counts(), form.listed(clients), form.boolean(channel.paused),
            self._latency([channel]),
        )  # fmt: skip
        if self._oldest is not None:
            age_ns = self._oldest.age_ns(channel, self._now_ns)
            names, values = _CHANNEL_WITH_AGE, (*values, form.other(age_ns and age_ns // _NS_PER_MS))
        more = self._more_of_channel(topic, channel)
        return form.describe(names, values, form.fields(more) if more else None)

    def _more_of_channel(self, topic: Topic, channel: Channel) -> dict[str, Any]:
        """Return the fields that only some channels have."""
        stats: dict[str, Any] = {}
        if self._figures_only:
            return stats
        if channel.settings.max_attempts or channel.dead_letter_count or channel.given_up_count:
            stats |= {
                "max_attempts": channel.settings.max_attempts,
                "dead_letter_topic": channel.settings.dead_letter_topic,
                "dead_letter_count": channel.dead_letter_count,
                "given_up_count": channel.given_up_count,
            }
        if rate := channel.settings.rate_limit_per_s:
            stats |= {"rate_limit_per_s": rate, "rate_limited": channel.dispatcher.resumes_ns is not None}
        if channel.settings.expire_idle_ms:
            stats["expire_idle_ms"] = channel.settings.expire_idle_ms
        if self._knows_place:
            stats |= zip(_SENT_TO, channel.sent_by_nearness(), strict=True)
        if channel.settings.order_by:
            stats["order_by"] = channel.settings.order_by
            stats["blocked_count"] = channel.messages.blocked_count
        return stats | _losses(topic.settings, channel.messages)

    def _latency(self, channels: Iterable[Channel]) -> Any:
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
            return self._no_latency
        values_ns = merged.quantiles(self._fractions)
        percentiles = [
            {"quantile": int(f) if f == int(f) else f, "value": v}  # 1, as Go writes it
            for f, v in zip(self._fractions, values_ns, strict=True)
        ]
        return self._form.other({"count": merged.count, "percentiles": percentiles})


def _non_default_settings(settings: TopicSettings) -> dict[str, Any]:
    """Return the settings of a topic that differ from nsqd's behaviour."""
    if settings == _USUAL_SETTINGS:
        return {}
    usual = asdict(_USUAL_SETTINGS)
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


_CLIENT = (
    "client_id", "hostname", "version", "remote_address", "state", "ready_count", "in_flight_count", "message_count",
    "finish_count", "requeue_count", "connect_ts", "sample_rate", "deflate", "snappy", "user_agent",
)  # fmt: skip
_NO_TLS = {
    "tls": False,
    "tls_cipher_suite": "",
    "tls_version": "",
    "tls_negotiated_protocol": "",
    "tls_negotiated_protocol_is_mutual": False,
}


class _Clients:
    """Describes clients. `topic`: show only publishes to this one; empty: all."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._v2 = form.text("V2")
        self._no_tls = form.fields(_NO_TLS)

    def describe(self, client: Session, topic: str) -> Any:
        text, boolean = self._form.text, self._form.boolean
        handshake, subscription = client.handshake, client.subscription
        request, upgrades = handshake.identity, handshake.upgrades
        counts = _NO_COUNTS
        if subscription is not None:
            consumer = subscription.consumer
            counts = (
                consumer.ready_count, consumer.in_flight.count, consumer.message_count, consumer.finish_count,
                consumer.requeue_count,
            )  # fmt: skip
        values = (
            text(request.client_id), text(request.hostname), self._v2, text(client.peer), client.reader.state.value,
            *counts, client.connected_s, handshake.settings.sample_rate, boolean(upgrades.deflate),
            boolean(upgrades.snappy), text(request.user_agent),
        )  # fmt: skip
        usual = client.transport.tls is None and client.authorizer.identity is None
        if usual and not (client.pub_counts or request.topology_region or request.topology_zone):
            more = self._no_tls
        else:
            more = self._form.fields(_more_of_client(client, topic))
        return self._form.describe(_CLIENT, values, more)


def _more_of_client(client: Session, topic: str) -> dict[str, Any]:
    tls, identity = client.transport.tls, client.authorizer.identity
    more: dict[str, Any] = {}
    request = client.handshake.identity
    if request.topology_region or request.topology_zone:
        more |= {"topology_region": request.topology_region, "topology_zone": request.topology_zone}
    if identity is not None:
        more["authed"] = True
        about = {"auth_identity": identity.name, "auth_identity_url": identity.url}
        more |= {name: text for name, text in about.items() if text}
    # All topics the client has published to; nsqd lists one of them.
    counts = [
        {"topic": t, "count": n} for t, n in sorted(client.pub_counts.items()) if not topic or t == topic
    ]
    if counts:
        more["pub_counts"] = counts
    if tls is None:
        return more | _NO_TLS
    return more | {
        "tls": True,
        "tls_cipher_suite": tls.cipher_suite,
        "tls_version": tls.version,
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": True,  # as Go reports for every session
    }


_NO_COUNTS = (0, 0, 0, 0, 0)
