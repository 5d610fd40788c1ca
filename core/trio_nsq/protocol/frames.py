"""The frames that a broker sends.

 0        4        8                                  4+size
+--------+--------+----------------------------------+
|  size  |  type  |  data                            |     size = 4 + len(data)
+--------+--------+----------------------------------+
                  0        8         10              26
of a message:     +--------+---------+----------------+------ - -
                  | ts_ns  | attempts|  id (16 hex)   |  body
                  +--------+---------+----------------+------ - -

A message with headers has a frame type of its own, and its headers before the body, as in `headers.py`. Only clients
get it that have asked for headers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

from .bulk import (
    COMPILED,
    ID_BYTES,
    MAX_INT32,
    MESSAGE_FRAME_BYTES,
    MESSAGE_HEAD_BYTES,
    split_frames,
)
from .errors import FrameError
from .headers import checked_text, split_prefix
from .limits import MIB

DEFAULT_MAX_FRAME_BYTES: Final = 64 * MIB
"""Protects a client from a peer that is not a broker; nsqd's default max-msg-size is 1 MiB."""

_HTTP: Final = int.from_bytes(b"HTTP")
"""The size, read from the beginning of an HTTP answer."""
_LOOKUPD: Final = int.from_bytes(b"E_BA")
"""The frame type, read from `E_BAD_PROTOCOL` of nsqlookupd, whose answers have no type."""
_HEAD: Final = Struct(">ii")
_MESSAGE: Final = Struct(f">iiqH{ID_BYTES}s")


class FrameType(IntEnum):
    """The number in a frame's type field."""

    RESPONSE = 0
    ERROR = 1
    MESSAGE = 2
    MESSAGE_WITH_HEADERS = 3


