"""One TCP connection to a broker: the thin layer of IO around the sans-IO protocol.

There is one reader, one writer and one owner, whoever calls `run`, which always leaves the socket closed.
Writing is synchronous: `write` queues, and the writer sends all that was queued while it was busy, or since the
last tick of the scheduler, as one piece.
"""

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import trio

from trio_nsq.protocol import (
    MAGIC_V2,
    ErrorFrame,
    FrameError,
    FrameReader,
    Limits,
    MessageRun,
    NSQError,
    ResponseFrame,
    encode_identify,
    encode_nop,
    encode_sub,
)
from trio_nsq.protocol.limits import KIB

from ..protocol.address import parse_address
from .errors import BrokerError, ConnectionFailed, ConnectionLost
from .options import ConnectionSettings

READ_BYTES = 256 * KIB
HANDSHAKE_TIMEOUT_S = 10.0
"""For each answer before the heartbeats take over the watch; nsqd gives a TLS handshake five seconds."""

Event = ResponseFrame | ErrorFrame | MessageRun


async def connect(address: str, settings: ConnectionSettings) -> "Connection":
    """Connect and introduce ourselves (magic, IDENTIFY).

    Returns:
        A connection that the caller must `run`, or close with `close_now`.

    Raises:
        ConnectionFailed: Nobody answers there, it is not an NSQ broker, or it refuses our settings.
    """
    host, port = parse_address(address)
    try:
        with trio.fail_after(settings.dial_timeout_s):
            stream = await trio.open_tcp_stream(host, port)
    except trio.TooSlowError as error:
        raise ConnectionFailed(address, f"no answer within {settings.dial_timeout_s:g} s") from error
    except OSError as error:
        cause = _innermost(error)
        raise ConnectionFailed(address, _reason(cause)) from cause
    except UnicodeError as error:  # of the encoding for the name service
        raise ConnectionFailed(address, f"{host!r} is not a host name: {error}") from error
    connection = Connection(stream, address, settings)
    await connection.introduce()
    return connection


