"""All topics of one broker, and the time at which something is next due. Synchronous, like what it holds."""

import logging
from collections.abc import Callable

from ...log import Log
from ...protocol import is_valid_name
from ..errors import PublishRefused, TopicUnavailable
from ..options import BrokerOptions
from .alarms import Alarms
from .cache import BatchCache
from .channel import Channel
from .message_store import MessageStore
from .topic import Topic

logger = logging.getLogger("trio_nsq.broker")

NODE_ID_BITS = 10
COUNTER_BITS = 64 - NODE_ID_BITS
_NS_PER_MS = 1_000_000
_CHANNELS_AT_ONCE = 200
_MESSAGES_AT_ONCE = 1000
_AGAIN_NS = 1_000_000_000
"""If moving what is due in a channel failed, it is tried again after this time."""


class MessageIds:
    """Message ids: 64 bits, the node's id above a counter that never goes back, also over restarts.

    Args:
        node_id: 0..1023.
        start: The counter's first value; later than any used before on this node.

    Attributes:
        reserved: The counter may not pass this: a restart would begin there. Raised when that is on disk.
    """

    def __init__(self, node_id: int, start: int, reserved: int = 1 << COUNTER_BITS) -> None:
        self._prefix = node_id << COUNTER_BITS
        self.next = start
        self.reserved = reserved

    def take(self, count: int) -> int:
        """Take `count` ids in a row; returns the first, as the number whose 16 hex digits are the id.

        Raises:
            PublishRefused: So many are not reserved.
        """
        first = self.next
        if first + count > self.reserved:
            raise PublishRefused("no message ids are left until more can be reserved in the data folder")
        self.next = first + count
        return self._prefix | first


