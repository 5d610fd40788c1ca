"""The part of a client's session that waits, and the session's end."""

import json
import logging
import math
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from ...event_loop.reactor import RESTING
from ...log import LogError
from ...protocol import CommandError, NSQError, is_ephemeral
from ...protocol.commands import Auth, Claim, Identify, LineTooLong, Publish, Subscribe
from ...protocol.encode import encode_identify_body
from ...protocol.errors import AuthRequired
from ...protocol.frames import HEARTBEAT_FRAME, OK_FRAME, encode_error, encode_response
from ...protocol.limits import MAGIC_V2
from ...protocol.spoken import protocol_of
from ...protocol.states import State
from ..errors import PublishRefused, SaveError
from .deps import SessionDeps
from .session import BLOCKED, IDLE, STORING, WAITING, Session, SubscriptionElsewhere

if TYPE_CHECKING:
    from ..siblings import Siblings

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

LOGIN_TIMEOUT_S = 60.0
"""Limit for a client to authenticate, if it must. It includes the delay of failed logins and the auth servers' time."""


class ClientTask:
    """Serves a client until it disconnects, violates the protocol, or its session is closed.

    Most clients never wait for anything but data, which the poller reads. So the task itself begins only when the
    poller hands the client over for the first time, and then runs until the end.

    Args:
        on_end: Called when the connection is closed.
        siblings: The processes of the node, for a client of a shared port.
    """

    def __init__(
        self,
        session: Session,
        deps: SessionDeps,
        on_end: Callable[[], object],
        siblings: "Siblings | None" = None,
    ) -> None:
        self._session = session
        self._deps = deps
        self._on_end = on_end
        self._siblings = siblings
        self._scope: trio.CancelScope | None = None  # while the task runs
        self._nursery: trio.Nursery | None = None  # while it runs, with `siblings`
        self._is_closing = False
        self._is_refused = False  # the final error frame is sent, so no heartbeats follow
        self._turn_over_s = 0.0  # by `perf_counter`
        self._is_sending = False  # a task sends what the socket did not accept at once
        self._heartbeat = deps.heartbeats.begin(self._beat)
        self.apply_heartbeat_interval()

    def begin(self) -> None:
        """Begin to serve the client. Raises OSError: the kernel refuses to watch its socket; then nothing has begun."""
        session = self._session
        try:
            session.start_polling()
        except BaseException:
            self._heartbeat.end()
            raise
        session.waiting = self
        session.send_buffer.on_full = self._begin_sending
        if session.reader.auth_required or session.is_shared:
            self.start()
        else:
            session.rest()

    def start(self) -> None:
        """Have the task execute what the poller has handed over."""
        if self._scope is None:
            self._scope = trio.CancelScope()
            self._deps.nursery.start_soon(self._run, self._scope)

    def close(self) -> None:
        """Close the connection soon."""
        if self._scope is not None:
            self._scope.cancel()
        elif not self._is_closing:
            self._is_closing = True
            self._deps.poller.call_soon(self._close_now)

    def _close_now(self) -> None:
        if self._scope is not None:  # it was handed over meanwhile
            self._scope.cancel()
        else:
            self._end()

    async def _run(self, scope: trio.CancelScope) -> None:
        session = self._session
        if session.reader.auth_required:
            # Strangers must not keep connections from others.
            scope.deadline = trio.current_time() + LOGIN_TIMEOUT_S
        try:
            with scope:
                if self._siblings is None:
                    await self._receive()
                else:
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        await self._receive()
                        nursery.cancel_scope.cancel()
            if scope.cancelled_caught and trio.current_time() >= scope.deadline:
                logger.info("%s: closed, no AUTH within %g s", session.peer, LOGIN_TIMEOUT_S)
        except Exception:
            self._log_bug()
        finally:
            self._end()

    def _end(self) -> None:
        """Leave the channel, and close the connection."""
        session = self._session
        try:
            session.stop_polling()
            self._heartbeat.end()
            session.send_buffer.on_full = None
            session.transport.finish_sending()
            session.send_buffer.abandon()
            self._deps.bodies.leave(session)
            if session.handshake.producer is not None:
                session.handshake.producer.end()
            session.leave_channel()
        except Exception:
            self._log_bug()
        finally:
            session.subscription = session.elsewhere = session.waiting = None  # breaks reference cycles
            self._nursery = None
            if self._is_sending:
                trio.lowlevel.notify_closing(session.transport.sock)
            session.transport.sock.close()
            self._on_end()

    def _log_bug(self) -> None:
        """Log the current exception. It is not the client's fault, and must not affect other clients."""
        logger.exception("TCP: client(%s): internal error", self._session.peer)

    async def _receive(self) -> None:
        """Execute the client's commands until it disconnects or violates the protocol."""
        session = self._session
        try:
            data = await self._take_over()
            if data is None:
                data = await self._read()
            while data:
                await self._take_in(data)
                data = await self._read()
            if data is None:
                return
            session.reader.receive_eof()
            await self._execute_all()
        except CommandError as exc:
            await self._refuse(exc.with_traceback(None))  # the traceback would keep this connection alive
        except NSQError as exc:
            logger.info(
                "%s: closed, its data does not match the negotiated TLS or compression: %s", session.peer, exc
            )
        else:
            session.leave_channel()
            session.flush_answers()
            # The client may have closed only its sending side, and still read the answers.
            await session.send_buffer.emptied()

    async def _read(self) -> bytes | None:
        """Wait for data that the task has to execute.

        Returns b"" if the client has ended its side, None if the connection is lost. Raises CommandError: the client
        violated the protocol while the poller served it.
        """
        session = self._session
        while not session.send_buffer.broken:
            if session.transport.ended:
                return b""
            await self._wait_for_room()
            if session.is_unread:
                try:
                    return session.receive_now()
                except BlockingIOError:
                    continue
                except OSError:
                    return None
            session.rest()
            await self._until_handed_over()
            data = await self._take_over()
            if data is not None:
                return data
        return None

    async def _take_over(self) -> bytes | None:
        """Return the data that the poller has handed over; without any, execute the commands that it has read.

        Raises CommandError: the client violated the protocol while the poller served it.
        """
        session = self._session
        self._begin_turn()
        handed, session.handed = session.handed, None
        if isinstance(handed, Exception):
            raise handed
        if handed is None:
            await self._execute_all()
            await self._send_answers()
        return handed

    async def _take_in(self, data: bytes) -> None:
        """Decode and execute received data; with b"", the data that the layers hold back. Raises NSQError."""
        session = self._session
        for piece in session.transport.decode(data):  # few compressed bytes can decode to many pieces
            await self._wait_for_room()
            session.reader.receive_data(piece)
            await self._execute_all()
            await self._send_answers()
            await self._end_long_turn()
        await self._end_long_turn()  # decoding may have taken long without a piece

    async def _wait_for_room(self) -> None:
        """Wait until the client may send the rest of a large body."""
        session = self._session
        if not session.has_room():
            reader = session.reader
            await self._deps.bodies.wait(session, reader.missing_bytes, reader.large_bodies)

    async def _until_handed_over(self) -> None:
        """Wait until the client needs this task, or its publishes are stored."""
        self._session.handed_over = trio.Event()
        await self._session.handed_over.wait()
        self._begin_turn()

    def _begin_turn(self) -> None:
        """Start a new turn, after other tasks have run."""
        self._turn_over_s = perf_counter() + self._deps.options.pacing.turn_s

    async def _end_turn(self) -> None:
        """Let other tasks run."""
        await trio.lowlevel.checkpoint()
        self._begin_turn()

    async def _end_long_turn(self) -> None:
        """Let other tasks run if this task's turn is over."""
        if perf_counter() > self._turn_over_s:
            await self._end_turn()

    async def _send_answers(self) -> None:
        session = self._session
        session.flush_answers()
        if session.send_buffer.congested:  # the client sends commands but does not read the answers
            await session.send_buffer.emptied()

    async def _refuse(self, error: CommandError) -> None:
        """Send the final error frame. No messages or heartbeats follow."""
        session = self._session
        self._is_refused = True
        session.leave_channel()
        if isinstance(error, AuthRequired):
            session.authorizer.record_missing_auth(error)
        spoken = "" if session.reader.greeted else protocol_of(session.reader.take_buffered())
        if spoken in ("HTTP", "TLS"):
            self._deps.wrong_ports.report(session.peer, spoken, "NSQ")
        else:  # a logged exception object would keep the session alive
            logger.error("[%s] - %s", session.peer, str(error))
        if not isinstance(error, LineTooLong):
            session.send_buffer.put(encode_error(error.wire))
        await session.transport.linger()

    def apply_heartbeat_interval(self) -> None:
        """Begin to count the interval of the settings: at the start, and after IDENTIFY."""
        interval_s = self._session.handshake.settings.heartbeat_interval_ms / 1000 or math.inf
        self._heartbeat_interval_s = self._session.send_buffer.patience_s = interval_s
        self._next_beat_s = self._watched_s = trio.current_time() + interval_s
        self._deps.heartbeats.watch(self._heartbeat, self._watched_s)

    def _beat_again_s(self) -> float:
        # A silence that starts after now cannot exceed the limit before the next heartbeat.
        return min(self._next_beat_s, self._silent_since_s + 2 * self._heartbeat_interval_s)

    def _beat(self, now_s: float) -> float:
        """Do what is due, and return when to call this again. See `Heartbeat`."""
        try:
            return self._beat_or_close(now_s)
        except Exception:
            # A bug in the broker, not the client's fault: it must not affect other clients.
            logger.exception("TCP: client(%s): internal error", self._session.peer)
            self._session.close()
            return math.inf

    def _beat_or_close(self, now_s: float) -> float:
        """Send a heartbeat if it is due. Close a connection that is silent for two intervals."""
        session = self._session
        if now_s >= self._silent_since_s + 2 * self._heartbeat_interval_s:
            if session.transport.has_unread or now_s > self._watched_s + self._heartbeat_interval_s:
                # The broker was late, not the client, which may have waited for heartbeats.
                session.rested_s = self._next_beat_s = now_s
            else:
                logger.info("%s: closed, nothing heard for two heartbeats", session.peer)
                session.close()
                return math.inf
        if now_s >= self._next_beat_s:
            self._next_beat_s += self._heartbeat_interval_s
            if session.reader.greeted and not (self._is_refused or session.handshake.under_way):
                session.answer(HEARTBEAT_FRAME)
                session.flush_answers()
        self._watched_s = self._beat_again_s()
        return self._watched_s

    @property
    def _silent_since_s(self) -> float:
        """Start of the client's silence, by trio's clock; math.inf while the broker does not wait for it."""
        return self._session.rested_s if self._session.state is RESTING else math.inf

    def _admit(self) -> None:
        """The client has authenticated, or need not here."""
        self._session.reader.auth_required = False
        if self._scope is not None:
            self._scope.deadline = math.inf

    def _begin_sending(self) -> None:
        """The socket is full, or the connection lost."""
        if not self._is_sending:
            self._is_sending = True
            self._deps.nursery.start_soon(self._send_rest)

    async def _send_rest(self) -> None:
        """Send what the socket did not accept, then resume deliveries. Close a client that reads nothing."""
        session = self._session
        try:
            while session.send_buffer.full:
                if not await session.send_buffer.drain():
                    if not session.send_buffer.broken:
                        logger.warning("%s: closed, the client does not read its data", session.peer)
                    session.close()
                    return
                session.unblock()
        except Exception:
            # A bug in the broker, not the client's fault: it must not affect other clients.
            logger.exception("TCP: client(%s): internal error", session.peer)
            session.close()
        finally:
            self._is_sending = False

    async def _execute_all(self) -> None:
        """Execute the complete commands. Raises CommandError."""
        session = self._session
        while (reason := session.execute_now()) is not IDLE:
            if reason is STORING:
                await self._until_handed_over()
            elif reason is BLOCKED:
                await self._until_publishable(session.publishes[0])
            elif reason is WAITING:
                await self._execute_next()
            else:
                await self._end_turn()

    async def _until_publishable(self, first: Publish) -> None:
        """Wait until the publishes can be stored, and store them like those that need not wait. Raises CommandError."""
        session = self._session
        await session.authorizer.check(first.verb, first.topic)
        try:
            await self._deps.topics.until_publishable(first.topic)
            if session.handshake.producer is not None:
                await session.handshake.producer.until_idle(first.topic)
        except PublishRefused as exc:
            session.answer_publishes(exc)
            return
        if (
            session.store() is STORING
        ):  # not if the authorization has expired meanwhile; the caller tries again
            await self._until_handed_over()

    async def _execute_next(self) -> None:
        """Execute the command that has to wait. Raises CommandError."""
        session = self._session
        command, session.next = session.next, None
        if isinstance(command, Identify):
            await self._identify(command)
        elif isinstance(command, Subscribe):
            await self._subscribe(command)
        elif isinstance(command, Auth):
            reply = await session.authorizer.authenticate(command.secret, session.transport.tls)
            self._admit()
            session.answer(encode_response(reply))
        elif isinstance(command, Claim):
            await self._claim(command)

    async def _claim(self, command: Claim) -> None:
        """Answer PRODUCER with the last number of the producer in a topic. Raises CommandError."""
        session = self._session
        producer = session.handshake.producer
        assert producer is not None  # the reader has checked it
        await session.authorizer.check("PRODUCER", command.topic)
        last, may_be_forgotten = await producer.claim(command.topic)
        found: dict[str, object] = {"number": None if last is None else last.number}
        if last is not None and last.instance:
            found["instance"] = last.instance
        if may_be_forgotten:
            found["may_be_forgotten"] = True
        session.answer(encode_response(json.dumps(found, separators=(",", ":")).encode()))

    async def _identify(self, command: Identify) -> None:
        session = self._session
        if self._siblings is not None and await self._pass_on_producer(command, self._siblings):
            return
        before = session.handshake.settings
        received = await session.handshake.identify(command.body)
        session.end_identify(before)
        if received is not None:
            if session.transport.tls is not None:
                session.authorizer.use_certificate(session.transport.tls)
                session.reader.auth_required = True
                if session.authorizer.is_authenticated:
                    self._admit()
            await self._take_in(received)

    async def _pass_on_producer(self, command: Identify, siblings: "Siblings") -> bool:
        """If the client is a producer whose batches another process has, pass it on until its end."""
        session = self._session
        owner = await session.handshake.owner_in(siblings, command.body)
        if owner is None:
            return False
        from .passing import pass_on  # slow to import, and most brokers are one process

        session.handshake.under_way = True  # no heartbeats: the other process sends its own
        self._admit()  # the other process limits the time to authenticate
        opening = MAGIC_V2 + encode_identify_body(command.body) + session.reader.take_buffered()
        await pass_on(session.transport.sock, siblings.tcp_addresses[owner], opening)
        session.close()
        await trio.lowlevel.checkpoint()
        return True

    async def _subscribe_everywhere(self, command: Subscribe, siblings: "Siblings") -> None:
        from .shared_subscription import SharedSubscription

        assert self._nursery is not None
        session = self._session
        shared = SharedSubscription(session, siblings, command.topic, command.channel)
        await shared.begin(self._nursery)
        session.elsewhere = SubscriptionElsewhere(command.topic, command.channel, shared.execute)
        session.reader.state = State.SUBSCRIBED
        session.answer(OK_FRAME)

    async def _subscribe(self, command: Subscribe) -> None:
        session = self._session
        await session.authorizer.check("SUB", command.topic, command.channel)
        private = session.handshake.identity.private_channel
        if private and not is_ephemeral(command.channel):
            reason = "a private channel's name must end in #ephemeral"
            raise CommandError("E_BAD_CHANNEL", f"SUB channel name {command.channel}: {reason}")
        if self._siblings is not None:
            await self._subscribe_everywhere(command, self._siblings)
            return
        try:
            channel = await self._deps.topics.channel(command.topic, command.channel, private=private)
        except (PublishRefused, LogError, SaveError) as exc:
            raise CommandError("E_SUB_FAILED", f"SUB failed {exc}") from exc
        session.subscribe(channel)
