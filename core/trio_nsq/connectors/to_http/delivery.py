"""What the deliveries of all sources share: receivers, requests, slots, counts, and what is remembered of messages."""

import logging
import math
import random as random_module
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import trio

from trio_nsq.client.consuming.message import Message

from .broker_limits import BrokerLimits
from .dead_letters import DeadLetters
from .options import DeliveryOptions
from .outcomes import Outcome, Verdict
from .pace import Pace
from .receivers import Change, Lease, ReceiverPool
from .requests import RequestBuilder
from .sender import Sender
from .statistics import Reports, Statistics
from .templates import UnsafeValue

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

_REMEMBERED = 10_000
"""Requeued messages for which to remember which receivers have accepted them, or why they are not sent again."""


class Delivery:
    """Sends the requests of all sources.

    Args:
        letters: Stores messages that cannot be delivered.
        limits: Tells whether the broker does that itself.
        random: Returns numbers in [0, 1).
        statistics: Counts what is done.

    Attributes:
        refused: Messages that must not be sent again, by broker and id, with the reason. They are requeued until the
            broker makes them dead letters.
        pace: How long requests take.
        sources: The number of sources; they share the slots.
    """

    def __init__(
        self,
        options: DeliveryOptions,
        letters: DeadLetters,
        limits: BrokerLimits,
        random: Callable[[], float] = random_module.random,
        statistics: Statistics | None = None,
    ) -> None:
        self.options = options
        self.statistics: Statistics = Statistics() if statistics is None else statistics
        self.random = random
        self.slots: trio.Semaphore = trio.Semaphore(options.concurrency)
        self.letters = letters
        self.limits = limits
        self.refused: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self.pool: ReceiverPool = ReceiverPool(
            len(options.urls), options.mode, random, options.max_retry_after_s
        )
        self.changed = trio.Event()
        self.pace: Pace = Pace()
        self.sources = 0
        self._warned_late = False
        self._sender = Sender(options.sender)
        self._accepted: OrderedDict[tuple[str, bytes], frozenset[int]] = OrderedDict()
        self._dead = Reports("stored as a dead letter", "stored as dead letters")
        self._failed = Reports("to be tried again", "to be tried again")

    async def run(self) -> None:
        """Close connections to receivers that were idle for long; runs until cancelled."""
        await self._sender.keep_closing_idle()

    async def aclose(self) -> None:
        """Close idle connections to receivers, and report dead letters that are not reported yet."""
        self._warn(self._dead.rest())
        await self._sender.aclose()

    # ------------------------------------------------------------------ requests

    async def lease(self, among: Collection[int] | None, until: float) -> Lease | None:
        """Wait for a receiver; None: there is none until this time."""
        while (lease := self.pool.lease(now := trio.current_time(), among)) is None:
            if now >= until:
                return None
            with trio.move_on_at(min(until, self.pool.next_deadline(now, among))):
                await self.changed.wait()
        return lease

    def release(self, lease: Lease) -> None:
        self.pool.cancel(lease)
        self._notify()

    async def send(self, lease: Lease, builder: RequestBuilder, messages: Sequence[Message]) -> Outcome:
        """Send one request, and settle the lease."""
        outcome = None
        try:
            values = [*map(builder.values, messages)]
            request = builder.build(lease.receiver.index, values)
            outcome = await self._sender.send(request.method, request.url, request.headers, request.content)
        except UnsafeValue as error:
            self.statistics.record_outcome(f"{self.label(lease.receiver.index)}: {error}")
            return Outcome(Verdict.FINAL, str(error))
        finally:
            if outcome is None or outcome.was_not_sent:
                self.release(lease)
        if not outcome.was_not_sent:
            self._settle(lease, outcome)
        failed = outcome.verdict is not Verdict.DONE
        self.statistics.record_outcome(
            f"{self.label(lease.receiver.index)}: {outcome.reason}" if failed else ""
        )
        return outcome

    def _settle(self, lease: Lease, outcome: Outcome) -> None:
        now = trio.current_time()
        label = self.label(lease.receiver.index)
        change = self.pool.settle(lease, outcome, now)
        self.statistics.record_request(label, now - lease.since)
        self.pace.record(now - lease.since)
        if change is Change.LEFT_OUT:
            wait_s = lease.receiver.paused_until - now
            logger.warning("%s: %s; tried again in %.0f s", label, outcome.reason, math.ceil(wait_s))
        elif change is Change.BACK:
            logger.info("%s takes requests again", label)
        if lease.is_trial or change is not Change.NONE:
            self._notify()
        if (line := self.statistics.line(self.options.status_every, now)) is not None:
            logger.info("%s", line)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def label(self, receiver: int) -> str:
        """Return method and URL of a receiver, without secrets."""
        return f"{self.options.method} {self.options.urls[receiver].label}"

    # ------------------------------------------------------------------ what receivers have accepted

    def record_late(self, messages: Sequence[Message]) -> None:
        """Remember messages that were accepted, but cannot be finished: the broker delivers them again. Warn once."""
        if messages:
            self.remember(messages, range(len(self.options.urls)))
            if not self._warned_late and messages[0].connected:
                self._warned_late = True
                logger.warning(
                    "a request took longer than the broker at %s waits for an answer, at most %g s: it delivers the "
                    "message again. Start the broker with a larger --max-msg-timeout, or give a shorter "
                    "--http-client-request-timeout",
                    *(messages[0].nsqd_address, messages[0].max_timeout_s),
                )

    def was_accepted(self, message: Message) -> bool:
        """Return whether all receivers have accepted a message that is delivered again, and forget it if so."""
        if self._accepted and not self.missing(message):
            self.forget([message])
            return True
        return False

    def missing(self, message: Message) -> frozenset[int]:
        """Return the receivers that have not accepted a message."""
        everyone = frozenset(range(len(self.options.urls)))
        return everyone - self._accepted.get((message.nsqd_address, message.id), frozenset())

    def remember(self, messages: Iterable[Message], accepted: Collection[int]) -> None:
        """Remember which receivers have accepted messages that are delivered again."""
        for message in messages:
            key = (message.nsqd_address, message.id)
            self._accepted[key] = self._accepted.pop(key, frozenset()) | frozenset(accepted)
        while len(self._accepted) > _REMEMBERED:
            self._accepted.popitem(last=False)

    def forget(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._accepted.pop((message.nsqd_address, message.id), None)

    # ------------------------------------------------------------------ dead letters

    def refuse(self, message: Message, reason: str) -> None:
        """Remember that a message must not be sent again."""
        self.refused[message.nsqd_address, message.id] = reason
        while len(self.refused) > _REMEMBERED:
            self.refused.popitem(last=False)

    def refusal(self, message: Message) -> str | None:
        """Return why a message must not be sent again, and forget it; None: it may be sent."""
        return self.refused.pop((message.nsqd_address, message.id), None) if self.refused else None

    def record_dead(self, topic: str, reason: str) -> None:
        """Count a dead letter, and warn."""
        self.statistics.dead += 1
        self._warn(self._dead.add(f"{reason}. The dead-letter topic is {topic}", trio.current_time()))

    def record_failed(self, count: int, reason: str) -> None:
        """Count messages that are requeued because their request failed, and warn."""
        self.statistics.requeued += count
        self._warn(self._failed.add(reason, trio.current_time(), count))

    def _warn(self, text: str | None) -> None:
        if text is not None:
            logger.warning("%s", text)
