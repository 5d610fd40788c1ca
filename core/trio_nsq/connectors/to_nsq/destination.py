"""One destination: publishes numbered batches over HTTP, or batches without numbers over TCP."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import trio

from ...client.errors import (
    BrokerError,
    BrokerUnreachable,
    ConnectionFailed,
    HeadersRefused,
    PublishFailed,
    RequestRefused,
)
from ...client.http.idempotent_producer import KEEP_ALIVE_S, IdempotentProducer, PublishOutcome
from ...client.publishing.options import ProducerOptions, ProducerSettings
from ...client.publishing.producer import Producer
from ...client.publishing.queue import may_pass
from ...protocol.bulk import MAX_INT32
from ...protocol.headers import Headers
from ...protocol.limits import SECOND_MS
from ...protocol.messages import pack_messages
from ..source.broker_http import BrokerFinder, FoundBroker
from ..source.options import BrokerAddresses
from .errors import CopiesLost, CopyRefused, Unavailable
from .options import CopyOptions

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

HTTP_PATIENCE_S = 5.0
"""How long a broker that answers over TCP may not answer over HTTP, before it counts as one without HTTP."""
_THREADS = 8
"""Requests to one destination at the same time."""
_MAX_CONNECTIONS = 64
"""Kept connections to one destination; each topic of each source has one."""
_WITHOUT_HEADERS = ". Copy bodies only with --without-headers"
_T = TypeVar("_T")


@dataclass(slots=True)
class _Numbered:
    """The producer of the numbered batches of one topic of one source.

    Attributes:
        is_busy: A thread uses it.
        used_at_s: When it was used, on the monotonic clock.
    """

    publisher: IdempotentProducer
    is_busy: bool = False
    used_at_s: float = 0.0


class Destination:
    """A broker that receives copies. `run` must run while it is used.

    Attributes:
        label: The address, for people.
        finder: Makes requests with its secret.
    """

    def __init__(self, given: BrokerAddresses, options: CopyOptions) -> None:
        self.label: str = given.tcp or given.http[0]
        self._given = given
        self._options = options
        self._settings = ProducerSettings(**options.producer)
        self.finder: BrokerFinder = BrokerFinder(options.source, options.destinations, self._settings)
        self._found: FoundBroker | None = None
        self._asked_first_s: float | None = None
        self._threads = trio.CapacityLimiter(_THREADS)
        self._numbered: dict[tuple[str, str], _Numbered] = {}
        self._producer: Producer | None = None
        self._wanted = trio.Event()
        self._opened = trio.Event()
        self._tcp = ""
        self._is_down = False

    # ------------------------------------------------------------------ finding it

    async def find(self) -> FoundBroker:
        """Return its addresses; without an HTTP address, it gets batches without numbers.

        Raises Unavailable; CopyRefused if its HTTP address is required, and an HTTP API of another broker answers.
        """
        if self._found is not None:
            return self._found
        if self._asked_first_s is None:
            self._asked_first_s = trio.current_time()
        try:
            found = await self.finder.find(self._given)
        except RequestRefused as exc:
            raise CopyRefused(str(exc)) from exc
        except ConnectionFailed as exc:
            raise Unavailable(self.label, exc.reason) from exc
        if not found.http:
            if found.is_other and self._options.requires_http:
                raise CopyRefused(
                    f"the HTTP API of the destination {self.label} was not found: {found.why_no_http}"
                )
            waits = not found.is_other and trio.current_time() < self._asked_first_s + HTTP_PATIENCE_S
            if waits or self._options.requires_http:
                raise Unavailable(self.label, f"its HTTP API was not found: {found.why_no_http}")
            logger.warning(
                "the HTTP API of the broker at %s was not found: %s; copies are stored at least once",
                *(self.label, found.why_no_http),
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
        return self._numbered[topic, producer].publisher.remembers

    async def publish_numbered(
        self,
        topic: str,
        producer: str,
        bodies: Sequence[bytes],
        number: int,
        first: int,
        defer_ms: int,
        stored: int | None = None,
        headers: Sequence[Headers] = (),
    ) -> bool:
        """Publish a batch. Returns False if it is stored in part or in whole, and nothing was published now.

        Args:
            stored: A number that the broker has stored; None: unknown.
            headers: Of each message; empty: none has headers.

        Raises Unavailable, CopyRefused; CopiesLost if the broker does not have `stored` any more.
        """

        def publish(publisher: IdempotentProducer) -> bool:
            if stored is not None and not publisher.is_connected:
                last = publisher.last_number()
                if (-1 if last is None else last) < stored and not publisher.may_be_forgotten:
                    raise CopiesLost(topic, self.label)
            try:
                outcome = publisher.publish(
                    bodies, number, defer_s=defer_ms / SECOND_MS, first=first, headers=headers or None
                )
            except RequestRefused as exc:
                if headers and exc.status == 404 and not exc.is_without_topic:
                    raise CopyRefused(f"{HeadersRefused(self.label)}{_WITHOUT_HEADERS}") from exc
                if exc.text.startswith("OVERLAP"):
                    return False
                raise
            return outcome is not PublishOutcome.REPEATED

        return await self._in_thread(topic, producer, publish)

    async def _in_thread(self, topic: str, producer: str, act: Callable[[IdempotentProducer], _T]) -> _T:
        numbered = await self._numbered_producer(topic, producer)
        numbered.is_busy = True

        def call() -> _T:
            try:
                return act(numbered.publisher)
            finally:
                if len(self._numbered) > _MAX_CONNECTIONS:
                    numbered.publisher.close()
                numbered.used_at_s = time.monotonic()
                numbered.is_busy = False  # here, as a cancelled call does not wait for its thread

        try:
            return await trio.to_thread.run_sync(call, limiter=self._threads, abandon_on_cancel=True)
        except BrokerUnreachable as exc:
            raise Unavailable(self.label, exc.reason, in_doubt=exc.unanswered) from exc
        except RequestRefused as exc:
            if exc.status >= 500 or exc.text == "EXITING":
                raise Unavailable(self.label, f"it refused: {exc.text}", is_full=True) from exc
            raise CopyRefused(f"{exc}{_advice(exc.text)}") from exc

    async def _numbered_producer(self, topic: str, producer: str) -> _Numbered:
        found = await self.find()
        key = topic, producer
        if key not in self._numbered:
            publisher = IdempotentProducer(
                found.http,
                topic,
                producer,
                self.finder.tls if found.http.startswith("https://") else None,
                0,
                auth_secret=self._settings.auth_secret,
                auth_secret_file=self._settings.auth_secret_file,
            )
            self._numbered[key] = _Numbered(publisher)
        return self._numbered[key]

    def close_idle(self, idle_s: float = KEEP_ALIVE_S) -> None:
        """Close connections that were idle for this time. The broker closes them later, and topics may be deleted."""
        until_s = time.monotonic() - idle_s
        for key, each in list(self._numbered.items()):
            if not each.is_busy and each.used_at_s <= until_s:
                del self._numbered[key]
                each.publisher.close()

    # ------------------------------------------------------------------ batches without numbers

    async def publish(
        self, topic: str, bodies: Sequence[bytes], defer_ms: int, headers: Sequence[Headers] = ()
    ) -> None:
        """Publish a batch without a number. Raises Unavailable, CopyRefused.

        Args:
            headers: Of each message; empty: none has headers.
        """
        self._tcp = (await self.find()).tcp
        self._wanted.set()
        await self._opened.wait()
        assert self._producer is not None
        try:
            if defer_ms or headers:
                await self._producer.publish_many(
                    topic, bodies, defer_s=defer_ms / 1000, headers=headers or None
                )
            else:
                await self._producer.publish_set(topic, pack_messages(bodies))
        except PublishFailed as exc:
            cause = exc.__cause__
            refusal = cause if isinstance(cause, BrokerError) else None
            if may_pass(exc):
                raise Unavailable(
                    self.label, exc.reason, in_doubt=exc.maybe_stored, is_full=refusal is not None
                ) from exc
            if refusal is None:
                advice = _WITHOUT_HEADERS if isinstance(cause, HeadersRefused) else ""
                raise CopyRefused(f"{cause}{advice}") from exc
            advice = _advice(refusal.code)
            raise CopyRefused(f"the broker at {self.label} refused: {exc.reason}{advice}") from exc

    async def run(self) -> None:
        """Keep a producer open once it is needed, and close idle connections; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_closing_idle)
            nursery.start_soon(self._keep_producer)

    async def _keep_closing_idle(self) -> None:
        while True:
            await trio.sleep(KEEP_ALIVE_S)
            self.close_idle()

    async def _keep_producer(self) -> None:
        await self._wanted.wait()
        # The destination has its own limits, and refuses what is larger.
        options: ProducerOptions = {
            "wait_connected": False,
            "max_msg_size": MAX_INT32,
            "max_body_size": MAX_INT32,
            **self._options.producer,
        }
        async with Producer(self._tcp, **options) as self._producer:
            self._opened.set()
            await trio.sleep_forever()

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
        for each in self._numbered.values():
            with suppress(OSError):
                each.publisher.close()


def _advice(code: str) -> str:
    if code in ("BAD_MESSAGE", "MSG_TOO_BIG", "E_BAD_MESSAGE"):
        return ". Start the destination with a --max-msg-size as large as the source's"
    if code in ("BODY_TOO_BIG", "BAD_BODY", "E_BAD_BODY"):
        return ". Start the destination with a larger --max-body-size"
    if code == "INVALID_DEFER":
        return ". Start the destination with a --max-defer as large as the source's"
    return ""
