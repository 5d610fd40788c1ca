"""A channel as a source: the messages that the broker delivers to any NSQ consumer."""

from ...client.consuming.consumer import Consumer
from ...client.errors import ConnectionLost
from .batch import Position, SourceBatch, from_delivery


class ChannelSource:
    """See `Source`.

    Args:
        broker: The broker's TCP address; empty: all brokers of the consumer.
        consumer: An open consumer. A connector may change its `max_in_flight`.
    """

    is_log = False
    log = ""

    def __init__(self, topic: str, broker: str, consumer: Consumer) -> None:
        self.topic = topic
        self.broker = broker
        self.consumer = consumer
        self._batches = consumer.batches()

    async def receive(self) -> SourceBatch:
        """See `Source`. Raises ConnectionLost, AuthRefused."""
        try:
            return from_delivery(self.topic, await anext(self._batches))
        except StopAsyncIteration:
            raise ConnectionLost(self.broker or "the brokers", "the consumer was closed") from None

    def commit(self, position: Position) -> None:
        """See `Source`."""

    def is_starved(self) -> bool:
        return self.consumer.is_starved

    def next_sequence(self) -> int | None:
        return None

    def lag(self) -> int | None:
        return None
