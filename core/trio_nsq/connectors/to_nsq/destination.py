"""One destination: publishes numbered batches over HTTP, or batches without numbers over TCP."""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import trio

from ...client.connection.reconnect import ReconnectDelays
from ...client.errors import (
    AuthRefused,
    BrokerError,
    BrokerUnreachable,
    ConnectionFailed,
    PublishFailed,
    RequestRefused,
)
from ...client.http.idempotent_producer import IdempotentProducer, PublishOutcome
from ...client.publishing.options import ProducerOptions, ProducerSettings
from ...client.publishing.producer import Producer
from ...client.publishing.queue import RETRIABLE_CODES
from ...protocol.bulk import MAX_INT32
from ...protocol.messages import pack_messages
from ..source.broker_http import BrokerFinder
from ..source.options import BrokerAddresses
from .errors import CopyRefused, Unavailable
from .options import CopyOptions

logger = logging.getLogger("trio_nsq.connectors")

HTTP_PATIENCE_S = 5.0
"""How long a broker that answers over TCP may not answer over HTTP, before it counts as one without HTTP."""
_THREADS = 8
"""Requests to one destination at the same time."""
_MAX_CONNECTIONS = 64
"""Kept connections to one destination; each topic of each source has one."""
_T = TypeVar("_T")


