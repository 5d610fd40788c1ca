"""What brokers send to a discovery service, without IO (NSQ: nsqlookupd, TCP protocol).

    [ "  V1" ]  then commands: VERB[ SP param]* LF;  after IDENTIFY  [ int32 size ][ JSON ]

The reader also checks the order of commands: it knows whether IDENTIFY was read.
"""

from dataclasses import dataclass
from struct import Struct
from typing import Literal, TypeAlias, TypeVar

from ...protocol import CommandError, is_valid_name
from ...protocol.limits import MAX_HANDSHAKE_BYTES, MAX_LINE_BYTES
from ..protocol import MAGIC_V1, PeerInfo, Register, Unregister

_SIZE = Struct(">i")
_BLANKS = " \t\n\v\f\r"

_C = TypeVar("_C", Register, Unregister)


@dataclass(frozen=True, slots=True)
class Ping:
    """The broker is alive."""


@dataclass(frozen=True, slots=True)
class Identify:
    """The broker identifies itself; every field but the host name is set."""

    info: PeerInfo


Command: TypeAlias = Ping | Identify | Register | Unregister


class CommandReader:
    """Decodes the bytes of one broker into commands."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0  # of the buffer, for a line feed
        self._expects: Literal["magic", "line", "body"] = "magic"
        self._identified = False
        self._ended = False

    def receive_data(self, data: bytes) -> None:
        """Add received bytes; empty at the end of the connection."""
        self._buffer += data
        self._ended = not data

    def next_command(self) -> Command | None:
        """Return the next command; None if more bytes are needed.

        Raises:
            CommandError: It is invalid, or not legal now. The broker gets the error, and the connection ends.
        """
        if self._expects == "magic" and not self._take_magic():
            return None
        if self._expects == "body":
            return self._take_body()
        line = self._take_line()
        return None if line is None else self._command(line)

    def _take_magic(self) -> bool:
        if len(self._buffer) < len(MAGIC_V1):
            return False
        if not self._buffer.startswith(MAGIC_V1):
            raise CommandError("E_BAD_PROTOCOL")
        del self._buffer[: len(MAGIC_V1)]
        self._expects = "line"
        return True

    def _take_line(self) -> str | None:
        end = self._buffer.find(b"\n", self._searched)
        if (len(self._buffer) if end < 0 else end) >= MAX_LINE_BYTES:
            raise CommandError("E_INVALID", f"line longer than {MAX_LINE_BYTES} bytes")
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = self._buffer[:end].decode("utf-8", "surrogateescape")
        del self._buffer[: end + 1]
        self._searched = 0
        return line.strip(_BLANKS)

    def _command(self, line: str) -> Command | None:
        verb, *params = line.split(" ")
        match verb:
            case "PING":
                return Ping()
            case "REGISTER":
                return self._names(Register, verb, params)
            case "UNREGISTER":
                return self._names(Unregister, verb, params)
            case "IDENTIFY":
                if self._identified:
                    raise CommandError("E_INVALID", "cannot IDENTIFY again")
                self._expects = "body"
                return self._take_body()
        raise CommandError("E_INVALID", f"invalid command {verb}")

    def _names(self, kind: type[_C], verb: str, params: list[str]) -> _C:
        if not self._identified:
            raise CommandError("E_INVALID", "client must IDENTIFY")
        if not params:
            raise CommandError("E_INVALID", f"{verb} insufficient number of params")
        topic, channel = params[0], params[1] if len(params) > 1 else ""
        if not is_valid_name(topic):
            raise CommandError("E_BAD_TOPIC", f"{verb} topic name '{topic}' is not valid")
        if channel and not is_valid_name(channel):
            raise CommandError("E_BAD_CHANNEL", f"{verb} channel name '{channel}' is not valid")
        return kind(topic, channel or None)

    def _take_body(self) -> Identify | None:
        if len(self._buffer) < _SIZE.size:
            self._wait("IDENTIFY failed to read body size")
            return None
        (size,) = _SIZE.unpack_from(self._buffer)
        if size < 0:
            raise CommandError("E_BAD_BODY", f"IDENTIFY invalid body size {size}")
        if size > MAX_HANDSHAKE_BYTES:
            raise CommandError("E_BAD_BODY", f"IDENTIFY body too big {size} > {MAX_HANDSHAKE_BYTES}")
        end = _SIZE.size + size
        if len(self._buffer) < end:
            self._wait("IDENTIFY failed to read body")
            return None
        try:
            info = PeerInfo.parse(bytes(self._buffer[_SIZE.size : end]))
        except ValueError as exc:
            raise CommandError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from exc
        if not (info.broadcast_address and info.tcp_port and info.http_port and info.version):
            raise CommandError("E_BAD_BODY", "IDENTIFY missing fields")
        del self._buffer[:end]
        self._expects = "line"
        self._identified = True
        return Identify(info)

    def _wait(self, failure: str) -> None:
        """Raise CommandError if the connection has ended; otherwise more bytes are needed."""
        if self._ended:
            raise CommandError("E_BAD_BODY", failure)
