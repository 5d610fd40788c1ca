"""Reads input without blocking the event loop, and splits each chunk into messages."""

import fcntl
import os
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import trio

from trio_nsq.protocol.bulk import MAX_INT32, split_bodies
from trio_nsq.protocol.messages import read_sizes

from ...framework.errors import Failure

READ_BYTES = 256 * 1024
PIPE_BYTES = 1024 * 1024
"""The limit for unprivileged users on Linux. With the default, 64 KiB, the writer waits four times as often."""


class Input:
    """Reads a file descriptor; the name is for messages.

    Attributes:
        read_bytes: The most bytes to read at a time.
    """

    def __init__(self, fd: int, name: str, read_bytes: int = READ_BYTES) -> None:
        self.name = name
        self._fd = fd
        self.read_bytes = read_bytes
        mode = os.fstat(fd).st_mode
        self._may_block = not stat.S_ISREG(mode)
        if stat.S_ISFIFO(mode) and read_bytes == READ_BYTES:
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # above this user's limit; reading is only a little slower

    async def read(self) -> bytes:
        """Wait for input and return it; empty at the end. A cancellation loses no data.

        Raises Failure: the input cannot be read.
        """
        try:
            while True:
                await self._ready()
                try:
                    # This returns at once, even if the descriptor is blocking. Its flags do not change, because other
                    # processes may share them.
                    return os.read(self._fd, self.read_bytes)
                except BlockingIOError:
                    pass  # another process read the data first
        except OSError as error:
            raise Failure(f"Cannot read {self.name}: {os.strerror(error.errno or 0)}.") from error

    def close(self) -> None:
        """Close the descriptor, unless it is standard input."""
        if self._fd > 2:
            os.close(self._fd)

    async def _ready(self) -> None:
        if self._may_block:
            try:
                await trio.lowlevel.wait_readable(self._fd)
            except PermissionError:
                self._may_block = False  # epoll refuses files that are always ready, such as /dev/null
            else:
                return
        await trio.lowlevel.checkpoint()


async def open_input(path: str, read_bytes: int = READ_BYTES) -> Input:
    """Open a file, or standard input for `-`. Raises Failure: it cannot be opened."""
    if path == "-":
        if sys.stdin is None:
            raise Failure("Standard input is closed.")
        return Input(sys.stdin.fileno(), "standard input", read_bytes)
    try:
        # In a thread because opening a named pipe waits for a writer.
        fd = await trio.to_thread.run_sync(os.open, path, os.O_RDONLY, abandon_on_cancel=True)
    except OSError as error:
        raise Failure(f"Cannot open {path}: {os.strerror(error.errno or 0)}.") from error
    return Input(fd, path, read_bytes)


def size_of(paths: Iterable[str]) -> int | None:
    """Return how many bytes there are to read, `-` being standard input; None: an input is not a regular file."""
    total = 0
    for path in paths:
        try:
            if path == "-":
                found = os.fstat(0)
                begun = os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(found.st_mode) else 0
            else:
                found, begun = Path(path).stat(), 0
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        total += max(0, found.st_size - begun)
    return total


class MessageSplitter(ABC):
    """Splits a stream of chunks into messages.

    Attributes:
        max_bytes: The maximum size of a message.
        seen: The number of messages so far, including empty ones.
        too_long: The number of the first message, counted from 1, that is too long; None: there is none. The splitter
            returns no messages from there on.
        is_cut: The last input ended within a message.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.seen = 0
        self.too_long: int | None = None
        self.is_cut = False

    @property
    @abstractmethod
    def unfinished_bytes(self) -> int:
        """The bytes of the incomplete message."""

    @abstractmethod
    def feed(self, chunk: bytes) -> list[bytes]:
        """Add a chunk and return the messages that it completes."""

    @abstractmethod
    def end(self) -> list[bytes]:
        """Return the message that the end of the input completes, if any. The next `feed` begins another input."""


class Splitter(MessageSplitter):
    """Splits at a delimiter. Other bytes do not change, except with `strip_cr`. An end of the input ends a message.

    Args:
        delimiter: Ends a message; at least one byte. Bytes after the last delimiter are a message too.
        max_bytes: The maximum size of a message.
        strip_cr: Remove one carriage return before each line feed and at the end. For the delimiter line feed.
    """

    def __init__(self, delimiter: bytes, max_bytes: int, *, strip_cr: bool = False) -> None:
        super().__init__(max_bytes)
        self._delimiter = delimiter
        self._strip_cr = strip_cr
        self._held_cr = (
            b""  # the last byte of a chunk, if it is a carriage return that a line feed may follow
        )
        # The incomplete message: parts without a delimiter, and an edge that may begin one.
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._edge = b""

    @property
    def unfinished_bytes(self) -> int:
        return self._parts_bytes + len(self._edge) + len(self._held_cr)

    def feed(self, chunk: bytes) -> list[bytes]:
        if self.too_long is not None:
            return []
        if self._strip_cr:
            chunk = self._held_cr + chunk
            self._held_cr = b"\r" if chunk.endswith(b"\r") else b""
            chunk = chunk[: len(chunk) - len(self._held_cr)].replace(b"\r\n", b"\n")
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
        begun_bytes = self.unfinished_bytes - len(self._held_cr)
        if self.too_long is None and begun_bytes >= self.max_bytes + len(self._delimiter):
            self.too_long = self.seen + 1
        return messages

    def end(self) -> list[bytes]:
        last = b"".join([*self._parts, self._edge])
        self._parts.clear()
        self._parts_bytes, self._edge, self._held_cr = 0, b"", b""
        return self._accept([last]) if last and self.too_long is None else []

    def _accept(self, messages: list[bytes]) -> list[bytes]:
        """Check and count messages."""
        if max(map(len, messages)) > self.max_bytes:
            place = next(index for index, message in enumerate(messages) if len(message) > self.max_bytes)
            self.too_long = self.seen + place + 1
            messages = messages[:place]
        self.seen += len(messages)
        return messages


_SIZE_BYTES = 4


class FrameSplitter(MessageSplitter):
    """Splits a stream of messages, each after its length, a 4-byte big-endian integer."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._rest = b""

    @property
    def unfinished_bytes(self) -> int:
        return len(self._rest)

    def feed(self, chunk: bytes) -> list[bytes]:
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
        return split_bodies(data, sizes)

    def end(self) -> list[bytes]:
        # All complete messages were returned.
        self.is_cut = bool(self._rest)
        self._rest = b""
        return []
