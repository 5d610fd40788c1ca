"""Deletes topics and channels that have been idle for as long as their setting `expire_idle` says."""

import logging
from dataclasses import dataclass, field
from typing import Final

import trio

from ..access.audit import AuditLog
from ..text.durations import duration_text
from .clock import BrokerClock
from .errors import PublishRefused, SaveError
from .ingest.write_path import WritePath
from .state.broker import Broker
from .state.channel import Channel
from .state.topic import Topic
from .topic_registry import TopicRegistry

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000
_EXAMINATIONS: Final = 10
"""Examinations in the shortest time that a topic or channel may be idle, within the next limits."""
_SHORTEST_S, _LONGEST_S = 1.0, 10.0
_AFTER_START_NS: Final = 3_600 * _NS_PER_S
"""Nothing is deleted within this time after a start, or within half of its own time if that is shorter: consumers and
producers connect again."""
_AT_ONCE: Final = 200
"""Topics and channels examined before the event loop serves other tasks."""


@dataclass(eq=False, slots=True)
class IdleExpiry:
    """Deletes idle topics and channels. One for a broker.

    Attributes:
        started_ns: When the broker started, by `clock`.
    """

    broker: Broker
    topics: TopicRegistry
    write_path: WritePath
    clock: BrokerClock
    audit: AuditLog
    started_ns: int
    # Logged errors, by what was not deleted.
    _failed: dict[str, str] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Examine all topics again and again; runs until cancelled."""
        interval_s = _LONGEST_S
        while True:
            await trio.sleep(interval_s)
            shortest_ms = await self._examine()
            interval_s = _LONGEST_S
            if shortest_ms:
                interval_s = min(_LONGEST_S, max(_SHORTEST_S, shortest_ms / 1000 / _EXAMINATIONS))

    async def _examine(self) -> int:
        """Delete what has been idle for long enough. Returns the shortest time of all settings, 0 if there is none."""
        shortest_ms = examined = 0
        for topic in list(self.broker.topics.values()):
            examined += 1 + len(topic.channels)
            if examined >= _AT_ONCE:
                examined = 0
                await trio.lowlevel.checkpoint()
            times_ms = [topic.settings.expires_after_ms]
            times_ms += [channel.settings.expire_idle_ms for channel in topic.channels.values()]
            if topic.ephemeral or not any(times_ms) or not self.broker.serves(topic):
                continue
            shortest_ms = min(filter(None, [shortest_ms, *times_ms]))
            try:
                await self._expire(topic)
            except Exception:
                # A defect in the broker must not end the expiry of other topics.
                logger.exception("topic %s: looking for what is idle failed", topic.name)
        return shortest_ms

    async def _expire(self, topic: Topic) -> None:
        """Delete a topic, or some of its channels, if they have been idle for long enough."""
        topic.examine_use(self.clock.now_ns())
        if not await self._expire_topic(topic):
            for channel in list(topic.channels.values()):
                await self._expire_channel(topic, channel)

    async def _expire_topic(self, topic: Topic) -> bool:
        """Delete a topic if it has been idle for long enough; returns whether it has."""
        after_ms = topic.settings.expires_after_ms

        def is_idle(each: Topic) -> bool:
            return each not in self.broker.incomplete and self._is_over(each.idle_since_ns, after_ms)

        if not is_idle(topic):
            return False
        try:
            self.write_path.refuse_changes()
            is_deleted = await self.topics.delete_topic(topic, only_if=is_idle)
        except (OSError, PublishRefused) as exc:
            self._report(f"topic {topic.name}", exc)
            return False
        if is_deleted:
            self._record(topic.name, "", after_ms)
        return is_deleted

    async def _expire_channel(self, topic: Topic, channel: Channel) -> None:
        after_ms = channel.settings.expire_idle_ms
        if channel.ephemeral:
            return

        def is_idle(each: Channel) -> bool:
            # Messages that wait for the end of a pause of the topic are those of the channel, too.
            return not each.topic.has_undistributed and self._is_over(each.idle_since_ns, after_ms)

        if not is_idle(channel):
            return
        try:
            is_deleted = await self.topics.delete_channel_if(channel, is_idle)
        except (SaveError, PublishRefused) as exc:
            self._report(f"channel {topic.name}/{channel.name}", exc)
            return
        if is_deleted:
            self._record(topic.name, channel.name, after_ms)

    def _is_over(self, since_ns: int, after_ms: int) -> bool:
        now_ns, after_ns = self.clock.now_ns(), after_ms * _NS_PER_MS
        is_started = now_ns - self.started_ns >= min(after_ns // 2, _AFTER_START_NS)
        return bool(after_ms and since_ns and is_started and now_ns - since_ns >= after_ns)

    def _record(self, topic: str, channel: str, after_ms: int) -> None:
        what = f"channel {topic}/{channel}" if channel else f"topic {topic}"
        self._failed.pop(what, None)
        logger.info("%s is deleted: it was idle for %s", what, duration_text(after_ms))
        self.audit.record("expired", "", None, topic=topic, channel=channel)

    def _report(self, what: str, error: Exception) -> None:
        """Log an error, unless the last attempt had the same."""
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if self._failed.get(what) != text:
            self._failed[what] = text
            logger.error("%s is idle and cannot be deleted: %s", what, text)
