"""The idempotent producer: the broker publishes each batch once, even if it is sent again.

See docs/how-to/idempotent-publishing.md.

The producer has a name and numbers its batches. `qcli serve` publishes a batch only if its number is greater than all
earlier numbers of the producer. nsqd ignores the numbers: publishing to it is at least once.
"""

import http.client
import ssl
from collections.abc import Callable, Sequence
from enum import StrEnum
from struct import pack
from types import TracebackType
from typing import Self, TypeVar

from ...protocol.messages import pack_messages
from ...secret import Secret, StrPath
from ..connection.reconnect import FIRST_DELAY_S, PATIENCE_S, Retry
from ..connection.tls import TLSFiles
from ..errors import BrokerUnreachable, NotABroker, PublishInDoubt, RequestRefused
from .broker_http import BrokerHTTP

BATCH_HEADER = "NSQ-Batch"
KEEP_ALIVE_S = 30.0
"""Proxies and firewalls may drop a connection that is idle for longer."""

_Answer = TypeVar("_Answer")


class PublishOutcome(StrEnum):
    """The outcome of publishing a batch."""

    PUBLISHED = "published"
    REPEATED = "repeated"
    """The batch was published before, and was not published again."""
    UNKNOWN = "unknown"
    """The batch was published by a broker that does not deduplicate; it may be a duplicate."""


