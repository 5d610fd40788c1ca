"""One TCP connection to a broker: the IO around the sans-IO protocol.

A connection has one reader, one writer and one owner, the caller of `run`. `run` always closes the socket. `write`
only queues data. The writer sends all data that was queued during the last write or scheduler tick at once.
"""

import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from trio_nsq.protocol import FrameError, NSQError
from trio_nsq.protocol.encode import encode_nop, encode_sub
from trio_nsq.protocol.frames import (
    DEFAULT_MAX_FRAME_BYTES,
    ErrorFrame,
    FrameReader,
    MessageRun,
    ResponseFrame,
)
from trio_nsq.protocol.limits import KIB

from ...event_loop import runtime
from ...protocol.address import parse_address
from ...protocol.compression import CompressionError
from ...tls.errors import TLSError
from ..errors import ConnectionFailed, ConnectionLost
from ..hooks import Hooks, notify
from .codecs import CodecStack
from .handshake import Features, Handshake, Step
from .options import ConnectionSettings

READ_BYTES = 256 * KIB
_logger = logging.getLogger("trio_nsq.client")

HANDSHAKE_TIMEOUT_S = 10.0
"""The timeout of each answer during the handshake, which has no heartbeats; nsqd allows 5 s for a TLS handshake."""
SLOWEST_BYTES_PER_S = 16 * KIB
"""A slower frame ends the connection. If a size field is wrong, heartbeats and replies are read as parts of that frame,
and the connection would look alive."""
LEADER_TIMEOUT_S = 35.0
"""The timeout of the first answer, for callers that do not try again. A member of a cluster that has no leader lets a
client wait up to 30 s for it."""
_Result = TypeVar("_Result")
Event = ResponseFrame | ErrorFrame | MessageRun


def _broken() -> tuple[type[Exception], ...]:
    """Return the errors that end a connection."""
    return runtime.broken_errors(FrameError, CompressionError, TLSError)


async def connect(
    address: str,
    settings: ConnectionSettings,
    *,
    extensions: Collection[str] = (),
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    waits_for_leader: bool = False,
    producer: tuple[str, str] | None = None,
) -> "Connection":
    """Connect and negotiate (magic, IDENTIFY).

    Args:
        address: `host:port`.
        extensions: Features to request that nsqd does not know: `survive_refusals`, `private_channel`,
            `message_headers`, `uncounted_requeues`.
        max_frame_bytes: The longest accepted frame.
        waits_for_leader: Wait longer for the first answer; see `LEADER_TIMEOUT_S`. A warning says so.
        producer: The name and the instance of a producer that numbers its messages; None: it does not.

    Returns:
        A connection that the caller must `run`, or close with `close_now`.

    Raises:
        ConnectionFailed: No broker answers, or the broker refuses the settings.
    """
    hooks = settings.hooks
    try:
        connection = Connection(await _open(address, settings), address, settings, max_frame_bytes)
        await connection.introduce(extensions, waits_for_leader=waits_for_leader, producer=producer)
    except ConnectionFailed as error:
        if hooks is not None:
            notify(hooks.connection_failed, address, error)
        raise
    if hooks is not None:
        connection.tell_end(hooks)
        notify(hooks.connected, address)
    return connection


async def _open(address: str, settings: ConnectionSettings) -> runtime.Stream:
    """Open a TCP connection. Raises ConnectionFailed."""
    host, port = parse_address(address)
    try:
        with runtime.fail_after(settings.dial_timeout_s):
            return await runtime.open_tcp_stream(host, port)
    except runtime.TooSlowError as error:
        raise ConnectionFailed(address, f"no answer within {settings.dial_timeout_s:g} s") from error
    except OSError as error:
        cause = _innermost(error)
        raise ConnectionFailed(address, _reason(cause)) from cause
    except UnicodeError as error:  # the IDNA encoding of the host name failed
        raise ConnectionFailed(address, f"{host!r} is not a host name: {error}") from error


async def check_broker(address: str, dial_timeout_s: float) -> None:
    """Check that the TCP protocol answers at an address, without TLS and a secret. Raises ConnectionFailed."""
    settings = ConnectionSettings(dial_timeout_s=dial_timeout_s)
    connection = Connection(await _open(address, settings), address, settings)
    await connection.check()
    await connection.close_now()


