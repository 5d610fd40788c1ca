"""The idempotent producer: the broker publishes each batch once, even if it is sent again.

See docs/how-to/idempotent-publishing.md.

The producer has a name and numbers its batches, or its caller does. `qcli serve` publishes a batch only if its number
is greater than all earlier numbers of the producer. nsqd ignores the numbers: publishing to it is at least once.
"""

import http.client
import os
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from struct import pack
from types import TracebackType
from typing import Self, TypeVar

from trio_nsq.protocol.bodies import check_bytes, list_of
from trio_nsq.protocol.headers import Headers, check_hpub, encode_headers_of_all, with_prefixes
from trio_nsq.text.arguments import check_int, check_seconds

from ...access.secret import Secret, StrPath
from ...api import broker as api
from ...api.request import Request
from ...event_loop.retries import FIRST_DELAY_S, PATIENCE_S, Retry
from ...protocol.messages import pack_messages
from ..arguments import check_name, check_producer, in_ms
from ..connection.tls import TLSFiles
from ..errors import BrokerUnreachable, NotABroker, ProducerFenced, PublishInDoubt, RequestRefused
from .broker_http import BrokerHTTP

BATCH_HEADER = "NSQ-Batch"
KEEP_ALIVE_S = 30.0
"""Proxies and firewalls may drop a connection that is idle for longer."""
MAX_NUMBER = 2**63 - 1

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

    It numbers the batches, or the caller does. A caller that can form the same batches again after a restart, such as
    one that reads a file, gives the numbers: then a batch that is stored is not stored again.

    Under trio and asyncio, use `trio_nsq.Producer` with a name.

    Threads may share it: batches are published one after the other. A thread that gives numbers must take its number
    and publish under one lock, or another one may publish a greater number first; then `publish` raises ValueError. Use
    a producer with its own name in each thread instead, and in each process: after a fork, every method but `close`
    raises RuntimeError in the child.

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
        TypeError: An argument has another type.
        ValueError: The address has no port, a name or a number is invalid, or both `auth_secret` and `auth_secret_file`
            are given.
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
        check_name("topic", topic)
        check_producer(producer)
        check_seconds("patience_s", patience_s)
        check_seconds("first_retry_s", first_retry_s, positive=True)
        check_seconds("keep_alive_s", keep_alive_s)
        check_int("max_resends", max_resends, 0)
        self.messages_resent: int = 0
        self._address = address
        self._patience_s = patience_s
        self._first_retry_s = first_retry_s
        self._max_resends = max_resends
        self._topic, self._producer = topic, producer
        self._http = BrokerHTTP(
            address, tls, Secret(auth_secret, auth_secret_file), keep_alive_s=keep_alive_s
        )
        self._remembers: bool | None = None  # None: unknown
        self._may_be_forgotten = False
        self._last = -1  # the greatest number known to be published
        # The number and the digest of the last batch that this producer has sent, published or not.
        self._own: tuple[int, int] | None = None
        self._instance = os.urandom(8).hex()  # of the numbers that this object chooses
        self._chosen = -1  # the last one
        self._has_numbered = False  # the broker may have stored one of them
        self._in_doubt = False  # whether the broker may have stored a batch that it did not acknowledge
        self._lock = threading.Lock()
        self._process = os.getpid()

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

    @property
    def is_connected(self) -> bool:
        """Whether the connection of the last request is open: the broker has not been restarted since."""
        return self._http.is_connected()

    @property
    def may_be_forgotten(self) -> bool:
        """Whether the broker may have known this producer, as it remembers a limited number; False before a request."""
        return self._may_be_forgotten

    def last_number(self) -> int | None:
        """Return the greatest number that the broker has published; a restarted producer continues after it.

        Returns:
            None if there is none, or if the broker does not deduplicate.

        Raises:
            BrokerUnreachable, RequestRefused: See `publish`.
        """
        with self._locked():
            self._retry(self._fetch_last_number)
            self._own = None
            return self._last if self._last >= 0 else None

    def forget(self) -> None:
        """Delete the broker's state of this producer, after its last batch. Raises the errors of `last_number`.

        A producer with a new name for each run should call this at its end: a broker keeps the state of 10,000.
        """
        with self._locked():
            if self._remembers is None:
                self._retry(self._fetch_last_number)
            if self._remembers:
                self._retry(lambda: self._send(api.forget_producer(self._topic, self._producer)))
                self._last = -1
                self._own = None

    def publish(
        self,
        bodies: Iterable[bytes],
        number: int | None = None,
        defer_ms: int | None = None,
        *,
        defer_s: float = 0,
        first: int | None = None,
        headers: Headers | Sequence[Headers] | None = None,
    ) -> PublishOutcome:
        """Publish a batch as a whole; return when it is stored.

        Args:
            bodies: The messages, at least one, in total within the broker's --max-body-size.
            number: 0 to 2**63 - 1, greater than the previous number; numbers may be skipped. To send a batch again, use
                the same number. None: the producer takes the next number, after the last one that the broker has
                published; `sent_number` is that number.
            defer_ms: Deprecated: `defer_s`, in milliseconds.
            defer_s: The delay before the delivery, in seconds; 0: no delay. nsqd up to 1.3.0 ignores it.
            first: The batch has the numbers from this one to `number`. For a producer whose batches may end elsewhere
                after a restart: a batch that is stored in part is refused.
            headers: The headers of all messages, or a list with those of each, see `Producer.publish`. Then the batch
                has at most 1,024 messages, with at most 1 MiB of headers. A broker that knows no headers refuses it.

        Raises:
            BrokerUnreachable: The broker was unavailable for longer than `patience_s`.
            NotABroker: The server at the address is not a broker; raised at once by the first request.
            ProducerFenced: Without a number: another producer of this name has published since.
            PublishInDoubt: The batch may be stored, the broker does not deduplicate, and `max_resends` is exhausted.
            RequestRefused: The broker rejects the batch, for example because it is too large or the topic is full. The
                text begins with OVERLAP if numbers from `first` on are stored, but not `number`.
            RuntimeError: The process has forked since the producer was made.
            TypeError: A message is not bytes, or a number is not an integer.
            ValueError: There is no message, or a number is out of range. Or this producer has published a batch with a
                greater number, or another batch with this number, or may have, after an error: the broker would take
                this one for a repetition, and not store it. The latter is not raised with `first`, which the broker
                checks, nor after `last_number`.
        """
        if number is not None:
            check_int("number", number, 0, MAX_NUMBER)
        deferral_ms = in_ms("defer", defer_s, defer_ms) or None
        if first is not None:
            if number is None:
                raise ValueError("first needs a number")
            check_int("first", first, 0, number)
        bodies = list_of(bodies)
        if not bodies:
            raise ValueError("the batch is empty; it must have at least one message")
        texts = encode_headers_of_all(headers, len(bodies))
        check_hpub(texts)
        try:
            packed = with_prefixes(bodies, texts) if texts else pack_messages(bodies)
        except TypeError:
            check_bytes(bodies)
            raise
        body = b"%s%s" % (pack(">i", len(bodies)), packed.data)

        def batch_with(number: int, first: int | None, instance: str | None) -> Request[bytes]:
            numbers = number, first, deferral_ms, instance
            if texts:
                return api.publish_with_headers(self._topic, self._producer, *numbers, body=body)
            return api.publish_batch(self._topic, self._producer, True, *numbers, body=body)

        digest = hash((body, not texts))
        with self._locked():
            if number is None:
                return self._publish_next(batch_with, digest, len(bodies))
            own = number, digest
            if first is None and self._own is not None:
                self._check_order(own, self._own)
            instance = self._instance if number == self._chosen else None
            return self._publish_own(batch_with(number, first, instance), own, len(bodies))

    @property
    def sent_number(self) -> int | None:
        """The number of the last batch that this object has sent, stored or in doubt; None if it has sent none.

        After an error of `publish` without a number, pass this number to send the same batch again.
        """
        return None if self._own is None else self._own[0]

    def _publish_next(
        self, batch_with: Callable[[int, int | None, str | None], Request[bytes]], digest: int, count: int
    ) -> PublishOutcome:
        """Publish a batch with the next number, which only this object may repeat.

        `batch_with` makes the request from the number, the first number and the instance.
        """
        while True:
            if self._remembers is None:
                self._retry(self._fetch_last_number)
            own = -1 if self._own is None else self._own[0]
            number = self._chosen = max(own, self._last) + 1
            batch = batch_with(number, None, self._instance)
            try:
                outcome = self._publish_own(batch, (number, digest), count)
            except RequestRefused as exc:
                if not exc.text.startswith("FENCED"):
                    raise
                # The request of a predecessor may have arrived late. Nothing of this object is in doubt then.
                if self._has_numbered:
                    raise ProducerFenced(self._address, self._topic, self._producer) from exc
                self._remembers = None
                continue
            self._has_numbered = True
            return outcome

    def _publish_own(self, batch: Request[bytes], own: tuple[int, int], count: int) -> PublishOutcome:
        """Publish a batch of `count` messages, with its number and digest."""
        number = own[0]
        before, self._own, self._in_doubt = self._own, own, False
        try:
            for _ in range(self._max_resends):
                try:
                    return self._retry(lambda: self._publish(batch, number))
                except PublishInDoubt:
                    self.messages_resent += count
            return self._retry(lambda: self._publish(batch, number))
        except (BrokerUnreachable, RequestRefused):
            if not self._in_doubt:
                self._own = before
            raise
        finally:
            self._has_numbered |= self._in_doubt

    @staticmethod
    def _check_order(batch: tuple[int, int], last: tuple[int, int]) -> None:
        """Check that a batch follows the last one or is the last one; raises ValueError."""
        number, last_number = batch[0], last[0]
        if number < last_number:
            raise ValueError(
                f"number is {number}, but this producer has sent {last_number}: the broker would not store the "
                "batch. Numbers must ascend; threads that share a producer need a lock around number and publish"
            )
        if number == last_number and batch != last:
            raise ValueError(
                f"number is {number}, with which this producer has sent another batch: the broker would not store this "
                "one if it has stored the other"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._process != os.getpid():
            raise RuntimeError(
                "this IdempotentProducer was made before the process forked: make one with its own name in each process"
            )
        with self._lock:
            yield

    def _publish(self, batch: Request[bytes], number: int) -> PublishOutcome:
        if self._remembers is None:
            self._fetch_last_number()
        if number <= self._last:
            return PublishOutcome.REPEATED
        header = self._send(batch)
        try:
            outcome = PublishOutcome(header) if header is not None else PublishOutcome.UNKNOWN
        except ValueError:
            self._in_doubt = True
            raise NotABroker(self._address) from None
        self._remembers = outcome is not PublishOutcome.UNKNOWN
        self._last = number if self._remembers else -1
        return outcome

    def _send(self, request: Request[bytes]) -> str | None:
        """Make a request and return the answer's NSQ-Batch header."""
        try:
            with self._http.stream(request.method, request.path, request.params, request.body) as answer:
                answer.read()
                return answer.headers.get(BATCH_HEADER)
        except BrokerUnreachable as exc:
            self._in_doubt |= exc.unanswered
            if exc.unanswered and not self._remembers:
                raise PublishInDoubt(self._address, exc.reason) from exc
            raise

    def _fetch_last_number(self) -> None:
        """Query whether the broker deduplicates, and the last number of this producer."""
        self._remembers, self._last = None, -1
        try:
            found = self._http.ask(api.producer_state(self._topic, self._producer))
            number = found["number"]
            self._last = -1 if number is None else number
            self._may_be_forgotten = found.get("may_be_forgotten") is True
            self._remembers = True
        except RequestRefused as exc:
            if exc.status != http.client.NOT_FOUND:
                raise
            self._remembers = exc.is_without_topic  # nsqd does not know the path

    def _retry(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Repeat an attempt while its error may be temporary."""
        retry = Retry(self._patience_s, self._first_retry_s)
        while True:
            try:
                return attempt()
            except PublishInDoubt:
                raise
            except BrokerUnreachable as exc:
                if self._is_mistake(exc) or not retry.pause():
                    raise
            except RequestRefused as exc:
                unavailable = exc.status == http.client.SERVICE_UNAVAILABLE and self._remembers
                if not (unavailable and retry.pause()):
                    raise

    def _is_mistake(self, error: BrokerUnreachable) -> bool:
        """Whether the address is wrong. A proxy's error, or one after a broker has answered, may be temporary."""
        return (
            isinstance(error, NotABroker)
            and error.status < http.client.INTERNAL_SERVER_ERROR
            and self._remembers is None
        )