class IdempotentProducer:
    """Publishes batches to one topic, in order, over one connection; blocking, a context manager.

    If the broker is unavailable or temporarily cannot store a batch, the producer sends it again. It does so only if
    the broker deduplicates, or if nothing was sent yet.

    Args:
        address: `host:port` of the broker's HTTP API, `https://host:port`, or the path of a unix socket.
        topic: The topic.
        producer: The name of the producer: 1 to 64 of A-Z a-z 0-9 . _ : -; unique among active producers.
        tls: For https: files or a context. None: the system's CAs.
        patience_s: How long to retry one batch before its error is raised.
        first_retry_s: The delay before the second attempt, more than 0; later delays double, up to 2 s.
        keep_alive_s: Open a new connection if the last one was idle for longer.
        auth_secret, auth_secret_file: The token for a broker that requires authentication, or the file that has it; it
            needs the role `publish` on the topic. See `ConnectionSettings`.
        max_resends: How often to send a batch again if its response was lost and the broker does not deduplicate; each
            resend may duplicate the batch.

    Attributes:
        messages_resent: Messages that were sent again to a broker that does not deduplicate.

    Raises:
        TLSFilesError: A file of `tls` cannot be used.
        ValueError: The address has no port, or both `auth_secret` and `auth_secret_file` are given.
    """

    def __init__(
        self,
        address: str,
        topic: str,
        producer: str,
        tls: TLSFiles | ssl.SSLContext | None = None,
        patience_s: float = PATIENCE_S,
        *,
        first_retry_s: float = FIRST_DELAY_S,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_resends: int = 0,
        auth_secret: str = "",
        auth_secret_file: StrPath | None = None,
    ) -> None:
        self.messages_resent = 0
        self._address = address
        self._patience_s = patience_s
        self._first_retry_s = first_retry_s
        self._max_resends = max_resends
        self._names = {"topic": topic, "producer": producer}
        self._http = BrokerHTTP(
            address, tls, Secret(auth_secret, auth_secret_file), keep_alive_s=keep_alive_s
        )
        self._remembers: bool | None = None  # None: unknown
        self._last = -1  # the greatest number known to be published

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        self._http.close()

    @property
    def remembers(self) -> bool:
        """Whether the broker deduplicates; False before the first request."""
        return bool(self._remembers)

    def last_number(self) -> int | None:
        """Return the greatest number that the broker has published; a restarted producer continues after it.

        Returns:
            None if there is none, or if the broker does not deduplicate.

        Raises:
            BrokerUnreachable, RequestRefused: See `publish`.
        """
        self._retry(self._fetch_last_number)
        return self._last if self._last >= 0 else None

    def forget(self) -> None:
        """Delete the broker's state of this producer, after its last batch. Raises the errors of `last_number`.

        A producer with a new name for each run should call this at its end: a broker keeps the state of 10,000.
        """
        if self._remembers:
            self._retry(lambda: self._request("POST", "/topic/producer/forget", self._names))
            self._last = -1

    def publish(
        self, bodies: Sequence[bytes], number: int, defer_ms: int = 0, *, first: int | None = None
    ) -> PublishOutcome:
        """Publish a batch as a whole; return when it is stored.

        Args:
            bodies: The messages, at least one, in total within the broker's --max-body-size.
            number: 0 to 2**63 - 1, greater than the previous number; numbers may be skipped. To send a batch again, use
                the same number.
            defer_ms: The delay before the delivery, in milliseconds; 0: no delay. nsqd up to 1.3.0 ignores it.
            first: The batch has the numbers from this one to `number`. For a producer whose batches may end elsewhere
                after a restart: a batch that is stored in part is refused.

        Raises:
            BrokerUnreachable: The broker was unavailable for longer than `patience_s`.
            PublishInDoubt: The batch may be stored, the broker does not deduplicate, and `max_resends` is exhausted.
            RequestRefused: The broker rejects the batch, for example because it is too large or the topic is full. The
                text begins with OVERLAP if numbers from `first` on are stored, but not `number`.
        """
        parameters = self._names | {"binary": "true", "number": str(number)}
        if first is not None:
            parameters["first"] = str(first)
        if defer_ms:
            parameters["defer"] = str(defer_ms)
        body = b"%s%s" % (pack(">i", len(bodies)), pack_messages(bodies).data)
        for _ in range(self._max_resends):
            try:
                return self._retry(lambda: self._publish(parameters, body, number))
            except PublishInDoubt:
                self.messages_resent += len(bodies)
        return self._retry(lambda: self._publish(parameters, body, number))

    def _publish(self, parameters: dict[str, str], body: bytes, number: int) -> PublishOutcome:
        if self._remembers is None:
            self._fetch_last_number()
        if number <= self._last:
            return PublishOutcome.REPEATED
        header = self._request("POST", "/mpub", parameters, body)
        try:
            outcome = PublishOutcome(header) if header is not None else PublishOutcome.UNKNOWN
        except ValueError:
            raise NotABroker(self._address) from None
        self._remembers = outcome is not PublishOutcome.UNKNOWN
        self._last = number if self._remembers else -1
        return outcome

    def _request(
        self, method: str, path: str, parameters: dict[str, str], body: bytes | None = None
    ) -> str | None:
        """Make a request and return the answer's NSQ-Batch header."""
        try:
            with self._http.stream(method, path, parameters, body) as answer:
                answer.read()
                return answer.headers.get(BATCH_HEADER)
        except BrokerUnreachable as exc:
            if exc.unanswered and not self._remembers:
                raise PublishInDoubt(self._address, exc.reason) from exc
            raise

    def _fetch_last_number(self) -> None:
        """Query whether the broker deduplicates, and the last number of this producer."""
        self._remembers, self._last = None, -1
        try:
            number = self._http.request_json("GET", "/topic/producer", self._names)["number"]
            self._last = -1 if number is None else int(number)
            self._remembers = True
        except RequestRefused as exc:
            if exc.status != http.client.NOT_FOUND:
                raise
            self._remembers = exc.text == "TOPIC_NOT_FOUND"  # nsqd does not know the path
        except (ValueError, KeyError, TypeError):
            raise NotABroker(self._address) from None

    def _retry(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Repeat an attempt while its error may be temporary."""
        retry = Retry(self._patience_s, self._first_retry_s)
        while True:
            try:
                return attempt()
            except PublishInDoubt:
                raise
            except BrokerUnreachable:
                if not retry.pause():
                    raise
            except RequestRefused as exc:
                unavailable = exc.status == http.client.SERVICE_UNAVAILABLE and self._remembers
                if not (unavailable and retry.pause()):
                    raise
