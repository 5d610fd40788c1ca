"""One TCP client: reads its commands, obeys them, answers in their order."""

import logging
import math
import socket
import time
from collections.abc import Sequence
from enum import Enum, auto
from random import random
from typing import TYPE_CHECKING

import trio

from ...protocol import (
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
    NSQError,
    Publish,
    Ready,
    Requeue,
    StartClose,
    State,
    Subscribe,
    Touch,
    Upgrades,
    choose_upgrades,
    encode_error,
    encode_response,
    identify_reply,
    is_ephemeral,
    negotiate,
    parse_identify,
)
from ...protocol.commands import LineTooLong
from ...protocol.compression import Deflate, Snappy
from ..errors import PublishRefused, TopicFull
from ..publication import Publication
from ..state.channel import Channel
from ..state.consumer import Consumer
from .guard import Guard
from .wire import LARGE_RECEIVE_BYTES, RECEIVE_BYTES, Wire

if TYPE_CHECKING:
    from ..server import Server

logger = logging.getLogger("trio_nsq.broker")

_TURN_S = 0.005
"""A client whose data is always there already lets the others have their turn after so much time."""
_LARGE_IDENTIFY_BYTES = 4096
_COMMANDS_S = 0.000_5
"""The same for thousands of small commands that come together."""
_COMMANDS_AT_LEAST = 32
"""So many are obeyed before the clock is looked at."""
_NS_PER_MS = 1_000_000


class _Holder(Enum):
    """Who reads a client's commands."""

    NOBODY = auto()  # the poller may take it
    POLLER = auto()  # the poller is at it, or the log stores what it published
    TASK = auto()


# To look a member up in its class takes longer than the rest of such a comparison.
_NOBODY, _POLLER, _TASK = _Holder


