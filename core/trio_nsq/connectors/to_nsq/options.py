"""What to copy where."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ...client.publishing.options import ProducerOptions
from ...filters.bodies import Filter
from ..host_pool import Mode
from ..source.options import BrokerAddresses, SourceOptions

NOT_JSON_SUFFIX = ".not-json"


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The options of `copy_topics`.

    Attributes:
        source: What to read.
        destinations: Brokers, at least one. Each message is copied to one of them.
        topic: The topic of the copies; None: the same as at the source.
        mode: Which destination gets the next messages.
        filter: Which messages to copy, and which fields of them.
        not_json_topic: The topic for bodies that are not JSON objects; None: the topic of the copies with
            `NOT_JSON_SUFFIX`.
        requires_http: Only publish to destinations whose HTTP API answers, for copies exactly once.
        allows_gaps: Read on if a channel has passed messages that no destination has.
        with_headers: Copy headers of messages. A destination that knows none refuses messages that have some.
        follow: Run for ever; False: end when the messages are copied that were there at the start.
        producer: Options of producers. Those for TLS and the secret also apply to HTTP.
        https_address: See `SourceOptions`.
    """

    source: SourceOptions
    destinations: tuple[BrokerAddresses, ...]
    topic: str | None = None
    mode: Mode = Mode.HOSTPOOL
    filter: Filter = field(default_factory=Filter)
    not_json_topic: str | None = None
    requires_http: bool = False
    allows_gaps: bool = False
    with_headers: bool = True
    follow: bool = True
    producer: ProducerOptions = field(default_factory=ProducerOptions)
    https_address: Callable[[str], str] = str

    def topic_for(self, topic: str) -> str:
        """Return the topic of the copies of a topic."""
        return self.topic if self.topic is not None else topic

    def not_json_topic_for(self, topic: str) -> str:
        """Return the topic for the bodies of a topic that are not JSON objects. It may be too long for a name."""
        return self.not_json_topic or self.topic_for(topic) + NOT_JSON_SUFFIX
