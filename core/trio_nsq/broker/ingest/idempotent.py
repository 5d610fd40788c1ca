"""Idempotent publishing: stores a numbered batch once. See docs/how-to/idempotent-publishing.md."""

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from ...log.record_metadata import metadata_for_batch
from ...protocol import CommandError, MessageSet
from ...protocol.limits import MAX_PRODUCER_TOPICS
from ..errors import BatchRefused, PublishRefused
from ..state.broker import Broker
from ..state.producers import KEPT_S, MAX_PRODUCERS, BatchNumber, LastBatch
from ..state.topic import Topic
from ..topic_registry import TopicRegistry
from .publication import Publication

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_FENCED_INSTANCES = 8
_ENDED_CLAIMS = 10_000


@dataclass(slots=True)
class _InProgress:
    """A batch that is being stored."""

    done: trio.Event = field(default_factory=trio.Event)
    error: PublishRefused | None = None


@dataclass(slots=True)
class _Claim:
    """The client that may publish to a topic for a producer.

    Attributes:
        fenced: Instances that had the claim before. They must not have it again.
    """

    owner: "NamedProducer | None"
    instance: str
    fenced: tuple[str, ...] = ()  # no deque, which has 600 bytes: a client may claim thousands of topics


class IdempotentPublisher:
    """Stores each numbered batch once. One per broker.

    A producer's batches are stored sequentially. If a later batch were stored while an earlier one fails, a retry of
    the earlier one would count as a duplicate.
    """

    def __init__(self, broker: Broker, topics: TopicRegistry) -> None:
        self.broker = broker
        self._topics = topics
        self._in_progress: dict[tuple[str, str], _InProgress] = {}  # by topic and producer
        self._claims: dict[tuple[str, str], _Claim] = {}  # of connected clients, by topic and producer
        self._ended: OrderedDict[tuple[str, str], _Claim] = OrderedDict()  # of those that have disconnected

    # ------------------------------------------------------------------ batches

    async def publish(
        self,
        topic: str,
        batch: BatchNumber,
        sets: Sequence[MessageSet],
        due_ns: int,
        headers: Sequence[Sequence[str]] = (),
    ) -> bool:
        """Store a batch unless it, or a later one, is stored already; returns whether this call stored it.

        Args:
            topic: Created if it does not exist.
            due_ns: Earliest delivery time, Unix nanoseconds; 0: at once.
            headers: As of `Publication`.

        Raises:
            BatchRefused: The batch does not follow the last one. See `Producers.has_published`.
            PublishRefused: The batch was not stored, because storing it failed, or storing the producer's batch in
                progress failed, or the topic cannot remember another producer.
        """
        key = topic, batch.producer
        while (other := self._in_progress.get(key)) is not None:
            await other.done.wait()
            if other.error is not None:
                raise other.error
        if not self.is_new(topic, batch):
            return False
        self.begin(topic, batch.producer)
        error: PublishRefused | None = None
        try:
            # Shielded, because the batch may be stored already and other calls wait for the result. The disk bounds it.
            with trio.CancelScope(shield=True):
                metadata = metadata_for_batch(batch.producer, batch.number, batch.instance)
                await self._topics.publish(topic, [Publication(sets, due_ns, metadata, headers)])
        except PublishRefused as exc:
            error = exc
            raise
        finally:
            self.end(topic, batch.producer, error)
        return True

    def is_new(self, topic: str, batch: BatchNumber) -> bool:
        """Whether a batch must be stored: it is not, nor is a later one. The topic need not exist.

        Raises BatchRefused; PublishRefused if the topic cannot remember another producer.
        """
        found = self.broker.topics.get(topic)
        if found is None:
            return True
        if found.producers.has_published(batch, time.time_ns()):
            return False
        refuse_unless_remembered(found, batch.producer)
        return True

    def is_busy(self, topic: str, producer: str) -> bool:
        """Whether a batch of a producer is being stored in a topic."""
        return (topic, producer) in self._in_progress

    async def until_idle(self, topic: str, producer: str) -> None:
        """Return when no batch of a producer is being stored in a topic; none is until the next checkpoint."""
        while (other := self._in_progress.get((topic, producer))) is not None:
            await other.done.wait()

    def begin(self, topic: str, producer: str) -> None:
        """Note that batches of a producer are being stored in a topic. No others are."""
        self._in_progress[topic, producer] = _InProgress()

    def end(self, topic: str, producer: str, error: PublishRefused | None) -> None:
        """Note that they are stored, or why not."""
        ended = self._in_progress.pop((topic, producer))
        ended.error = error
        ended.done.set()
        self._report_forgotten(topic)

    def _report_forgotten(self, topic: str) -> None:
        found = self.broker.topics.get(topic)
        while found is not None and found.producers.forgotten:
            logger.warning(
                "%s: forgot the batch number of producer %s: there are %d others, and it was not used for %d minutes",
                topic,
                found.producers.forgotten.popleft(),
                MAX_PRODUCERS,
                KEPT_S // 60,
            )

    # ------------------------------------------------------------------ claims

    def claim(self, topic: str, owner: "NamedProducer") -> None:
        """Make a client the only one that publishes to a topic for its producer.

        Raises CommandError: another run of the producer has claimed the topic after this one.
        """
        key = topic, owner.name
        claim = self._claims.get(key) or self._ended.get(key) or _Claim(None, owner.instance)
        if owner.instance in claim.fenced:
            why = f"another producer named {owner.name} publishes to {topic} since"
            raise CommandError("E_PRODUCER_FENCED", f"PRODUCER failed FENCED: {why}")
        if claim.instance != owner.instance:
            claim.fenced = (*claim.fenced, claim.instance)[-_FENCED_INSTANCES:]
            claim.instance = owner.instance
        claim.owner = owner
        self._claims[key] = claim
        self._ended.pop(key, None)

    def has_claim(self, topic: str, owner: "NamedProducer") -> bool:
        """Whether a client may publish to a topic for its producer."""
        claim = self._claims.get((topic, owner.name))
        return claim is not None and claim.owner is owner

    def release(self, topic: str, owner: "NamedProducer") -> None:
        """Forget that a client that has disconnected claimed a topic. Its run can claim it again."""
        key = topic, owner.name
        if self.has_claim(topic, owner):
            claim = self._ended[key] = self._claims.pop(key)
            claim.owner = None
            if len(self._ended) > _ENDED_CLAIMS:
                self._ended.popitem(last=False)


