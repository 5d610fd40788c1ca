"""Commands, the client's half of the conversation, as the broker reads them.

`CommandReader` consumes bytes and gives a command, raises the error to send, or says "not yet" (None).
The size of a body is checked before it is buffered; no byte is scanned twice. A run of FIN lines, the bulk of what
a busy consumer sends, becomes one `Finish`: they are 21 bytes each, so a run is checked in a few calls.
"""

import re
from dataclasses import dataclass, field
from struct import Struct
from typing import Literal

from .errors import CommandError, quote
from .limits import MAGIC_V2, MAX_HANDSHAKE_BYTES, MAX_LINE_BYTES, Limits
from .messages import MessageSet, walk_messages
from .names import is_valid_name
from .states import LEGAL_STATES, State

_INT32 = Struct(">i")
FINISH_LINE_BYTES = 21
"""A FIN line as everybody sends it: one space, an id, and a line feed behind it."""
_LARGE_BYTES = 64 * 1024
"""If more than that is missing of a body, nothing is looked at until all of it has come."""
_PIECE_BYTES = 4096
"""What comes in smaller pieces is gathered: an object for each would take more memory than what is in them."""
_FIN_LINES_AT_LEAST = 16
_ID_BYTES = 16
_FIN_LINES = re.compile(rb"(?:FIN [^ \n]{15}[^ \n\r]\n)*+")
_NOPS = re.compile(rb"(?:NOP\n){16,}+")
_HEX_DIGITS = b"0123456789abcdef"
_MAX_DIGITS = 20
_TOO_BIG = 2**64

PublishVerb = Literal["PUB", "MPUB", "DPUB"]


@dataclass(frozen=True, slots=True)
class Identify:
    """IDENTIFY; `body` is its JSON, not yet decoded."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Auth:
    """AUTH with a secret."""

    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUB to a channel."""

    topic: str
    channel: str


@dataclass(slots=True)
class Publish:
    """PUB, MPUB or DPUB; `defer_ms` is 0 but for DPUB."""

    verb: PublishVerb
    topic: str
    messages: MessageSet
    defer_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """RDY count, already checked against max_rdy_count."""

    count: int


@dataclass(slots=True)
class Finish:
    """FIN, one or more that came in a row.

    Attributes:
        lines: FINISH_LINE_BYTES each, however they came; their ids are not checked for being hex.
    """

    lines: bytes

    @property
    def ids(self) -> list[bytes]:
        """16 bytes each."""
        return finish_line_ids(self.lines)


@dataclass(frozen=True, slots=True)
class Requeue:
    """REQ, its delay cut to max_req_timeout."""

    id: bytes
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Touch:
    """TOUCH one message."""

    id: bytes


@dataclass(frozen=True, slots=True)
class StartClose:
    """CLS."""


@dataclass(frozen=True, slots=True)
class NoOperation:
    """NOP."""


Command = Identify | Auth | Subscribe | Publish | Ready | Finish | Requeue | Touch | StartClose | NoOperation

_START_CLOSE = StartClose()
_NOP = NoOperation()


class LineTooLong(CommandError):
    """A command line past 16 KiB: the connection ends without an error frame, as nsqd ends it."""

    def __init__(self) -> None:
        super().__init__("E_INVALID", f"command line longer than {MAX_LINE_BYTES} bytes")


@dataclass(slots=True)
class _Body:
    """A command whose line has been read and whose body is still to come."""

    verb: str
    topic: str = ""
    defer_ms: int = 0
    size: int = -1  # not yet read
    count: int = -1  # MPUB: not yet read
    walked: int = 0  # MPUB: up to where, from the first message on, sizes are checked
    sizes: list[int] | None = None


