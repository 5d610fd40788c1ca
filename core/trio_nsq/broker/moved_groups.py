"""Groups of moved messages, as one broker sends them to another: see `Move`.

     0               4                8         8+header
    +---------------+----------------+---------+-------------------+---------------+- - -
    |  header size  |  messages size |  header |  (size, body)*    |  header size  |
    +---------------+----------------+---------+-------------------+---------------+- - -

The sizes are unsigned 32-bit integers, big-endian. The header is a JSON object: `first` and `last`, the sequences of
the first and the last message at the source; `count`; `due_ns`, Unix nanoseconds by the system clock, absent if the
messages are due; `channel`, absent if all channels get them; `dead_letters` and `headers`, see `record_metadata`,
absent if there are none. Groups are in ascending order.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct
from typing import Any

from ..api.answers import Origin
from ..log import RecordBatch
from ..log.record_metadata import dead_letters_json, headers_in, one_if_all_same, origins
from ..log.records import MAX_RECORD_BYTES, MAX_RECORD_MESSAGES
from ..protocol import MessageSet, is_valid_name
from ..protocol.headers import is_text
from ..protocol.limits import Limits
from ..protocol.messages import walk_messages
from ..protocol.untrusted_json import decode_json
from .state.move import Run

_SIZES = Struct(">II")
_MAX_NUMBER = 2**63
_HEADER_BYTES = 100
"""About the size of a header with its sizes."""
_MAX_HEADER_BYTES = 4 * 1024 * 1024
"""More than the origins and the headers of the messages of one record take."""
_MAX_LETTERS_BYTES = 64 * 1024
"""More than the origins take."""
_KEYS = {"first", "last", "count", "due_ns", "channel", "dead_letters", "headers"}
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(slots=True)
class MovedGroup:
    """Messages that the target stores in one record.

    Attributes:
        first, last: Sequences at the source. The last is the group's number; between them, sequences may be missing.
        due_ns: Earliest delivery time, Unix nanoseconds; 0: now.
        channel: The only channel that gets the messages; None: all channels of the topic.
        letters: Their origins, see `record_metadata`; None if they are not dead letters.
        headers: Those of each message, or one text for all, see `record_metadata`; empty if they have none.
    """

    first: int
    last: int
    messages: MessageSet
    due_ns: int = 0
    channel: str | None = None
    letters: dict[str, Any] | None = None
    headers: Sequence[str] = ()

    def encode(self) -> bytes:
        head: dict[str, Any] = {"first": self.first, "last": self.last, "count": len(self.messages)}
        if self.due_ns:
            head["due_ns"] = self.due_ns
        if self.channel is not None:
            head["channel"] = self.channel
        if self.letters is not None:
            head["dead_letters"] = self.letters
        if self.headers:
            head["headers"] = self.headers
        header = json.dumps(head, separators=(",", ":")).encode()
        return _SIZES.pack(len(header), len(self.messages.data)) + header + self.messages.data


# ---------------------------------------------------------------------- at the target


def decode_groups(body: bytes, limits: Limits) -> Iterator[MovedGroup]:
    """Yield the groups of a request. Raises ValueError; CommandError if a message is too large."""
    at, last = 0, -1
    while at < len(body):
        if len(body) - at < _SIZES.size:
            raise ValueError("the last group is incomplete")
        header_size, size = _SIZES.unpack_from(body, at)
        at += _SIZES.size
        if len(body) - at < header_size + size:
            raise ValueError("the last group is incomplete")
        if header_size > _MAX_HEADER_BYTES:
            raise ValueError(f"a group's header has more than {_MAX_HEADER_BYTES} bytes")
        header = decode_json(body[at : at + header_size])
        at += header_size
        group = _decode_group(header, body[at : at + size], limits)
        at += size
        if group.first <= last:
            raise ValueError("the groups are not in ascending order")
        last = group.last
        yield group


def _decode_group(header: Any, data: bytes, limits: Limits) -> MovedGroup:
    if not isinstance(header, dict):
        raise ValueError("a group's header is not a JSON object")
    if not header.keys() <= _KEYS:
        raise ValueError("a group's header has an unknown key")
    first, last, count = (_number(header, name) for name in ("first", "last", "count"))
    due_ns = _number(header, "due_ns") if "due_ns" in header else 0
    channel, letters = header.get("channel"), header.get("dead_letters")
    if channel is not None and not (isinstance(channel, str) and is_valid_name(channel)):
        raise ValueError("a group's channel is not a valid name")
    if not 0 < count <= last - first + 1:
        raise ValueError("a group's sequences and count do not match")
    if count > 1 and (count > MAX_RECORD_MESSAGES or len(data) > MAX_RECORD_BYTES):
        raise ValueError("a group does not fit in one record")
    sizes: list[int] = []
    end = walk_messages(data, 0, len(data), count, limits, sizes)
    if len(sizes) != count or end != len(data):
        raise ValueError("a group's messages do not match its count")
    if letters is not None:
        _check_letters(letters, count)
    headers = header.get("headers", ())
    if headers and not (
        isinstance(headers, list) and len(headers) in (1, count) and all(map(is_text, headers))
    ):
        raise ValueError("a group's headers are not those of its messages")
    return MovedGroup(first, last, MessageSet(data, sizes), due_ns, channel, letters, headers or ())


def _number(header: Mapping[str, Any], name: str) -> int:
    value = header.get(name)
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"a group's {name} is not a number from 0 to 9223372036854775807")
    return value


def _check_letters(letters: Any, count: int) -> None:
    """Raise ValueError if no broker writes such origins: lists of dead letters show them, and requeue uses them."""
    encoded = json.dumps({"dead_letters": letters}).encode()
    if len(encoded) > _MAX_LETTERS_BYTES:
        raise ValueError(f"a group's dead_letters have more than {_MAX_LETTERS_BYTES} bytes")
    try:
        found = origins(encoded)
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError("a group's dead_letters are not origins of messages") from exc
    if len(found) != count or not all(map(_is_origin, found)):
        raise ValueError("a group's dead_letters are not origins of its messages")


def _is_origin(origin: Origin) -> bool:
    return (
        all(isinstance(name, str) and is_valid_name(name) for name in (origin["topic"], origin["channel"]))
        and isinstance(origin["id"], str)
        and _ID.fullmatch(origin["id"]) is not None
        and all(
            type(number) is int and 0 <= number < _MAX_NUMBER
            for number in (origin["sequence"], origin["attempts"], origin["timestamp_ns"])
        )
    )


# ---------------------------------------------------------------------- at the source


class GroupBuilder:
    """Collects messages, in ascending sequence, into groups that each fit in one record.

    Args:
        ahead_ns: How far the system clock is ahead of the broker's, by which messages are due.

    Attributes:
        count, size: The messages collected, and about the bytes of their groups.
        groups: The number of groups.
    """

    def __init__(self, ahead_ns: int) -> None:
        self._ahead_ns = ahead_ns
        self.count: int = 0
        self.size: int = 0
        self.groups: int = 0
        self._done: list[bytes] = []
        self._pieces: list[bytes] = []
        self._sizes: list[int] = []
        self._headers: list[str] = []
        self._bytes = 0
        self._group: MovedGroup | None = None

    def add(self, record: RecordBatch, runs: Sequence[Run]) -> None:
        """Add messages of a record, which is within the limits; `runs` are within it, ascending."""
        found, base = origins(record.metadata) if record.metadata else [], record.base_sequence
        headers = headers_in(record.metadata, record.count) if record.metadata else ()
        for start, end, broker_due_ns, channel in runs:
            due_ns = max(1, broker_due_ns + self._ahead_ns) if broker_due_ns else 0
            texts = headers[start - base : end - base]
            self._add(record, start, end, due_ns, channel, found[start - base : end - base], texts)

    def _add(
        self,
        record: RecordBatch,
        start: int,
        end: int,
        due_ns: int,
        channel: str | None,
        found: Sequence[Origin],
        headers: Sequence[str],
    ) -> None:
        data, sizes = _cut(record, start - record.base_sequence, end - record.base_sequence)
        letters = dead_letters_json(found) if found else None
        size = len(data) + sum(map(len, headers))
        group = self._group
        if (
            group is None
            or letters is not None
            or (group.due_ns, group.channel, group.letters) != (due_ns, channel, None)
            or len(self._sizes) + len(sizes) > MAX_RECORD_MESSAGES
            or self._bytes + size > MAX_RECORD_BYTES
        ):
            self._end_group()
            self.groups += 1
            self.size += _HEADER_BYTES
            self._group = group = MovedGroup(start, end - 1, MessageSet(b"", []), due_ns, channel, letters)
        group.last = end - 1
        self._pieces.append(data)
        self._sizes += sizes
        self._headers += headers or [""] * len(sizes)
        self._bytes += size
        self.count += len(sizes)
        self.size += size

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.messages = MessageSet(b"".join(self._pieces), self._sizes)
            self._group.headers = one_if_all_same(self._headers)
            self._done.append(self._group.encode())
        self._pieces, self._sizes, self._headers, self._bytes = [], [], [], 0

    def take(self) -> bytes:
        """Return all groups, encoded."""
        self._end_group()
        self._group = None
        return b"".join(self._done)


def _cut(record: RecordBatch, start: int, end: int) -> tuple[bytes, list[int]]:
    """Return the messages [start, end) of a record, and their sizes."""
    messages = record.messages
    if (start, end) == (0, len(messages)):
        return messages.data, messages.sizes
    offsets = [0, *accumulate(size + 4 for size in messages.sizes[:end])]
    return messages.data[offsets[start] : offsets[end]], messages.sizes[start:end]
