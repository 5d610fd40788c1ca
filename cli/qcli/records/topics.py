"""Records of topics and channels, of their settings, and of changes to them."""

from typing import TypedDict

from trio_nsq.api.answers import Seek
from trio_nsq.text.settings import SettingChange

from .brokers import OfBroker


class TopicRecord(TypedDict):
    """A topic.

    Attributes:
        channels: The names of its channels.
        paused: Whether it is paused on at least one broker.
    """

    topic: str
    channels: list[str]
    paused: bool


class ChannelRecord(TypedDict):
    """A channel.

    Attributes:
        paused: Whether it is paused on at least one broker.
    """

    topic: str
    channel: str
    paused: bool


class TopicSettingsRecord(OfBroker, total=False):
    """The settings of a topic: see docs/reference/settings.md. An older broker has only some.

    Attributes:
        retention_time_ms: Milliseconds; 0: off, -1: for ever.
        retention_bytes: Bytes; 0: off, -1: without limit.
        ttl_ms: Milliseconds; 0: off.
        max_messages, max_bytes: Limits of the backlog; 0: off.
        when_full: reject or drop-oldest.
        expire_idle_ms: Milliseconds; 0: off.
        table: The table that 'qcli pipeline run' keeps; empty: none.
    """

    retention_time_ms: int
    retention_bytes: int
    ttl_ms: int
    max_messages: int
    max_bytes: int
    when_full: str
    expire_idle_ms: int
    table: str


class ChannelSettingsRecord(OfBroker, total=False):
    """The settings of a channel: see docs/reference/settings.md. An older broker has only some.

    Attributes:
        max_attempts: Deliveries; 0: without limit.
        dead_letter_topic: Empty: messages are dropped after max_attempts.
        order_by: The key of messages; empty: no order.
        rate_limit_per_s: Messages per second; 0: no limit.
        expire_idle_ms: Milliseconds; 0: off.
    """

    max_attempts: int
    dead_letter_topic: str
    order_by: str
    rate_limit_per_s: int
    expire_idle_ms: int


class DisconnectedRecord(OfBroker):
    """A consumer that was disconnected.

    Attributes:
        address: The consumer's address.
    """

    topic: str
    channel: str
    address: str
    client_id: str


class SeekRecord(OfBroker, Seek):
    """The move of a channel, done or only planned."""


class DefinitionChangeRecord(OfBroker):
    """A change that makes a broker as its definitions say.

    Attributes:
        action: The verb, such as create, change, pause or delete.
        channel: null: the change is of the topic.
        settings: The settings that change, by name.
        messages: How many the change deletes or drops.
        done: Whether it was made; false with --dry-run.
    """

    action: str
    topic: str
    channel: str | None
    settings: dict[str, SettingChange]
    messages: int
    done: bool


class PipelineTableRecord(TypedDict):
    """A topic and the table that it declares. What is not known is null.

    Attributes:
        table: null: the settings contradict each other, or are not valid.
        lag: Messages that the channel of 'qcli pipeline run' keeps; null: there is no channel.
        lag_s: All messages that were published so many seconds ago are in the table.
        messages: Written since the start of 'qcli pipeline run'.
        last_round_at: When the table was complete last, Unix seconds.
        error: Why the table cannot be written; null: it can.
    """

    topic: str
    table: str | None
    lag: int | None
    lag_s: float | None
    messages: float | None
    last_round_at: float | None
    error: str | None