class Connection:
    """A connected client, until `run` returns.

    Its commands are obeyed in the poller's turn (`serve`). What has to be waited for there is handed over to the
    client's own task, which gives the client back when nothing more is to be read; while the log stores what was
    published, neither reads.

    Args:
        server: Whom it talks to.
        sock: Non-blocking; closed at the end of `run`.
        peer: The client's address, for logs and `/stats`.

    Attributes:
        identity: What it said of itself.
        settings: What was negotiated, or the defaults.
        upgrades: What the connection became.
        guard: Knows what the client may do.
        wire: The socket and the layers over it; `outbox` is its.
        connected_s: Unix seconds.
        pub_counts: Messages published, by topic.
        consumer, channel: The subscription, if there is one.
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
        self.upgrades = Upgrades()
        self.guard = Guard(server.auth_client, peer)
        self.wire = Wire(sock)
        self.outbox = self.wire.outbox
        self.outbox.patience_s = self._heartbeat_interval_s
        self._sock = sock
        self._reader = CommandReader(server.options.limits)
        self._reader.tls_required = server.options.required_tls != "false"
        self._identified = False
        self._negotiated = self.settings  # by the last IDENTIFY, the first of which counts
        self._quiet = False  # no heartbeats: an upgrade is under way, or the last frame is sent
        self._turn_over_s = 0.0  # by `time.perf_counter`
        self._answered = False  # something is in the outbox that is not to wait
        self._held_bytes = 0  # of messages in the outbox that may wait for more of them
        self._settings_changed = trio.Event()
        self._silent_since = math.inf  # by trio's clock; math.inf while it is not waited for
        self._holder = _TASK
        self._unread = True  # there may be something in the socket
        self._ended = False  # what is there is the last
        self._handed: bytes | Exception | None = None  # what the task is to take in, or to raise
        self._handed_over = trio.Event()
        self._publishes: list[Publish] = []  # to one topic, to be stored together
        self._next: Command | CommandError | None = None  # what was read, and comes after them
        self._storing = False
        self._stored = trio.Event()  # for the task, if it has the client
        self._takes_room = False  # of the server's bodies, or waits for it
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
                    self.server.poller.add(self._sock.fileno(), self)
                    try:
                        await self._receive()
                    finally:
                        self._holder = _TASK
                        self.server.poller.remove(self._sock.fileno())
                    nursery.cancel_scope.cancel()
        finally:
            self.wire.say_goodbye()
            self.outbox.abandon()
            self.server.bodies.leave(self)
            try:
                self._leave_channel()
            finally:
                # It knows us: without this the garbage collector would be needed.
                self.consumer = self.channel = None
                self._sock.close()

    async def _receive(self) -> None:
        """Obey what the client sends, until it ends the connection, breaks the rules, or is gone."""
        try:
            while data := await self._read():
                await self._take_in(data)
            if data is None:
                return
            self._reader.receive_eof()
            await self._obey_all()
        except CommandError as exc:
            await self._refuse(exc.with_traceback(None))  # in its frames it, and we, would be kept
        except NSQError as exc:
            logger.info("%s: closed, what it sends is not what was negotiated: %s", self.peer, exc)
        else:
            self._leave_channel()
            self._flush_answers()
            await self.outbox.emptied()  # it may have ended its half only, and want to read the answers

    async def _read(self) -> bytes | None:
        """Wait for what the task has to take in; b"" if the client has ended its side, None if the connection is lost.

        Raises:
            CommandError: The client broke the rules meanwhile.
        """
        while not self.outbox.broken:
            if self.wire.ended:
                return b""
            await self._wait_for_room()
            if self._unread:
                try:
                    return self._receive_now()
                except BlockingIOError:
                    continue
                except OSError:
                    return None
            self._handed_over = trio.Event()
            self._rest()
            await self._handed_over.wait()
            self._turn_over_s = time.perf_counter() + _TURN_S
            handed, self._handed = self._handed, None
            if isinstance(handed, Exception):
                raise handed
            if handed is not None:
                return handed
            await self._obey_all()
            await self._send_answers()
        return None

    def _receive_now(self) -> bytes:
        """What the socket has. Raises OSError, BlockingIOError if it has nothing."""
        try:
            # What is missing of a large body, and nothing else: then the reader need not cut it out.
            missing = self._reader.missing_bytes if self.wire.bare else 0
            wanted = min(missing, LARGE_RECEIVE_BYTES) or RECEIVE_BYTES
            data = self._sock.recv(wanted)
        except BlockingIOError:
            self._unread = False
            raise
        # A short read has taken all there was: the kernel tells of what comes afterwards. But not again of the end.
        self._unread = len(data) == wanted or self._ended
        return data

    def _rest(self) -> None:
        """Let the poller serve the client again."""
        self._holder = _NOBODY
        self._silent_since = self.server.clock_s()

    async def _take_in(self, data: bytes) -> None:
        """Obey what was received, or, if that is nothing, what the layers still have of it. Raises NSQError."""
        for piece in self.wire.decode(data):  # a few bytes can become a lot of pieces
            await self._wait_for_room()
            self._reader.receive_data(piece)
            await self._obey_all()
            await self._send_answers()
            await self._let_others()
        await self._let_others()  # there may be no piece for long

    async def _let_others(self) -> None:
        """Let others have their turn if ours is over."""
        if self._turn_is_over:
            await trio.lowlevel.checkpoint()
            self._turn_over_s = time.perf_counter() + _TURN_S

    @property
    def _turn_is_over(self) -> bool:
        return time.perf_counter() > self._turn_over_s

    async def _send_answers(self) -> None:
        self._flush_answers()
        if self.outbox.congested:  # it sends, and does not read our answers
            await self.outbox.emptied()

    async def _refuse(self, error: CommandError) -> None:
        """Send the last frame. The client gets no more messages, nor heartbeats."""
        self._quiet = True
        self._leave_channel()
        logger.error("[%s] - %s", self.peer, str(error))  # the error itself would keep us in memory
        if not isinstance(error, LineTooLong):
            self.outbox.put(encode_error(error.wire))
        await self.wire.linger()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and end a connection that is silent for two intervals; runs until cancelled."""
        next_beat_s = trio.current_time() + self._heartbeat_interval_s
        while True:
            # A silence that begins later than now cannot be too long before the next heartbeat.
            too_long_s = self._silent_since + 2 * self._heartbeat_interval_s
            with trio.move_on_at(min(next_beat_s, too_long_s)):
                await self._settings_changed.wait()
                self._settings_changed = trio.Event()
                next_beat_s = trio.current_time() + self._heartbeat_interval_s
                continue
            now_s = trio.current_time()
            if now_s >= self._silent_since + 2 * self._heartbeat_interval_s:
                logger.info("%s: closed, nothing heard for two heartbeats", self.peer)
                self.close()
                return
            if now_s >= next_beat_s:
                next_beat_s += self._heartbeat_interval_s
                if self._reader.greeted and not self._quiet:
                    self._answer(HEARTBEAT_FRAME)
                    self._flush_answers()

    async def _send_rest(self) -> None:
        """Take over sending whenever the socket is full, and give the client messages again afterwards."""
        while await self.outbox.drain():
            self._set_blocked(False)
        if not self.outbox.broken:
            logger.warning("%s: closed, it takes no data", self.peer)
        self.close()

    # ------------------------------------------------------------------ in the poller's turn

    def note_unread(self, *, ended: bool) -> None:
        """Something has come; `ended`: and it is the last."""
        self._unread = True
        self._ended |= ended

    def serve(self) -> bool:
        """Read once and obey, as far as nothing has to be waited for. True: there may be more to read."""
        if self._holder is not _NOBODY:
            return False
        self._holder = _POLLER
        try:
            data = self._receive_now()
        except BlockingIOError:
            self._rest()
            return False
        except OSError as exc:
            self.outbox.abandon()
            logger.debug("%s: %s", self.peer, exc)
            self._hand_over(None)
            return False
        if not data or not self.wire.bare or self.outbox.broken:
            self._hand_over(data)
            return False
        self._reader.receive_data(data)
        self._go_on()
        return self._unread and self._holder is _NOBODY

    def _go_on(self) -> None:
        """Obey what was read, until the client can be left alone, the log stores something, or the task is needed."""
        try:
            if self._obey_now():
                self._leave_alone()
            elif self._storing:
                self._silent_since = math.inf
            else:
                self._hand_over(None)
        except Exception as exc:  # for the task, which knows what is whose fault
            self._hand_over(exc)

    def _leave_alone(self) -> None:
        """All that was read is obeyed."""
        self._flush_answers()
        if self.outbox.congested or not self._has_room():
            self._hand_over(None)
        else:
            self._rest()

    def _has_room(self) -> bool:
        """Whether the rest of a large body may come; of one that is whole now the room is given back."""
        missing = self._reader.missing_bytes
        if not missing and not self._takes_room:
            return True
        self._takes_room = missing > 0
        return self.server.bodies.admit(self, missing, self._reader.large_bodies)

    async def _wait_for_room(self) -> None:
        if not self._has_room():
            await self.server.bodies.wait(self, self._reader.missing_bytes, self._reader.large_bodies)

    def _hand_over(self, what: bytes | Exception | None) -> None:
        """Wake the task: to take in these bytes, to raise this, or to go on with what was read."""
        self._holder = _TASK
        self._silent_since = math.inf
        self._handed = what
        self._handed_over.set()

    # ------------------------------------------------------------------ sending

    def deliver(self, frames: bytes | memoryview) -> None:
        """Take message frames; `send_delivered` follows."""
        self.outbox.put(frames)
        self._held_bytes += len(frames)

    def send_delivered(self) -> None:
        """Send what `deliver` took. Where a buffer without a timer was negotiated, hold it back.

        As in nsqd that is until the buffer is full, the client can take no further message, or with any answer.
        Where there is a timer, messages wait in the channel: `Channel.can_wait`.
        """
        settings = self.settings
        waits = not settings.output_buffer_timeout_ms and self._held_bytes < settings.output_buffer_size
        if self._held_bytes and not (waits and self._can_take_more()):
            self._flush()

    def _can_take_more(self) -> bool:
        channel, consumer = self._subscription()
        return consumer.window > 0 and not channel.paused

    def _answer(self, frame: bytes) -> None:
        """Put a frame in the outbox that is not to wait."""
        self._send_waiting()
        self._put_answer(frame)

    def _send_waiting(self) -> None:
        """Messages that wait for more go before any answer, as in nsqd."""
        if self.channel is not None:
            self.server.send_waiting(self.channel)

    def _put_answer(self, frame: bytes) -> None:
        self.outbox.put(frame)
        self._answered = True

    def _flush_answers(self) -> None:
        if self._answered:
            self._send_waiting()  # what it has published to its own channel goes along
            self._flush()

    def _flush(self) -> None:
        """Send what there is, and note if the client is too slow for more."""
        self._answered = False
        self._held_bytes = 0
        self.outbox.flush()
        if self.outbox.full:
            self._set_blocked(True)

    def _set_blocked(self, blocked: bool) -> None:
        if self.consumer is not None and self.channel is not None:
            self.consumer.blocked = blocked
            self.channel.dispatcher.refresh(self.consumer)
            if not blocked:
                self.server.pump(self.channel)

    def _leave_channel(self) -> None:
        if self.consumer is not None and self.channel is not None:
            self.server.unsubscribe(self.channel, self.consumer)

    # ------------------------------------------------------------------ commands

    async def _obey_all(self) -> None:
        """In the task: obey the commands that are whole. Raises CommandError."""
        while not self._obey_now():
            if self._storing:
                self._stored = trio.Event()
                await self._stored.wait()
                self._turn_over_s = time.perf_counter() + _TURN_S
            else:
                await self._wait_for_next()

    def _obey_now(self) -> bool:
        """Obey the commands that are whole, in order, until all are (True).

        Or until one has to be waited for, or others are to have their turn.

        Publishes next to each other are stored together.

        Raises:
            CommandError: The client broke the rules, after what was obeyed.
        """
        left, over_s = _COMMANDS_AT_LEAST, 0.0
        while True:
            command = self._next_command()
            if type(command) is Publish and (
                not self._publishes or self._publishes[-1].topic == command.topic
            ):
                self._publishes.append(command)
                continue
            if self._publishes:  # before anything else: answers keep the order of the commands
                self._next = command
                if not self._store() or (self._holder is _TASK and self._turn_is_over):
                    return False
            elif command is None:
                break
            elif isinstance(command, CommandError):
                raise command
            elif not self._obey(command):
                self._next = command
                return False
            elif not (left := left - 1):
                now_s = time.perf_counter()
                over_s = over_s or now_s + _COMMANDS_S
                if now_s >= over_s:
                    return False
                left = _COMMANDS_AT_LEAST
        if self.channel is not None:
            self.server.pump(self.channel)
        return True

    def _next_command(self) -> Command | CommandError | None:
        if self._next is not None:
            command, self._next = self._next, None
            return command
        try:
            return self._reader.next_command()
        except CommandError as exc:
            return exc

    def _store(self) -> bool:
        """Have the publishes stored; False if that has to be waited for."""
        topic_name = self._publishes[0].topic
        self._send_waiting()  # now: what is being published is to come after the answer
        if not self.guard.idle:
            return False
        try:
            self._storing = self.server.submit(topic_name, self._publications(), self._note_stored)
        except PublishRefused as exc:
            self._answer_publishes(exc)
            return True
        return False

    def _publications(self) -> list[Publication]:
        return [
            Publication([p.messages], self.server.now_ns() + p.defer_ms * _NS_PER_MS if p.defer_ms else 0)
            for p in self._publishes
        ]

    def _note_stored(self, error: PublishRefused | None) -> None:
        """Answer what was published. Whoever has the client then goes on; without the task, that is here."""
        self._storing = False
        self._answer_publishes(error)
        if self._holder is _TASK:
            self._stored.set()
            return
        if self._next is None and self.channel is None:
            self._leave_alone()  # there was nothing more to read, and there is no channel to be served
        else:
            self._go_on()
        if self._unread and self._holder is _NOBODY:
            self.server.poller.look_again(self._sock.fileno())

    def _answer_publishes(self, error: PublishRefused | None) -> None:
        publishes, self._publishes = self._publishes, []
        topic_name = publishes[0].topic
        if error is None:
            count = sum([len(p.messages.sizes) for p in publishes])
            self.pub_counts[topic_name] = self.pub_counts.get(topic_name, 0) + count
            self._put_answer(OK_FRAME * len(publishes))
            return
        errors = [_refusal(p.verb, error) for p in publishes]
        if not self.identity.survive_refusals:
            self._next = errors[0]  # the end
            return
        logger.error("[%s] - %s", self.peer, str(errors[0]))
        for each in errors:
            self._put_answer(encode_error(each.wire))

    async def _wait_for_next(self) -> None:
        """In the task: obey what has to be waited for, or let others have their turn. Raises CommandError."""
        if self._publishes:
            await self.guard.check(self._publishes[0].verb, self._publishes[0].topic)
            error = None
            try:
                await self.server.publish(self._publishes[0].topic, self._publications())
            except PublishRefused as exc:
                error = exc
            self._answer_publishes(error)
            return
        command, self._next = self._next, None
        if isinstance(command, Identify):
            await self._identify(command)
        elif isinstance(command, Subscribe):
            await self._subscribe(command)
        elif isinstance(command, Auth):
            self._answer(encode_response(await self.guard.authenticate(command.secret, self.wire.tls)))
        elif command is None:  # it has had its turn, between two commands
            await trio.lowlevel.checkpoint()
        else:
            self._next = command
            await self._let_others()

    def _obey(self, command: Command) -> bool:
        """Obey anything but a publish; False, and nothing is done, if that has to be waited for."""
        if isinstance(command, Finish):
            channel, consumer = self._subscription()
            if failed := channel.finish(consumer, command.lines, time.time_ns()):
                self._answer(_failures("FIN", failed))
        elif isinstance(command, Ready):
            self._ready(command.count)
        elif isinstance(command, Requeue):
            self._requeue(command)
        elif isinstance(command, Touch):
            channel, consumer = self._subscription()
            longest_ms = self.server.options.limits.max_msg_timeout_ms
            why_not = channel.touch(consumer, command.id, self.server.now_ns(), longest_ms)
            if why_not:
                self._answer(_failures("TOUCH", [(command.id, why_not)]))
        elif isinstance(command, StartClose):
            self._reader.state = State.CLOSING
            self._ready(0)
            self._answer(CLOSE_WAIT_FRAME)
        else:
            return not isinstance(command, Identify | Subscribe | Auth)
        return True

    def _subscription(self) -> tuple[Channel, Consumer]:
        assert self.channel is not None  # the state table lets no such command through before SUB
        assert self.consumer is not None
        return self.channel, self.consumer

    def _ready(self, count: int) -> None:
        channel, consumer = self._subscription()
        consumer.ready_count = count if self.state is State.SUBSCRIBED else 0
        channel.dispatcher.refresh(consumer)
        if self._held_bytes and not self._can_take_more():
            self._answered = True  # what was held back waits for more that will not come

    def _requeue(self, command: Requeue) -> None:
        channel, consumer = self._subscription()
        now_ns = self.server.now_ns()
        reason = channel.requeue(consumer, command.id, command.delay_ms, now_ns)
        if reason:
            self._answer(_failures("REQ", [(command.id, reason)]))
        elif command.delay_ms:
            self.server.watch(channel, now_ns + command.delay_ms * _NS_PER_MS)

    async def _identify(self, command: Identify) -> None:
        limits = self.server.options.limits
        request = await self._parse_identify(command.body)
        self._negotiated = settings = negotiate(request, limits, self._negotiated)
        self.identity = request
        self._reader.heartbeats = settings.heartbeat_interval_ms > 0
        if not self._identified:  # as in nsqd, later ones are answered but change nothing any more
            self._identified = True
            self.settings = settings
            self.outbox.patience_s = self._heartbeat_interval_s
            self._settings_changed.set()
        if not request.feature_negotiation:
            self._answer(OK_FRAME)
            return
        upgrades = Upgrades()
        if self.wire.bare:  # a connection is upgraded once
            upgrades = choose_upgrades(request, limits, tls=self.server.tls_context is not None)
        auth_required = bool(self.server.options.auth_http_addresses)
        reply = identify_reply(
            settings,
            upgrades,
            limits,
            self.server.version,
            auth_required=auth_required,
            survive_refusals=request.survive_refusals,
            private_channel=request.private_channel,
        )
        self._answer(encode_response(reply))
        await self._upgrade(upgrades)

    async def _parse_identify(self, body: bytes) -> IdentifyRequest:
        """Raises CommandError. Large bodies take milliseconds: one of them in each round of the event loop."""
        if len(body) <= _LARGE_IDENTIFY_BYTES:
            return parse_identify(body)
        async with self.server.parsing:
            await trio.lowlevel.checkpoint()
            return parse_identify(body)

    async def _upgrade(self, upgrades: Upgrades) -> None:
        """Lay TLS and compression over the connection, with an OK inside each. Raises CommandError."""
        if not (upgrades.tls or upgrades.snappy or upgrades.deflate):
            return
        self.upgrades = upgrades
        self._flush_answers()
        received = self._reader.take_buffered()  # nothing, if the client keeps to the rules
        if upgrades.tls:
            assert self.server.tls_context is not None
            self._quiet = True
            await self.wire.start_tls(self.server.tls_context, received)
            self._quiet = False
            received = b""
            self._reader.tls_required = False
            self._answer(OK_FRAME)
        if upgrades.snappy or upgrades.deflate:
            self.wire.add_codec(Snappy() if upgrades.snappy else Deflate(upgrades.deflate_level))
            self._answer(OK_FRAME)
        await self._take_in(received)

    async def _subscribe(self, command: Subscribe) -> None:
        await self.guard.check("SUB", command.topic, command.channel)
        private = self.identity.private_channel
        if private and not is_ephemeral(command.channel):
            reason = "a private channel's name must end in #ephemeral"
            raise CommandError("E_BAD_CHANNEL", f"SUB channel name {command.channel}: {reason}")
        rate = self.settings.sample_rate
        # nsqd lets one percent more through.
        sample = (lambda: 100 * random() < rate) if rate else None
        consumer = Consumer(
            self.settings.msg_timeout_ms,
            self.close,
            sample,
            self.settings.output_buffer_size,
            self.settings.output_buffer_timeout_ms,
        )
        self.channel = await self.server.subscribe(
            self, command.topic, command.channel, consumer, private=private
        )
        self.consumer = consumer
        self._reader.state = State.SUBSCRIBED
        self._answer(OK_FRAME)


def _failures(verb: str, failed: Sequence[tuple[bytes, str]]) -> bytes:
    """Return the error frames for ids for which a FIN, REQ or TOUCH did nothing: pairs of the id and the reason.

    One piece of bytes however many there are: one client sends thousands of unknown ids at once.
    """
    before = f"E_{verb}_FAILED {verb} ".encode()
    return b"".join(
        [
            encode_error(b"%s%s failed %s" % (before, message_id, reason.encode()))
            for message_id, reason in failed
        ]
    )


def _refusal(verb: str, reason: PublishRefused) -> CommandError:
    # A code of its own: with nsqd's, something of it may have been stored.
    code = "E_TOPIC_FULL" if isinstance(reason, TopicFull) else f"E_{verb}_FAILED"
    return CommandError(code, f"{verb} failed {reason}")
