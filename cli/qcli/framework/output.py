"""Writes data to standard output and diagnostics to standard error; terminals and pipes."""

import csv
import io
import math
import os
import select
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from trio_nsq.protocol import message_json
from trio_nsq.protocol.message_json import rfc3339
from trio_nsq.text.wording import printable

from .errors import Failure, OutputClosed

TIME_SUFFIX = "_ns"


def with_times(record: Mapping[str, object]) -> dict[str, object]:
    """Return a JSON record with an RFC 3339 time after each Unix time: `due` after `due_ns`; null stays null.

    Every field whose name ends with `_ns` is a Unix time, also in objects inside the record.
    """
    result: dict[str, object] = {}
    for name, value in record.items():
        result[name] = with_times(value) if isinstance(value, dict) else value
        if name.endswith(TIME_SUFFIX):
            result[name.removesuffix(TIME_SUFFIX)] = rfc3339(value) if isinstance(value, int) else None
    return result


def configure_streams() -> None:
    """Make output independent of the environment. Call this before any output.

    Data is UTF-8 in every locale, as JSON requires. Bytes that are not UTF-8, as in a path, are escaped as in JSON.
    If standard error is closed, diagnostics are discarded: otherwise Python and libraries might write them into a
    data file that gets descriptor 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    if sys.stderr is None:
        # C code writes to descriptor 2 directly: no file that is opened later may get this number.
        while (fd := os.open(os.devnull, os.O_RDWR)) < 2:
            pass
        if fd > 2:
            os.close(fd)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the process ends)


def print_diagnostic(text: str) -> None:
    """Write a line to standard error, if it is open.

    The text may contain data of brokers and their clients, so control characters are escaped.
    """
    try:
        # One write: several processes of a broker write lines to the same file.
        sys.stderr.write(printable(text, keep="\n\t") + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def end_echoed_line() -> None:
    """End the line into which a terminal has echoed ^C, so that the next text begins a line."""
    if is_terminal(sys.stderr):
        print_diagnostic("")


def report_none(what: str, where: object = "", hint: str = "") -> None:
    """Say that there is nothing to show: standard output stays empty, which programs expect of an empty list.

    Args:
        what: The plural noun.
        where: The topic or channel that has none; empty: all.
        hint: A sentence that follows.
    """
    print_diagnostic(f"There are no {what}{f' in {where}' if where else ''}.{f' {hint}' if hint else ''}")


def silence_library() -> None:
    """Do not print the library's warnings: the command itself reports the error."""
    import logging

    logging.getLogger("trio_nsq").addHandler(logging.NullHandler())


def show_library_warnings(*, notes: bool = True) -> None:
    """Print the library's warnings, and its notes, such as a lost connection and the reconnect."""
    import logging

    _print_logs_of("trio_nsq", logging.INFO if notes else logging.WARNING)


def show_security_warnings() -> None:
    """Print the library's warnings about secrets, also after `silence_library`. May be called again.

    Its notes are for people who try a secret: they are printed on a terminal only.
    """
    import logging

    from trio_nsq.access.secret import SECURITY_LOGGER

    _print_logs_of(SECURITY_LOGGER, logging.INFO if is_terminal(sys.stderr) else logging.WARNING)


def _print_logs_of(name: str, level: int) -> None:
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            title = "Note" if record.levelno == logging.INFO else record.levelname.capitalize()
            print_diagnostic(f"{title}: {record.getMessage()}")

    logger = logging.getLogger(name)
    logger.handlers[:] = [Handler()]
    logger.setLevel(level)
    logger.propagate = False


def write(text: str) -> None:
    """Write text to standard output and flush it. Raises OutputClosed (the pipe has no reader) or Failure."""
    if sys.stdout is None:
        raise Failure("Standard output is closed.")
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # half a surrogate pair in JSON, or a terminal without Unicode
            encoding = sys.stdout.encoding
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise Failure(f"Cannot write to standard output: {os.strerror(error.errno or 0)}.") from error


def write_lines(lines: Iterable[str]) -> None:
    """Write lines of text that may contain data of brokers and their clients: control characters are escaped.

    Raises as `write`.
    """
    write("".join([printable(line, keep="\t") + "\n" for line in lines]))


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether this stream is a terminal; None is a closed stream."""
    return stream is not None and stream.isatty()


def is_live_terminal(stream: TextIO | None) -> bool:
    """Return whether this stream is a terminal on which a line can be redrawn."""
    return is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "", None)


def no_color() -> bool:
    """Return whether the user turned off colours, bold and dim text (see no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


_STYLES = {"bold": 1, "dim": 2, "reverse": 7, "red": 31, "yellow": 33}


def styled(style: str, text: str) -> str:
    """Return text for a terminal in a style of `_STYLES`; unchanged if the style is empty.

    `reverse` marks a place, so it is no colour that a user can turn off.
    """
    if not style or (no_color() and style != "reverse"):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


class RawOutput:
    """Standard output as bytes, unbuffered.

    Messages are finished once `write` has returned, so there must be no buffer.
    """

    def __init__(self) -> None:
        if sys.stdout is None:
            raise Failure("Standard output is closed.")
        self._fd = sys.stdout.fileno()
        mode = os.fstat(self._fd).st_mode
        self.never_blocks = stat.S_ISREG(mode)
        """Whether a write waits for a disk only; another write may wait for a reader without limit."""
        self.is_pipe = stat.S_ISFIFO(mode)

    def write(self, data: bytes) -> None:
        """Write all data; blocks until the reader takes it. Raises as the function `write`."""
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
        """Return whether the reader of the pipe has closed it."""
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def rate(per_second: float) -> str:
    """Format a rate for people, such as `1,234` or `0.3`."""
    return f"{per_second:,.1f}" if 0 < per_second < 10 else f"{per_second:,.0f}"


def size(count: float) -> str:
    """Format bytes for people, such as `1.5 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(4, int(math.log(count, 1024)))
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def with_counts(text: str, *counts: tuple[int, str]) -> str:
    """Return a report with the counts that are not 0; `{}` in the words after it stands for the count."""
    return "; ".join([text, *(words.format(f"{count:,}") for count, words in counts if count)])


def json_lines(records: Iterable[Mapping[str, object]]) -> str:
    """Return one JSON object per line, with an RFC 3339 time beside each Unix time (see `with_times`)."""
    return message_json.json_lines(map(with_times, records))


def table_value(value: object) -> object:
    """Return the value of a JSON record for a table: null is empty, booleans are `true` or `false`, lists are words.

    Control characters of brokers and their clients are escaped.
    """
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return printable(" ".join(map(str, value)))
    if isinstance(value, str):
        return printable(value)
    return str(value).lower() if isinstance(value, bool) else value


def write_records(records: Iterable[Mapping[str, object]], keys: Sequence[str], form: str) -> None:
    """Write flat records as `json`, `csv` or `tsv`. Raises as `write`."""
    if form == "json":
        write(json_lines(records))
        return
    rows = [[table_value(record[key]) for key in keys] for record in records]
    write(delimited([keys, *rows], "," if form == "csv" else "\t"))


def delimited(rows: Iterable[Sequence[object]], delimiter: str) -> str:
    """Return rows as CSV (`,`) or TSV (a tab), with quotes where needed."""
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def plain_table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Return rows as aligned text: the first `left` columns to the left, the others to the right.

    Cells may contain data of clients, so control characters are escaped.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if left == len(widths) > 0:
        widths[-1] = 0  # nothing follows: no need to fill up short texts beside a long one
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)
