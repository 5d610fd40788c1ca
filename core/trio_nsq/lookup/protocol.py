"""nsqlookupd's TCP protocol V1 without IO (NSQ: nsqlookupd, TCP protocol).

A client sends the magic and then commands, one line each, IDENTIFY with a body after it. Each is answered, in order:

    [ int32 size ][ data ]      data is `OK`, a JSON object, or an error's code and text, after which the service
                                closes the connection
"""

from dataclasses import asdict, dataclass
from struct import Struct

from ..protocol import NSQError
from ..protocol.go_json import decode_object, encode_object
from ..protocol.limits import KIB

MAGIC_V1 = b"  V1"
PING = b"PING\n"
OK = b"OK"

MAX_RESPONSE_BYTES = 64 * KIB
"""Of one response: none that is known has more than some hundred bytes."""

_SIZE = Struct(">i")


class LookupdError(NSQError):
    """The other side does not speak the protocol, or refuses what it was told; the text says which."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What both sides of IDENTIFY send about themselves; "" and 0 for missing fields.

    Attributes:
        broadcast_address: The host at which it can be reached.
        http_port, tcp_port: Where it listens on that host.
        version: Of the program.
    """

    broadcast_address: str
    hostname: str
    http_port: int
    tcp_port: int
    version: str

    @classmethod
    def parse(cls, body: bytes) -> "PeerInfo":
        """Decode it from JSON. Raises ValueError."""
        fields = decode_object(body)
        return cls(
            fields.text("broadcast_address"),
            fields.text("hostname"),
            fields.integer("http_port"),
            fields.integer("tcp_port"),
            fields.text("version"),
        )

    def encode(self) -> bytes:
        """The JSON."""
        return encode_object(asdict(self))


@dataclass(frozen=True, slots=True)
class Register:
    """A topic, or a channel and with it its topic, is here. `str` is the command line."""

    topic: str
    channel: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, ("REGISTER", self.topic, self.channel)))


@dataclass(frozen=True, slots=True)
class Unregister:
    """A channel, or a topic and with it all of its channels, is here no more. `str` is the command line."""

    topic: str
    channel: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, ("UNREGISTER", self.topic, self.channel)))


def encode_identify(info: PeerInfo) -> bytes:
    """IDENTIFY, the first command."""
    return b"IDENTIFY\n" + encode_response(info.encode())


def encode_command(command: Register | Unregister) -> bytes:
    """REGISTER or UNREGISTER."""
    return f"{command}\n".encode()


def encode_response(data: bytes) -> bytes:
    """A response, or the body of IDENTIFY: both have their size before them."""
    return _SIZE.pack(len(data)) + data


class ResponseReader:
    """Cuts what a discovery service sends into responses."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive_data(self, data: bytes) -> None:
        """Take in what was received."""
        self._buffer += data

    def next_response(self) -> bytes | None:
        """The next response's data; None if it is not there yet. Raises LookupdError for a wrong size."""
        if len(self._buffer) < _SIZE.size:
            return None
        (size,) = _SIZE.unpack_from(self._buffer)
        if not 0 <= size <= MAX_RESPONSE_BYTES:
            raise LookupdError(f"response body size ({size}) is not within 0-{MAX_RESPONSE_BYTES}")
        end = _SIZE.size + size
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_SIZE.size : end])
        del self._buffer[:end]
        return data
