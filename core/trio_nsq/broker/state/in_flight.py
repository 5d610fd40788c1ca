"""What one consumer has in flight: sent, and not answered yet.

A consumer that answers in the order of delivery costs one comparison of bytes for hundreds of messages: the FIN lines
that it sends are the lines its messages are expected to be finished by, see `Batch.take`. So what was sent together
is kept together for as long as it is answered in order, from its start on: a *run*. Once anything else happens to a
run, its messages are kept one by one, by their ids, and cost about as much as a dict. What was sent alone is kept so
from the beginning.

A message that is not the next one of the oldest run is found by bisection, and only the run that holds it is taken
apart: each message is taken apart but once, so no order of answers makes this expensive, nor do ids of no message.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from ...protocol.commands import FINISH_LINE_BYTES, finish_line_ids
from .batch import Batch
from .record_metadata import Reason
from .version import Version
from .withdrawn import Withdrawn

LOOKED_AT = 1000
"""Deliveries, or messages at the head of a queue, among which the oldest is looked for: that has a bounded cost."""
_ID_BYTES = 16


class Delivery:
    """What one send put in flight: one object for hundreds of messages.

    Args:
        lines: The FIN lines of these messages, whose ids ascend.
        first_sequence: That of the first; the others follow it.

    Attributes:
        left: How many of them are still in flight. In a run, these are the last ones.
        deadline_ns: When they go back to the channel.
        delivered_ns: When they were sent.
        attempts: How often they have been delivered, this time included.
        held: The batch they are in, if nothing but memory has it; None if it can be read again.
        timestamp_ns: When all of them were published, or 0 where nobody wants to know.
    """

    __slots__ = (
        "_ids",
        "attempts",
        "deadline_ns",
        "delivered_ns",
        "held",
        "left",
        "lines",
        "next_sequence",
        "timestamp_ns",
    )

    def __init__(
        self,
        lines: bytes,
        first_sequence: int,
        attempts: int,
        delivered_ns: int,
        deadline_ns: int,
        held: Batch | None = None,
        timestamp_ns: int = 0,
    ) -> None:
        count = len(lines) // FINISH_LINE_BYTES
        self.lines = lines
        self.next_sequence = first_sequence + count
        self.left = count
        self.attempts = attempts
        self.delivered_ns = delivered_ns
        self.deadline_ns = deadline_ns
        self.held = held
        self.timestamp_ns = timestamp_ns
        self._ids: list[bytes] | None = None  # of those that were left when it was taken apart

    @property
    def is_apart(self) -> bool:
        """It was a run, and is none any more."""
        return self._ids is not None

    @property
    def begins_at(self) -> int:
        """A sequence that nothing which is left comes before; in a run, that of the next message."""
        return self.next_sequence - (self.left if self._ids is None else len(self._ids))

    def take_apart(self) -> list[bytes]:
        """Make it a run no longer; the ids of what is left."""
        self._ids = finish_line_ids(self.lines[-self.left * FINISH_LINE_BYTES :])
        return self._ids

    def id_of(self, sequence: int) -> bytes:
        start = len(self.lines) - (self.next_sequence - sequence) * FINISH_LINE_BYTES
        return self.lines[start + 4 : start + 20]

    def holds(self, message_id: bytes) -> bool:
        """Whether it is one of those that are left; only of a run."""
        text = self.lines
        ids_at = range(len(text) - self.left * FINISH_LINE_BYTES + 4, len(text), FINISH_LINE_BYTES)
        index = bisect_left(ids_at, message_id, key=lambda at: text[at : at + _ID_BYTES])
        return index < self.left and text.startswith(message_id, ids_at[index])

    def sequence_of(self, message_id: bytes) -> int:
        """The sequence of one of these messages; not of those of a run."""
        if self._ids is None:
            return self.next_sequence - 1
        return self.next_sequence - len(self._ids) + bisect_left(self._ids, message_id)

    def touched(self, sequence: int, deadline_ns: int) -> "Delivery":
        """A delivery of this one message alone, with another deadline."""
        line = b"FIN %s\n" % self.id_of(sequence)
        return Delivery(
            line, sequence, self.attempts, self.delivered_ns, deadline_ns, self.held, self.timestamp_ns
        )

    def returned(self, sequence: int, reason: Reason) -> Withdrawn:
        return Withdrawn(sequence, self.attempts, reason, self.held)


_LEFT = attrgetter("left")
_BEGINS_AT = attrgetter("begins_at")
_LINES = attrgetter("lines")


class InFlight:
    """All of them, in the order of their deadlines, those of a delivery in the order of their ids.

    Attributes:
        version: The channel's, which sets it.
    """

    __slots__ = ("_apart", "_ascends", "_by_id", "_deliveries", "_runs", "count", "version")

    def __init__(self) -> None:
        self.version = Version()
        self.count = 0
        self._deliveries: dict[Delivery, None] = {}  # all, in the order of their deadlines
        self._runs: deque[Delivery] = deque()  # of these, those that are runs, in the same order
        self._ascends = (
            True  # so do their ids, from run to run; unless the node's number was changed in between
        )
        self._by_id: dict[bytes, Delivery] = {}  # the messages of the others
        self._apart = 0  # how many of the others once were runs

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, Delivery]]:
        """(sequence, delivery) of each message."""
        left: dict[Delivery, list[int]] = {}
        for message_id, delivery in self._by_id.items():
            left.setdefault(delivery, []).append(delivery.sequence_of(message_id))
        for delivery in self._deliveries:
            for sequence in left[delivery] if delivery in left else self._left_of(delivery):
                yield sequence, delivery

    def put(self, delivery: Delivery) -> None:
        self.version.increment()
        self._deliveries[delivery] = None
        self.count += delivery.left
        if delivery.left > 1:
            runs = self._runs
            if not runs:
                self._ascends = True
            elif delivery.lines < runs[-1].lines:
                self._ascends = False
            runs.append(delivery)
        else:
            self._by_id[delivery.lines[4:20]] = delivery

    def clear(self) -> None:
        self.version.increment()
        self.count = self._apart = 0
        self._deliveries.clear()
        self._runs.clear()
        self._by_id.clear()

    # ------------------------------------------------------------------ answers

    def finish(self, lines: bytes, finished: Counter[Delivery] | None = None) -> list[bytes]:
        """Forget the messages of these FIN lines. Returns the ids that are not in flight, in order.

        `finished` is told how many messages of which delivery were.
        """
        self.version.increment()
        failed: list[bytes] = []
        at, end = 0, len(lines)
        while at < end:
            if not self._runs:
                self._finish_by_id(lines[at:], finished, failed)
                break
            run = self._runs[0]
            text, left_bytes = run.lines, run.left * FINISH_LINE_BYTES
            if end - at < left_bytes:
                matched_bytes = end - at
                matches = text.startswith(lines[at:], len(text) - left_bytes)
            else:
                matched_bytes = left_bytes
                matches = lines.startswith(text[-left_bytes:], at)
            if matches:
                at += matched_bytes
                self._finish_run(run, matched_bytes // FINISH_LINE_BYTES, finished)
                continue
            # Up to where it goes on with this run, the lines are about other messages.
            start = len(text) - left_bytes
            goes_on = lines.find(text[start : start + FINISH_LINE_BYTES], at)
            if goes_on == at:
                self._take_apart(0)
            else:
                upto = end if goes_on < 0 else goes_on
                self._finish_by_id(lines[at:upto], finished, failed)
                at = upto
        return failed

    def _finish_run(self, run: Delivery, count: int, finished: Counter[Delivery] | None) -> None:
        if finished is not None:
            finished[run] += count
        self.count -= count
        run.left -= count
        if not run.left:
            self._runs.popleft()
            del self._deliveries[run]

    def _finish_by_id(self, lines: bytes, finished: Counter[Delivery] | None, failed: list[bytes]) -> None:
        if len(lines) == FINISH_LINE_BYTES and finished is None:
            if self._take_by_id(lines[4:20]) is None:
                failed.append(lines[4:20])
            return
        ids = iter(finish_line_ids(lines))
        found: deque[Delivery] = deque()
        while True:
            try:
                # One C loop over all of them; a KeyError has used up just the id that is not there.
                found.extend(map(self._by_id.pop, ids))
                break
            except KeyError as exc:
                if self._find_by_id(exc.args[0]) is None:
                    failed.append(exc.args[0])
                else:
                    found.append(self._by_id.pop(exc.args[0]))
        if finished is not None:
            finished.update(found)
        self.count -= len(found)
        if self._apart:
            for delivery in found:
                delivery.left -= 1
                if not delivery.left:
                    self._remove(delivery)
        else:
            deque(map(self._deliveries.pop, found), maxlen=0)  # each of one message

    def _remove(self, delivery: Delivery) -> None:
        """Forget one that is not a run, and of which nothing is left."""
        del self._deliveries[delivery]
        self._apart -= delivery.is_apart

    def _take_apart(self, index: int) -> None:
        run = self._runs[index]
        del self._runs[index]
        self._by_id.update(dict.fromkeys(run.take_apart(), run))
        self._apart += 1

    def _run_holding(self, message_id: bytes) -> int | None:
        """The place of the run that holds a message; None if there is none."""
        runs = self._runs
        if self._ascends:
            index = bisect_left(runs, b"FIN %s\xff" % message_id, key=_LINES) - 1
            return index if index >= 0 and runs[index].holds(message_id) else None
        return next((index for index, run in enumerate(runs) if run.holds(message_id)), None)

    def _find_by_id(self, message_id: bytes) -> Delivery | None:
        delivery = self._by_id.get(message_id)
        if delivery is None and (index := self._run_holding(message_id)) is not None:
            delivery = self._runs[index]
            self._take_apart(index)
        return delivery

    def find(self, message_id: bytes) -> Delivery | None:
        """What a message was sent with; None if it is not in flight."""
        return self._runs[0] if self._comes_next(message_id) else self._find_by_id(message_id)

    def holds(self, message_id: bytes) -> bool:
        """Whether a message is in flight; no run is taken apart."""
        return message_id in self._by_id or self._run_holding(message_id) is not None

    def _comes_next(self, message_id: bytes) -> bool:
        """It is the first message of the oldest run."""
        return bool(self._runs) and self._runs[0].id_of(self._runs[0].begins_at) == message_id

    def take(self, message_id: bytes) -> tuple[int, Delivery] | None:
        """Forget one message; its sequence, and what it was sent with. None if it is not in flight."""
        self.version.increment()
        if self._comes_next(message_id):
            run = self._runs[0]
            sequence = run.begins_at
            self._finish_run(run, 1, None)
            return sequence, run
        delivery = self._take_by_id(message_id)
        return (delivery.sequence_of(message_id), delivery) if delivery is not None else None

    def _take_by_id(self, message_id: bytes) -> Delivery | None:
        delivery = self._find_by_id(message_id)
        if delivery is not None:
            del self._by_id[message_id]
            self.count -= 1
            delivery.left -= 1
            if not delivery.left:
                self._remove(delivery)
        return delivery

    def touch(self, message_id: bytes, deadline_ns: int) -> None:
        """Give a message that is in flight another deadline, later than its own. It is the last of all then."""
        taken = self.take(message_id)
        assert taken is not None
        sequence, delivery = taken
        self.put(delivery.touched(sequence, deadline_ns))

    # ------------------------------------------------------------------ time

    @property
    def next_deadline_ns(self) -> int | None:
        """That of the first, which is the earliest but for touched messages; None if nothing is in flight."""
        for delivery in self._deliveries:
            return delivery.deadline_ns
        return None

    def time_out(self, now_ns: int, at_most: int) -> list[tuple[int, Delivery]]:
        """Forget what is due, up to the first that is not; (sequence, delivery) of each."""
        due: list[Delivery] = []
        count = 0
        for delivery in self._deliveries:
            if delivery.deadline_ns > now_ns or count >= at_most:
                break
            due.append(delivery)
            count += delivery.left
        taken: list[tuple[int, Delivery]] = []
        if due:
            self.version.increment()
        for delivery in due:
            sequences = list(islice(self._left_of(delivery), at_most - len(taken)))
            taken += [(sequence, delivery) for sequence in sequences]
            if self._runs and self._runs[0] is delivery:
                self._finish_run(delivery, len(sequences), None)
                continue
            for sequence in sequences:
                del self._by_id[delivery.id_of(sequence)]
            self.count -= len(sequences)
            delivery.left -= len(sequences)
            if not delivery.left:
                self._remove(delivery)
        return taken

    # ------------------------------------------------------------------ what is in flight

    def _left_of(self, delivery: Delivery) -> Iterator[int]:
        """The sequences of a delivery that are in flight, ascending."""
        begins_at = delivery.begins_at
        if not delivery.is_apart:
            yield from range(begins_at, begins_at + delivery.left)
        else:
            for sequence in range(begins_at, delivery.next_sequence):
                if self._by_id.get(delivery.id_of(sequence)) is delivery:
                    yield sequence

    @property
    def oldest(self) -> int | None:
        """The lowest sequence of the first thousand deliveries; None if there is none."""
        oldest: int | None = None
        for delivery in sorted(islice(self._deliveries, LOOKED_AT), key=_BEGINS_AT):
            # What began before the oldest found so far, and overlaps with it, is a single message, taken out of it.
            if oldest is not None and oldest <= delivery.begins_at:
                break
            oldest = next(self._left_of(delivery))
        return oldest

    def copy(self) -> "InFlightCopy":
        return InFlightCopy(tuple(self._runs), tuple(map(_LEFT, self._runs)), self._by_id.copy())


class InFlightCopy:
    """What was in flight at one moment: (sequence, attempts) of each message. Making it is left to C."""

    __slots__ = ("_by_id", "_left", "_runs")

    def __init__(
        self, runs: tuple[Delivery, ...], left: tuple[int, ...], by_id: dict[bytes, Delivery]
    ) -> None:
        self._runs = runs
        self._left = left
        self._by_id = by_id

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for run, left in zip(self._runs, self._left, strict=True):
            next_sequence = run.next_sequence
            for sequence in range(next_sequence - left, next_sequence):
                yield sequence, run.attempts
        for message_id, delivery in self._by_id.items():
            yield delivery.sequence_of(message_id), delivery.attempts
