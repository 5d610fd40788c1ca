"""The handshake with a broker, without IO: magic and IDENTIFY, then TLS, compression and AUTH."""

from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from ...access.secret import (
    SecretFileError,
    encode_secret,
    note_not_sent,
    warn_in_clear,
    warn_not_encrypted,
)
from ...protocol.address import parse_address
from ...protocol.compression import Codec, CompressionError, Deflate, Snappy
from ...protocol.encode import encode_auth, encode_identify, encode_nop
from ...protocol.errors import FrameError
from ...protocol.frames import ErrorFrame, FrameReader, MessageRun
from ...protocol.go_json import INT64
from ...protocol.limits import MAGIC_V2, MINUTE_MS, Limits
from ...protocol.untrusted_json import decode_json
from ...text.arguments import in_milliseconds
from ...tls.client_session import TLSClientSession
from ...tls.errors import TLSError
from ..errors import AuthRefused, BrokerError, ConnectionFailed, ConnectionLost, is_auth_refusal
from .codecs import CodecStack
from .options import ConnectionSettings

_Result = TypeVar("_Result")
_Run: TypeAlias = Generator[None, bytes, _Result]
"""Yields when it needs more data, and is sent what was received; b"" at the end of the data."""

DEFAULT_MSG_TIMEOUT_MS = MINUTE_MS
"""nsqd's default, for brokers that do not announce theirs."""


class Features:
    """What a broker says about itself in its answer to IDENTIFY.

    Args:
        answer: The object; empty from a broker that does not negotiate.

    Attributes:
        max_rdy_count: The highest RDY count that it accepts.
        msg_timeout_ms: Its message timeout for this connection.
        max_msg_timeout_ms: It delivers a message again after this time, however often it is touched.

    Raises:
        ValueError: It is none that a broker sends.
    """

    def __init__(self, answer: Any, settings: ConnectionSettings) -> None:
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")
        self._answer = answer
        msg_timeout_ms = in_milliseconds(settings.msg_timeout_s) or DEFAULT_MSG_TIMEOUT_MS
        self.max_rdy_count: int = self._count("max_rdy_count", Limits().max_rdy_count)
        self.msg_timeout_ms: int = self._count("msg_timeout", msg_timeout_ms)
        self.max_msg_timeout_ms: int = self._count("max_msg_timeout", Limits().max_msg_timeout_ms)

    def has(self, name: str) -> bool:
        """Whether the broker does this on the connection."""
        return self._answer.get(name) is True

    @property
    def producer(self) -> object:
        """The name of the producer that numbers its messages; None: the broker does not support that."""
        return self._answer.get("producer")

    def _count(self, name: str, default: int) -> int:
        value = self._answer.get(name, default)  # Go writes some numbers with a point
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < INT64.stop:
            raise ValueError(f"{name} is {str(value)[:80]}")
        return int(value)


class Step(Generic[_Result]):
    """One step of a handshake.

    While it is not done: send what `Handshake.take_outgoing` returns, and hand on what is received. Send also after it
    is done or has failed: TLS has an alert with the reason.

    Attributes:
        is_done: It needs no more data.
        result: Once it is done.
    """

    result: _Result

    def __init__(self, run: _Run[_Result]) -> None:
        self.is_done: bool = False
        self._run = run
        try:
            next(run)
        except StopIteration as end:
            self._end(end.value)

    def receive(self, data: bytes) -> None:
        """Go on with more data; b"" is the end of the data. Raises NSQError: see `Handshake.failure`."""
        try:
            self._run.send(data)
        except StopIteration as end:
            self._end(end.value)

    def _end(self, result: _Result) -> None:
        self.is_done, self.result = True, result


