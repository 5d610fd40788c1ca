"""Read a topic's log on a broker over HTTP, with blocking calls (docs/how-to/read-and-replay.md)."""

import ssl
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from ...log.gaps import Span, gaps
from ...log.raw import RawStreamReader
from ...log.records import RecordBatch
from ...protocol.errors import NSQError
from ...secret import NO_SECRET, Secret
from ..connection.reconnect import PATIENCE_S, Retry
from ..connection.tls import TLSFiles
from ..errors import BrokerUnreachable, NotABroker
from ..http.broker_http import BrokerHTTP
from .batches import Found, batches_and_gaps, has_gaps

_RECEIVE_BYTES = 1024 * 1024

_T = TypeVar("_T")


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
    """

    first: int
    end: int
    size_bytes: int
    at: int
    bytes_from_at: int | None = None

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
        patience_s: How long `read` and `patiently` wait for an unreachable broker.
        secret: For a broker that requires authentication.
    """

    def __init__(
        self,
        address: str,
        topic: str,
        tls: TLSFiles | ssl.SSLContext | None = None,
        patience_s: float = PATIENCE_S,
        secret: Secret = NO_SECRET,
    ) -> None:
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
        names = ("first_sequence", "next_sequence", "bytes", "at_sequence")
        found = self._request_json("GET", "/topic/bounds", {"at": at})
        ahead = self._numbers_in(found, "bytes_from_at") if "bytes_from_at" in found else []
        return Bounds(*self._numbers_in(found, *names), *ahead)

    def id_at(self, sequence: int) -> str | None:
        """Return the id of a message, 16 hex digits; None if it is not retained. Raises the errors of `bounds`."""
        for found in self._read_once(Span(sequence, sequence + 1)):
            if isinstance(found, RecordBatch):
                return f"{found.first_id:016x}"
        return None

    def read(self, span: Span) -> Iterator[Found]:
        """Read the records and the gaps of a span, in order.

        If the connection is lost, reading continues over a new one.

        Raises:
            BrokerUnreachable: The broker was unreachable for longer than `patience_s`.
            RequestRefused: The topic was deleted.
            LogReplaced: The log ends before the span.
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

    def patiently(self, ask: Callable[[], _T]) -> _T:
        """Call `ask`, again while the broker is unreachable; return its result.

        Raises:
            BrokerUnreachable: The broker was unreachable for longer than `patience_s`.
        """
        retry = Retry(self._patience_s)
        while True:
            try:
                return ask()
            except BrokerUnreachable:
                if not retry.pause():
                    raise

    def _read_once(self, span: Span) -> Iterator[Found]:
        params = {"topic": self._topic, "format": "raw", "from": str(span.first), "until": str(span.end)}
        with self._http.stream("GET", "/topic/read", params) as answer:
            try:
                kept_from, ends = (
                    int(answer.headers.get(name, ""))
                    for name in ("X-NSQ-First-Sequence", "X-NSQ-End-Sequence")
                )
            except ValueError:
                raise NotABroker(self._address) from None
            if ends < span.end:
                raise LogReplaced(
                    f"topic {self._topic} of the broker at {self._address} ends before message {ends}, "
                    f"and had message {span.end - 1}: it was deleted and recreated, or lost its last messages"
                )
            decoder = RawStreamReader()
            at = span.first
            while data := answer.read1(_RECEIVE_BYTES):
                batches = [
                    batch
                    for batch in decoder.receive_data(data)
                    if at < batch.next_sequence and batch.base_sequence < span.end
                ]
                if has_gaps(batches, at):
                    kept_from = self._kept_from(kept_from)
                for found in batches_and_gaps(batches, at, span.end, kept_from):
                    yield found
                    at = found.next_sequence
            decoder.end()
        if at < span.end:
            yield from gaps(at, span.end, self._kept_from(kept_from))

    def _kept_from(self, before: int) -> int:
        """Return the oldest retained sequence now: retention may have deleted more while reading."""
        return max(before, self.bounds().first)

    # ------------------------------------------------------------------ a channel of the topic

    def open_channel(self, channel: str) -> int:
        """Create the channel if it does not exist, and return its position. Raises the errors of `bounds`."""
        self._http.post("/channel/create", {"topic": self._topic, "channel": channel})
        params = {"channel": channel, "to": "latest", "dry_run": "true"}
        return self._numbers("POST", "/channel/seek", params, "from_sequence")[0]

    def has_channel(self, channel: str) -> bool:
        """Return whether the channel exists. Raises the errors of `bounds`."""
        params = {"format": "json", "topic": self._topic, "channel": channel, "include_clients": "false"}
        found = self._http.request_json("GET", "/stats", params)
        try:
            return any(
                each["channel_name"] == channel
                for topic in found["topics"] or []
                for each in topic["channels"] or []
            )
        except (ValueError, KeyError, TypeError):
            raise NotABroker(self._address) from None

    def create_topic(self) -> None:
        """Create the topic if it does not exist. Raises the errors of `bounds`."""
        self._http.post("/topic/create", {"topic": self._topic})

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
        params = {"channel": channel, "to": str(sequence), "dry_run": "true"}
        return self._numbers("POST", "/channel/seek", params, "skipped")[0]

    def is_paused(self, channel: str) -> bool:
        """Return whether the topic or the channel is paused; False if there is none. Raises the errors of `bounds`."""
        params = {"format": "json", "topic": self._topic, "channel": channel, "include_clients": "false"}
        found = self._http.request_json("GET", "/stats", params)
        try:
            return any(
                each["paused"]
                for topic in found["topics"] or []
                for each in (topic, *(topic["channels"] or []))
            )
        except (ValueError, KeyError, TypeError):
            raise NotABroker(self._address) from None

    def move_channel(self, channel: str, sequence: int) -> None:
        """Move a channel durably; its new position may be before `sequence`. Raises the errors of `bounds`."""
        params = {"channel": channel, "to": str(sequence), "dry_run": "false"}
        self._numbers("POST", "/channel/seek", params, "to_sequence")

    def _numbers(self, method: str, path: str, params: dict[str, str], *names: str) -> list[int]:
        """Make a request and return these numbers of the JSON answer."""
        return self._numbers_in(self._request_json(method, path, params), *names)

    def _request_json(self, method: str, path: str, params: dict[str, str]) -> dict[str, Any]:
        found = self._http.request_json(method, path, {"topic": self._topic, **params})
        if not isinstance(found, dict):
            raise NotABroker(self._address)
        return found

    def _numbers_in(self, found: dict[str, Any], *names: str) -> list[int]:
        try:
            return [int(found[name]) for name in names]
        except (ValueError, KeyError, TypeError):
            raise NotABroker(self._address) from None
