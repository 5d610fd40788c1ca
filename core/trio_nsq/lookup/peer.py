"""A broker's connection to one discovery service.

The connection has one task. It connects, identifies the broker, then sends changes and pings. An error ends the
connection; the next connection starts with all topics and channels.
"""

import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from ..access.secret import Secret, SecretFileError, encode_secret, warn_in_clear
from ..event_loop.retries import Delays
from ..protocol.address import format_address, parse_address
from ..protocol.errors import leaves_of
from .announcements import Announcements, HasChannels
from .protocol import (
    MAGIC_V1,
    OK,
    PING,
    LookupdError,
    PeerInfo,
    ResponseReader,
    encode_auth,
    encode_command,
    encode_identify,
)

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

PING_INTERVAL_S = 15.0
"""By default, a service stops returning a broker after 5 min without a ping (`--inactive-producer-timeout`)."""
STEP_TIMEOUT_S = 1.0
"""The timeout for connecting and for each send and receive; the same as nsqd's."""
HANDSHAKE_TIMEOUT_S = 5.0
"""The timeout for the TLS handshake, which takes longer while many brokers connect at once."""
AUTH_TIMEOUT_S = 10.0
"""The timeout for the answer to AUTH: services delay the answer to a wrong token."""
MIN_DELAY_S = 0.1
MAX_DELAY_S = PING_INTERVAL_S
"""The longest time between attempts to connect; nsqd reconnects at each ping."""
_COMMANDS_AT_ONCE = 100
"""Commands sent before their responses are read. Few enough to fit the socket buffers: a deadlock is impossible."""
_RECEIVE_BYTES = 16 * 1024
# UnicodeError: a host name that cannot be encoded.
_FAILURES = (
    LookupdError,
    SecretFileError,
    OSError,
    UnicodeError,
    trio.BrokenResourceError,
    trio.TooSlowError,
)
_HINTS = (
    (b"E_INVALID TLS required", "give --lookupd-tls"),
    (b"E_AUTH_FIRST", "give --lookupd-auth-secret-file"),
    (b"E_INVALID invalid command AUTH", "it has no authentication: remove --lookupd-auth-secret-file"),
)
"""What an operator can do about a refusal, by its beginning."""


@dataclass(slots=True)
class Security:
    """How all services are verified, and how the broker proves itself to them; may change."""

    tls: ssl.SSLContext | None
    secret: Secret


