"""Moving a channel to another place in its topic's log, back or forth."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .batch import Batch
from .channel import Channel
from .checkpoint import ChannelState
from .cursor import Cursor, spans
from .deferred import Block, DeferredMessages, Requeued, WaitingMessages
from .steps import Runs, forget, in_steps
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
    `prepare`, then `apply` or not, and `close` in any case. The channel goes on to deliver meanwhile. Changes to
    messages from `sequence` on do not matter, for all of them are delivered again; but deferred ones that arrive do.
    A channel has one seek at a time.

    Args:
        channel: Which one.
        sequence: Where to; the high watermark if that is lower.
        now_ns: Deferred messages that are due by then need not wait, Unix nanoseconds.
    """

    def __init__(self, channel: Channel, sequence: int, now_ns: int) -> None:
        messages = channel.messages
        self._channel = channel
        self._messages = messages
        self._now_ns = now_ns
        self._end = messages.end  # what arrives after this is in `_late`
        self._to = min(sequence, self._end)
        self._keeps_before = self._to <= channel.store.log.first_sequence
        self._late: list[tuple[range, int, Batch | None]] = []
        messages.arrivals = self._late
        # What `prepare` finds: the deferred messages and the holes of the moved channel, and how many unfinished
        # messages there are before `_to`.
        self._deferred = DeferredMessages()
        self._holes: deque[tuple[int, int]] = deque()
        self._hole_messages = 0
        self._before = 0
        # Messages that wait in the topic, also before the high watermark: it distributes them later. A private channel
        # has them already.
        self._undistributed = WaitingMessages() if channel.private else channel.topic.waiting.copy()
        self._undistributed_count = 0

    def prepare(self) -> Iterator[None]:
        """Find out what becomes of the messages, in steps."""
        messages, to = self._messages, self._to
        unfinished = messages.unfinished_parts()
        self._before = max(0, to - messages.cursor.position)
        for hole_messages in in_steps(
            min(end, to) - start for start, end in messages.cursor.holes if start < to
        ):
            self._before -= sum(hole_messages)
            yield
        for part in unfinished:
            for sequences in in_steps(part):
                self._before += sum(map(to.__gt__, sequences))
                yield
        runs = Runs()  # of the new holes
        for block in messages.deferred.blocks():
            self._take(block, runs)
            yield
        for entries in in_steps(self._undistributed.overlapping(to, self._end)):
            runs.add([(max(start, to), stop) for start, stop in entries])
            self._undistributed_count += sum(stop - max(start, to) for start, stop in entries)
            yield
        self._hole_messages += self._undistributed_count
        yield from runs.join(self._holes)

    def _take(self, block: Block, runs: Runs) -> None:
        to = self._to
        if block.highest < to:
            self._before += len(block)
            return
        if block.lowest < to:
            self._before += sum(map(to.__gt__, block.sequence))
        wanted = [
            due_ns > self._now_ns and to <= sequence < self._end and not attempts
            for due_ns, sequence, attempts in zip(block.due_ns, block.sequence, block.attempts, strict=True)
        ]
        part, held = self._messages.deferred.selected(block, wanted)
        if part:
            self._deferred.append(part, held)
            self._hole_messages += len(part)
            runs.add(list(spans(sorted(part.sequence))))

    def close(self) -> None:
        """Let the channel forget the seek, whether it was applied or not."""
        if self._messages.arrivals is self._late:
            self._messages.arrivals = None

    def effect(self) -> Move:
        """What `apply` would do, once it is prepared."""
        messages = self._messages
        in_flight = messages.in_flight_count
        waiting = messages.depth + in_flight + len(messages.deferred)
        skipped = 0 if self._keeps_before else self._before
        again = max(0, messages.end - self._to - self._undistributed_count - (waiting - self._before))
        return Move(messages.cursor.position, self._to, again, skipped, in_flight)

    def _kept_before(self) -> tuple[DeferredMessages, list[Requeued], list[Withdrawn]]:
        """What the channel keeps of messages before the beginning of the log."""
        messages, to = self._messages, self._to
        if not self._keeps_before or not to:
            return DeferredMessages(), [], []
        withdrawn = [message for message in messages.withdrawn if message.sequence < to]
        return messages.deferred.before(to), messages.unanswered_before(to), withdrawn

    def state(self) -> ChannelState:
        """The state that the channel would have after `apply`, to be saved before that."""
        cursor, deferred = Cursor(self._to), self._deferred.clone()
        cursor.restart(self._to, self._holes.copy(), self._hole_messages)
        for sequences, due_ns, held in self._late:
            deferred.add(due_ns, sequences, 0, held)
            cursor.skip(sequences.start, sequences.stop)
        deferred_before, requeued, withdrawn = self._kept_before()
        deferred.merge(deferred_before)
        return replace(
            self._channel.state_if_empty(),
            cursor=cursor.position,
            holes=cursor.holes,
            requeued=tuple(requeued),
            in_flight=(),
            deferred=deferred.copy(),
            withdrawn=tuple(withdrawn),
        )

    def apply(self) -> Iterator[None]:
        """Move the channel, all of it in the first step; in others free what was here before."""
        self.close()  # what arrives from now on arrives in the moved channel
        messages, deferred = self._messages, self._deferred
        deferred_before, requeued, withdrawn = self._kept_before()
        deferred.merge(deferred_before)
        given_up = set(messages.withdrawn.take_all_waiting())
        forgotten = self._channel.empty()
        messages.cursor.restart(self._to, self._holes, self._hole_messages)
        messages.deferred.merge(deferred)
        for sequences, due_ns, held in self._late:
            messages.defer(sequences, due_ns, held)
        messages.requeued.add(requeued)
        messages.withdrawn.hold(message for message in withdrawn if message not in given_up)
        for message in withdrawn:
            if message in given_up:
                messages.withdrawn.give_up(message)
        yield
        yield from forget(forgotten)
