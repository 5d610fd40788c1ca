"""The logs that an export reads: where they are, and what planning and reading need of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, runtime_checkable

from ..access.secret import NO_SECRET, Secret
from ..client.connection.tls import TLSFiles
from ..client.reading.broker_log import Bounds, BrokerLog, broker_label
from ..client.reading.log_stream import Found
from ..event_loop.retries import PATIENCE_S
from ..log.gaps import Span
from ..log.positions import sequence_of


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


class ChannelLog(Log, Protocol):
    """A log whose channels have positions, from which an export continues."""

    def open_channel(self, channel: str) -> int:
        """Create the channel if it does not exist, and return its position. Raises the errors of `bounds`."""

    def has_channel(self, channel: str) -> bool:
        """Whether the channel exists. Raises the errors of `bounds`."""

    def move_channel(self, channel: str, sequence: int, incarnation: str | None = None) -> None:
        """Move a channel durably; its new position may be before `sequence`. Raises the errors of `bounds`.

        Args:
            incarnation: The log that was read up to there; None: the one that was opened.
        """


@runtime_checkable
class SegmentedLog(Protocol):
    """A log that is read from its files. Tasks that read whole files read least."""

    def starts(self) -> Sequence[int]:
        """Return the first sequence of each file, in order. Raises the errors of `bounds`."""


def starts_of(log: Log) -> Sequence[int]:
    """Return where the files of a log start; empty if a broker reads them."""
    return log.starts() if isinstance(log, SegmentedLog) else ()


@runtime_checkable
class DamagedLog(Protocol):
    """A log of which newer messages may exist that cannot be read."""

    @property
    def damage(self) -> str:
        """Why newer messages are not read, a sentence without its period; empty if nothing is damaged."""


def damage_of(log: Log) -> str:
    """Return `DamagedLog.damage`, as of the last answer of the log."""
    return log.damage if isinstance(log, DamagedLog) else ""


def resolve(log: Log, position: str) -> tuple[Bounds, int]:
    """Return the bounds of a log, and the sequence of a position; a given sequence need not be in the log.

    Raises the errors of `Log.bounds`.
    """
    bounds, given = log.bounds(position), sequence_of(position)
    return bounds, bounds.at if given is None else given


class LogPlace(Protocol):
    """The place of a log. Can be pickled, compared and hashed; the repr does not show secrets."""

    @property
    def where(self) -> str:
        """Where the log is: the default label. Differs from place to place."""

    @property
    def label(self) -> str:
        """The name of the log in the column `broker` and in file names: where it was found first."""

    def named(self, label: str, incarnation: str | None) -> Self:
        """Return the same place of a log that has this label and identity; None: it is unknown."""

    def open(self) -> Log:
        """Return the log, in the driver or in a task. Raises NSQError or OSError if that fails."""


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """A topic on a broker.

    Attributes:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        patience_s: How long reading waits for an unreachable broker.
        secret: For a broker that requires authentication. If it is a file, tasks read it where they run.
        name: The label of the log, if it was found at another address first.
        incarnation: Its identity, so that no task reads another log at this address; None: unknown.
    """

    address: str
    topic: str
    tls: TLSFiles = field(default_factory=TLSFiles)
    patience_s: float = PATIENCE_S
    secret: Secret = NO_SECRET
    name: str = ""
    incarnation: str | None = None

    @property
    def where(self) -> str:
        return broker_label(self.address)

    @property
    def label(self) -> str:
        return self.name or self.where

    def named(self, label: str, incarnation: str | None) -> "BrokerPlace":
        return replace(self, name=label, incarnation=incarnation)

    def open(self) -> BrokerLog:
        return BrokerLog(self.address, self.topic, self.tls, self.patience_s, self.secret, self.incarnation)
