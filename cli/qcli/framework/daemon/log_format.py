"""The log of a server on standard error: text in nsqd's format, or a JSON object on each line."""

import fcntl
import json
import logging
import os
import select
import stat
import sys
import termios
import time
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

from trio_nsq.text.wording import count_of, printable, was_or_were

from ..output import print_diagnostic
from .setting import LOG_LEVELS

LIBRARY = "trio_nsq"
"""The logger above all loggers of the library."""
_PATIENCE_S = 1.0
_LOOK_S = 0.01


class NsqdFormatter(logging.Formatter):
    """`{prefix}YYYY/MM/DD hh:mm:ss.uuuuuu LEVEL: text`, in local time.

    Attributes:
        prefix: The first characters of every line; `GET /config/log_prefix` reads it.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self._second, self._shown_second = -1, ""  # the last one that was formatted: most lines repeat it

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format one line, with control characters escaped. The caller appends the traceback, if there is one."""
        second = int(record.created)
        if second != self._second:
            self._second, self._shown_second = (
                second,
                time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(second)),
            )
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        us = int((record.created - second) * 1e6)
        return f"{self.prefix}{self._shown_second}.{us:06} {level}: {printable(record.message)}"

    def formatException(self, ei: Any) -> str:
        """Format the traceback, with control characters escaped: its last line may repeat what a client sent."""
        return printable(super().formatException(ei), keep="\n")


class JsonFormatter(logging.Formatter):
    """A JSON object on one line.

    Its keys are `time` (RFC 3339, UTC), `level` (a word of `--log-level`), `logger`, `message`, and `traceback` if
    there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format one line. JSON escapes control characters that a client sent."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": next((word for word, level in LOG_LEVELS.items() if level >= record.levelno), "fatal"),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _StderrHandler(logging.Handler):
    """Writes to standard error. If that is a closed pipe, the broker continues without a log.

    A write to a full pipe that nobody reads, or to a terminal that is stopped, would block the broker. So a line is
    left out if there is no room for it within `_PATIENCE_S`. Until there is room, the next lines are left out at once.
    Then a line says how many are missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self.format(record))

    def write(self, text: str) -> None:
        """Write a line."""
        with self.lock or nullcontext():
            if self._left_out:
                lines = f"{count_of(self._left_out, 'line')} of the log {was_or_were(self._left_out)}"
                note = f"{lines} left out: nobody read them"
                record = logging.LogRecord(LIBRARY, logging.WARNING, "", 0, note, (), None)
                text = f"{self.format(record)}\n{text}"
            if _has_room(len(text.encode(errors="replace")) + 1, 0 if self._left_out else _PATIENCE_S):
                self._left_out = 0
                print_diagnostic(text)
            else:
                self._left_out += 1


def _has_room(size: int, patience_s: float) -> bool:
    """Wait until standard error takes a line of `size` bytes at once. Returns False if it does not in time."""
    try:
        fd = sys.stderr.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
    except (OSError, ValueError, AttributeError):
        return True  # it is closed, or is no file
    over_s = time.monotonic() + patience_s
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while True:
        left_s = max(0.0, over_s - time.monotonic())
        ready = poll.poll(left_s * 1000)
        # A pipe that is ready takes this much; one that is empty takes more.
        if ready and (size <= select.PIPE_BUF or not is_pipe or not _unread_bytes(fd)):
            return True
        if not left_s:
            return False
        if ready:
            time.sleep(_LOOK_S)


def _unread_bytes(pipe: int) -> int:
    unread = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, unread)
    return unread[0]


def log_to_stderr(level: int, prefix: str, form: str) -> Callable[[str], None]:
    """Write the library's records of this level and above to standard error.

    Args:
        level: The lowest level that is logged, of `logging`.
        prefix: The first characters of every line of a text log.
        form: `text` or `json`.

    Returns:
        A function that writes a line at any level: unchanged in text, as a record of level info in JSON.
    """
    # No line shows these, and to find them takes half of the time of a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # the documented way not to look for the caller
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else NsqdFormatter(prefix))
    logger = logging.getLogger(LIBRARY)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False

    def log_line(text: str) -> None:
        if form == "json":
            handler.handle(logging.LogRecord(logger.name, logging.INFO, "", 0, "%s", (text,), None))
        else:
            handler.write(text)

    return log_line
