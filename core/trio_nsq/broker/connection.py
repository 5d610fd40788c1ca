"""One TCP client: reads its commands, obeys them, answers in their order."""

import logging
import math
import socket
import time
from typing import TYPE_CHECKING

import trio

from ..protocol import (
    CLOSE_WAIT_FRAME,
    HEARTBEAT_FRAME,
    OK_FRAME,
    Auth,
    Command,
    CommandError,
    CommandReader,
    Finish,
    Identify,
    IdentifyRequest,
    IdentifySettings,
    Publish,
    Ready,
    Requeue,
    StartClose,
    State,
    Subscribe,
    Touch,
    encode_error,
    encode_response,
    identify_reply,
    negotiate,
    parse_identify,
)
from ..protocol.commands import LineTooLong
from .channel import Channel
from .consumer import Consumer
from .errors import PublishRefused
from .outbox import Outbox
from .publisher import Publication

if TYPE_CHECKING:
    from .server import Server

logger = logging.getLogger("trio_nsq.broker")

_RECEIVE_BYTES = 64 * 1024
_READS_PER_TURN = 8
"""A client whose data is always there already lets the others have their turn after so many reads."""
_LINGER_S = 1.0
_LINGER_BYTES = 16 * 1024 * 1024
_NS_PER_MS = 1_000_000


