"""Seek: moves a channel backward or forward in its topic's log."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from .batch import Batch
from .channel import Channel
from .cooperative import Runs, in_steps
from .cursor import spans
from .deferred import Block, DeferredMessages, Requeued
from .waiting_messages import WaitingMessages
from .withdrawn import WithdrawnMessage


class SeekResult(NamedTuple):
    """The effect of a seek on a channel.

    Attributes:
        from_sequence: The cursor before the seek.
        to_sequence: The cursor after the seek.
        delivered_again: Messages from `to_sequence` on that were finished, dropped or sampled out.
        skipped: Messages before `to_sequence` that were ready, in flight or deferred.
        in_flight: Messages in flight, which consumers can no longer finish.
    """

    from_sequence: int
    to_sequence: int
    delivered_again: int
    skipped: int
    in_flight: int


class Seek:
    """Moves a channel to a sequence, as if the channel had been created there.

    The channel delivers every message from the sequence on, with attempts counted from 1. Messages that their producer
    deferred and that are not due yet stay deferred. The channel drops every message before the sequence. Exception: if
    it seeks to the beginning of the log, it keeps its unfinished messages that are no longer in the log. Consumers can
    no longer finish messages in flight. Counters are kept.

    A channel may have a million messages, so a seek runs in steps, and the event loop serves other tasks between them:
    `prepare`, then optionally `move`, and always `close`. The channel delivers messages meanwhile. Changes to messages
    from `sequence` on need no tracking, because all of them are delivered again; newly deferred messages are tracked.
    A channel has one seek at a time.

    Args:
        channel: The channel to move.
        sequence: The target sequence; capped at the high watermark.
        now_ns: Messages deferred until this time or earlier become ready, Unix nanoseconds.
    """

    def __init__(self, channel: Channel, sequence: int, now_ns: int) -> None:
        messages = channel.messages
        self._channel = channel
        self._messages = messages
        self._now_ns = now_ns
        self._end = messages.end  # deferred messages that arrive later are in `_late`
        self._to = min(sequence, self._end)
        self._keeps_before = self._to <= channel.store.log.first_sequence
        self._late: list[tuple[range, int, Batch | None]] = []
        messages.arrivals = self._late
        # Set by `prepare`: the deferred messages and holes of the moved channel, and the number of unfinished
        # messages before `_to`.
        self._deferred = DeferredMessages()
        self._holes: deque[tuple[int, int]] = deque()
        self._hole_messages = 0
        self._before = 0
        # Messages that wait in the topic, also before the high watermark: it distributes them later. A private channel
        # has them already.
        self._undistributed = WaitingMessages() if channel.private else channel.topic.waiting.copy()
        self._undistributed_count = 0

    def prepare(self) -> Iterator[None]:
        """Compute the state after the seek, in steps."""
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
        """Detach the seek from its channel, whether the channel was moved or not."""
        if self._messages.arrivals is self._late:
            self._messages.arrivals = None

    def effect(self) -> SeekResult:
        """Return the effect of `move`. Call it after `prepare`."""
        messages = self._messages
        in_flight = messages.in_flight_count
        waiting = messages.depth + in_flight + len(messages.deferred)
        skipped = 0 if self._keeps_before else self._before
        again = max(0, messages.end - self._to - self._undistributed_count - (waiting - self._before))
        return SeekResult(messages.cursor.position, self._to, again, skipped, in_flight)

    def _kept_before(self) -> tuple[DeferredMessages, list[Requeued], list[WithdrawnMessage]]:
        """Return the unfinished messages before the beginning of the log that the channel keeps."""
        messages, to = self._messages, self._to
        if not self._keeps_before or not to:
            return DeferredMessages(), [], []
        withdrawn = [message for message in messages.withdrawn if message.sequence < to]
        return messages.deferred.before(to), messages.unanswered_before(to), withdrawn

    def move(self, channel: Channel) -> list[deque[Any]]:
        """Move the channel, or a copy of it. Returns its previous queues, as `Channel.empty`."""
        messages = channel.messages
        if messages is self._messages:
            self.close()  # messages that arrive from now on go to the moved channel
        deferred_before, requeued, withdrawn = self._kept_before()
        exhausted = set(messages.withdrawn.take_all_waiting())
        forgotten = channel.empty()
        messages.cursor.restart(self._to, self._holes.copy(), self._hole_messages)
        messages.deferred.merge(self._deferred.clone())
        messages.deferred.merge(deferred_before)
        for sequences, due_ns, held in self._late:
            messages.defer(sequences, due_ns, held)
        messages.requeued.add(requeued)
        messages.order_requeued()
        messages.withdrawn.hold(message for message in withdrawn if message not in exhausted)
        for message in withdrawn:
            if message in exhausted:
                messages.withdrawn.add_exhausted(message)
        return forgotten
