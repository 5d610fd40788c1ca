"""The broker's IO: listeners, connections, timers and the data folder around the synchronous state."""

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import trio

from .._version import __version__
from ..log import DiskLog, Log, LogError, MemoryLog, ReadWouldWaitError, is_disk_full
from ..protocol import CommandError, is_ephemeral
from ..protocol.address import format_peer
from .admission import Admission
from .bodies import Bodies
from .cold_reads import ColdReads
from .dead_letters import DEAD_LETTERS, DeadLetterMover, refuse_loop
from .errors import DeletedError, LimitReached, PublishRefused, SaveError, StartupError
from .monitoring.process import ProcessFigures
from .options import BrokerOptions
from .positions import Position
from .publication import Publication
from .publisher import Publisher
from .readers import Readers
from .recovery import TopicLoader
from .state.broker import Broker, MessageIds
from .state.channel import Channel
from .state.channel_state import ChannelState
from .state.checkpoint import Checkpoint
from .state.consumer import Consumer
from .state.seek import Move, Seek
from .state.steps import forget
from .state.topic import Topic
from .state.withdrawn import Withdrawn
from .storage.checkpointer import Checkpointer
from .storage.data_folder import ID_RESERVE, DataFolder
from .tcp.connection import Connection
from .tcp.poller import Poller

if TYPE_CHECKING:
    from OpenSSL import SSL

    from ..lookup import LookupRegistration
    from .tcp.authorization import AuthClient

logger = logging.getLogger("trio_nsq.broker")

_NS_PER_S = 1_000_000_000
_CHANNELS_PER_TURN = 16
_GRANTS_PER_TURN = 16
"""So much is delivered at a time, however much there is; then every client has its turn again."""
_TURN_S = 0.005
"""Clients have to wait so long at most because there is a lot to be delivered."""
_WAITING_S = 0.025
"""While there is always a client to be served, deliveries that may wait do so for so long: what comes meanwhile is sent
with them. It is the least that a client may ask for, by default (`--min-output-buffer-timeout`)."""
_READ_AGAIN_NS = _NS_PER_S
"""A channel whose messages could not be read is looked at again after this long, if nothing happens before."""
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


