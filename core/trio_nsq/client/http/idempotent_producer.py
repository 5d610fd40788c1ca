"""The idempotent producer: the broker publishes each batch once, also if it is sent again.

See docs/how-to/idempotent-publishing.md.

A producer that may have to send a batch again has a name and numbers its batches. A broker of this project publishes a
batch only if its number is greater than all earlier numbers of the producer. A stock nsqd takes no notice of numbers:
publishing to it is at least once.
"""

import http.client
from collections.abc import Callable, Sequence
from enum import StrEnum
from struct import pack
from types import TracebackType
from typing import Self, TypeVar

from ...protocol.messages import pack_messages
from ..connection.reconnect import FIRST_DELAY_S, PATIENCE_S, Retry
from ..connection.tls import TLSFiles
from ..errors import BrokerUnreachable, NotABroker, PublishInDoubt, RequestRefused
from .broker_http import BrokerHTTP

BATCH_HEADER = "NSQ-Batch"
KEEP_ALIVE_S = 30.0
"""A proxy or a firewall may have dropped a connection that was idle for longer."""

_Answer = TypeVar("_Answer")


class PublishOutcome(StrEnum):
    """What became of a batch."""

    PUBLISHED = "published"
    REPEATED = "repeated"
    """It was published before, and is not published again."""
    UNKNOWN = "unknown"
    """It was published; this broker does not know whether it had been published before."""


class IdempotentProducer:
    """Publishes the batches of one producer to one topic, in order, over one connection; blocking, a context manager.

    A batch is tried again if the broker goes away or cannot store it now, and remembers what it has published, or has
    not been sent anything yet.

    Args:
        address: `host:port` of the broker's HTTP interface, `https://host:port`, or the path of a unix socket.
        topic: Its name.
        producer: The name of the producer: 1 to 64 of A-Z a-z 0-9 . _ : -; must be unique among those at work.
        tls: For https.
        patience_s: How long to try one batch before its error is raised.
        first_retry_s: The pause before the second attempt, more than 0; later pauses double, up to 2 s.
        keep_alive_s: Open a new connection if the last one was idle for longer.
        max_resends: How often to send a batch again if its response was lost and the broker does not deduplicate; each
            time, it may be published once more.

    Attributes:
        messages_resent: Messages that were sent again to a broker that does not deduplicate.

    Raises:
        TLSFilesError: A file of `tls` cannot be used.
        ValueError: The address names no port.
    """

    def __init__(
        self,
        address: str,
        topic: str,
        producer: str,
        tls: TLSFiles | None = None,
        patience_s: float = PATIENCE_S,
        *,
        first_retry_s: float = FIRST_DELAY_S,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_resends: int = 0,
    ) -> None:
        self.messages_resent = 0
        self._address = address
        self._patience_s = patience_s
        self._first_retry_s = first_retry_s
        self._max_resends = max_resends
        self._names = {"topic": topic, "producer": producer}
        self._http = BrokerHTTP(address, tls, keep_alive_s=keep_alive_s)
        self._remembers: bool | None = None  # None: the broker has not been asked yet
        self._last = -1  # the greatest number that is known to be published

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        self._http.close()

    @property
    def remembers(self) -> bool:
        """Whether the broker remembers what it has published; false before the first request."""
        return bool(self._remembers)

    def last_number(self) -> int | None:
        """Return the greatest number that the broker has published; a producer that starts again continues after it.

        Returns:
            None if there is none, or the broker does not remember.

        Raises:
            BrokerUnreachable, RequestRefused: As `publish`.
        """
        self._retry(self._fetch_last_number)
        return self._last if self._last >= 0 else None

    def forget(self) -> None:
        """Let the broker forget this producer, after its last batch. Raises as `last_number`.

        A producer with a new name for each run should do this at its end: a broker remembers 10,000 at a time.
        """
        if self._remembers:
            self._retry(lambda: self._request("POST", "/topic/producer/forget", self._names))
            self._last = -1

    def publish(self, bodies: Sequence[bytes], number: int, defer_ms: int = 0) -> PublishOutcome:
        """Publish a batch, all of it or nothing; return when it is stored.

        Args:
            bodies: The messages, at least one, together no more than the broker's --max-body-size.
            number: 0 to 2**63 - 1, greater than that of the batch before; numbers may be left out. A batch that is sent
                again must have the same number.
            defer_ms: Deliver the messages so much later; 0: at once. nsqd up to 1.3.0 ignores it here.

        Raises:
            BrokerUnreachable: The broker was away for longer than `patience_s`.
            PublishInDoubt: The batch may be stored, the broker does not remember what it has published, and there were
                `max_resends` resends.
            RequestRefused: The broker rejects it: it is too large, or the topic stays full, or the like.
        """
        parameters = self._names | {"binary": "true", "number": str(number)}
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
        """Make a request and return the answer's header about the batch."""
        try:
            with self._http.stream(method, path, parameters, body) as answer:
                answer.read()
                return answer.headers.get(BATCH_HEADER)
        except BrokerUnreachable as exc:
            if exc.unanswered and not self._remembers:
                raise PublishInDoubt(self._address, exc.reason) from exc
            raise

    def _fetch_last_number(self) -> None:
        """Ask the broker whether it remembers this producer, and its last number."""
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
        """Repeat an attempt while its error may pass by itself."""
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
