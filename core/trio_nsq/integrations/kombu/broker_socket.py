"""A connection to a broker for code without an event loop: the protocol over a socket that never blocks by itself.

It waits with `select.poll` and locks with `threading`, so it works in threads, under gevent and in kombu's event loop.
"""

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Collection
from typing import TypeVar

from ...client.connection.codecs import CodecStack
from ...client.connection.handshake import Handshake, Step
from ...client.connection.options import ConnectionSettings
from ...client.errors import BrokerError, ConnectionFailed, ConnectionLost
from ...protocol.address import parse_address
from ...protocol.compression import CompressionError
from ...protocol.encode import encode_nop
from ...protocol.errors import FrameError, NSQError
from ...protocol.frames import ErrorFrame, Event, FrameReader, MessageRun, ResponseFrame
from ...protocol.limits import KIB, SECOND_MS
from ...tls.errors import TLSError

_Result = TypeVar("_Result")
READ_BYTES = 256 * KIB
HANDSHAKE_TIMEOUT_S = 10.0

_open: "weakref.WeakSet[BrokerSocket]" = weakref.WeakSet()


class BrokerSocket:
    """A connection that has introduced itself. Any thread may send; one at a time receives.

    A child process that is forked closes its copy, so that the connection ends with the process that opened it.

    Args:
        address: `host:port`.
        extensions: Features to request that nsqd does not know; see `IdentifyRequest`.
        settings: Without heartbeats, the broker does not notice that this process hangs.

    Attributes:
        max_rdy_count: The highest RDY count that the broker accepts.
        msg_timeout_s: The broker's message timeout.
        max_msg_timeout_s: The broker delivers a message again after this time, however often it is touched.
        extensions: Those that the broker has.

    Raises:
        ConnectionFailed: No broker answers, or it refuses the settings. AuthRefused: it refuses the secret.
    """

    def __init__(self, address: str, settings: ConnectionSettings, extensions: Collection[str] = ()) -> None:
        self.address = address
        self.extensions: set[str] = set()
        self._settings = settings
        self._lock = threading.RLock()
        self._received_at = time.monotonic()
        self._reader = FrameReader()
        self._codecs = CodecStack()
        self._handshake = Handshake(address, settings, self._reader, self._codecs)
        self._outgoing = b""
        self._reason = "the connection is closed"
        self._socket: socket.socket | None = self._connect()
        _open.add(self)
        try:
            self._introduce(extensions)
        except BaseException as error:
            self.close()
            failed = self._handshake.failure(error)
            if failed is None:
                raise
            raise failed from error

    def _connect(self) -> socket.socket:
        host, port = parse_address(self.address)
        try:
            connected = socket.create_connection((host, port), self._settings.dial_timeout_s)
        except TimeoutError as error:
            reason = f"no answer within {self._settings.dial_timeout_s:g} s"
            raise ConnectionFailed(self.address, reason) from error
        except OSError as error:
            raise ConnectionFailed(self.address, error.strerror or str(error)) from error
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def _introduce(self, extensions: Collection[str]) -> None:
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        fields = self._settings.identify() | dict.fromkeys(extensions, True)
        features = self._do(self._handshake.identify(fields), deadline)
        self.max_rdy_count: int = features.max_rdy_count
        self.msg_timeout_s: float = features.msg_timeout_ms / SECOND_MS
        self.max_msg_timeout_s: float = features.max_msg_timeout_ms / SECOND_MS
        self.extensions = {name for name in extensions if features.has(name)}
        for step in self._handshake.further_steps(features):
            self._do(step, deadline)

    def _do(self, step: Step[_Result], deadline: float) -> _Result:
        """Do the IO of a step of the handshake."""
        try:
            while not step.is_done:
                self._send_of_handshake()
                step.receive(self._read(deadline))
        finally:
            self._send_of_handshake()
        return step.result

    def _send_of_handshake(self) -> None:
        self._outgoing += self._handshake.take_outgoing()
        self.flush()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int:
        """Return the descriptor. Raises ConnectionLost."""
        return self._opened().fileno()

    def _opened(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionLost(self.address, self._reason)
        return self._socket

    def send(self, data: bytes) -> None:
        """Send, or queue what the kernel does not take now. Once the connection is lost, which receiving tells, data is
        dropped.
        """
        with self._lock:
            if data:
                self._outgoing += self._codecs.encode(data)
            self.flush()

    def flush(self) -> bool:
        """Send what is queued; return whether nothing is left."""
        with self._lock:
            while self._outgoing:
                try:
                    self._outgoing = self._outgoing[self._opened().send(self._outgoing) :]
                except (BlockingIOError, InterruptedError):
                    return False
                except (OSError, ConnectionLost):  # what was received before may have the reason
                    self._outgoing = b""
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to receive, and meanwhile send what is queued. Raises ConnectionLost."""
        deadline = time.monotonic() + timeout_s
        while True:
            events = select.POLLIN if self.flush() else select.POLLIN | select.POLLOUT
            poller = select.poll()
            poller.register(self.fileno(), events)
            left_s = max(0.0, deadline - time.monotonic())
            ready = poller.poll(left_s * SECOND_MS)
            if any(event & ~select.POLLOUT for _, event in ready):
                return True
            if not ready and time.monotonic() >= deadline:
                return False

    def check_heartbeats(self) -> None:
        """Raise ConnectionLost if there is nothing to receive, and has not been for two intervals."""
        timeout_s = self._settings.read_timeout_s
        if time.monotonic() > self._received_at + timeout_s and not self.wait(0):
            raise self._lost(TimeoutError(f"no heartbeat for {timeout_s:g} s"))

    def receive(self) -> list[Event]:
        """Return what has arrived, without waiting; heartbeats are answered. Raises ConnectionLost."""
        lost: ConnectionLost | None = None
        try:
            while (data := self._read_now()) is not None:
                self._feed(data)
        except ConnectionLost as error:
            lost = error
        events = []
        while (event := self._next_event()) is not None:
            events.append(event)
        if lost is not None and not events:  # else the next call raises it: the last event may be the reason
            raise lost
        return events

    def ask(self, command: bytes, timeout_s: float) -> bytes:
        """Send a command and wait for its answer; nothing else must be expected.

        If it is interrupted, such as by a timeout of gevent or a signal handler, the connection is closed: the next
        command would take the answer for its own.

        Raises:
            BrokerError: The broker refused it.
            ConnectionLost: There is no answer; it may have been executed.
        """
        try:
            self.send(command)
            return self._reply(time.monotonic() + timeout_s)
        except BrokerError:
            raise
        except BaseException:
            self.close()
            raise

    def _reply(self, deadline: float) -> bytes:
        while (event := self._next_event()) is None:
            self._feed(self._read(deadline))
        if isinstance(event, ErrorFrame):
            raise BrokerError(self.address, event.code, event.text)
        if isinstance(event, MessageRun):
            raise self._lost(FrameError("it sent a message before RDY"))
        return event.data

    def _read(self, deadline: float) -> bytes:
        """Wait for data until the deadline."""
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self.wait(left_s):
                raise self._lost(TimeoutError("no answer in time"))
            if (data := self._read_now()) is not None:
                return data

    def _read_now(self) -> bytes | None:
        """Return what the kernel has; None: nothing. Raises ConnectionLost."""
        try:
            data = self._opened().recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost(OSError("the broker closed the connection"))
        self._received_at = time.monotonic()
        return data

    def _feed(self, data: bytes) -> None:
        try:
            with self._lock:  # OpenSSL does not read and write in two threads at once
                for piece in self._codecs.decode(data):
                    self._reader.receive_data(piece)
        except (CompressionError, TLSError) as error:
            raise self._lost(error) from error

    def _next_event(self) -> Event | None:
        """Return the next event, one at a time: what follows the answer to an upgrade is for its codec."""
        try:
            while (event := self._reader.next_event()) is not None:
                if not (isinstance(event, ResponseFrame) and event.is_heartbeat):
                    return event
                self.send(encode_nop())
        except FrameError as error:
            raise self._lost(error) from error
        return None

    def _lost(self, error: Exception) -> ConnectionLost:
        self.close()
        text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        self._reason = text
        return ConnectionLost(self.address, text)

    def finish(self, timeout_s: float) -> None:
        """Send what is queued and end the connection: the broker reads all before it notices the end."""
        try:
            deadline = time.monotonic() + timeout_s
            with self._lock:
                self._outgoing += self._codecs.end()
                while not self.flush() and time.monotonic() < deadline:
                    self.wait(0.01)
                self._opened().shutdown(socket.SHUT_WR)
            while (
                time.monotonic() < deadline
            ):  # data that is not read would make the kernel reset the connection
                if self.wait(deadline - time.monotonic()):
                    self._read_now()
        except (NSQError, OSError):
            pass  # it has ended
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket. May be called again."""
        closing, self._socket = self._socket, None
        if closing is not None:
            closing.close()
        _open.discard(self)


def _close_copies() -> None:
    """After a fork, in the child. The locks may be held by threads that do not exist here, so none is used."""
    for each in [*_open]:
        each.close()


os.register_at_fork(after_in_child=_close_copies)
