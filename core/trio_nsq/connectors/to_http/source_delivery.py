"""Delivers the messages of a source to receivers, and answers each message by the result of its request.

A message stays in flight while it waits for a receiver, and is touched. It is finished once a receiver has accepted it,
or once it is stored in the dead-letter topic. A message whose request failed is requeued with a delay. So a message is
never lost, and may be sent several times.

While all receivers pause, the broker sends nothing more; after a pause, it sends one message. While they are slow, no
more messages are in flight than they take before the broker's longest message timeout; a message that waited for too
long is requeued, and one that has timed out is not sent.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import trio

from trio_nsq.client.consuming.message import Message, MessageBatch

from ..source.channel_source import ChannelSource
from .delivery import Delivery
from .outcomes import SPLIT_STATUSES, Outcome, Verdict
from .requests import RequestBuilder

HOLD_S = 600.0
"""A message that waits longer is requeued: by default, brokers do not extend its timeout beyond 15 minutes."""
HOLD_PART = 0.6
"""If a broker has a shorter limit, a message waits for this part of it; the rest is for the request."""
GRACE_S = 5.0
"""After an interruption, running requests may end within this time."""
MOST_REQUEUES = 100
"""If the broker's limit of attempts is further away, the program stores the message itself."""
_RANK = (Verdict.DONE, Verdict.FINAL, Verdict.UNAVAILABLE, Verdict.FAILED)
"""If a message goes to several receivers, the last of these counts."""
_EARLY_PART = 0.05
"""A message counts as timed out this part of its timeout before: the broker's clock began earlier."""
_MIN_PRUNED = 16
"""Answered batches are forgotten when this many are held, or twice as many as were left the last time."""


