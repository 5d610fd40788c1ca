"""Writes data to standard output and diagnostics to standard error, and knows about terminals and pipes."""

import base64
import csv
import io
import json
import math
import os
import select
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from trio_nsq.wording import printable

from .errors import Failure, OutputClosed


def configure_streams() -> None:
    """Let nothing of this process's environment change what is written where; to be called before anything is.

    Data is UTF-8 in every locale: JSON has to be, and commands that write bytes know no other. What is no text, such
    as a path that is not UTF-8, is escaped in a way that JSON understands, too. If standard error is closed,
    diagnostics go nowhere: Python and the libraries would write it into the data.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    if sys.stderr is None:
        # Also what C code writes: no file that is opened later may get the number 2.
        while (fd := os.open(os.devnull, os.O_RDWR)) < 2:
            pass
        if fd > 2:
            os.close(fd)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the process ends)


def print_diagnostic(text: str) -> None:
    """Write a line to standard error. Nothing happens if that is closed.

    The text may hold what brokers and their clients sent: characters that act on a terminal are escaped.
    """
    try:
        print(printable(text, keep="\n\t"), file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass


def silence_library() -> None:
    """Do not print the library's warnings: the command reports what went wrong, once."""
    import logging

    logging.getLogger("trio_nsq").addHandler(logging.NullHandler())


def show_library_warnings() -> None:
    """Print the library's warnings, such as a lost connection, and that it is back."""
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            title = "Note" if record.levelno == logging.INFO else record.levelname.capitalize()
            print_diagnostic(f"{title}: {record.getMessage()}")

    logger = logging.getLogger("trio_nsq")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def write(text: str) -> None:
    """Write text to standard output at once. Raises OutputClosed: the reader is gone. Failure: it cannot be written."""
    if sys.stdout is None:
        raise Failure("Standard output is closed.")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise Failure(f"Cannot write to standard output: {os.strerror(error.errno or 0)}.") from error


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is at this stream; None is one that is closed."""
    return stream is not None and stream.isatty()


def is_live_terminal(stream: TextIO | None) -> bool:
    """Whether this stream is a screen on which a line can be redrawn."""
    return is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "", None)


def no_color() -> bool:
    """Whether the user wants no colours, nor bold nor dim letters (see no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


_STYLES = {"bold": 1, "dim": 2, "red": 31, "yellow": 33}


def styled(style: str, text: str) -> str:
    """Text for a terminal in one of the styles there are, or as it is for none."""
    if not style or no_color():
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


class RawOutput:
    """Standard output as bytes, with nothing kept back.

    Messages are finished once `write` has returned, so nothing may wait in a buffer of ours.
    """

    def __init__(self) -> None:
        if sys.stdout is None:
            raise Failure("Standard output is closed.")
        self._fd = sys.stdout.fileno()
        mode = os.fstat(self._fd).st_mode
        self.never_blocks = stat.S_ISREG(mode)
        """Whether a write takes no longer than the disk does; anything else may wait for a reader for ever."""
        self.is_pipe = stat.S_ISFIFO(mode)

    def write(self, data: bytes) -> None:
        """Write all of it; waits as long as it takes. Raises as `write`."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BrokenPipeError as error:
            raise OutputClosed from error
        except OSError as error:
            raise Failure(f"Cannot write to standard output: {os.strerror(error.errno or 0)}.") from error

    def fileno(self) -> int:
        return self._fd

    def reader_is_gone(self) -> bool:
        """Whether the pipe has no reader any more."""
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def rate(per_second: float) -> str:
    """A number per second for people, such as `1,234` or `0.3`."""
    return f"{per_second:,.1f}" if 0 < per_second < 10 else f"{per_second:,.0f}"


def size(count: float) -> str:
    """Bytes for people, such as `1.5 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(4, int(math.log(count, 1024)))
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def json_lines(records: Iterable[Mapping[str, object]]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def body_field(body: bytes) -> dict[str, str]:
    """A message's body as part of a JSON object: `body`, or `body_base64` if it is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def table_value(value: object) -> object:
    """How a value of a JSON record is written in a table: nothing for null, `true` and `false`, the rest as it is."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value


def delimited(rows: Iterable[Sequence[object]], delimiter: str) -> str:
    """Rows as CSV (`,`) or TSV (a tab), quoted where a value needs it."""
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def plain_table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Rows as aligned text, the first `left` columns to the left and the others to the right.

    Names are strangers': characters that act on a terminal are escaped.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)
