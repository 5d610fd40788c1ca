"""The logs that an export reads: where they are, and what planning and reading need of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..client.connection.reconnect import PATIENCE_S
from ..client.connection.tls import TLSFiles
from ..client.errors import RequestRefused
from ..client.reading.batches import Found
from ..client.reading.broker_log import Bounds, BrokerLog, broker_label
from ..log.gaps import Span
from ..secret import NO_SECRET, Secret

_TOPIC_NOT_FOUND = "TOPIC_NOT_FOUND"


class Log(Protocol):
    """The log of one topic in one place, such as a broker or a copy of its data folder.

    Sequences are positions in the log: they increase by 1 with each message and never change.
    """

    def bounds(self, at: str = "latest") -> Bounds:
        """Return the bounds of the log, and the sequence of a position.

        Args:
            at: A position, see docs/how-to/read-and-replay.md.

        Raises:
            NSQError, OSError: The log cannot be read.
        """

    def id_at(self, sequence: int) -> str | None:
        """Return 16 hex digits that identify a message, for a broker its id; None if it is not retained.

        Raises the errors of `bounds`.
        """

    def read(self, span: Span) -> Iterator[Found]:
        """Read the records and the gaps of a span, in order. Raises the errors of `bounds`."""


def is_without_topic(error: Exception) -> bool:
    """Whether a broker answers, and does not have the topic."""
    return isinstance(error, RequestRefused) and error.text == _TOPIC_NOT_FOUND


class ChannelLog(Log, Protocol):
    """A log whose channels have positions, from which an export continues."""

    def open_channel(self, channel: str) -> int:
        """Create the channel if it does not exist, and return its position. Raises the errors of `bounds`."""

    def has_channel(self, channel: str) -> bool:
        """Whether the channel exists. Raises the errors of `bounds`."""

    def move_channel(self, channel: str, sequence: int) -> None:
        """Move a channel durably; its new position may be before `sequence`. Raises the errors of `bounds`."""


@runtime_checkable
class SegmentedLog(Protocol):
    """A log that is read from its files. Tasks that read whole files read least."""

    def starts(self) -> Sequence[int]:
        """Return the first sequence of each file, in order. Raises the errors of `bounds`."""


class LogPlace(Protocol):
    """The place of a log. Can be pickled, compared and hashed; the repr does not show secrets."""

    @property
    def label(self) -> str:
        """The name of the place in the column `broker` and in file names."""

    def open(self) -> Log:
        """Return the log, in the driver or in a task. Raises NSQError or OSError if that fails."""


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """A topic on a broker.

    Attributes:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        patience_s: How long reading waits for an unreachable broker.
        secret: For a broker that requires authentication. If it is a file, tasks read it where they run.
    """

    address: str
    topic: str
    tls: TLSFiles = field(default_factory=TLSFiles)
    patience_s: float = PATIENCE_S
    secret: Secret = NO_SECRET

    @property
    def label(self) -> str:
        return broker_label(self.address)

    def open(self) -> BrokerLog:
        return BrokerLog(self.address, self.topic, self.tls, self.patience_s, self.secret)
