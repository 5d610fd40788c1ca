"""A broker's log over HTTP (docs/reading.md), with blocking calls and the standard library, which tasks have."""

import http.client
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlencode

from ..log.gaps import Gap, gaps
from ..log.raw import RawStreamReader
from ..log.records import RecordBatch
from ..protocol.errors import NSQError
from ..untrusted_json import decode_json
from .ranges import Span

CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 30.0
"""So long may a broker take: its disk may be slow."""
PATIENCE_S = 30.0
"""So long is a broker that went away waited for, while nothing comes."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_RECEIVE_BYTES = 1024 * 1024
_HTTPS = "https://"

Found: TypeAlias = RecordBatch | Gap
_T = TypeVar("_T")


class BrokerUnreachable(NSQError):
    """A broker does not answer, or what answers is none.

    Attributes:
        address: Where it is, as it was given.
        reason: Why.
        cause: What happened, if it was an error of the system's.
    """

    def __init__(self, address: str, reason: str, cause: OSError | None = None) -> None:
        super().__init__(f"the broker at {address} cannot be read: {reason}")
        self.address = address
        self.reason = reason
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:  # tasks send their errors to whoever started them
        return type(self), (self.address, self.reason)


class RequestRefused(NSQError):
    """A broker answered, but not with success.

    Attributes:
        address: Where it is, as it was given.
        topic: What it was about.
        status: The HTTP status.
        text: What it said, such as `TOPIC_NOT_FOUND`.
    """

    def __init__(self, address: str, topic: str, status: int, text: str) -> None:
        super().__init__(f"the broker at {address} refused: {text} (topic {topic}, HTTP status {status})")
        self.address = address
        self.topic = topic
        self.status = status
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self.topic, self.status, self.text)


class LogReplaced(NSQError):
    """A topic's log is not the one that was planned for: the topic was deleted and made again, or its end was lost."""


class Bounds(NamedTuple):
    """Where a log begins and ends.

    Attributes:
        first: The oldest sequence that is kept.
        end: The one that will be published next.
        size_bytes: What the log occupies.
        at: What the position asked for comes to.
    """

    first: int
    end: int
    size_bytes: int
    at: int

    @property
    def mean_bytes(self) -> float:
        """What a message occupies; 0 if there is none."""
        return self.size_bytes / (self.end - self.first) if self.end > self.first else 0.0


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """What to speak https with; a context cannot be sent to a task. Paths of PEM files, or None.

    Attributes:
        root_ca_file: The CAs to trust; None: the system's.
        cert, key: A certificate of our own, and its key if that is not in the same file.
        skip_verify: Believe whatever certificate there is.
    """

    root_ca_file: str | None = None
    cert: str | None = None
    key: str | None = None
    skip_verify: bool = False

    def context(self) -> ssl.SSLContext:
        """A context. Raises OSError: a file cannot be used."""
        context = ssl.create_default_context(cafile=self.root_ca_file)
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def broker_label(address: str) -> str:
    """What a broker is called in files: its address, however it is asked."""
    return address.partition("://")[2] or address


