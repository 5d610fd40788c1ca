"""Decode a client's commands.

`CommandReader` consumes bytes and returns a command, raises the error to send, or returns None if it needs more bytes.
It checks the size of a body before it buffers the body, and searches no byte twice. It returns a run of FIN lines,
which are most of a busy consumer's data, as one `Finish`, and consecutive PUBs to a topic as one `Publish`.
"""

import re
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from .bulk import FINISH_LINE_BYTES, MAX_INT32, walk_publishes
from .commands import (
    Auth,
    Claim,
    Command,
    Finish,
    Identify,
    LineTooLong,
    NoOperation,
    Publish,
    PublishVerb,
    Ready,
    Requeue,
    StartClose,
    Subscribe,
    Touch,
    finish_run_bytes,
)
from .errors import AuthRequired, CommandError, quote
from .headers import MAX_HPUB_MESSAGES, MAX_PREFIX_BYTES, split_prefixes
from .large_bodies import LargeBody
from .limits import MAGIC_V2, MAX_HANDSHAKE_BYTES, MAX_LINE_BYTES, Limits
from .messages import MessageSet, walk_messages
from .names import is_valid_name
from .states import LEGAL_STATES, State

_INT32: Final = Struct(">i")
_LARGE_BYTES: Final = 64 * 1024
"""If more than this is missing of a body, parsing waits until the whole body has arrived."""
_LEAST_MESSAGE_BYTES: Final = 5
_CUT_BYTES: Final = 4096
"""If the messages of a large MPUB have at least this size on average, it is cut into sets, and not joined before.
Reading the sizes of smaller ones takes longer in pieces."""
_FIN_LINES_AT_LEAST: Final = 16
_ID_BYTES: Final = 16
_NOPS: Final = re.compile(rb"(?:NOP\n){16,}+")
_MAX_DIGITS: Final = 20
_TOO_BIG: Final = 2**64
_NUMBERS: Final = 2**62
"""Less than the greatest number by far: the sum of a number and a count needs no check."""

_SETS: Final = ("MPUB", "HPUB")
"""The verbs whose body is a set of messages."""

_START_CLOSE: Final = StartClose()
_NOP: Final = NoOperation()


class _Body:
    """A command whose line was read and whose body is incomplete."""

    __slots__ = (
        "count",
        "defer_ms",
        "first",
        "is_longer",
        "sets",
        "size",
        "sizes",
        "topic",
        "verb",
        "walked",
    )

    def __init__(self, verb: str, topic: str = "", defer_ms: int = 0, first: int = -1) -> None:
        self.verb = verb
        self.topic = topic
        self.defer_ms = defer_ms
        self.first = first
        self.size = -1  # not yet read
        # Of MPUB and HPUB:
        self.count = -1  # not yet read
        self.walked = 0  # sizes are checked up to this offset from the first message
        self.sizes: list[int] | None = None
        self.is_longer = False  # than its size says
        self.sets: Sequence[MessageSet] = ()  # all its messages, if it was large


