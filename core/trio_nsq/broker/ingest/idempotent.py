"""Idempotent publishing: stores a numbered batch once. See docs/how-to/idempotent-publishing.md."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from ...log.record_metadata import metadata_for_batch
from ...protocol import MessageSet
from ..errors import BatchOverlaps, PublishRefused
from ..state.broker import Broker
from ..state.producers import KEPT_S, MAX_PRODUCERS
from ..state.topic import Topic
from ..topic_registry import TopicRegistry
from .publication import Publication

logger = logging.getLogger("trio_nsq.broker")


@dataclass(frozen=True, slots=True)
class BatchNumber:
    """A producer's identification of a batch.

    Attributes:
        number: Greater than the numbers of all the producer's earlier batches in the same topic.
        first: The batch has the numbers from this one to `number`, so that batches with other limits can be told from
            repetitions; None: only `number`.
    """

    producer: str
    number: int
    first: int | None = None


@dataclass(slots=True)
class _InProgress:
    """A batch that is being stored."""

    done: trio.Event = field(default_factory=trio.Event)
    error: PublishRefused | None = None


class IdempotentPublisher:
    """Stores each numbered batch once. One per broker.

    A producer's batches are stored sequentially. If a later batch were stored while an earlier one fails, a retry of
    the earlier one would count as a duplicate.
    """

    def __init__(self, broker: Broker, topics: TopicRegistry) -> None:
        self._broker = broker
        self._topics = topics
        self._in_progress: dict[tuple[str, str], _InProgress] = {}  # by topic and producer

    async def publish(self, topic: str, name: BatchNumber, sets: Sequence[MessageSet], due_ns: int) -> bool:
        """Store a batch unless it, or a later one, is stored already; returns whether this call stored it.

        Args:
            topic: Created if it does not exist.
            due_ns: Earliest delivery time, Unix nanoseconds; 0: at once.

        Raises:
            BatchOverlaps: Some of the batch's numbers are stored, but not the last one.
            PublishRefused: The batch was not stored, because storing it failed, or storing the producer's batch in
                progress failed, or the topic cannot remember another producer.
        """
        key = topic, name.producer
        while (other := self._in_progress.get(key)) is not None:
            await other.done.wait()
            if other.error is not None:
                raise other.error
        if self.has_published(topic, name):
            return False
        if (found := self._broker.topics.get(topic)) is not None:
            _refuse_overlap(found, name)
            refuse_unless_remembered(found, name.producer)
        this = self._in_progress[key] = _InProgress()
        try:
            # Shielded, because the batch may be stored already and other calls wait for the result. The disk bounds it.
            with trio.CancelScope(shield=True):
                metadata = metadata_for_batch(name.producer, name.number)
                await self._topics.publish(topic, [Publication(sets, due_ns, metadata)])
        except PublishRefused as exc:
            this.error = exc
            raise
        finally:
            del self._in_progress[key]
            this.done.set()
        self._report_forgotten(topic)
        return True

    def has_published(self, topic: str, name: BatchNumber) -> bool:
        """Whether a batch, or a later one, is stored in a topic. The topic need not exist."""
        found = self._broker.topics.get(topic)
        return found is not None and found.producers.has_published(name.producer, name.number, time.time_ns())

    def _report_forgotten(self, topic: str) -> None:
        found = self._broker.topics.get(topic)
        while found is not None and found.producers.forgotten:
            logger.warning(
                "%s: forgot the batch number of producer %s: there are %d others, and it was not used for %d minutes",
                topic,
                found.producers.forgotten.popleft(),
                MAX_PRODUCERS,
                KEPT_S // 60,
            )


def _refuse_overlap(topic: Topic, name: BatchNumber) -> None:
    """Raise BatchOverlaps if a batch that is not stored begins at or below the last number."""
    last = topic.producers.number_of(name.producer)
    if last is not None and name.first is not None and name.first <= last:
        raise BatchOverlaps(f"OVERLAP: numbers up to {last} of this producer are stored")


def refuse_unless_remembered(topic: Topic, producer: str) -> None:
    """Raise PublishRefused if the topic cannot remember this producer."""
    if not topic.producers.has_room(producer, time.time_ns()):
        raise PublishRefused(
            f"topic {topic.name} remembers {MAX_PRODUCERS} producers that have published within {KEPT_S // 60} "
            "minutes, and cannot remember one more: use a known producer name, publish without producer and "
            "number, or retry later"
        )