class CommandReader:
    """Bytes from a client in, commands out.

    Args:
        limits: What to accept.

    Attributes:
        state: Where the connection stands. The caller moves it (SUB, CLS) before asking for the next command,
            since legality is checked when a command is read.
        greeted: The client has sent its magic.
        heartbeats: Whether the connection has any: without them SUB is refused, before its parameters are
            looked at. The caller moves it, as it moves `state`.
        tls_required: Only IDENTIFY is legal until the connection is encrypted. The caller moves it.
        missing_bytes: What is still to come of a large body that has begun; 0 if there is none.
        large_bodies: How many have begun.
    """

    def __init__(self, limits: Limits) -> None:
        self.state = State.INIT
        self.heartbeats = True
        self.tls_required = False
        self._limits = limits
        self._buffer: bytes | bytearray = b""
        self._position = 0
        self._scanned = 0  # no line feed before this offset
        self.greeted = False
        self._eof = False
        self._body: _Body | None = None
        # What comes of a large body is put together once, when all of it is there.
        self._pieces: list[bytes | bytearray] = []
        self.missing_bytes = 0
        self.large_bodies = 0
        # The last PUB or MPUB line, its line feed included, its verb and topic: publishers repeat themselves.
        self._publish_line = b"\n"
        self._publish_verb: PublishVerb = "PUB"
        self._publish_topic = ""
        self._fin_lines = _FIN_LINES_AT_LEAST  # how many to look at first: more than the last run had

    def receive_data(self, data: bytes) -> None:
        """Take what the socket gave."""
        if self.missing_bytes:
            if len(data) >= _PIECE_BYTES:
                self._pieces.append(data)
            elif isinstance(last := self._pieces[-1], bytearray):
                last += data
            else:
                self._pieces.append(bytearray(data))
            self.missing_bytes -= len(data)
            if self.missing_bytes <= 0:
                self._join_pieces()
            return
        if self._position == len(self._buffer):
            # What comes now is mostly whole: it is left as it is, and a body costs one copy.
            self._buffer, self._position, self._scanned = data, 0, 0
            return
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(memoryview(self._buffer)[self._position :])
        elif self._position:
            del self._buffer[: self._position]
        self._scanned = max(0, self._scanned - self._position)
        self._position = 0
        self._buffer += data

    def receive_eof(self) -> None:
        """Note that nothing more will come: an incomplete body is now an error, an incomplete line is not."""
        self._join_pieces()
        self._eof = True

    def _join_pieces(self) -> None:
        if self._pieces:
            self._buffer = b"".join(self._pieces)
            self._pieces, self.missing_bytes = [], 0

    def take_buffered(self) -> bytes:
        """Hand over, and forget, the bytes not yet read: for a connection upgrade."""
        self._join_pieces()
        rest = self._copied(self._position, len(self._buffer))
        self._buffer = b""
        self._position = self._scanned = 0
        return rest

    def _copied(self, start: int, end: int) -> bytes:
        buffer = self._buffer
        # Nothing is copied if that is all there is.
        return buffer[start:end] if isinstance(buffer, bytes) else bytes(memoryview(buffer)[start:end])

    def next_command(self) -> Command | None:
        """The next command, or None: feed me more.

        Raises:
            CommandError: To be sent as an error frame. If it is fatal the reader is of no further use.
        """
        if self._position == len(self._buffer) and not self._eof:
            return None  # the most frequent answer of all
        if self._body is not None:
            command = self._read_body(self._body)
            if self._position == len(self._buffer):  # it may be large, and the client may rest now
                self._buffer, self._position, self._scanned = b"", 0, 0
            return command
        if not self.greeted and not self._read_magic():
            return None
        buffer, position = self._buffer, self._position
        if buffer.startswith(self._publish_line, position) and self._publish_topic:
            self._position = position + len(self._publish_line)
            return self._read_publish()
        if buffer.startswith(b"FIN ", position) and (finish := self._read_finish_run()):
            return finish
        end = buffer.find(b"\n", max(position, self._scanned))
        if end < 0:
            self._scanned = len(buffer)
            if len(buffer) - position >= MAX_LINE_BYTES:
                raise LineTooLong
            return None
        if end - position >= MAX_LINE_BYTES:
            raise LineTooLong
        self._position = end + 1
        line = self._copied(position, end)
        return self._read_line(line.removesuffix(b"\r"), line)

    def _read_magic(self) -> bool:
        if len(self._buffer) < len(MAGIC_V2):
            return False
        if not self._buffer.startswith(MAGIC_V2):
            raise CommandError("E_BAD_PROTOCOL")
        self._position = len(MAGIC_V2)
        self.greeted = True
        return True

    def _read_finish_run(self) -> Finish | None:
        """Take all FIN lines of the fixed width that lie next to each other; None if the first is not."""
        if self.state not in LEGAL_STATES[b"FIN"]:
            return None
        buffer = self._buffer
        start = end = self._position
        # The longer the run turns out to be, the more is looked at: the cost is the run's, not the buffer's.
        at_a_time = self._fin_lines
        while True:
            whole = (len(buffer) - end) // FINISH_LINE_BYTES
            looked_at = end + min(whole, at_a_time) * FINISH_LINE_BYTES
            end += _finish_run(self._copied(end, looked_at))
            if end < looked_at or whole <= at_a_time:
                break
            at_a_time *= 4
        if end == start:
            self._fin_lines = _FIN_LINES_AT_LEAST
            return None
        self._position = end
        self._fin_lines = max(_FIN_LINES_AT_LEAST, 4 * (end - start) // FINISH_LINE_BYTES)
        return Finish(self._copied(start, end))

    def _read_line(self, line: bytes, raw: bytes) -> Command | None:
        verb, *params = line.split(b" ")
        if self.tls_required and verb != b"IDENTIFY":
            raise CommandError("E_INVALID", f"cannot {_text(verb)} in current state (TLS required)")
        legal = LEGAL_STATES.get(verb)
        if legal is None:
            raise CommandError("E_INVALID", f"invalid command {_text(verb)}")
        if self.state not in legal:
            raise CommandError("E_INVALID", f"cannot {verb.decode()} in current state")
        match verb:
            case b"NOP":
                # Nothing changes with it: so many in a row are the same as one.
                if nops := _NOPS.match(self._buffer, self._position):
                    self._position = nops.end()
                return _NOP
            case b"PUB" | b"MPUB":
                self._publish_topic = self._topic(verb.decode(), params)
                self._publish_verb = "PUB" if verb == b"PUB" else "MPUB"
                self._publish_line = raw + b"\n"
                return self._read_publish()
            case b"DPUB":
                return self._read_dpub(params)
            case b"FIN":
                return Finish(b"FIN %s\n" % _message_id("FIN", params))
            case b"RDY":
                return self._read_rdy(params)
            case b"REQ":
                return self._read_req(params)
            case b"TOUCH":
                return Touch(_message_id("TOUCH", params))
            case b"SUB":
                return self._read_sub(params)
            case b"CLS":
                return _START_CLOSE
            case b"AUTH" if params:
                raise CommandError("E_INVALID", "AUTH invalid number of parameters")
            case _:
                return self._expect_body(_Body(verb.decode()))

    def _topic(self, verb: str, params: list[bytes]) -> str:
        if len(params) < (2 if verb == "DPUB" else 1):
            raise CommandError("E_INVALID", f"{verb} insufficient number of parameters")
        topic = _text(params[0])
        if not is_valid_name(topic):
            raise CommandError("E_BAD_TOPIC", f"{verb} topic name {quote(topic)} is not valid")
        return topic

    def _read_sub(self, params: list[bytes]) -> Subscribe:
        if not self.heartbeats:
            raise CommandError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 2:
            raise CommandError("E_INVALID", "SUB insufficient number of parameters")
        topic = self._topic("SUB", params)
        channel = _text(params[1])
        if not is_valid_name(channel):
            raise CommandError("E_BAD_CHANNEL", f"SUB channel name {quote(channel)} is not valid")
        return Subscribe(topic, channel)

    def _read_dpub(self, params: list[bytes]) -> Command | None:
        topic = self._topic("DPUB", params)
        defer_ms = _decimal(params[1])
        if defer_ms is None:
            raise CommandError("E_INVALID", f"DPUB could not parse timeout {_text(params[1])}")
        biggest = self._limits.max_defer_ms
        if defer_ms > biggest:
            raise CommandError("E_INVALID", f"DPUB timeout {defer_ms} out of range 0-{biggest}")
        return self._expect_body(_Body("DPUB", topic, defer_ms))

    def _read_rdy(self, params: list[bytes]) -> Ready:
        count = _decimal(params[0]) if params else 1
        if self.state is State.CLOSING:
            return Ready(0)  # it is ignored, whatever it says
        if count is None:
            raise CommandError("E_INVALID", f"RDY could not parse count {_text(params[0])}")
        biggest = self._limits.max_rdy_count
        if count > biggest:
            raise CommandError("E_INVALID", f"RDY count {count} out of range 0-{biggest}")
        return Ready(count)

    def _read_req(self, params: list[bytes]) -> Requeue:
        if len(params) < 2:
            raise CommandError("E_INVALID", "REQ insufficient number of params")
        message_id = _message_id("REQ", params)
        delay_ms = _decimal(params[1])
        if delay_ms is None:
            raise CommandError("E_INVALID", f"REQ could not parse timeout {_text(params[1])}")
        return Requeue(message_id, min(delay_ms, self._limits.max_req_timeout_ms))

    def _read_publish(self) -> Command | None:
        """The body of a PUB or MPUB. Mostly all of it is there, and it is right: that takes the fewest steps."""
        buffer, start, verb = self._buffer, self._position, self._publish_verb
        if verb == "PUB" and start + 4 < len(buffer):
            (size,) = _INT32.unpack_from(buffer, start)
            end = start + 4 + size
            if 0 < size <= self._limits.max_msg_size and end <= len(buffer):
                self._position = end
                messages = MessageSet(self._copied(start, end), [size])
                return Publish("PUB", self._publish_topic, messages)
        return self._expect_body(_Body(verb, self._publish_topic))

    def _expect_body(self, body: _Body) -> Command | None:
        self._body = body
        return self._read_body(body)

    def _read_body(self, body: _Body) -> Command | None:
        buffer = self._buffer
        available = len(buffer) - self._position
        if body.size < 0:
            if available < 4:
                return self._incomplete(*_body_error(body.verb, "body size"))
            body.size = self._body_size(body.verb, _INT32.unpack_from(buffer, self._position)[0])
            if body.verb == "MPUB":  # the size goes; a PUB's stays: it is the message's own size field
                self._position += 4
                available -= 4
        if body.verb == "MPUB":
            return self._read_mpub(body, available)
        if available < 4 + body.size:
            return self._incomplete(*_body_error(body.verb, "body"), 4 + body.size - available)
        start = self._position
        end = start + 4 + body.size
        self._position, self._body = end, None
        if body.topic:
            data = self._copied(start, end)
            verb: PublishVerb = "DPUB" if body.verb == "DPUB" else "PUB"
            return Publish(verb, body.topic, MessageSet(data, [body.size]), body.defer_ms)
        content = self._copied(start + 4, end)
        return Identify(content) if body.verb == "IDENTIFY" else Auth(content)

    def _body_size(self, verb: str, size: int) -> int:
        if verb in ("PUB", "DPUB"):
            biggest = self._limits.max_msg_size
            if size <= 0:
                raise CommandError("E_BAD_MESSAGE", f"{verb} invalid message body size {size}")
            if size > biggest:
                raise CommandError("E_BAD_MESSAGE", f"{verb} message too big {size} > {biggest}")
        else:
            biggest = self._limits.max_body_size
            if verb != "MPUB":
                biggest = min(biggest, MAX_HANDSHAKE_BYTES)
            if size > biggest:
                raise CommandError("E_BAD_BODY", f"{verb} body too big {size} > {biggest}")
            if size <= 0:
                raise CommandError("E_BAD_BODY", f"{verb} invalid body size {size}")
        return size

    def _read_mpub(self, body: _Body, available: int) -> Command | None:
        if body.sizes is None:
            if available < 4:
                return self._incomplete("E_BAD_BODY", "MPUB failed to read message count")
            body.count = _INT32.unpack_from(self._buffer, self._position)[0]
            if not 0 < body.count <= (self._limits.max_body_size - 4) // 5:
                raise CommandError("E_BAD_BODY", f"MPUB invalid message count {body.count}")
            body.sizes = []
            self._position += 4
            available -= 4
        start, size = self._position, body.size - 4  # of all messages
        if available < size:
            end = start + available
            walked = walk_messages(
                self._buffer, start + body.walked, end, body.count, self._limits, body.sizes
            )
            body.walked = walked - start
            self._check_walked(body, size)
            what = "message body" if walked > end else f"message({len(body.sizes)}) body size"
            return self._incomplete("E_BAD_MESSAGE", f"MPUB failed to read {what}", size - available)
        data = self._copied(start, start + size)
        body.walked = walk_messages(data, body.walked, size, body.count, self._limits, body.sizes)
        self._check_walked(body, size)
        self._position, self._body = start + size, None
        return Publish("MPUB", body.topic, MessageSet(data, body.sizes))

    def _check_walked(self, body: _Body, size: int) -> None:
        """Raise CommandError if the messages that were walked do not fit what all of them are to take."""
        assert body.sizes is not None
        if body.walked != size if len(body.sizes) == body.count else body.walked > size - 4:
            # nsqd never compares the two, and believes the messages; we say what is wrong.
            raise CommandError("E_BAD_BODY", f"MPUB invalid body size {body.size}")

    def _incomplete(self, code: str, text: str, missing_bytes: int = 0) -> Command | None:
        """Say "not yet", or that it will never be."""
        if self._eof:
            raise CommandError(code, text)
        if missing_bytes > _LARGE_BYTES:
            self._pieces = [self._copied(self._position, len(self._buffer))]
            self.missing_bytes = missing_bytes
            self.large_bodies += 1
            self._buffer, self._position, self._scanned = b"", 0, 0
        return None


def _text(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")


def _body_error(verb: str, what: str) -> tuple[str, str]:
    """Code and text for a body that ends too early."""
    if verb in ("PUB", "DPUB"):
        return "E_BAD_MESSAGE", f"{verb} failed to read message {what}"
    return "E_BAD_BODY", f"{verb} failed to read {what}"


def finish_line_ids(lines: bytes) -> list[bytes]:
    """The ids in FIN lines of FINISH_LINE_BYTES each, one at least."""
    return lines[4:-1].split(b"\nFIN ")


def _finish_run(lines: bytes) -> int:
    """Of these lines, FINISH_LINE_BYTES each, how many bytes at the beginning are FIN lines and nothing else."""
    if _are_finish_lines(lines):
        return len(lines)
    count = len(lines) // FINISH_LINE_BYTES
    for column, byte in ((20, b"\n"), (3, b" ")):
        cells = lines[column::FINISH_LINE_BYTES]
        count = min(count, len(cells) - len(cells.lstrip(byte)))
    lines = lines[: count * FINISH_LINE_BYTES]
    if _are_finish_lines(lines):
        return len(lines)
    # What looks like part of an id may end the line or the word, or be half of a line end.
    run = _FIN_LINES.match(lines)
    return run.end() if run is not None else 0


def _are_finish_lines(lines: bytes) -> bool:
    """All are FIN lines of ids of hex digits, as every broker gives them."""
    count = len(lines) // FINISH_LINE_BYTES
    return (
        lines[20::FINISH_LINE_BYTES] == b"\n" * count
        and lines[3::FINISH_LINE_BYTES] == b" " * count
        and lines.translate(None, _HEX_DIGITS) == b"FIN \n" * count
    )


def _decimal(word: bytes) -> int | None:
    """A number as nsqd reads it: ASCII digits only, the empty string 0; None if it is not one.

    nsqd's wraps around at 2**64. This one stays there, too big for everything it can mean.
    """
    if not word:
        return 0
    if not word.isdigit():
        return None
    digits = word.lstrip(b"0")
    return min(int(digits or b"0"), _TOO_BIG) if len(digits) <= _MAX_DIGITS else _TOO_BIG


def _message_id(verb: str, params: list[bytes]) -> bytes:
    if len(params) < (2 if verb == "REQ" else 1):
        raise CommandError("E_INVALID", f"{verb} insufficient number of params")
    if len(params[0]) != _ID_BYTES:
        raise CommandError("E_INVALID", "invalid message ID")
    return params[0]
