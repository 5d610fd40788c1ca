"""Topics and channels that clients make, use and delete, each made durably before anybody can use it."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import trio

from ..log import LogError
from ..protocol import is_ephemeral
from .delivery import Delivery
from .errors import DeletedError, LimitReached, PublishRefused, SaveError
from .ingest.publication import Publication
from .ingest.publisher import Publisher
from .options import BrokerOptions
from .readers import Readers
from .recovery import TopicLoader
from .state.broker import Broker
from .state.channel import Channel
from .state.checkpoint import Checkpoint
from .state.consumer import Consumer
from .state.topic import Topic
from .storage.checkpointer import Checkpointer
from .storage.data_folder import DataFolder
from .timers import Timers

if TYPE_CHECKING:
    from ..lookup.registration import LookupRegistration

logger = logging.getLogger("trio_nsq.broker")

_SYNC_AGAIN_S = 1.0
"""A sync that failed is tried again after this long."""
_DUE_AT_ONCE = 256
"""So many messages that waited for a channel are due in it when it is made; more of them at the next alarm."""


@dataclass(frozen=True, slots=True, eq=False)
class _Deletion:
    """The deletion of a topic, under way.

    Attributes:
        only_if_unused: The topic was made for a request that was refused. Other requests wait until it is gone.
        done: Set at the end.
    """

    only_if_unused: bool
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False, slots=True)
class Topics:
    """Makes and deletes topics and channels. One for a broker.

    Attributes:
        nursery: Runs requests to discovery services.
        lookup: Knows which channels a new topic has elsewhere; None: nobody does.
    """

    broker: Broker
    options: BrokerOptions
    folder: DataFolder
    timers: Timers
    publisher: Publisher
    delivery: Delivery
    checkpointer: Checkpointer
    loader: TopicLoader
    readers: Readers
    nursery: trio.Nursery
    lookup: "LookupRegistration | None" = field(default=None, init=False)
    _deleting: dict[str, _Deletion] = field(default_factory=dict, init=False)
    # Channels that are being made.
    _coming: WeakKeyDictionary[Topic, set[str]] = field(default_factory=WeakKeyDictionary, init=False)
    _precreating: dict[Topic, trio.Event] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------------ publishing

    async def publish(self, topic_name: str, publications: Sequence[Publication]) -> None:
        """Store publications to a topic, made if need be, as `Publisher.publish`. Raises PublishRefused."""
        try:
            topic = await self._topic_to_use(topic_name)
            while (precreating := self._precreating.get(topic)) is not None:
                await precreating.wait()
                topic = await self._topic_to_use(topic_name)  # it may be deleted by then
        except LogError as exc:
            raise PublishRefused(str(exc)) from exc
        try:
            await self.publisher.publish(topic, publications)
        except PublishRefused:
            await self._forget_new(topic)
            raise
        self._mark_publishable(topic)

    async def publish_durably(self, topic_name: str, publication: Publication) -> None:
        """Return when a publication is on stable storage, whatever the sync mode. Raises PublishRefused."""
        await self.publish(topic_name, [publication])
        with trio.CancelScope(shield=True):  # once written, it must not be published a second time
            while (topic := self.broker.topics.get(topic_name)) is not None and self.broker.serves(topic):
                if await self.publisher.sync(topic):
                    break
                await trio.sleep(_SYNC_AGAIN_S)

    def _mark_publishable(self, topic: Topic) -> None:
        """Let a topic be published to at once, if it is there to stay: it has messages, or is saved."""
        if topic in self.broker.never_saved and not topic.log.next_sequence:
            return  # an ephemeral channel is all that it has
        if topic.name not in self._deleting and topic not in self._precreating and self.broker.serves(topic):
            self.broker.publishable[topic.name] = topic

    # ------------------------------------------------------------------ consuming

    async def subscribe(
        self, topic_name: str, channel_name: str, consumer: Consumer, *, private: bool = False
    ) -> Channel:
        """Let a consumer have messages of a channel; it and its topic are made, durably, if need be.

        Args:
            private: If the channel is made, make it a private one; its name must be an ephemeral one.

        Raises:
            LogError, SaveError: The channel is not there, and was not made.
            PublishRefused: Its topic is being deleted.
            LimitReached: It has as many consumers as it may have.
        """
        channel = await self.channel(topic_name, channel_name, private=private)
        limit = self.options.max_channel_consumers
        if limit and len(channel.consumers) >= limit:
            raise LimitReached(f"consumers for {topic_name}:{channel_name} exceeds limit of {limit}")
        channel.add(consumer)
        return channel

    def unsubscribe(self, channel: Channel, consumer: Consumer) -> None:
        """Take a consumer out of its channel; what it had in flight goes to the others."""
        channel.remove(consumer)
        alive = self.broker.topic_of(channel) is not None
        if alive and channel.ephemeral and not channel.consumers:
            self.broker.delete_channel(channel)
        elif alive:
            self.delivery.deliver(channel)

    # ------------------------------------------------------------------ making

    async def create(self, topic_name: str, channel_name: str | None = None) -> None:
        """Make a topic, or a channel and its topic, durably.

        Raises:
            LogError, SaveError: It is not there, or would not outlast a restart.
            PublishRefused: It is being deleted.
        """
        if channel_name is not None:
            await self.channel(topic_name, channel_name)
            return
        topic = await self._topic_to_use(topic_name)
        try:
            await self.checkpointer.save_new(topic)
        except SaveError:
            await self._forget_new(topic)
            raise

    async def _topic_to_use(self, name: str) -> Topic:
        """The topic of this name, made if need be, without a checkpoint behind that.

        Raises:
            LogError: It cannot be made.
            PublishRefused: It is being deleted.
        """
        while (deletion := self._deleting.get(name)) is not None and deletion.only_if_unused:
            await deletion.done.wait()
        if deletion is not None or self.broker.stopping:
            raise PublishRefused("exiting")
        return self._topic(name)

    async def channel(self, topic_name: str, name: str, *, private: bool = False) -> Channel:
        """The channel of this name. A new one is on disk before anybody can use it; `private` as in `subscribe`.

        Raises:
            LogError, SaveError: It is not there, and was not made.
            PublishRefused: Its topic is being deleted.
        """
        while (channel := (topic := await self._topic_to_use(topic_name)).channels.get(name)) is None:
            self._check_channel_limit(topic, name)
            if is_ephemeral(name):
                if topic in self.broker.never_saved:
                    with suppress(SaveError):  # a consumer that is to empty a full disk can do without
                        await self.checkpointer.save(topic)
                    self._check_channel_limit(await self._topic_to_use(topic_name), name)
                channel = self._add_channel(topic_name, name, private=private)
                break

            try:
                await self._save_and_add(topic, [name], with_others=True)
            except DeletedError:
                continue  # the topic was deleted meanwhile
            except SaveError:
                await self._forget_new(topic)
                raise
        self._mark_publishable(topic)
        return channel

    def _check_channel_limit(self, topic: Topic, name: str) -> None:
        """Raise LimitReached if the topic may not have a channel of this name besides those it has or is getting."""
        limit = self.options.max_channels
        if limit and len((topic.channels.keys() | self._coming.get(topic, set())) - {name}) >= limit:
            raise LimitReached(f"topic {topic.name} has {limit} channels, as many as --max-channels allows")

    async def _forget_new(self, topic: Topic) -> None:
        """Let go of a topic that could not be saved, unless others use it: no refused request leaves one behind."""
        if self._is_new(topic) and topic not in self._precreating:
            try:
                await self.delete_topic(topic, only_if_unused=True)
            except OSError as exc:
                logger.error("cannot remove the folder of topic %s: %s", topic.name, exc.strerror)

    def _is_new(self, topic: Topic) -> bool:
        """Whether a topic was never saved, and has neither messages nor channels."""
        return topic in self.broker.never_saved and not (topic.channels or topic.log.next_sequence)

    # ------------------------------------------------------------------ deleting

    async def delete_topic(self, topic: Topic, *, only_if_unused: bool = False) -> None:
        """Delete a topic with its channels and files; its clients are disconnected.

        With `only_if_unused` only if it was never saved, and has neither messages nor channels. Raises OSError: nothing
        was deleted.
        """
        while (under_way := self._deleting.get(topic.name)) is not None:
            await under_way.done.wait()
        if self.broker.topics.get(topic.name) is not topic:
            return
        self._deleting[topic.name] = _Deletion(only_if_unused)
        self.broker.deleting.add(topic.name)
        self.broker.publishable.pop(topic.name, None)
        try:
            with trio.CancelScope(shield=True):  # bounded by the disk; half a deletion is none
                async with self.checkpointer.locked(topic):
                    await self._delete(topic, only_if_unused)
        finally:
            self.broker.deleting.discard(topic.name)
            self._deleting.pop(topic.name).done.set()

    async def delete_unavailable(self, name: str) -> None:
        """Delete the files of a topic that is unavailable. Raises OSError: nothing was deleted."""
        with trio.CancelScope(shield=True):
            is_done = await self.loader.delete(name)
        if not is_done and (topic := self.broker.topics.get(name)) is not None:
            await self.delete_topic(topic)  # it was just opened

    async def _delete(self, topic: Topic, only_if_unused: bool) -> None:
        await self.publisher.until_idle(topic)
        if only_if_unused and not self._is_new(topic):
            return
        retired: Path | None = None
        if not topic.ephemeral:
            # First, so that a crash or an error leaves the topic as it was. Consumers read on from open files.
            work = partial(self.folder.retire_topic, topic.name)
            retired = await trio.to_thread.run_sync(work)
            await self.publisher.until_idle(topic)  # a scheduled sync may have begun meanwhile
        self.publisher.syncs.forget(topic)
        self.broker.delete_topic(topic)
        self.readers.wake(topic)
        self.checkpointer.forget(topic)
        if retired is not None:
            await trio.to_thread.run_sync(self.folder.files.remove_folder, retired)

    async def deletions_done(self) -> None:
        """Wait until no topic is being deleted."""
        for deletion in list(self._deleting.values()):
            await deletion.done.wait()

    # ------------------------------------------------------------------ new topics

    def _topic(self, name: str) -> Topic:
        """The topic of this name, made if need be: then publishes to it wait until it has its channels."""
        topic = self.broker.topics.get(name)
        if topic is None:
            limit = self.options.max_topics
            if limit and len(self.broker.topics) >= limit:
                raise LimitReached(f"there are {limit} topics, as many as --max-topics allows")
            topic = self.broker.topic(name)
            if self.lookup is not None and self.lookup.addresses:
                self._precreating[topic] = trio.Event()
                self.nursery.start_soon(self._precreate, topic, self.lookup)
        return topic

    async def _precreate(self, topic: Topic, lookup: "LookupRegistration") -> None:
        """Make the channels that a new topic has elsewhere, durably, so that they miss none of its messages."""
        try:
            names = await lookup.channels(topic.name)
            if self.broker.stopping or self.broker.topics.get(topic.name) is not topic:
                return
            known = topic.channels.keys() | self._coming.get(topic, set())
            new = [name for name in names if name not in known]
            room = self.options.max_channels - len(known)
            if self.options.max_channels and room < len(new):
                logger.warning(
                    "topic %s: --max-channels allows only some of its channels elsewhere", topic.name
                )
                names = [*known.intersection(names), *new[: max(0, room)]]
            await self._save_and_add(topic, names)
        except (SaveError, DeletedError):
            pass  # an error is logged; what cannot be saved is not made
        except Exception:
            # A mistake of ours: the topic has to do without.
            logger.exception("%s: channels could not be made in advance", topic.name)
        finally:
            self._precreating.pop(topic).set()

    async def _save_and_add(self, topic: Topic, names: Sequence[str], *, with_others: bool = False) -> None:
        """Make channels; arguments and errors as of `Checkpointer.change`. Ephemeral ones are not saved."""

        def plan(checkpoint: Checkpoint) -> None:
            for name in names:
                # Another request may just have made it.
                if name not in topic.channels and not is_ephemeral(name):
                    checkpoint.add_channel(name)

        def apply() -> None:
            for name in names:
                self._add_channel(topic.name, name)

        coming = self._coming.setdefault(topic, set())
        coming.update(names)
        try:
            await self.checkpointer.change(topic, plan, apply, with_others=with_others)
        finally:
            coming.difference_update(names)

    def _add_channel(self, topic_name: str, channel_name: str, *, private: bool = False) -> Channel:
        """The channel of this name, made if need be: it may begin with messages that wait for their time."""
        self._topic(topic_name)
        known_ns = self.broker.alarms.next_ns
        channel = self.broker.channel(topic_name, channel_name, private=private)
        if channel.next_due_ns is not None:
            # Its first consumer could come before the timer.
            channel.tick(self.timers.now_ns(), _DUE_AT_ONCE)
        if self.broker.alarms.next_ns != known_ns:
            self.timers.look_again()
        return channel
