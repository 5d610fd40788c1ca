"""Reads messages that follow their lengths, as `qcli to-file --framing length` writes them."""

from typing import Protocol

from trio_nsq.protocol.bulk import MAX_INT32, split_bodies
from trio_nsq.protocol.messages import read_sizes

_SIZE_BYTES = 4


class MessageSplitter(Protocol):
    """Splits a stream of chunks into messages; see `Splitter` for the members.

    Attributes:
        is_cut: The last input ended within a message.
    """

    seen: int
    empty: int
    too_long: int | None
    max_bytes: int
    is_cut: bool

    @property
    def unfinished_bytes(self) -> int: ...

    def feed(self, chunk: bytes) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


class FrameSplitter:
    """Splits a stream of messages, each after its length, a 4-byte big-endian integer. A `MessageSplitter`."""

    def __init__(self, max_bytes: int) -> None:
        self.seen = 0
        self.empty = 0
        self.too_long: int | None = None
        self.max_bytes = max_bytes
        self.is_cut = False
        self._rest = b""

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of the incomplete message."""
        return len(self._rest)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add a chunk and return the messages that it completes."""
        if self.too_long is not None:
            return []
        data = self._rest + chunk
        sizes: list[int] = []
        end = read_sizes(data, 0, len(data), MAX_INT32, 0, self.max_bytes, sizes)
        if end > len(data):
            end -= _SIZE_BYTES + sizes.pop()
        elif end + _SIZE_BYTES <= len(data):
            self.too_long = self.seen + len(sizes) + 1
        self._rest = data[end:]
        self.seen += len(sizes)
        messages = split_bodies(data, sizes)
        if empty := sizes.count(0):
            self.empty += empty
            messages = [message for message in messages if message]
        return messages

    def end(self) -> list[bytes]:
        """Return nothing: all complete messages were returned. The next `feed` begins another input."""
        self.is_cut = bool(self._rest)
        self._rest = b""
        return []