class Connection:
    """A connected client, until `run` returns.

    Args:
        server: Whom it talks to.
        sock: Non-blocking; closed at the end of `run`.
        peer: The client's address, for logs and `/stats`.
    """

    def __init__(self, server: "Server", sock: socket.socket, peer: str) -> None:
        self.server = server
        self.peer = peer
        host = peer.rpartition(":")[0].strip("[]")
        self.identity = IdentifyRequest(client_id=host, hostname=host)
        self.settings = IdentifySettings.default(server.options.limits)
        self.connected_s = int(time.time())
        self.pub_counts: dict[str, int] = {}
        self.consumer: Consumer | None = None
        self.channel: Channel | None = None
        self.outbox = Outbox(sock)
        self.outbox.patience_s = self._heartbeat_interval_s
        self._sock = sock
        self._reader = CommandReader(server.options.limits)
        self._identified = False
        self._settings_changed = trio.Event()
        self._silent_since = math.inf
        self._scope = trio.CancelScope()

    @property
    def _heartbeat_interval_s(self) -> float:
        return self.settings.heartbeat_interval_ms / 1000 or math.inf

    @property
    def state(self) -> State:
        """Where the conversation stands."""
        return self._reader.state

    def close(self) -> None:
        """End the connection soon, from outside."""
        self._scope.cancel()

    # ------------------------------------------------------------------ tasks

    async def run(self) -> None:
        """Serve the client until it leaves, breaks the rules, or `close` is called."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_heartbeats)
                    nursery.start_soon(self._send_rest)
                    await self._receive()
                    nursery.cancel_scope.cancel()
        finally:
            self.outbox.abandon()
            try:
                self._leave_channel()
            finally:
                self._sock.close()

    async def _receive(self) -> None:
        reads = 0
        while not self.outbox.broken:
            if self.outbox.congested:  # it sends, and does not read our answers
                await self.outbox.emptied()
                continue
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                reads = 0
                self._silent_since = trio.current_time()
                await trio.lowlevel.wait_readable(self._sock)
                self._silent_since = math.inf
                continue
            except OSError:
                return
            if data:
                self._reader.receive_data(data)
            else:
                self._reader.receive_eof()
            try:
                await self._obey_all()
            except CommandError as exc:
                await self._refuse(exc)
                return
            finally:
                self.outbox.flush()
            if not data:
                return
            reads += 1
            if reads == _READS_PER_TURN:
                reads = 0
                await trio.lowlevel.checkpoint()

    async def _refuse(self, error: CommandError) -> None:
        """Send the last frame, and see to it that it arrives.

        Closing a socket with unread input resets the connection, and the client may then never see why. So
        what it still sends is read, for a short while, and thrown away. It gets no more messages.
        """
        self._leave_channel()
        logger.warning("%s: %s", self.peer, str(error))  # the error itself would keep us in memory
        if not isinstance(error, LineTooLong):
            self.outbox.put(encode_error(error.wire))
        with trio.move_on_after(_LINGER_S):
            self.outbox.flush()
            await self.outbox.emptied()
            try:
                self._sock.shutdown(socket.SHUT_WR)
                for _ in range(_LINGER_BYTES // _RECEIVE_BYTES):
                    await trio.lowlevel.wait_readable(self._sock)
                    if not self._sock.recv(_RECEIVE_BYTES):
                        return
            except OSError:
                return  # the client has gone

    async def _send_heartbeats(self) -> None:
        while True:
            interval_s = self._heartbeat_interval_s
            with trio.move_on_after(interval_s):
                await self._settings_changed.wait()
                self._settings_changed = trio.Event()
                continue
            if trio.current_time() - self._silent_since >= 2 * interval_s:
                logger.info("%s: closed, nothing heard for two heartbeats", self.peer)
                self.close()
                return
            if self._reader.greeted:
                self.outbox.put(HEARTBEAT_FRAME)
                self.outbox.flush()

    async def _send_rest(self) -> None:
        """Take over sending whenever the socket is full, and give the client messages again afterwards."""
        while await self.outbox.drain():
            self._set_blocked(False)
        if not self.outbox.broken:
            logger.warning("%s: closed, it takes no data", self.peer)
        self.close()

    def send_delivered(self) -> None:
        """Send the message frames that were put in the outbox, and note if the client is too slow for more."""
        self.outbox.flush()
        if self.outbox.full:
            self._set_blocked(True)

    def _set_blocked(self, blocked: bool) -> None:
        if self.consumer is not None and self.channel is not None:
            self.consumer.blocked = blocked
            self.channel.refresh(self.consumer)
            if not blocked:
                self.server.pump(self.channel)

    def _leave_channel(self) -> None:
        if self.consumer is not None and self.channel is not None:
            self.server.unsubscribe(self.channel, self.consumer)

    # ------------------------------------------------------------------ commands

    async def _obey_all(self) -> None:
        """Execute the commands that are whole, in order; publishes next to each other are stored together."""
        publishes: list[Publish] = []
        while True:
            try:
                command = self._reader.next_command()
            except CommandError:
                await self._publish(publishes)  # answers keep the order of the commands
                raise
            if isinstance(command, Publish):
                if publishes and publishes[-1].topic != command.topic:
                    await self._publish(publishes)
                publishes.append(command)
                continue
            await self._publish(publishes)
            if command is None:
                break
            await self._obey(command)
        if self.channel is not None:
            self.server.pump(self.channel)

    async def _publish(self, publishes: list[Publish]) -> None:
        """Store publishes to one topic, if any, and answer them; the list is empty afterwards."""
        if not publishes:
            return
        batch = publishes.copy()
        publishes.clear()
        topic_name = batch[0].topic
        now_ns = self.server.now_ns() if any(p.defer_ms for p in batch) else 0
        publications = [
            Publication(p.messages, now_ns + p.defer_ms * _NS_PER_MS if p.defer_ms else 0) for p in batch
        ]
        try:
            await self.server.publish(topic_name, publications)
        except PublishRefused as exc:
            verb = batch[0].verb
            raise CommandError(f"E_{verb}_FAILED", f"{verb} failed {exc}") from exc
        count = sum(len(p.messages) for p in batch)
        self.pub_counts[topic_name] = self.pub_counts.get(topic_name, 0) + count
        self.outbox.put(OK_FRAME * len(batch))

    async def _obey(self, command: Command) -> None:
        if isinstance(command, Finish):
            channel, consumer = self._subscription()
            for message_id, reason in channel.finish(consumer, command.ids):
                self._complain("FIN", message_id, reason)
            self.server.broker.changed.add(channel.topic.name)
        elif isinstance(command, Ready):
            self._ready(command.count)
        elif isinstance(command, Requeue):
            self._requeue(command)
        elif isinstance(command, Touch):
            channel, consumer = self._subscription()
            longest_ms = self.server.options.limits.max_msg_timeout_ms
            why_not = channel.touch(consumer, command.id, self.server.now_ns(), longest_ms)
            if why_not:
                self._complain("TOUCH", command.id, why_not)
        elif isinstance(command, Identify):
            self._identify(command)
        elif isinstance(command, Subscribe):
            await self._subscribe(command)
        elif isinstance(command, StartClose):
            self._reader.state = State.CLOSING
            self._ready(0)
            self.outbox.put(CLOSE_WAIT_FRAME)
        elif isinstance(command, Auth):
            raise CommandError("E_AUTH_DISABLED", "AUTH disabled")

    def _subscription(self) -> tuple[Channel, Consumer]:
        assert self.channel is not None  # the state table lets no such command through before SUB
        assert self.consumer is not None
        return self.channel, self.consumer

    def _complain(self, verb: str, message_id: bytes, reason: str) -> None:
        error = CommandError(
            f"E_{verb}_FAILED", f"{verb} {message_id.decode('utf-8', 'surrogateescape')} failed {reason}"
        )
        self.outbox.put(encode_error(error.wire))

    def _ready(self, count: int) -> None:
        channel, consumer = self._subscription()
        consumer.ready_count = count if self.state is State.SUBSCRIBED else 0
        channel.refresh(consumer)

    def _requeue(self, command: Requeue) -> None:
        channel, consumer = self._subscription()
        now_ns = self.server.now_ns()
        reason = channel.requeue(consumer, command.id, command.delay_ms, now_ns)
        if reason:
            self._complain("REQ", command.id, reason)
        elif command.delay_ms:
            self.server.watch(channel, now_ns + command.delay_ms * _NS_PER_MS)
        self.server.broker.changed.add(channel.topic.name)

    def _identify(self, command: Identify) -> None:
        limits = self.server.options.limits
        request = parse_identify(command.body)
        settings = negotiate(request, limits)
        self.identity = request
        self._reader.heartbeats = settings.heartbeat_interval_ms > 0
        if not self._identified:  # as in nsqd, later ones are answered but change nothing any more
            self._identified = True
            self.settings = settings
            self.outbox.patience_s = self._heartbeat_interval_s
            self._settings_changed.set()
        if request.feature_negotiation:
            reply = identify_reply(request, settings, limits, self.server.version)
            self.outbox.put(encode_response(reply))
        else:
            self.outbox.put(OK_FRAME)

    async def _subscribe(self, command: Subscribe) -> None:
        consumer = Consumer(self.settings.msg_timeout_ms, self.close)
        self.channel = await self.server.subscribe(self, command.topic, command.channel, consumer)
        self.consumer = consumer
        self._reader.state = State.SUBSCRIBED
        self.outbox.put(OK_FRAME)
