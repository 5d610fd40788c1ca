"""The loops over the messages of a set: all that is done for each of them.

They are apart because they are worth compiling: mypyc makes a C extension of this file where there is a compiler (see
`hatch_build.py`), which does the same two times (frames) to ten times (sizes) as fast. It is written for that: bytes
are read one by one, and what is `i64` there is a C integer. In a checkout, `make setup` compiles it again when it has
changed.
"""

from __future__ import annotations  # `i64` is for the compiler only

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mypy_extensions import i64

COMPILED_FROM = ""
"""SHA-256 of this file, in hexadecimal, where it is compiled."""
COMPILED = bool(COMPILED_FROM)
_MESSAGE_FRAME = 2
_VIEW_BYTES: Final = 4096
"""From this size on, copying a body takes longer than making a view of it."""
MAX_INT32 = 2**31 - 1

# The fixed sizes inside message frames and FIN lines, from which the loops over many messages compute offsets. They are
# here because this module imports none of the others.
ID_BYTES: Final = 16
"""A message id is 16 hex digits."""
FINISH_ID_AT: Final = 4
"""Where the id of a FIN line begins."""
FINISH_LINE_BYTES: Final = FINISH_ID_AT + ID_BYTES + 1
"""The length of a FIN line as all clients send it: `FIN`, one space, a 16-byte id and a line feed."""
MESSAGE_HEADER_BYTES: Final = 10 + ID_BYTES
"""The size of timestamp, attempts and id, before the body of a message frame."""
MESSAGE_HEAD_BYTES: Final = 4 + MESSAGE_HEADER_BYTES
"""What a message frame has between its size field and the body; its size field counts these bytes, too."""
MESSAGE_FRAME_BYTES: Final = 4 + MESSAGE_HEAD_BYTES
"""The size of a message frame without the body."""


def walk_sizes(
    data: bytes, start: i64, end: i64, count: i64, smallest: i64, biggest: i64, sizes: list[int]
) -> i64:
    """Read size fields from `data[start:]` on, each followed by as many bytes, until `sizes` holds `count` of them.

    Args:
        data: `(int32 size, bytes)*`, big-endian.
        start: Where the first of these fields lies, not negative.
        end: Where the bytes at hand end, at most `len(data)`.
        count: How many sizes there are to be.
        smallest, biggest: Which sizes are right; from 0 on, and below 2**31.
        sizes: Extended in place.

    Returns:
        Where the next field lies, or the first one that is not right, or for which too few bytes are left.
    """
    last = end - 4
    left = count - len(sizes)
    while left > 0 and start <= last:
        size: i64 = data[start] << 24 | data[start + 1] << 16 | data[start + 2] << 8 | data[start + 3]
        if size < smallest or size > biggest:
            break
        sizes.append(size)
        start += 4 + size
        left -= 1
    return start


def walk_publishes(
    data: bytes, start: i64, line: bytes, biggest: i64, sizes: list[int], parts: list[bytes]
) -> i64:
    """Read consecutive PUBs that repeat a line, up to one that is incomplete, or not right.

    Args:
        data: `(line, int32 size, bytes)*`, big-endian, and then anything.
        start: The offset of the first line, not negative.
        line: The line, with its line feed.
        biggest: The largest size that is right, below 2**31; the smallest is 1.
        sizes: Extended with the size of each message.
        parts: Extended with the size field and the body of each.

    Returns:
        The offset after the last one that was read.
    """
    width: i64 = len(line)
    whole: i64 = len(data)
    while data.startswith(line, start):
        at = start + width
        if at + 4 > whole:
            break
        size: i64 = data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
        end = at + 4 + size
        if size < 1 or size > biggest or end > whole:
            break
        sizes.append(size)
        parts.append(data[at:end])
        start = end
    return start


def split_bodies(data: bytes, sizes: list[int]) -> list[bytes]:
    """The bodies of a set of messages, copied out of it, in order."""
    bodies: list[bytes] = []
    start: i64 = 4
    for each in sizes:
        size: i64 = each
        bodies.append(data[start : start + size])
        start += size + 4
    return bodies


def add_frames(
    data: bytes,
    sizes: list[int],
    heads: bytes,
    prefixes: Mapping[int, bytes],
    parts: list[bytes | memoryview],
    offsets: list[int],
) -> None:
    """Add the frames of a set of messages. Large bodies are not copied.

    Args:
        data, sizes: The set.
        heads: What each frame has between its size and the body, `MESSAGE_HEAD_BYTES` for each message, one after the
            other.
        prefixes: The size field of a frame by the size of its body.
        parts: Extended with the frames, in pieces.
        offsets: Ends with where the first frame begins; extended with where each of them ends.
    """
    at: i64 = offsets[-1]
    start: i64 = 4
    head: i64 = 0
    if len(data) >= _VIEW_BYTES * len(sizes):
        view = memoryview(data)
        for each in sizes:
            parts.append(prefixes[each])
            parts.append(heads[head : head + MESSAGE_HEAD_BYTES])
            parts.append(view[start : start + each])
            head += MESSAGE_HEAD_BYTES
            start += each + 4
            at += each + MESSAGE_FRAME_BYTES
            offsets.append(at)
        return
    for each in sizes:
        size: i64 = each
        parts.append(prefixes[each])
        parts.append(heads[head : head + MESSAGE_HEAD_BYTES])
        parts.append(data[start : start + size])
        head += MESSAGE_HEAD_BYTES
        start += size + 4
        at += size + MESSAGE_FRAME_BYTES
        offsets.append(at)


def split_frames(
    data: bytes,
    start: i64,
    biggest: i64,
    ids: list[bytes],
    bodies: list[bytes],
    timestamps_ns: list[int],
    attempts: list[int],
) -> i64:
    """Take message frames, up to what is none, or is not whole.

    Args:
        data: Frames, one after the other.
        start: Where the first of them lies, not negative.
        biggest: The largest size that a frame may say it has, below 2**31.
        ids, bodies, timestamps_ns, attempts: Extended with what the frames hold, see `MessageRun`.

    Returns:
        Where the next frame lies.
    """
    available: i64 = len(data)
    while available - start >= MESSAGE_FRAME_BYTES:
        size: i64 = data[start] << 24 | data[start + 1] << 16 | data[start + 2] << 8 | data[start + 3]
        kind: i64 = data[start + 4] << 24 | data[start + 5] << 16 | data[start + 6] << 8 | data[start + 7]
        end = start + 4 + size
        if kind != _MESSAGE_FRAME or size < MESSAGE_HEAD_BYTES or size > biggest or end > available:
            break
        high: i64 = data[start + 8]
        if high > 127:
            high -= 256
        middle: i64 = data[start + 9] << 16 | data[start + 10] << 8 | data[start + 11]
        low: i64 = data[start + 12] << 24 | data[start + 13] << 16 | data[start + 14] << 8 | data[start + 15]
        timestamps_ns.append(high << 56 | middle << 32 | low)
        attempts.append(data[start + 16] << 8 | data[start + 17])
        ids.append(data[start + MESSAGE_FRAME_BYTES - ID_BYTES : start + MESSAGE_FRAME_BYTES])
        bodies.append(data[start + MESSAGE_FRAME_BYTES : end])
        start = end
    return start