class LookupPeer:
    """The connection to one service.

    Attributes:
        host: The host of the configured address; with TLS, the service must prove that it has this name.
        tried: Set once the first attempt to connect has ended.
        announced: Set once the service knows all topics and channels, or the first connection has ended before.
    """

    def __init__(
        self,
        address: str,
        info: PeerInfo,
        topics: Mapping[str, HasChannels],
        security: Security,
        random_fraction: Callable[[], float],
    ) -> None:
        self.host, self._port = parse_address(address)
        self.tried: trio.Event = trio.Event()
        self.announced: trio.Event = trio.Event()
        self._address = address
        self._info = info
        self._security = security
        self._random_fraction = random_fraction
        self._topics = topics
        self._announcements: Announcements | None = None  # None: not connected
        self._wake = trio.Event()
        self._scope = trio.CancelScope()
        self._attempt = trio.CancelScope()  # of the current connection
        self._identity: PeerInfo | None = (
            None  # kept when the connection is lost: the HTTP API may still work
        )

    @property
    def http_address(self) -> str | None:
        """The address of the HTTP API; None if unknown."""
        if self._identity is None or not self._identity.broadcast_address:
            return None
        return format_address(self._identity.broadcast_address, self._identity.http_port)

    def close(self) -> None:
        """End `run`."""
        self._scope.cancel()

    def identify_as(self, info: PeerInfo) -> None:
        """Replace the connection by one that identifies the broker by this IDENTIFY."""
        self._info = info
        self._attempt.cancel()

    def changed(self, topic: str, channel: str | None) -> None:
        if self._announcements is not None:
            self._announcements.changed(topic, channel)
            self._wake.set()

    async def run(self) -> None:
        """Connect, and reconnect after each failure."""
        delays = Delays(MIN_DELAY_S, MAX_DELAY_S, self._random_fraction)
        with self._scope:
            while True:
                started = trio.current_time()
                self._attempt = trio.CancelScope()
                try:
                    with self._attempt:
                        await self._connect()
                except _FAILURES as exc:
                    logger.error("LOOKUPD(%s): %s", self._address, _reason(exc))
                except Exception:
                    # A bug must not affect the broker.
                    logger.exception("LOOKUPD(%s): internal error", self._address)
                finally:
                    self._announcements = None
                    self.tried.set()
                    self.announced.set()
                if self._attempt.cancelled_caught:
                    continue
                delays.connection_lasted(trio.current_time() - started)
                await trio.sleep(delays.next_s())

    async def _connect(self) -> None:
        """Connect and stay connected until an error."""
        logger.info("LOOKUP connecting to %s", self._address)
        async with await self._open() as stream:
            connection = _Connection(stream)
            greeting = await self._authenticate(connection)
            await self._identify(connection, greeting)
            self.tried.set()
            self._announcements = Announcements(self._topics)
            await self._send_changes(connection, self._announcements)

    async def _open(self) -> trio.abc.Stream:
        with trio.fail_after(STEP_TIMEOUT_S):
            stream = await trio.open_tcp_stream(self.host, self._port)
        if self._security.tls is None:
            return stream
        secure = trio.SSLStream(stream, self._security.tls, server_hostname=self.host, https_compatible=True)
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                await secure.do_handshake()
        except trio.TooSlowError:
            await trio.aclose_forcefully(stream)
            raise LookupdError(f"no TLS handshake within {HANDSHAKE_TIMEOUT_S:g} s") from None
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return secure

    async def _authenticate(self, connection: "_Connection") -> bytes:
        """Authenticate the broker if it has a secret. Returns what to send before IDENTIFY."""
        secret = self._security.secret.read()
        if not secret:
            return MAGIC_V1
        greeting = MAGIC_V1
        if self._security.tls is None:
            # A service that requires TLS says so before the secret is sent.
            (reply,) = await connection.ask([MAGIC_V1 + PING])
            if reply != OK:
                raise LookupdError(f"PING - {_excerpt(reply)}{_hint(reply)}")
            warn_in_clear(self._address)
            greeting = b""
        command = greeting + encode_auth(encode_secret(secret))
        try:
            (reply,) = await connection.ask([command], timeout_s=AUTH_TIMEOUT_S)
        except trio.TooSlowError:
            raise LookupdError(f"no answer to AUTH within {AUTH_TIMEOUT_S:g} s") from None
        if reply != OK:
            raise LookupdError(f"AUTH - {_excerpt(reply)}{_hint(reply)}")
        return b""

    async def _identify(self, connection: "_Connection", greeting: bytes) -> None:
        (reply,) = await connection.ask([greeting + encode_identify(self._info)])
        try:
            self._identity = identity = PeerInfo.parse(reply)
        except ValueError:
            hint = _hint(reply)
            if not self._info.http_port and not hint:
                hint = " (it requires an HTTP port, and the broker has none: set --broadcast-http-port)"
            raise LookupdError(f"IDENTIFY - {_excerpt(reply)}{hint}") from None
        logger.info("LOOKUPD(%s): peer info %s", self._address, identity)
        if not identity.broadcast_address:
            logger.error("LOOKUPD(%s): no broadcast address", self._address)

    async def _send_changes(self, connection: "_Connection", announcements: Announcements) -> None:
        next_ping = trio.current_time() + PING_INTERVAL_S
        while True:
            if trio.current_time() >= next_ping:
                logger.debug("LOOKUPD(%s): sending heartbeat", self._address)
                await self._send(connection, [("PING", PING)])
                next_ping = trio.current_time() + PING_INTERVAL_S
            elif announcements.pending:
                commands = announcements.take(_COMMANDS_AT_ONCE)
                for command in commands:
                    logger.info("LOOKUPD(%s): %s", self._address, command)
                await self._send(
                    connection, [(str(command), encode_command(command)) for command in commands]
                )
            else:
                self.announced.set()
                self._wake = trio.Event()
                with trio.move_on_at(next_ping):
                    await connection.wait_unless_closed(self._wake)

    async def _send(self, connection: "_Connection", commands: Sequence[tuple[str, bytes]]) -> None:
        """Send commands, each with its text for errors, and check the responses."""
        for start in range(0, len(commands), _COMMANDS_AT_ONCE):
            part = commands[start : start + _COMMANDS_AT_ONCE]
            responses = await connection.ask([command for _, command in part])
            for (name, _), response in zip(part, responses, strict=True):
                if response.startswith(b"E_UNAUTHORIZED") and name.startswith("REGISTER"):
                    # The connection stays, and with it the other topics.
                    logger.error("LOOKUPD(%s): %s - %s", self._address, name, _excerpt(response))
                elif response != OK:
                    raise LookupdError(f"{name} - {_excerpt(response)}")


