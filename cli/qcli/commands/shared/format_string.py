r"""Format strings for messages, such as `%t %o %s\n`, with the letters of kcat where it has them.

A format string becomes a bytes template, which Python fills in for each message, so that bodies are written unchanged.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import pack
from typing import Any, NamedTuple

import click

from trio_nsq.protocol.message_json import rfc3339

from ...framework.options import Decorator, all_of, given_flags, option, output_format
from ...framework.params import ESCAPE, unescape
from .messages import body_of, headers_text

FLAG = "--format-string"
UNKNOWN_SEQUENCE = -1
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageColumns:
    """Messages as columns. A column is a sequence with an item for each message, or one value for all.

    Attributes:
        channels: Empty if a message has no channel.
        sequences: -1 if unknown.
        dues_ns: Until when each is deferred, Unix nanoseconds; 0: not deferred.
        brokers: Addresses.
        headers: Values by names.
    """

    bodies: Sequence[bytes]
    ids: Sequence[bytes]
    topics: Any
    channels: Any = b""
    sequences: Any = UNKNOWN_SEQUENCE
    timestamps_ns: Any
    attempts: Any = 0
    dues_ns: Any = 0
    brokers: Any = b""
    headers: Sequence[Mapping[str, str]] = ()


def columns_of(records: Sequence[Mapping[str, Any]], broker: str) -> MessageColumns:
    """Return messages that are JSON records; `broker` is the address if they do not have it."""
    return MessageColumns(
        bodies=[body_of(record) for record in records],
        ids=[str(record["id"]).encode() for record in records],
        topics=[str(record["topic"]).encode() for record in records],
        channels=[str(record.get("channel") or "").encode() for record in records],
        sequences=[int(record["sequence"]) for record in records],
        timestamps_ns=[int(record["timestamp_ns"]) for record in records],
        attempts=[int(record["attempts"]) for record in records],
        dues_ns=[int(record["due_ns"] or 0) for record in records],
        brokers=[str(record.get("broker") or broker).encode() for record in records],
        headers=[record.get("headers") or {} for record in records],
    )


def _each(column: Any, change: Callable[[Any], object]) -> Any:
    """Return a column with every value changed."""
    return change(column) if isinstance(column, int | bytes) else [change(value) for value in column]


def _time(time_ns: int) -> bytes:
    return (rfc3339(time_ns) or "").encode()


class FormatLetter(NamedTuple):
    """What a letter stands for.

    Attributes:
        text: For the help.
        column: Returns its column.
    """

    text: str
    column: Callable[[MessageColumns], Any]


LETTERS = {
    "s": FormatLetter("body", lambda messages: messages.bodies),
    "S": FormatLetter("size of the body in bytes", lambda messages: _each(messages.bodies, len)),
    "R": FormatLetter(
        "size of the body, as 4 bytes in big-endian order",
        lambda messages: [pack(">i", len(body)) for body in messages.bodies],
    ),
    "t": FormatLetter("topic", lambda messages: messages.topics),
    "o": FormatLetter(
        "sequence in the topic (kcat: offset); -1: unknown, for messages of a channel",
        lambda messages: messages.sequences,
    ),
    "T": FormatLetter(
        "time of publishing, Unix milliseconds",
        lambda messages: _each(messages.timestamps_ns, lambda time_ns: time_ns // _NS_PER_MS),
    ),
    "n": FormatLetter("time of publishing, Unix nanoseconds", lambda messages: messages.timestamps_ns),
    "r": FormatLetter("time of publishing, RFC 3339", lambda messages: _each(messages.timestamps_ns, _time)),
    "d": FormatLetter(
        "until when it is deferred, RFC 3339; empty: not deferred",
        lambda messages: _each(messages.dues_ns, lambda due_ns: _time(due_ns) if due_ns else b""),
    ),
    "i": FormatLetter("id: 16 hex digits", lambda messages: messages.ids),
    "a": FormatLetter("attempts: 1 at the first delivery, 0 from a log", lambda messages: messages.attempts),
    "c": FormatLetter("channel; empty from a log", lambda messages: messages.channels),
    "b": FormatLetter("address of the broker", lambda messages: messages.brokers),
    "h": FormatLetter(
        "headers, such as a=1,b=2; empty: none",
        lambda messages: (
            [headers_text(each).encode() for each in messages.headers] if any(messages.headers) else b""
        ),
    ),
}
_NOT_IN_NSQ = {"k": "key", "K": "key", "p": "partition"}
_TOKEN = re.compile(rf"%(?P<letter>.?)|{ESCAPE}|(?P<bad>\\.?)", re.DOTALL)


class FormatString:
    """A format string.

    Args:
        text: As the user wrote it.

    Raises BadParameter: a letter or an escape is unknown.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[bytes | FormatLetter] = []  # literal bytes, and letters
        end = 0
        for token in _TOKEN.finditer(text):
            self._parts.append(_bytes(text[end : token.start()]))
            end = token.end()
            if token["bad"] is not None:
                unescape(token["bad"])  # raises
            elif (letter := token["letter"]) is None:
                self._parts.append(unescape(token[0]))
            else:
                self._parts.append(b"%" if letter == "%" else _letter(letter))
        self._parts.append(_bytes(text[end:]))

    def render(self, messages: MessageColumns, count: int) -> bytes:
        """Return the text of the first messages."""
        template, columns = b"", []
        for part in self._parts:
            value = part if isinstance(part, bytes) else part.column(messages)
            if isinstance(value, int):
                template += b"%d" % value
            elif isinstance(value, bytes):
                template += value.replace(b"%", b"%%")
            else:
                template += b"%d" if value and isinstance(value[0], int) else b"%b"
                columns.append(value)
        if not columns:
            return (template % ()) * count
        rows: Iterable[tuple[object, ...]] = islice(zip(*columns, strict=True), count)
        return b"".join(map(template.__mod__, rows))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _letter(letter: str) -> FormatLetter:
    if letter in LETTERS and letter:
        return LETTERS[letter]
    if letter in _NOT_IN_NSQ:
        raise click.BadParameter(f"%{letter}: messages of NSQ have no {_NOT_IN_NSQ[letter]}.")
    if not letter:
        raise click.BadParameter("% at the end: write %% for a percent sign.")
    known = " ".join(f"%{each}" for each in LETTERS)
    raise click.BadParameter(f"%{letter} is unknown. Known are {known}, and %% for a percent sign.")


def format_string_option(section: str) -> Decorator:
    """`-f`, `--format-string`; None if it is not given. See `refuse_other_formats`."""
    return option(
        section,
        "-f",
        FLAG,
        type=FormatString,
        metavar="FORMAT",
        help=r"Write this for each message, as kcat does: '%t %o %T %s\n'. See 'qcli help format-strings'.",
    )


def message_formats(section: str, record: type) -> Decorator:
    """`--format` and `--format-string` of a command that shows messages, as records of this type."""
    about = (
        "table: shorten bodies on a terminal; times are UTC. json: write an object per line. raw: write bodies "
        "unchanged, with line feeds."
    )
    return all_of(
        output_format(about, "table", "json", "raw", records=[record]), format_string_option(section)
    )


def refuse_other_formats(*names: str) -> None:
    """Raises UsageError if one of these parameters is on the command line, beside a format string."""
    if others := given_flags(*names):
        raise click.UsageError(f"{others[0]} and {FLAG} exclude each other.")
