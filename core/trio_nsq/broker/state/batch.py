"""Batches: messages ready to send. Their frames are built once and shared by all channels and clients."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from struct import Struct
from typing import Final

from ...log import RecordBatch
from ...log.record_metadata import has_headers, headers_bytes, headers_in, only_channel
from ...protocol.bulk import FINISH_ID_AT, FINISH_LINE_BYTES, ID_BYTES, MESSAGE_FRAME_BYTES, add_frames
from ...protocol.frames import FrameType
from ...protocol.headers import prefix_of
from ...protocol.messages import SizePrefixes

MERGE_MESSAGES = 256  # not Final: tests set it
MERGE_BYTES: Final = 64 * 1024
"""Small neighbouring records are merged into a batch up to about this size, because delivery has a cost per batch."""

MAX_KEPT_HEADERS_BYTES: Final = 256 * 1024
"""Frames with headers are kept for the next consumer up to this size of the headers. Messages with headers of their own
have less in a record, but 2,048 messages of a record that have the same 16 KiB would take 32 MiB."""
_OVERHEAD_BYTES: Final = 128
"""Approximate memory of a message in addition to its body: its header, its FIN line and its offset."""
_LAST_DIGITS: Final = 16**3
_DIGITS: Final = b"".join([b"\n%03x" % number for number in range(_LAST_DIGITS)])
"""The last three digits of consecutive ids; each newline is a placeholder for the text before them."""
_SIZE_BYTES: Final = 4
_FRAME_SIZES: Final = SizePrefixes(MESSAGE_FRAME_BYTES - _SIZE_BYTES)
_COMMON_HEADER: Final = Struct(">iqH")
_FRAME_HEAD: Final = Struct(">ii")
_ATTEMPTS: Final = Struct(">H")
_TIMESTAMP: Final = Struct(">q")
_TIMESTAMP_OFFSET: Final = 4 + 4
_ATTEMPTS_OFFSET: Final = _TIMESTAMP_OFFSET + _TIMESTAMP.size
_MAX_ATTEMPTS: Final = 0xFFFF
_TAKEN_ALONE: Final = 16
"""Messages requested singly before the batch builds the frames of all its messages."""


class Batch:
    """Consecutive messages of a topic, all due at once or all deferred to the same time.

    The batch holds the records until the first consumer needs the frames. Then it builds the frames with attempts = 1
    and drops the records.

    Args:
        records: At least one; each begins where the previous one ends. More than one only if none is deferred.

    Attributes:
        base_sequence, next_sequence: The first message's sequence, and the one after the last message's.
        due_ns: Earliest delivery time, Unix nanoseconds; 0: at once.
        channel: The only channel that gets the messages; None: all do.
        size_bytes: Approximate memory of the batch.
    """

    __slots__ = (
        "_frames",
        "_frames_with_headers",
        "_headers",
        "_headers_bytes",
        "_lines",
        "_offsets",
        "_records",
        "_taken_alone",
        "base_sequence",
        "channel",
        "due_ns",
        "next_sequence",
        "size_bytes",
    )

    def __init__(self, records: Sequence[RecordBatch]) -> None:
        self.base_sequence: int = records[0].base_sequence
        self.next_sequence: int = records[-1].next_sequence
        self.due_ns: int = records[0].due_ns
        self.channel: str | None = only_channel(records[0].metadata) if self.due_ns else None
        self.size_bytes: int = sum([_record_size(r) for r in records]) + _OVERHEAD_BYTES * len(self)
        self._records: list[RecordBatch] | None = list(records)
        self._frames = b""
        self._frames_with_headers: tuple[bytes, list[int]] | None = None  # built once a consumer wants them
        self._headers: list[
            str
        ] = []  # of each message, once the frames are built; empty if no message has headers
        self._headers_bytes = 0  # of all messages, once the frames are built
        self._lines = b""
        self._offsets: list[int] = []
        self._taken_alone = 0

    def __len__(self) -> int:
        return self.next_sequence - self.base_sequence

    def absorb(self, record: RecordBatch, max_messages: int, max_bytes: int) -> int:
        """Append the next record, so that one delivery includes it.

        Returns:
            The growth of `size_bytes`; 0 if the record was not appended, because the batch would exceed a limit or was
            delivered.
        """
        count, records = record.count, self._records
        size_bytes = _record_size(record) + _OVERHEAD_BYTES * count
        if (
            records is None
            or len(self) + count > max_messages
            or self.size_bytes + size_bytes > max_bytes
            or not _follows(record, records[-1])
        ):
            return 0
        records.append(record)
        self.next_sequence = record.next_sequence
        self.size_bytes += size_bytes
        return size_bytes

    def _build(self, records: Sequence[RecordBatch]) -> None:
        parts: list[bytes | memoryview] = []
        lines: list[bytes] = []
        offsets = [0]
        metadata = False
        for record in records:
            metadata |= bool(record.metadata)
            messages, first_id, count = record.messages, record.first_id, record.count
            lines.append(_finish_lines(first_id, count))
            common = _COMMON_HEADER.pack(FrameType.MESSAGE, record.timestamp_ns, 1)
            heads = common + b"%016x" % first_id if count == 1 else _before_ids(common, first_id, count)
            add_frames(messages.data, messages.sizes, heads, _FRAME_SIZES, parts, offsets)
        self._frames = b"".join(parts)
        self._lines = b"".join(lines)
        self._offsets = offsets
        if metadata and any(has_headers(each.metadata) for each in records):
            self._headers = [text for each in records for text in _headers(each)]
            self._headers_bytes = sum(map(len, self._headers))
        self._records = None

    def _build_with_headers(self) -> tuple[bytes, list[int]]:
        """Return the frames for consumers that want headers, and where each begins, and the last ends."""
        offsets = [0]
        parts: list[bytes] = []
        at = 0
        for index in range(len(self)):
            frame = self._frame_with_headers(index)
            parts.append(frame)
            at += len(frame)
            offsets.append(at)
        return b"".join(parts), offsets

    def _frame_with_headers(self, index: int) -> bytes:
        frame = self._frames[self._offsets[index] : self._offsets[index + 1]]
        text = self._headers[index]
        return _add_headers(frame, text) if text else frame

    def _locate(self, records: Sequence[RecordBatch], index: int) -> tuple[RecordBatch, int]:
        sequence = self.base_sequence + index
        record = next(record for record in records if sequence < record.next_sequence)
        return record, sequence - record.base_sequence

    def _frame_alone(
        self, record: RecordBatch, index: int, attempts: int, with_headers: bool
    ) -> tuple[bytes, bytes]:
        message_id, body = b"%016x" % (record.first_id + index), _body(record, index)
        common = _COMMON_HEADER.pack(FrameType.MESSAGE, record.timestamp_ns, min(attempts, _MAX_ATTEMPTS))
        frame = b"%s%s%s%s" % (_FRAME_SIZES[len(body)], common, message_id, body)
        if with_headers and record.metadata and (text := _headers(record)[index]):
            frame = _add_headers(frame, text)
        return message_id, frame

    def take(
        self, index: int, count: int, max_bytes: int, with_headers: bool = False
    ) -> tuple[bytes, memoryview]:
        """Return up to `count` messages from `index` on, at least one, and beyond that at most `max_bytes` of frames.

        Returns:
            The FIN lines of the messages, FINISH_LINE_BYTES each, and their frames.
        """
        layout = self._layout(with_headers)
        if layout is None:
            return self._take_with_headers(index, min(index + count, len(self)), max_bytes)
        frames, offsets = layout
        end = min(index + count, len(offsets) - 1)
        start_byte = offsets[index]
        if offsets[end] - start_byte > max_bytes:
            end = max(index + 1, bisect_right(offsets, start_byte + max_bytes, index + 1, end) - 1)
        lines = self._lines[index * FINISH_LINE_BYTES : end * FINISH_LINE_BYTES]
        return lines, memoryview(frames)[start_byte : offsets[end]]

    def _layout(self, with_headers: bool) -> tuple[bytes, list[int]] | None:
        """Return the frames of all messages, and where each begins, and the last ends; None: they are too large."""
        if self._records is not None:
            self._build(self._records)
        if not with_headers or not self._headers:
            return self._frames, self._offsets
        if self._headers_bytes > MAX_KEPT_HEADERS_BYTES:
            return None
        if self._frames_with_headers is None:
            self._frames_with_headers = self._build_with_headers()
        return self._frames_with_headers

    def end_within(self, index: int, end: int, max_bytes: int, with_headers: bool = False) -> int:
        """Return up to where the frames from `index` on have at most `max_bytes`: at most `end`, or less if unknown.

        `index` itself: the first frame is larger.
        """
        layout = self._layout(with_headers)
        if layout is None:
            return index + (len(self._frame_with_headers(index)) <= max_bytes)
        offsets = layout[1]
        return bisect_right(offsets, offsets[index] + max_bytes, index, end + 1) - 1

    def take_some(
        self, indexes: Sequence[int], max_bytes: int, with_headers: bool = False, *, least: int = 1
    ) -> tuple[bytes, bytes]:
        """As `take`, for any messages in ascending order: as many as fit in `max_bytes`, but at least `least`."""
        layout = self._layout(with_headers)
        first, count = indexes[0], len(indexes)
        if layout is not None and indexes[-1] - first == count - 1:  # consecutive: in one piece
            if not least and layout[1][first + 1] - layout[1][first] > max_bytes:
                return b"", b""
            lines, view = self.take(first, count, max_bytes, with_headers)
            return lines, bytes(view)
        if layout is None:
            parts = [self._frame_with_headers(index) for index in indexes]
        else:
            frames, offsets = layout
            parts = [frames[offsets[index] : offsets[index + 1]] for index in indexes]
        joined, fit = b"".join(parts), len(parts)
        if len(joined) > max_bytes:
            size = fit = 0
            while fit < len(parts) and (fit < least or size + len(parts[fit]) <= max_bytes):
                size += len(parts[fit])
                fit += 1
            joined = joined[:size]
        text, width = self._lines, FINISH_LINE_BYTES
        return b"".join([text[each * width : (each + 1) * width] for each in indexes[:fit]]), joined

    def _take_with_headers(self, index: int, end: int, max_bytes: int) -> tuple[bytes, memoryview]:
        """As `take`, for headers that take too much memory to be kept in frames."""
        parts: list[bytes] = []
        size, at = 0, index
        while at < end:
            frame = self._frame_with_headers(at)
            size += len(frame)
            if parts and size > max_bytes:
                break
            parts.append(frame)
            at += 1
        lines = self._lines[index * FINISH_LINE_BYTES : at * FINISH_LINE_BYTES]
        return lines, memoryview(b"".join(parts))

    def id(self, index: int) -> bytes:
        if self._records is not None:
            record, at = self._locate(self._records, index)
            return b"%016x" % (record.first_id + at)
        start = index * FINISH_LINE_BYTES + FINISH_ID_AT
        return self._lines[start : start + ID_BYTES]

    def timestamp_ns(self, index: int) -> int:
        """Return when a message was published, Unix nanoseconds."""
        if self._records is None:
            (timestamp_ns,) = _TIMESTAMP.unpack_from(self._frames, self._offsets[index] + _TIMESTAMP_OFFSET)
            return int(timestamp_ns)
        return self._locate(self._records, index)[0].timestamp_ns

    def timestamps_ns(self, index: int, count: int) -> list[tuple[int, int]]:
        """Return when `count` messages from `index` on were published: runs of (timestamp, number of messages)."""
        first, last = self.timestamp_ns(index), self.timestamp_ns(index + count - 1)
        if first == last:
            return [(first, count)]
        each = map(self.timestamp_ns, range(index, index + count))
        return [(timestamp_ns, len(list(same))) for timestamp_ns, same in groupby(each)]

    def body(self, index: int) -> bytes:
        if self._records is not None:
            return _body(*self._locate(self._records, index))
        return self._frames[self._offsets[index] + MESSAGE_FRAME_BYTES : self._offsets[index + 1]]

    def bodies(self) -> list[bytes]:
        """Return the bodies of all messages."""
        if self._records is not None:
            self._build(self._records)
        bodies: list[bytes] = []
        frames, start = self._frames, 0
        for end in self._offsets[1:]:
            bodies.append(frames[start + MESSAGE_FRAME_BYTES : end])
            start = end
        return bodies

    @property
    def has_headers(self) -> bool:
        """Whether a message has headers."""
        if self._records is not None:
            self._build(self._records)
        return bool(self._headers)

    def headers(self, index: int) -> str:
        """Return the text of the headers of a message, see `protocol/headers.py`; empty if it has none."""
        if self._records is not None:
            record, at = self._locate(self._records, index)
            return _headers(record)[at]
        return self._headers[index] if self._headers else ""

    def frame(self, index: int, attempts: int, with_headers: bool = False) -> tuple[bytes, bytes]:
        """Return the id of one message, and its frame with this number of attempts."""
        if self._records is not None:
            if self._taken_alone < _TAKEN_ALONE:
                self._taken_alone += 1
                return self._frame_alone(*self._locate(self._records, index), attempts, with_headers)
            self._build(self._records)
        frames, start, end = self._frames, self._offsets[index], self._offsets[index + 1]
        before, after = start + _ATTEMPTS_OFFSET, start + _ATTEMPTS_OFFSET + _ATTEMPTS.size
        number = _ATTEMPTS.pack(min(attempts, _MAX_ATTEMPTS))
        frame = b"%s%s%s" % (frames[start:before], number, frames[after:end])
        if with_headers and self._headers and (text := self._headers[index]):
            frame = _add_headers(frame, text)
        return self.id(index), frame


def _body(record: RecordBatch, index: int) -> bytes:
    messages = record.messages
    start = sum(messages.sizes[:index]) + _SIZE_BYTES * (index + 1)
    return messages.data[start : start + messages.sizes[index]]


def _record_size(record: RecordBatch) -> int:
    """Return about the bytes that a batch holds of a record: with headers, there may be two frames of a message."""
    size, more = len(record.messages.data), len(record.metadata)
    if not more:
        return size
    kept = min(headers_bytes(record.metadata, record.count), MAX_KEPT_HEADERS_BYTES)
    return 2 * size + 2 * more + kept


def _headers(record: RecordBatch) -> Sequence[str]:
    """Return the text of the headers of each message."""
    return headers_in(record.metadata, record.count) or [""] * record.count


def _add_headers(frame: bytes, text: str) -> bytes:
    """Return the frame of a message with its headers."""
    prefix = prefix_of(text)
    head = _FRAME_HEAD.pack(len(frame) - _SIZE_BYTES + len(prefix), FrameType.MESSAGE_WITH_HEADERS)
    return b"%s%s%s%s" % (
        head,
        frame[_FRAME_HEAD.size : MESSAGE_FRAME_BYTES],
        prefix,
        frame[MESSAGE_FRAME_BYTES:],
    )


def make_batches(records: Sequence[RecordBatch]) -> list[Batch]:
    """Return batches of these records, in order, with small neighbours merged."""
    if len(records) == 1:
        return [Batch(records)]
    batches: list[Batch] = []
    group: list[RecordBatch] = []
    messages = size = 0
    for record in records:
        fits = (
            group
            and _follows(record, group[-1])
            and messages + record.count <= MERGE_MESSAGES
            and size + _record_size(record) <= MERGE_BYTES
        )
        if group and not fits:
            batches.append(Batch(group))
            group, messages, size = [], 0, 0
        group.append(record)
        messages += record.count
        size += _record_size(record)
    if group:
        batches.append(Batch(group))
    return batches


def _follows(record: RecordBatch, last: RecordBatch) -> bool:
    """Whether a record may follow another in the same batch."""
    return (
        not record.due_ns
        and not last.due_ns
        and record.base_sequence == last.next_sequence
        # `InFlightBatch` searches ids by bisection, so they must ascend. They descend where the node id was changed.
        and record.first_id >= last.first_id + last.count
    )


def _finish_lines(first_id: int, count: int) -> bytes:
    if count == 1:
        return b"FIN %016x\n" % first_id
    return _before_ids(b"\nFIN ", first_id, count)[1:] + b"\n"


def _before_ids(head: bytes, first_id: int, count: int) -> bytes:
    """Return the ids of `count` messages, 16 hex digits each, each after `head`. Uses one C call per 4096 ids."""
    pieces: list[bytes] = []
    while count:
        index = first_id % _LAST_DIGITS
        some = min(count, _LAST_DIGITS - index)
        digits = _DIGITS[4 * index : 4 * (index + some)]
        pieces.append(digits.replace(b"\n", b"%s%013x" % (head, first_id // _LAST_DIGITS)))
        first_id += some
        count -= some
    return b"".join(pieces)
