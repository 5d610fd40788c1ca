"""Limits on the number, size and age of a topic's waiting messages: publishes are refused or messages dropped."""

from collections.abc import Collection, Iterable

from ...log import Log
from .channel import Channel
from .settings import TopicSettings
from .topic_view import TopicView
from .undistributed import UndistributedMessages


class TopicLimits:
    """The limits of one topic.

    Attributes:
        settings: The settings in force; set by the topic.
        expired_count: Messages older than `ttl_ms` dropped before any channel had them, since the broker started.
        dropped_count: Messages dropped to make room before any channel had them, since the broker started.
    """

    def __init__(
        self,
        topic: TopicView,
        log: Log,
        undistributed: UndistributedMessages,
        channels: dict[str, Channel],
        private: dict[str, Channel],
    ) -> None:
        self.settings: TopicSettings = TopicSettings()
        self.expired_count: int = 0
        self.dropped_count: int = 0
        self._topic = topic
        self._log = log
        self._undistributed = undistributed
        self._channels = channels
        self._private = private

    @property
    def shared(self) -> Collection[Channel]:
        """The channels that are not private."""
        channels = self._channels.values()
        return [channel for channel in channels if not channel.private] if self._private else channels

    def oldest_of(self, channels: Iterable[Channel]) -> int:
        """Return the oldest sequence that one of these channels has not delivered, or that no channel has."""
        return min([self._topic.high_watermark, *[channel.cursor for channel in channels]])

    def why_full(self, messages: int, size: int, coming_messages: int = 0, coming_bytes: int = 0) -> str:
        """Return why a publish must be refused, or an empty string if it may proceed.

        Args:
            messages, size: Messages to publish, and the bytes of their records.
            coming_messages, coming_bytes: Messages that are being appended; they count as waiting.
        """
        limits = self.settings
        if self.settings.drops:
            return ""
        if limits.max_messages:
            waiting = self._undistributed.depth + max((channel.depth for channel in self.shared), default=0)
            waiting += coming_messages
            if waiting + messages > limits.max_messages:
                return self._no_room(waiting, messages, "messages", limits.max_messages)
        if limits.max_bytes:
            waiting = self._log.bytes_from(self.oldest_of(self.shared)) + coming_bytes
            if waiting + size > limits.max_bytes:
                return self._no_room(waiting, size, "bytes", limits.max_bytes)
        return ""

    def _no_room(self, waiting: int, more: int, unit: str, limit: int) -> str:
        if more > limit:
            return f"topic {self._topic.name} cannot take {more} {unit} at once: max_{unit} is {limit}"
        full = f"topic {self._topic.name} is full"
        return f"{full}: {waiting} {unit} wait, {more} more are too many: max_{unit} is {limit}"

    def _waiting_bytes(self) -> int:
        return self._log.bytes_from(self.oldest_of(self._channels.values()))

    def make_room(self) -> None:
        """Drop the oldest ready messages that exceed the limits.

        Applies to private channels, and with `drop-oldest` also to the other channels and undistributed messages.
        """
        if not self._topic.is_limited:
            return
        limits, drops = self.settings, self.settings.drops
        if not (drops or self._private):
            return
        channels = self._channels if drops else self._private
        if limits.max_messages:
            for channel in channels.values():
                waiting = channel.depth + (0 if channel.private else self._undistributed.depth)
                if (excess := waiting - limits.max_messages) > 0:
                    channel.messages.drop_oldest(min(excess, channel.messages.droppable_count))
            if drops and (excess := self._undistributed.depth - limits.max_messages) > 0:
                self.dropped_count += self.pass_over(self._undistributed.after(excess))
        if limits.max_bytes and self._waiting_bytes() > limits.max_bytes:
            sequence = self._log.last_bytes(limits.max_bytes)
            for channel in channels.values():
                channel.messages.drop_before(sequence)
            if drops:
                self.dropped_count += self.pass_over(sequence)

    def would_drop(self, settings: TopicSettings, expired_before: int) -> int:
        """Count the messages that other settings would drop at once; each counts once per channel that loses it.

        Does not count messages that the current settings drop, nor messages in flight or deferred. A change in a copy
        of the topic would tell the same, but copying 10,000 channels takes half a second.

        Args:
            expired_before: Messages below this sequence would be older than the TTL; 0: none.
        """
        limited = settings.drops and settings.limits != self.settings.limits
        too_many = 0
        if limited and settings.max_bytes and self._waiting_bytes() > settings.max_bytes:
            too_many = self._log.last_bytes(settings.max_bytes)
        most = settings.max_messages if limited and settings.max_messages else None
        passed = self._undistributed.count_before(max(too_many, expired_before))
        total = self._lost(self._undistributed.depth, self._undistributed.depth, most, passed)
        for channel in self.shared:
            lost = max(
                channel.messages.count_before(too_many, requeued=False),
                channel.messages.count_before(expired_before, requeued=True),
            )
            total += self._lost(
                channel.depth + self._undistributed.depth, channel.messages.droppable_count, most, lost
            )
        return total

    @staticmethod
    def _lost(waiting: int, ready: int, most: int | None, passed: int) -> int:
        """Count the dropped of `ready` messages if `most` of `waiting` may stay; at least `passed` are dropped."""
        return max(passed, 0 if most is None else min(waiting - most, ready))

    def expire_before(self, sequence: int) -> None:
        """Drop undelivered messages below `sequence`: they are older than the TTL."""
        for channel in self._channels.values():
            channel.messages.expire_before(sequence)
        self.expired_count += self.pass_over(sequence)

    def pass_over(self, sequence: int) -> int:
        """Drop the messages from the high watermark up to `sequence`, and return their number."""
        point = self._topic.high_watermark
        dropped = self._undistributed.pass_over(sequence)
        if self._topic.high_watermark > point:
            for channel in self.shared:
                channel.skip(point, self._topic.high_watermark)
        return dropped
