"""The topics of a broker, and the times at which their channels are due. Synchronous state."""

import logging
from collections.abc import Callable
from typing import Final

from ...log import Log
from ...protocol import is_valid_name
from ..errors import DeletedError, PublishRefused, TopicUnavailable
from ..options import BrokerOptions
from .cache import BatchCache
from .channel import Channel
from .deadline_heap import DeadlineHeap
from .message_store import MessageStore
from .topic import Topic

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

NODE_ID_BITS: Final = 10
COUNTER_BITS: Final = 64 - NODE_ID_BITS
_NS_PER_MS: Final = 1_000_000
_CHANNELS_AT_ONCE: Final = 200
_MESSAGES_AT_ONCE: Final = 1000
_AGAIN_NS: Final = 1_000_000_000
"""Retry delay after an exception while due messages of a channel were moved."""


class MessageIds:
    """Generates message ids: 64 bits, the node id above a counter that never decreases, even over restarts.

    Args:
        node_id: 0..1023.
        start: The counter's first value; higher than all used before on this node.

    Attributes:
        reserved: Upper bound of the counter; a restart begins here. The owner raises it after saving it to disk.
    """

    def __init__(self, node_id: int, start: int, reserved: int = 1 << COUNTER_BITS) -> None:
        self._prefix = node_id << COUNTER_BITS
        self.next: int = start
        self.reserved = reserved

    def take(self, count: int) -> int:
        """Take `count` consecutive ids, and return the first as a number.

        Raises:
            PublishRefused: Fewer ids are reserved.
        """
        first = self.next
        if first + count > self.reserved:
            raise PublishRefused(
                "no message ids are left until the broker can reserve more in the data folder"
            )
        self.next = first + count
        return self._prefix | first


