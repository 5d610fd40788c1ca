"""The frames between a leader and a follower, as bytes.

     0      4      5
    +------+------+---------+
    | size | kind | payload |
    +------+------+---------+

`size` counts kind and payload; integers are big-endian. The follower begins with HELLO. The leader answers WELCOME, or
REFUSED and closes. If the follower cannot continue, it sends its INVENTORY, an entry per frame, and INVENTORY_END, and
gets the pieces of a `CatchUp`, the last of which is CAUGHT_UP. After that, or after the WELCOME, it gets OPERATIONS and
answers with STORED. Both send ALIVE when they have had nothing to send for a while. A follower sends it each second,
with the free bytes of its disk if it knows them.
"""

import json
from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from ..protocol import untrusted_json
from ..protocol.errors import NSQError
from .catch_up import Block, CaughtUp, FileBegin, FileEnd, Folder, Operations, Piece
from .operations import MOST_OPERATION_BYTES, InvalidOperation, check_path

VERSION: Final = 1
"""The version of the link: HELLO names all that the follower speaks, WELCOME the one that is used."""
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_CHARACTERS: Final = 255
"""Limits of the addresses of a member."""
MOST_FRAME_BYTES: Final = MOST_OPERATION_BYTES + 64 * 1024
_LEAST_ROOM: Final = 1024 * 1024
_LEAST_REST: Final = 16 * 1024
_HEAD = Struct(">IB")
_NUMBER = Struct(">Q")
_NUMBERED = Struct(">IBQ")  # a head, and a number
_NAME = Struct(">H")
_FILE = Struct(">B")
_BLOCK = Struct(">QH")


class LinkError(NSQError):
    """The other side does not speak the protocol of the link, or refuses; the text says what."""


class FrameKind(IntEnum):
    """See the module. HELLO, WELCOME and REFUSED are JSON objects."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    INVENTORY = 4
    INVENTORY_END = 5
    OPERATIONS = 6
    FOLDER = 7
    FILE_BEGIN = 8
    BLOCK = 9
    FILE_END = 10
    CAUGHT_UP = 11
    STORED = 12
    ALIVE = 13


_KINDS: Final = {int(kind): kind for kind in FrameKind}


def encode_frame(kind: FrameKind, *payload: bytes | memoryview) -> list[bytes | memoryview]:
    """Return a frame as pieces of bytes; those of the payload are not copied."""
    return [_HEAD.pack(1 + sum(map(len, payload)), kind), *payload]


def encode_json(kind: FrameKind, content: dict[str, Any]) -> list[bytes | memoryview]:
    """Return a frame with a JSON object."""
    return encode_frame(kind, json.dumps(content).encode())


def encode_number(kind: FrameKind, number: int) -> list[bytes | memoryview]:
    """Return a frame with a number: STORED, ALIVE or CAUGHT_UP."""
    return [_NUMBERED.pack(1 + _NUMBER.size, kind, number)]


def encode_operations(last_number: int, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return a frame with operations, as `encode` makes them."""
    return encode_frame(FrameKind.OPERATIONS, _NUMBER.pack(last_number), *pieces)


def encode_piece(piece: Piece) -> list[bytes | memoryview]:
    """Return the frame of a piece of a catch-up."""
    match piece:
        case Operations(data, last_number):
            return encode_operations(last_number, [data])
        case Folder(path, names):
            listed = (_NAME.pack(len(name)) + name for name in (path, *sorted(names)))
            return encode_frame(FrameKind.FOLDER, *listed)
        case FileBegin(path, is_whole):
            return encode_frame(FrameKind.FILE_BEGIN, _FILE.pack(is_whole), path)
        case Block(path, offset, data):
            return encode_frame(FrameKind.BLOCK, _BLOCK.pack(offset, len(path)), path, data)
        case FileEnd(path, size):
            return encode_frame(FrameKind.FILE_END, _NUMBER.pack(size), path)
        case CaughtUp(number):
            return encode_number(FrameKind.CAUGHT_UP, number)


