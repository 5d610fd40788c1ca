"""The commands of the NSQ protocol, as the broker reads them, and the error for a line that is too long."""

from dataclasses import dataclass, field
from typing import Literal

from .errors import CommandError
from .limits import MAX_LINE_BYTES
from .messages import MessageSet

FINISH_LINE_BYTES = 21
"""A FIN line as every client sends it: one space, an id, and a line feed after it."""

PublishVerb = Literal["PUB", "MPUB", "DPUB"]


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


@dataclass(slots=True)
class Publish:
    """PUB, MPUB or DPUB; `defer_ms` is 0 except for DPUB."""

    verb: PublishVerb
    topic: str
    messages: MessageSet
    defer_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """RDY count, already checked against max_rdy_count."""

    count: int


@dataclass(slots=True)
class Finish:
    """FIN, one or several consecutive ones.

    Attributes:
        lines: FINISH_LINE_BYTES each. Their ids may have characters that are not hex digits.
    """

    lines: bytes

    @property
    def ids(self) -> list[bytes]:
        """The message ids, 16 bytes each."""
        return finish_line_ids(self.lines)


@dataclass(frozen=True, slots=True)
class Requeue:
    """REQ; its delay is at most max_req_timeout."""

    id: bytes
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Touch:
    """TOUCH one message."""

    id: bytes


@dataclass(frozen=True, slots=True)
class StartClose:
    """CLS."""


@dataclass(frozen=True, slots=True)
class NoOperation:
    """NOP."""


Command = Identify | Auth | Subscribe | Publish | Ready | Finish | Requeue | Touch | StartClose | NoOperation


class LineTooLong(CommandError):
    """A command line past 16 KiB: the connection ends without an error frame, as nsqd ends it."""

    def __init__(self) -> None:
        super().__init__("E_INVALID", f"command line longer than {MAX_LINE_BYTES} bytes")


def finish_line_ids(lines: bytes) -> list[bytes]:
    """Return the ids in FIN lines of FINISH_LINE_BYTES each, at least one."""
    return lines[4:-1].split(b"\nFIN ")
