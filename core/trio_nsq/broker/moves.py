"""Moves topics to another broker. This broker is the source (`Moves`) or the target (`MovedMessages`): see `Move`.

The two brokers do not talk to each other: a program such as `qcli drain --move-to` carries the groups of messages.
"""

import logging
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice

import trio

from ..log import RecordBatch
from ..log.interface import READ_BYTES
from ..log.record_metadata import IN_SEQUENCE_NS, metadata_for_moved
from ..log.records import split_batch
from ..text.wording import count_of, is_or_are
from .clock import BrokerClock
from .delivery import Deliverer
from .errors import DeletedError, MoveRefused, NoChannel, SaveError
from .ingest.idempotent import refuse_unless_remembered
from .ingest.publication import Publication
from .ingest.write_path import WritePath
from .moved_groups import GroupBuilder, MovedGroup
from .reader_pool import ReaderPool
from .state.broker import Broker
from .state.channel import Channel
from .state.message_store import REDELIVERY_READ_BYTES
from .state.move import Move, MovePlan
from .state.producers import LastBatch
from .state.topic import Topic
from .storage.checkpointer import Checkpointer
from .topic_registry import TopicRegistry

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_MAX_GROUPS = 500
_MAX_SPANS = 10_000
"""Limits of one batch: each group and each span costs Python work."""
_READ_S = 1.0
"""A batch is ended after this time."""
_LONG_SPAN = 64
"""Messages of a span from which on the log is read in large pieces."""
_SIZE_BYTES = 4


@dataclass(frozen=True, slots=True)
class MoveBatch:
    """The next messages of a stream.

    Attributes:
        body: Groups of messages, see `moved_groups`.
        count: The messages in it.
        through: The last sequence in it, or of a message that was left out; None: nothing is left in the stream.
        left: Messages of the stream that are not confirmed, these included.
        damaged: Messages left out because the log cannot read them.
        expired: Messages left out because they are older than the topic's `ttl_ms`.
    """

    body: bytes = b""
    count: int = 0
    through: int | None = None
    left: int = 0
    damaged: int = 0
    expired: int = 0


@dataclass(eq=False, slots=True)
class Moves:
    """The moves of a broker's topics to other brokers."""

    broker: Broker
    clock: BrokerClock
    write_path: WritePath
    delivery: Deliverer
    checkpointer: Checkpointer
    readers: ReaderPool
    _locks: dict[str, trio.Lock] = field(default_factory=dict, init=False)  # by topic; few topics are moved

    def _locked(self, topic: Topic) -> trio.Lock:
        return self._locks.setdefault(topic.name, trio.Lock())

    # ------------------------------------------------------------------ begin and end

    async def begin(self, topic: Topic, to: str) -> Move:
        """Begin to move a topic to the broker at `to`, or continue. Its durable channels deliver nothing from now on.

        Raises:
            MoveRefused: The broker does not drain, or the topic is ephemeral or moves to another address.
            SaveError: That cannot be saved; nothing has changed.
        """
        async with self._locked(topic):
            self._check_begin(topic, to)
            move = topic.moving.current
            is_new = move is None
            if move is None:
                # Before it is saved: the channels must get nothing while the log is synced up to the end of the move.
                move = Move(os.urandom(8).hex(), to, topic.end, time.time_ns())
                topic.moving.begin(move)
            try:
                # Otherwise a power cut could let other messages have sequences of this move.
                if not await self.write_path.sync(topic):
                    raise SaveError(f"the log of topic {topic.name} cannot be synced")
                await self.checkpointer.save(topic)
            except BaseException:
                if is_new:
                    topic.moving.end()
                    self._resume(topic)
                raise
            if is_new:
                logger.info("TOPIC(%s): begins to move to %s", topic.name, to)
            return move

    def _check_begin(self, topic: Topic, to: str) -> None:
        move = topic.moving.current
        if move is not None and move.to != to:
            raise MoveRefused(
                f"MOVING: topic {topic.name} is being moved to {move.to}. Continue with that address, or end the move"
            )
        if topic.ephemeral:
            raise MoveRefused("EPHEMERAL: an ephemeral topic cannot be moved")
        if move is None and not self.broker.draining:
            raise MoveRefused(
                "NOT_DRAINING: only a broker that drains moves topics. PUT /config/draining first"
            )

    async def end(self, topic: Topic, move_id: str, *, cancel: bool = False) -> None:
        """End a move, durably. The topic delivers again what arrived meanwhile.

        Args:
            cancel: End it although messages are left. Those that are not confirmed stay here.

        Raises:
            MoveRefused: There is no such move, or messages are left.
            SaveError: That cannot be saved; nothing has changed.
        """

        async with self._locked(topic):
            check_move(topic, move_id)
            topic.moving.drop_all_moved()
            if not cancel and (left := _what_is_left(topic)):
                raise MoveRefused(f"NOT_MOVED: {left}")
            await self.checkpointer.change(
                topic,
                lambda each: each.moving.end(),
                channels=topic.channels,
                then=partial(self._resume, topic),
            )
            logger.info("TOPIC(%s): the move has %s", topic.name, "been ended" if cancel else "completed")

    def _resume(self, topic: Topic) -> None:
        topic.distribute()
        self.delivery.deliver_topic(topic)
        for channel in topic.channels.values():
            self.delivery.deliver(channel)

    # ------------------------------------------------------------------ messages

    async def next(
        self, topic: Topic, channel: Channel | None, move_id: str, moved: int | None, max_bytes: int
    ) -> MoveBatch:
        """Drop the messages of a stream up to `moved`, which the target has, and return the next ones.

        Raises:
            MoveRefused: There is no such move, or the stream cannot begin yet.
            SaveError: The beginning of the stream cannot be saved.
            DeletedError: The channel was deleted.
            CutOff: The log cannot be read, or the topic is deleted.
        """
        name = channel.name if channel is not None else None
        async with self._locked(topic):
            check_move(topic, move_id)
            stream = channel.stream if channel is not None else topic.moving.stream
            if stream is None:
                raise MoveRefused("EPHEMERAL: an ephemeral channel cannot be moved")
            if channel is not None and not stream.is_fixed:
                await self._fix(topic, channel)
            if moved is not None:
                topic.moving.confirm(name, moved)
            if stream.plan is None:
                for _ in topic.moving.make_plan(name, stream):
                    await trio.lowlevel.checkpoint()
            if (made := stream.plan) is None:
                raise DeletedError(topic.name)
            return await self._read(topic, made, max_bytes)

    async def _fix(self, topic: Topic, channel: Channel) -> None:
        """Begin the stream of a channel, durably. From now on its messages only become fewer."""
        if count := channel.in_flight_count:
            raise MoveRefused(f"IN_FLIGHT: {_messages_are(count, topic, channel.name)} in flight")
        if count := len(channel.messages.withdrawn):
            to = channel.settings.dead_letter_topic
            these = _messages_are(count, topic, channel.name)
            raise MoveRefused(f"IN_FLIGHT: {these} on the way to dead-letter topic {to}")
        await self.checkpointer.change_channel(channel, Channel.fix_stream, with_others=True)

    async def _read(self, topic: Topic, plan: MovePlan, max_bytes: int) -> MoveBatch:
        builder = GroupBuilder(self.clock.ahead_ns())
        found = _Records(self.readers, topic, time.time_ns())
        until_s = trio.current_time() + _READ_S
        through = -1
        for start, end in list(islice(plan.spans, _MAX_SPANS)):
            while start < end:
                start = through = await found.add(builder, plan, start, end, max_bytes - builder.size)
                if (
                    builder.size >= max_bytes
                    or builder.groups >= _MAX_GROUPS
                    or trio.current_time() > until_s
                ):
                    return self._batch(builder, found, plan, through)
        return self._batch(builder, found, plan, through)

    def _batch(self, builder: GroupBuilder, found: "_Records", plan: MovePlan, end: int) -> MoveBatch:
        through = end - 1 if end > 0 else None
        return MoveBatch(builder.take(), builder.count, through, plan.left, found.damaged, found.expired)


