"""Writes the audit log to a file or standard output, in a thread of its own."""

import errno
import logging
import os
from collections import deque

import trio

from ..protocol.errors import StartupError
from .audit import AuditLog

logger: logging.Logger = logging.getLogger("trio_nsq.access")

STDOUT = "-"
RETRY_S = 1.0
"""The delay before a failed write is repeated. Meanwhile lines wait in the `AuditLog`, as many as it keeps."""
CLOSE_TIMEOUT_S = 5.0

_MODE = 0o600


class AuditFile:
    """The file. It is blocking; one thread at a time may use it, except for `put`.

    Args:
        target: A path, or `-` for standard output. A new file gets mode 0600; the mode of an existing one stays.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._fd = self._open()
        self._put: deque[bytes] = deque()  # thread-safe
        self._unwritten = b""  # begins with a whole line
        self._torn = 0  # bytes of this first line that are in the file already

    @property
    def unwritten_lines(self) -> int:
        """The number of lines that a failed `write` has left."""
        return b"".join([self._unwritten, *self._put]).count(b"\n")

    def put(self, lines: bytes) -> None:
        """Give lines to the next `write`; any thread may call this at any time."""
        self._put.append(lines)

    def write(self) -> None:
        """Write the lines that were put, after those that a failed call has left.

        Raises OSError: a part is left, for the next call.
        """
        while self._put:
            self._unwritten += self._put.popleft()
        while self._unwritten:
            written = self._torn + os.write(self._fd, memoryview(self._unwritten)[self._torn :])
            end = self._unwritten.rfind(b"\n", 0, written) + 1
            self._unwritten = self._unwritten[end:]
            self._torn = written - end

    def reopen(self) -> None:
        """Open the path again: a log rotation has moved the file. Raises OSError: the previous file stays open."""
        fd = self._open()
        self.close()
        self._fd = fd
        self._torn = 0  # the new file gets the whole line

    def close(self) -> None:
        """Close the file, except standard output."""
        if self._target != STDOUT:
            os.close(self._fd)

    def _open(self) -> int:
        if self._target == STDOUT:
            return 1
        # O_NONBLOCK: a named pipe without a reader is an error, and does not wait for one.
        fd = os.open(
            self._target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, _MODE
        )
        os.set_blocking(fd, True)
        return fd


class AuditWriter:
    """Writes the lines of an audit log as they are recorded.

    The thread has its own limiter: a slow audit file delays no publish. A file that cannot be written does not stop the
    server: the failure is logged, and the writer tries again.

    Args:
        target: A path, `-` for standard output, or empty for no audit log.
        close_timeout_s: How long the last lines may take at the end of the server.

    Raises:
        StartupError: The file cannot be opened.

    Attributes:
        log: Where to record events.
        error: Why the last write failed; empty after a success.
    """

    def __init__(self, target: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._close_timeout_s = close_timeout_s
        self.log: AuditLog = AuditLog(enabled=bool(target), clock_s=trio.current_time)
        self.error: str = ""
        self._target = target
        try:
            self._file = AuditFile(target) if target else None
        except OSError as exc:
            raise StartupError(f"--audit-log: cannot write {target}: {_reason(exc)}") from exc
        self._changed = trio.Event()
        self._reopens = False
        self._turn = trio.Lock()
        self._threads = trio.CapacityLimiter(1)
        self.log.on_change = self._wake

    def _wake(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Write lines until cancelled. Without an audit log, return at once."""
        if self._file is None:
            return
        while True:
            with trio.move_on_after(self.log.seconds_to_summary()):
                await self._changed.wait()
            self._changed = trio.Event()
            await self._write(self._file)
            if self.error:
                await trio.sleep(RETRY_S)
                self._wake()

    async def reopen(self) -> None:
        """Open the file again soon, for log rotation: rename the file, then call this. No line is lost."""
        self._reopens = True
        self._wake()

    async def aclose(self) -> None:
        """Write the last lines, and close the file. Lines that cannot be written now are lost, and logged."""
        if self._file is None:
            return
        self.log.finish()
        with trio.move_on_after(self._close_timeout_s) as waiting:
            await self._write(self._file, finish=True)
        if waiting.cancelled_caught:  # the thread still uses the file
            logger.error("the audit log %s: the last lines could not be written in time", self._target)
            return
        if lost := self._file.unwritten_lines:
            logger.error("the audit log %s: %d lines are lost", self._target, lost)
        self._file.close()

    async def _write(self, file: AuditFile, *, finish: bool = False) -> None:
        """Write all lines, until a write fails.

        Args:
            finish: Also wait for the thread of a call that was cancelled.
        """
        async with self._turn:
            while True:
                reopens, self._reopens = self._reopens, False
                # After a failure the log keeps its lines, because it limits their number. Otherwise the file has them
                # at once: a cancellation must not lose them.
                lines = b"" if self.error else self.log.take()
                file.put(lines)
                if not (lines or reopens or self.error or finish):
                    return
                finish = False
                failure = await trio.to_thread.run_sync(
                    self._write_now, file, reopens, limiter=self._threads, abandon_on_cancel=True
                )
                if failure and failure != self.error:
                    logger.error("cannot write the audit log %s: %s; trying again", self._target, failure)
                elif self.error and not failure:
                    logger.warning("the audit log %s can be written again", self._target)
                self.error = failure
                if failure:
                    return

    def _write_now(self, file: AuditFile, reopens: bool) -> str:
        """In the thread. Returns the reason of a failed write; empty after a success."""
        if reopens:
            try:
                file.reopen()
            except OSError as exc:
                logger.error(
                    "cannot open the audit log %s again: %s; the previous file stays in use",
                    self._target, _reason(exc),
                )  # fmt: skip
        try:
            file.write()
        except OSError as exc:
            return _reason(exc)
        return ""


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or errno.EIO)