class Broker:
    """The topics of a broker, and the deadlines of their channels.

    Args:
        make_log: Opens the log of a new topic, by name. May raise LogError.

    Attributes:
        topics: By name.
        unavailable: Why a topic cannot be used, by name. Such a topic keeps its name and its files; only a deletion
            changes them.
        changed: Names of topics with unsaved changes, see `Version`; the owner removes those that it saves.
        never_saved: Topics whose state was never saved. A crash loses them unless they have messages. The owner clears
            it.
        on_names_changed: Called with the names of a topic and a channel when the channel, or if that is None the topic,
            was created or deleted. Not called for the channels of a deleted topic.
        deadlines: When channels are due, see `watch` and `tick`.
        on_earlier_deadline: Called when the first deadline is earlier than before.
        draining: The broker refuses the publishes of clients.
        incomplete: New topics that do not have the channels yet that they have on other brokers.
        deleting: Topics that are being deleted, or lose a channel, by name: whether other requests wait for that,
            because nothing may need the topic or channel any more; else they are refused.
        stopping: The broker stops and serves no topic any more.
        waits_for_disk: Passed to the message stores of topics; set it before creating topics.
    """

    def __init__(self, options: BrokerOptions, make_log: Callable[[str], Log]) -> None:
        self.options = options
        self.topics: dict[str, Topic] = {}
        self.unavailable: dict[str, str] = {}
        self.changed: set[str] = set()
        self.never_saved: set[Topic] = set()
        self.on_names_changed: Callable[[str, str | None], None] = lambda topic, channel: None
        self.draining = False
        self.incomplete: set[Topic] = set()
        self.deleting: dict[str, bool] = {}
        self.stopping = False
        self.waits_for_disk = True
        self._make_log = make_log
        measured = bool(options.e2e_processing_latency_percentiles)
        self._e2e_window_ns = options.e2e_processing_latency_window_time_ms * _NS_PER_MS if measured else 0
        self.cache: BatchCache = BatchCache(options.cache_bytes)
        self.deadlines: DeadlineHeap[Channel] = DeadlineHeap()
        self.on_earlier_deadline: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ topics and channels

    def serves(self, topic: Topic) -> bool:
        """Whether a topic exists and its log is open."""
        return not self.stopping and self.topics.get(topic.name) is topic

    def serves_channel(self, channel: Channel) -> bool:
        """Whether a channel exists and its topic's log is open."""
        return not self.stopping and self.topic_of(channel) is not None

    def serves_store(self, store: MessageStore) -> bool:
        """Whether a message store's topic exists and its log is open."""
        topic = self.topics.get(store.name)
        return not self.stopping and topic is not None and topic.store is store

    def publishable(self, name: str) -> Topic | None:
        """Return the topic of this name if publishes of clients need not wait, nor are refused, for its state."""
        topic = self.topics.get(name)
        if (
            topic is None
            or self.draining
            or self.stopping
            or name in self.deleting
            or topic in self.incomplete
        ):
            return None
        return topic

    def topic(self, name: str) -> Topic:
        """Return the topic of this name, creating it if needed. Raises LogError if its log cannot be opened."""
        topic = self.topics.get(name)
        if topic is None:
            assert is_valid_name(name), name
            if name in self.unavailable:
                raise TopicUnavailable(name, self.unavailable[name])
            topic = self.make_topic(name, self._make_log(name))
            self.add_topic(topic)
        return topic

    def make_topic(self, name: str, log: Log) -> Topic:
        """Create a topic for a log that may have messages; `add_topic` adds it. Thread-safe."""
        options = self.options
        topic = Topic(
            name, log, self.cache, options.mem_queue_size, self._e2e_window_ns, options.topic_defaults
        )
        topic.store.waits_for_disk = self.waits_for_disk
        return topic

    def add_topic(self, topic: Topic) -> None:
        """Add a topic, and mark it as never saved."""
        self.topics[topic.name] = topic
        topic.watch(self.watch, self._follow_channel)
        if not topic.ephemeral:
            topic.version.report_to(self.changed, topic.name)
            topic.version.increment()
            self.never_saved.add(topic)
        self.on_names_changed(topic.name, None)

    def is_unused(self, topic: Topic) -> bool:
        """Whether a topic was never saved, and has neither messages nor channels: a request has not finished yet."""
        return topic in self.never_saved and not (topic.channels or topic.log.next_sequence)

    def topic_of(self, channel: Channel) -> Topic | None:
        """Return the topic of a channel; None if the channel is deleted."""
        topic = self.topics.get(channel.topic.name)
        return topic if topic is not None and topic.channels.get(channel.name) is channel else None

    def existing_topic_of(self, channel: Channel) -> Topic:
        """Return the topic of a channel. Raises DeletedError."""
        topic = self.topic_of(channel)
        if topic is None:
            raise DeletedError(channel.name)
        return topic

    def _follow_channel(self, topic: Topic, channel: Channel) -> None:
        """Follow a channel that was added or removed. An ephemeral topic is deleted with its last channel.

        The removal of a private channel keeps a topic in which messages wait for the first channel.
        """
        self.on_names_changed(topic.name, channel.name)
        if topic.channels.get(channel.name) is channel:
            return
        self.deadlines.forget(channel)
        waited_for = channel.private and topic.high_watermark < topic.end
        if topic.ephemeral and not topic.channels and not waited_for:
            self.delete_topic(topic)

    def delete_topic(self, topic: Topic) -> None:
        """Delete a topic and its channels, and close its log. The caller removes the files."""
        if self.topics.get(topic.name) is topic:
            del self.topics[topic.name]
            for channel in topic.channels.values():
                self.deadlines.forget(channel)
            topic.version.report_to(None, "")
            topic.close()
            topic.log.close()
            self.changed.discard(topic.name)
            self.never_saved.discard(topic)
            self.incomplete.discard(topic)
            self.on_names_changed(topic.name, None)

    def mark_unavailable(self, name: str, reason: str) -> None:
        """Make a topic unavailable for this reason, and keep its files."""
        if (topic := self.topics.get(name)) is not None:
            self.delete_topic(topic)
        self.unavailable[name] = reason

    @property
    def why_unavailable(self) -> str:
        """The first unavailable topic, the reason, and the number of others; empty if all topics are available."""
        for name, reason in self.unavailable.items():
            others = len(self.unavailable) - 1
            return f"{TopicUnavailable(name, reason)}" + (f" (and {others} more)" if others else "")
        return ""

    # ------------------------------------------------------------------ time

    def watch(self, channel: Channel, at_ns: int) -> None:
        """Have `tick` call a channel at this time at the latest. Channels report their own deadlines here."""
        if self.deadlines.watch(channel, at_ns):
            self.on_earlier_deadline()

    def extend_timeouts(self, by_ns: int) -> None:
        """Give all messages in flight more time: the broker could not read their answers for so long."""
        for topic in self.topics.values():
            for channel in topic.channels.values():
                channel.extend_timeouts(by_ns)

    def tick(self, now_ns: int) -> list[Channel]:
        """Move due messages of all channels; returns the channels to dispatch.

        Does about 1 ms of work. If more is due, `deadlines.next_ns` is not in the future.
        """
        woken: dict[Channel, None] = {}
        moved = 0
        while len(woken) < _CHANNELS_AT_ONCE and moved < _MESSAGES_AT_ONCE:
            channel = self.deadlines.take_due(now_ns)
            if channel is None:
                break
            try:
                moved += channel.tick(now_ns, _MESSAGES_AT_ONCE - moved)
                self.deadlines.watch(channel, channel.next_deadline_ns)
            except Exception:
                # A defect in the broker must not stop the other channels.
                logger.exception("%s/%s: moving due messages failed", channel.topic.name, channel.name)
                self.deadlines.watch(channel, now_ns + _AGAIN_NS)
            woken[channel] = None
        return list(woken)