class _Connection:
    """Commands and responses over one connection."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._reader = ResponseReader()

    async def ask(self, commands: Sequence[bytes], *, timeout_s: float = STEP_TIMEOUT_S) -> list[bytes]:
        """Send commands and return their responses.

        Args:
            timeout_s: The timeout for each receive.

        Raises:
            LookupdError: The service sends an invalid response, or closes the connection.
            trio.BrokenResourceError, trio.TooSlowError: The connection is lost or blocked.
        """
        with trio.fail_after(STEP_TIMEOUT_S):
            await self._stream.send_all(b"".join(commands))
        responses: list[bytes] = []
        while len(responses) < len(commands):
            if (response := self._reader.next_response()) is not None:
                responses.append(response)
                continue
            with trio.fail_after(timeout_s):
                self._reader.receive_data(await self._received())
        return responses

    async def _received(self) -> bytes:
        data = await self._stream.receive_some(_RECEIVE_BYTES)
        if not data:
            raise LookupdError("it closed the connection")
        return bytes(data)

    async def wait_unless_closed(self, event: trio.Event) -> None:
        """Wait for an event. Raises LookupdError if the service sends anything, or closes the connection."""
        failure: Exception | None = None

        async def receive() -> None:
            nonlocal failure
            try:
                failure = LookupdError(f"unexpected data - {_excerpt(await self._received())}")
            except (LookupdError, trio.BrokenResourceError) as exc:
                failure = exc
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await event.wait()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure


def _excerpt(data: bytes) -> str:
    return ascii(data[:200].decode("utf-8", "replace"))


def _hint(reply: bytes) -> str:
    """Return what an operator can do about a refusal, in parentheses after a blank; empty if nothing is known."""
    return next((f" ({hint})" for start, hint in _HINTS if reply.startswith(start)), "")


def _reason(error: BaseException) -> str:
    if isinstance(error, trio.TooSlowError):
        return f"timed out after {STEP_TIMEOUT_S:g} s"
    inner = error.__cause__ if isinstance(error, trio.BrokenResourceError) else error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {inner.verify_message} (trusted are the CAs of --tls-root-ca-file)"
    if isinstance(inner, ssl.SSLError):
        reason = (inner.reason or "the connection was lost").lower().replace("_", " ")
        return f"TLS failed: {reason} (does it offer TLS? Does it accept the broker's certificate?)"
    text = str(error) or "the connection was lost"
    if isinstance(error, OSError):  # trio wraps the errors of all attempts in one, whose text has no reason
        cause = error.__cause__
        causes = leaves_of(cause) if isinstance(cause, BaseExceptionGroup) else [cause]
        numbers = [each.errno for each in causes if isinstance(each, OSError) and each.errno]
        if reasons := dict.fromkeys(os.strerror(number) for number in numbers if number > 0):
            text += f": {', '.join(reasons)}"
    return text
