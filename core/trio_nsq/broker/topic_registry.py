"""Creates, uses and deletes topics and channels for clients. A topic or channel is saved before a client can use it."""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ..log import LogError
from ..protocol import is_ephemeral
from .clock import BrokerClock
from .delivery import Deliverer
from .errors import DeletedError, Draining, LimitReached, NoChannel, NotLeading, PublishRefused, SaveError
from .ingest.publication import Publication
from .ingest.write_path import WritePath
from .options import BrokerOptions
from .reader_pool import ReaderPool
from .recovery import TopicLoader
from .state.broker import Broker
from .state.channel import Channel
from .state.consumer import Consumer
from .state.topic import Topic
from .storage.checkpointer import Checkpointer
from .storage.data_folder import DataFolder

if TYPE_CHECKING:
    from ..lookup.registration import LookupRegistration

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_SYNC_RETRY_S = 1.0
"""Delay before the next attempt after a failed sync."""
_DUE_AT_ONCE = 256
"""A new channel gets this many of the due messages that waited for it at once; further ones at the next deadline."""


class _InUse(Exception):
    """A channel that was to be deleted is used."""


@dataclass(eq=False, slots=True)
class TopicRegistry:
    """Creates and deletes topics and channels. One for a broker.

    Attributes:
        nursery: Runs requests to discovery services.
        lookup: Returns the channels that a new topic has on other brokers; None without discovery services.
    """

    broker: Broker
    options: BrokerOptions
    folder: DataFolder
    clock: BrokerClock
    write_path: WritePath
    delivery: Deliverer
    checkpointer: Checkpointer
    loader: TopicLoader
    readers: ReaderPool
    nursery: trio.Nursery
    lookup: "LookupRegistration | None" = field(default=None, init=False)
    # Names of channels that are being created.
    _creating: dict[Topic, set[str]] = field(default_factory=dict, init=False)
    # Set when a name has left `Broker.deleting`, or a topic has the channels of other brokers, if a task waits for it.
    _changes: dict[str | Topic, trio.Event] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------------ publishing

    async def publish(
        self,
        topic_name: str,
        publications: Sequence[Publication],
        *,
        internal: bool = False,
        channels: Iterable[str] = (),
    ) -> None:
        """Store publications as `WritePath.publish`; create the topic if needed.

        Args:
            internal: The broker moves messages that it has already. It does so while it drains, too.
            channels: The only channels that get some of the messages. Each must exist: it may just have been deleted.

        Raises:
            PublishRefused: Nothing was stored. NoChannel, if a channel does not exist.
        """
        topic = await self.until_publishable(topic_name, internal=internal)
        if missing := [name for name in channels if name not in topic.channels]:
            self.forget_new_soon(topic)
            raise NoChannel(topic_name, missing[0])
        await self.write_path.publish(topic, publications)

    async def until_publishable(self, name: str, *, internal: bool = False) -> Topic:
        """Return the topic of this name as soon as it is `Broker.publishable`; create it if needed.

        The caller then publishes without waiting in between.

        Args:
            internal: As of `publish`.

        Raises:
            PublishRefused: The topic accepts no publishes, or cannot be created.
        """
        while True:
            if not internal:
                self.refuse_if_draining()  # before the topic is created
            if await self._wait_for_deletion(name):
                continue
            try:
                topic = self._topic(name)
            except LogError as exc:
                raise PublishRefused(str(exc)) from exc
            if topic not in self.broker.incomplete:
                return topic
            await self._change(topic)

    def refuse_if_draining(self) -> None:
        """Raise Draining if the broker accepts no publishes of clients."""
        if self.broker.draining:
            raise Draining

    async def publish_durably(
        self,
        topic_name: str,
        publication: Publication,
        *,
        internal: bool = False,
        channels: Iterable[str] = (),
    ) -> None:
        """Store a publication as `publish`, and sync it whatever the sync mode; arguments and errors as there."""
        await self.publish(topic_name, [publication], internal=internal, channels=channels)
        await self.sync_durably(topic_name)

    async def sync_durably(self, topic_name: str) -> None:
        """Return when all messages of a topic are on stable storage, or it is deleted. Retries after a failed sync."""
        with trio.CancelScope(shield=True):  # once written, it must not be published a second time
            while (topic := self.broker.topics.get(topic_name)) is not None and self.broker.serves(topic):
                if await self.write_path.sync(topic):
                    break
                await trio.sleep(_SYNC_RETRY_S)

    # ------------------------------------------------------------------ consuming

    def channel_now(self, topic_name: str, name: str) -> Channel | None:
        """Return the channel of this name; None if `channel` has to wait for it, create it, or refuse it."""
        try:
            self.write_path.refuse_unless_leading()
        except NotLeading:
            return None
        if self.broker.stopping or topic_name in self.broker.deleting:
            return None
        topic = self.broker.topics.get(topic_name)
        return topic.channels.get(name) if topic is not None else None

    def add_consumer(self, channel: Channel, consumer: Consumer) -> None:
        """Add a consumer to its channel. Raises LimitReached: the channel has the maximum number of consumers."""
        limit = self.options.max_channel_consumers
        if limit and len(channel.consumers) >= limit:
            names = f"{channel.topic.name}:{channel.name}"
            raise LimitReached(f"consumers for {names} exceeds limit of {limit}")
        channel.add(consumer)

    def unsubscribe(self, channel: Channel, consumer: Consumer) -> None:
        """Remove a consumer from its channel, and requeue its messages in flight."""
        channel.remove(consumer, failed=not self.broker.stopping)
        topic = self.broker.topic_of(channel)
        if topic is None:
            return
        if channel.ephemeral and not channel.consumers:
            topic.remove_channel(channel)
        else:
            self.delivery.deliver(channel)

    # ------------------------------------------------------------------ creating

    async def create(self, topic_name: str, channel_name: str | None = None) -> None:
        """Create a topic, or a channel and its topic, durably.

        Raises:
            LogError, SaveError: It could not be created, or not saved.
            PublishRefused: It is being deleted.
        """
        if channel_name is not None:
            await self.channel(topic_name, channel_name)
            return
        self.write_path.refuse_changes(ephemeral=is_ephemeral(topic_name))
        topic = await self._topic_to_use(topic_name)
        try:
            await self.checkpointer.save_new(topic)
        except SaveError:
            await self.forget_new(topic)
            raise

    async def _topic_to_use(self, name: str) -> Topic:
        """Return the topic of this name. Create it if needed, without a checkpoint.

        Raises:
            LogError: The topic cannot be created.
            PublishRefused: It is being deleted.
        """
        while await self._wait_for_deletion(name):
            pass
        return self._topic(name)

    async def _wait_for_deletion(self, name: str) -> bool:
        """Wait until a topic that a request has left unused is deleted; returns whether there was one.

        Raises PublishRefused: a client deletes it, or the broker stops, or no longer leads its cluster.
        """
        self.write_path.refuse_unless_leading()
        others_wait = self.broker.deleting.get(name)
        if self.broker.stopping or others_wait is False:
            raise PublishRefused("exiting")
        if others_wait:
            await self._change(name)
        return others_wait is not None

    async def _change(self, of: str | Topic) -> None:
        """Wait until the topic of this name is deleted, or this topic has the channels that it has on other brokers."""
        await self._changes.setdefault(of, trio.Event()).wait()

    def _changed(self, of: str | Topic) -> None:
        if (change := self._changes.pop(of, None)) is not None:
            change.set()

    async def channel(self, topic_name: str, name: str, *, private: bool = False) -> Channel:
        """Return the channel of this name. Create it if needed, durably; `private` as in `subscribe`.

        Raises:
            LogError, SaveError: The channel could not be created.
            PublishRefused: Its topic is being deleted.
        """
        while (channel := (topic := await self._topic_to_use(topic_name)).channels.get(name)) is None:
            self._check_channel_limit(topic, name)
            if is_ephemeral(name):
                if topic in self.broker.never_saved:
                    with suppress(SaveError):  # a consumer must be able to subscribe on a full disk
                        await self.checkpointer.save(topic)
                    topic = await self._topic_to_use(topic_name)
                    self._check_channel_limit(topic, name)
                channel = topic.add_channel(name, private=private)
                self._release_due(channel)
                break
            try:
                await self._save_and_add(topic, [name], with_others=True)
            except DeletedError:
                continue  # the topic was deleted meanwhile
            except SaveError:
                await self.forget_new(topic)
                raise
        return channel

    def _check_channel_limit(self, topic: Topic, name: str) -> None:
        """Raise LimitReached if a channel of this name would exceed the topic's limit."""
        limit = self.options.max_channels
        if not limit:
            return
        creating = self._creating.get(topic, set())
        others = len(topic.channels) + sum(each != name and each not in topic.channels for each in creating)
        if others >= limit:
            raise LimitReached(f"topic {topic.name} has {limit} channels, as many as --max-channels allows")

    async def forget_new(self, topic: Topic) -> None:
        """Delete a topic that is new and was not used: a refused request must leave no topic."""
        if self.broker.is_unused(topic) and topic not in self.broker.incomplete:
            try:
                await self.delete_topic(topic, only_if=self.broker.is_unused)
            except OSError as exc:
                logger.error("cannot remove the folder of topic %s: %s", topic.name, exc.strerror)
            except NotLeading:
                pass  # the next leader has it, or has it not

    def forget_new_soon(self, topic: Topic) -> None:
        """As `forget_new`, after a publish to the topic was refused."""
        if self.broker.is_unused(topic):
            self.nursery.start_soon(self.forget_new, topic)

    # ------------------------------------------------------------------ deleting

    async def delete_topic(self, topic: Topic, *, only_if: Callable[[Topic], bool] | None = None) -> bool:
        """Delete a topic with its channels and files, and disconnect its clients.

        Args:
            only_if: Delete it only if this holds when no publish is under way. Publishes and subscriptions that come
                meanwhile wait, and then use the topic, or a new one. None: they are refused.

        Returns:
            Whether this request deleted it: False if `only_if` did not hold, or another request has deleted it.

        Raises:
            OSError, TooFewInSync: Nothing was deleted.
            NotLeading: The topic may be deleted on other members of the cluster.
        """
        async with self._deleting(topic.name, others_wait=only_if is not None):
            is_deleted = False
            if self.broker.topics.get(topic.name) is topic:
                if only_if is None:
                    self.write_path.refuse_changes(ephemeral=topic.ephemeral)
                with trio.CancelScope(shield=True):  # a deletion must be complete; it waits only for the disk
                    async with self.checkpointer.locked(topic):
                        is_deleted, retired = await self._delete(topic, only_if)
                    # Without the lock, for which the saves of all topics may wait: this may take long.
                    if retired is not None:
                        await trio.to_thread.run_sync(self.folder.files.remove_folder, retired)
            return is_deleted

    async def delete_channel_if(self, channel: Channel, only_if: Callable[[Channel], bool]) -> bool:
        """Delete a channel durably; `only_if` and the result as of `delete_topic`.

        Raises:
            SaveError: Nothing was deleted.
        """

        def check() -> None:
            self.broker.existing_topic_of(channel)
            if not only_if(channel):  # an earlier change, such as a seek, has waited for the same lock
                raise _InUse

        async with self._deleting(channel.topic.name, others_wait=True):
            topic = self.broker.topic_of(channel)
            if topic is None:
                return False
            await self.write_path.until_idle(topic)
            try:
                await self.checkpointer.change(
                    topic,
                    lambda each: each.remove_channel(each.counterpart(channel)),
                    channels=[channel.name],
                    check=check,
                )
            except (_InUse, DeletedError):
                return False
            return True

    @asynccontextmanager
    async def _deleting(self, name: str, *, others_wait: bool) -> AsyncIterator[None]:
        """Let others wait that would use a topic of this name, or refuse them; one at a time."""
        while name in self.broker.deleting:
            await self._change(name)
        self.broker.deleting[name] = others_wait
        try:
            yield
        finally:
            del self.broker.deleting[name]
            self._changed(name)

    async def delete_unavailable(self, name: str) -> None:
        """Delete the files of an unavailable topic. Errors as of `delete_topic`."""
        self.write_path.refuse_changes()
        with trio.CancelScope(shield=True):
            is_done = await self.loader.delete(name)
            await self.write_path.until_replicated()
        if not is_done and (topic := self.broker.topics.get(name)) is not None:
            await self.delete_topic(topic)  # it was just opened

    async def _delete(
        self, topic: Topic, only_if: Callable[[Topic], bool] | None
    ) -> tuple[bool, Path | None]:
        """Delete a `locked` topic; returns whether it did, and the folder to remove."""
        await self.write_path.until_idle(topic)
        if only_if is not None and not only_if(topic):
            return False, None
        self.write_path.refuse_unless_leading()
        retired: Path | None = None
        if not topic.ephemeral:
            # First, so that a crash or error before it leaves the topic unchanged. Consumers still read open files.
            work = partial(self.folder.retire_topic, topic.name)
            retired = await trio.to_thread.run_sync(work)
            if retired is not None:
                await self.write_path.until_replicated()
            await self.write_path.until_idle(topic)  # a scheduled sync may have begun meanwhile
        self.write_path.forget(topic)
        self.broker.delete_topic(topic)
        self.readers.wake(topic)
        self.checkpointer.forget(topic)
        return True, retired

    async def deletions_done(self) -> None:
        """Wait until no topic is being deleted."""
        for name in list(self.broker.deleting):
            while name in self.broker.deleting:
                await self._change(name)

    # ------------------------------------------------------------------ new topics

    def _topic(self, name: str) -> Topic:
        """Return the topic of this name. Create it if needed; publishes to it then wait until it has its channels."""
        topic = self.broker.topics.get(name)
        if topic is None:
            limit = self.options.max_topics
            if limit and len(self.broker.topics) >= limit:
                raise LimitReached(f"there are {limit} topics, as many as --max-topics allows")
            topic = self.broker.topic(name)
            if self.lookup is not None and self.lookup.addresses:
                self.broker.incomplete.add(topic)
                self.nursery.start_soon(self._precreate, topic, self.lookup)
        return topic

    async def _precreate(self, topic: Topic, lookup: "LookupRegistration") -> None:
        """Create, durably, the channels that a new topic has on other brokers, so that they miss no message."""
        try:
            names = await lookup.channels(topic.name)
            if self.broker.stopping or self.broker.topics.get(topic.name) is not topic:
                return
            known = topic.channels.keys() | self._creating.get(topic, set())
            new = [name for name in names if name not in known]
            room = self.options.max_channels - len(known)
            if self.options.max_channels and room < len(new):
                logger.warning(
                    "topic %s: --max-channels allows only some of its channels on other brokers", topic.name
                )
                names = [*known.intersection(names), *new[: max(0, room)]]
            await self._save_and_add(topic, names)
        except (SaveError, DeletedError):
            pass  # the checkpointer logs errors; a channel that cannot be saved is not created
        except Exception:
            # A bug in the broker: the topic starts without these channels.
            logger.exception("topic %s: its channels on other brokers could not be created here", topic.name)
        finally:
            self.broker.incomplete.discard(topic)
            self._changed(topic)

    async def _save_and_add(self, topic: Topic, names: Sequence[str], *, with_others: bool = False) -> None:
        """Create channels; `with_others` and errors as of `Checkpointer.change`. Ephemeral channels are not saved."""

        def add(each: Topic) -> None:
            for name in names:
                each.add_channel(name)  # or another request has

        def release_due() -> None:
            for name in names:
                self._release_due(topic.channels[name])

        creating = self._creating.setdefault(topic, set())
        creating.update(names)
        try:
            await self.checkpointer.change(
                topic, add, channels=names, then=release_due, with_others=with_others, only_creates=True
            )
        finally:
            creating.difference_update(names)
            if not creating and self._creating.get(topic) is creating:
                del self._creating[topic]

    def _release_due(self, channel: Channel) -> None:
        """Give a new channel the messages that are due: its first consumer may subscribe before the timer runs."""
        if channel.next_due_ns is not None:
            channel.tick(self.clock.now_ns(), _DUE_AT_ONCE)