class NamedProducer:
    """A TCP client that is a producer with a name, and the topics that it has claimed. Synchronous.

    Args:
        name: The producer.
        instance: A random name of this run of the producer.
    """

    def __init__(self, name: str, instance: str, publisher: IdempotentPublisher) -> None:
        self.name = name
        self.instance = instance
        self._publisher = publisher
        self._topics: dict[str, None] = {}

    def is_busy(self, topic: str) -> bool:
        """Whether batches of this producer, of any client, are being stored in a topic."""
        return self._publisher.is_busy(topic, self.name)

    async def until_idle(self, topic: str) -> None:
        """Return when none are."""
        await self._publisher.until_idle(topic, self.name)

    async def claim(self, topic: str) -> tuple[LastBatch | None, bool]:
        """Claim a topic: batches that other clients send from now on are refused.

        Returns:
            The last batch that is stored, and whether the topic may have forgotten one. Neither changes unless this
            client publishes.

        Raises CommandError: another run of the producer has claimed the topic after this one.
        """
        if topic not in self._topics and len(self._topics) >= MAX_PRODUCER_TOPICS:
            raise CommandError("E_INVALID", f"PRODUCER for more than {MAX_PRODUCER_TOPICS} topics")
        self._publisher.claim(topic, self)
        self._topics[topic] = None
        await self._publisher.until_idle(topic, self.name)
        found: Topic | None = self._publisher.broker.topics.get(topic)
        if found is None:
            return None, False
        return found.producers.last_of(self.name), found.producers.may_have_forgotten(self.name)

    def end(self) -> None:
        """Release the topics: the client has disconnected."""
        for topic in self._topics:
            self._publisher.release(topic, self)

    def metadata_if_new(self, topic: str, first: int, count: int, follows: int) -> bytes:
        """Return the record metadata of a batch that must be stored; empty: it is stored, or will be.

        Args:
            first, count: The number of its first message, and how many there are.
            follows: The last number of a batch that will be stored with this one, before it; -1: there is none.

        Raises BatchRefused or PublishRefused.
        """
        if not self._publisher.has_claim(topic, self):
            raise BatchRefused("FENCED", f"another connection of a producer named {self.name} publishes here")
        batch = BatchNumber(self.name, first + count - 1, first, self.instance, follows=True)
        if follows < 0:
            if not self._publisher.is_new(topic, batch):
                return b""
        elif batch.number <= follows:
            return b""
        elif first != follows + 1:
            raise BatchRefused("GAP", f"number {follows + 1} of producer {self.name} comes next, not {first}")
        return metadata_for_batch(self.name, batch.number, self.instance)

    def begin_storing(self, topic: str) -> None:
        """See `IdempotentPublisher.begin`."""
        self._publisher.begin(topic, self.name)

    def end_storing(self, topic: str, error: PublishRefused | None) -> None:
        """See `IdempotentPublisher.end`."""
        self._publisher.end(topic, self.name, error)


def refuse_unless_remembered(topic: Topic, producer: str) -> None:
    """Raise PublishRefused if the topic cannot remember this producer."""
    if not topic.producers.has_room(producer, time.time_ns()):
        raise PublishRefused(
            f"topic {topic.name} remembers {MAX_PRODUCERS} producers that have published within {KEPT_S // 60} "
            "minutes, and cannot remember one more: use a known producer name, publish without producer and "
            "number, or retry later"
        )
