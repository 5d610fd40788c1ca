"""Reads input without blocking the event loop, and splits it into messages: one call for each chunk."""

import fcntl
import os
import stat
import sys

import trio

from ...framework.errors import Failure

READ_BYTES = 256 * 1024
PIPE_BYTES = 1024 * 1024
"""What Linux lets anyone set. The usual 64 KiB make the writer of the pipe wait for us four times as often."""


class Input:
    """Bytes from a descriptor that is open for reading, at most `read_bytes` at a time; the name is for people."""

    def __init__(self, fd: int, name: str, read_bytes: int = READ_BYTES) -> None:
        self.name = name
        self._fd = fd
        self._read_bytes = read_bytes
        mode = os.fstat(fd).st_mode
        self._may_block = not stat.S_ISREG(mode)
        if stat.S_ISFIFO(mode) and read_bytes == READ_BYTES:
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # more than this user may have; only a little slower without

    async def read(self) -> bytes:
        """What there is to read; waits for the first byte. Nothing at the end. If cancelled, nothing is lost.

        Raises Failure: it cannot be read.
        """
        try:
            while True:
                await self._ready()
                try:
                    # On a blocking descriptor too this returns at once now, and its flags, which it may share with
                    # other processes, stay as they are.
                    return os.read(self._fd, self._read_bytes)
                except BlockingIOError:
                    pass  # another process reads from it, too, and was faster
        except OSError as error:
            raise Failure(f"Cannot read {self.name}: {os.strerror(error.errno or 0)}.") from error

    def close(self) -> None:
        """Close the descriptor, but for standard input, which is not ours alone."""
        if self._fd > 2:
            os.close(self._fd)

    async def _ready(self) -> None:
        if self._may_block:
            try:
                await trio.lowlevel.wait_readable(self._fd)
            except PermissionError:
                self._may_block = False  # epoll's word for files that are always ready, such as /dev/null
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