class Destination:
    """A broker that receives copies. `run` must run while it is used.

    Attributes:
        label: The address, for people.
    """

    def __init__(self, given: BrokerAddresses, options: CopyOptions) -> None:
        self.label = given.tcp or given.http[0]
        self._given = given
        self._options = options
        self._settings = ProducerSettings(**options.producer)
        self._tls = self._settings.client_context() if self._settings.has_tls_files else None
        self._finder = BrokerFinder(options.source, self._tls, self._settings.secret)
        self._found: BrokerAddresses | None = None
        self._asked_first_s: float | None = None
        self._threads = trio.CapacityLimiter(_THREADS)
        self._numbered: dict[tuple[str, str], IdempotentProducer] = {}
        self._producer: Producer | None = None
        self._wanted = trio.Event()
        self._tried = trio.Event()
        self._why_closed = "the connection is not open yet"
        self._is_down = False

    # ------------------------------------------------------------------ finding it

    async def find(self) -> BrokerAddresses:
        """Return its addresses; without an HTTP address, it gets batches without numbers. Raises Unavailable."""
        if self._found is not None:
            return self._found
        if self._asked_first_s is None:
            self._asked_first_s = trio.current_time()
        try:
            found = await self._finder.find(self._given)
        except RequestRefused as exc:
            raise CopyRefused(str(exc)) from exc
        except ConnectionFailed as exc:
            raise Unavailable(self.label, exc.reason) from exc
        if not found.http:
            waits = trio.current_time() < self._asked_first_s + HTTP_PATIENCE_S
            if waits or self._options.requires_http:
                raise Unavailable(self.label, "its HTTP API does not answer")
            logger.warning(
                "the HTTP API of the broker at %s was not found; copies are stored at least once", self.label
            )
        self._found = found
        return found

    # ------------------------------------------------------------------ numbered batches

    async def last_number(self, topic: str, producer: str) -> int | None:
        """Return the greatest number of a producer. `deduplicates` says whether it can have one. Raises Unavailable."""
        return await self._in_thread(topic, producer, IdempotentProducer.last_number)

    async def deduplicates(self, topic: str, producer: str) -> bool:
        """Return whether the broker remembers numbers; an nsqd does not. Raises Unavailable."""
        if not (await self.find()).http:
            return False
        await self.last_number(topic, producer)
        return self._numbered[topic, producer].remembers

    async def publish_numbered(
        self, topic: str, producer: str, bodies: Sequence[bytes], number: int, first: int, defer_ms: int
    ) -> bool:
        """Publish a batch. Returns False if it is stored in part or in whole, and nothing was published now.

        Raises Unavailable, CopyRefused.
        """

        def publish(publisher: IdempotentProducer) -> bool:
            try:
                outcome = publisher.publish(bodies, number, defer_ms, first=first)
            except RequestRefused as exc:
                if exc.text.startswith("OVERLAP"):
                    return False
                raise
            return outcome is not PublishOutcome.REPEATED

        return await self._in_thread(topic, producer, publish)

    async def _in_thread(self, topic: str, producer: str, act: Callable[[IdempotentProducer], _T]) -> _T:
        publisher = await self._numbered_producer(topic, producer)

        def call() -> _T:
            try:
                return act(publisher)
            finally:
                if len(self._numbered) > _MAX_CONNECTIONS:
                    publisher.close()

        try:
            return await trio.to_thread.run_sync(call, limiter=self._threads, abandon_on_cancel=True)
        except BrokerUnreachable as exc:
            raise Unavailable(self.label, exc.reason, in_doubt=exc.unanswered) from exc
        except RequestRefused as exc:
            if exc.status >= 500 or exc.text == "EXITING":
                raise Unavailable(self.label, f"it refused: {exc.text}", is_full=True) from exc
            raise CopyRefused(f"{exc}{_advice(exc.text)}") from exc

    async def _numbered_producer(self, topic: str, producer: str) -> IdempotentProducer:
        found = await self.find()
        key = topic, producer
        if key not in self._numbered:
            self._numbered[key] = IdempotentProducer(
                found.http[0],
                topic,
                producer,
                self._tls if found.http[0].startswith("https://") else None,
                0,
                auth_secret=self._settings.auth_secret,
                auth_secret_file=self._settings.auth_secret_file,
            )
        return self._numbered[key]

    # ------------------------------------------------------------------ batches without numbers

    async def publish(self, topic: str, bodies: Sequence[bytes], defer_ms: int) -> None:
        """Publish a batch without a number. Raises Unavailable, CopyRefused."""
        self._wanted.set()
        await self._tried.wait()
        if self._producer is None:
            raise Unavailable(self.label, self._why_closed)
        try:
            if defer_ms:
                await self._producer.publish_many(topic, bodies, defer_ms=defer_ms)
            else:
                await self._producer.publish_set(topic, pack_messages(bodies))
        except PublishFailed as exc:
            cause = exc.__cause__
            passes = not isinstance(cause, BrokerError | AuthRefused) or (
                isinstance(cause, BrokerError)
                and (cause.code in RETRIABLE_CODES or cause.text.endswith("exiting"))
            )
            if not passes:
                code = cause.code if isinstance(cause, BrokerError) else ""
                raise CopyRefused(f"the broker at {self.label} refused: {exc.reason}{_advice(code)}") from exc
            is_full = isinstance(cause, BrokerError)
            raise Unavailable(self.label, exc.reason, in_doubt=exc.maybe_stored, is_full=is_full) from exc

    async def run(self) -> None:
        """Keep a producer open once it is needed; runs until cancelled."""
        await self._wanted.wait()
        delays = ReconnectDelays(
            self._settings.reconnect_min_s, self._settings.reconnect_max_s, random.random
        )
        while True:
            try:
                tcp = (await self.find()).tcp
                # The destination has its own limits, and refuses what is larger.
                options: ProducerOptions = {
                    "max_msg_size": MAX_INT32,
                    "max_body_size": MAX_INT32,
                    **self._options.producer,
                }
                async with Producer(tcp, **options) as self._producer:
                    self._tried.set()
                    await trio.sleep_forever()
            except AuthRefused as exc:
                raise CopyRefused(str(exc)) from exc
            except (ConnectionFailed, Unavailable) as exc:
                self._why_closed = exc.reason
                self._tried.set()
            await trio.sleep(delays.next_s())

    # ------------------------------------------------------------------ outages

    def report_failure(
        self, error: Unavailable, consequence: str = "retrying until it stores the messages"
    ) -> None:
        """Log the begin of an outage."""
        if not self._is_down:
            self._is_down = True
            logger.warning("%s; %s", error, consequence)

    def report_success(self) -> None:
        """Log the end of an outage."""
        if self._is_down:
            self._is_down = False
            logger.info("the broker at %s stores messages again", self.label)

    def close(self) -> None:
        """Close the connections for numbered batches."""
        for publisher in self._numbered.values():
            with suppress(OSError):
                publisher.close()


def _advice(code: str) -> str:
    if code in ("BAD_MESSAGE", "MSG_TOO_BIG", "E_BAD_MESSAGE"):
        return ". Start the destination with a --max-msg-size as large as the source's"
    if code in ("BODY_TOO_BIG", "BAD_BODY", "E_BAD_BODY"):
        return ". Start the destination with a larger --max-body-size"
    if code == "INVALID_DEFER":
        return ". Start the destination with a --max-defer as large as the source's"
    return ""