class Handshake:
    """The handshake on one connection, in steps. They raise NSQError: see `failure`.

    Args:
        address: `host:port`, for errors and the name in the certificate.
        reader, codecs: Of the connection. The broker may send more at once; what belongs to a codec must not be read
            as frames before.
    """

    def __init__(
        self, address: str, settings: ConnectionSettings, reader: FrameReader, codecs: CodecStack
    ) -> None:
        self._address = address
        self._settings = settings
        self._reader = reader
        self._codecs = codecs
        self._outgoing = b""

    def take_outgoing(self) -> bytes:
        """Return what is to be sent now, encoded; may be empty."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def failure(self, error: BaseException) -> ConnectionFailed | None:
        """Return how a step has failed with this error; None: it says so itself, or is another error."""
        match error:
            case BrokerError():
                reason = f"it{str(error).removeprefix(error.address)}"
                return (AuthRefused if is_auth_refusal(error) else ConnectionFailed)(self._address, reason)
            case ConnectionLost():
                return ConnectionFailed(self._address, error.reason)
            case FrameError() | CompressionError() | TLSError():
                return ConnectionFailed(self._address, str(error))
        return None

    # ------------------------------------------------------------------ steps

    def identify(self, fields: dict[str, Any]) -> Step[Features]:
        """Send magic and IDENTIFY."""
        return Step(self._identify(fields))

    def further_steps(self, features: Features) -> Iterator[Step[None]]:
        """Begin the steps after IDENTIFY, one after the other."""
        settings = self._settings
        if settings.tls_v1:
            if not features.has("tls_v1"):
                raise ConnectionFailed(self._address, "it does not offer TLS, and tls_v1 is True")
            yield Step(self._start_tls())
        elif settings.has_tls_files:
            warn_not_encrypted(self._address)
        if features.has("snappy"):
            yield Step(self._upgrade(Snappy(), self._reader.take_buffered()))
        elif features.has("deflate"):
            yield Step(self._upgrade(Deflate(settings.deflate_level), self._reader.take_buffered()))
        if features.has("auth_required"):
            yield Step(self._authenticate())
        elif settings.secret:
            note_not_sent(self._address)

    def ask(self, command: bytes) -> Step[bytes]:
        """Send a command, and return its answer."""
        return Step(self._ask(command))

    # ------------------------------------------------------------------ what they do

    def _identify(self, fields: dict[str, Any]) -> _Run[Features]:
        reply = yield from self._ask(MAGIC_V2 + encode_identify(fields))
        try:
            answer = {} if reply == b"OK" else decode_json(reply)  # OK: the broker does not negotiate
            return Features(answer, self._settings)
        except ValueError as error:
            reason = f"it answered IDENTIFY with {reply[:80]!r}; is this an NSQ broker's TCP port?"
            raise ConnectionFailed(self._address, reason) from error

    def _ask(self, command: bytes) -> _Run[bytes]:
        self._outgoing += self._codecs.encode(command)
        return (yield from self._reply())

    def _reply(self) -> _Run[bytes]:
        ended = False
        while True:
            event = self._reader.next_event()
            if event is None:
                if ended:
                    raise ConnectionLost(self._address, "the broker closed the connection")
                if data := (yield):
                    for piece in self._codecs.decode(data):
                        self._reader.receive_data(piece)
                ended = not data or self._codecs.ended  # the end of TLS may come with the last frame
            elif isinstance(event, ErrorFrame):
                raise BrokerError(self._address, event.code, event.text)
            elif isinstance(event, MessageRun):
                raise FrameError("it sent a message before RDY")
            elif event.is_heartbeat:
                self._outgoing += self._codecs.encode(encode_nop())
            else:
                return event.data

    def _start_tls(self) -> _Run[None]:
        host, _ = parse_address(self._address)
        try:
            session = TLSClientSession(self._settings.client_context(), host)
        except (ValueError, OSError) as error:  # such as a missing file; it may be temporary
            raise ConnectionFailed(self._address, str(error)) from error
        data = self._reader.take_buffered()
        while True:
            try:
                done = session.handshake(data)
            finally:  # after a failure, this is the TLS alert with the reason
                self._outgoing += session.outgoing()
            if done:
                break
            data = yield
            if not data:
                raise ConnectionLost(self._address, "the broker closed the connection in the TLS handshake")
        yield from self._upgrade(session, b"")

    def _upgrade(self, codec: Codec, received: bytes) -> _Run[None]:
        self._codecs.add(codec)
        for piece in codec.decode(received):
            self._reader.receive_data(piece)
        reply = yield from self._reply()
        if reply != b"OK":
            raise FrameError(f"it answered an upgrade with {reply[:80]!r}")

    def _authenticate(self) -> _Run[None]:
        settings = self._settings
        try:
            secret = settings.secret.read()
        except SecretFileError as error:  # it may be temporary
            raise ConnectionFailed(self._address, str(error)) from error
        if not secret:
            if settings.may_have_certificate:
                return  # if the certificate is not enough, the broker answers E_AUTH_FIRST
            raise AuthRefused(
                self._address, "it requires authentication: set auth_secret_file or auth_secret"
            )
        if not settings.tls_v1:
            warn_in_clear(self._address)
        yield from self._ask(encode_auth(encode_secret(secret)))