class Connection:
    """A connection to a broker.

    Args:
        stream: A connected stream; it is ours from now on.
        address: `host:port`, for errors and logs.
        settings: What to ask of the broker.

    Attributes:
        address: As given.
        max_rdy_count: The highest RDY the broker accepts.
        ended: Set once the connection is over and its socket closed.
    """

    def __init__(
        self, stream: trio.abc.HalfCloseableStream, address: str, settings: ConnectionSettings
    ) -> None:
        self.address = address
        self.max_rdy_count = Limits().max_rdy_count
        self.ended = trio.Event()
        self._stream = stream
        self._settings = settings
        self._reader = FrameReader()
        self._outgoing: list[bytes] = []
        self._wake = trio.Event()
        self._at_end = False

    async def introduce(self) -> None:
        """Send magic and IDENTIFY and take in the reply.

        Raises:
            ConnectionFailed: The socket is closed.
        """
        reply = await self._ask(MAGIC_V2 + encode_identify(self._settings.identify()))
        if reply == b"OK":
            return  # a broker that does not negotiate
        try:
            features: Any = json.loads(reply)
            self.max_rdy_count = int(features.get("max_rdy_count", self.max_rdy_count))
        except (ValueError, AttributeError, TypeError) as error:
            await self.close_now()
            reason = f"it answered IDENTIFY with {reply[:80]!r}; is this an NSQ broker's TCP port?"
            raise ConnectionFailed(self.address, reason) from error

    async def subscribe(self, topic: str, channel: str) -> None:
        """Send SUB and wait until it is confirmed.

        Raises:
            ConnectionFailed: The broker refuses, or is gone. The socket is closed.
        """
        await self._ask(encode_sub(topic, channel))

    async def _ask(self, command: bytes) -> bytes:
        """Send a command and return the reply to it; on any error, and when cancelled, close the socket."""
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                await self._stream.send_all(command)
                return await self._reply()
        except BaseException as error:
            await self.close_now()
            reason = _handshake_failure(error)
            if reason is None:
                raise
            raise ConnectionFailed(self.address, reason) from error

    async def _reply(self) -> bytes:
        while True:
            event = self._reader.next_event()
            if event is None:
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    raise ConnectionLost(self.address, "the broker closed the connection")
                self._reader.receive_data(bytes(data))
            elif isinstance(event, ErrorFrame):
                raise BrokerError(self.address, event.code, event.text)
            elif isinstance(event, MessageRun):
                raise FrameError("a message, before any was asked for")
            elif event.is_heartbeat:
                await self._stream.send_all(encode_nop())
            else:
                return event.data

    def write(self, data: bytes) -> None:
        """Queue bytes for the next write; once the connection is over they go nowhere."""
        self._outgoing.append(data)
        self._wake.set()

    def wake(self) -> None:
        """Let the writer look whether `run`'s `more` has something for it."""
        self._wake.set()

    def write_eof(self) -> None:
        """Say, after all that is queued, that nothing more will come: the broker then ends the connection.

        It has read everything by then. Closing outright would not do: with unread data in our socket, the
        kernel resets the connection, and the broker may lose our last commands.
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
        """Read and write until the connection ends, by whichever side; heartbeats are answered here.

        Args:
            handle: Called with every other event. An `NSQError` it raises ends the connection.
            more: Called before each write for what else should go into it.
            lost: Called with what will be returned, as soon as that is known: in the same tick.

        Returns:
            Why it ended. The socket is closed, as it is after a cancellation.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_loop, more)
                reason = await self._read_loop(handle)
                if lost is not None:
                    lost(reason)
                nursery.cancel_scope.cancel()
        finally:
            await self.close_now()
        return reason

    async def close_now(self) -> None:
        """Close the socket, whatever is queued or under way. Does not wait, and may be called again."""
        try:
            await trio.aclose_forcefully(self._stream)
        finally:  # that passes on a cancellation, after closing
            self.ended.set()

    async def _read_loop(self, handle: Callable[[Event], None]) -> NSQError:
        reader, timeout_s = self._reader, self._settings.read_timeout_s
        try:
            while True:
                while (event := reader.next_event()) is not None:
                    if isinstance(event, ResponseFrame) and event.is_heartbeat:
                        self.write(encode_nop())
                    else:
                        handle(event)
                with trio.fail_after(timeout_s):
                    data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    return ConnectionLost(self.address, "the broker closed the connection")
                reader.receive_data(bytes(data))
        except trio.TooSlowError:
            return ConnectionLost(self.address, f"not even a heartbeat for {timeout_s:g} s")
        except trio.BrokenResourceError as error:
            return ConnectionLost(self.address, _broken(error))
        except FrameError as error:
            lost = ConnectionLost(self.address, str(error))
            lost.__cause__ = error
            return lost
        except NSQError as error:
            return error

    async def _write_loop(self, more: Callable[[], list[bytes]] | None) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                pieces, self._outgoing = self._outgoing, []
                if more is not None:
                    pieces += more()
                if pieces:
                    await self._stream.send_all(b"".join(pieces))
                if self._at_end and not self._outgoing:
                    await self._stream.send_eof()
                    return
        except trio.BrokenResourceError:
            # The reader sees the end too, and before it the error frame that says why, if there is one.
            pass


def _innermost(error: OSError) -> OSError:
    """The error of the (last) attempt: trio wraps them, even a single one, in an OSError of its own."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[-1]
    return cause if isinstance(cause, OSError) else error


def _handshake_failure(error: BaseException) -> str | None:
    """Say in words why a broker did not accept us; None for a cancellation, and for what is a defect."""
    match error:
        case BrokerError():
            return f"it answered {error.code} {error.text}".rstrip()
        case ConnectionLost():
            return error.reason
        case FrameError():
            return str(error)
        case trio.TooSlowError():
            return f"connected, but no answer within {HANDSHAKE_TIMEOUT_S:g} s"
        case trio.BrokenResourceError():
            return _broken(error)
        case _:
            return None


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host cannot be found: {error.strerror}"
    return os.strerror(error.errno) if error.errno else str(error)


def _broken(error: trio.BrokenResourceError) -> str:
    cause = error.__cause__
    return _reason(cause) if isinstance(cause, OSError) else "the connection broke"
