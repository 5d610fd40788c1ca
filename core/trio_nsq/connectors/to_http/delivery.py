"""Delivers the messages of sources to receivers, and answers each message by the result of its request.

A message stays in flight while it waits for a receiver, and is touched. It is finished once a receiver has accepted it,
or once it is stored in the dead-letter topic. A message whose request failed is requeued with a delay. So a message is
never lost, and may be sent several times.

While all receivers pause, the broker sends nothing more; after a pause, it sends one message.
"""

import logging
import math
import random as random_module
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

import trio

from trio_nsq.client.consuming.message import Message, MessageBatch
from trio_nsq.wording import count_of

from ..source.channel_source import ChannelSource
from .dead_letters import DeadLetters
from .options import DeliveryOptions
from .outcomes import SPLIT_STATUSES, Outcome, Verdict
from .receivers import Change, Lease, ReceiverPool
from .requests import RequestBuilder
from .sender import Sender
from .statistics import Statistics
from .templates import UnsafeValue

logger = logging.getLogger("trio_nsq.connectors")

HOLD_S = 600.0
"""A message that waits longer is requeued: brokers do not extend its timeout beyond 15 minutes."""
GRACE_S = 5.0
"""After an interruption, running requests may end within this time."""
REPORT_S = 10.0
"""The shortest time between two warnings of the same kind."""
_ACCEPTED = 10_000
"""Requeued messages for which to remember the receivers that accepted them, with several receivers for each message."""
_RANK = (Verdict.DONE, Verdict.FINAL, Verdict.UNAVAILABLE, Verdict.FAILED)
"""If a message goes to several receivers, the last of these counts."""


class _Reports:
    """Warns of messages that were not delivered, at most once in `REPORT_S`, with their number."""

    def __init__(self, one: str, many: str) -> None:
        self._one = one
        self._many = many
        self._unreported = 0
        self._reported_at = -math.inf

    def add(self, reason: str, now: float, count: int = 1) -> None:
        """Count messages, and warn if it is time."""
        self._unreported += count
        if now >= self._reported_at + REPORT_S:
            self._reported_at = now
            self._report(f"; the last one: {reason}")

    def flush(self) -> None:
        """Warn of those that were not reported."""
        if self._unreported:
            self._report("")

    def _report(self, details: str) -> None:
        count, self._unreported = self._unreported, 0
        what = self._one if count == 1 else self._many
        logger.warning("%s not delivered and %s%s", count_of(count, "message"), what, details)


class Delivery:
    """Delivers messages of any number of consumers.

    Args:
        letters: Stores messages that cannot be delivered.
        random: Returns numbers in [0, 1).
        statistics: Counts what is done.
    """

    def __init__(
        self,
        options: DeliveryOptions,
        letters: DeadLetters,
        random: Callable[[], float] = random_module.random,
        statistics: Statistics | None = None,
    ) -> None:
        self.options = options
        self.statistics = Statistics() if statistics is None else statistics
        self.random = random
        self.slots = trio.Semaphore(options.concurrency)
        self.letters = letters
        self.pool = ReceiverPool(len(options.urls), options.mode, random, options.max_retry_after_s)
        self.changed = trio.Event()
        self._sender = Sender(options.sender)
        self._accepted: OrderedDict[tuple[str, bytes], frozenset[int]] = OrderedDict()
        self._dead = _Reports("stored as a dead letter", "stored as dead letters")
        self._failed = _Reports("to be tried again", "to be tried again")

    async def aclose(self) -> None:
        """Close idle connections to receivers, and report dead letters that are not reported yet."""
        self._dead.flush()
        await self._sender.aclose()

    async def handle(self, source: ChannelSource, channel: str) -> None:
        """Deliver the messages of a source until the task is cancelled. Lets the errors of `receive` pass.

        If it is cancelled, running requests may end within `GRACE_S`.
        """
        await _Work(self, source, RequestBuilder(self.options, source.topic, channel)).run()

    # ------------------------------------------------------------------ requests

    async def lease(self, among: Collection[int] | None, until: float) -> Lease | None:
        """Wait for a receiver; None: there is none until this time."""
        while (lease := self.pool.lease(now := trio.current_time(), among)) is None:
            if now >= until:
                return None
            with trio.move_on_at(min(until, self.pool.next_deadline(now, among))):
                await self.changed.wait()
        return lease

    async def send(self, lease: Lease, builder: RequestBuilder, messages: Sequence[Message]) -> Outcome:
        """Send one request, and settle the lease."""
        outcome = None
        try:
            values = [
                builder.values(each.id, each.timestamp_ns, each.attempts, each.body) for each in messages
            ]
            request = builder.build(lease.receiver.index, values)
            outcome = await self._sender.send(request.method, request.url, request.headers, request.content)
        except UnsafeValue as error:
            return Outcome(Verdict.FINAL, str(error))
        finally:
            if outcome is None:
                self.pool.cancel(lease)
                self._notify()
        self._settle(lease, outcome)
        return outcome

    def _settle(self, lease: Lease, outcome: Outcome) -> None:
        now = trio.current_time()
        label = self.label(lease.receiver.index)
        change = self.pool.settle(lease, outcome, now)
        self.statistics.record_request(label, now - lease.since)
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

    # ------------------------------------------------------------------ several receivers for each message

    def missing(self, message: Message) -> frozenset[int]:
        """Return the receivers that have not accepted a message."""
        everyone = frozenset(range(len(self.options.urls)))
        return everyone - self._accepted.get((message.nsqd_address, message.id), frozenset())

    def remember(self, messages: Iterable[Message], accepted: Collection[int]) -> None:
        """Remember which receivers have accepted messages that are delivered again."""
        for message in messages:
            key = (message.nsqd_address, message.id)
            self._accepted[key] = self._accepted.pop(key, frozenset()) | frozenset(accepted)
        while len(self._accepted) > _ACCEPTED:
            self._accepted.popitem(last=False)

    def forget(self, messages: Iterable[Message]) -> None:
        """Forget messages that are finished."""
        for message in messages:
            self._accepted.pop((message.nsqd_address, message.id), None)

    # ------------------------------------------------------------------ dead letters

    def record_dead(self, topic: str, reason: str) -> None:
        """Count a dead letter, and warn."""
        self.statistics.dead += 1
        self._dead.add(f"topic {topic}, {reason}", trio.current_time())

    def record_failed(self, count: int, reason: str) -> None:
        """Count messages that are requeued because their request failed, and warn."""
        self.statistics.requeued += count
        self._failed.add(reason, trio.current_time(), count)


