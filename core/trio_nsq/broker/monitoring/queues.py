"""The topics and channels of `/stats`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from ..options import BrokerOptions
from ..state.channel import Channel
from ..state.channel_messages import ChannelMessages
from ..state.quantiles import Sketch
from ..state.settings import TopicSettings
from ..state.topic import Topic
from ..state.topic_limits import TopicLimits
from .forms import Form, Layout
from .oldest import OldestMessages

_NS_PER_MS: Final = 1_000_000
_TOPIC: Final[Layout] = {
    "topic_name": str,
    "channels": list,
    "depth": int,
    "backend_depth": int,
    "message_count": int,
    "message_bytes": int,
    "paused": bool,
    "e2e_processing_latency": dict,
}
_CHANNEL: Final[Layout] = {
    "channel_name": str,
    "depth": int,
    "backend_depth": int,
    "in_flight_count": int,
    "deferred_count": int,
    "message_count": int,
    "requeue_count": int,
    "timeout_count": int,
    "client_count": int,
    "clients": list,
    "paused": bool,
    "e2e_processing_latency": dict,
}
_CHANNEL_WITH_AGE: Final[Layout] = {**_CHANNEL, "oldest_message_age_ms": object}
_SENT_TO: Final = "zone_local_msg_count", "region_local_msg_count", "global_msg_count"
_NO_LATENCY: Final[Mapping[str, Any]] = {"count": 0, "percentiles": None}
_USUAL_SETTINGS: Final = TopicSettings()


class QueueDescriber:
    """Describes topics and channels in some form.

    Args:
        now_ns: Unix nanoseconds by the wall clock.
    """

    def __init__(self, options: BrokerOptions, now_ns: int) -> None:
        self.fractions: Final = options.e2e_processing_latency_percentiles
        self._now_ns: Final = now_ns

    def topic(self, topic: Topic, channels: list[Any]) -> Any:
        """Describe a topic, with its channels as described."""
        raise NotImplementedError

    def unavailable(self, name: str, reason: str) -> Any:
        """Describe a topic that cannot be used, and why."""
        raise NotImplementedError

    def channel(self, topic: Topic, channel: Channel, clients: list[Any] | None) -> Any:
        """Describe a channel, with its clients as a `ClientDescriber` of the same form returns them; None: left out."""
        raise NotImplementedError

    def latency(self, channels: Iterable[Channel]) -> tuple[int, list[int]] | None:
        """Merge the latencies of these channels.

        Returns how many messages were measured, and nanoseconds, for each of `fractions`. None: none is measured.
        """
        merged: Sketch | None = None
        for channel in channels:
            if channel.e2e_latency is not None:
                recent = channel.e2e_latency.recent(self._now_ns)
                if merged is None:
                    merged = recent
                else:
                    merged.merge(recent)
        return None if merged is None else (merged.count, merged.quantiles(self.fractions))


class Queues(QueueDescriber):
    """Describes topics and channels as objects, in a form.

    Args:
        now_ns: Unix nanoseconds by the wall clock.
        oldest: The ages of messages, refreshed just before; None: leave them out.
        figures_only: Leave out settings.
    """

    def __init__(
        self,
        form: Form,
        options: BrokerOptions,
        now_ns: int,
        oldest: OldestMessages | None,
        *,
        figures_only: bool,
    ) -> None:
        super().__init__(options, now_ns)
        self._form = form
        self._topic = form.prepared(_TOPIC)
        self._channel = form.prepared(_CHANNEL if oldest is None else _CHANNEL_WITH_AGE)
        self._no_latency = form.other(_NO_LATENCY)
        self._knows_place = bool(options.topology_region or options.topology_zone)
        self._oldest = oldest
        self._figures_only = figures_only

    def topic(self, topic: Topic, channels: list[Any]) -> Any:
        form = self._form
        values = (
            form.text(topic.name), form.listed(channels), topic.depth, topic.backend_depth, topic.message_count,
            topic.message_bytes, form.boolean(topic.paused), self._latency(topic.channels.values()),
        )  # fmt: skip
        more = self._more_of_topic(topic)
        return form.describe(self._topic, values, form.fields(more) if more else None)

    def unavailable(self, name: str, reason: str) -> Any:
        form = self._form
        values = form.text(name), form.listed([]), 0, 0, 0, 0, form.boolean(False), self._no_latency
        return form.describe(self._topic, values, form.fields({"unavailable": reason}))

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
        depth, backend_depth, in_flight, deferred, messages, requeued, timed_out, count = channel.counts()
        values: tuple[Any, ...] = (
            form.text(channel.name), depth, backend_depth, in_flight, deferred, messages, requeued, timed_out, count,
            form.listed(clients), form.boolean(channel.paused), self._latency([channel]),
        )  # fmt: skip
        if self._oldest is not None:
            age_ns = self._oldest.age_ns(channel, self._now_ns)
            values = (*values, form.optional(None if age_ns is None else age_ns // _NS_PER_MS))
        more = self._more_of_channel(topic, channel)
        return form.describe(self._channel, values, form.fields(more) if more else None)

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
        """Describe the latencies of these channels. If none is measured, `percentiles` is None."""
        measured = self.latency(channels)
        if measured is None:
            return self._no_latency
        count, values_ns = measured
        percentiles = [
            {"quantile": int(f) if f == int(f) else f, "value": v}  # 1, as Go writes it
            for f, v in zip(self.fractions, values_ns, strict=True)
        ]
        return self._form.other({"count": count, "percentiles": percentiles})


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
