"""Read a topic's log on a broker over HTTP, with blocking calls (docs/how-to/read-and-replay.md)."""

import ssl
from collections.abc import Iterator
from typing import NamedTuple, Self

from ...access.secret import NO_SECRET, Secret
from ...api import broker as api
from ...api.answers import LogPosition
from ...api.request import run
from ...event_loop.retries import PATIENCE_S, Retry
from ...log.gaps import Span
from ...log.records import RecordBatch
from ...protocol.errors import NSQError
from ..connection.tls import TLSFiles
from ..errors import BrokerUnreachable, NotABroker, RequestRefused
from ..http.broker_http import BrokerHTTP
from .log_stream import Found, LogStream

_RECEIVE_BYTES = 1024 * 1024


class LogReplaced(NSQError):
    """The log is not the expected one: the topic was deleted and recreated, or its last messages were lost."""


class Bounds(NamedTuple):
    """The bounds of a log.

    Attributes:
        first: The oldest retained sequence.
        end: The sequence of the next message.
        size_bytes: The size on disk.
        at: The sequence of the requested position.
        bytes_from_at: The size on disk from `at` on, estimated; None: unknown, from an older broker.
        incarnation: The identity of the log, 32 hex digits; None: unknown, see `LogMark`.
    """

    first: int
    end: int
    size_bytes: int
    at: int
    bytes_from_at: int | None = None
    incarnation: str | None = None

    @classmethod
    def of(cls, found: LogPosition) -> Self:
        """Return the bounds in an answer to `api.position`."""
        return cls(
            found["first_sequence"],
            found["next_sequence"],
            found["bytes"],
            found["at_sequence"],
            found.get("bytes_from_at"),
            found.get("incarnation"),
        )

    @property
    def mean_bytes(self) -> float:
        """The mean size of a message; 0 if there are none."""
        return self.size_bytes / (self.end - self.first) if self.end > self.first else 0.0

    @property
    def bytes_ahead(self) -> int:
        """The approximate size of the messages from `at` on."""
        if self.bytes_from_at is None:
            return round(self.mean_bytes * (self.end - self.at))
        return self.bytes_from_at


def broker_label(address: str) -> str:
    """Return the label of a broker in files: its address without the scheme."""
    return address.partition("://")[2] or address