@dataclass(frozen=True, slots=True)
class ResponseFrame:
    """A reply: `OK`, `CLOSE_WAIT`, `_heartbeat_` or JSON."""

    data: bytes

    @property
    def is_heartbeat(self) -> bool:
        return self.data == b"_heartbeat_"


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """An error reply: NSQ's code, and its text (empty for a code without text).

    Of a reply that was read, a byte that is not UTF-8 is `\\xff`: errors have the text, and must be printable.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code} {self.text}" if self.text else self.code


@dataclass(frozen=True, slots=True)
class MessageRun:
    """Consecutive message frames, as four lists of equal length, in order of arrival.

    Attributes:
        ids: 16 bytes each, ASCII hex digits.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, including this time; the first delivery is 1.
        headers: The text of the headers of each, see `headers.py`; empty if none has headers.
    """

    ids: list[bytes]
    bodies: list[bytes]
    timestamps_ns: list[int]
    attempts: list[int]
    headers: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)


Event = ResponseFrame | ErrorFrame | MessageRun


def encode_frame(frame_type: FrameType, data: bytes) -> bytes:
    """Encode a frame of any type."""
    return _HEAD.pack(4 + len(data), frame_type) + data


def encode_response(data: bytes) -> bytes:
    """Encode a response frame."""
    return encode_frame(FrameType.RESPONSE, data)


def encode_error(data: bytes) -> bytes:
    """Encode an error frame; `data` is the code, one space and the text."""
    return encode_frame(FrameType.ERROR, data)


OK_FRAME: Final = encode_response(b"OK")
CLOSE_WAIT_FRAME: Final = encode_response(b"CLOSE_WAIT")
HEARTBEAT_FRAME: Final = encode_response(b"_heartbeat_")


class FrameReader:
    """Decodes the bytes of a broker into events.

    Args:
        max_frame_bytes: A larger frame is refused before its data is buffered.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        # Immutable, so that slicing copies a message's body only once.
        self._data = b""
        self._position = 0
        self._received = bytearray()  # data that arrived before `_data` was consumed
        self._wanted = _HEAD.size  # bytes needed for the next event

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes from the socket. The caller may change a bytearray afterwards."""
        if self._position == len(self._data):
            self._data, self._position = bytes(data), 0
        else:
            self._received += data

    @property
    def wanted_bytes(self) -> int:
        """The size of the incomplete frame, including its size field; 8 while unknown."""
        return self._wanted

    def take_buffered(self) -> bytes:
        """Remove and return the unread bytes, for a connection upgrade."""
        self._join()
        rest, self._data = self._data[self._position :], b""
        self._position, self._wanted = 0, _HEAD.size
        return rest

    def next_event(self) -> Event | None:
        """Return the next reply, or all consecutive message frames received; None if more bytes are needed.

        Raises:
            FrameError: The bytes are not frames. The connection is unusable.
        """
        available = len(self._data) - self._position + len(self._received)
        if available < self._wanted:
            return None
        self._join()
        data, position = self._data, self._position
        size, frame_type = _HEAD.unpack_from(data, position)
        self._check(size, frame_type)
        self._wanted = 4 + size  # so that a frame in many pieces is parsed twice, not with each piece
        if available < self._wanted:
            return None
        self._wanted = _HEAD.size
        if frame_type == FrameType.MESSAGE:
            return self._message_run()
        if frame_type == FrameType.MESSAGE_WITH_HEADERS:
            return self._message_run_with_headers()
        self._position = end = position + 4 + size
        content = data[position + _HEAD.size : end]
        if frame_type == FrameType.RESPONSE:
            return ResponseFrame(content)
        code, _, text = content.decode("utf-8", "backslashreplace").partition(" ")
        return ErrorFrame(code, text)

    def _join(self) -> None:
        if self._received:
            self._data = self._data[self._position :] + self._received
            self._position = 0
            self._received = bytearray()

    def _check(self, size: int, frame_type: int) -> None:
        if size == _HTTP:
            raise FrameError("it answers in HTTP: use the port of the TCP protocol, by default 4150")
        if not 4 <= size <= self._max_frame_bytes:
            raise FrameError(f"invalid frame size {size}: is this an NSQ broker's TCP port?")
        if frame_type in (FrameType.MESSAGE, FrameType.MESSAGE_WITH_HEADERS):
            if size < MESSAGE_HEAD_BYTES:
                raise FrameError(f"invalid size {size} of a message frame")
        elif frame_type not in (FrameType.RESPONSE, FrameType.ERROR):
            if frame_type == _LOOKUPD:
                raise FrameError("it answers as nsqlookupd: use the TCP port of a broker, by default 4150")
            raise FrameError(f"unknown frame type {frame_type}")

    def _message_run(self) -> MessageRun:
        """Return the complete message frame at the position and all complete ones after it."""
        run = MessageRun([], [], [], [])
        biggest = min(self._max_frame_bytes, MAX_INT32)
        self._position = _split_frames(
            self._data, self._position, biggest, run.ids, run.bodies, run.timestamps_ns, run.attempts
        )
        return run

    def _message_run_with_headers(self) -> MessageRun:
        """As `_message_run`, for messages with headers. Raises FrameError."""
        data, start, available = self._data, self._position, len(self._data)
        headers: list[str] = []
        run = MessageRun([], [], [], [], headers)
        while available - start >= MESSAGE_FRAME_BYTES:
            size, frame_type, timestamp_ns, attempts, message_id = _MESSAGE.unpack_from(data, start)
            end = start + 4 + size
            if frame_type != FrameType.MESSAGE_WITH_HEADERS or end > available:
                break
            try:
                self._check(size, frame_type)
                encoded, body = split_prefix(data, start + MESSAGE_FRAME_BYTES, end)
                headers.append(checked_text(encoded))
            except (FrameError, ValueError) as exc:
                if run.ids:
                    break  # the next call raises this
                raise (
                    exc if isinstance(exc, FrameError) else FrameError(f"headers of a message: {exc}")
                ) from exc
            run.ids.append(message_id)
            run.bodies.append(data[body:end])
            run.timestamps_ns.append(timestamp_ns)
            run.attempts.append(attempts)
            self._position = start = end
        return run


def unpack_frames(
    data: bytes,
    start: int,
    biggest: int,
    ids: list[bytes],
    bodies: list[bytes],
    timestamps_ns: list[int],
    attempts: list[int],
) -> int:
    """Like `split_frames`; faster if that is not compiled."""
    add_id, add_body = ids.append, bodies.append
    add_timestamp, add_attempts = timestamps_ns.append, attempts.append
    unpack, available = _MESSAGE.unpack_from, len(data)
    while available - start >= MESSAGE_FRAME_BYTES:
        size, frame_type, timestamp_ns, delivered, message_id = unpack(data, start)
        end = start + 4 + size
        if frame_type != FrameType.MESSAGE or not MESSAGE_HEAD_BYTES <= size <= biggest or end > available:
            break
        add_id(message_id)
        add_body(data[start + MESSAGE_FRAME_BYTES : end])
        add_timestamp(timestamp_ns)
        add_attempts(delivered)
        start = end
    return start


_split_frames = split_frames if COMPILED else unpack_frames
