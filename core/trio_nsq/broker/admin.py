"""What operators change: each change is saved first, and made then.

So a request that is refused changes nothing. All of these raise SaveError, or DeletedError if the topic or the channel
is deleted meanwhile.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from .dead_letters import DEAD_LETTERS, refuse_loop
from .delivery import Delivery
from .errors import DeletedError
from .positions import Position
from .readers import Readers
from .state.broker import Broker
from .state.channel import Channel
from .state.checkpoint import ChannelState, Checkpoint
from .state.seek import Move, Seek
from .state.steps import forget
from .state.topic import Topic
from .state.withdrawn import Withdrawn
from .storage.checkpointer import Checkpointer
from .timers import Timers


@dataclass(frozen=True, slots=True)
class Admin:
    """Changes topics and channels for operators. One for a broker."""

    broker: Broker
    timers: Timers
    delivery: Delivery
    checkpointer: Checkpointer
    readers: Readers

    # ------------------------------------------------------------------ topics

    async def pause_topic(self, topic: Topic, paused: bool) -> None:
        """Give a topic's channels nothing more, or go on, durably."""

        def apply() -> None:
            if paused:
                topic.pause()
            else:
                topic.unpause()
                self.delivery.deliver_topic(topic)

        await self.checkpointer.change(
            topic, lambda checkpoint: checkpoint.change_topic(paused=paused), apply
        )

    async def empty_topic(self, topic: Topic) -> None:
        """Drop what waits in a topic itself, durably; its channels keep theirs."""
        await self.checkpointer.change(topic, topic.plan_empty, topic.empty)

    async def forget_producer(self, topic: Topic, producer: str) -> None:
        """Forget what a producer has published to a topic, durably: its numbers may begin again."""

        await self.checkpointer.change(
            topic,
            lambda checkpoint: checkpoint.forget_producer(producer),
            lambda: topic.producers.forget(producer),
            with_others=True,
        )

    async def configure_topic(self, topic: Topic, changes: Mapping[str, Any]) -> None:
        """Change settings of a topic, durably. Also raises SettingsError."""

        def apply() -> None:
            topic.configure(changes)
            self.delivery.deliver_topic(topic)  # there may be more than there may be now

        await self.checkpointer.change(
            topic, lambda checkpoint: topic.plan_configure(checkpoint, changes), apply
        )

    async def pause(self, channel: Channel, paused: bool) -> None:
        """Send nothing more to a channel's clients, or go on, durably; what is in their buffers goes out."""

        def apply() -> None:
            channel.paused = paused
            if paused:
                for consumer in channel.consumers:
                    consumer.subscriber.send_delivered()
            else:
                self.delivery.deliver(channel)

        await self._change(channel, lambda: channel.state_if_paused(paused), apply)

    async def empty(self, channel: Channel) -> None:
        """Drop everything a channel has, durably: ready, in flight and deferred."""
        forgotten: list[deque[Any]] = []
        await self._change(channel, channel.state_if_empty, lambda: forgotten.extend(channel.empty()))
        await _in_turns(forget(forgotten))

    async def configure_channel(self, channel: Channel, changes: Mapping[str, Any]) -> None:
        """Change settings of a channel, durably. Also raises SettingsError."""

        def plan() -> ChannelState:
            refuse_loop(self.broker, channel, changes)
            return channel.state_if_configured(changes)

        def apply() -> None:
            channel.configure(changes)
            self.delivery.deliver(channel)  # what was given up may come again

        await self._change(channel, plan, apply)

    async def delete_channel(self, channel: Channel) -> None:
        """Delete a channel, durably; its clients are disconnected."""
        await self._change(channel, lambda: None, partial(self.broker.delete_channel, channel))

    async def cancel(self, channel: Channel, sequences: Collection[int]) -> list[int]:
        """Drop those of these messages that are deferred, durably, and return them."""
        topic, cancelled = self._topic_of(channel), list[int]()

        def apply() -> None:
            cancelled.extend(channel.cancel(sequences))

        await self._change(channel, lambda: channel.state_if_cancelled(sequences), apply)
        if len(cancelled) < len(sequences):
            await self.checkpointer.save(topic)  # one that came due meanwhile is kept, and the state lacks it
        return cancelled

    async def dispose(self, channel: Channel, messages: Sequence[Withdrawn]) -> int:
        """Be done with messages that were withdrawn, durably; if that fails, put them back.

        Returns how many of them were not dropped meanwhile.
        """
        disposed = 0

        def apply() -> None:
            nonlocal disposed
            disposed = channel.dispose(messages)

        try:
            await self._change(channel, lambda: channel.state_if_disposed(messages), apply)
        except BaseException:
            self.delivery.put_back(channel, messages)
            raise
        return disposed

    def _topic_of(self, channel: Channel) -> Topic:
        """The topic that a channel is in. Raises DeletedError."""
        topic = self.broker.topic_of(channel)
        if topic is None:
            raise DeletedError(channel.name)
        return topic

    async def _change(
        self, channel: Channel, planned: Callable[[], ChannelState | None], apply: Callable[[], None]
    ) -> None:
        """Change a channel, durably, so that its state becomes the planned one; None deletes the channel."""
        topic = self._topic_of(channel)

        def plan(checkpoint: Checkpoint) -> None:
            if topic.channels.get(channel.name) is not channel:
                raise DeletedError(channel.name)
            state = planned()
            if channel.ephemeral:
                return
            if state is None:
                checkpoint.remove_channel(channel.name)
            else:
                checkpoint.change_channel(state)

        await self.checkpointer.change(topic, plan, apply)

    async def seek(self, channel: Channel, position: Position, *, dry_run: bool = False) -> tuple[Move, int]:
        """Move a channel, durably, or find out what that would do.

        Returns the move, and the oldest sequence that could have been moved to.

        Raises:
            LogReadError, SaveError: The operating system refused; nothing was moved.
            DeletedError: The channel was deleted meanwhile.
        """
        topic = self._topic_of(channel)
        wanted = await self.readers.call(topic, partial(position.sequence_in, topic.log))
        if not dry_run:
            if topic.dead_letters.moved_count:
                await self.checkpointer.save(topic)
            await self._save_dead_letters()
        async with self.checkpointer.locked(topic):  # which might be deleting what the channel goes back to
            if not self.broker.serves_channel(channel):
                raise DeletedError(channel.name)
            oldest = topic.log.first_sequence
            move = await self._move(topic, channel, max(wanted, oldest), dry_run=dry_run)
        return move, oldest

    async def _move(self, topic: Topic, channel: Channel, sequence: int, *, dry_run: bool) -> Move:
        """Move a channel whose topic is locked, or find out what that would do, while others have their turns."""
        seek = Seek(channel, sequence, self.timers.now_ns())
        moving: Iterator[None] = iter(())

        def plan(checkpoint: Checkpoint) -> None:
            if not channel.ephemeral:
                checkpoint.change_channel(seek.state())

        def apply() -> None:
            nonlocal moving
            if not self.broker.serves_channel(channel):
                raise DeletedError(channel.name)
            moving = seek.apply()
            next(moving)

        try:
            await _in_turns(seek.prepare())
            move = seek.effect()
            if dry_run:
                return move
            await self.checkpointer.change_locked(topic, plan, apply)
        finally:
            seek.close()
        self.delivery.deliver(channel)
        with trio.CancelScope(shield=True):  # it is moved, whoever asked for it
            await _in_turns(moving)
        return move

    async def _save_dead_letters(self) -> None:
        """Let no restart take messages from a channel again because they were dead letters once. Raises SaveError."""
        for topic in list(self.broker.topics.values()):
            if DEAD_LETTERS in topic.channels:
                await self.checkpointer.save(topic)


async def _in_turns(steps: Iterator[None]) -> None:
    """Do something in steps, none of which takes long, and let others have their turns."""
    for _ in steps:
        await trio.lowlevel.checkpoint()