class Broker:
    """The topics, and what is due when.

    Args:
        make_log: Gives the log of a new topic, by name. May raise LogError.

    Attributes:
        topics: By name.
        unavailable: Why a topic cannot be used, by name. It has files, and so keeps its name; nothing but a deletion
            touches them.
        changed: Names of topics that have changed, see `Version`; the owner removes those that it saves.
        never_saved: Topics whose state was never saved: a crash would take them, unless they have messages. The
            owner clears it.
        on_names_changed: Called with the names of a topic and a channel when that channel, or if it is None the
            topic, was made or deleted; a deleted topic's channels go without a call.
        alarms: When channels have to be looked at, see `tick`.
        publishable: Topics that need not be made, saved or waited for before something is published to them, by name.
            The owner adds them.
        deleting: Names of topics that are being deleted.
        stopping: The broker stops: no topic is served any more.
        waits_for_disk: As of its topics, which are made after it is set.
    """

    def __init__(self, options: BrokerOptions, make_log: Callable[[str], Log]) -> None:
        self.options = options
        self.topics: dict[str, Topic] = {}
        self.unavailable: dict[str, str] = {}
        self.changed: set[str] = set()
        self.never_saved: set[Topic] = set()
        self.on_names_changed: Callable[[str, str | None], None] = lambda topic, channel: None
        self.publishable: dict[str, Topic] = {}
        self.deleting: set[str] = set()
        self.stopping = False
        self.waits_for_disk = True
        self._make_log = make_log
        measured = bool(options.e2e_processing_latency_percentiles)
        self._e2e_window_ns = options.e2e_processing_latency_window_time_ms * _NS_PER_MS if measured else 0
        self.cache = BatchCache(options.cache_bytes)
        self.alarms: Alarms[Channel] = Alarms()

    # ------------------------------------------------------------------ topics and channels

    def serves(self, topic: Topic) -> bool:
        """Whether a topic is there, and its log open."""
        return not self.stopping and self.topics.get(topic.name) is topic

    def serves_channel(self, channel: Channel) -> bool:
        """Whether a channel is there, and its topic's log open."""
        return not self.stopping and self.topic_of(channel) is not None

    def serves_store(self, store: MessageStore) -> bool:
        """Whether the topic of a message store is there, and its log open."""
        topic = self.topics.get(store.name)
        return not self.stopping and topic is not None and topic.store is store

    def topic(self, name: str) -> Topic:
        """The topic of this name, made if need be. Raises LogError if its log cannot be opened."""
        topic = self.topics.get(name)
        if topic is None:
            assert is_valid_name(name), name
            if name in self.unavailable:
                raise TopicUnavailable(name, self.unavailable[name])
            topic = self.make_topic(name, self._make_log(name))
            self.add_topic(topic)
        return topic

    def make_topic(self, name: str, log: Log) -> Topic:
        """A topic of a log that may have messages, for `add_topic`; for any thread."""
        options = self.options
        topic = Topic(
            name, log, self.cache, options.mem_queue_size, self._e2e_window_ns, options.topic_defaults
        )
        topic.store.waits_for_disk = self.waits_for_disk
        return topic

    def add_topic(self, topic: Topic) -> None:
        """Let a topic be used, which was never saved as far as is known."""
        self.topics[topic.name] = topic
        if not topic.ephemeral:
            topic.version.report_to(self.changed, topic.name)
            topic.version.increment()
            self.never_saved.add(topic)
        self.on_names_changed(topic.name, None)

    def channel(self, topic_name: str, name: str, *, private: bool = False) -> Channel:
        """The channel of this name, it and its topic made if need be. Raises LogError."""
        topic = self.topic(topic_name)
        known = name in topic.channels
        channel = topic.add_channel(name, private=private)
        if not known:
            self.alarms.watch(channel, channel.next_deadline_ns)
            self.on_names_changed(topic_name, name)
        return channel

    def topic_of(self, channel: Channel) -> Topic | None:
        """The topic that a channel is in; None if the channel is deleted."""
        topic = self.topics.get(channel.topic.name)
        return topic if topic is not None and topic.channels.get(channel.name) is channel else None

    def delete_channel(self, channel: Channel) -> None:
        """Delete a channel, and its topic if that is ephemeral and has no other.

        A private channel does not take along a topic in which messages wait for a first channel.
        """
        topic = self.topic_of(channel)
        if topic is None:
            return
        topic.remove_channel(channel)
        self.alarms.forget(channel)
        self.on_names_changed(topic.name, channel.name)
        waited_for = channel.private and topic.high_watermark < topic.end
        if topic.ephemeral and not topic.channels and not waited_for:
            self.delete_topic(topic)

    def delete_topic(self, topic: Topic) -> None:
        """Delete a topic and its channels. The log is closed; its files are the caller's to remove."""
        if self.topics.get(topic.name) is topic:
            del self.topics[topic.name]
            self.publishable.pop(topic.name, None)
            for channel in topic.channels.values():
                self.alarms.forget(channel)
            topic.version.report_to(None, "")
            topic.close()
            topic.log.close()
            self.changed.discard(topic.name)
            self.never_saved.discard(topic)
            self.on_names_changed(topic.name, None)

    def give_up(self, name: str, reason: str) -> None:
        """Let nobody use a topic, for this reason; its files stay as they are."""
        if (topic := self.topics.get(name)) is not None:
            self.delete_topic(topic)
        self.unavailable[name] = reason

    @property
    def why_unavailable(self) -> str:
        """The first topic that is unavailable, why, and how many others are; empty if all are there."""
        for name, reason in self.unavailable.items():
            others = len(self.unavailable) - 1
            return f"{TopicUnavailable(name, reason)}" + (f" (and {others} more)" if others else "")
        return ""

    # ------------------------------------------------------------------ time

    def tick(self, now_ns: int) -> list[Channel]:
        """Move what is due anywhere; returns the channels to be dispatched.

        When much is due at once it does a millisecond's work or so: `alarms.next_ns` tells whether there is more.
        """
        woken: dict[Channel, None] = {}
        moved = 0
        while len(woken) < _CHANNELS_AT_ONCE and moved < _MESSAGES_AT_ONCE:
            channel = self.alarms.take_due(now_ns)
            if channel is None:
                break
            try:
                moved += channel.tick(now_ns, _MESSAGES_AT_ONCE - moved)
                self.alarms.watch(channel, channel.next_deadline_ns)
            except Exception:
                # A defect of ours: it must not stop the other channels.
                logger.exception("%s/%s: what is due could not be moved", channel.topic.name, channel.name)
                self.alarms.watch(channel, now_ns + _AGAIN_NS)
            woken[channel] = None
        return list(woken)
