"""Batches that are published once, however often they are sent. See docs/how-to/idempotent-publishing.md."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from ...protocol import MessageSet
from ..errors import PublishRefused
from ..state.broker import Broker
from ..state.producers import KEPT_S, MAX_PRODUCERS
from ..state.record_metadata import metadata_for_batch
from ..topics import Topics
from .publication import Publication

logger = logging.getLogger("trio_nsq.broker")


@dataclass(frozen=True, slots=True)
class BatchNumber:
    """What a producer calls a batch.

    Attributes:
        number: Greater than those of all its batches before, in the same topic.
    """

    producer: str
    number: int


@dataclass(slots=True)
class _UnderWay:
    """A batch that is being stored."""

    done: trio.Event = field(default_factory=trio.Event)
    error: PublishRefused | None = None


class IdempotentPublisher:
    """Stores each numbered batch once. One for a broker.

    A producer's batches are stored one after the other: if a later one were while an earlier one fails, that would be
    taken for a repetition when it is sent again.
    """

    def __init__(self, broker: Broker, topics: Topics) -> None:
        self._broker = broker
        self._topics = topics
        self._under_way: dict[tuple[str, str], _UnderWay] = {}  # by topic and producer

    async def publish(self, topic: str, name: BatchNumber, sets: Sequence[MessageSet], due_ns: int) -> bool:
        """Store a batch, unless it, or one after it, was stored before; returns whether this did.

        Args:
            topic: Made if need be.
            due_ns: When they may be delivered, Unix nanoseconds; 0: at once.

        Raises:
            PublishRefused: It is not stored, or one that was under way could not be. Or its number could not be
                remembered without forgetting another producer's.
        """
        key = topic, name.producer
        while (other := self._under_way.get(key)) is not None:
            await other.done.wait()
            if other.error is not None:
                raise other.error
        if self.has_published(topic, name):
            return False
        self._refuse_too_many(topic, name.producer)
        this = self._under_way[key] = _UnderWay()
        try:
            # Bounded by the disk: it may be stored, and others wait to hear of it.
            with trio.CancelScope(shield=True):
                metadata = metadata_for_batch(name.producer, name.number)
                await self._topics.publish(topic, [Publication(sets, due_ns, metadata)])
        except PublishRefused as exc:
            this.error = exc
            raise
        finally:
            del self._under_way[key]
            this.done.set()
        self._report_forgotten(topic)
        return True

    def has_published(self, topic: str, name: BatchNumber) -> bool:
        """Whether a batch, or one after it, is stored in a topic, which need not be there."""
        found = self._broker.topics.get(topic)
        return found is not None and found.producers.has_published(name.producer, name.number, time.time_ns())

    def _refuse_too_many(self, topic: str, producer: str) -> None:
        found = self._broker.topics.get(topic)
        if found is not None and not found.producers.has_room(producer, time.time_ns()):
            raise PublishRefused(
                f"topic {topic} remembers {MAX_PRODUCERS} producers that have published within {KEPT_S // 60} minutes, "
                "and cannot remember one more: use a name that it knows, publish without producer and number, or try "
                "again later"
            )

    def _report_forgotten(self, topic: str) -> None:
        found = self._broker.topics.get(topic)
        while found is not None and found.producers.forgotten:
            logger.warning(
                "%s: the number of producer %s is forgotten: there are %d others, and it was not used for %d minutes",
                topic,
                found.producers.forgotten.popleft(),
                MAX_PRODUCERS,
                KEPT_S // 60,
            )