def decode_piece(kind: FrameKind, payload: memoryview) -> Piece:
    """Return the piece of a catch-up in a frame; its data are views. Raises LinkError, InvalidOperation."""
    try:
        match kind:
            case FrameKind.OPERATIONS:
                return Operations(payload[_NUMBER.size :], decode_number(payload))
            case FrameKind.FOLDER:
                names = list(_names_in(bytes(payload)))
                path = names.pop(0)
                return Folder(_checked(path) if path else path, frozenset(names))
            case FrameKind.FILE_BEGIN:
                (is_whole,) = _FILE.unpack_from(payload)
                return FileBegin(_checked(payload[_FILE.size :]), bool(is_whole))
            case FrameKind.BLOCK:
                offset, path_bytes = _BLOCK.unpack_from(payload)
                end = _BLOCK.size + path_bytes
                if offset + len(payload) >= 1 << 63:
                    raise InvalidOperation("a block is beyond the end of any file")
                return Block(_checked(payload[_BLOCK.size : end]), offset, payload[end:])
            case FrameKind.FILE_END:
                return FileEnd(_checked(payload[_NUMBER.size :]), decode_number(payload))
            case FrameKind.CAUGHT_UP:
                return CaughtUp(decode_number(payload))
    except StructError as exc:
        raise LinkError(f"a frame {kind.name} is cut off") from exc
    raise LinkError(f"a frame {kind.name} is not part of a catch-up")


def _checked(path: bytes | memoryview) -> bytes:
    path = bytes(path)
    check_path(path)
    return path


def _names_in(payload: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(payload):
        (size,) = _NAME.unpack_from(payload, at)
        begin, at = at + _NAME.size, at + _NAME.size + size
        if at > len(payload):
            raise LinkError("a name in a frame FOLDER is cut off")
        yield payload[begin:at]
    if not payload:
        raise LinkError("a frame FOLDER is empty")


def decode_number(payload: bytes | memoryview) -> int:
    """Return the number that a payload begins with. Raises LinkError."""
    if len(payload) < _NUMBER.size:
        raise LinkError("a frame with a number is cut off")
    number: int = _NUMBER.unpack_from(payload)[0]
    return number


def decode_json(kind: FrameKind, payload: memoryview) -> dict[str, Any]:
    """Return the JSON object of a frame. Raises LinkError."""
    try:
        content = untrusted_json.decode_json(bytes(payload))
    except ValueError as exc:
        raise LinkError(f"a frame {kind.name} is no JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise LinkError(f"a frame {kind.name} is no JSON object")
    return content


class FrameReader:
    """Divides what arrives into frames.

    Args:
        most_bytes: The largest frame that is accepted.
    """

    def __init__(self, most_bytes: int = MOST_FRAME_BYTES) -> None:
        self._most_bytes = most_bytes
        self._buffer = memoryview(bytearray(2 * _LEAST_ROOM))
        self._begin = self._end = 0  # of what has arrived and was not returned

    def room(self) -> memoryview:
        """Return where to put what arrives next. The payloads of earlier frames are no longer valid."""
        kept = self._end - self._begin
        if not kept:
            self._begin = self._end = 0
        elif len(self._buffer) - self._end < _LEAST_ROOM:
            waiting = self._buffer[self._begin : self._end]
            if len(self._buffer) - kept < _LEAST_ROOM:
                self._buffer = memoryview(bytearray(2 * len(self._buffer)))
            self._buffer[:kept] = waiting
            self._begin, self._end = 0, kept
        return self._buffer[self._end :]

    def room_in_frame(self) -> memoryview:
        """As `room`; if a large frame has begun, only up to its end: the begin of the next one would be moved."""
        room = self.room()
        if self._end - self._begin >= _HEAD.size:
            size: int = _HEAD.unpack_from(self._buffer, self._begin)[0]
            rest = self._begin + _HEAD.size - 1 + size - self._end
            if rest >= _LEAST_REST:
                return room[:rest]
        return room

    def add(self, count: int) -> list[tuple[FrameKind, memoryview]]:
        """Return the frames that are complete with this many more bytes in `room`. Raises LinkError."""
        self._end += count
        frames: list[tuple[FrameKind, memoryview]] = []
        while self._end - self._begin >= _HEAD.size:
            size, code = _HEAD.unpack_from(self._buffer, self._begin)
            if not 1 <= size <= self._most_bytes:
                raise LinkError(f"a frame of {size:,} bytes; the maximum is {self._most_bytes:,}")
            begin = self._begin + _HEAD.size
            end = begin + size - 1
            if end > self._end:
                break
            kind = _KINDS.get(code)
            if kind is None:
                raise LinkError(f"there is no frame of kind {code}")
            frames.append((kind, self._buffer[begin:end]))
            self._begin = end
        return frames

    def receive(self, data: bytes) -> list[tuple[FrameKind, memoryview]]:
        """As `add`, of at most `_LEAST_ROOM` bytes that have arrived elsewhere."""
        self.room()[: len(data)] = data
        return self.add(len(data))
