"""The broker's IO: listeners, connections, timers and the data folder around the synchronous state."""

import logging
import math
import socket
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

import trio

from .._version import __version__
from ..log import DiskLog, Log, LogError, MemoryLog
from ..protocol import CommandError, is_ephemeral
from ..protocol.address import format_address
from .broker import Broker, MessageIds
from .channel import Channel
from .connection import Connection
from .consumer import Consumer
from .data_folder import ID_RESERVE, DataFolder
from .errors import PublishRefused, StartupError
from .options import BrokerOptions
from .publisher import Publication, Publisher
from .topic import StateError, Topic

logger = logging.getLogger("trio_nsq.broker")

_NS_PER_S = 1_000_000_000
_READ_AGAIN_NS = _NS_PER_S
"""A channel whose messages could not be read is looked at again after this long, if nothing happens before."""


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
        start_time_s: Unix seconds.
    """

    version = __version__

    def __init__(self, options: BrokerOptions, folder: DataFolder, nursery: trio.Nursery) -> None:
        self.options = options
        self.start_time_s = int(time.time())
        self.connections: dict[Connection, None] = {}
        self._folder = folder
        self._nursery = nursery
        # Wall-clock time at the start plus what trio's clock, which never steps, has counted since.
        self._clock_offset_ns = time.time_ns() - int(trio.current_time() * _NS_PER_S)
        self._timer_moved = trio.Event()
        self._clients: dict[Consumer, Connection] = {}
        self._deleting: dict[str, trio.Event] = {}
        self._stopping = False
        self._deserted = trio.Event()  # set while there is no connection
        self._deserted.set()
        self._tickets = count()
        self._saved: dict[Topic, int] = {}  # the ticket at which the state last saved was taken
        self._saving: dict[Topic, trio.Lock] = {}
        self._state_error = ""
        self._reserving = trio.Lock()
        self.broker = Broker(options, self._make_log)
        try:
            first_id = folder.first_id()
            self._reserved_ids = first_id + ID_RESERVE
            folder.reserve_ids(self._reserved_ids)
        except OSError as exc:
            raise StartupError(f"--data-path: cannot write to {folder.path}: {exc.strerror}") from exc
        node_id = options.node_id if options.node_id is not None else default_node_id()
        self._ids = MessageIds(node_id, first_id)
        self.publisher = Publisher(options, self._ids, nursery, self._published)
        self._load()

    def _make_log(self, name: str) -> Log:
        if is_ephemeral(name):
            return MemoryLog(max_messages=self.options.mem_queue_size)
        folder = self._folder.topic_folder(name)
        return DiskLog(folder, segment_bytes=self.options.max_bytes_per_file, files=self._folder.files)

    def _load(self) -> None:
        for name in self._folder.topic_names():
            state = self._folder.read_state(name)
            try:
                topic = self.broker.topic(name)
                if topic.restore(state):
                    self._folder.write_state(name, topic.snapshot())
            except StateError as exc:
                raise StartupError(f"{self._folder.topic_folder(name)}/state.json is damaged: {exc}") from exc
            except LogError as exc:
                raise StartupError(str(exc)) from exc
            except OSError as exc:
                folder = self._folder.topic_folder(name)
                raise StartupError(f"cannot write to {folder}: {exc.strerror}") from exc
            for channel in topic.channels.values():
                self.broker.watch(channel, channel.next_deadline_ns)

    # ------------------------------------------------------------------ time

    def now_ns(self) -> int:
        """Unix nanoseconds by a clock that never steps."""
        return self._clock_offset_ns + int(trio.current_time() * _NS_PER_S)

    async def run_timers(self) -> None:
        """Move what is due when it is due, and sleep in between; runs until cancelled."""
        while True:
            for channel in self.broker.tick(self.now_ns()):
                self.broker.changed.add(channel.topic.name)
                self.pump(channel)
            due_ns = self.broker.next_deadline_ns
            wait_s = math.inf if due_ns is None else max(0.0, (due_ns - self.now_ns()) / _NS_PER_S)
            self._timer_moved = trio.Event()
            with trio.move_on_after(wait_s):
                await self._timer_moved.wait()

    def watch(self, channel: Channel, at_ns: int) -> None:
        """See to it that the channel is looked at by `at_ns`."""
        known_ns = self.broker.next_deadline_ns
        self.broker.watch(channel, at_ns)
        if known_ns is None or at_ns < known_ns:
            self._timer_moved.set()

    def _channel(self, topic_name: str, channel_name: str) -> Channel:
        """The channel of this name, made if need be: it may begin with messages that wait for their time."""
        known_ns = self.broker.next_deadline_ns
        channel = self.broker.channel(topic_name, channel_name)
        if self.broker.next_deadline_ns != known_ns:
            self._timer_moved.set()
        return channel

    # ------------------------------------------------------------------ publishing and delivery

    async def publish(self, topic_name: str, publications: Sequence[Publication]) -> None:
        """Store publications to a topic, made if need be. Raises PublishRefused."""
        if topic_name in self._deleting or self._stopping:
            raise PublishRefused("exiting")
        try:
            topic = self.broker.topic(topic_name)
        except LogError as exc:
            raise PublishRefused(str(exc)) from exc
        await self.publisher.publish(topic, publications)

    def _published(self, topic: Topic) -> None:
        self.broker.changed.add(topic.name)
        for channel in topic.channels.values():
            if (due_ns := channel.next_due_ns) is not None:
                self.watch(channel, due_ns)
            self.pump(channel)

    def pump_topic(self, topic: Topic) -> None:
        """Send what is ready in any of a topic's channels, and look out for what is deferred there."""
        self._published(topic)

    def pump(self, channel: Channel) -> None:
        """Send what is ready to whoever can take it."""
        if self._stopping:
            return  # what one client had would only go to the next, to be taken from it in its turn
        now_ns = self.now_ns()
        timeout_ns = self.options.limits.max_msg_timeout_ms * 1_000_000
        sent = False
        while True:
            try:
                grants = channel.dispatch(now_ns)
            except LogError as exc:
                logger.error("%s/%s: %s", channel.topic.name, channel.name, exc)
                self.watch(channel, now_ns + _READ_AGAIN_NS)
                break
            if not grants:
                break
            sent = True
            clients: dict[Connection, None] = {}
            for consumer, frames in grants:
                client = self._clients[consumer]
                client.outbox.put(frames)
                clients[client] = None
                timeout_ns = min(timeout_ns, consumer.msg_timeout_ns)
            for client in clients:
                client.send_delivered()
        if sent:
            self.broker.changed.add(channel.topic.name)
            self.watch(channel, now_ns + timeout_ns)

    # ------------------------------------------------------------------ subscriptions

    async def subscribe(
        self, client: Connection, topic_name: str, channel_name: str, consumer: Consumer
    ) -> Channel:
        """Let a client consume from a channel; it and its topic are made, durably, if need be.

        Raises:
            CommandError: E_SUB_FAILED.
        """
        if topic_name in self._deleting or self._stopping:
            raise CommandError("E_SUB_FAILED", "SUB failed exiting")
        try:
            channel = self._channel(topic_name, channel_name)
        except LogError as exc:
            raise CommandError("E_SUB_FAILED", f"SUB failed {exc}") from exc
        limit = self.options.max_channel_consumers
        if limit and len(channel.consumers) >= limit:
            reason = f"consumers for {topic_name}:{channel_name} exceeds limit of {limit}"
            raise CommandError("E_SUB_FAILED", f"SUB failed {reason}")
        channel.add(consumer)
        self._clients[consumer] = client
        try:
            await self.save_new(channel.topic)
        except BaseException:
            self.unsubscribe(channel, consumer)
            raise
        if consumer not in channel.consumers:
            self.unsubscribe(channel, consumer)
            raise CommandError("E_SUB_FAILED", "SUB failed to deleted topic/channel")
        return channel

    def unsubscribe(self, channel: Channel, consumer: Consumer) -> None:
        """Take a client out of its channel; what it had in flight goes to the others."""
        channel.remove(consumer)
        self._clients.pop(consumer, None)
        self.broker.changed.add(channel.topic.name)
        alive = channel.topic.channels.get(channel.name) is channel
        if alive and channel.ephemeral and not channel.consumers:
            self.broker.delete_channel(channel)
        elif alive:
            self.pump(channel)

    # ------------------------------------------------------------------ operators

    async def create(self, topic_name: str, channel_name: str | None = None) -> None:
        """Make a topic, or a channel and its topic, durably. Raises LogError, PublishRefused while it is deleted."""
        if topic_name in self._deleting or self._stopping:
            raise PublishRefused("exiting")
        if channel_name is None:
            await self.save_new(self.broker.topic(topic_name))
        else:
            await self.save_new(self._channel(topic_name, channel_name).topic)

    async def delete_topic(self, topic: Topic) -> None:
        """Delete a topic with its channels and files; its clients are disconnected.

        Raises:
            OSError: Nothing was deleted.
        """
        if (under_way := self._deleting.get(topic.name)) is not None:
            await under_way.wait()
            return
        self._deleting[topic.name] = trio.Event()
        try:
            with trio.CancelScope(shield=True):  # bounded by the disk; half a deletion is none
                async with self._saving.setdefault(topic, trio.Lock()):
                    await self._delete(topic)
        finally:
            self._saving.pop(topic, None)
            self._deleting.pop(topic.name).set()

    async def _delete(self, topic: Topic) -> None:
        await self.publisher.idle(topic)
        retired: Path | None = None
        if not topic.ephemeral:
            # First, so that a crash or an error leaves the topic as it was. Consumers read on from open files.
            work = partial(self._folder.retire_topic, topic.name)
            retired = await trio.to_thread.run_sync(work)
            await self.publisher.idle(topic)  # a scheduled sync may have begun meanwhile
        self.publisher.forget(topic)
        self.broker.delete_topic(topic)
        self._saved.pop(topic, None)
        if retired is not None:
            await trio.to_thread.run_sync(self._folder.remove_retired, retired)

    async def delete_channel(self, channel: Channel) -> None:
        """Delete a channel, durably; its clients are disconnected."""
        self.broker.delete_channel(channel)
        await self.save(channel.topic)

    # ------------------------------------------------------------------ saved state

    async def save_new(self, topic: Topic) -> None:
        """Save a topic's state if it, or a channel of its, was never saved."""
        if topic.name in self.broker.unsaved:
            await self.save(topic)

    async def save(self, topic: Topic) -> None:
        """Return when the topic's state, as it is now or later, is on disk; an error is logged and noted.

        Waiting callers are served by one write.
        """
        if topic.ephemeral or self.broker.topics.get(topic.name) is not topic:
            self._mark_saved(topic.name)
            return
        ticket = next(self._tickets)
        async with self._saving.setdefault(topic, trio.Lock()):
            if self._saved.get(topic, -1) > ticket or self.broker.topics.get(topic.name) is not topic:
                return
            self._saved[topic] = next(self._tickets)
            self._mark_saved(topic.name)
            state = topic.snapshot()
            try:
                await trio.to_thread.run_sync(self._folder.write_state, topic.name, state)
            except BaseException as exc:  # cancelled, too: then nothing was written
                self._saved.pop(topic, None)
                self.broker.unsaved.add(topic.name)
                if not isinstance(exc, OSError):
                    raise
                self._note_state_error(f"cannot save the state of topic {topic.name}: {exc.strerror}")
                return
            self._state_error = ""
            try:
                topic.log.discard_before(Topic.first_needed(state))
            except LogError as exc:
                self._note_state_error(str(exc))

    def _mark_saved(self, topic_name: str) -> None:
        self.broker.changed.discard(topic_name)
        self.broker.unsaved.discard(topic_name)

    def _note_state_error(self, text: str) -> None:
        if self._state_error != text:
            logger.error("%s", text)
        self._state_error = text

    async def save_on_schedule(self) -> None:
        """Save what changed every so often; runs until cancelled."""
        while True:
            await trio.sleep(self.options.checkpoint_interval_ms / 1000)
            await self._save_all()

    async def _save_all(self) -> None:
        for name in self.broker.changed | self.broker.unsaved:
            topic = self.broker.topics.get(name)
            if topic is not None:
                await self.save(topic)
            else:
                self._mark_saved(name)
        if self._ids.next + ID_RESERVE // 2 > self._reserved_ids:
            await self._reserve_ids(self._ids.next + ID_RESERVE)

    async def _reserve_ids(self, below: int) -> None:
        async with self._reserving:
            try:
                await trio.to_thread.run_sync(self._folder.reserve_ids, below)
            except OSError as exc:
                # Tried again at the next checkpoint; until then there is half of what was reserved before.
                self._note_state_error(f"cannot write to {self._folder.path}: {exc.strerror}")
            else:
                self._reserved_ids = below

    @property
    def health(self) -> str:
        """`OK`, or `NOK - ` and what the last write failed with."""
        error = self.publisher.health or self._state_error
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
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = format_address(*sock.getpeername()[:2])
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
            logger.debug("TCP: client(%s) gone", peer)

    async def stop(self) -> None:
        """Store what is under way, close every client, save every state. Bounded by the disk, not by clients."""
        await self.publisher.close()
        await trio.lowlevel.checkpoint()  # lets connections send the OKs of what was just stored
        self._stopping = True
        for client in list(self.connections):
            client.outbox.flush()
            client.close()
        await self._deserted.wait()  # a closed connection waits for nobody but the disk
        for deletion in list(self._deleting.values()):
            await deletion.wait()
        self.broker.changed.update(self.broker.topics)
        await self._save_all()
        await self._reserve_ids(self._ids.next)  # if it fails: what is reserved is above every id in use
        for topic in self.broker.topics.values():
            topic.log.close()


def default_node_id() -> int:
    """As nsqd: from the host name, 0..1023."""
    from hashlib import md5
    from zlib import crc32

    return crc32(md5(socket.gethostname().encode(), usedforsecurity=False).digest()) % 1024