class SourceDelivery:
    """The delivery of one source's messages.

    Args:
        delivery: What all sources share.
        channel: The channel that the source consumes.
        max_in_flight: The largest number of messages in flight.
    """

    def __init__(self, delivery: Delivery, source: ChannelSource, channel: str, max_in_flight: int) -> None:
        self._delivery = delivery
        self._options = delivery.options
        self._source = source
        self._builder = RequestBuilder(delivery.options, source.topic, channel)
        self._dead_letter_topic = delivery.options.dead_letter_topic_of(source.topic)
        self._full = max_in_flight
        self._held: dict[MessageBatch, None] = {}  # a set in order of arrival
        self._ended = 0  # requests since the held batches were looked at
        self._touched_at = -math.inf
        self._max_timeout_s = math.inf  # the shortest of the brokers so far
        self._pending: deque[Message] = deque()
        self._sending: set[tuple[str, bytes]] = set()  # brokers and ids of the messages of running requests
        self._again: dict[tuple[str, bytes], Message] = {}  # delivered again while their requests run
        self._arrived = trio.Event()
        self._running: set[trio.CancelScope] = set()

    async def run(self) -> None:
        """Deliver until cancelled; running requests then have `GRACE_S`. Lets the errors of `receive` pass."""
        self._delivery.sources += 1
        try:
            await self._run()
        finally:
            self._delivery.sources -= 1

    async def _run(self) -> None:
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
            if sample < 1:
                for message in batch:
                    if random() >= sample:
                        message.finish()
                        self._delivery.statistics.sampled_out += 1
            if batch.unanswered_count:
                self._held[batch] = None
                self._max_timeout_s = min(self._max_timeout_s, next(iter(batch)).max_timeout_s)
            self._pending.extend(message for message in batch if not message.answered)
            self._wake_dispatcher()

    def _wake_dispatcher(self) -> None:
        self._arrived.set()
        self._arrived = trio.Event()

    def _forget_answered(self) -> None:
        """Forget batches whose messages are answered, or delivered again: they keep bodies in memory."""
        self._ended = 0
        for batch in [each for each in self._held if not (each.unanswered_count and each.connected)]:
            del self._held[batch]

    async def _touch(self) -> None:
        """Restart the message timeouts, so that messages may wait."""
        while True:
            await self._wait_until(lambda: bool(self._held))
            await trio.sleep(min(next(iter(each)).timeout_s for each in self._held) / 3)
            self._forget_answered()
            now = trio.current_time()
            for batch in self._held:
                if _times_out_at(next(iter(batch))) > now:  # otherwise the broker would refuse it
                    batch.touch()
            self._touched_at = now

    def _is_in_flight(self, message: Message) -> bool:
        """Return whether the broker still waits for the answer."""
        since = max(message.received_at, self._touched_at)
        until = min(since + message.timeout_s, _times_out_at(message))
        return message.connected and trio.current_time() < until - _EARLY_PART * message.timeout_s

    def _update_limit(self, now: float) -> None:
        room = self._delivery.pool.room(now)
        limit = self._full if room is None else min(room, self._full)
        at_a_time = -(-self._options.concurrency * self._options.batching.messages // self._delivery.sources)
        limit = min(limit, at_a_time * self._delivery.pace.rounds(self._max_timeout_s))
        if self._source.consumer.max_in_flight != limit:
            self._source.consumer.max_in_flight = limit

    async def _limit(self) -> None:
        """Let the broker send no more than the receivers take."""
        while True:
            now = trio.current_time()
            self._update_limit(now)
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
        """Take the messages of the next request; empty if none of those that wait is to be sent now."""
        batching = self._options.batching
        taken: list[Message] = []
        size = 0
        while self._pending and len(taken) < batching.messages:
            message = self._pending[0]
            if not self._is_to_be_sent(message):
                self._pending.popleft()
                continue
            size += len(message.body)
            # A message at its last attempt goes alone: it must not fail because of another one.
            is_single = (
                self._is_last_attempt(message) or (message.nsqd_address, message.id) in self._delivery.refused
            )
            if taken and (size > batching.bytes or is_single):
                break
            taken.append(self._pending.popleft())
            if is_single:
                break
        self._sending.update((each.nsqd_address, each.id) for each in taken)
        return taken

    def _is_to_be_sent(self, message: Message) -> bool:
        """Return whether to send a message now; if not, answer it, unless the broker delivers it again anyway."""
        if not self._is_in_flight(message):
            message.abandon()
            return False
        if (key := (message.nsqd_address, message.id)) in self._sending:
            # Its earlier delivery timed out, or lost its connection. The result of that request counts.
            self._again[key] = message
            return False
        if self._delivery.was_accepted(message):
            message.finish()
            return False
        send_until = self._delivery.pace.send_until(message.received_at, message.max_timeout_s)
        if trio.current_time() > min(_hold_until(message), send_until):
            message.requeue(0, backoff=False)
            self._delivery.statistics.requeued += 1
            return False
        return True

    def _is_last_attempt(self, message: Message) -> bool:
        return 0 < self._options.max_attempts <= message.attempts

    async def _run_request(self, messages: list[Message]) -> None:
        try:
            if (reason := self._delivery.refusal(messages[0])) is not None:
                await self._give_up(messages[0], reason, again=True)
            else:
                await self._deliver(messages)
        finally:
            keys = [(each.nsqd_address, each.id) for each in messages]
            self._sending.difference_update(keys)
            self._delivery.slots.release()
            if again := [self._again.pop(key) for key in keys if key in self._again]:
                self._pending.extendleft(again)
                self._wake_dispatcher()
            self._update_limit(trio.current_time())
            self._ended += 1
            if self._ended >= max(_MIN_PRUNED, len(self._held) // 4):  # so each request costs little
                self._forget_answered()

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
        until = min(map(_hold_until, messages))
        outcome = Outcome(Verdict.UNAVAILABLE)
        while outcome.verdict is Verdict.UNAVAILABLE:
            # After an interruption no request may begin: only those that ran then have a deadline.
            await trio.lowlevel.checkpoint_if_cancelled()
            lease = await self._delivery.lease(among, until)
            if lease is None:
                break
            if not all(map(self._is_in_flight, messages)):
                # They waited, and the broker delivers some of them again.
                self._delivery.release(lease)
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
        """Answer messages by the result of their request; those that have timed out get no answer."""
        statistics = self._delivery.statistics
        late = [each for each in messages if not self._is_in_flight(each)]
        for message in late:
            message.abandon()
        if outcome.verdict is Verdict.DONE:
            statistics.delivered += len(messages)
            self._delivery.record_late(late)
        messages = [each for each in messages if not each.answered] if late else messages
        if not messages:
            return
        if outcome.verdict is Verdict.DONE:
            for message in messages:
                message.finish()
        elif outcome.verdict is Verdict.UNAVAILABLE:
            statistics.requeued += len(messages)
            for message in messages:
                message.requeue(0, backoff=False)
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
                    message.requeue(delay_s=delay_ms / 1000, backoff=False)
                    self._delivery.record_failed(1, outcome.reason)

    async def _give_up(self, message: Message, reason: str, *, again: bool = False) -> None:
        """Store a message in the dead-letter topic, and finish it; requeue it if the topic takes none for long.

        If the broker stores it by itself, have it do so.

        Args:
            again: The message was given up before, and the broker has delivered it again: some of its attempts do not
                count at the broker, because they ended before a consumer began the message.
        """
        if self._options.dead_letter_topic is None:
            limit = await self._delivery.limits.attempts(message.nsqd_address, self._source.topic)
            if 0 < limit <= message.attempts + MOST_REQUEUES:
                self._delivery.refuse(message, reason)
                if message.attempts == limit or (message.attempts > limit and not again):
                    self._delivery.record_dead(
                        f"that of the channel's settings on {message.nsqd_address}", reason
                    )
                message.requeue(0, backoff=False)
                return
        with trio.move_on_at(_hold_until(message)) as waiting:
            await self._delivery.letters.store(
                message.nsqd_address, self._dead_letter_topic, message.body, message.headers
            )
        if waiting.cancelled_caught:
            message.requeue(backoff=False)
            self._delivery.statistics.requeued += 1
            return
        message.finish()
        self._delivery.record_dead(self._dead_letter_topic, reason)


def _times_out_at(message: Message) -> float:
    """Return when the broker delivers a message again, however often it is touched."""
    return message.received_at + message.max_timeout_s


def _hold_until(message: Message) -> float:
    """Return up to when a message may wait: the broker must not deliver it again meanwhile."""
    return message.received_at + min(HOLD_S, HOLD_PART * message.max_timeout_s)