class BrokerLog:
    """One topic's log on one broker. Every request has a connection of its own.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        topic: Its name.
        tls: For https.
        patience_s: How long a broker is waited for that went away, where it says so.
    """

    def __init__(
        self, address: str, topic: str, tls: TLSFiles | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._address = address
        self._topic = topic
        self._patience_s = patience_s
        self._tls = (tls or TLSFiles()).context() if address.startswith(_HTTPS) else None

    # ------------------------------------------------------------------ the log

    def bounds(self, at: str = "latest") -> Bounds:
        """Where the log begins and ends.

        Args:
            at: A position, see docs/reading.md.

        Raises:
            BrokerUnreachable, RequestRefused: There is no answer.
        """
        names = ("first_sequence", "next_sequence", "bytes", "at_sequence")
        return Bounds(*self._numbers("GET", "/topic/bounds", {"at": at}, *names))

    def id_at(self, sequence: int) -> str | None:
        """The id of a message, 16 hex digits; None if it is not there any more. Raises as `bounds`."""
        for found in self._read_once(Span(sequence, sequence + 1)):
            if isinstance(found, RecordBatch):
                return f"{found.first_id + sequence - found.base_sequence:016x}"
        return None

    def read(self, span: Span) -> Iterator[Found]:
        """All there is of a span, and what is missing, in order. The first and the last record may reach beyond it.

        A connection that is lost is made again, and what came is not repeated.

        Raises:
            BrokerUnreachable: It was gone for longer than our patience.
            RequestRefused: The topic is gone.
            LogReplaced: See there.
            RawStreamError: What came was changed on its way.
        """
        at = span.first
        patience = _Patience(self._patience_s)
        while at < span.end:
            try:
                for found in self._read_once(Span(at, span.end)):
                    at = found.next_sequence
                    patience.renew()
                    yield found
            except BrokerUnreachable:
                if not patience.pause():
                    raise

    def patiently(self, ask: Callable[[], _T]) -> _T:
        """What `ask` returns, asked again while the broker is away.

        Raises:
            BrokerUnreachable: It was gone for longer than our patience.
        """
        patience = _Patience(self._patience_s)
        while True:
            try:
                return ask()
            except BrokerUnreachable:
                if not patience.pause():
                    raise

    def _read_once(self, span: Span) -> Iterator[Found]:
        """The same, over one connection."""
        params = {"format": "raw", "from": str(span.first), "until": str(span.end)}
        with self._answer("GET", "/topic/read", params) as answer:
            kept_from, ends = (
                int(answer.headers.get(name, "-1")) for name in ("X-NSQ-First-Sequence", "X-NSQ-End-Sequence")
            )
            if ends < 0:
                raise self._no_broker()
            if ends < span.end:
                raise LogReplaced(
                    f"topic {self._topic} of the broker at {self._address} ends before message {ends}, "
                    f"and {span.end - 1} was there before: it was deleted and made again, or lost its end"
                )
            decoder = RawStreamReader()
            at = span.first
            while data := answer.read1(_RECEIVE_BYTES):
                for batch in decoder.receive_data(data):
                    if batch.next_sequence <= at:
                        continue
                    if batch.base_sequence > at:
                        yield from gaps(at, min(batch.base_sequence, span.end), self._kept_from(kept_from))
                    if batch.base_sequence >= span.end:
                        return
                    yield batch
                    at = batch.next_sequence
            decoder.end()
        if at < span.end:
            yield from gaps(at, span.end, self._kept_from(kept_from))

    def _kept_from(self, before: int) -> int:
        """The oldest sequence that is kept now: what is missing may have become too old meanwhile."""
        return max(before, self.bounds().first)

    # ------------------------------------------------------------------ a channel of it

    def create_channel(self, channel: str) -> None:
        """Make it, if it is not there. Raises as `bounds`."""
        with self._answer("POST", "/channel/create", {"channel": channel}) as answer:
            answer.read()

    def channel_position(self, channel: str) -> int:
        """The sequence at which a channel would read on. Raises as `bounds`."""
        return self._seek(channel, "latest", "true", "from_sequence")

    def move_channel(self, channel: str, sequence: int) -> int:
        """Move a channel, durably; returns where it is then, which may be less far. Raises as `bounds`."""
        return self._seek(channel, str(sequence), "false", "to_sequence")

    def _seek(self, channel: str, to: str, dry_run: str, wanted: str) -> int:
        params = {"channel": channel, "to": to, "dry_run": dry_run}
        return self._numbers("POST", "/channel/seek", params, wanted)[0]

    # ------------------------------------------------------------------ requests

    def _numbers(self, method: str, path: str, params: Mapping[str, str], *names: str) -> list[int]:
        """What a JSON object that is the answer has under these names."""
        with self._answer(method, path, params) as answer:
            data = answer.read()
        try:
            found = decode_json(data)
            return [int(found[name]) for name in names]
        except (ValueError, KeyError, TypeError):  # also of an answer that broke off in its head
            raise self._no_broker() from None

    @contextmanager
    def _answer(
        self, method: str, path: str, params: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """A successful answer; what goes wrong while it is read is turned into our errors."""
        connection = connection_to(self._address, self._tls)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
            connection.request(method, f"{path}?{urlencode({'topic': self._topic, **params})}")
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise RequestRefused(self._address, self._topic, answer.status, self._error_in(answer))
            yield answer
        except OSError as exc:
            reason = exc.strerror or str(exc)
            if isinstance(exc, TimeoutError):
                connected = connection.sock is not None
                reason = (
                    f"connected, but no answer within {SILENCE_S:g} s" if connected else "it took too long"
                )
            raise BrokerUnreachable(self._address, reason, exc) from exc
        except http.client.IncompleteRead as exc:
            raise BrokerUnreachable(self._address, "the connection was lost") from exc
        except (http.client.HTTPException, ValueError) as exc:
            raise self._no_broker() from exc
        finally:
            connection.close()

    def _error_in(self, answer: http.client.HTTPResponse) -> str:
        try:
            return str(decode_json(answer.read())["message"])
        except (ValueError, KeyError, TypeError):
            raise self._no_broker() from None

    def _no_broker(self) -> BrokerUnreachable:
        return BrokerUnreachable(
            self._address, "what answers is not an NSQ broker that can be read by sequence"
        )


def connection_to(address: str, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    """A connection to a broker, not opened yet. Raises ValueError: no port is named.

    Args:
        address: As for `BrokerLog`.
        tls: For https.
    """
    if "/" in address.removeprefix(_HTTPS):
        return _UnixConnection(address, timeout=CONNECT_TIMEOUT_S)
    host, _, port = address.removeprefix(_HTTPS).rpartition(":")
    host = host.strip("[]")
    if tls is None:
        return http.client.HTTPConnection(host, int(port), timeout=CONNECT_TIMEOUT_S)
    return http.client.HTTPSConnection(host, int(port), timeout=CONNECT_TIMEOUT_S, context=tls)


class _Patience:
    """How long a broker is waited for, counted from when it was heard of last."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.renew()

    def renew(self) -> None:
        """It was heard of."""
        self._pause_s, self._given_up_at_s = _FIRST_PAUSE_S, time.monotonic() + self._patience_s

    def pause(self) -> bool:
        """Sleep before it is tried again; returns False at once if that has gone on for too long."""
        if time.monotonic() + self._pause_s > self._given_up_at_s:
            return False
        time.sleep(self._pause_s * random.uniform(0.5, 1))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over the unix socket of this path."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