def check_move(topic: Topic, move_id: str) -> Move:
    """Return the topic's move. Raises MoveRefused if it has another id, or there is none."""
    move = topic.moving.current
    if move is None or move.id != move_id:
        raise MoveRefused(f"NO_SUCH_MOVE: topic {topic.name} has no move {move_id[:32]}")
    return move


def _what_is_left(topic: Topic) -> str:
    names: list[str | None] = [None, *(channel.name for channel in topic.moving.channels)]
    for name in names:
        if left := topic.moving.left(name):
            return f"{_messages_are(left, topic, name)} not moved"
    return ""


def _messages_are(count: int, topic: Topic, channel: str | None) -> str:
    where = topic.name if channel is None else f"{topic.name}/{channel}"
    return f"{count_of(count, 'message')} of {where} {is_or_are(count)}"


class _Records:
    """Reads the records of ascending messages.

    Attributes:
        damaged, expired: Messages left out.
    """

    def __init__(self, readers: ReaderPool, topic: Topic, now_ns: int) -> None:
        self.damaged = self.expired = 0
        self._readers = readers
        self._topic = topic
        self._oldest_ns = now_ns - topic.view.ttl_ns if topic.view.ttl_ns else 0
        self._found: list[RecordBatch] = []  # ascending

    async def add(self, builder: GroupBuilder, plan: MovePlan, start: int, end: int, max_bytes: int) -> int:
        """Add messages of one record from `start` on, up to `end`: at least one, and beyond that at most `max_bytes`.

        Returns the sequence to continue from.
        """
        record = self._holding(start)
        if record is None:
            record = await self._read(start, end)
        if record is None or record.base_sequence >= end:
            # Of messages before the log, each may have been carried forward, or not.
            stop = start + 1 if start < self._topic.log.first_sequence else end
            self.damaged += stop - start
            return stop
        if record.base_sequence > start:
            self.damaged += record.base_sequence - start
            start = record.base_sequence
        stop = min(end, record.next_sequence)
        sizes = record.messages.sizes[start - record.base_sequence : stop - record.base_sequence]
        ends = list(accumulate(size + _SIZE_BYTES for size in sizes))
        stop = start + max(1, bisect_right(ends, max_bytes))
        if record.timestamp_ns < self._oldest_ns:
            self.expired += stop - start
        else:
            builder.add(record, list(plan.split(start, stop)))
        return stop

    def _holding(self, sequence: int) -> RecordBatch | None:
        while self._found and self._found[0].next_sequence <= sequence:
            del self._found[0]
        return self._found[0] if self._found and self._found[0].base_sequence <= sequence else None

    async def _read(self, start: int, end: int) -> RecordBatch | None:
        size = READ_BYTES if end - start >= _LONG_SPAN else REDELIVERY_READ_BYTES
        records = await self._readers.read(
            self._topic, partial(self._topic.store.read_scattered, start, size)
        )
        # Records of earlier versions may be large.
        pieces = [piece for record in records for piece in split_batch(record)]
        self._found = [piece for piece in pieces if piece.next_sequence > start]
        return self._found[0] if self._found else None


