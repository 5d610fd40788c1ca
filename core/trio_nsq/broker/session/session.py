"""One TCP client: reads its commands, executes them, answers in their order."""

import logging
import math
import socket
import time
from time import perf_counter

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
    NSQError,
    Publish,
    Ready,
    Requeue,
    StartClose,
    State,
    Subscribe,
    Touch,
    encode_error,
    encode_response,
)
from ...protocol.commands import LineTooLong
from ...reactor import AWAITING, IN_TASK, RECEIVE_BYTES, RESTING, PolledEndpoint
from ..errors import PublishRefused
from ..ingest.publication import Publication
from .answers import failure_frames, publish_refusal
from .authorizer import Authorizer
from .handshake import Handshake
from .services import Services
from .subscription import Subscription
from .transport import LARGE_RECEIVE_BYTES, Transport

logger = logging.getLogger("trio_nsq.broker")

_NS_PER_MS = 1_000_000


class Session(PolledEndpoint):
    """A connected client, until `run` returns.

    Its commands are executed in the poller's turn (`serve_data`). What has to be waited for there is handed over to the
    client's own task, which leaves the client to the poller again when nothing more is to be read; while the log stores
    what was published, neither reads. See `EndpointState`.

    Args:
        services: Of the broker.
        sock: Non-blocking; closed at the end of `run`.
        peer: The client's address, for logs and `/stats`.

    Attributes:
        handshake: What the client said of itself, and what was negotiated.
        authorizer: Knows what the client may do.
        transport: The socket and the layers over it; `send_buffer` is its.
        connected_s: Unix seconds.
        pub_counts: Messages published, by topic.
        subscription: After SUB.
    """

    def __init__(self, services: Services, sock: socket.socket, peer: str) -> None:
        super().__init__(sock, services.poller)
        self.peer = peer
        self.connected_s = int(time.time())
        self.pub_counts: dict[str, int] = {}
        self.subscription: Subscription | None = None
        self.authorizer = Authorizer(services.auth_client, peer)
        self.transport = Transport(sock)
        self.send_buffer = self.transport.send_buffer
        self._services = services
        self._timers = services.timers
        self._delivery = services.delivery
        self._pacing = services.options.pacing
        self._reader = CommandReader(services.options.limits)
        self._reader.tls_required = services.options.required_tls != "false"
        host = peer.rpartition(":")[0].strip("[]")
        self.handshake = Handshake(services, self._reader, self.transport, host)
        self._settings = self.handshake.settings
        self.send_buffer.patience_s = self._heartbeat_interval_s
        self._is_refused = False  # the last frame is sent
        self._turn_over_s = 0.0  # by `perf_counter`
        self._answered = False  # something is in the send buffer that is not to wait
        self._settings_changed = trio.Event()
        self._silent_since_s_s = math.inf  # by trio's clock; math.inf while it is not waited for
        self._handed: bytes | Exception | None = None  # what the task is to take in, or to raise
        self._publishes: list[Publish] = []  # to one topic, to be stored together
        self._next: Command | CommandError | None = None  # what was read, and comes after them
        self._is_storing = False
        self._stored = trio.Event()  # for the task, if it has the client
        self._takes_room = False  # of the broker's bodies, or waits for it
        self._scope = trio.CancelScope()

    @property
    def _heartbeat_interval_s(self) -> float:
        return self._settings.heartbeat_interval_ms / 1000 or math.inf

    @property
    def protocol_state(self) -> State:
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
                    self._poller.add(self._sock.fileno(), self)
                    try:
                        await self._receive()
                    finally:
                        self.state = IN_TASK
                        self._poller.remove(self._sock.fileno())
                    nursery.cancel_scope.cancel()
        finally:
            self.transport.say_goodbye()
            self.send_buffer.abandon()
            self._services.bodies.leave(self)
            try:
                self._leave_channel()
            finally:
                self.subscription = None  # it knows us: without this the garbage collector would be needed
                self._sock.close()

    async def _receive(self) -> None:
        """Execute what the client sends, until it ends the connection, breaks the rules, or is gone."""
        try:
            while data := await self._read():
                await self._take_in(data)
            if data is None:
                return
            self._reader.receive_eof()
            await self._execute_all()
        except CommandError as exc:
            await self._refuse(exc.with_traceback(None))  # in its frames it, and we, would be kept
        except NSQError as exc:
            logger.info("%s: closed, what it sends is not what was negotiated: %s", self.peer, exc)
        else:
            self._leave_channel()
            self._flush_answers()
            await self.send_buffer.emptied()  # it may have ended its half only, and want to read the answers

    async def _read(self) -> bytes | None:
        """Wait for what the task has to take in; b"" if the client has ended its side, None if the connection is lost.

        Raises:
            CommandError: The client broke the rules meanwhile.
        """
        while not self.send_buffer.broken:
            if self.transport.ended:
                return b""
            await self._wait_for_room()
            if self._unread:
                try:
                    return self.receive_now()
                except BlockingIOError:
                    continue
                except OSError:
                    return None
            self.handed_over = trio.Event()
            self.rest()
            await self.handed_over.wait()
            self._begin_turn()
            handed, self._handed = self._handed, None
            if isinstance(handed, Exception):
                raise handed
            if handed is not None:
                return handed
            await self._execute_all()
            await self._send_answers()
        return None

    def rest(self) -> None:
        """Leave the client to the poller."""
        self.state = RESTING
        self._silent_since_s = self._timers.clock_s()

    async def _take_in(self, data: bytes) -> None:
        """Execute what was received, or, if that is nothing, what the layers still have of it. Raises NSQError."""
        for piece in self.transport.decode(data):  # a few bytes can become a lot of pieces
            await self._wait_for_room()
            self._reader.receive_data(piece)
            await self._execute_all()
            await self._send_answers()
            await self._let_others()
        await self._let_others()  # there may be no piece for long

    async def _let_others(self) -> None:
        """Let others have their turn if ours is over."""
        if self._turn_is_over:
            await trio.lowlevel.checkpoint()
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn_over_s = perf_counter() + self._pacing.turn_s

    @property
    def _turn_is_over(self) -> bool:
        return perf_counter() > self._turn_over_s

    async def _send_answers(self) -> None:
        self._flush_answers()
        if self.send_buffer.congested:  # it sends, and does not read our answers
            await self.send_buffer.emptied()

    async def _refuse(self, error: CommandError) -> None:
        """Send the last frame. The client gets no more messages, nor heartbeats."""
        self._is_refused = True
        self._leave_channel()
        logger.error("[%s] - %s", self.peer, str(error))  # the error itself would keep us in memory
        if not isinstance(error, LineTooLong):
            self.send_buffer.put(encode_error(error.wire))
        await self.transport.linger()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and end a connection that is silent for two intervals; runs until cancelled."""
        next_beat_s = trio.current_time() + self._heartbeat_interval_s
        while True:
            # A silence that begins later than now cannot be too long before the next heartbeat.
            too_long_s = self._silent_since_s + 2 * self._heartbeat_interval_s
            with trio.move_on_at(min(next_beat_s, too_long_s)):
                await self._settings_changed.wait()
                self._settings_changed = trio.Event()
                next_beat_s = trio.current_time() + self._heartbeat_interval_s
                continue
            now_s = trio.current_time()
            if now_s >= self._silent_since_s + 2 * self._heartbeat_interval_s:
                logger.info("%s: closed, nothing heard for two heartbeats", self.peer)
                self.close()
                return
            if now_s >= next_beat_s:
                next_beat_s += self._heartbeat_interval_s
                if self._reader.greeted and not (self._is_refused or self.handshake.under_way):
                    self._answer(HEARTBEAT_FRAME)
                    self._flush_answers()

    async def _send_rest(self) -> None:
        """Take over sending whenever the socket is full, and give the client messages again afterwards."""
        while await self.send_buffer.drain():
            if self.subscription is not None:
                self.subscription.unblock()
        if not self.send_buffer.broken:
            logger.warning("%s: closed, it takes no data", self.peer)
        self.close()

    # ------------------------------------------------------------------ in the poller's turn

    def serve_data(self, data: bytes | None) -> None:
        """As `PolledEndpoint.serve_data`."""
        if data is None:
            self.send_buffer.abandon()
            self._hand_over(None)
        elif not data or not self.transport.bare or self.send_buffer.broken:
            self._hand_over(data)
        else:
            self._reader.receive_data(data)
            self._go_on()

    def _go_on(self) -> None:
        """Execute what was read, until nothing is left, the log stores something, or the task is needed."""
        try:
            if self._execute_now():
                self._leave_alone()
            elif self._is_storing:
                self.state = AWAITING
                self._silent_since_s = math.inf
            else:
                self._hand_over(None)
        except Exception as exc:  # for the task, which knows what is whose fault
            self._hand_over(exc)

    def _leave_alone(self) -> None:
        """All that was read is executed."""
        if self._answered:
            self._flush_answers()
        if self.send_buffer.congested or not self._has_room():
            self._hand_over(None)
        else:
            self.rest()

    def _has_room(self) -> bool:
        """Whether the rest of a large body may come; of one that is whole now the room is given back."""
        missing = self._reader.missing_bytes
        # What is missing of a large body, and nothing else: then the reader need not cut it out.
        self.read_bytes = min(missing if self.transport.bare else 0, LARGE_RECEIVE_BYTES) or RECEIVE_BYTES
        if not missing and not self._takes_room:
            return True
        self._takes_room = missing > 0
        return self._services.bodies.admit(self, missing, self._reader.large_bodies)

    async def _wait_for_room(self) -> None:
        if not self._has_room():
            await self._services.bodies.wait(self, self._reader.missing_bytes, self._reader.large_bodies)

    def _hand_over(self, what: bytes | Exception | None) -> None:
        """Wake the task: to take in these bytes, to raise this, or to go on with what was read."""
        self._silent_since_s = math.inf
        self._handed = what
        self.hand_over()

    # ------------------------------------------------------------------ sending

    def _answer(self, frame: bytes) -> None:
        """Have a frame sent that is not to wait."""
        self._deliver_waiting()
        self._put_answer(frame)

    def _put_answer(self, frame: bytes) -> None:
        self.send_buffer.put(frame)
        self._answered = True

    def _deliver_waiting(self) -> None:
        """Messages that wait for more go before any answer, as in nsqd."""
        if self.subscription is not None:
            self._delivery.deliver_waiting(self.subscription.channel)

    def _flush_answers(self) -> None:
        if self._answered:
            self._answered = False
            if self.subscription is None:
                self.send_buffer.flush()
            else:
                self._deliver_waiting()  # what it has published to its own channel goes along
                self.subscription.flush()

    def _leave_channel(self) -> None:
        if self.subscription is not None:
            self._services.topics.unsubscribe(self.subscription.channel, self.subscription.consumer)

    # ------------------------------------------------------------------ commands

    async def _execute_all(self) -> None:
        """In the task: execute the commands that are whole. Raises CommandError."""
        while not self._execute_now():
            if self._is_storing:
                self._stored = trio.Event()
                await self._stored.wait()
                self._begin_turn()
            else:
                await self._execute_next_in_task()

    def _execute_now(self) -> bool:
        """Execute the commands that are whole, in order, until all are (True).

        Or until one has to be waited for, or others are to have their turn.

        Publishes next to each other are stored together.

        Raises:
            CommandError: The client broke the rules, after what was executed.
        """
        pacing = self._pacing
        left, over_s = pacing.commands_at_least, 0.0
        while True:
            command = self._next_command()
            if type(command) is Publish and (
                not self._publishes or self._publishes[-1].topic == command.topic
            ):
                self._publishes.append(command)
                continue
            if self._publishes:  # before anything else: answers keep the order of the commands
                self._next = command
                if not self._store() or (self.state is IN_TASK and self._turn_is_over):
                    return False
            elif command is None:
                break
            elif isinstance(command, CommandError):
                raise command
            elif not self._execute(command):
                self._next = command
                return False
            elif not (left := left - 1):
                now_s = perf_counter()
                over_s = over_s or now_s + pacing.commands_s
                if now_s >= over_s:
                    return False
                left = pacing.commands_at_least
        if self.subscription is not None and self.subscription.channel.has_work:
            self._delivery.deliver(self.subscription.channel)
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
        self._deliver_waiting()  # now: what is being published is to come after the answer
        topic = self._services.topics.ready.get(self._publishes[0].topic)
        if topic is None or not self.authorizer.idle:
            return False
        try:
            self._services.publisher.submit(topic, self._publications(), self._complete_publishes)
        except PublishRefused as exc:
            self._answer_publishes(exc)
            return True
        self._is_storing = True
        return False

    def _publications(self) -> list[Publication]:
        return [
            Publication([p.messages], self._timers.now_ns() + p.defer_ms * _NS_PER_MS if p.defer_ms else 0)
            for p in self._publishes
        ]

    def _complete_publishes(self, error: PublishRefused | None) -> None:
        """Answer what was published. Whoever has the client then goes on; without the task, that is here."""
        self._is_storing = False
        self._answer_publishes(error)
        if self.state is IN_TASK:
            self._stored.set()
            return
        if self._next is None and self.subscription is None:
            self._leave_alone()  # there was nothing more to read, and there is no channel to be served
        else:
            self._go_on()
        self.look_again()

    def _answer_publishes(self, error: PublishRefused | None) -> None:
        publishes, self._publishes = self._publishes, []
        topic_name = publishes[0].topic
        if error is None:
            count = sum([len(p.messages.sizes) for p in publishes])
            self.pub_counts[topic_name] = self.pub_counts.get(topic_name, 0) + count
            self._put_answer(OK_FRAME * len(publishes))
            return
        errors = [publish_refusal(p.verb, error) for p in publishes]
        if not self.handshake.identity.survive_refusals:
            self._next = errors[0]  # the end
            return
        logger.error("[%s] - %s", self.peer, str(errors[0]))
        for each in errors:
            self._put_answer(encode_error(each.wire))

    async def _execute_next_in_task(self) -> None:
        """In the task: execute what has to be waited for, or let others have their turn. Raises CommandError."""
        if self._publishes:
            await self.authorizer.check(self._publishes[0].verb, self._publishes[0].topic)
            error = None
            try:
                await self._services.topics.publish(self._publishes[0].topic, self._publications())
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
            self._answer(
                encode_response(await self.authorizer.authenticate(command.secret, self.transport.tls))
            )
        elif command is None:  # it has had its turn, between two commands
            await trio.lowlevel.checkpoint()
        else:
            self._next = command
            await self._let_others()

    def _execute(self, command: Command) -> bool:
        """Execute anything but a publish; False, and nothing is done, if that has to be waited for."""
        if isinstance(command, Identify | Subscribe | Auth):
            return False
        if self.subscription is not None:  # the state table lets no other such command through
            self._execute_for_consumer(command, self.subscription)
        return True

    def _execute_for_consumer(self, command: Command, subscription: Subscription) -> None:
        channel, consumer = subscription.channel, subscription.consumer
        if isinstance(command, Finish):
            if failed := channel.finish(consumer, command.lines, time.time_ns()):
                self._answer(failure_frames("FIN", failed))
            self._services.broker.changed.add(channel.topic.name)
        elif isinstance(command, Ready):
            subscription.ready(command.count if self.protocol_state is State.SUBSCRIBED else 0)
        elif isinstance(command, Requeue):
            now_ns = self._timers.now_ns()
            if why_not := channel.requeue(consumer, command.id, command.delay_ms, now_ns):
                self._answer(failure_frames("REQ", [(command.id, why_not)]))
            elif command.delay_ms:
                self._timers.watch(channel, now_ns + command.delay_ms * _NS_PER_MS)
            self._services.broker.changed.add(channel.topic.name)
        elif isinstance(command, Touch):
            longest_ms = self._services.options.limits.max_msg_timeout_ms
            if why_not := channel.touch(consumer, command.id, self._timers.now_ns(), longest_ms):
                self._answer(failure_frames("TOUCH", [(command.id, why_not)]))
        elif isinstance(command, StartClose):
            self._reader.state = State.CLOSING
            subscription.ready(0)
            self._answer(CLOSE_WAIT_FRAME)

    async def _identify(self, command: Identify) -> None:
        received = await self.handshake.identify(command.body)
        self._answered = True
        if self._settings is not self.handshake.settings:
            self._settings = self.handshake.settings
            self.send_buffer.patience_s = self._heartbeat_interval_s
            self._settings_changed.set()
        if received or not self.transport.bare:
            await self._take_in(received)

    async def _subscribe(self, command: Subscribe) -> None:
        await self.authorizer.check("SUB", command.topic, command.channel)
        subscription = Subscription(self._settings, self.send_buffer, self._delivery, self.close)
        private = self.handshake.identity.private_channel
        await subscription.open(self._services.topics, command, private=private)
        self.subscription = subscription
        self._reader.state = State.SUBSCRIBED
        self._answer(OK_FRAME)
