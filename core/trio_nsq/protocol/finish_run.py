"""Finding runs of FIN lines, which are most of what a busy consumer sends."""

import re

from .commands import FINISH_LINE_BYTES

_FIN_LINES = re.compile(rb"(?:FIN [^ \n]{15}[^ \n\r]\n)*+")
_HEX_DIGITS = b"0123456789abcdef"


def finish_run_bytes(lines: bytes) -> int:
    """Return how many bytes at the beginning of `lines` are FIN lines of FINISH_LINE_BYTES each.

    The length of `lines` is a multiple of FINISH_LINE_BYTES. The check takes a few calls, however many lines there are.
    """
    if _are_finish_lines(lines):
        return len(lines)
    count = len(lines) // FINISH_LINE_BYTES
    for column, byte in ((20, b"\n"), (3, b" ")):
        cells = lines[column::FINISH_LINE_BYTES]
        count = min(count, len(cells) - len(cells.lstrip(byte)))
    lines = lines[: count * FINISH_LINE_BYTES]
    if _are_finish_lines(lines):
        return len(lines)
    # An id may contain a space, a line feed or a carriage return: then the line is not a FIN of fixed width.
    run = _FIN_LINES.match(lines)
    return run.end() if run is not None else 0


def _are_finish_lines(lines: bytes) -> bool:
    """Whether all lines are FIN lines with ids of hex digits, as brokers make them."""
    count = len(lines) // FINISH_LINE_BYTES
    return (
        lines[20::FINISH_LINE_BYTES] == b"\n" * count
        and lines[3::FINISH_LINE_BYTES] == b" " * count
        and lines.translate(None, _HEX_DIGITS) == b"FIN \n" * count
    )