class Connection:
    """A connection to a broker.

    Args:
        stream: A connected stream; the connection closes it.
        address: `host:port`, for errors and logs.
        max_frame_bytes: The longest accepted frame.

    Attributes:
        max_rdy_count: The highest RDY count that the broker accepts.
        msg_timeout_ms: The broker's message timeout.
        max_msg_timeout_ms: The broker delivers a message again after this time, however often it is touched.
        survives_refusals: If the broker fails to store a publish (`E_PUB_FAILED` and similar), it stores no part of it
            and keeps the connection open.
        makes_private_channel: SUB creates private channels.
        has_headers: The broker takes messages with headers, and delivers them.
        requeues_uncounted: REQ may say that the delivery counts as no attempt.
        ended: Set once the connection has ended and its socket is closed.
    """

    def __init__(
        self,
        stream: runtime.Stream,
        address: str,
        settings: ConnectionSettings,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        self.address = address
        self._use(Features({}, settings))
        self.survives_refusals: bool = False
        self.makes_private_channel: bool = False
        self.has_headers: bool = False
        self.requeues_uncounted: bool = False
        self.ended: runtime.Event = runtime.Event()
        self._stream = stream
        self._settings = settings
        self._reader = FrameReader(max_frame_bytes)
        self._codecs = CodecStack()
        self._handshake = Handshake(address, settings, self._reader, self._codecs)
        self._outgoing: list[bytes] = []
        self._wake = runtime.Event()
        self._at_end = False
        self._hooks: Hooks | None = None  # to be told of the end
        self._reason: NSQError | None = None  # of the end

    def tell_end(self, hooks: Hooks) -> None:
        """Tell these hooks when the connection has ended."""
        self._hooks = hooks

    async def introduce(
        self,
        extensions: Collection[str] = (),
        *,
        waits_for_leader: bool = False,
        producer: tuple[str, str] | None = None,
    ) -> None:
        """Negotiate: magic and IDENTIFY, then TLS, compression and AUTH. See `connect`.

        On failure closes the socket and raises ConnectionFailed.
        """
        fields = self._settings.identify() | dict.fromkeys(extensions, True)
        if producer is not None:
            fields |= {"producer": producer[0], "producer_instance": producer[1]}
        async with self._closing_at_failure():
            features = await self._identify(
                fields, LEADER_TIMEOUT_S if waits_for_leader else HANDSHAKE_TIMEOUT_S
            )
            self.survives_refusals = features.has("survive_refusals")
            self.makes_private_channel = features.has("private_channel")
            self.has_headers = features.has("message_headers")
            self.requeues_uncounted = features.has("uncounted_requeues")
            if producer is not None and features.producer != producer[0]:
                reason = "it does not support producers with a name, as nsqd; it needs qcli serve"
                raise ConnectionFailed(self.address, reason)
            for step in self._handshake.further_steps(features):
                await self._do(step)

    async def check(self) -> None:
        """Have the broker answer IDENTIFY. On failure closes the socket and raises ConnectionFailed."""
        async with self._closing_at_failure():
            await self._identify({})

    async def _identify(self, fields: dict[str, Any], timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Features:
        features = await self._do(self._handshake.identify(fields), timeout_s)
        self._use(features)
        return features

    def _use(self, features: Features) -> None:
        self.max_rdy_count: int = features.max_rdy_count
        self.msg_timeout_ms: int = features.msg_timeout_ms
        self.max_msg_timeout_ms: int = features.max_msg_timeout_ms

    async def subscribe(self, topic: str, channel: str) -> None:
        """Send SUB and wait for the reply. On failure closes the socket and raises ConnectionFailed."""
        async with self._closing_at_failure():
            await self._do(self._handshake.ask(encode_sub(topic, channel)))

    async def _do(self, step: Step[_Result], limit_s: float = HANDSHAKE_TIMEOUT_S) -> _Result:
        """Do the IO of a step of the handshake."""
        try:
            with runtime.fail_after(limit_s):
                if limit_s > HANDSHAKE_TIMEOUT_S:
                    await self._send_of_handshake()
                    with runtime.move_on_after(HANDSHAKE_TIMEOUT_S):
                        return await self._finish(step)
                    _logger.warning(
                        "broker %s: connected, but no answer within %g s: it hangs, or its cluster has no leader; "
                        "waiting up to %g s",
                        *(self.address, HANDSHAKE_TIMEOUT_S, limit_s),
                    )
                return await self._finish(step)
        except runtime.TooSlowError as error:
            reason = f"connected, but no answer within {limit_s:g} s"
            raise ConnectionFailed(self.address, reason) from error

    async def _finish(self, step: Step[_Result]) -> _Result:
        try:
            while not step.is_done:
                await self._send_of_handshake()
                step.receive(bytes(await self._stream.receive_some(READ_BYTES)))
        except NSQError:
            with suppress(*runtime.broken_errors()):
                await self._send_of_handshake()
            raise
        await self._send_of_handshake()
        return step.result

    async def _send_of_handshake(self) -> None:
        if outgoing := self._handshake.take_outgoing():
            await self._stream.send_all(outgoing)

    @asynccontextmanager
    async def _closing_at_failure(self) -> AsyncIterator[None]:
        """Close the socket if a part of the handshake fails, or is cancelled. Raises ConnectionFailed."""
        try:
            yield
        except BaseException as error:
            await self.close_now()
            failed = self._handshake.failure(error)
            if failed is None and isinstance(error, runtime.broken_errors()):
                failed = ConnectionFailed(self.address, _reason(error))
            if failed is None:
                raise
            raise failed from error

    async def _send(self, data: bytes) -> None:
        await self._stream.send_all(self._codecs.encode(data))

    async def _receive(self) -> bool:
        """Wait for data and feed it to the reader; return False at the end of the data."""
        data = await self._stream.receive_some(READ_BYTES)
        if not data:
            return False
        for piece in self._codecs.decode(bytes(data)):
            self._reader.receive_data(piece)
        return not self._codecs.ended

    def write(self, data: bytes) -> None:
        """Queue bytes for the next write; once the connection has ended they are dropped."""
        self._outgoing.append(data)
        self._wake.set()

    def wake(self) -> None:
        """Have the writer call `more` of `run` for data."""
        self._wake.set()

    def write_eof(self) -> None:
        """Half-close the connection after all queued data: the broker reads everything, then closes it.

        Closing the socket instead could lose commands: if the socket has unread data, the kernel resets the connection.
        """
        self._at_end = True
        self._wake.set()

    async def run(
        self,
        handle: Callable[[Event], None],
        *,
        more: Callable[[], list[bytes]] | None = None,
        lost: Callable[[NSQError], None] | None = None,
    ) -> NSQError:
        """Read, write and answer heartbeats until either side ends the connection.

        Args:
            handle: Called with every event except heartbeats. If it raises an `NSQError`, the connection ends.
            more: Called before each write; returns more data to write.
            lost: Called with the returned error as soon as it is known, in the same tick.

        Returns:
            The reason of the end. The socket is closed, also after a cancellation.
        """
        try:
            async with runtime.open_nursery() as nursery:
                nursery.start_soon(self._write_loop, more)
                self._reason = reason = await self._read_loop(handle)
                if lost is not None:
                    lost(reason)
                nursery.cancel_scope.cancel()
        finally:
            await self.close_now()
        return reason

    def detach(self) -> tuple[socket.socket, CodecStack, FrameReader]:
        """Give up the connection after the handshake, for a caller that does the IO by itself. Only under trio.

        Returns:
            The socket, which does not block and which the caller must close; the codecs for all bytes on it; and the
            reader, which may hold decoded bytes.
        """
        from trio import SocketStream

        assert isinstance(self._stream, SocketStream)
        sock = socket.socket(fileno=self._stream.socket.detach())
        sock.setblocking(False)
        self.ended.set()
        return sock, self._codecs, self._reader

    async def close_now(self) -> None:
        """Close the socket and drop queued data. Does not wait. May be called again."""
        try:
            await runtime.aclose_forcefully(self._stream)
        finally:  # aclose_forcefully raises Cancelled after it has closed
            self.ended.set()
            hooks, self._hooks = self._hooks, None
            if hooks is not None:
                notify(hooks.disconnected, self.address, self._reason)

    async def _read_loop(self, handle: Callable[[Event], None]) -> NSQError:
        reader, timeout_s = self._reader, self._settings.read_timeout_s
        ended = False
        begun_at = math.inf  # of the incomplete frame
        try:
            while True:
                while (event := reader.next_event()) is not None:
                    begun_at = math.inf
                    if isinstance(event, ResponseFrame) and event.is_heartbeat:
                        # Waiting data is an answer, too. A broker that sends heartbeats and reads nothing fills no
                        # memory.
                        if not self._outgoing:
                            self.write(encode_nop())
                    else:
                        handle(event)
                if ended:
                    return ConnectionLost(self.address, "the broker closed the connection")
                longest_s = timeout_s + reader.wanted_bytes / SLOWEST_BYTES_PER_S
                if runtime.current_time() > begun_at + longest_s:
                    return ConnectionLost(self.address, f"a frame was incomplete after {longest_s:g} s")
                with runtime.fail_after(timeout_s):
                    ended = not await self._receive()
                begun_at = min(begun_at, runtime.current_time())
        except runtime.TooSlowError:
            return ConnectionLost(self.address, f"no heartbeat for {timeout_s:g} s")
        except _broken() as error:
            lost = ConnectionLost(self.address, _reason(error))
            lost.__cause__ = error
            return lost
        except NSQError as error:
            return error

    async def _write_loop(self, more: Callable[[], list[bytes]] | None) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake = runtime.Event()
                pieces, self._outgoing = self._outgoing, []
                if more is not None:
                    pieces += more()
                if pieces:
                    await self._send(b"".join(pieces))
                if self._at_end and not self._outgoing:
                    if goodbye := self._codecs.end():
                        await self._stream.send_all(goodbye)
                    await self._stream.send_eof()
                    return
        except runtime.broken_errors(TLSError):
            # The reader notices the end too, and first reads the error frame with the reason, if there is one.
            pass


def _innermost(error: OSError) -> OSError:
    """Return the error of the last attempt: trio wraps all attempts in one OSError."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[-1]
    return cause if isinstance(cause, OSError) else error


def _reason(error: BaseException) -> str:
    match error:
        case _ if isinstance(error, runtime.broken_errors()):
            return (
                _reason(error.__cause__) if isinstance(error.__cause__, OSError) else "the connection broke"
            )
        case socket.gaierror():
            return f"the host cannot be found: {error.strerror}"
        case OSError(errno=int(number)) if number:
            return os.strerror(number)
        case _:
            return str(error)