class _Work:
    """The delivery of one source's messages."""

    def __init__(self, delivery: Delivery, source: ChannelSource, builder: RequestBuilder) -> None:
        self._delivery = delivery
        self._options = delivery.options
        self._source = source
        self._builder = builder
        self._dead_letter_topic = delivery.options.dead_letter_topic_of(source.topic)
        self._full = source.consumer.max_in_flight
        self._held: dict[MessageBatch, None] = {}  # a set in order of arrival
        self._pending: deque[Message] = deque()
        self._arrived = trio.Event()
        self._running: set[trio.CancelScope] = set()

    async def run(self) -> None:
        """See `Delivery.handle`."""
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            for task in (self._touch, self._limit):
                nursery.start_soon(task)
            nursery.start_soon(self._dispatch, nursery)
            try:
                await self._receive()
            except Exception as failure:  # raised below: the nursery would wrap it
                error = failure
            finally:
                for scope in self._running:
                    scope.deadline = min(scope.deadline, trio.current_time() + GRACE_S)
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error

    async def _receive(self) -> None:
        sample, random = self._options.sample, self._delivery.random
        while True:
            batch = (await self._source.receive()).delivery
            assert batch is not None  # it is a channel's
            self._held[batch] = None
            if sample < 1:
                for message in batch:
                    if random() >= sample:
                        message.finish()
                        self._delivery.statistics.sampled_out += 1
            self._pending.extend(message for message in batch if not message.answered)
            self._arrived.set()
            self._arrived = trio.Event()

    async def _touch(self) -> None:
        """Restart the message timeouts, so that messages may wait."""
        while True:
            await self._wait_until(lambda: bool(self._held))
            await trio.sleep(min(next(iter(each)).timeout_s for each in self._held) / 3)
            for batch in list(self._held):
                if batch.unanswered_count and batch.connected:
                    batch.touch()
                else:
                    del self._held[batch]

    async def _limit(self) -> None:
        """Let the broker send no more than the receivers take."""
        while True:
            now = trio.current_time()
            room = self._delivery.pool.room(now)
            limit = self._full if room is None else min(room, self._full)
            if self._source.consumer.max_in_flight != limit:
                self._source.consumer.max_in_flight = limit
            with trio.move_on_at(self._delivery.pool.next_room(now)):
                await self._delivery.changed.wait()

    # ------------------------------------------------------------------ requests

    async def _dispatch(self, nursery: trio.Nursery) -> None:
        while True:
            await self._wait_for_messages()
            await self._delivery.slots.acquire()
            if messages := self._take():
                nursery.start_soon(self._run_request, messages)
            else:
                self._delivery.slots.release()

    async def _wait_for_messages(self) -> None:
        """Wait for a message, and then, if messages are combined, for enough of them."""
        batching = self._options.batching
        await self._wait_until(lambda: bool(self._pending))
        if batching.messages > 1:
            with trio.move_on_after(batching.wait_s):
                await self._wait_until(self._is_enough)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        while not condition():
            await self._arrived.wait()

    def _is_enough(self) -> bool:
        batching = self._options.batching
        if len(self._pending) >= batching.messages or self._source.is_starved():
            return True
        return sum(len(each.body) for each in self._pending) >= batching.bytes

    def _take(self) -> list[Message]:
        """Take the messages of the next request; empty if the broker delivers all of them again."""
        batching = self._options.batching
        taken: list[Message] = []
        size = 0
        while self._pending and len(taken) < batching.messages:
            message = self._pending[0]
            if not message.connected:
                self._pending.popleft()
                continue
            size += len(message.body)
            # A message at its last attempt goes alone: it must not fail because of another one.
            if taken and (size > batching.bytes or self._is_last_attempt(message)):
                break
            taken.append(self._pending.popleft())
            if self._is_last_attempt(message):
                break
        return taken

    def _is_last_attempt(self, message: Message) -> bool:
        return 0 < self._options.max_attempts <= message.attempts

    async def _run_request(self, messages: list[Message]) -> None:
        try:
            await self._deliver(messages)
        finally:
            self._delivery.slots.release()

    async def _deliver(self, messages: list[Message]) -> None:
        """Send messages, and answer them."""
        if self._options.mode is not None:
            await self._conclude(messages, await self._send(messages, None))
            return
        for missing, group in groupby(messages, key=self._delivery.missing):
            same = list(group)
            await self._conclude(same, await self._send_to_all(same, missing))

    async def _send_to_all(self, messages: Sequence[Message], receivers: Collection[int]) -> Outcome:
        """Send messages to each of these receivers; return the result that counts."""
        outcomes: dict[int, Outcome] = {}

        async def send(receiver: int) -> None:
            outcomes[receiver] = await self._send(messages, {receiver})

        async with trio.open_nursery() as nursery:
            for receiver in receivers:
                nursery.start_soon(send, receiver)
        done = [receiver for receiver, outcome in outcomes.items() if outcome.verdict is Verdict.DONE]
        if len(done) == len(outcomes):
            self._delivery.forget(messages)
            return Outcome(Verdict.DONE)
        self._delivery.remember(messages, done)
        return max(outcomes.values(), key=lambda outcome: _RANK.index(outcome.verdict))

    async def _send(self, messages: Sequence[Message], among: Collection[int] | None) -> Outcome:
        """Send messages to one of the receivers; while it takes none, wait, or send them to another one."""
        until = min(each.received_at for each in messages) + HOLD_S
        outcome = Outcome(Verdict.UNAVAILABLE)
        while outcome.verdict is Verdict.UNAVAILABLE:
            lease = await self._delivery.lease(among, until)
            if lease is None:
                break
            with trio.CancelScope(shield=True) as scope:
                self._running.add(scope)
                try:
                    outcome = await self._delivery.send(lease, self._builder, messages)
                finally:
                    self._running.discard(scope)
            if scope.cancelled_caught:
                await trio.lowlevel.checkpoint_if_cancelled()
            if outcome.verdict in (Verdict.FINAL, Verdict.FAILED):
                reason = f"{self._delivery.label(lease.receiver.index)}: {outcome.reason}"
                outcome = Outcome(outcome.verdict, reason, outcome.status)
        return outcome

    async def _conclude(self, messages: list[Message], outcome: Outcome) -> None:
        """Answer messages by the result of their request."""
        statistics = self._delivery.statistics
        if outcome.verdict is Verdict.DONE:
            for message in messages:
                message.finish()
            statistics.delivered += len(messages)
        elif outcome.verdict is Verdict.UNAVAILABLE:
            for message in messages:
                message.requeue(0, backoff=False)
            statistics.requeued += len(messages)
        elif outcome.verdict is Verdict.FINAL and len(messages) > 1 and outcome.status in SPLIT_STATUSES:
            middle = len(messages) // 2
            for half in (messages[:middle], messages[middle:]):
                await self._deliver(half)
        else:
            for message in messages:
                if outcome.verdict is Verdict.FINAL or self._is_last_attempt(message):
                    await self._give_up(message, outcome.reason)
                else:
                    delay_ms = self._options.delays.delay_ms(message.attempts, self._delivery.random)
                    message.requeue(delay_ms, backoff=False)
                    self._delivery.record_failed(1, outcome.reason)

    async def _give_up(self, message: Message, reason: str) -> None:
        """Store a message in the dead-letter topic, and finish it; requeue it if the topic takes none for long."""
        with trio.move_on_at(message.received_at + HOLD_S) as waiting:
            await self._delivery.letters.store(message.nsqd_address, self._dead_letter_topic, message.body)
        if waiting.cancelled_caught:
            message.requeue(backoff=False)
            self._delivery.statistics.requeued += 1
            return
        message.finish()
        self._delivery.record_dead(self._dead_letter_topic, reason)
