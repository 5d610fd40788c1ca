"""From bytes as they are read to messages: the synchronous part of `pub`.

A chunk of input is split by one call; nothing here runs once per message.
"""

from __future__ import annotations


class Splitter:
    """Splits a stream of bytes at a delimiter, in whatever pieces it comes. Bytes are kept as they are.

    Args:
        delimiter: Ends a message; at least one byte. What follows the last one is a message too, unless empty.
        max_bytes: Of one message.

    Attributes:
        seen: Messages found so far, empty ones included.
        empty: How many of them were empty; those are not handed out, for NSQ has no empty messages.
        too_long: The place of a message, counted from 1, that is longer than allowed; None as long as there is none.
            Nothing is handed out from there on.
    """

    def __init__(self, delimiter: bytes, max_bytes: int) -> None:
        self.seen = 0
        self.empty = 0
        self.too_long: int | None = None
        self._delimiter = delimiter
        self._max_bytes = max_bytes
        # The unfinished message: parts that hold no delimiter, and an edge that may be the beginning of one.
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._edge = b""

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the message whose end has not been seen."""
        return self._parts_bytes + len(self._edge)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take in bytes and return the messages that they complete."""
        if self.too_long is not None:
            return []
        *complete, rest = (self._edge + chunk).split(self._delimiter)
        messages: list[bytes] = []
        if complete:
            complete[0] = b"".join([*self._parts, complete[0]])
            self._parts.clear()
            self._parts_bytes = 0
            messages = self._accept(complete)
        edge_at = max(0, len(rest) - len(self._delimiter) + 1)
        if edge_at:
            self._parts.append(rest[:edge_at])
            self._parts_bytes += edge_at
        self._edge = rest[edge_at:]
        if self.too_long is None and self.unfinished_bytes >= self._max_bytes + len(self._delimiter):
            self.too_long = self.seen + 1
        return messages

    def end(self) -> list[bytes]:
        """The message that the end of the input ends, if there is one. The next `feed` begins another input."""
        last = b"".join([*self._parts, self._edge])
        self._parts.clear()
        self._parts_bytes, self._edge = 0, b""
        return self._accept([last]) if last and self.too_long is None else []

    def _accept(self, messages: list[bytes]) -> list[bytes]:
        """Check and count messages, and leave out empty ones."""
        if max(map(len, messages)) > self._max_bytes:
            place = next(index for index, message in enumerate(messages) if len(message) > self._max_bytes)
            self.too_long = self.seen + place + 1
            messages = messages[:place]
        self.seen += len(messages)
        empty = messages.count(b"")
        if empty:
            self.empty += empty
            messages = [message for message in messages if message]
        return messages
