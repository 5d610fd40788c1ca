"""nsqlookupd's TCP protocol V1 without IO (NSQ: nsqlookupd, TCP protocol).

A client sends the magic, then commands of one line each; a body follows IDENTIFY and AUTH. The service answers them in
order:

    [ int32 size ][ data ]      data is `OK`, a JSON object, or an error's code and text; after an error the service
                                closes the connection, except after E_UNAUTHORIZED for a REGISTER

`draining` in IDENTIFY is not in NSQ: the broker refuses publishes. Nor is `cluster`: the broker leads this cluster.
nsqlookupd ignores both.

AUTH is not in NSQ: a service with authentication requires it before IDENTIFY, unless the client's certificate has an
identity. Its body is a token, as in the protocol V2.

Brokers use `ResponseReader`. Services use `CommandReader`, which also checks the order of commands.
"""

from dataclasses import asdict, dataclass
from struct import Struct
from typing import Literal, TypeAlias, TypeVar

from ..protocol import CommandError, NSQError, is_valid_name
from ..protocol.address import MAX_PORT
from ..protocol.go_json import GoObject, decode_object, encode_object
from ..protocol.limits import KIB, MAX_HANDSHAKE_BYTES, MAX_LINE_BYTES

MAGIC_V1 = b"  V1"
PING = b"PING\n"
OK = b"OK"

MAX_SECRET_BYTES = 4 * KIB
"""The limit of the body of AUTH; a token has some 50 bytes."""

MAX_RESPONSE_BYTES = 64 * KIB
"""The largest response; real ones have a few hundred bytes."""

WRONG_PORT = "use the TCP port of nsqlookupd, by default 4160"

_SIZE = Struct(">i")
_HTTP = int.from_bytes(b"HTTP")
"""The size, read from the beginning of an HTTP answer."""
_BAD_PROTOCOL_OF_BROKER = b"\0\0\0\x01E_BAD_PROTOCOL"
"""The answer of a broker's TCP port: an error frame."""
_EPOCHS = range(1, 2**62 + 1)
_BLANKS = " \t\n\v\f\r"


class LookupdError(NSQError):
    """The peer violates the protocol or refuses a command; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """The cluster that a broker leads.

    Attributes:
        name: The name of the cluster.
        member: The id of the leader's data folder.
        epoch: Counts the leaders of the cluster: each one has a higher epoch.
    """

    name: str
    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """The description of a broker or a service in IDENTIFY; missing fields are "" or 0.

    Attributes:
        broadcast_address: The host name or address for its clients.
        http_port, tcp_port: Its ports on that host.
        version: The version of the program.
        draining: The broker refuses publishes.
        cluster: The cluster that the broker leads; None: it is not a member of one.
    """

    broadcast_address: str
    hostname: str
    http_port: int
    tcp_port: int
    version: str
    draining: bool = False
    cluster: Leadership | None = None

    @classmethod
    def parse(cls, body: bytes) -> "PeerInfo":
        """Decode JSON. Raises ValueError."""
        fields = decode_object(body)
        return cls(
            fields.text("broadcast_address"),
            fields.text("hostname"),
            fields.integer("http_port"),
            fields.integer("tcp_port"),
            fields.text("version"),
            fields.boolean("draining"),
            _leadership(fields.object("cluster")),
        )

    def encode(self) -> bytes:
        """Encode as JSON; `draining` and `cluster` only if they are set."""
        fields = asdict(self)
        for name in ("draining", "cluster"):
            if not fields[name]:
                del fields[name]
        return encode_object(fields)


def _leadership(fields: GoObject) -> Leadership | None:
    name, member = fields.text("name"), fields.text("member")
    if not name and not member:
        return None
    if not is_valid_name(name) or not is_valid_name(member):
        raise ValueError("the name of a cluster or of its member is not valid")
    return Leadership(name, member, fields.integer("epoch", _EPOCHS))


@dataclass(frozen=True, slots=True)
class Register:
    """REGISTER: the broker has a topic, or a channel and its topic. `str` is the command line."""

    topic: str
    channel: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, ("REGISTER", self.topic, self.channel)))


@dataclass(frozen=True, slots=True)
class Unregister:
    """UNREGISTER: the broker no longer has a channel, or a topic with all its channels. `str` is the command line."""

    topic: str
    channel: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, ("UNREGISTER", self.topic, self.channel)))


@dataclass(frozen=True, slots=True)
class Auth:
    """AUTH: the broker authenticates with a secret."""

    secret: bytes


@dataclass(frozen=True, slots=True)
class Ping:
    """PING: the broker is alive."""


@dataclass(frozen=True, slots=True)
class Identify:
    """IDENTIFY; every field except the host name is set."""

    info: PeerInfo


_C = TypeVar("_C", Register, Unregister)
Command: TypeAlias = Ping | Auth | Identify | Register | Unregister

VERBS = ("PING", "AUTH", "IDENTIFY", "REGISTER", "UNREGISTER")


def encode_identify(info: PeerInfo) -> bytes:
    """Encode IDENTIFY, the first command."""
    return b"IDENTIFY\n" + encode_response(info.encode())


def encode_auth(secret: bytes) -> bytes:
    """Encode AUTH, which goes before IDENTIFY."""
    return b"AUTH\n" + encode_response(secret)


def encode_command(command: Register | Unregister) -> bytes:
    """Encode REGISTER or UNREGISTER."""
    return f"{command}\n".encode()


def encode_response(data: bytes) -> bytes:
    """Encode a response, or the body of a command: both start with their size."""
    return _SIZE.pack(len(data)) + data


class ResponseReader:
    """Decodes the bytes of a discovery service into responses."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive_data(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def next_response(self) -> bytes | None:
        """Return the data of the next response; None if it is incomplete. Raises LookupdError for a wrong size."""
        if len(self._buffer) < _SIZE.size:
            return None
        (size,) = _SIZE.unpack_from(self._buffer)
        if size == _HTTP:
            raise LookupdError(f"it answers in HTTP: {WRONG_PORT}")
        if not 0 <= size <= MAX_RESPONSE_BYTES:
            raise LookupdError(f"response body size ({size}) is not within 0-{MAX_RESPONSE_BYTES}")
        end = _SIZE.size + size
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_SIZE.size : end])
        del self._buffer[:end]
        if data == _BAD_PROTOCOL_OF_BROKER:
            raise LookupdError(f"it answers as a broker: {WRONG_PORT}")
        return data