class CommandReader:
    """Decodes the bytes of a client into commands.

    Args:
        limits: The limits of sizes, counts and times.

    Attributes:
        state: The state of the connection. The caller sets it (after SUB, CLS) before it reads the next command,
            because the reader checks whether a command is legal.
        greeted: Whether the client has sent its magic.
        heartbeats: Whether the connection has heartbeats; without them SUB is refused. The caller sets it.
        tls_required: Whether only IDENTIFY is legal until the connection is encrypted. The caller sets it.
        auth_required: Whether publishes and SUB are refused because the client has not authenticated. The caller sets
            it. The bodies of such publishes are not read.
        numbered: Whether the client is a producer with a name, whose publishes may have numbers. The caller sets it.
        uncounted_requeues: Whether REQ may say that the delivery counts as no attempt. The caller sets it.
        missing_bytes: The missing bytes of a large body; 0 if no large body is being received.
        next_bytes: How many of them are best read next; 0 if none is missing.
        large_bodies: The number of large bodies so far.
        expected_answers: Returns the end of those FIN lines, from an offset of the input on, that answer the client's
            messages in the order of delivery. They are compared with known bytes, which takes less than to check them.
            The caller sets it.
    """

    def __init__(self, limits: Limits) -> None:
        self.state = State.INIT
        self.heartbeats = True
        self.tls_required = False
        self.auth_required = False
        self.numbered = False
        self.uncounted_requeues = False
        self._limits = limits
        self._buffer: bytes | bytearray = b""
        self._position = 0
        self._scanned = 0  # no line feed before this offset
        self.greeted: bool = False
        self._eof = False
        self._body: _Body | None = None
        self._large: LargeBody | None = None  # while it is being received
        self.missing_bytes: int = 0
        self.next_bytes: int = 0
        self.large_bodies: int = 0
        # The last PUB or MPUB line with its line feed, its verb and its topic: publishers repeat the line.
        self._publish_line = b"\n"
        self._publish_verb: PublishVerb = "PUB"
        self._publish_topic = ""
        self._fin_lines = _FIN_LINES_AT_LEAST  # lines to check first: more than in the last run
        self.expected_answers: Callable[[bytes | bytearray, int], int] = _expect_none
        # The last RDY line with its line feed: clients repeat it.
        self._ready_line = b"RDY\n"
        self._ready = Ready(1)

    def receive_data(self, data: bytes) -> None:
        """Add bytes from the socket."""
        if self._large is not None:
            large = self._large
            large.add(data)
            if large.missing_bytes > 0:
                self.missing_bytes, self.next_bytes = large.missing_bytes, large.next_bytes
            else:
                self._end_large()
            return
        if self._position == len(self._buffer):
            # Most data has whole commands: it is not copied into a buffer, so that a body is copied once.
            self._buffer, self._position, self._scanned = data, 0, 0
            return
        self._scanned = max(0, self._scanned - self._position)
        if len(self._buffer) - self._position <= len(data):
            # Commands are read faster from `bytes`. Each byte is copied a few times at most: the buffer doubles.
            self._buffer = self._copied(self._position, len(self._buffer)) + data
        else:
            if isinstance(self._buffer, bytes):
                self._buffer = bytearray(memoryview(self._buffer)[self._position :])
            elif self._position:
                del self._buffer[: self._position]
            self._buffer += data
        self._position = 0

    @property
    def is_empty(self) -> bool:
        """Whether all data is read: neither a command nor a part of one waits."""
        return self._body is None and self._large is None and self._position == len(self._buffer)

    def receive_eof(self) -> None:
        """End the input: an incomplete body is now an error, an incomplete line is ignored."""
        self._end_large()
        self._eof = True

    def _end_large(self) -> None:
        """Continue with what has arrived of a large body: all of it, unless the input ends."""
        large, body = self._large, self._body
        if large is None:
            return
        self._large, self.missing_bytes, self.next_bytes = None, 0, 0
        if body is not None and body.sizes is not None and _is_cut(body) and not large.missing_bytes:
            body.sets = large.cut(body.walked, body.sizes, body.count, self._biggest_message)
        # With the sets the buffer is not read, but must not be empty.
        self._buffer = body.sets[0].data if body is not None and body.sets else large.join()

    @property
    def _biggest_message(self) -> int:
        return min(self._limits.max_msg_size, MAX_INT32)

    def take_buffered(self) -> bytes:
        """Remove and return the unread bytes, for a connection upgrade."""
        self._end_large()
        rest = self._copied(self._position, len(self._buffer))
        self._buffer = b""
        self._position = self._scanned = 0
        return rest

    def _copied(self, start: int, end: int) -> bytes:
        buffer = self._buffer
        if not isinstance(buffer, bytes):
            return bytes(memoryview(buffer)[start:end])
        # All of it is not copied: compiled code copies also for a slice of everything.
        return buffer if end - start == len(buffer) else buffer[start:end]

    def next_command(self) -> Command | None:
        """Return the next command, or None if more bytes are needed.

        Raises:
            CommandError: The error to send as a frame. After a fatal error the reader cannot be used.
        """
        if self._position == len(self._buffer) and not self._eof:
            return None  # the most frequent case
        if self._body is not None:
            command = self._read_body(self._body)
            if self._position == len(self._buffer):  # release the buffer, which may be large
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
        if buffer.startswith(self._ready_line, position) and self.state is State.SUBSCRIBED:
            self._position = position + len(self._ready_line)
            return self._ready
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
        """Read all consecutive FIN lines of the fixed width; None if the first is not one."""
        if self.state not in LEGAL_STATES[b"FIN"]:
            return None
        start = self._position
        end = self.expected_answers(self._buffer, start)
        if end == start or self._buffer.startswith(b"FIN ", end):
            end = self._end_of_finish_lines(end)
        if end == start:
            return None
        self._position = end
        return Finish(self._copied(start, end))

    def _end_of_finish_lines(self, start: int) -> int:
        """Return the end of the FIN lines of the fixed width from `start` on; `start` if there is none."""
        buffer, end = self._buffer, start
        # In growing steps: the cost grows with the run, not with the buffer.
        at_a_time = self._fin_lines
        while True:
            whole = (len(buffer) - end) // FINISH_LINE_BYTES
            checked_to = end + min(whole, at_a_time) * FINISH_LINE_BYTES
            end += finish_run_bytes(self._copied(end, checked_to))
            if end < checked_to or whole <= at_a_time:
                break
            at_a_time *= 4
        self._fin_lines = max(_FIN_LINES_AT_LEAST, 4 * (end - start) // FINISH_LINE_BYTES)
        return end

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
                # NOP has no effect: skip a run of them.
                if nops := _NOPS.match(self._buffer, self._position):
                    self._position = nops.end()
                return _NOP
            case b"PUB" | b"MPUB":
                topic = self._topic(verb.decode(), params)
                first = self._first(verb.decode(), params[1:])
                if self.auth_required or first >= 0:
                    return self._expect_body(_Body(verb.decode(), topic, first=first))
                self._publish_topic = topic
                self._publish_verb = "PUB" if verb == b"PUB" else "MPUB"
                self._publish_line = raw + b"\n"
                return self._read_publish()
            case b"DPUB":
                return self._read_dpub(params)
            case b"HPUB":
                return self._read_hpub(params)
            case b"FIN":
                return Finish(b"FIN %s\n" % _message_id("FIN", params))
            case b"RDY":
                return self._read_rdy(params, raw)
            case b"REQ":
                return self._read_req(params)
            case b"TOUCH":
                return Touch(_message_id("TOUCH", params))
            case b"SUB":
                return self._read_sub(params)
            case b"PRODUCER":
                return self._read_producer(params)
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

    def _first(self, verb: str, params: list[bytes]) -> int:
        """Return the number of the first message of a publish; -1: it has none."""
        if not (self.numbered and params):  # as nsqd, ignore what other clients add
            return -1
        first = _decimal(params[0]) if params[0] else None
        if first is None or first >= _NUMBERS:
            raise CommandError("E_INVALID", f"{verb} could not parse number {_text(params[0])}")
        return first

    def _read_producer(self, params: list[bytes]) -> Claim:
        if not self.numbered:
            raise CommandError("E_INVALID", "invalid command PRODUCER")
        topic = self._topic("PRODUCER", params)
        self._check_auth("PRODUCER")
        return Claim(topic)

    def _check_auth(self, verb: str) -> None:
        if self.auth_required:
            raise AuthRequired(verb)

    def _read_sub(self, params: list[bytes]) -> Subscribe:
        if not self.heartbeats:
            raise CommandError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 2:
            raise CommandError("E_INVALID", "SUB insufficient number of parameters")
        topic = self._topic("SUB", params)
        channel = _text(params[1])
        if not is_valid_name(channel):
            raise CommandError("E_BAD_CHANNEL", f"SUB channel name {quote(channel)} is not valid")
        self._check_auth("SUB")
        return Subscribe(topic, channel)

    def _read_dpub(self, params: list[bytes]) -> Command | None:
        topic = self._topic("DPUB", params)
        defer_ms = self._defer_ms("DPUB", params[1])
        return self._expect_body(_Body("DPUB", topic, defer_ms, self._first("DPUB", params[2:])))

    def _read_hpub(self, params: list[bytes]) -> Command | None:
        topic = self._topic("HPUB", params)
        defer_ms = self._defer_ms("HPUB", params[1]) if len(params) > 1 else 0
        return self._expect_body(_Body("HPUB", topic, defer_ms, self._first("HPUB", params[2:])))

    def _defer_ms(self, verb: str, word: bytes) -> int:
        defer_ms = _decimal(word)
        if defer_ms is None:
            raise CommandError("E_INVALID", f"{verb} could not parse timeout {_text(word)}")
        biggest = self._limits.max_defer_ms
        if defer_ms > biggest:
            raise CommandError("E_INVALID", f"{verb} timeout {defer_ms} out of range 0-{biggest}")
        return defer_ms

    def _read_rdy(self, params: list[bytes], line: bytes) -> Ready:
        count = _decimal(params[0]) if params else 1
        if self.state is State.CLOSING:
            return Ready(0)  # ignored in this state
        if count is None:
            raise CommandError("E_INVALID", f"RDY could not parse count {_text(params[0])}")
        biggest = self._limits.max_rdy_count
        if count > biggest:
            raise CommandError("E_INVALID", f"RDY count {count} out of range 0-{biggest}")
        self._ready_line, self._ready = line + b"\n", Ready(count)
        return self._ready

    def _read_req(self, params: list[bytes]) -> Requeue:
        if len(params) < 2:
            raise CommandError("E_INVALID", "REQ insufficient number of params")
        message_id = _message_id("REQ", params)
        delay_ms = _decimal(params[1])
        if delay_ms is None:
            raise CommandError("E_INVALID", f"REQ could not parse timeout {_text(params[1])}")
        counts_attempt = not (self.uncounted_requeues and params[2:] == [b"uncounted"])
        return Requeue(message_id, min(delay_ms, self._limits.max_req_timeout_ms), counts_attempt)

    def _read_publish(self) -> Command | None:
        """Read the body of a PUB or MPUB. The common case, a complete and valid PUB, takes the fewest steps.

        Clients that do not wait for each OK send many PUBs at once. These are one command.
        """
        buffer, start, verb = self._buffer, self._position, self._publish_verb
        if verb == "PUB" and start + 4 < len(buffer):
            (size,) = _INT32.unpack_from(buffer, start)
            end = start + 4 + size
            if 0 < size <= self._limits.max_msg_size and end <= len(buffer):
                self._position = end
                messages = MessageSet(self._copied(start, end), [size])
                if end == len(buffer) or not isinstance(buffer, bytes):
                    return Publish("PUB", self._publish_topic, messages)
                parts = [messages.data]
                self._position = walk_publishes(
                    buffer, end, self._publish_line, self._biggest_message, messages.sizes, parts
                )
                if len(parts) > 1:
                    messages.data = b"".join(parts)
                return Publish("PUB", self._publish_topic, messages, commands=len(parts))
        return self._expect_body(_Body(verb, self._publish_topic))

    def _expect_body(self, body: _Body) -> Command | None:
        self._body = body
        return self._read_body(body)

    def _read_body(self, body: _Body) -> Command | None:
        buffer = self._buffer
        if body.sets:
            self._position, self._body = len(buffer), None
            return Publish("MPUB", body.topic, body.sets[0], first=body.first, rest=body.sets[1:])
        available = len(buffer) - self._position
        if body.size < 0:
            if available < 4:
                return self._incomplete(*_body_error(body.verb, "body size"))
            body.size = self._body_size(body.verb, _INT32.unpack_from(buffer, self._position)[0])
            if body.topic:
                self._check_auth(body.verb)  # after the size, as nsqd, and before the body
            if body.verb in _SETS:  # a PUB's size stays: it is the message's size field
                self._position += 4
                available -= 4
        if body.verb in _SETS:
            return self._read_set(body, available)
        if available < 4 + body.size:
            return self._incomplete(*_body_error(body.verb, "body"), 4 + body.size - available)
        start = self._position
        end = start + 4 + body.size
        self._position, self._body = end, None
        if body.topic:
            data = self._copied(start, end)
            verb: PublishVerb = "DPUB" if body.verb == "DPUB" else "PUB"
            return Publish(verb, body.topic, MessageSet(data, [body.size]), body.defer_ms, first=body.first)
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
            if verb not in _SETS:
                biggest = min(biggest, MAX_HANDSHAKE_BYTES)
            if size > biggest:
                raise CommandError("E_BAD_BODY", f"{verb} body too big {size} > {biggest}")
            if size <= 0:
                raise CommandError("E_BAD_BODY", f"{verb} invalid body size {size}")
        return size

    def _read_set(self, body: _Body, available: int) -> Command | None:
        """Read the messages of an MPUB or HPUB."""
        verb, more = body.verb, MAX_PREFIX_BYTES if body.verb == "HPUB" else 0
        if body.sizes is None:
            if available < 4:
                return self._incomplete("E_BAD_BODY", f"{verb} failed to read message count")
            body.count = _INT32.unpack_from(self._buffer, self._position)[0]
            most = MAX_HPUB_MESSAGES if verb == "HPUB" else (self._limits.max_body_size - 4) // 5
            if not 0 < body.count <= most:
                raise CommandError("E_BAD_BODY", f"{verb} invalid message count {body.count}")
            body.sizes = []
            self._position += 4
            available -= 4
        start, size = self._position, max(0, body.size - 4)  # of all messages
        if available >= size and not body.is_longer:
            data = self._copied(start, start + size)
            body.walked = walk_messages(
                data, body.walked, size, body.count, self._limits, body.sizes, verb, more
            )
            if body.walked == size and len(body.sizes) == body.count:
                self._position, self._body = start + size, None
                return self._publish_set(body, MessageSet(data, body.sizes))
            body.is_longer = True
        # As nsqd, use the sizes of the messages: segmentio/nsq-go says how long all bodies are, without these sizes.
        end = start + available
        walked = walk_messages(
            self._buffer, start + body.walked, end, body.count, self._limits, body.sizes, verb, more
        )
        body.walked = walked - start
        self._check_total(body)
        left = body.count - len(body.sizes)
        if not left and walked <= end:
            self._position, self._body = walked, None
            return self._publish_set(body, MessageSet(self._copied(start, walked), body.sizes))
        least = body.walked + _LEAST_MESSAGE_BYTES * left
        what = "message body" if walked > end else f"message({len(body.sizes)}) body size"
        return self._incomplete(
            "E_BAD_MESSAGE", f"{verb} failed to read {what}", max(size, least) - available
        )

    def _publish_set(self, body: _Body, messages: MessageSet) -> Publish:
        if body.verb == "MPUB":
            return Publish("MPUB", body.topic, messages, first=body.first)
        messages, headers = split_prefixes(messages, self._limits.max_msg_size)
        return Publish("HPUB", body.topic, messages, body.defer_ms, first=body.first, headers=headers)

    def _check_total(self, body: _Body) -> None:
        """Raise CommandError if the messages of an MPUB or HPUB are too long together."""
        assert body.sizes is not None
        biggest = self._limits.max_body_size
        if body.walked - 4 * len(body.sizes) > biggest:
            total = 0
            for size in body.sizes:
                total += size
                if total > biggest:
                    raise CommandError("E_BAD_BODY", f"{body.verb} body too big {total} > {biggest}")

    def _incomplete(self, code: str, text: str, missing_bytes: int = 0) -> Command | None:
        """Return None, or raise CommandError if the input has ended."""
        if self._eof:
            raise CommandError(code, text)
        if missing_bytes > _LARGE_BYTES:
            body = self._body
            sizes = body.sizes if body is not None and _is_cut(body) else None
            received = self._copied(self._position, len(self._buffer))
            self._large = LargeBody(received, missing_bytes, 4 + sizes[0] if sizes else 0)
            self.missing_bytes, self.next_bytes = missing_bytes, self._large.next_bytes
            self.large_bodies += 1
            self._buffer, self._position, self._scanned = b"", 0, 0
        return None


def _is_cut(body: _Body) -> bool:
    """Whether a body becomes message sets without being joined."""
    return body.verb == "MPUB" and body.size >= body.count * _CUT_BYTES


def _expect_none(_: bytes | bytearray, start: int) -> int:
    return start


def _text(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")


def _body_error(verb: str, what: str) -> tuple[str, str]:
    """Return the code and text of the error for a body that ends too early."""
    if verb in ("PUB", "DPUB"):
        return "E_BAD_MESSAGE", f"{verb} failed to read message {what}"
    return "E_BAD_BODY", f"{verb} failed to read {what}"


def _decimal(word: bytes) -> int | None:
    """Parse a number like nsqd: ASCII digits only, and the empty string is 0; None if it is not a number.

    nsqd wraps around at 2**64. Here larger numbers become 2**64, which is out of every range.
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
