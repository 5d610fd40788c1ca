"""The broker's log, in nsqd's format."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from trio_nsq.wording import printable

from ..output import print_diagnostic


class NsqdFormatter(logging.Formatter):
    """`{prefix}YYYY/MM/DD hh:mm:ss.uuuuuu LEVEL: text`, in local time.

    Args:
        prefix: What every line begins with.

    Attributes:
        prefix: The same; the broker tells it to those who ask over HTTP.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever strangers sent; a traceback, if there is one, is put below by the caller."""
        time = datetime.fromtimestamp(record.created).strftime("%Y/%m/%d %H:%M:%S.%f")
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        return f"{self.prefix}{time} {level}: {printable(record.message)}"

    def formatException(self, ei: Any) -> str:
        """The traceback, whose last line may repeat what a stranger sent."""
        return printable(super().formatException(ei), keep="\n")


class _StderrHandler(logging.Handler):
    """Standard error may be a pipe whose reader is gone; the broker does not stop for that."""

    def emit(self, record: logging.LogRecord) -> None:
        print_diagnostic(self.format(record))


def log_to_stderr(level: int, prefix: str) -> None:
    """Send what the library logs at this level and above to standard error."""
    handler = _StderrHandler()
    handler.setFormatter(NsqdFormatter(prefix))
    logger = logging.getLogger("trio_nsq")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
