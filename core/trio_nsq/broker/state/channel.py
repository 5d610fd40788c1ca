"""A channel of a topic: its settings and counters, its consumers, and their answers.

Synchronous state: no awaits, clock or sockets. Time is the parameter `now_ns`; deliveries are return values.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any, Final

from ...log.record_metadata import Reason
from ...protocol import is_ephemeral
from .batch import Batch
from .channel_messages import ChannelMessages
from .checkpoint import ChannelState
from .consumer import Consumer
from .deferred import DeferredMessages
from .dispatcher import Dispatcher
from .idleness import IN_USE, idle_since, idle_since_by_other_clock
from .in_flight_batch import InFlightBatch
from .message_keys import Key, MessageKeys
from .message_store import MessageStore
from .move import MoveStream
from .quantiles import RecentSketch
from .read_ahead import ReadAhead
from .settings import ChannelSettings, SettingsError, change
from .timeouts import TimedOut, Timeouts
from .topic_view import TopicView
from .version import Version
from .withdrawn import WithdrawnMessage

_NS_PER_MS: Final = 1_000_000
_OWNER_SEARCH_IDS: Final = 64
_OWNER_SEARCH_CONSUMERS: Final = 8
"""Bounds of the search for the owner of an id that is not in flight with the client that answers."""


class Channel:
    """One channel of a topic.

    Args:
        name: Valid, and unique in the topic.
        cursor: The first sequence it will deliver.

    Attributes:
        private: The channel only shows new messages to its creator, and does not affect other channels: see `Topic`.
            Private channels are ephemeral.
        messages: The unfinished messages.
        consumers: In the order of subscription.
        message_count, finish_count, requeue_count, timeout_count: Since the broker started.
        dead_letter_count: Messages moved to the dead-letter topic since the broker started.
        given_up_count: Messages dropped after their last attempt, because no dead-letter topic is set.
        e2e_latency: Recent nanoseconds from publish to FIN; None if not measured.
        ephemeral: The channel is deleted with its last consumer, and is not saved.
        oldest_published: Sequence and timestamp of its oldest message, as `OldestMessages` last found them; None if
            unknown. If the timestamp had to be read from disk, the message usually stays the oldest for long.
        stream: The move of its messages to another broker; None if they are not moved. Set by `hold` and `release`.
        on_deadline: Called with each new deadline that may be the next one; None: nothing is called.
    """

    def __init__(
        self,
        topic: TopicView,
        store: MessageStore,
        name: str,
        cursor: int,
        version: Version | None = None,
        *,
        private: bool = False,
    ) -> None:
        self.topic = topic
        self.store = store
        self.name = name
        self.private = private
        self.ephemeral: bool = is_ephemeral(name)
        self.message_count: int = 0
        self.finish_count: int = 0
        self.requeue_count: int = 0
        self.timeout_count: int = 0
        self.dead_letter_count: int = 0
        self.given_up_count: int = 0
        self.e2e_latency: RecentSketch | None = (
            RecentSketch(topic.e2e_window_ns) if topic.e2e_window_ns else None
        )
        self.settings: ChannelSettings = topic.channel_defaults
        self._own_settings: dict[str, Any] = {}  # by name
        self._version = version or Version()
        self.on_deadline: Callable[[Channel, int], object] | None = None
        self.timeouts: Timeouts = Timeouts(self._watch)
        self.messages: ChannelMessages = ChannelMessages(
            topic, cursor, self._version, self._watch, private=private
        )
        self.consumers: dict[Consumer, None] = self.messages.consumers
        self.read_ahead: ReadAhead = ReadAhead(store, self.messages)
        self.dispatcher: Dispatcher = Dispatcher(
            name, topic, self.messages, self.read_ahead, self.timeouts, self._watch
        )
        self.oldest_published: tuple[int, int] | None = None
        self.stream: MoveStream | None = None
        self._idle_since_ns = IN_USE  # as `examine_use` last found
        self._sent_to_past = [0, 0, 0]  # messages to consumers that have left, by nearness
        self._is_paused = False  # by an operator
        self._state: ChannelState | None = None  # the last result of `state`
        self._state_number = 0  # its version number

    # ------------------------------------------------------------------ counts

    @property
    def cursor(self) -> int:
        """The lowest sequence that was never delivered."""
        return self.messages.cursor.position

    @property
    def depth(self) -> int:
        return self.messages.depth

    @property
    def backend_depth(self) -> int:
        """The part of `depth` that would have to be read from disk."""
        fresh = self.messages.fresh
        return max(0, min(fresh, self.store.cached_from - self.cursor)) if fresh > 0 else 0

    def counts(self) -> tuple[int, int, int, int, int, int, int, int]:
        """Return the counts that `/stats` shows, in its order, from `depth` to the number of consumers."""
        return (
            self.depth,
            self.backend_depth,
            self.in_flight_count,
            self.deferred_count,
            self.message_count,
            self.requeue_count,
            self.timeout_count,
            len(self.consumers),
        )

    def sent_by_nearness(self) -> list[int]:
        """Return how many messages were sent to consumers in the zone, in the region, and elsewhere."""
        counts = self._sent_to_past.copy()
        for consumer in self.consumers:
            counts[consumer.nearness] += consumer.message_count
        return counts

    @property
    def has_work(self) -> bool:
        """Whether a message can be delivered, or must be moved to the dead-letter topic."""
        return self.dispatcher.can_deliver or self.messages.withdrawn.waiting > 0

    @property
    def in_flight_count(self) -> int:
        return self.messages.in_flight_count

    @property
    def deferred_count(self) -> int:
        return len(self.messages.deferred)

    # ------------------------------------------------------------------ settings

    @property
    def paused(self) -> bool:
        """Whether the channel sends no messages to consumers, also during a move. All else continues."""
        return self.dispatcher.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._is_paused = paused
        self.dispatcher.paused = paused or self.stream is not None
        self._version.increment()

    def hold(self, stream: MoveStream) -> None:
        """Deliver nothing from now on: a move to another broker begins."""
        self.stream = stream
        self.paused = self._is_paused

    def fix_stream(self) -> None:
        """Begin to send the messages: nothing is in flight any more, and they only become fewer."""
        if self.stream is not None:
            self.stream.is_fixed = True
            self._version.increment()

    def release(self) -> None:
        """End the part of this channel in a move."""
        self.stream = None
        self.messages.read_keys_again()  # the target has messages that held keys
        self.paused = self._is_paused

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings by name; None restores the default. Raises SettingsError without changing any."""
        before = self.settings.order_by
        rate_before = self.settings.rate_limit_per_s
        self.settings, self._own_settings = self._changed_settings(changes)
        if (rate := self.settings.rate_limit_per_s) != rate_before:
            self.dispatcher.limit_rate(rate)
        self._version.increment()
        if (order_by := self.settings.order_by) != before:
            self.messages.set_order(MessageKeys(order_by) if order_by else None)
        for message in self.messages.withdrawn.take_all_waiting():
            self._return(message)

    @property
    def own_settings(self) -> Mapping[str, Any]:
        """The settings that are set, by name; the others have their defaults."""
        return self._own_settings

    def settings_with(self, changes: Mapping[str, Any]) -> ChannelSettings:
        """Return the settings that `configure` would apply. Raises SettingsError."""
        return self._changed_settings(changes)[0]

    def would_drop(self, settings: ChannelSettings) -> int:
        """Count the messages that other settings would drop at once: exhausted messages that are not moved yet."""
        if not settings.max_attempts or settings.dead_letter_topic:
            return 0
        return sum(
            each.reason is not None
            and self.messages.failed_attempts(each.sequence, each.attempts) >= settings.max_attempts
            for each in self.messages.withdrawn
        )

    def _changed_settings(self, changes: Mapping[str, Any]) -> tuple[ChannelSettings, dict[str, Any]]:
        settings, own = change(self.topic.channel_defaults, self._own_settings, changes)
        if settings.dead_letter_topic == self.topic.name:
            raise SettingsError(
                "dead_letter_topic is the topic itself; its dead letters would be delivered to the channel again"
            )
        return settings, own

    # ------------------------------------------------------------------ messages from the topic

    def arrived(self, count: int) -> None:
        self._end_idle_time()
        self.message_count += count

    def arrived_deferred(self, sequences: range, due_ns: int, held: Batch | None = None) -> None:
        """Add messages that their producer deferred; the cursor will skip them.

        Args:
            sequences: Higher than all that were passed to this method or to `skip` before.
            held: The batch that holds them, if they are only in memory.
        """
        self._end_idle_time()
        self.message_count += len(sequences)
        self.messages.defer(sequences, due_ns, held)

    def skip(self, start: int, end: int) -> None:
        """Let the cursor skip [start, end). See `arrived_deferred` for the order of calls."""
        self.messages.cursor.skip(
            start, end
        )  # ignores messages below the cursor, which the topic has dropped

    # ------------------------------------------------------------------ consumers

    def add(self, consumer: Consumer) -> None:
        self._end_idle_time()
        consumer.in_flight.version = self._version
        self.consumers[consumer] = None
        self.dispatcher.add(consumer)

    def remove(self, consumer: Consumer, *, failed: bool = True) -> None:
        """Remove a consumer, and requeue its messages in flight at once.

        nsqd requeues them only after their timeout, although no client can finish them any more.

        A client that crashes has most likely been working on the messages that `InFlight.begun` returns: only these
        count as failed. They are delivered again after the others, which would otherwise wait behind them each time.

        Args:
            failed: The client has ended the connection; False: the broker stops, so no message has failed.
        """
        if consumer not in self.consumers:
            return
        del self.consumers[consumer]
        self._sent_to_past[consumer.nearness] += consumer.message_count
        self.dispatcher.remove(consumer)
        begun = consumer.in_flight.begun(consumer.msg_timeout_ns) if failed else []
        begun_ones = {sequence for sequence, _ in begun}
        prefetched = [each for each in consumer.in_flight if each[0] not in begun_ones]
        if (order := self.messages.order) is not None:
            for sequence, delivery in consumer.in_flight:
                order.take_back(delivery.key_of(sequence), sequence)
        consumer.in_flight.clear()
        if self.settings.max_attempts:
            for sequence, _ in prefetched:
                self.messages.add_prefetched(sequence)
        self.messages.requeued.add(
            (sequence, delivery.attempts, delivery.held) for sequence, delivery in prefetched
        )
        for sequence, delivery in begun:
            self._return(delivery.returned(sequence, Reason.CONNECTION_LOST))
        if not self.consumers:
            self.read_ahead.drop_batches()

    def _return(self, message: WithdrawnMessage, due_ns: int = 0) -> None:
        """Requeue a message: deferred until `due_ns`, or at once if 0. If its attempts are exhausted, withdraw it."""
        sequence, attempts, reason, held = message
        most = self.settings.max_attempts
        if reason is not None and 0 < most <= self.messages.failed_attempts(sequence, attempts):
            if self.settings.dead_letter_topic:
                self.messages.withdrawn.add_exhausted(message)
            else:
                self.given_up_count += 1
                self.messages.release([sequence])
        elif due_ns:
            self.messages.deferred.add(due_ns, range(sequence, sequence + 1), attempts, held)
        else:
            self.messages.requeued.add([(sequence, attempts, held)])

    # ------------------------------------------------------------------ answers

    def finish(self, consumer: Consumer, lines: bytes, now_ns: int) -> list[tuple[bytes, str]]:
        """FIN: remove the messages of these lines. Returns (id, reason) for each not in flight with this consumer.

        `now_ns` is from the clock of the messages' timestamps.
        """
        in_flight = consumer.in_flight
        before = in_flight.count
        # Collected only for latency metrics.
        finished: Counter[InFlightBatch] | None = None if self.e2e_latency is None else Counter()
        order = self.messages.order
        keys: list[Key | None] | None = None if order is None else []
        failed = in_flight.finish(lines, finished, keys)
        if order is not None and keys and (freed := order.finish(keys)):
            self.messages.requeued.add(freed)
        count = before - in_flight.count
        consumer.finish_count += count
        self.finish_count += count
        if self.e2e_latency is not None and finished is not None:
            for delivery, count in finished.items():
                self.e2e_latency.add(now_ns - delivery.timestamp_ns, count, now_ns)
        self.dispatcher.refresh(consumer)
        return list(zip(failed, self._not_in_flight_reasons(failed), strict=True)) if failed else []

    def requeue(
        self,
        consumer: Consumer,
        message_id: bytes,
        delay_ms: int,
        now_ns: int,
        *,
        counts_attempt: bool = True,
    ) -> str | None:
        """REQ: requeue a message, deferred by `delay_ms` unless 0. Returns the reason if that fails.

        Without `counts_attempt`, the message has as many attempts as before this delivery. A client that closes and
        returns a message without a delay has not handled it: the delivery has not failed.
        """
        taken = consumer.in_flight.take(message_id)
        if taken is None:
            return self._not_in_flight_reasons([message_id])[0]
        sequence, delivery = taken
        if (order := self.messages.order) is not None:
            order.take_back(delivery.key_of(sequence), sequence)
        due_ns = now_ns + delay_ms * _NS_PER_MS if delay_ms else 0
        returned = delivery.returned(sequence, Reason.REQUEUED)
        if not counts_attempt:
            returned = returned._replace(attempts=returned.attempts - 1, reason=None)
        elif consumer.closing and not delay_ms:
            returned = returned._replace(reason=None)
            if self.settings.max_attempts:
                self.messages.add_prefetched(sequence)
        self._return(returned, due_ns)
        self.requeue_count += 1
        consumer.requeue_count += 1
        self.dispatcher.refresh(consumer)
        return None

    def touch(
        self, consumer: Consumer, message_id: bytes, now_ns: int, max_msg_timeout_ms: int
    ) -> str | None:
        """TOUCH: restart a message's timeout, up to `max_msg_timeout_ms` after its delivery.

        Never makes the deadline earlier, so `next_deadline_ns` stays valid. Returns the reason if it fails.
        """
        delivery = consumer.in_flight.find(message_id)
        if delivery is None:
            return self._not_in_flight_reasons([message_id])[0]
        latest_ns = delivery.delivered_ns + max_msg_timeout_ms * _NS_PER_MS
        deadline_ns = now_ns + consumer.msg_timeout_ns
        capped = deadline_ns > latest_ns
        if capped:
            deadline_ns = latest_ns
        if deadline_ns <= delivery.deadline_ns:
            return None
        if capped:
            self.timeouts.add_capped(deadline_ns, consumer, message_id)
        consumer.in_flight.touch(message_id, deadline_ns)
        return None

    def _not_in_flight_reasons(self, ids: list[bytes]) -> list[str]:
        """Return nsqd's error texts. The search for owners is bounded, so unknown ids do not scan all consumers."""
        others = list(islice(self.consumers, _OWNER_SEARCH_CONSUMERS))
        owned = {
            each
            for each in islice(ids, _OWNER_SEARCH_IDS)
            if any(consumer.in_flight.holds(each) for consumer in others)
        }
        return ["client does not own message" if each in owned else "ID not in flight" for each in ids]

    # ------------------------------------------------------------------ idle time

    @property
    def is_in_use(self) -> bool:
        """Whether the channel has a consumer or a message, or an operator holds it: it is paused or moved."""
        return bool(
            self.consumers or self.paused or self.depth or self.deferred_count or self.in_flight_count
        )

    def _end_idle_time(self) -> None:
        if self._idle_since_ns:
            self._idle_since_ns = IN_USE
            self._version.increment()

    def examine_use(self, now_ns: int) -> None:
        """Let the idle time begin if nothing uses the channel. `now_ns` is Unix nanoseconds."""
        since_ns = idle_since(self._idle_since_ns, now_ns, in_use=self.is_in_use)
        if since_ns != self._idle_since_ns:
            self._idle_since_ns = since_ns
            self._version.increment()

    @property
    def idle_since_ns(self) -> int:
        """Since when the channel has been idle, Unix nanoseconds; `IN_USE` if it was used since `examine_use`."""
        return IN_USE if self.is_in_use else self._idle_since_ns

    # ------------------------------------------------------------------ time

    def _watch(self, deadline_ns: int) -> None:
        if self.on_deadline is not None:
            self.on_deadline(self, deadline_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When to call `tick` next; None: never. That call may move nothing, if the messages were finished."""
        due_ns = self.next_due_ns
        for at_ns in (self.timeouts.next_ns, self.dispatcher.resumes_ns):
            if at_ns is not None and (due_ns is None or at_ns < due_ns):
                due_ns = at_ns
        return due_ns

    @property
    def next_due_ns(self) -> int | None:
        """When the first deferred message is due; None if there is none."""
        return self.messages.deferred.first_due_ns

    def extend_timeouts(self, by_ns: int) -> None:
        """Move the deadlines of all messages in flight, and the latest ones that TOUCH can give them."""
        self.timeouts.extend(by_ns)
        for consumer in self.consumers:
            consumer.in_flight.extend(by_ns)

    def tick(self, now_ns: int, at_most: int = sys.maxsize) -> int:
        """Requeue deferred messages that are due, and messages in flight that have timed out.

        Also ends a suspension by the rate limit, when it is time.

        Returns:
            Number of requeued messages. If it is `at_most`, more may be due; see `next_deadline_ns`.
        """
        self.dispatcher.resume(now_ns)
        released = self.messages.deferred.release(now_ns, at_most)
        if released:
            self.messages.requeued.add(released)
        moved = len(released)
        for consumer, due in self.timeouts.take_due(self.consumers, now_ns, at_most - moved):
            self._time_out(consumer, due)
            moved += len(due) or 1
        return moved

    def _time_out(self, consumer: Consumer, due: TimedOut) -> None:
        order = self.messages.order
        for sequence, delivery in due:
            if order is not None:
                order.take_back(delivery.key_of(sequence), sequence)
            self._return(delivery.returned(sequence, Reason.TIMED_OUT))
        self.timeout_count += len(due)
        self.dispatcher.refresh(consumer)

    # ------------------------------------------------------------------ operators

    def empty(self) -> list[deque[Any]]:
        """Drop all messages: ready, in flight and deferred. Keeps counters. Pass the returned queues to `forget`."""
        forgotten = self.messages.clear()
        self._forget_plan()
        self.timeouts.clear()
        self.read_ahead.clear()
        self.dispatcher.buffering.sent_bytes = None
        for consumer in self.consumers:
            self.dispatcher.refresh(consumer)
        return forgotten

    def cancel(self, sequences: Collection[int]) -> list[int]:
        """Drop the deferred messages among these, and return their sequences."""
        cancelled = [sequence for sequence, _, _ in self.messages.deferred.withdraw(sequences)]
        self.messages.release(cancelled)
        return cancelled

    def withdraw(self, sequences: Collection[int]) -> list[WithdrawnMessage]:
        """Withdraw the messages among these that are not in flight. Then call `dispose` or `put_back`."""
        holding = self.store.batch_holding if self.topic.ephemeral else None
        self._forget_plan()
        return self.messages.withdraw(sequences, holding)

    def _forget_plan(self) -> None:
        if self.stream is not None:
            self.stream.plan = None

    def confirm_moved(self, stream: MoveStream, sequence: int) -> None:
        """Drop the messages up to this sequence: the target of the move has them, durably."""
        stream.confirm(sequence)
        waiting = len(self.messages.requeued.entries) + self.deferred_count
        self.messages.drop_moved(stream.moved, now=stream.drops_now(waiting))
        self._version.increment()

    def dispose(self, messages: Iterable[WithdrawnMessage]) -> int:
        """Remove withdrawn messages; returns how many of them were not dropped meanwhile."""
        released = self.messages.withdrawn.release(messages)
        self.messages.release([message.sequence for message in released])
        return len(released)

    def dispose_dead_letters(self, messages: Iterable[WithdrawnMessage]) -> None:
        """Remove withdrawn messages that are now in the dead-letter topic."""
        self.dead_letter_count += self.dispose(messages)

    def put_back(self, messages: Iterable[WithdrawnMessage]) -> None:
        """Requeue withdrawn messages, except those dropped meanwhile."""
        for message in self.messages.withdrawn.release(messages):
            self._return(message)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> ChannelState:
        """Return the state to save; the same object until the state changes."""
        if self._state is None or self._state_number != self._version.number:
            self._state, self._state_number = self.make_state(), self._version.number
        return self._state

    def make_state(self) -> ChannelState:
        """Return a new snapshot of the state."""
        messages = self.messages
        return ChannelState(
            self.name,
            self._is_paused,
            self._own_settings,
            messages.cursor.position,
            # With 10,000 channels, objects for empty parts would cost time, also in the garbage collector.
            messages.cursor.holes,
            tuple(messages.requeued.entries),
            messages.in_flight,
            messages.deferred.copy()
            if messages.order is None
            else [*messages.order.blocks(), *messages.deferred.copy()],
            tuple(messages.withdrawn),
            self.stream.moved if self.stream is not None and self.stream.is_fixed else None,
            tuple(messages.prefetched.items()),
            self.ephemeral,
            self._idle_since_ns,
        )

    def copy(self, topic: TopicView) -> "Channel":
        """Return a copy, for a copy of its topic, to see what a change does. It has no consumers."""
        copy = Channel(topic, self.store, self.name, 0, private=self.private)
        copy.settings, copy._own_settings = self.settings, self._own_settings
        copy.messages.copy_from(self.messages)
        if (stream := self.stream) is not None:
            copy.stream = MoveStream(stream.moved, is_fixed=stream.is_fixed)
        copy.paused = self._is_paused
        copy._idle_since_ns = self._idle_since_ns
        return copy

    def restore(self, state: dict[str, Any], log_end: int, behind_ns: int = 0) -> None:
        """Load a snapshot into a channel that was created at the snapshot's cursor and has no messages.

        Args:
            state: A `ChannelState`, decoded from JSON.
            log_end: The log's next sequence. After a power cut with `--sync=interval` the snapshot may be ahead of the
                log; messages from `log_end` on are left out.
            behind_ns: How far the clock of its times was behind today's clock of the broker.

        Raises:
            KeyError, TypeError, ValueError: `state` is not a snapshot.
        """
        self.paused = bool(state["paused"])
        self.configure(state.get("settings", {}))
        for start, end in state["holes"]:
            self.skip(int(start), min(int(end), log_end))
        # The end of the broker is no failure of the messages that were in flight.
        unfinished: list[tuple[int, int, Reason | None]] = [
            (int(s), int(n), Reason(*reason) if reason else None)
            for s, n, *reason in state["unfinished"]
            if s < log_end
        ]
        deferred = DeferredMessages.restore(state["deferred"], log_end, behind_ns)
        if self.messages.order is not None:
            # The blocked ones, and those deferred by REQ: they come before later messages of their keys, so at once.
            returned = deferred.withdraw(deferred.returned())
            unfinished += [(sequence, attempts, None) for sequence, attempts, _ in returned]
        unfinished.sort(key=lambda each: each[0])
        self.messages.prefetched.update(
            (int(s), int(n)) for s, n in state.get("prefetched", ()) if s < log_end
        )
        moved = state.get("moved")
        for sequence, attempts, reason in unfinished:
            # A message of a stream may be at the target: it must not go to a dead-letter topic.
            self._return(WithdrawnMessage(sequence, attempts, reason if moved is None else None))
        self.messages.order_requeued()
        self.messages.deferred.merge(deferred)
        if moved is not None:
            self.hold(MoveStream(int(moved), is_fixed=True))
            self.messages.drop_moved(int(moved), now=True)
        self._idle_since_ns = idle_since_by_other_clock(int(state.get("idle_since", IN_USE)), behind_ns)
