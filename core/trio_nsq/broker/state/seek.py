"""Moving a channel to another place in its topic's log, back or forth."""

from collections.abc import Iterator
from typing import NamedTuple

from .channel import Channel
from .channel_state import ChannelState
from .cursor import Cursor
from .requeued import Requeued
from .seek_plan import SeekPlan
from .steps import forget
from .withdrawn import Withdrawn


class Move(NamedTuple):
    """What moving a channel does.

    Attributes:
        from_sequence: Its cursor before.
        to_sequence: Where it begins again.
        delivered_again: Messages from there on that it was done with: finished, dropped or sampled out.
        skipped: Messages before it that it was not done with: ready, in flight or deferred.
        in_flight: Messages that consumers have now and cannot finish any more.
    """

    from_sequence: int
    to_sequence: int
    delivered_again: int
    skipped: int
    in_flight: int


class Seek:
    """Moves a channel to a sequence, as though it had been made there.

    Every message from there on is delivered, attempts counted from 1, whatever has become of it. Only those that their
    publisher deferred, and that are not due yet, wait for their time. With every message before it the channel is done;
    unless it goes back to the beginning of the log: then it keeps what it has of messages that are no longer there.
    What is in flight cannot be finished any more. Counters are kept.

    The channel may have a million messages, so this is done in steps, between which others have their turn:
    `prepare`, then `apply` or not, and `close` in any case. A channel has one seek at a time.

    Args:
        channel: Which one.
        sequence: Where to; the high watermark if that is lower.
        now_ns: Deferred messages that are due by then need not wait, Unix nanoseconds.
    """

    def __init__(self, channel: Channel, sequence: int, now_ns: int) -> None:
        messages = channel.messages
        to = min(sequence, messages.end)
        keeps_before = to <= channel.store.log.first_sequence
        self._channel = channel
        self._plan = messages.seek = SeekPlan(to, messages.end, keeps_before, now_ns)

    def prepare(self) -> Iterator[None]:
        """Find out what becomes of the messages, in steps."""
        messages = self._channel.messages
        return self._plan.steps(messages.cursor, messages.deferred, messages.unfinished_parts())

    def close(self) -> None:
        """Let the channel forget the seek, whether it was applied or not."""
        if self._channel.messages.seek is self._plan:
            self._channel.messages.seek = None

    @property
    def _keeps_before(self) -> bool:
        return self._plan.keeps_before and self._plan.to > 0

    def effect(self) -> Move:
        """What `apply` would do, once it is prepared."""
        messages, plan = self._channel.messages, self._plan
        in_flight = messages.in_flight_count
        waiting = messages.depth + in_flight + len(messages.deferred)
        skipped = 0 if plan.keeps_before else plan.before
        again = max(0, (messages.end - plan.to) - (waiting - plan.before))
        return Move(messages.cursor.position, plan.to, again, skipped, in_flight)

    def state(self) -> ChannelState:
        """The state that the channel would have after `apply`, to be saved before that."""
        messages, plan = self._channel.messages, self._plan
        cursor, deferred = Cursor(plan.to), plan.deferred.clone()
        cursor.restart(plan.to, plan.holes.copy(), plan.hole_messages)
        for sequences, due_ns, held in plan.late:
            deferred.add(due_ns, sequences, 0, held)
            cursor.skip(sequences.start, sequences.stop)
        requeued: list[Requeued] = []
        withdrawn: list[Withdrawn] = []
        if self._keeps_before:
            deferred.merge(messages.deferred.before(plan.to))
            requeued = messages.unanswered_before(plan.to)
            withdrawn = [message for message in messages.withdrawn if message.sequence < plan.to]
        return self._channel.make_state(
            cursor=cursor, requeued=requeued, in_flight=(), deferred=deferred, withdrawn=withdrawn
        )

    def apply(self) -> Iterator[None]:
        """Move the channel, all of it in the first step; in others free what was here before."""
        self.close()  # what arrives from now on arrives in the moved channel
        messages, plan = self._channel.messages, self._plan
        deferred = plan.deferred
        requeued: list[Requeued] = []
        if self._keeps_before:
            deferred.merge(messages.deferred.before(plan.to))
            requeued = messages.unanswered_before(plan.to)
        given_up, taken = messages.withdrawn.take_all_waiting(), list(messages.withdrawn)
        forgotten = self._channel.empty()
        messages.cursor.restart(plan.to, plan.holes, plan.hole_messages)
        messages.deferred.merge(deferred)
        for sequences, due_ns, held in plan.late:
            messages.defer(sequences, due_ns, held)
        if self._keeps_before:
            messages.requeued.add(requeued)
            messages.withdrawn.hold(message for message in taken if message.sequence < plan.to)
            for message in given_up:
                if message.sequence < plan.to:
                    messages.withdrawn.give_up(message)
        yield
        yield from forget(forgotten)