# ---------------------------------------------------------------------- at the target


_GROUPS_AT_ONCE = 500
"""Groups that one write stores: each is a record, and costs Python work in one turn of the event loop."""


def _closed(producer: str) -> str:
    """Return the name of the producer whose existence says that a stream is closed."""
    return f"{producer}:closed"


@dataclass(eq=False, slots=True)
class MovedMessages:
    """Stores the messages that other brokers move here."""

    broker: Broker
    topics: TopicRegistry
    checkpointer: Checkpointer
    _storing: dict[tuple[str, str], trio.Event] = field(default_factory=dict, init=False)

    async def store(
        self, topic: Topic, producer: str, groups: Sequence[MovedGroup], *, close: bool = False
    ) -> int:
        """Store the groups that are not stored yet, durably, and return the number of their messages.

        Args:
            producer: The name of the stream.
            groups: In ascending order. If there are none, only make sure that what is stored is durable.
            close: Refuse further groups of this stream, durably. Otherwise a request that was delayed in the network
                could store messages after the source has ended the move and kept them.

        Raises:
            MoveRefused: This broker is the source, a channel does not exist, or a group is stored in part, or the
                stream is closed.
            PublishRefused: Some of the groups may be stored, and are durable after the next call.
            SaveError: The stream is not closed.
        """
        key = topic.name, producer
        while (other := self._storing.get(key)) is not None:
            await other.wait()
        this = self._storing[key] = trio.Event()
        try:
            with trio.CancelScope(shield=True):  # another request must not overtake it; the disk bounds it
                new = self._new(topic, producer, groups)
                if new or close:
                    refuse_unless_remembered(topic, _closed(producer) if close else producer)
                for at in range(0, len(new), _GROUPS_AT_ONCE):
                    await self._publish(topic, producer, new[at : at + _GROUPS_AT_ONCE])
                # Also without new ones: an earlier request may have been cut off before the sync.
                await self.topics.sync_durably(topic.name)
                if close:
                    marker, now_ns = LastBatch(_closed(producer), 0, topic.end - 1), time.time_ns()
                    await self.checkpointer.change(topic, lambda each: each.producers.record(marker, now_ns))
        finally:
            del self._storing[key]
            this.set()
        return sum(len(group.messages) for group in new)

    def _new(self, topic: Topic, producer: str, groups: Sequence[MovedGroup]) -> list[MovedGroup]:
        move = topic.moving.current
        if move is not None and producer.startswith(move.producer(None)):
            raise MoveRefused("SAME_BROKER: this broker is the source of the move")
        for group in groups:
            if group.channel is not None and group.channel not in topic.channels:
                raise self._no_channel(topic, group.channel)
        if groups and topic.producers.number_of(_closed(producer)) is not None:
            raise MoveRefused("CLOSED: the move is being ended. Complete that with qcli drain --stop")
        number = topic.producers.number_of(producer)
        new = [group for group in groups if number is None or group.last > number]
        if new and number is not None and new[0].first <= number:
            raise MoveRefused(f"OVERLAP: messages up to {number} of this stream are stored")
        return new

    def _no_channel(self, topic: Topic, channel: str) -> MoveRefused:
        return MoveRefused(f"NO_CHANNEL: create channel {topic.name}/{channel} first")

    async def _publish(self, topic: Topic, producer: str, groups: Sequence[MovedGroup]) -> None:
        channels = dict.fromkeys(group.channel for group in groups if group.channel is not None)
        try:
            await self.topics.publish(
                topic.name, [self._publication(producer, each) for each in groups], channels=channels
            )
        except NoChannel as exc:  # it was just deleted
            raise self._no_channel(topic, exc.channel) from exc

    def _publication(self, producer: str, group: MovedGroup) -> Publication:
        due_ns = group.due_ns
        if due_ns:
            due_ns = max(IN_SEQUENCE_NS + 1, due_ns - self.topics.clock.ahead_ns())
        elif group.channel is not None:
            due_ns = IN_SEQUENCE_NS
        metadata = metadata_for_moved(producer, group.last, group.channel, group.letters, group.headers)
        return Publication([group.messages], due_ns, metadata)
