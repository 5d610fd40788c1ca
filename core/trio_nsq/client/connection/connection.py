"""One TCP connection to a broker: the IO around the sans-IO protocol.

A connection has one reader, one writer and one owner, the caller of `run`. `run` always closes the socket. `write`
only queues data. The writer sends all data that was queued during the last write or scheduler tick at once.
"""

import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from trio_nsq.protocol import FrameError, Limits, NSQError
from trio_nsq.protocol.encode import encode_auth, encode_identify, encode_nop, encode_sub
from trio_nsq.protocol.frames import (
    DEFAULT_MAX_FRAME_BYTES,
    ErrorFrame,
    FrameReader,
    MessageRun,
    ResponseFrame,
)
from trio_nsq.protocol.limits import KIB, MAGIC_V2, MINUTE_MS
from trio_nsq.text.arguments import in_milliseconds

from ...access.secret import SecretFileError, encode_secret, note_not_sent, warn_in_clear
from ...event_loop import runtime
from ...protocol.address import parse_address
from ...protocol.compression import Codec, CompressionError, Deflate, Snappy
from ...protocol.go_json import INT64
from ...protocol.untrusted_json import decode_json
from ...tls.client_session import TLSClientSession
from ...tls.errors import TLSError
from ..errors import AuthRefused, BrokerError, ConnectionFailed, ConnectionLost, is_auth_refusal
from ..hooks import Hooks, notify
from .codecs import CodecStack
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
DEFAULT_MSG_TIMEOUT_MS = MINUTE_MS
"""nsqd's default, for brokers that do not announce theirs."""

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
    await connection.identify({})
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
        self.max_rdy_count: int = Limits().max_rdy_count
        self.msg_timeout_ms: int = in_milliseconds(settings.msg_timeout_s) or DEFAULT_MSG_TIMEOUT_MS
        self.max_msg_timeout_ms: int = Limits().max_msg_timeout_ms
        self.survives_refusals: bool = False
        self.makes_private_channel: bool = False
        self.has_headers: bool = False
        self.requeues_uncounted: bool = False
        self.ended: runtime.Event = runtime.Event()
        self._stream = stream
        self._settings = settings
        self._reader = FrameReader(max_frame_bytes)
        self._codecs = CodecStack()
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
        features = await self.identify(fields, LEADER_TIMEOUT_S if waits_for_leader else HANDSHAKE_TIMEOUT_S)
        self.survives_refusals = features.get("survive_refusals") is True
        self.makes_private_channel = features.get("private_channel") is True
        self.has_headers = features.get("message_headers") is True
        self.requeues_uncounted = features.get("uncounted_requeues") is True
        if producer is not None and features.get("producer") != producer[0]:
            raise await self._failed(
                "it does not support producers with a name, as nsqd; it needs qcli serve"
            )
        if self._settings.tls_v1:
            if not features.get("tls_v1"):
                raise await self._failed("it does not offer TLS, and tls_v1 is True")
            await self._start_tls()
        if features.get("snappy") is True:
            await self._compress(Snappy())
        elif features.get("deflate") is True:
            await self._compress(Deflate(self._settings.deflate_level))
        if features.get("auth_required") is True:
            await self._authenticate()
        elif self._settings.secret:
            note_not_sent(self.address)

    async def identify(
        self, fields: dict[str, Any], timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> dict[str, Any]:
        """Send magic and IDENTIFY; return the features. On failure closes the socket and raises ConnectionFailed."""
        reply = await self._ask(MAGIC_V2 + encode_identify(fields), timeout_s)
        features: Any = {}
        if reply != b"OK":  # OK: the broker does not negotiate
            try:
                features = decode_json(reply)
                self.max_rdy_count = _count(features, "max_rdy_count", self.max_rdy_count)
                self.msg_timeout_ms = _count(features, "msg_timeout", self.msg_timeout_ms)
                self.max_msg_timeout_ms = _count(features, "max_msg_timeout", self.max_msg_timeout_ms)
            except (ValueError, AttributeError) as error:  # AttributeError: it is no object
                reason = f"it answered IDENTIFY with {reply[:80]!r}; is this an NSQ broker's TCP port?"
                raise await self._failed(reason) from error
        return dict(features)

    async def _authenticate(self) -> None:
        try:
            secret = self._settings.secret.read()
        except SecretFileError as error:  # it may be temporary
            raise await self._failed(str(error)) from error
        if not secret:
            if self._settings.may_have_certificate:
                return  # if the certificate is not enough, the broker answers E_AUTH_FIRST
            await self.close_now()
            raise AuthRefused(self.address, "it requires authentication: set auth_secret_file or auth_secret")
        if not self._settings.tls_v1:
            warn_in_clear(self.address)
        await self._ask(encode_auth(encode_secret(secret)))

    async def _failed(self, reason: str) -> ConnectionFailed:
        await self.close_now()
        return ConnectionFailed(self.address, reason)

    async def _start_tls(self) -> None:
        host, _ = parse_address(self.address)
        try:
            session = TLSClientSession(self._settings.client_context(), host)
        except (ValueError, OSError) as error:  # such as a missing file; it may be temporary
            raise await self._failed(str(error)) from error
        received = self._reader.take_buffered()
        async with self._handshake():
            while True:
                try:
                    done = session.handshake(received)
                finally:  # after a failure, this sends the TLS alert with the reason
                    await self._stream.send_all(session.outgoing())
                if done:
                    break
                received = bytes(await self._stream.receive_some(READ_BYTES))
                if not received:
                    raise ConnectionLost(
                        self.address, "the broker closed the connection in the TLS handshake"
                    )
            await self._upgrade(session, b"")

    async def _compress(self, codec: Codec) -> None:
        async with self._handshake():
            await self._upgrade(codec, self._reader.take_buffered())

    async def _upgrade(self, codec: Codec, received: bytes) -> None:
        self._codecs.add(codec)
        for piece in codec.decode(received):
            self._reader.receive_data(piece)
        reply = await self._reply()
        if reply != b"OK":
            raise FrameError(f"it answered an upgrade with {reply[:80]!r}")

    async def subscribe(self, topic: str, channel: str) -> None:
        """Send SUB and wait for the reply. On failure closes the socket and raises ConnectionFailed."""
        await self._ask(encode_sub(topic, channel))

    async def _ask(self, command: bytes, timeout_s: float | None = None) -> bytes:
        """Send a command and return its reply; on an error or cancellation, close the socket."""
        async with self._handshake(timeout_s):
            await self._send(command)
            if timeout_s is not None and timeout_s > HANDSHAKE_TIMEOUT_S:
                with runtime.move_on_after(HANDSHAKE_TIMEOUT_S):
                    return await self._reply()
                _logger.warning(
                    "broker %s: connected, but no answer within %g s: it hangs, or its cluster has no leader; waiting "
                    "up to %g s",
                    *(self.address, HANDSHAKE_TIMEOUT_S, timeout_s),
                )
            return await self._reply()
        raise AssertionError  # the block above returns or raises

    @asynccontextmanager
    async def _handshake(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Close the socket if the block fails or is cancelled. Raises ConnectionFailed."""
        limit_s = HANDSHAKE_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            with runtime.fail_after(limit_s):
                yield
        except BaseException as error:
            await self.close_now()
            reason = _handshake_failure(error, limit_s)
            if reason is None:
                raise
            refused = isinstance(error, BrokerError) and is_auth_refusal(error)
            raise (AuthRefused if refused else ConnectionFailed)(self.address, reason) from error

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

    async def _reply(self) -> bytes:
        ended = False
        while True:
            event = self._reader.next_event()
            if event is None:
                if ended:
                    raise ConnectionLost(self.address, "the broker closed the connection")
                ended = not await self._receive()  # the end of TLS may come with the last frame
            elif isinstance(event, ErrorFrame):
                raise BrokerError(self.address, event.code, event.text)
            elif isinstance(event, MessageRun):
                raise FrameError("it sent a message before RDY")
            elif event.is_heartbeat:
                await self._send(encode_nop())
            else:
                return event.data

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


def _count(features: dict[str, Any], name: str, default: int) -> int:
    """Return a number of an answer to IDENTIFY, as Go has it. Raises ValueError if it is none."""
    value = features.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < INT64.stop:
        raise ValueError(f"{name} is {str(value)[:80]}")
    return int(value)


def _handshake_failure(error: BaseException, limit_s: float) -> str | None:
    """Return the reason of a failed handshake as text; None for a cancellation or a defect."""
    match error:
        case BrokerError():
            return f"it{str(error).removeprefix(error.address)}"
        case ConnectionLost():
            return error.reason
        case runtime.TooSlowError():
            return f"connected, but no answer within {limit_s:g} s"
        case _:
            return _reason(error) if isinstance(error, _broken()) else None


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
