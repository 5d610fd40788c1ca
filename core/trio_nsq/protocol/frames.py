"""Frames, the broker's half of the conversation.

 0        4        8                                  4+size
+--------+--------+----------------------------------+
|  size  |  type  |  data                            |     size = 4 + len(data)
+--------+--------+----------------------------------+
                  0        8         10              26
of a message:     +--------+---------+----------------+------ - -
                  | ts_ns  | attempts|  id (16 hex)   |  body
                  +--------+---------+----------------+------ - -
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from .errors import FrameError
from .limits import MIB

MESSAGE_HEADER_BYTES = 26
"""Timestamp, attempts and id: what a message frame carries before the body."""
MESSAGE_FRAME_BYTES = 8 + MESSAGE_HEADER_BYTES
"""What a message costs on the wire beside its body."""
DEFAULT_MAX_FRAME_BYTES = 64 * MIB
"""A client's guard against a peer that is not NSQ; generous beside nsqd's default max-msg-size of 1 MiB."""

_HEAD = Struct(">ii")
_MESSAGE = Struct(">iiqH16s")


class FrameType(IntEnum):
    """The number in a frame's type field."""

    RESPONSE = 0
    ERROR = 1
    MESSAGE = 2


@dataclass(frozen=True, slots=True)
class ResponseFrame:
    """A reply: `OK`, `CLOSE_WAIT`, `_heartbeat_` or JSON."""

    data: bytes

    @property
    def is_heartbeat(self) -> bool:
        return self.data == b"_heartbeat_"


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """An error reply. `code` is NSQ's code, `text` what follows it (empty for a bare code)."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code} {self.text}" if self.text else self.code


@dataclass(frozen=True, slots=True)
class MessageRun:
    """Message frames that followed each other, as four lists of equal length, in order of arrival.

    Attributes:
        ids: 16 bytes each, ASCII hex digits.
        bodies: The messages.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, this time included; 1 is the first.
    """

    ids: list[bytes]
    bodies: list[bytes]
    timestamps_ns: list[int]
    attempts: list[int]

    def __len__(self) -> int:
        return len(self.ids)


Event = ResponseFrame | ErrorFrame | MessageRun


def encode_frame(frame_type: FrameType, data: bytes) -> bytes:
    """One frame of any type."""
    return _HEAD.pack(4 + len(data), frame_type) + data


def encode_response(data: bytes) -> bytes:
    """A response frame."""
    return encode_frame(FrameType.RESPONSE, data)


def encode_error(data: bytes) -> bytes:
    """An error frame; `data` is the code, one space and the text."""
    return encode_frame(FrameType.ERROR, data)


OK_FRAME = encode_response(b"OK")
CLOSE_WAIT_FRAME = encode_response(b"CLOSE_WAIT")
HEARTBEAT_FRAME = encode_response(b"_heartbeat_")


class FrameReader:
    """Bytes from a broker in, events out.

    Args:
        max_frame_bytes: A frame whose size field says more is refused before its data is buffered.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._position = 0

    def receive_data(self, data: bytes) -> None:
        """Take what the socket gave."""
        if self._position:
            del self._buffer[: self._position]
            self._position = 0
        self._buffer += data

    def take_buffered(self) -> bytes:
        """Hand over, and forget, the bytes not yet read: for a connection upgrade."""
        rest = bytes(memoryview(self._buffer)[self._position :])
        self._buffer = bytearray()
        self._position = 0
        return rest

    def next_event(self) -> Event | None:
        """The next reply, or all message frames that lie ready next to each other; None: feed me more.

        Raises:
            FrameError: The bytes are not frames. The connection is of no further use.
        """
        buffer, position = self._buffer, self._position
        if len(buffer) - position < 8:
            return None
        size, frame_type = _HEAD.unpack_from(buffer, position)
        if not 4 <= size <= self._max_frame_bytes:
            raise FrameError(f"a frame says it is {size} bytes long: is this an NSQ broker's TCP port?")
        end = position + 4 + size
        if len(buffer) < end:
            return None
        if frame_type == FrameType.MESSAGE:
            return self._message_run()
        data = bytes(memoryview(buffer)[position + 8 : end])
        self._position = end
        if frame_type == FrameType.RESPONSE:
            return ResponseFrame(data)
        if frame_type == FrameType.ERROR:
            code, _, text = data.decode("utf-8", "surrogateescape").partition(" ")
            return ErrorFrame(code, text)
        raise FrameError(f"unknown frame type {frame_type}")

    def _message_run(self) -> MessageRun | None:
        run = MessageRun([], [], [], [])
        add_id, add_body = run.ids.append, run.bodies.append
        add_timestamp, add_attempts = run.timestamps_ns.append, run.attempts.append
        unpack, biggest = _MESSAGE.unpack_from, self._max_frame_bytes
        position = self._position
        # One copy to an immutable buffer, so that each body is a slice of bytes and costs no second copy.
        data = bytes(memoryview(self._buffer)[position:])
        start, available = 0, len(data)
        while available - start >= MESSAGE_FRAME_BYTES:
            size, frame_type, timestamp_ns, attempts, message_id = unpack(data, start)
            if frame_type != FrameType.MESSAGE:
                break
            if not 4 + MESSAGE_HEADER_BYTES <= size <= biggest:
                raise FrameError(f"a message frame says it is {size} bytes long")
            end = start + 4 + size
            if end > available:
                break
            add_id(message_id)
            add_body(data[start + MESSAGE_FRAME_BYTES : end])
            add_timestamp(timestamp_ns)
            add_attempts(attempts)
            start = end
        self._position = position + start
        return run if run.ids else None
