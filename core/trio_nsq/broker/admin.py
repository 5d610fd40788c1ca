"""Administrative changes to topics and channels: pause, empty, configure, delete, seek.

Each change is saved before it is applied, so a request that fails changes nothing. All of these raise SaveError, or
DeletedError if the topic or the channel is deleted meanwhile. `cancel` and `seek` also raise MoveRefused, if the topic
is being moved to another broker.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from ..log.positions import Position
from .clock import BrokerClock
from .dead_letters import DEAD_LETTERS, refuse_loop
from .delivery import Deliverer
from .errors import DeletedError, OtherLog
from .reader_pool import ReaderPool
from .state.broker import Broker
from .state.channel import Channel
from .state.cooperative import forget
from .state.seek import Seek, SeekResult
from .state.topic import Topic
from .state.withdrawn import WithdrawnMessage
from .storage.checkpointer import Checkpointer


@dataclass(frozen=True, slots=True)
class Admin:
    """Changes topics and channels for operators. One for a broker."""

    broker: Broker
    clock: BrokerClock
    delivery: Deliverer
    checkpointer: Checkpointer
    readers: ReaderPool

    # ------------------------------------------------------------------ topics

    async def pause_topic(self, topic: Topic, paused: bool) -> None:
        """Pause a topic or unpause it, durably. A paused topic distributes no messages to its channels."""
        if paused:
            await self.checkpointer.change(topic, Topic.pause)
        else:
            await self.checkpointer.change(
                topic, Topic.unpause, then=partial(self.delivery.deliver_topic, topic)
            )

    async def empty_topic(self, topic: Topic) -> None:
        """Drop the messages a topic has not distributed yet, durably. Its channels keep their messages."""
        await self.checkpointer.change(topic, Topic.empty, channels=topic.channels)

    async def forget_producer(self, topic: Topic, producer: str) -> None:
        """Forget an idempotent producer of a topic, durably: it may number its batches from the start again."""
        await self.checkpointer.change(topic, lambda each: each.producers.forget(producer), with_others=True)

    async def configure_topic(self, topic: Topic, changes: Mapping[str, Any]) -> None:
        """Change settings of a topic, durably. Also raises SettingsError."""
        await self.checkpointer.change(
            topic,
            lambda each: each.configure(changes),
            then=partial(self.delivery.deliver_topic, topic),  # a limit may have been raised
        )

    # ------------------------------------------------------------------ channels

    async def pause(self, channel: Channel, paused: bool) -> None:
        """Pause a channel or unpause it, durably. On a pause, messages already in send buffers are sent."""

        def change(each: Channel) -> None:
            each.paused = paused

        def then() -> None:
            if paused:
                for consumer in channel.consumers:
                    consumer.subscriber.send_delivered()
            else:
                self.delivery.deliver(channel)

        await self.checkpointer.change_channel(channel, change, then=then)

    async def empty(self, channel: Channel) -> None:
        """Drop all messages of a channel, durably: ready, in flight and deferred."""
        await _run_cooperatively(forget(await self.checkpointer.change_channel(channel, Channel.empty)))

    async def configure_channel(self, channel: Channel, changes: Mapping[str, Any]) -> None:
        """Change settings of a channel, durably. Also raises SettingsError."""
        await self.checkpointer.change_channel(
            channel,
            lambda each: each.configure(changes),
            check=lambda: refuse_loop(self.broker, channel, changes),
            then=lambda: self.delivery.deliver(channel),  # exhausted messages may have attempts left now
        )

    async def delete_channel(self, channel: Channel) -> None:
        """Delete a channel, durably. Its clients are disconnected."""
        await self.checkpointer.change(
            self.broker.existing_topic_of(channel),
            lambda each: each.remove_channel(each.counterpart(channel)),
            channels=[channel.name],
            check=partial(self.broker.existing_topic_of, channel),
        )

    async def cancel(self, channel: Channel, sequences: Collection[int]) -> list[int]:
        """Drop the deferred ones of these messages, durably, and return their sequences."""
        topic = self.broker.existing_topic_of(channel)
        cancelled = await self.checkpointer.change_channel(
            channel, lambda each: each.cancel(sequences), check=topic.moving.refuse_changes
        )
        if len(cancelled) < len(sequences):
            await self.checkpointer.save(topic)  # messages that came due meanwhile are kept, but not saved
        return cancelled

    async def dispose(self, channel: Channel, messages: Sequence[WithdrawnMessage]) -> int:
        """Finish withdrawn messages, durably. On an error, put them back.

        Returns the number of messages finished; messages dropped meanwhile do not count.
        """
        try:
            return await self.checkpointer.change_channel(channel, lambda each: each.dispose(messages))
        except BaseException:
            self.delivery.put_back(channel, messages)
            raise

    async def seek(
        self,
        channel: Channel,
        position: Position,
        *,
        incarnation: bytes | None = None,
        dry_run: bool = False,
    ) -> tuple[SeekResult, int]:
        """Move a channel to a position, durably. With `dry_run`, only compute the effect.

        Args:
            incarnation: The log that the position is in, 16 bytes; None: whichever the topic has.

        Returns the move, and the oldest sequence that the channel could move to.

        Raises:
            OtherLog: The topic has another log.
            LogReadError, SaveError: A read or write failed; the channel was not moved.
            DeletedError: The channel was deleted meanwhile.
        """
        topic = self.broker.existing_topic_of(channel)
        wanted = await self.readers.call(topic, partial(position.sequence_in, topic.log))
        if not dry_run:
            if topic.dead_letters.moved_count:
                await self.checkpointer.save(topic)
            await self._save_dead_letters()
        async with self.checkpointer.locked(topic):  # retention may be deleting messages there
            if not self.broker.serves_channel(channel):
                raise DeletedError(channel.name)
            topic.moving.refuse_changes()
            if incarnation is not None and incarnation != topic.log.incarnation:
                raise OtherLog(topic.name)
            oldest = topic.log.first_sequence
            move = await self._move(channel, max(wanted, oldest), dry_run=dry_run)
        return move, oldest

    async def _move(self, channel: Channel, sequence: int, *, dry_run: bool) -> SeekResult:
        """Move a channel, or compute the effect, in steps that let other tasks run. Its topic must be locked."""
        seek = Seek(channel, sequence, self.clock.now_ns())
        try:
            await _run_cooperatively(seek.prepare())
            move = seek.effect()
            if dry_run:
                return move
            forgotten = await self.checkpointer.change_channel(
                channel, seek.move, then=partial(self.broker.existing_topic_of, channel), locked=True
            )
        finally:
            seek.close()
        self.delivery.deliver(channel)
        with trio.CancelScope(shield=True):  # the move is saved: complete it even if the request is cancelled
            await _run_cooperatively(forget(forgotten))
        return move

    async def _save_dead_letters(self) -> None:
        """Save all dead-letter topics, so that no restart removes replayed messages as moved. Raises SaveError."""
        for topic in list(self.broker.topics.values()):
            if DEAD_LETTERS in topic.channels:
                await self.checkpointer.save(topic)


async def _run_cooperatively(steps: Iterator[None]) -> None:
    """Run short steps, and let other tasks run after each."""
    for _ in steps:
        await trio.lowlevel.checkpoint()
