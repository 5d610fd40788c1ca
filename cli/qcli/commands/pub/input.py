"""Reads input without blocking the event loop, with no more threads and tasks than needed."""

from __future__ import annotations

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
    """Bytes from a descriptor.

    Args:
        fd: Open for reading.
        name: For people.
        read_bytes: At most this many at a time.
    """

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

        Raises:
            Failure: It cannot be read.
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
    """Open a file, or standard input for `-`.

    Raises:
        Failure: It cannot be opened.
    """
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