class CommandReader:
    """Decodes the bytes of one broker into commands.

    Args:
        refuses_plain_text: The connection has no TLS, and the service requires it.
    """

    def __init__(self, *, refuses_plain_text: bool = False) -> None:
        self._refuses_plain_text = refuses_plain_text
        self._buffer = bytearray()
        self._searched = 0  # no line feed before this offset of the buffer
        self._expects: Literal["magic", "line", "IDENTIFY", "AUTH"] = "magic"
        self._identified = False
        self._ended = False

    def receive_data(self, data: bytes) -> None:
        """Add received bytes; empty at the end of the connection."""
        self._buffer += data
        self._ended = not data

    def next_command(self) -> Command | None:
        """Return the next command; None if more bytes are needed.

        Raises:
            CommandError: The command is invalid, or not legal in this state. Send the error and end the connection.
        """
        if self._expects == "magic" and not self._take_magic():
            return None
        if self._expects in ("IDENTIFY", "AUTH"):
            return self._take_body()
        line = self._take_line()
        return None if line is None else self._command(line)

    def _take_magic(self) -> bool:
        if len(self._buffer) < len(MAGIC_V1):
            return False
        if not self._buffer.startswith(MAGIC_V1):
            raise CommandError("E_BAD_PROTOCOL")
        if self._refuses_plain_text:
            raise CommandError("E_INVALID", "TLS required")
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
                self._expects = "IDENTIFY"
                return self._take_body()
            case "AUTH":
                if self._identified:
                    raise CommandError("E_INVALID", "cannot AUTH after IDENTIFY")
                self._expects = "AUTH"
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

    def _take_body(self) -> Identify | Auth | None:
        verb = self._expects
        most = MAX_SECRET_BYTES if verb == "AUTH" else MAX_HANDSHAKE_BYTES
        if len(self._buffer) < _SIZE.size:
            self._wait(f"{verb} failed to read body size")
            return None
        (size,) = _SIZE.unpack_from(self._buffer)
        if size < 0:
            raise CommandError("E_BAD_BODY", f"{verb} invalid body size {size}")
        if size > most:
            raise CommandError("E_BAD_BODY", f"{verb} body too big {size} > {most}")
        end = _SIZE.size + size
        if len(self._buffer) < end:
            self._wait(f"{verb} failed to read body")
            return None
        body = bytes(self._buffer[_SIZE.size : end])
        command = Auth(body) if verb == "AUTH" else _identify(body)
        del self._buffer[:end]
        self._expects = "line"
        self._identified = verb == "IDENTIFY"
        return command

    def _wait(self, failure: str) -> None:
        """Raise CommandError if the connection has ended."""
        if self._ended:
            raise CommandError("E_BAD_BODY", failure)


def _identify(body: bytes) -> Identify:
    try:
        info = PeerInfo.parse(body)
    except ValueError as exc:
        raise CommandError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from exc
    if not (info.broadcast_address and info.tcp_port and info.http_port and info.version):
        raise CommandError("E_BAD_BODY", "IDENTIFY missing fields")
    if not all(0 < port <= MAX_PORT for port in (info.tcp_port, info.http_port)):
        raise CommandError("E_BAD_BODY", "IDENTIFY invalid port")
    if not info.broadcast_address.isprintable() or " " in info.broadcast_address:
        raise CommandError("E_BAD_BODY", "IDENTIFY invalid broadcast_address")
    return Identify(info)
