"""The log of a server on standard error: text in nsqd's format, or a JSON object on each line."""

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from trio_nsq.text.wording import printable

from ..output import print_diagnostic
from .setting import LOG_LEVELS

LIBRARY = "trio_nsq"
"""The logger above all loggers of the library."""


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
    """Writes to standard error. If that is a closed pipe, the broker continues without a log."""

    def emit(self, record: logging.LogRecord) -> None:
        print_diagnostic(self.format(record))


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
            print_diagnostic(text)

    return log_line