class Server:
    """A running broker. Made by `serve`; everything that serves clients reaches the state through it.

    Args:
        options: See there.
        folder: Locked, and closed by the caller.
        nursery: Runs connections, commits and timers; cancel it only after `stop`.

    Raises:
        StartupError: What lies in the data folder cannot be used.

    Attributes:
        connections: Those open now, oldest first.
        start_time_s, start_time_ns: Unix seconds; and the same by `now_ns`, to measure how long it runs.
        process: What the process itself uses.
        clock_s: trio's clock, without the steps that `trio.current_time` takes to find it.
        poller: Hears what clients send.
        cold_reads: For channels that deliver what lies on disk only.
        readers: For those who read topics' logs from outside.
        node_id: The first ten bits of every message id.
        nsqlookupd_tcp_addresses: Those in use now; `set_nsqlookupd_tcp_addresses` changes them.
        lookup: Keeps the broker registered there; None until it listens.
        tls_context: For clients' sessions; None: no TLS.
        auth_client: Asks who may do what; None: everybody may do everything.
        bodies: Room for large bodies that clients have begun to send.
        parsing: Held while something large that a client sent is decoded on the event loop.
    """

    version = __version__

    def __init__(
        self,
        options: BrokerOptions,
        folder: DataFolder,
        nursery: trio.Nursery,
        *,
        tls_context: "SSL.Context | None" = None,
        auth_client: "AuthClient | None" = None,
    ) -> None:
        self.options = options
        self.start_time_s = int(time.time())
        self.nsqlookupd_tcp_addresses = options.nsqlookupd_tcp_addresses
        self.lookup: LookupRegistration | None = None
        self.connections: dict[Connection, None] = {}
        self.admissions: dict[str, Admission] = {}  # by the kind of listener
        self.tls_context = tls_context
        self.auth_client = auth_client
        self._folder = folder
        self._nursery = nursery
        # Wall-clock time at the start plus what trio's clock, which never steps, has counted since.
        self.clock_s = trio.lowlevel.current_clock().current_time
        self._clock_offset_ns = time.time_ns() - int(self.clock_s() * _NS_PER_S)
        self.start_time_ns = self.now_ns()
        self._timer_moved = trio.Event()
        self._in_line: dict[Channel, None] = {}  # more could be delivered there than one turn allows
        # Where deliveries wait until nobody has anything to send, and until when, by `time.perf_counter`, at most.
        self._waiting: dict[Channel, float] = {}
        self._unreadable: set[Channel] = set()  # their messages could not be read lately
        self._clients: dict[Consumer, Connection] = {}
        self._deleting: dict[str, _Deletion] = {}
        self._coming: WeakKeyDictionary[Topic, set[str]] = WeakKeyDictionary()  # channels that are being made
        self._precreating: dict[Topic, trio.Event] = {}
        self._stopping = False
        self.parsing = trio.Lock()
        self.bodies = Bodies()
        self._deserted = trio.Event()  # set while there is no connection
        self._deserted.set()
        self.broker = Broker(options, self._make_log)
        self.broker.waits_for_disk = False
        folder.spare_room.start()
        self.node_id = options.node_id if options.node_id is not None else default_node_id()
        ids = self._first_ids()
        self.publisher = Publisher(
            options,
            ids,
            nursery,
            folder.spare_room,
            self._published,
            lambda *call: self.poller.call_soon(*call),
        )
        self.poller = Poller(
            self.publisher.begin_round, self._end_round, lambda: self.publisher.is_busy, self._idle
        )
        self.readers = Readers(self.serves)
        self.cold_reads = ColdReads(nursery, self.serves_channel, self.pump, self._note_read)
        self._checkpointer = Checkpointer(
            self.broker, folder, ids, time.time_ns, self.publisher.roll, self.publisher.sync
        )
        self._dead_letters = DeadLetterMover(self, nursery)
        self._loader = TopicLoader(self.broker, folder, self._make_log, self._loaded, lambda: self._stopping)
        self._loader.load_all()
        self.process = ProcessFigures()

    def _first_ids(self) -> MessageIds:
        """Reserve the ids of the first messages; none if the disk is full: consumers can make room all the same."""
        ids = MessageIds(self.node_id, first_id := self._folder.first_id(), first_id)
        try:
            self._folder.reserve_ids(first_id + ID_RESERVE)
            ids.reserved = first_id + ID_RESERVE
        except OSError as exc:
            if not is_disk_full(exc):
                path = self._folder.path
                raise StartupError(f"--data-path: cannot write to {path}: {exc.strerror}") from exc
        return ids

    def _make_log(self, name: str) -> Log:
        if is_ephemeral(name):
            return MemoryLog(max_messages=self.options.mem_queue_size)
        folder = self._folder.topic_folder(name)
        return DiskLog(
            folder, segment_bytes=self.options.max_bytes_per_file, open_files=self._folder.open_files
        )

    def _loaded(self, topic: Topic) -> None:
        self._checkpointer.retention.found(topic)
        for channel in topic.channels.values():
            self._dead_letters.look_at(channel)
        self._timer_moved.set()

    # ------------------------------------------------------------------ time

    def now_ns(self) -> int:
        """Unix nanoseconds by a clock that never steps."""
        return self._clock_offset_ns + int(self.clock_s() * _NS_PER_S)

    async def run_timers(self) -> None:
        """Move what is due when it is due, and sleep in between; runs until cancelled."""
        while True:
            self._timer_moved = trio.Event()
            for channel in self.broker.tick(self.now_ns()):
                self._dead_letters.look_at(channel)
                self._line_up(channel)
            due_ns = self.broker.next_deadline_ns
            wait_s = math.inf if due_ns is None else max(0.0, (due_ns - self.now_ns()) / _NS_PER_S)
            with trio.move_on_after(wait_s):
                await self._timer_moved.wait()

    def _line_up(self, channel: Channel) -> None:
        """Deliver to a channel when others have had their turn."""
        self._in_line[channel] = None
        if not self.publisher.in_round:
            self.poller.wake()

    def watch(self, channel: Channel, at_ns: int) -> None:
        """See to it that the channel is looked at by `at_ns`."""
        known_ns = self.broker.next_deadline_ns
        self.broker.watch(channel, at_ns)
        if known_ns is None or at_ns < known_ns:
            self._timer_moved.set()

    def _channel(self, topic_name: str, channel_name: str, *, private: bool = False) -> Channel:
        """The channel of this name, made if need be: it may begin with messages that wait for their time."""
        self._topic(topic_name)
        known_ns = self.broker.next_deadline_ns
        channel = self.broker.channel(topic_name, channel_name, private=private)
        if channel.next_due_ns is not None:
            channel.tick(self.now_ns(), _DUE_AT_ONCE)  # or its first consumer could come before the timer
        if self.broker.next_deadline_ns != known_ns:
            self._timer_moved.set()
        return channel

    # ------------------------------------------------------------------ publishing and delivery

    async def publish(self, topic_name: str, publications: Sequence[Publication]) -> None:
        """Store publications to a topic, made if need be, as `Publisher.publish`. Raises PublishRefused."""
        while True:
            topic = self._topic_to_publish(topic_name)
            if topic is None:
                await self._deleting[topic_name].done.wait()
            elif (precreating := self._precreating.get(topic)) is not None:
                await precreating.wait()  # it may be deleted by then
            else:
                break
        try:
            await self.publisher.publish(topic, publications)
        except PublishRefused:
            await self._forget_new(topic)
            raise

    def submit(
        self,
        topic_name: str,
        publications: Sequence[Publication],
        then: Callable[[PublishRefused | None], None],
    ) -> bool:
        """Have publications stored as by `Publisher.submit`; False, and nothing done, if `publish` would wait first."""
        topic = self._topic_to_publish(topic_name)
        if topic is None or topic in self._precreating:
            return False
        if topic in self.broker.never_saved and self._is_new(topic):
            return False  # `publish` forgets a new topic if it is refused
        self.publisher.submit(topic, publications, then)
        return True

    def _topic_to_publish(self, name: str) -> Topic | None:
        """The topic of this name, made if need be; None while one that was new is forgotten. Raises PublishRefused."""
        if name in self._deleting or self._stopping:
            if not self._stopping and self._deleting[name].only_if_unused:
                return None
            raise PublishRefused("exiting")
        try:
            return self._topic(name)
        except LogError as exc:
            raise PublishRefused(str(exc)) from exc

    def _published(self, topic: Topic) -> None:
        self.readers.topic_grew(topic)
        if topic.has_distributed_deferred:
            topic.has_distributed_deferred = False
            known_ns = self.broker.next_deadline_ns
            for channel in topic.channels.values():
                self.broker.watch(channel, channel.next_due_ns)
            if self.broker.next_deadline_ns != known_ns:
                self._timer_moved.set()
        pumped = 0
        in_round = self.publisher.in_round
        for channel in topic.channels.values():
            if channel in self._waiting or not channel.dispatcher.has_ready_consumer:
                continue
            if in_round and channel.dispatcher.can_wait:
                self._waiting[channel] = time.perf_counter() + _WAITING_S
            elif pumped == _CHANNELS_PER_TURN:
                self._line_up(channel)
            else:
                self.pump(channel)
                pumped += 1
        topic.make_room()

    # ------------------------------------------------------------------ in rounds of the poller

    def _end_round(self) -> None:
        self.publisher.end_round()
        for _ in range(min(len(self._in_line), _CHANNELS_PER_TURN)):
            self._deliver_next(self._in_line)
        if self._waiting:
            now_s = time.perf_counter()
            over_s = now_s + _TURN_S
            while self._waiting and next(iter(self._waiting.values())) <= now_s < over_s:
                self._deliver_next(self._waiting)
                now_s = time.perf_counter()

    def _idle(self) -> bool:
        """Nobody has sent anything: do what could wait. True: there may be more of it."""
        self.publisher.begin_syncs()
        line = self._in_line or self._waiting
        if not line:
            return False
        self._deliver_next(line)
        return True

    def _deliver_next(self, line: dict[Channel, Any]) -> None:
        channel = next(iter(line))
        del line[channel]
        try:
            self.pump(channel)
        except Exception:
            # A mistake of ours: it must not reach other channels.
            logger.exception("%s/%s: nothing could be delivered", channel.topic.name, channel.name)

    # ------------------------------------------------------------------ delivery

    def pump_topic(self, topic: Topic) -> None:
        """Send what is ready in any of a topic's channels, and look out for what is deferred there."""
        self._published(topic)

    def pump(self, channel: Channel) -> None:
        """Send what is ready to whoever can take it."""
        if self._stopping:
            return  # what one client had would only go to the next, to be taken from it in its turn
        self._dead_letters.look_at(channel)
        if channel.dispatcher.can_deliver and not self._waits(channel):
            self._deliver(channel)
        if (due_ns := channel.next_due_ns) is not None:
            self.watch(channel, due_ns)  # it may just have been put off

    def _waits(self, channel: Channel) -> bool:
        """Whether what can be delivered waits for more to be sent with it."""
        if not channel.dispatcher.can_wait:
            return False
        if channel in self._waiting:
            return True
        if (until_ns := channel.dispatcher.buffering.wait_until_ns) <= self.now_ns():
            return False
        self.watch(channel, until_ns)
        return True

    def send_waiting(self, channel: Channel) -> None:
        """Deliver what waits for more to be sent with it."""
        if channel.dispatcher.can_deliver and not self._stopping:
            self._deliver(channel)

    def _deliver(self, channel: Channel) -> None:
        now_ns = self.now_ns()
        timeout_ns = self.options.limits.max_msg_timeout_ms * 1_000_000
        sent = 0
        over_s = time.perf_counter() + _TURN_S
        while channel.dispatcher.can_deliver:
            if sent >= _GRANTS_PER_TURN or (sent and time.perf_counter() > over_s):
                self._line_up(channel)
                break
            try:
                grants = channel.dispatcher.dispatch(now_ns, time.time_ns() - now_ns)
            except ReadWouldWaitError:
                self.cold_reads.begin(channel)
                break
            except LogError as exc:
                self._note_unreadable(channel, exc)
                break
            if channel.dispatcher.others_wait_for_read:
                self.cold_reads.begin(channel)
            if not grants:
                if channel.dispatcher.budget_exhausted:
                    self._line_up(channel)
                break
            sent += len(grants)
            clients: dict[Connection, None] = {}
            for consumer, frames in grants:
                client = self._clients[consumer]
                client.deliver(frames)
                clients[client] = None
                timeout_ns = min(timeout_ns, consumer.msg_timeout_ns)
            for client in clients:
                client.send_delivered()
        if sent:
            self.watch(channel, now_ns + timeout_ns)

    def _note_read(self, channel: Channel, error: LogError | None) -> None:
        if error is None:
            self._unreadable.discard(channel)
        else:
            self._note_unreadable(channel, error)

    def _note_unreadable(self, channel: Channel, error: LogError) -> None:
        """Have a channel try again to read its messages, and say once that it cannot, not each time."""
        self.watch(channel, self.now_ns() + _READ_AGAIN_NS)
        deleted = channel.topic.name in self._deleting  # its files have another name by now
        if channel not in self._unreadable and not deleted:
            self._unreadable.add(channel)
            logger.error("%s/%s: %s", channel.topic.name, channel.name, error)

    def serves(self, topic: Topic) -> bool:
        """Whether a topic is there, and its log open."""
        return not self._stopping and self.broker.topics.get(topic.name) is topic

    def serves_channel(self, channel: Channel) -> bool:
        """Whether a channel is there, and its topic's log open."""
        return not self._stopping and self.broker.topic_of(channel) is not None

    def _topic_of(self, channel: Channel) -> Topic:
        """The topic that a channel is in. Raises DeletedError."""
        topic = self.broker.topic_of(channel)
        if topic is None:
            raise DeletedError(channel.name)
        return topic

    # ------------------------------------------------------------------ subscriptions

    async def subscribe(
        self,
        client: Connection,
        topic_name: str,
        channel_name: str,
        consumer: Consumer,
        *,
        private: bool = False,
    ) -> Channel:
        """Let a client consume from a channel; it and its topic are made, durably, if need be.

        Args:
            client, topic_name, channel_name, consumer: Who consumes what.
            private: If the channel is made, make it a private one; its name must be an ephemeral one.

        Raises:
            CommandError: E_SUB_FAILED.
        """
        try:
            channel = await self._durable_channel(topic_name, channel_name, private=private)
        except (PublishRefused, LogError, SaveError) as exc:
            raise CommandError("E_SUB_FAILED", f"SUB failed {exc}") from exc
        limit = self.options.max_channel_consumers
        if limit and len(channel.consumers) >= limit:
            reason = f"consumers for {topic_name}:{channel_name} exceeds limit of {limit}"
            raise CommandError("E_SUB_FAILED", f"SUB failed {reason}")
        channel.add(consumer)
        self._clients[consumer] = client
        return channel

    def unsubscribe(self, channel: Channel, consumer: Consumer) -> None:
        """Take a client out of its channel; what it had in flight goes to the others."""
        channel.remove(consumer)
        self._clients.pop(consumer, None)
        alive = self.broker.topic_of(channel) is not None
        if alive and channel.ephemeral and not channel.consumers:
            self.broker.delete_channel(channel)
        elif alive:
            self.pump(channel)

    # ------------------------------------------------------------------ operators

    async def create(self, topic_name: str, channel_name: str | None = None) -> None:
        """Make a topic, or a channel and its topic, durably.

        Raises:
            LogError, SaveError: It is not there, or would not outlast a restart.
            PublishRefused: It is being deleted.
        """
        if channel_name is not None:
            await self._durable_channel(topic_name, channel_name)
            return
        topic = await self._topic_to_use(topic_name)
        try:
            await self.save_new(topic)
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
        if deletion is not None or self._stopping:
            raise PublishRefused("exiting")
        return self._topic(name)

    async def _durable_channel(self, topic_name: str, name: str, *, private: bool = False) -> Channel:
        """The channel of this name. A new one is on disk before anybody can use it; `private` as in `subscribe`.

        Raises:
            LogError, SaveError: It is not there, and was not made.
            PublishRefused: Its topic is being deleted.
        """
        while (channel := (topic := await self._topic_to_use(topic_name)).channels.get(name)) is None:
            self._check_channel_limit(topic, name)
            if is_ephemeral(name):
                if topic in self.broker.never_saved:
                    await self._try_to_save(topic)  # a consumer that is to empty a full disk can do without
                    self._check_channel_limit(await self._topic_to_use(topic_name), name)
                return self._channel(topic_name, name, private=private)

            def plan(checkpoint: Checkpoint, topic: Topic = topic) -> None:
                if name not in topic.channels:  # another request may just have made it
                    checkpoint.add_channel(name)

            def apply() -> None:
                self._channel(topic_name, name)

            coming = self._coming.setdefault(topic, set())
            coming.add(name)
            try:
                await self._checkpointer.change(topic, plan, apply, with_others=True)
            except DeletedError:
                continue  # the topic was deleted meanwhile
            except SaveError:
                await self._forget_new(topic)
                raise
            finally:
                coming.discard(name)
        return channel

    def _check_channel_limit(self, topic: Topic, name: str) -> None:
        """Raise LimitReached if the topic may not have a channel of this name besides those it has or is getting."""
        limit = self.options.max_channels
        if limit and len((topic.channels.keys() | self._coming.get(topic, set())) - {name}) >= limit:
            raise LimitReached(f"topic {topic.name} has {limit} channels, as many as --max-channels allows")

    async def _try_to_save(self, topic: Topic) -> None:
        """Save a topic now, if that works; an error is reported, and the next checkpoint tries again."""
        try:
            await self.save(topic)
        except SaveError:
            pass

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

    async def delete_topic(self, topic: Topic, *, only_if_unused: bool = False) -> None:
        """Delete a topic with its channels and files; its clients are disconnected.

        Args:
            topic: Which one.
            only_if_unused: Only if it was never saved, and has neither messages nor channels.

        Raises:
            OSError: Nothing was deleted.
        """
        while (under_way := self._deleting.get(topic.name)) is not None:
            await under_way.done.wait()
        if self.broker.topics.get(topic.name) is not topic:
            return
        self._deleting[topic.name] = _Deletion(only_if_unused)
        try:
            with trio.CancelScope(shield=True):  # bounded by the disk; half a deletion is none
                async with self._checkpointer.locked(topic):
                    await self._delete(topic, only_if_unused)
        finally:
            self._deleting.pop(topic.name).done.set()

    async def delete_unavailable(self, name: str) -> None:
        """Delete the files of a topic that is unavailable. Raises OSError: nothing was deleted."""
        with trio.CancelScope(shield=True):
            is_done = await self._loader.delete(name)
        if not is_done and (topic := self.broker.topics.get(name)) is not None:
            await self.delete_topic(topic)  # it was just opened

    async def _delete(self, topic: Topic, only_if_unused: bool) -> None:
        await self.publisher.idle(topic)
        if only_if_unused and not self._is_new(topic):
            return
        retired: Path | None = None
        if not topic.ephemeral:
            # First, so that a crash or an error leaves the topic as it was. Consumers read on from open files.
            work = partial(self._folder.retire_topic, topic.name)
            retired = await trio.to_thread.run_sync(work)
            await self.publisher.idle(topic)  # a scheduled sync may have begun meanwhile
        self.publisher.forget(topic)
        self.broker.delete_topic(topic)
        self.readers.topic_grew(topic)
        self._checkpointer.forget(topic)
        if retired is not None:
            await trio.to_thread.run_sync(self._folder.remove_retired, retired)

    # What changes a topic or a channel is saved first, and happens then: a request that is refused changes nothing.
    # All of these raise SaveError, or DeletedError if the topic or the channel is deleted meanwhile.

    async def pause_topic(self, topic: Topic, paused: bool) -> None:
        """Give a topic's channels nothing more, or go on, durably."""

        def apply() -> None:
            if paused:
                topic.pause()
            else:
                topic.unpause()
                self.pump_topic(topic)

        await self._checkpointer.change(
            topic, lambda checkpoint: checkpoint.change_topic(paused=paused), apply
        )

    async def empty_topic(self, topic: Topic) -> None:
        """Drop what waits in a topic itself, durably; its channels keep theirs."""
        await self._checkpointer.change(topic, topic.plan_empty, topic.empty)

    async def forget_producer(self, topic: Topic, producer: str) -> None:
        """Forget what a producer has published to a topic, durably: its numbers may begin again."""

        def plan(checkpoint: Checkpoint) -> None:
            checkpoint.forget_producer(producer)

        await self._checkpointer.change(
            topic, plan, lambda: topic.producers.forget(producer), with_others=True
        )

    async def configure_topic(self, topic: Topic, changes: Mapping[str, Any]) -> None:
        """Change settings of a topic, durably. Also raises SettingsError."""

        def plan(checkpoint: Checkpoint) -> None:
            topic.plan_configure(checkpoint, changes)

        def apply() -> None:
            topic.configure(changes)
            self.pump_topic(topic)  # there may be more than there may be now

        await self._checkpointer.change(topic, plan, apply)

    async def pause(self, channel: Channel, paused: bool) -> None:
        """Send nothing more to a channel's clients, or go on, durably; what is in their buffers goes out."""

        def apply() -> None:
            channel.paused = paused
            if paused:
                for consumer in channel.consumers:
                    self._clients[consumer].send_delivered()
            else:
                self.pump(channel)

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
            self.pump(channel)  # what was given up may come again

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
            await self.save(topic)  # one that came due meanwhile is kept, and the state lacks it
        return cancelled

    async def dispose(self, channel: Channel, messages: Sequence[Withdrawn]) -> int:
        """Be done with messages that were withdrawn, durably; if that fails, put them back.

        Returns:
            How many of them were not dropped meanwhile.
        """
        disposed = 0

        def apply() -> None:
            nonlocal disposed
            disposed = channel.dispose(messages)

        try:
            await self._change(channel, lambda: channel.state_if_disposed(messages), apply)
        except BaseException:
            channel.put_back(messages)
            self.pump(channel)
            raise
        return disposed

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

        await self._checkpointer.change(topic, plan, apply)

    async def seek(self, channel: Channel, position: Position, *, dry_run: bool = False) -> tuple[Move, int]:
        """Move a channel, durably, or find out what that would do.

        Returns:
            The move, and the oldest sequence that could have been moved to.

        Raises:
            LogReadError, SaveError: The operating system refused; nothing was moved.
            DeletedError: The channel was deleted meanwhile.
        """
        topic = self._topic_of(channel)
        wanted = await self.readers.call(topic, partial(position.sequence_in, topic.log))
        if not dry_run:
            if topic.has_moved_dead_letters:
                await self.save(topic)
            await self._save_dead_letters()
        async with self._checkpointer.locked(topic):  # which might be deleting what the channel goes back to
            if not self.serves_channel(channel):
                raise DeletedError(channel.name)
            oldest = topic.log.first_sequence
            move = await self._move(topic, channel, max(wanted, oldest), dry_run=dry_run)
        return move, oldest

    async def _move(self, topic: Topic, channel: Channel, sequence: int, *, dry_run: bool) -> Move:
        """Move a channel whose topic is locked, or find out what that would do, while others have their turns."""
        seek = Seek(channel, sequence, self.now_ns())
        moving: Iterator[None] = iter(())

        def plan(checkpoint: Checkpoint) -> None:
            if not channel.ephemeral:
                checkpoint.change_channel(seek.state())

        def apply() -> None:
            nonlocal moving
            if not self.serves_channel(channel):
                raise DeletedError(channel.name)
            moving = seek.apply()
            next(moving)

        try:
            await _in_turns(seek.prepare())
            move = seek.effect()
            if dry_run:
                return move
            await self._checkpointer.change_locked(topic, plan, apply)
        finally:
            seek.close()
        self.pump(channel)
        with trio.CancelScope(shield=True):  # it is moved, whoever asked for it
            await _in_turns(moving)
        return move

    async def _save_dead_letters(self) -> None:
        """Let no restart take messages from a channel again because they were dead letters once. Raises SaveError."""
        for topic in list(self.broker.topics.values()):
            if DEAD_LETTERS in topic.channels and not self._checkpointer.is_saved(topic):
                await self.save(topic)

    def set_nsqlookupd_tcp_addresses(self, addresses: tuple[str, ...]) -> None:
        """Register with these discovery services instead, `host:port` each, until the broker stops."""
        if self.lookup is not None:
            self.lookup.set_addresses(addresses)
        self.nsqlookupd_tcp_addresses = addresses

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
                self._nursery.start_soon(self._precreate, topic, self.lookup)
        return topic

    async def _precreate(self, topic: Topic, lookup: "LookupRegistration") -> None:
        """Make the channels that a new topic has elsewhere, durably, so that they miss none of its messages."""
        try:
            names = await lookup.channels(topic.name)
            if self._stopping or self.broker.topics.get(topic.name) is not topic:
                return
            if 0 < self.options.max_channels < len(topic.channels.keys() | set(names)):
                logger.warning(
                    "topic %s: --max-channels allows only some of its channels elsewhere", topic.name
                )
                room = self.options.max_channels - len(topic.channels)
                names = [name for name in names if name not in topic.channels][:room]
            durable = [name for name in names if not is_ephemeral(name)]

            def plan(checkpoint: Checkpoint) -> None:
                for name in durable:
                    if name not in topic.channels:
                        checkpoint.add_channel(name)

            def apply() -> None:
                for name in names:
                    self._channel(topic.name, name)

            await self._checkpointer.change(topic, plan, apply)
        except (SaveError, DeletedError):
            pass  # an error is logged; what cannot be saved is not made
        except Exception:
            # A mistake of ours: the topic has to do without.
            logger.exception("%s: channels could not be made in advance", topic.name)
        finally:
            self._precreating.pop(topic).set()

    # ------------------------------------------------------------------ saved state

    async def save(self, topic: Topic) -> None:
        """As `Checkpointer.save`. Raises SaveError."""
        await self._checkpointer.save(topic)

    async def save_new(self, topic: Topic) -> None:
        """As `Checkpointer.save_new`. Raises SaveError."""
        await self._checkpointer.save_new(topic)

    async def save_on_schedule(self) -> None:
        """Save what changed every so often; runs until cancelled."""
        await self._checkpointer.save_on_schedule(self.options.checkpoint_interval_ms / 1000)

    async def open_again_on_schedule(self) -> None:
        """As `TopicLoader.open_again_on_schedule`."""
        await self._loader.open_again_on_schedule()

    @property
    def health(self) -> str:
        """`OK`, or `NOK - ` and what the last write failed with, or which topic is unavailable."""
        room = self._folder.spare_room
        error = self.publisher.health or room.failed_with or room.shortage or self._checkpointer.error
        error = error or self.broker.why_unavailable
        return f"NOK - {error}" if error else "OK"

    # ------------------------------------------------------------------ connections

    async def handle_tcp(self, stream: trio.SocketStream) -> None:
        """Serve one TCP client."""
        # The plain socket lets frames be sent without a task switch; trio only waits for it.
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        if self._stopping:
            sock.close()
            return
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = format_peer(sock.getpeername())
        except OSError:
            sock.close()  # it has gone already
            return
        client = Connection(self, sock, peer)
        self.connections[client] = None
        if self._deserted.is_set():
            self._deserted = trio.Event()
        logger.info("TCP: new client(%s)", peer)
        try:
            await client.run()
        except Exception:
            # A mistake of ours, not the client's: it must not reach the other clients.
            logger.exception("TCP: client(%s): internal error", peer)
        finally:
            del self.connections[client]
            if not self.connections:
                self._deserted.set()
            logger.info(
                "PROTOCOL(V2): [%s] exiting ioloop", peer
            )  # nsqd's words, which people's log filters know

    async def stop(self) -> None:
        """Store what is under way, close every client, save every state. Bounded by the disk, not by clients."""
        self.process.close()
        await self.publisher.close()
        await trio.lowlevel.checkpoint()  # lets connections send the OKs of what was just stored
        self._stopping = True
        for client in list(self.connections):
            client.outbox.flush()
            client.close()
        await self._deserted.wait()  # a closed connection waits for nobody but the disk
        for deletion in list(self._deleting.values()):
            await deletion.done.wait()
        await self._checkpointer.save_all()
        for topic in list(self.broker.topics.values()):
            async with self._checkpointer.locked(
                topic
            ):  # an HTTP client may just be having it saved once more
                topic.log.close()


async def _in_turns(steps: Iterator[None]) -> None:
    """Do something in steps, none of which takes long, and let others have their turns."""
    for _ in steps:
        await trio.lowlevel.checkpoint()


def default_node_id() -> int:
    """As nsqd: from the host name, 0..1023."""
    from hashlib import md5

    from zlib_ng.zlib_ng import crc32

    return crc32(md5(socket.gethostname().encode(), usedforsecurity=False).digest()) % 1024