class BrokerLog:
    """The log of one topic on one broker. Every request uses a new connection.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        patience_s: How long `read` waits for an unreachable broker.
        secret: For a broker that requires authentication.
        incarnation: The identity of the log, 32 hex digits; reading another one fails. None: not checked.
    """

    def __init__(
        self,
        address: str,
        topic: str,
        tls: TLSFiles | ssl.SSLContext | None = None,
        patience_s: float = PATIENCE_S,
        secret: Secret = NO_SECRET,
        incarnation: str | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._address = address
        self._topic = topic
        self._patience_s = patience_s
        self._http = BrokerHTTP(address, tls, secret)

    # ------------------------------------------------------------------ the log

    def bounds(self, at: str = "latest") -> Bounds:
        """Request the bounds of the log, and the sequence of a position.

        Args:
            at: A position, see docs/how-to/read-and-replay.md.

        Raises:
            BrokerUnreachable, RequestRefused: The broker does not answer, or has no such topic.
        """
        return Bounds.of(self._http.ask(api.position(self._topic, at)))

    def id_at(self, sequence: int) -> str | None:
        """Return the id of a message, 16 hex digits; None if it is not retained. Raises the errors of `bounds`."""
        for found in self._read_once(Span(sequence, sequence + 1)):
            if isinstance(found, RecordBatch):
                return found.id_of(sequence)
        return None

    def read(self, span: Span) -> Iterator[Found]:
        """Read the records and the gaps of a span, in order.

        If the connection is lost, reading continues over a new one.

        Raises:
            BrokerUnreachable: The broker was unreachable for longer than `patience_s`.
            RequestRefused: The topic was deleted.
            LogReplaced: The log ends before the span, or is another one.
            RawStreamError: The received data is corrupt.
        """
        at = span.first
        retry = Retry(self._patience_s)
        while at < span.end:
            try:
                for found in self._read_once(Span(at, span.end)):
                    at = found.next_sequence
                    retry.reset()
                    yield found
            except BrokerUnreachable:
                if not retry.pause():
                    raise

    def _read_once(self, span: Span) -> Iterator[Found]:
        request = api.log(self._topic, span.first, span.end, "raw")
        with self._http.stream(request.method, request.path, request.params, is_endless=True) as answer:
            try:
                stream = LogStream(self._topic, answer.headers.get, span)
            except ValueError:
                raise NotABroker(self._address) from None
            self._check_incarnation(stream.incarnation)
            if stream.ends is not None and stream.ends < span.end:
                raise LogReplaced(
                    f"topic {self._topic} of the broker at {self._address} ends before message {stream.ends}, "
                    f"and had message {span.end - 1}: it was deleted and recreated, or lost its last messages"
                )
            while data := answer.read1(_RECEIVE_BYTES):
                yield from run(stream.receive(data), self._http.ask)
            stream.finish()
        yield from run(stream.missing(), self._http.ask)

    def _check_incarnation(self, found: str | None) -> None:
        if None not in (self._incarnation, found) and self._incarnation != found:
            raise self._replaced()

    def _replaced(self) -> LogReplaced:
        return LogReplaced(
            f"topic {self._topic} of the broker at {self._address} is not the one that was planned: another "
            "broker has this address now, or the topic was deleted and recreated"
        )

    # ------------------------------------------------------------------ a channel of the topic

    def open_channel(self, channel: str) -> int:
        """Create the channel if it does not exist, and return its position. Raises the errors of `bounds`."""
        self._http.ask(api.act("create", self._topic, channel))
        return self.position_of(channel)

    def position_of(self, channel: str) -> int:
        """Return the position of an existing channel. Raises the errors of `bounds`."""
        return self._http.ask(api.seek(self._topic, channel, "latest", dry_run=True))["from_sequence"]

    def has_channel(self, channel: str) -> bool:
        """Return whether the channel exists. Raises the errors of `bounds`."""
        topics = self._http.ask(api.stats(self._topic, channel))["topics"]
        return any(each["channel_name"] == channel for topic in topics for each in topic["channels"])

    def create_topic(self) -> None:
        """Create the topic if it does not exist. Raises the errors of `bounds`."""
        self._http.ask(api.act("create", self._topic))

    def first_unfinished(self, channel: str) -> int:
        """Create the channel if it does not exist, and return the sequence of its first unfinished message.

        It is before the channel's position if messages before that are in flight, deferred or requeued. Raises the
        errors of `bounds`.
        """
        high = self.open_channel(channel)
        if not self._skipped_by_move(channel, high):
            return high
        low = min(self.bounds().first, high)
        while low < high:
            middle = (low + high + 1) // 2
            if self._skipped_by_move(channel, middle):
                high = middle - 1
            else:
                low = middle
        return low

    def _skipped_by_move(self, channel: str, sequence: int) -> int:
        """Return how many unfinished messages a channel has before a sequence."""
        return self._http.ask(api.seek(self._topic, channel, str(sequence), dry_run=True))["skipped"]

    def is_paused(self, channel: str) -> bool:
        """Return whether the topic or the channel is paused; False if there is none. Raises the errors of `bounds`."""
        topics = self._http.ask(api.stats(self._topic, channel))["topics"]
        return any(each.get("paused") for topic in topics for each in (topic, *topic["channels"]))

    def drops_messages(self) -> bool:
        """Return whether the topic drops messages that are too old, or its oldest ones when it is full.

        Raises the errors of `bounds`.
        """
        found = self._http.ask(api.settings(self._topic))
        return bool(found.get("ttl_ms")) or found.get("when_full") == "drop-oldest"

    def move_channel(self, channel: str, sequence: int, incarnation: str | None = None) -> None:
        """Move a channel durably; its new position may be before `sequence`.

        Args:
            incarnation: The log that was read up to there; None: the one that was given to this object.

        Raises the errors of `bounds`, and LogReplaced if the log is another one: its messages would be passed.
        """
        try:
            self._http.ask(
                api.seek(self._topic, channel, str(sequence), incarnation=incarnation or self._incarnation)
            )
        except RequestRefused as exc:
            if not exc.text.startswith("OTHER_LOG"):
                raise
            raise self._replaced() from exc
