"""The decoded commands of the NSQ protocol, and fast checks for runs of FIN lines.

FIN lines are most of a busy consumer's data.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from .bulk import FINISH_ID_AT, FINISH_LINE_BYTES
from .errors import CommandError
from .limits import MAX_LINE_BYTES
from .messages import MessageSet

_FIN_LINES: Final = re.compile(rb"(?:FIN [^ \n]{15}[^ \n\r]\n)*+")
_HEX_DIGITS: Final = b"0123456789abcdef"

PublishVerb = Literal["PUB", "MPUB", "DPUB", "HPUB"]


@dataclass(frozen=True, slots=True)
class Identify:
    """IDENTIFY; `body` is its JSON, not decoded."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Auth:
    """AUTH with a secret."""

    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUB to a channel."""

    topic: str
    channel: str


@dataclass(init=False, slots=True)
class Publish:
    """MPUB, DPUB, HPUB, or one or more consecutive PUBs to the same topic; `defer_ms` is 0 except for DPUB and HPUB.

    Attributes:
        commands: The number of commands, each of which gets its own answer.
        first: The number that its producer gave to the first message; -1: it has no number.
        headers: Of HPUB, the text of the headers of each message, see `headers.py`; empty for the others.
        rest: Of a large MPUB, further sets of messages after `messages`: each fits into a record of the log.
    """

    verb: PublishVerb
    topic: str
    messages: MessageSet
    defer_ms: int
    commands: int
    first: int
    headers: Sequence[str]
    rest: Sequence[MessageSet]

    def __init__(
        self,
        verb: PublishVerb,
        topic: str,
        messages: MessageSet,
        defer_ms: int = 0,
        commands: int = 1,
        first: int = -1,
        headers: Sequence[str] = (),
        rest: Sequence[MessageSet] = (),
    ) -> None:
        self.verb = verb
        self.topic = topic
        self.messages = messages
        self.defer_ms = defer_ms
        self.commands = commands
        self.first = first
        self.headers = headers
        self.rest = rest

    @property
    def count(self) -> int:
        """The number of messages."""
        count = len(self.messages.sizes)
        for messages in self.rest:
            count += len(messages.sizes)
        return count

    @property
    def sets(self) -> list[MessageSet]:
        """All messages, in order."""
        return [self.messages, *self.rest]


@dataclass(frozen=True, slots=True)
class Claim:
    """PRODUCER: the client becomes the only writer of its producer to a topic, and asks for the last number."""

    topic: str


@dataclass(init=False, slots=True)
class Ready:
    """RDY count, already checked against max_rdy_count."""

    count: int

    def __init__(self, count: int) -> None:
        self.count = count


@dataclass(init=False, slots=True)
class Finish:
    """One or more consecutive FIN commands."""

    lines: bytes
    """Lines of FINISH_LINE_BYTES each. The ids may have characters that are not hex digits."""

    def __init__(self, lines: bytes) -> None:
        self.lines = lines

    @property
    def ids(self) -> list[bytes]:
        """The message ids, 16 bytes each."""
        return finish_line_ids(self.lines)


@dataclass(init=False, slots=True)
class Requeue:
    """REQ; the delay is at most max_req_timeout.

    Not in nsqd: without `counts_attempt`, the delivery does not count as an attempt.
    """

    id: bytes
    delay_ms: int
    counts_attempt: bool

    def __init__(self, id: bytes, delay_ms: int, counts_attempt: bool = True) -> None:  # noqa: A002 - its name
        self.id = id
        self.delay_ms = delay_ms
        self.counts_attempt = counts_attempt


@dataclass(init=False, slots=True)
class Touch:
    """TOUCH one message."""

    id: bytes

    def __init__(self, id: bytes) -> None:  # noqa: A002 - the attribute's name
        self.id = id


@dataclass(frozen=True, slots=True)
class StartClose:
    """CLS."""


@dataclass(frozen=True, slots=True)
class NoOperation:
    """NOP."""


Command = (
    Identify
    | Auth
    | Subscribe
    | Publish
    | Claim
    | Ready
    | Finish
    | Requeue
    | Touch
    | StartClose
    | NoOperation
)


class LineTooLong(CommandError):
    """A command line exceeds 16 KiB. Like nsqd, the broker closes the connection without an error frame."""

    def __init__(self) -> None:
        super().__init__("E_INVALID", f"command line longer than {MAX_LINE_BYTES} bytes")


def finish_line_ids(lines: bytes) -> list[bytes]:
    """Return the ids in FIN lines of FINISH_LINE_BYTES each, at least one."""
    return lines[FINISH_ID_AT:-1].split(b"\nFIN ")


def finish_run_bytes(lines: bytes) -> int:
    """Return how many leading bytes of `lines` are FIN lines of FINISH_LINE_BYTES each.

    The length of `lines` must be a multiple of FINISH_LINE_BYTES. The number of calls does not depend on the number of
    lines.
    """
    if _are_finish_lines(lines):
        return len(lines)
    count = len(lines) // FINISH_LINE_BYTES
    for column, byte in ((FINISH_LINE_BYTES - 1, b"\n"), (FINISH_ID_AT - 1, b" ")):
        cells = lines[column::FINISH_LINE_BYTES]
        count = min(count, len(cells) - len(cells.lstrip(byte)))
    lines = lines[: count * FINISH_LINE_BYTES]
    if _are_finish_lines(lines):
        return len(lines)
    # If an id contains a space, a line feed or a carriage return, the line is not a FIN of fixed width.
    run = _FIN_LINES.match(lines)
    return run.end() if run is not None else 0


def _are_finish_lines(lines: bytes) -> bool:
    """Whether all lines are FIN lines whose ids are hex digits, as all brokers' ids."""
    count = len(lines) // FINISH_LINE_BYTES
    return (
        lines[FINISH_LINE_BYTES - 1 :: FINISH_LINE_BYTES] == b"\n" * count
        and lines[FINISH_ID_AT - 1 :: FINISH_LINE_BYTES] == b" " * count
        and lines.translate(None, _HEX_DIGITS) == b"FIN \n" * count
    )
